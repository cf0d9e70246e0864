"""What one loaded model can do, and why not more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftsmith.core.target import Shape

CacheKind = Literal["rows", "replay", "none"]
"""rows: our cache of many sequences; replay: the model's own, one each; none: no cache at all."""

_SHAPES = {
    "tree": "verifies draft trees in one pass",
    "chain": "verifies single branches only",
    "plain": "decodes one token per pass; drafts are not used",
}
_CACHES = {
    "rows": "keeps keys and values in rows that rewind for free",
    "replay": "keeps a recurrent state per sequence; rejected drafts are undone by replaying",
    "none": "has no usable cache: every step computes the whole sequence again",
}


_BATCHES = (
    "A batch runs one sequence after the other.",
    "Sequences of a batch share passes, padded to the widest and the longest.",
    "Sequences of a batch share passes, without padding.",
)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """How a model is run. Found by a self-test at load, never guessed from its name alone."""

    shape: Shape
    """Drafts it can verify in one pass."""
    attention: str
    """draftsmith, sdpa or eager; for chain and plain targets the implementation it came with."""
    cache: CacheKind
    batch: bool
    """Whether several sequences share a pass; otherwise a batch runs row by row."""
    reasons: tuple[str, ...] = ()
    """Why not more, one sentence per refusal, in the order the self-test met them."""
    packed: bool = False
    """Whether the tokens of such a pass are one sequence, without padding."""
    position_sizes: tuple[float, ...] = ()
    """Keys and values of a position, layer by layer, in numbers of the model's dtype, which may
    change; empty: its cache does not show them."""

    def explain(self) -> list[str]:
        """The same in sentences for a person."""
        lines = [
            f"It {_SHAPES[self.shape]}.",
            f"It {_CACHES[self.cache]}.",
            f"Attention runs as {self.attention!r}.",
            _BATCHES[self.batch + self.packed],
        ]
        return lines + [f"Refused: {reason}" for reason in self.reasons]
