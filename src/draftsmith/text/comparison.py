"""Comparison of two vocabularies, on their own and on a text, with advice on the algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from draftsmith.text.vocab import Intersection, Vocabulary, intersect

PIECE = 100
"""Characters that are encoded and decoded at a time (appendix F)."""

LARGE = 0.75
"""Minimum share of a text's tokens in T ∩ D for a large overlap.

The smallest share of the pairs in the paper is 0.77 (table 10).
"""


@dataclass(frozen=True, eq=False)
class Usage:
    """A vocabulary applied to a text."""

    vocabulary: Vocabulary
    text: str
    """The text; not empty."""

    @cached_property
    def ids(self) -> list[int]:
        """The tokens of the text, without those that the model lacks."""
        return self.vocabulary.encode_known(self.text)

    @property
    def tokens_per_character(self) -> float:
        return len(self.ids) / len(self.text)

    @cached_property
    def pieces(self) -> list[str]:
        """The text in pieces of 100 characters."""
        return [self.text[at : at + PIECE] for at in range(0, len(self.text), PIECE)]

    @cached_property
    def changed(self) -> list[tuple[str, str]]:
        """The pieces that encoding and decoding changes, with their changed texts.

        Each is treated as the middle of a text, as in SLEM: no space is added before it. If the
        list is empty, the tokenizer is injective on this text (section 3.2).
        """
        vocabulary = self.vocabulary
        written = (vocabulary.bytes_of(vocabulary.encode(piece)) for piece in self.pieces)
        back = (text.decode("utf-8", "replace") for text in written)
        return [pair for pair in zip(self.pieces, back, strict=True) if pair[0] != pair[1]]


@dataclass(frozen=True, eq=False)
class Comparison:
    """A target's and a drafter's vocabulary, T and D, on the same text."""

    target: Usage
    drafter: Usage

    @cached_property
    def shared(self) -> Intersection:
        """T ∩ D."""
        return intersect(self.target.vocabulary, self.drafter.vocabulary)

    @property
    def of_target(self) -> float:
        """|T ∩ D| / |T| (table 9)."""
        return self.shared.size / count(self.target.vocabulary)

    @property
    def of_drafter(self) -> float:
        """|T ∩ D| / |D|."""
        return self.shared.size / count(self.drafter.vocabulary)

    @cached_property
    def of_target_text(self) -> float:
        """Share of tokens in T ∩ D among the distinct target tokens of the text (table 10)."""
        return _mapped(self.target.ids, self.shared.to_drafter)

    @cached_property
    def of_drafter_text(self) -> float:
        """Share of tokens in T ∩ D among the distinct drafter tokens of the text."""
        return _mapped(self.drafter.ids, self.shared.to_target)

    @cached_property
    def advice(self) -> tuple[str, str]:
        """The algorithm of `draft_model` for the pair, and the reason (table 4)."""
        if self.shared.same:
            return "standard", "the two vocabularies are the same"
        if self.drafter.vocabulary.longest == 1:
            return "slrs", (
                "the drafter's tokens are single bytes, so its probability of a target token is a "
                "product along one path"
            )
        # A target token outside is never accepted; a drafter token outside is never drafted.
        overlap = min(self.of_target_text, self.of_drafter_text)
        if overlap >= LARGE:
            return "tli", (
                "the overlap is large: both share nearly all tokens that such a text uses"
            )
        side = "target" if overlap == self.of_target_text else "drafter"
        why = f"the overlap is small: {1 - overlap:.0%} of the {side}'s tokens are not in it"
        changing = [
            name
            for name, usage in (("target", self.target), ("drafter", self.drafter))
            if usage.changed
        ]
        if changing:
            names = " and the ".join(changing)
            why += f"; the {names} cannot write every text, which reduces acceptance"
        return "slem", why


def count(vocabulary: Vocabulary) -> int:
    """Return the number of tokens: distinct byte strings and special tokens, without padding."""
    return len(vocabulary.ids) + len(vocabulary.special)


def _mapped(ids: Sequence[int], other: Tensor) -> float:
    used = sorted(set(ids))
    return float((other[used] >= 0).double().mean()) if used else 0.0
