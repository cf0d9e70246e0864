"""The command as its users type it, in this process."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from draftsmith import cli
from draftsmith.cli.commands import application


class Ended(NamedTuple):
    """What a command did."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def call(*args: object, stdin: str | bytes | None = None) -> Ended:
    """Run a command; raises what is a bug."""
    given = stdin.encode() if isinstance(stdin, str) else stdin or b""
    buffers = [io.BytesIO(given), io.BytesIO(), io.BytesIO()]
    streams = [io.TextIOWrapper(buffer, encoding="utf-8") for buffer in buffers]
    names = ("stdin", "stdout", "stderr")
    with mock.patch.multiple(sys, **dict(zip(names, streams, strict=True))):
        code = cli.call(words := [str(arg) for arg in args])
        for stream in streams[1:]:
            stream.flush()
    stdout, stderr = (raw.getvalue().decode() for raw in buffers[1:])
    if "--json" in args and code == 0:
        command = " ".join(application(words).parse_commands(words)[0])
        assert (wrong := first_difference(json.loads(stdout), command)) is None, wrong
    return Ended(code, stdout, stderr)


def fails(code: int, *args: object, stdin: str | bytes | None = None) -> str:
    """The error message of a command that must fail, as one line with nothing on stdout."""
    result = call(*args, stdin=stdin)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines: list[str] = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("Error: ")
    return lines[0]


PAGE = Path(__file__).parents[1] / "docs" / "command-line.md"
SCHEMAS = {
    name: json.loads(schema)
    for name, schema in re.findall(
        r"^### `(.+?)`$.*?```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.M | re.S
    )
}
"""Command, or part of what several print → its schema, as the page writes it."""
KINDS = {
    "any": object,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def first_difference(value: Any, schema: Any, place: str = "$") -> str | None:
    """Say where a value is not as its schema says; None if it is."""
    if isinstance(schema, str):
        found = [_of_kind(value, kind, place) for kind in schema.split(" | ")]
        return None if None in found else found[0]
    kind = list if isinstance(schema, list) else dict
    if not isinstance(value, kind):
        return f"{place} is {value!r}, not {schema}"
    if kind is list:
        inside = [(one, schema[0], f"{place}[{number}]") for number, one in enumerate(value)]
    else:
        others = {name for name in schema if name.startswith("<")}
        wrong = (schema.keys() - others) - value.keys() or (not others and value.keys() - schema)
        if wrong:
            return f"{place} lacks, or should not have, {wrong}"
        rest = schema[others.pop()] if others else None
        inside = [(one, schema.get(name, rest), f"{place}.{name}") for name, one in value.items()]
    return next(filter(None, (first_difference(*one) for one in inside)), None)


def _of_kind(value: Any, kind: str, place: str) -> str | None:
    if kind in SCHEMAS:
        return first_difference(value, SCHEMAS[kind], place)
    fits = isinstance(value, KINDS[kind]) and isinstance(value, bool) <= (
        kind in ("boolean", "any")
    )
    return None if fits else f"{place} is {value!r}, not {kind}"
