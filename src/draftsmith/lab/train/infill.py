"""Rearranges code for infilling: prefix, suffix, middle. Source: SDSAT, section 3.1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_KNOWN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
    ("<|fim▁begin|>", "<|fim▁hole|>", "<|fim▁end|>"),
)
"""Prefix, suffix and middle markers of models that have them."""

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Markers:
    """Ids of the markers of the three parts."""

    prefix: int
    suffix: int
    middle: int

    @classmethod
    def of(cls, vocabulary: Mapping[str, int]) -> Markers | None:
        """Find the markers in a tokenizer's vocabulary; None if it has none that we know."""
        for names in _KNOWN:
            if all(name in vocabulary for name in names):
                return cls(*(vocabulary[name] for name in names))
        return None


def infilled(
    text: str,
    share: float,
    markers: Markers | None,
    encode: Encode,
    encode_inside: Encode,
    rng: np.random.Generator,
) -> list[int]:
    """Encode a text: with probability share/2 as PSM, with share/2 as SPM, else as it is.

    Both cuts are uniform over the places between characters. PSM is prefix, suffix, middle. SPM is
    suffix, then prefix and middle as one piece (Bavarian et al. 2022, and Code Llama).
    `encode_inside` adds no space before a text, as some tokenizers do at its beginning.
    """
    drawn = rng.random()
    if markers is None or drawn >= share:
        return list(encode(text))
    first, second = sorted(rng.integers(0, len(text) + 1, 2).tolist())
    prefix, middle, suffix = text[:first], text[first:second], text[second:]
    if drawn < share / 2:
        start, end = (
            [*encode(prefix), markers.suffix, *encode_inside(suffix)],
            encode_inside(middle),
        )
    else:
        start, end = [markers.suffix, *encode_inside(suffix)], encode(prefix + middle)
    return [markers.prefix, *start, markers.middle, *end]
