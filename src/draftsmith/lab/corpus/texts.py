"""Reads texts: plain files and JSON lines, compressed or not, alone or in folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from draftsmith.errors import LoadError
from draftsmith.storage import no_utf8, open_text, parse_json, reading, unpacking

PLAIN, LINES = (".txt", ".md"), (".jsonl",)


def find(
    paths: Sequence[Path],
    plain: Sequence[str] = PLAIN,
    skip: Callable[[Path], None] = lambda _: None,
) -> list[Path]:
    """Return the files of `paths`: files as they are, and the text files of folders, sorted.

    Text files are JSON lines and those with a suffix in `plain`. `skip` is called with irregular
    files in folders, such as pipes, from which reading could block forever. Raises LoadError for
    paths that do not exist or are not files, and for a folder without text files.
    """
    found: list[Path] = []
    known = (*plain, *LINES)
    for path in paths:
        if path.is_dir():
            named = sorted(p for p in path.rglob("*") if kind(p) in known and not p.is_dir())
            inside = [p for p in named if p.is_file()]
            if not inside:
                listed = ", ".join(known)
                but = f"; {named[0]} is not a regular file" if named else ""
                raise LoadError(f"the folder {path} has no {listed} (or such with .gz or .xz){but}")
            for irregular in set(named).difference(inside):
                skip(irregular)
            found += inside
        elif path.is_file():
            found.append(path)
        elif path.exists():
            raise LoadError(f"{path} is neither a regular file nor a folder; copy it to a file")
        else:
            raise LoadError(f"there is no file or folder {path}")
    return found


def kind(path: Path) -> str:
    """Suffix of the format, without that of compression."""
    return (path.with_suffix("") if unpacking(path) else path).suffix.lower()


def documents(path: Path, fields: Sequence[str]) -> Iterator[str]:
    """Yield the texts of a file: of JSON lines the `fields`, joined by a line break; else all.

    Raises LoadError, naming file and line, for texts that cannot be read.
    """
    with reading(path), open_text(path, errors="surrogateescape") as file:
        if kind(path) in LINES:
            yield from _lines(path, file, fields)
            return
        text = file.read()
    if wrong := no_utf8(text):
        place, why = wrong
        line = text.count("\n", 0, place) + 1
        raise LoadError(f"{path}, line {line} is {why}")
    yield text


def _lines(path: Path, file: IO[str], fields: Sequence[str]) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            item = parse_json(line)
        except ValueError as error:
            raise LoadError(f"{path}, line {number} is {error}") from error
        if not isinstance(item, dict):
            raise LoadError(f"{path}, line {number} is not a JSON object")
        texts = {name: value for name, value in item.items() if isinstance(value, str)}
        missing = next((name for name in fields if name not in texts), None)
        if missing is not None:
            raise LoadError(
                f"{path}, line {number} has no text in {missing!r}; give --field with one that "
                f"does (here: {', '.join(texts) or 'none'})"
            )
        yield "\n".join(texts[name] for name in fields)
