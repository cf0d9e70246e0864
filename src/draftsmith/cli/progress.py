"""Bars on stderr while something takes long, for whoever is watching."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from draftsmith.cli.report import stderr

if TYPE_CHECKING:
    from rich.progress import Progress


def progress(*, transient: bool = False) -> Progress:
    """Bars that show done and total and the time left; silent in a file."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console, text = stderr(), TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    silent = not console.is_terminal
    return Progress(*columns, console=console, disable=silent, transient=transient)


@contextlib.contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar that its caller advances."""
    with progress(transient=True) as shown:
        number = shown.add_task(what, total=total)
        yield lambda done: shown.advance(number, done)
