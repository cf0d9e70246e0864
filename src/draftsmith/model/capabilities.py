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
"""packed: ours, of many sequences; own: the model's, one each; replay: likewise, with a state that
cannot be cut; none: no cache at all."""

_SHAPES = {
    "tree": "verifies draft trees in one pass",
    "chain": "verifies single branches only",
    "plain": "decodes one token per pass; drafts are not used",
}
_CACHES = {
    "packed": "keeps keys and values in rows that rewind for free",
    "own": "keeps a cache of its own per sequence; rejected drafts are cut off",
    "replay": "keeps a cache of its own per sequence; rejected drafts are undone by replaying",
    "none": "has no usable cache: every step computes the whole sequence again",
}


_REMEMBERED = ("shape", "attention", "cache", "reasons")
"""Fields that the architecture decides."""

_BATCHES = (
    "A batch runs one sequence after the other.",
    "Sequences of a batch share passes, without padding.",
)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """How a model is run. Found by a self-test at load, never guessed from its name alone."""

    shape: Shape
    """Drafts it can verify in one pass."""
    attention: str
    """draftsmith; for chain and plain targets the implementation it came with."""
    cache: CacheKind
    reasons: tuple[str, ...] = ()
    """Why not more, one sentence per refusal, in the order the self-test met them."""
    position_sizes: tuple[float, ...] = ()
    """Keys and values of a position, layer by layer, in numbers of the model's dtype, which may
    change; empty: its cache does not show them."""
    windows: bool = False
    """Whether some layers see the latest tokens only."""
    searched: str = ""
    """Why the self-test searched the whole model, not a small copy of it; empty: it did not."""

    def remember(self, path: Path | None, key: object) -> None:
        """Write them to a file, with what they hold for; if that fails, nothing is lost."""
        if path is None:
            return
        found = {name: getattr(self, name) for name in _REMEMBERED}
        with suppress(WriteError), writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps({"key": key, "found": found}) + "\n")

    @classmethod
    def recall(cls, path: Path | None, key: object) -> Capabilities | None:
        """What `remember` wrote for the same key; None where the file says nothing of the kind."""
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
        """Whether every entry is of its type, and no two contradict each other."""
        return (
            self.shape in _SHAPES
            and self.cache in _CACHES
            and all(isinstance(text, str) for text in (self.attention, *self.reasons))
            and (self.shape == "tree") == self.packed
        )

    @property
    def packed(self) -> bool:
        """Whether several sequences share a pass, their tokens in one; else a batch runs row by
        row."""
        return self.cache == "packed"

    @property
    def rereads(self) -> str | None:
        """Which prompts are read again although they begin like an earlier one; None: none."""
        if self.shape == "plain":
            return "Every prompt is read whole: one that begins like an earlier one is read again."
        if self.cache == "own" or (self.packed and not self.windows):
            return None
        kept = (
            "Its state is kept where a prompt and where an answer ends"
            if self.cache == "replay"
            else "Layers with a window keep the last part of an earlier prompt"
        )
        return f"{kept}: a prompt that parts from it before is read again."

    def explain(self) -> list[str]:
        """The same in sentences for a person."""
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
