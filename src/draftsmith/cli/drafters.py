"""`draftsmith drafters`: who can guess."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from importlib.metadata import entry_points
from typing import Annotated

import typer
from rich.text import Text

from draftsmith.cli.options import REQUIRED, Declared, Field, declared
from draftsmith.cli.render import plain_table
from draftsmith.cli.report import note, stdout
from draftsmith.errors import DraftsmithError, UnknownName


def drafters(
    name: Annotated[
        str | None,
        typer.Argument(show_default=False, help="Show this drafter's description and options."),
    ] = None,
) -> None:
    """List the installed drafters, or describe one.

    [bold]Examples[/bold]

    draftsmith drafters

    draftsmith drafters copyspec
    """
    installed = {entry.name: entry.value for entry in entry_points(group="draftsmith.drafters")}
    if name is None:
        _list(installed)
    else:
        _describe(name, installed)


def _list(installed: dict[str, str]) -> None:
    table = plain_table(header=True)
    table.add_column("drafter", style="bold", no_wrap=True)
    table.add_column("what it does", overflow="fold")
    table.add_column("options and their defaults", overflow="fold")
    broken = []
    for name, value in sorted(installed.items()):
        try:
            about = _about(name, value)
        except DraftsmithError as error:
            broken.append(str(error))  # somebody else's plugin must not hide the others
        else:
            table.add_row(name, about.constants["summary"], _defaults(about.fields))
    stdout().print(table)
    for message in broken:
        note(f"note: {message}")


def _describe(spec: str, installed: dict[str, str]) -> None:
    # People paste what they would use: copyspec(gamma=5) is about copyspec.
    name = spec.split("(", 1)[0].strip()
    if name not in installed:
        raise UnknownName("drafter", name, installed)
    about = _about(name, installed[name])
    console = stdout()
    console.print(Text.assemble((name, "bold"), f": {about.constants['summary']}\n"))
    # Docstrings break lines for the source's width, not for this terminal's.
    paragraphs = (" ".join(paragraph.split()) for paragraph in about.doc.split("\n\n"))
    console.print(Text("\n\n".join(paragraphs)))
    example = name
    if about.fields:
        table = plain_table("\noption", "\ndefault", "\ntype", header=True)
        for option in about.fields:
            table.add_row(option.name, option.default, option.type)
        console.print(table)
        example = f'"{name}({_defaults(about.fields[:2])})"'
    console.print(Text.assemble("\nUse it with ", (f"-d {example}", "bold")))


def _about(name: str, value: str) -> Declared:
    """What a drafter's class declares; raises LoadError for a plugin that is broken.

    Ours are read, since to import them all takes seconds; of others only an import shows if they
    work.
    """
    if value.startswith("draftsmith."):
        return declared(value)
    from draftsmith.drafters.registry import lookup

    cls = lookup(name)
    options = []
    for f in fields(cls):
        default = REQUIRED if f.default is MISSING else repr(f.default)
        if f.default_factory is not MISSING:
            default = repr(f.default_factory())
        options.append(Field(f.name, str(getattr(f.type, "__name__", f.type)), default, ""))
    return Declared(inspect.getdoc(cls) or "", tuple(options), {"summary": cls.summary})


def _defaults(options: tuple[Field, ...]) -> str:
    known = ((f.name, "…" if f.default == REQUIRED else f.default) for f in options)
    return ", ".join(f"{name}={default}" for name, default in known)
