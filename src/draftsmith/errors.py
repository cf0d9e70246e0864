"""Everything draftsmith raises on purpose.

DraftsmithError
├── OptionError (ValueError)      a value or name the caller gave does not fit
│   └── UnknownName               … an unknown drafter or option; names the nearest known one
├── PromptError (ValueError)      the prompt is empty, too long, or of the wrong type
├── LoadError                     a model, tokenizer or file cannot be read
├── WriteError (OSError)          a file cannot be written: no room, no permission, no folder
├── UnsupportedError              the model cannot do what was asked, and why
├── DrafterError                  a drafter broke its contract
│   └── DrafterStalled            … held up a pass; later answers ask it again
├── TrainingError                 a training cannot go on: its loss is no number any more
└── GenerationInterrupted         stopped half-way; `.partial` holds what was generated
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class DraftsmithError(Exception):
    """Base of every error that draftsmith raises on purpose."""


class OptionError(DraftsmithError, ValueError):
    """An option has a value that cannot work; the message names both and what would."""


class UnknownName(OptionError):
    """A drafter or an option that does not exist; the message suggests the nearest that does."""

    def __init__(
        self, kind: str, name: str, known: Iterable[str], instead: str | None = None
    ) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        if instead is not None:
            hint = f"{instead[0].upper()}{instead[1:]}. "
        listed = ", ".join(names) if names else "none"
        super().__init__(f"unknown {kind} {name!r}. {hint}Known: {listed}.")
        self.kind, self.name, self.suggestion = kind, name, near[0] if near else None


class PromptError(DraftsmithError, ValueError):
    """The prompt cannot be used: empty, longer than the context, or of the wrong type."""


class LoadError(DraftsmithError):
    """A model, a tokenizer or a file could not be read."""


class WriteError(DraftsmithError, OSError):
    """A file could not be written; the message names it and says why."""


class UnsupportedError(DraftsmithError):
    """The model cannot do what was asked; the message says why."""


class DrafterError(DraftsmithError):
    """A drafter broke its contract (see `draftsmith.testing.check_drafter`)."""


class DrafterStalled(DrafterError):
    """A drafter held up a pass for so long that its answers go on without it."""


class TrainingError(DraftsmithError):
    """A training diverged; the message says in which step, and what to change."""


class GenerationInterrupted(DraftsmithError):
    """Generation failed half-way; `partial` holds the results generated so far."""

    def __init__(self, message: str, partial: Any) -> None:
        super().__init__(message)
        self.partial = partial


def first_line(error: BaseException) -> str:
    """What an error of somebody else's code says first, or what it is if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
