"""What one loaded model can do, and why not more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftsmith.core.target import Shape

CacheKind = Literal["packed", "own", "replay", "none"]
"""Where a model's past is kept.

packed: our store for many rows. own: the model's cache, one per row. replay: the same, with a
recurrent state that cannot be cut. none: no cache.
"""

_SHAPES = {
    "tree": "verifies draft trees in one pass",
    "chain": "verifies single branches only",
    "plain": "decodes one token per pass; drafts are not used",
}
_CACHES = {
    "packed": "keeps keys and values in rows that can be cut at no cost",
    "own": "keeps a cache of its own per sequence; rejected drafts are cut off",
    "replay": "keeps a cache of its own per sequence; after a rejected draft, it replays the "
    "accepted tokens",
    "none": "has no usable cache: every step computes the whole sequence again",
}
DEPENDENT_ROWS = "rows of a pass change each other"
"""Beginning of the reason against drafts for a model with rows that depend on each other."""
_BATCHES = (
    "A batch runs one sequence after the other.",
    "Sequences of a batch share passes, without padding.",
)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Ways to run a model, found by a self-test at load and never by its name alone."""

    shape: Shape
    """Drafts that it can verify in one pass."""
    attention: str
    """"draftsmith"; for chain and plain targets the implementation that the model came with."""
    cache: CacheKind
    reasons: tuple[str, ...] = ()
    """Why not more: one sentence per refusal, in the order of the self-test."""
    position_sizes: tuple[float, ...] = ()
    """Numbers (of the model's dtype) per position in keys and values, by layer.

    Empty if the model's cache does not show them.
    """
    windows: bool = False
    """Whether some layers see only the latest tokens."""
    searched: str = ""
    """Why the whole model was searched instead of a small copy; empty if it was not."""

    @property
    def packed(self) -> bool:
        """Whether rows share passes; otherwise a batch runs row by row."""
        return self.cache == "packed"

    @property
    def rereads(self) -> str | None:
        """Which prompts are computed again although they start like an earlier one; None: none."""
        if self.shape == "plain":
            return "Every prompt is computed again, even if it starts like an earlier one."
        if self.cache == "own" or (self.packed and not self.windows):
            return None
        kept = (
            "Its state is kept at the end of each prompt and answer"
            if self.cache == "replay"
            else "Layers with a window keep only the end of an earlier prompt"
        )
        return f"{kept}: a prompt that differs before that point is computed again."

    def explain(self) -> list[str]:
        """Return the capabilities as sentences for a person."""
        lines = [
            f"It {_SHAPES[self.shape]}.",
            f"It {_CACHES[self.cache]}.",
            f"Attention runs as {self.attention!r}.",
            _BATCHES[self.packed],
        ]
        if self.rereads:
            lines.append(self.rereads)
        if self.searched:
            lines.append(f"The whole model was searched, which takes longer: {self.searched}.")
        return lines + [f"Refused: {reason}" for reason in self.reasons]
