"""`draftsmith config`: defaults of options, kept in a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from cyclopts import App

from draftsmith.cli import defaults
from draftsmith.cli.commands import application, check, known
from draftsmith.cli.options import Json
from draftsmith.cli.render import plain_table
from draftsmith.cli.report import note, print_json, stdout
from draftsmith.errors import LoadError


def config(*, as_json: Json = False) -> None:
    """Show the defaults of options that you keep in a file, and whether they can be used.

    The file has a table for each command; the names are those of the options:

        [run]
        model = "smollm2"
        max-new-tokens = 500

        [bench.run]
        dtype = "float32"

    What is typed wins.
    """
    data = defaults.read(known())
    found = [one for name in data for one in _options(application([name])[name], [name], data)]
    if as_json:
        options = [{"command": command, "option": o, "value": v} for command, o, v in found]
        print_json({"file": defaults.path(), "options": options})
        return
    note(f"{defaults.path()}{'' if data else ' has no defaults'}")
    shown = plain_table("command", "option", "value")
    shown.columns[1].justify = shown.columns[2].justify = "left"
    for command, option, value in found:
        shown.add_row(command, f"--{option}", json.dumps(value))
    if found:
        stdout().print(shown)


def _options(app: App, words: list[str], data: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The options of a command and of those below it, checked."""
    arguments = app.assemble_argument_collection() if app.default_command else None
    if arguments is not None:
        defaults.fill(None, known(), app, tuple(words), arguments)
        check((), app, words, arguments)
        for argument in arguments:
            if argument.tokens:
                argument.convert_and_validate()
    for name, value in defaults.table(data, words).items():
        if name in app:
            yield from _options(app[name], [*words, name], data)
        elif arguments is not None:
            # Dates, which JSON lacks, are read as what is typed.
            try:
                plain = json.loads(json.dumps(value, default=str, allow_nan=False))
            except ValueError:
                where = f"{defaults.path()}: {name} of [{'.'.join(words)}]"
                raise LoadError(f"{where} is no finite number") from None
            yield " ".join(words), name.replace("_", "-"), plain
        else:
            defaults.check_commands(app, " ".join(words), [name])
