"""JSON lines files that grow by whole lines, so that interrupted work can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, cast

from draftsmith.errors import DraftsmithError, LoadError, WriteError
from draftsmith.storage import digest, lock, parse_json, reading, unpacking, write_chunks, writing

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Lines(Generic[T]):
    """Contents of a file of JSON lines."""

    entries: list[T]
    size: int
    """Bytes of the lines that could be read."""
    torn: bool
    """Whether an incomplete line follows: its writing was interrupted."""


def read_lines(
    path: Path, read: Callable[[dict[str, Any]], T], begins: str, hint: str | None
) -> Lines[T]:
    """Read the entries of a file of JSON lines, plain or compressed, up to an incomplete line.

    `read` converts a line's object to an entry and raises ValueError if it is not one. An
    incomplete last line is accepted if it begins with `begins`, as our lines do. For any other
    unreadable line, raises LoadError with its number and the `hint`. Without a hint only we can
    have written the file, so it is incomplete from there.
    """
    entries: list[T] = []
    size = 0
    with reading(path), cast(IO[bytes], (unpacking(path) or open)(path, "rb")) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    entries.append(_entry(line, read))
                # Raised by `read`; some are also ValueErrors.
                except DraftsmithError:
                    raise
                except ValueError as error:
                    if hint is None or _interrupted(line, begins.encode()):
                        return Lines(entries, size, True)
                    raise LoadError(f"{path}, line {number}: {error}; {hint}") from error
            size += len(line)
    return Lines(entries, size, False)


def _entry(line: bytes, read: Callable[[dict[str, Any]], T]) -> T:
    item = parse_json(line.decode("utf-8"))
    if not isinstance(item, dict):
        raise ValueError(f"expected a JSON object, found {type(item).__name__}")
    try:
        return read(item)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"incomplete ({type(error).__name__}: {error})") from error


def _interrupted(line: bytes, begins: bytes) -> bool:
    kept = line.rstrip(b"\0")  # A power failure may leave zeros.
    return not line.endswith(b"\n") and (kept.startswith(begins) or begins.startswith(kept))


def check_lines(path: Path) -> None:
    """Raise WriteError if lines cannot be added to a file. Call it before long work."""
    if unpacking(path):
        raise WriteError(f"{path} cannot be written: lines cannot be added to a packed file")
    if path.exists() and not path.is_file():
        raise WriteError(f"{path} cannot be written: it is no regular file")


class JsonLines(Generic[T]):
    """A file of JSON objects that grows by whole lines. Opening it removes an incomplete end."""

    def __init__(
        self,
        path: Path,
        read: Callable[[dict[str, Any]], T],
        begins: str,
        hint: str | None,
        sync: bool = True,
    ) -> None:
        """Read the file, or create it. The first arguments are those of `read_lines`.

        `sync`: write each line to disk before `add` returns, so that it survives a power failure.
        Raises LoadError, or WriteError if the file cannot be written.
        """
        check_lines(path)
        self.path, self._sync = path, sync
        with writing(path), path.open("ab+", buffering=0) as file:
            lock(file)  # wait until no other process is writing a line
            found = read_lines(path, read, begins, hint)
            self.entries = found.entries
            file.truncate(found.size)
            file.seek(max(0, found.size - 1))
            if file.read(1) not in (b"", b"\n"):
                file.write(b"\n")

    def add(self, item: dict[str, Any]) -> None:
        """Append one object as a line, completely or not at all; raises WriteError."""
        left = memoryview(_line(item))
        with writing(self.path), self.path.open("ab", buffering=0) as file:
            lock(file)
            size = os.fstat(file.fileno()).st_size
            try:
                while left:
                    left = left[file.write(left) :]
                if self._sync:
                    os.fsync(file.fileno())
            except BaseException:
                file.truncate(size)
                raise

    def rewrite(self, items: Iterable[dict[str, Any]]) -> None:
        """Write all lines again. The old ones stay until that is done. Raises WriteError."""
        write_chunks(self.path, map(_line, items))


def _line(item: dict[str, Any]) -> bytes:
    return json.dumps(item, ensure_ascii=False).encode("utf-8") + b"\n"


class Finished:
    """Results of finished work by their inputs, so that a killed run can be resumed.

    Keys and results are JSON values. With a path, each result is on disk as soon as it is known.
    """

    def __init__(self, path: Path | None = None, sync: bool = True) -> None:
        """`sync` as in `JsonLines`; raises LoadError for a file with other contents."""
        self._known: dict[str, Any] = {}
        self._lines: JsonLines[None] | None = None
        if path is not None:
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            hint = "it holds no results that this version can resume; give another file"
            self._lines = JsonLines(path, self._note, '{"key"', hint, sync)

    def get(self, key: object) -> Any:
        """Return the result stored under `key`, or None."""
        return self._known.get(digest(key))

    def add(self, key: object, result: object) -> None:
        """Store a result, immediately on disk."""
        entry = {"key": digest(key), "result": json.loads(json.dumps(result))}
        self._note(entry)
        if self._lines is not None:
            self._lines.add(entry)

    def recall(self, key: object, compute: Callable[[], Any]) -> Any:
        """Return the result stored under `key`; compute and store it if there is none."""
        if self.get(key) is None:
            self.add(key, compute())
        return self.get(key)

    def forget(self) -> None:
        """Delete the file after all work is done."""
        if self._lines is not None:
            self._lines.path.unlink(missing_ok=True)

    def _note(self, entry: dict[str, Any]) -> None:
        self._known[entry["key"]] = entry["result"]
