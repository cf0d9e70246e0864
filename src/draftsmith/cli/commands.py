"""Which commands there are; each one is imported only when it is called.

The library's are in `draftsmith.cli`. All others, also those of `draftsmith.lab`, are entry points
of the group `draftsmith.commands`: a function or a `cyclopts.App`, named like its entry point.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from os.path import expanduser
from pathlib import Path
from typing import Any

from cyclopts import (
    App,
    ArgumentCollection,
    CoercionError,
    Group,
    Parameter,
    Token,
    UnknownOptionError,
)
from cyclopts.help import DefaultFormatter
from rich.text import Text

import draftsmith
from draftsmith.cli import completion, defaults
from draftsmith.cli.report import Output
from draftsmith.errors import LoadError, OptionError, UnknownName

GROUP = "draftsmith.commands"
LIBRARY = {
    "demo": "Watch a model do a few short jobs: plainly, then with drafts, to the same answers.",
    "run": "Answer one prompt; the text goes to standard output as it comes.",
    "chat": "Talk to a model; cache and drafts are kept from turn to turn.",
    "serve": "Serve a model to OpenAI's and Anthropic's clients (needs the extra `server`).",
    "drafters": "List the installed drafters, or describe one.",
    "models": "List the names that stand for models, and the models in the hub's cache.",
    "doctor": "Examine a model on this machine: what works, why not more, what a pass costs.",
    "config": "Show the defaults of options that you keep in a file, and whether they can be used.",
}
LAB = {
    "vocab": "Compare two vocabularies, and say which algorithm suits the pair.",
    "bench": "Measure what drafters save: on recorded answers, and on this machine.",
    "corpus": "Build and look into corpora: what the drafters retrieval and spectra look up.",
    "train": "Train a model to draft for itself, or a head for it (needs the extra `train`).",
    "tune": "Find the settings of a drafter that suit a model.",
}
HELP = LIBRARY | LAB
"""Command → one line of help, in the order of `draftsmith --help`."""


def known() -> dict[str, EntryPoint]:
    """Return all installed commands by name; an entry point never replaces one of the library."""
    found = {entry.name: entry for entry in sorted(entry_points(group=GROUP))}
    found |= {name: EntryPoint(name, f"draftsmith.cli.{name}:{name}", GROUP) for name in LIBRARY}
    return {name: found[name] for name in [*HELP, *found] if name in found}


def application(words: Sequence[str] = ()) -> App:
    """Return the command line, with the command that `words` call imported, and no other.

    Raises UnknownName or LoadError for a command that does not exist or cannot be imported.
    """
    commands = known()
    app = App(
        name="draftsmith",
        help=f"{draftsmith.__doc__}\n\nStart with: draftsmith demo",
        help_format="plaintext",
        help_formatter=_Help(),
        console=Output(),
        version=f"draftsmith {draftsmith.__version__}",
        default_parameter=Parameter(
            negative_bool=(), negative_iterable=(), show_default=_shown, allow_repeating=True
        ),
    )
    app.config = (partial(defaults.fill, app, commands), partial(check, words))
    if words and words[0] not in commands and not words[0].startswith("-"):
        raise UnknownName("command", words[0], commands)
    for place, (name, entry) in enumerate(commands.items()):
        if name in words[:1]:
            app.command(_load(entry), name=name)
        else:
            about = HELP.get(name, f"Provided by {entry.module}.")
            app.command(entry.value, name=name, help=about, sort_key=place)
    completion.register(app)
    flags = ("--help", "--version", *completion.FLAGS)
    group = (Group("Options", sort_key=1),)
    for flag in flags:
        app[flag].group = group
    if words and words[0].startswith("-") and words[0].split("=")[0] not in app:
        raise UnknownName("option", words[0], flags)
    return app


def check(
    words: Sequence[str], _app: App, _command: Sequence[str], arguments: ArgumentCollection
) -> None:
    """Refuse misspelt options before a prompt, fractions for integers, and what is not UTF-8.

    Replaces `~` in paths.
    """
    free = ("-", *words[words.index("--") :]) if "--" in words else ("-",)
    for argument in arguments:
        whole = argument.resolved_hint in (int, tuple[int, ...])
        if argument.resolved_hint in (Path, tuple[Path, ...], tuple[Path, Path]):
            # A shell expands `~` only where a word begins, and not in the file of defaults.
            argument.tokens[:] = [
                one.evolve(value=expanduser(one.value)) for one in argument.tokens
            ]
        for token in argument.tokens:
            if not token.keyword and token.value.startswith("-") and token.value not in free:
                unknown = Token(keyword=token.value, source="cli")
                raise UnknownOptionError(token=unknown, argument_collection=arguments)
            if whole and "." in token.value:
                raise CoercionError(token=token, argument=argument, target_type=int)
            foreign = re.search("[\ud800-\udfff]", token.value)
            if foreign and not os.path.exists(token.value):
                name = token.keyword or argument.name.lstrip("-").upper()
                at = foreign.start() + 1
                raise OptionError(f"{name} is not UTF-8 text, from character {at} on")


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:
        raise LoadError(
            f"command {entry.name!r} ({entry.value}) cannot be imported: {error}"
        ) from error


class _Help(DefaultFormatter):
    """Prints `--help`, with docstrings wrapped for the terminal, not for the source."""

    def __call__(self, console: Any, options: Any, panel: Any) -> None:
        for entry in panel.entries:
            text = str(entry.description.primary_renderable).replace("`", "")
            entry.description = " ".join(text.split())
        super().__call__(console, options, panel)

    def render_description(self, console: Any, options: Any, description: Any) -> None:  # noqa: ARG002
        """Print a description; lines of examples are not broken, so that they can be copied."""
        about, *examples = re.split(r"\n\n(?=Examples?\n)", str(description.primary_renderable))
        wrapped = re.sub(r"(?<=\S)\n(?=\S)", " ", about)
        console.print(Text(wrapped), end="\n\n")
        for one in examples:
            console.print(Text(one), end="\n\n", soft_wrap=True)


def _shown(default: Any) -> str | None:
    """Return how `--help` shows a default; None for one that needs no words."""
    if default is None or default is False or default == ():
        return None
    return ", ".join(map(str, default)) if isinstance(default, tuple) else str(default)
