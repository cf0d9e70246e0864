"""Files of JSON lines: kept whole, mended where they were torn, other people's left alone."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import LoadError, WriteError
from draftsmith.lab.lines import JsonLines, read_lines

BEGINS, HINT = '{"n"', "give another file"


def number(item: dict[str, Any]) -> int:
    return int(item["n"])


def lines(path: Path, hint: str | None = HINT) -> JsonLines[int]:
    return JsonLines(path, number, BEGINS, hint)


CHILD = """
import sys
from pathlib import Path
from draftsmith.lab.lines import JsonLines
lines = JsonLines(Path(sys.argv[1]), lambda item: item, '{"n"', None)
for _ in range(60):
    lines.add({"n": sys.argv[2] * 1000})
"""


@pytest.mark.parametrize(
    "tail", ['{"n": 3, "text": "é'.encode()[:-1], b"{", b"\0\0\0", b'{"n": 3\0\0']
)
def test_a_torn_end_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n\n{"n": 2}\n' + tail)
    found = read_lines(path, number, BEGINS, HINT)
    assert (found.entries, found.torn) == ([1, 2], True)
    mended = lines(path)
    assert mended.entries == [1, 2]
    mended.add({"n": 4})
    assert path.read_bytes() == b'{"n": 1}\n\n{"n": 2}\n{"n": 4}\n'


def test_a_line_without_its_end_may_be_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2}')
    assert not read_lines(path, number, BEGINS, HINT).torn
    lines(path).add({"n": 3})
    assert lines(path).entries == [1, 2, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"costly diary", "line 1: not JSON"),
        (b'{"n": 1}\n{"n": \n{"n": 3}\n', "line 2: not JSON"),
        (b'{"n": 1}\n[2]\n', "line 2: expected a JSON object, found list"),
        (b'{"n": 1}\n{"m": 2}', "line 2: incomplete .KeyError: 'n'."),
        (b'{"n": null}\n', "line 1: incomplete .TypeError"),
        (b'{"n": "x"}\n', "line 1: invalid literal"),
        (b'{"n": 1}\n\xff\n', "line 2: 'utf-8' codec"),
        (b"[" * 100_000, "line 1: not usable JSON .nested too deeply"),
    ],
)
def test_other_peoples_files_are_refused_and_left_alone(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(LoadError, match=f"a.jsonl, {message}.*; give another file"):
        lines(path)
    assert path.read_bytes() == content
    assert lines(path, hint=None).entries == [1] * content.startswith(b'{"n": 1}')


def test_packed_lines_can_be_read_but_do_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"n": 1}\n{"n": 2}\n{"n": '))
    assert read_lines(path, number, BEGINS, HINT).entries == [1, 2]
    with pytest.raises(WriteError, match="packed"):
        lines(path)


def test_a_place_that_cannot_be_written_is_found_at_once(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="No such file or directory"):
        lines(tmp_path / "no" / "a.jsonl")
    for path in (tmp_path, Path("/dev/null"), Path("/dev/zero")):  # the last has no end
        with pytest.raises(WriteError, match="is no regular file"):
            lines(path)


def test_e3_lines_of_several_processes_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    command = [sys.executable, "-c", CHILD, str(path)]
    writers = [subprocess.Popen([*command, letter]) for letter in "xy"]
    while any(writer.poll() is None for writer in writers):
        JsonLines(path, lambda item: item, BEGINS, None)  # cuts off a torn end, and finds none
    for writer in writers:
        assert writer.wait() == 0
    found = [json.loads(line)["n"] for line in path.read_text().splitlines()]
    assert sorted(found) == ["x" * 1000] * 60 + ["y" * 1000] * 60
