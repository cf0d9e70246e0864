"""The command as its users type it, in this process."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from draftsmith.cli import app


def call(*args: object, stdin: str | bytes | None = None) -> Any:
    """What a command did: exit_code, stdout, stderr."""
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)


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
