"""What one loaded model can do, and why not more."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftsmith.core.target import Shape
from draftsmith.errors import WriteError
from draftsmith.storage import write_text, writing

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


_REMEMBERED = ("shape", "attention", "cache", "reasons")
"""Fields that depend on the architecture alone."""

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

    def remember(self, path: Path | None, key: object) -> None:
        """Write the capabilities and their key to a file; failures are ignored."""
        if path is None:
            return
        found = {name: getattr(self, name) for name in _REMEMBERED}
        with suppress(WriteError), writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps({"key": key, "found": found}) + "\n")

    @classmethod
    def recall(cls, path: Path | None, key: object) -> Capabilities | None:
        """Read what `remember` wrote for the same key; None if there is nothing valid."""
        if path is None:
            return None
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            values = known["found"]
            reasons = values.pop("reasons")
            found = cls(**values, reasons=tuple(reasons))
            right = known["key"] == key and values.keys() | {"reasons"} == set(_REMEMBERED)
            return found if right and isinstance(reasons, list) and found.consistent else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    @property
    def consistent(self) -> bool:
        """Whether every entry has its type, and no two contradict each other."""
        return (
            self.shape in _SHAPES
            and self.cache in _CACHES
            and all(isinstance(text, str) for text in (self.attention, *self.reasons))
            and (self.shape == "tree") == self.packed
        )

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
