"""`draftsmith drafters`: who can guess."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from draftsmith.cli.render import plain_table
from draftsmith.cli.report import note, stdout
from draftsmith.errors import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.core.drafter import Drafter


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
    if name is None:
        _list()
    else:
        _describe(name)


def _list() -> None:
    from draftsmith.drafters.registry import lookup, names

    table = plain_table(header=True)
    table.add_column("drafter", style="bold", no_wrap=True)
    table.add_column("what it does", overflow="fold")
    table.add_column("options and their defaults", overflow="fold")
    broken = []
    for name in names():
        try:
            cls = lookup(name)
        except DraftsmithError as error:
            broken.append(str(error))  # somebody else's plugin must not hide the others
            continue
        table.add_row(name, cls.summary, ", ".join(map(_default, fields(cls))))
    stdout().print(table)
    for message in broken:
        note(f"note: {message}")


def _describe(name: str) -> None:
    from draftsmith.drafters.registry import lookup

    # People paste what they would use: copyspec(gamma=5) is about copyspec.
    cls = lookup(name.split("(", 1)[0].strip())
    console = stdout()
    console.print(Text.assemble((cls.name, "bold"), f": {cls.summary}\n"))
    console.print(Text(_reflowed(inspect.getdoc(cls) or "")))
    options = fields(cls)
    if options:
        table = plain_table("\noption", "\ndefault", "\ntype", header=True)
        for option in options:
            default = "(required)" if option.default is MISSING else repr(option.default)
            table.add_row(option.name, default, _type(option))
        console.print(table)
    console.print(Text.assemble("\nUse it with ", (f"-d {_example(cls)}", "bold")))


def _reflowed(doc: str) -> str:
    # Docstrings break lines for the source's width, not for this terminal's.
    paragraphs = doc.split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _default(option: Field[Any]) -> str:
    if option.default is not MISSING:
        return f"{option.name}={option.default!r}"
    if option.default_factory is not MISSING:
        return f"{option.name}={option.default_factory()!r}"
    return f"{option.name}=…"


def _type(option: Field[Any]) -> str:
    return option.type if isinstance(option.type, str) else getattr(option.type, "__name__", "")


def _example(cls: type[Drafter]) -> str:
    options = ", ".join(_default(option) for option in fields(cls)[:2])
    return f'"{cls.name}({options})"' if options else cls.name
