"""The command as its users type it, in this process."""

from __future__ import annotations

import io
import sys
from typing import NamedTuple
from unittest import mock

from draftsmith import cli


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
    streams = [io.TextIOWrapper(io.BytesIO(data), encoding="utf-8") for data in (given, b"", b"")]
    names = ("stdin", "stdout", "stderr")
    with mock.patch.multiple(sys, **dict(zip(names, streams, strict=True))):
        code = cli.call([str(arg) for arg in args])
        for stream in streams[1:]:
            stream.flush()
    stdout, stderr = (stream.buffer.getvalue().decode() for stream in streams[1:])  # type: ignore[attr-defined]
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
