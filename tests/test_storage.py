"""Files: whole or not at all, one kind of error."""

from __future__ import annotations

import errno
import gzip
import lzma
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from draftsmith import storage
from draftsmith.errors import LoadError, WriteError
from draftsmith.storage import parse_json


def full(*_args: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_is_written_is_there_with_the_mode_of_any_new_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    before = os.umask(0o027)
    try:
        storage.write_text(path, "old")
        storage.write_text(path, "né\n")
    finally:
        os.umask(before)
    assert path.read_bytes() == "né\n".encode()
    assert os.name == "nt" or stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def half() -> Iterator[bytes]:
        yield b"new"
        full()

    with pytest.raises(WriteError, match=r"a\.txt cannot be written: No space left"):
        storage.write_chunks(path, half())
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match="No space left"):
        storage.write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_unwritable_places_are_found_before_the_work(tmp_path: Path) -> None:
    storage.check_writable(tmp_path / "a")
    (tmp_path / "b").write_text("old")
    storage.check_writable(tmp_path / "b")
    assert (tmp_path / "b").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["b"]
    with pytest.raises(WriteError, match="it is a folder"):
        storage.check_writable(tmp_path)
    for write in (storage.check_writable, partial(storage.write_text, text="x")):
        with pytest.raises(WriteError, match="No such file or directory") as caught:
            write(tmp_path / "no" / "a")
        assert isinstance(caught.value, OSError)  # and DraftsmithError, as all of ours


CHILD = """
import sys, time
from pathlib import Path
from draftsmith import storage
what, path, letter = sys.argv[1], Path(sys.argv[2]), sys.argv[3].encode()
if what == "check":
    storage.check_writable(path)
elif what == "hang":
    def chunks():
        yield letter
        print("began", flush=True)
        time.sleep(600)
    storage.write_chunks(path, chunks())
else:
    for _ in range(int(what)):
        storage.write_chunks(path, [letter * 100_000] * 5)
"""


def child(*arguments: Any) -> subprocess.Popen[str]:
    """A process of its own that writes, checks or hangs."""
    command = [sys.executable, "-c", CHILD, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> None:
    process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize("what", ["check", "1"])
def test_e3_a_writer_is_disturbed_by_no_other_process(tmp_path: Path, what: str) -> None:
    """Another one checks the same path, or writes it whole, while this one is half-way."""
    path = tmp_path / "a"
    path.write_text("old")
    seen = []

    def chunks() -> Iterator[bytes]:
        yield b"first, "
        ended(child(what, path, "b"))
        seen.append(path.read_bytes())
        yield b"second"

    storage.write_chunks(path, chunks())
    assert seen == [b"old" if what == "check" else b"b" * 500_000]
    assert path.read_bytes() == b"first, second"  # the last one wins
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_e3_of_several_writers_at_once_each_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    writers = [child(20, path, letter) for letter in "xyz"]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            content = path.read_bytes()
            seen.add((content[:1], len(content), len(set(content))))
    for writer in writers:
        ended(writer)
    assert seen <= {(letter, 500_000, 1) for letter in (b"x", b"y", b"z")}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.skipif(os.name == "nt", reason="needs the locks of POSIX")
def test_e3_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / ("é[1]" * 40)
    writers = [child("hang", path, letter) for letter in "xy"]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "began\n"
    assert len(list(tmp_path.iterdir())) == 2
    writers[0].kill()
    writers[0].communicate()
    mine = tmp_path / f"{path.name}.mine{storage.NEW}"
    mine.touch()
    storage.write_text(path, "whole")
    assert len(list(tmp_path.iterdir())) == 3  # with the living writer's
    writers[1].kill()
    writers[1].communicate()
    storage.write_text(path, "again")
    assert {*tmp_path.iterdir()} == {path, mine}
    assert path.read_text() == "again"


@pytest.mark.skipif(os.name == "nt", reason="links and pipes are POSIX's")
def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    storage.write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    heard: list[str] = []
    reader = threading.Thread(target=lambda: heard.append((tmp_path / "pipe").read_text()))
    reader.start()
    storage.write_text(tmp_path / "pipe", "news")
    reader.join(10)
    assert heard == ["news"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_texts_are_opened_by_their_ending(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é", encoding="utf-8")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("é".encode()))
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress("é".encode()))
    for path in sorted(tmp_path.iterdir()):
        with storage.open_text(path) as file:
            assert file.read() == "é"
        path.write_bytes(path.read_bytes()[:-1])
        with (
            pytest.raises(LoadError, match=f"{path.name} cannot be read"),
            storage.reading(path),
            storage.open_text(path) as file,
        ):
            file.read()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' * 100_000, "nested too deeply"),
        (r'{"a": ["\ud83d"]}', r"\\ud83d is half a surrogate pair"),
        (r'{"\uDE00": 1}', r"\\ude00 is half a surrogate pair"),
    ],
)
def test_what_cannot_be_used_is_reported(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)
    assert parse_json(r'{"a": "\ud83d\ude00", "b": "\\ud83d"}') == {"a": "😀", "b": "\\ud83d"}
