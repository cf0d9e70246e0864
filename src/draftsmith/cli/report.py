"""How a command ends: one line on stderr and an exit code, never a traceback for known errors."""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from typing import Any

from rich.console import Console
from rich.text import Text

from draftsmith.errors import (
    DraftsmithError,
    LoadError,
    OptionError,
    PromptError,
    UnsupportedError,
    WriteError,
)

FAILED = 1
"""Something broke while generating."""
BAD_INPUT = 2
INTERRUPTED = 130
"""128 + SIGINT, as shells count it."""
PIPE_CLOSED = 141
"""128 + SIGPIPE, what `cat` would end with."""

STOPPED = "stopped by Ctrl-C"
_BAD_INPUT = (OptionError, PromptError, LoadError, UnsupportedError, WriteError)


def ending(error: BaseException) -> int:
    """Print why a command failed to stderr and return its exit code; re-raise unexpected errors."""
    match error:
        case DraftsmithError():
            show_error(str(error))
            return BAD_INPUT if isinstance(error, _BAD_INPUT) else FAILED
        case KeyboardInterrupt():
            note(STOPPED)
            return INTERRUPTED
        case BrokenPipeError():
            _drop_stdout()
            return PIPE_CLOSED
        case OSError():  # stdout may be a file on a full disk
            show_error(str(error))
            _drop_stdout()
            return FAILED
        case MemoryError() | RuntimeError() if _out_of_memory(error):
            details = (str(error).splitlines() or ["no details"])[0]
            show_error(
                f"out of memory ({details}); "
                "try a smaller model, --dtype bfloat16 or a shorter prompt"
            )
            return FAILED
    raise error


class Output(Console):
    """A console that raises BrokenPipeError, as a file does, and does not end the process."""

    def on_broken_pipe(self) -> None:
        raise


def _drop_stdout() -> None:
    # Python flushes stdout once more at exit, and would complain there.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _out_of_memory(error: BaseException) -> bool:
    # By name: importing torch just to compare classes would cost a second.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    named = bool(kinds & {"MemoryError", "OutOfMemoryError"})
    return named or "can't allocate memory" in str(error)


def interactive(console: Console) -> bool:
    """Whether it is a terminal that can redraw lines. FORCE_COLOR makes files "terminals", too."""
    return console.file.isatty() and not console.is_dumb_terminal


@cache
def stderr() -> Console:
    """The console for all but the answer; only one, so that notes stand above a spinner."""
    return stdout(stderr=True)


def stdout(*, stderr: bool = False) -> Console:
    """The console for the answer."""
    console = Output(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.file.isatty():
        console.width = 10_000  # files and pipes get whole lines
    return console


def print_json(value: Any) -> None:
    """One JSON object on stdout, on one line."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False), flush=True)


def show_error(message: str) -> None:
    """One red line on stderr."""
    line = Text.assemble(("Error: ", "bold red"), (" ".join(message.split()), "red"))
    stderr().print(line, soft_wrap=True)


def note(message: str) -> None:
    """One quiet line on stderr."""
    stderr().print(Text(message, "dim"), soft_wrap=True)
