"""`draftsmith drafters`: the installed drafters."""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from cyclopts import Parameter
from docstring_parser import parse_from_object
from rich.text import Text

from draftsmith.cli.loading import waiting
from draftsmith.cli.render import facts_table, plain_table
from draftsmith.cli.report import note, stdout
from draftsmith.errors import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.core.drafter import Drafter


def drafters(
    name: Annotated[
        str | None, Parameter(help="Show this drafter's description and options.")
    ] = None,
    /,
) -> None:
    """List the installed drafters, or describe one.

    Examples

    draftsmith drafters
    draftsmith drafters copyspec
    """
    if name is None:
        _list()
    else:
        # People paste what they would use: copyspec(gamma=5) is about copyspec.
        _describe(name.split("(", 1)[0].strip())


def _list() -> None:
    table = plain_table("drafter", "what it does", "options and their defaults", folds=2)
    broken = []
    with waiting("importing the drafters …"):
        from draftsmith.drafters.registry import lookup, names

        for name in names():
            try:
                cls = lookup(name)
            except DraftsmithError as error:
                broken.append(str(error))  # a broken plugin must not hide the others
            else:
                table.add_row(Text(name, "bold"), cls.summary, _defaults(cls))
    stdout().print(table)
    for message in broken:
        note(f"note: {message}")


def _describe(name: str) -> None:
    with waiting("importing the drafter …"):
        from draftsmith.drafters.registry import lookup

        cls, console = lookup(name), stdout()
    console.print(Text.assemble((name, "bold"), f": {cls.summary}\n"))
    # Docstrings break lines for the source's width, not for this terminal's.
    paragraphs = (inspect.getdoc(cls) or "").split("\n\n")
    console.print(Text("\n\n".join(" ".join(one.split()) for one in paragraphs)))
    example = name
    if fields(cls):
        table = plain_table("\noption", "\ndefault", "\ntype")
        kinds: dict[str, Any] = {option.name: option.type for option in fields(cls)}
        with suppress(NameError):  # a name that is imported for type checkers only
            kinds |= get_type_hints(cls)
        for option in fields(cls):
            kind = kinds[option.name]
            shown = getattr(kind, "__name__", "") if isinstance(kind, type) else str(kind)
            shown = re.sub(r"\b[a-z_]+(\.[a-z_]+)*\.", "", shown)
            table.add_row(option.name, _default(option) or "(required)", shown)
        console.print(table)
        names = {option.name for option in fields(cls)}
        about = {
            one.arg_name: " ".join((one.description or "").split())
            for base in reversed(cls.__mro__[:-1])
            for one in parse_from_object(base).params
            if one.arg_name in names
        }
        if about:
            console.print("", facts_table(about), sep="\n")
        # Drafters in a drafter need no name of an option.
        example = "copyspec+auto" if name == "cascade" else f'"{name}({_defaults(cls, 2)})"'
    console.print(Text.assemble("\nUse it with ", (f"-d {example}", "bold")))


def _default(option: Field[Any]) -> str:
    """The default of an option as it is typed; nothing where it has none."""
    if option.default_factory is not MISSING:
        return repr(option.default_factory())
    return "" if option.default is MISSING else repr(option.default)


def _defaults(cls: type[Drafter], most: int | None = None) -> str:
    return ", ".join(f"{f.name}={_default(f) or '…'}" for f in fields(cls)[:most])
