"""The exceptions that draftsmith raises.

```text
DraftsmithError
├── OptionError (ValueError)      an option has a wrong value or does not fit another one
│   └── UnknownName               … there is no such drafter or option; names the nearest one
├── PromptError (ValueError)      the prompt is empty, too long, or of the wrong type
├── LoadError                     a model, tokenizer or file cannot be read
├── WriteError (OSError)          a file cannot be written: no space, no permission, no folder
├── UnsupportedError              the model cannot do what was requested; names the reason
├── DrafterError                  a drafter broke its contract
│   └── DrafterStalled            … delayed a pass too long; later answers use it again
├── TrainingError                 a training cannot continue: its loss is not finite
└── GenerationInterrupted         failed during generation; `.partial` holds the results so far
```
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class DraftsmithError(Exception):
    """Base of all exceptions that draftsmith raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without calling `__init__`, because its arguments are not kept."""
        return _rebuilt, (type(self), self.args), self.__dict__


def _rebuilt(kind: type[DraftsmithError], args: tuple[Any, ...]) -> DraftsmithError:
    return kind.__new__(kind, *args)


class OptionError(DraftsmithError, ValueError):
    """An option has a wrong value; the message names the option, its value and valid values."""


class UnknownName(OptionError):
    """There is no such drafter or option; the message suggests the nearest name."""

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
    """A file could not be written; the message names the file and the reason."""


class UnsupportedError(DraftsmithError):
    """The model cannot do what was requested; the message names the reason."""


class DrafterError(DraftsmithError):
    """A drafter broke its contract (see `draftsmith.testing.check_drafter`)."""


class DrafterStalled(DrafterError):
    """A drafter delayed a pass so long that the answers of the pass continue without it."""


class TrainingError(DraftsmithError):
    """A training diverged; the message names the step and what to change."""


class GenerationInterrupted(DraftsmithError):
    """Generation failed after some tokens; `partial` holds the results so far."""

    def __init__(self, message: str, partial: Any) -> None:
        super().__init__(message)
        self.partial = partial


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, up to 200 characters; its type if it is empty.

    A line that ends with a colon is followed by the next one.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    return first[:200] or type(error).__name__


@contextmanager
def extra(name: str, need: str, kind: type[DraftsmithError] = OptionError) -> Iterator[None]:
    """Convert ImportError to an error that says which extra to install.

    `need` begins the message: "a grammar needs llguidance".
    """
    try:
        yield
    except ImportError as error:
        why, install = first_line(error), f"pip install 'draftsmith[{name}]'"
        raise kind(f"{need}, which cannot be imported ({why}): {install}") from error
