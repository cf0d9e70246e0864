"""How two vocabularies compare, by themselves and on a text, and which algorithm suits the pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from draftsmith.text.vocab import Intersection, Vocabulary, intersect

PIECE = 100
"""Characters that are encoded and decoded at a time (appendix F)."""

LARGE = 0.75
"""Share of a text's tokens in T ∩ D that is a large overlap.

The least of the pairs that the paper runs is 0.77 (table 10).
"""


@dataclass(frozen=True, eq=False)
class Usage:
    """A vocabulary on a text."""

    vocabulary: Vocabulary
    text: str
    """Not empty."""

    @cached_property
    def ids(self) -> list[int]:
        """The text in tokens, without those that the model lacks."""
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
        """The pieces that do not survive encoding and decoding, and what becomes of them.

        Each is taken for the middle of a text, as SLEM does: no space is put before it. None: the
        tokenizer is injective on this text (section 3.2).
        """
        known = self.vocabulary
        written = (known.bytes_of(known.encode(piece)) for piece in self.pieces)
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
        """The share of T ∩ D among the different target tokens of the text (table 10)."""
        return _mapped(self.target.ids, self.shared.to_drafter)

    @cached_property
    def of_drafter_text(self) -> float:
        """The share of T ∩ D among the different drafter tokens of the text."""
        return _mapped(self.drafter.ids, self.shared.to_target)

    @cached_property
    def advice(self) -> tuple[str, str]:
        """The algorithm of `draft_model` that suits the pair, and why (table 4)."""
        if self.shared.same:
            return "standard", "the two vocabularies are the same"
        if self.drafter.vocabulary.longest == 1:
            return "slrs", (
                "the drafter's tokens are single bytes, so what it thinks of a target token is the "
                "product along one path"
            )
        # A target token outside is never accepted, a drafter token outside never drafted.
        overlap = min(self.of_target_text, self.of_drafter_text)
        if overlap >= LARGE:
            return "tli", (
                "the overlap is large: both find nearly all of their tokens of such a text in it"
            )
        side = "target" if overlap == self.of_target_text else "drafter"
        why = f"the overlap is small: the {side} misses {1 - overlap:.0%} of its tokens in it"
        changing = [
            name
            for name, usage in (("target", self.target), ("drafter", self.drafter))
            if usage.changed
        ]
        if changing:
            who = " and the ".join(changing)
            why += f"; that the {who} cannot write every text will cost acceptance"
        return "slem", why


def count(vocabulary: Vocabulary) -> int:
    """Tokens of a vocabulary: different byte strings and special tokens, without padding."""
    return len(vocabulary.ids) + len(vocabulary.special)


def _mapped(ids: Sequence[int], other: Tensor) -> float:
    used = sorted(set(ids))
    return float((other[used] >= 0).double().mean()) if used else 0.0
