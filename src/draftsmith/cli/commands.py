"""Which commands there are; each one is imported only when it is called.

The library's are in `draftsmith.cli`. All others, also those of `draftsmith.lab`, are entry points
of the group `draftsmith.commands`: a function whose parameters are `Annotated` with typer's options
or a group of options (`options.py`), or a `typer.Typer` of several commands.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperCommand

from draftsmith.cli.options import grouped
from draftsmith.errors import LoadError

GROUP = "draftsmith.commands"
LIBRARY = {
    "demo": "Watch a model do a few short jobs: plainly, then with drafts, to the same answers.",
    "run": "Answer one prompt; the text goes to standard output as it comes.",
    "chat": "Talk to a model; cache and drafts are kept from turn to turn.",
    "serve": "Serve a model to OpenAI's clients (needs the extra `server`).",
    "drafters": "List the installed drafters, or describe one.",
    "doctor": "Examine a model on this machine: what works, why not more, what a pass costs.",
}
LAB = {
    "vocab": "Compare two vocabularies, and say which algorithm suits the pair.",
    "bench": "Measure what drafters save: on recorded answers, and on this machine.",
    "corpus": "Build and look into corpora: what the drafters retrieval and spectra look up.",
    "train": "Teach a model to draft for itself (needs the extra `train`).",
    "tune": "Find the settings of a drafter that suit a model.",
}
HELP = LIBRARY | LAB
"""Command → one line of help, in the order of `draftsmith --help`."""


class Command(TyperCommand):
    """A command by its name and one line of help; all else is imported when it is called."""

    def __init__(self, entry: EntryPoint) -> None:
        super().__init__(entry.name, help=HELP.get(entry.name, f"Provided by {entry.module}."))
        self.entry = entry

    def make_context(self, *args: Any, **extra: Any) -> Any:
        return self.load().make_context(*args, **extra)

    def load(self) -> Any:
        """Return the whole command; raises LoadError for an entry point that is broken."""
        try:
            found = self.entry.load()
        except Exception as error:
            raise LoadError(
                f"command {self.name!r} ({self.entry.value}) cannot be imported: {error}"
            ) from error
        if isinstance(found, typer.Typer):
            return typer.main.get_group(found)
        return typer.main.get_command(group("", found))


def known() -> dict[str, Command]:
    """Return all installed commands by name; an entry point never replaces one of the library."""
    found = {entry.name: entry for entry in sorted(entry_points(group=GROUP))}
    found |= {name: EntryPoint(name, f"draftsmith.cli.{name}:{name}", GROUP) for name in LIBRARY}
    ordered = [name for name in HELP if name in found]
    return {name: Command(found[name]) for name in dict.fromkeys([*ordered, *found])}


def group(about: str, *commands: Callable[..., None]) -> typer.Typer:
    """Return a group of commands, each a function (see above)."""
    made = typer.Typer(help=about, no_args_is_help=True, add_completion=False)
    for command in commands:
        made.command()(grouped(command))
    return made
