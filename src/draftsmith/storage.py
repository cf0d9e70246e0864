"""Files: read with one kind of error, written whole or not at all, grown by whole lines."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import logging
import lzma
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from draftsmith.errors import LoadError, WriteError

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")

_LOG = logging.getLogger("draftsmith")

NEW = ".new"
"""Ends the name of a file that is being written; what comes before is different for each writer."""

PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
"""How to open packed files, by their ending."""

_UNREADABLE = (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, zlib.error)


def cache_folder() -> Path:
    """Where draftsmith keeps what it has made or learnt on this machine.

    It is `$DRAFTSMITH_CACHE`, else `$XDG_CACHE_HOME/draftsmith`, else `~/.cache/draftsmith`.
    Raises WriteError where nothing tells where home is.
    """
    return _own_folder("CACHE", ".cache")


def config_folder() -> Path:
    """Where the user keeps defaults of options.

    It is `$DRAFTSMITH_CONFIG`, else `$XDG_CONFIG_HOME/draftsmith`, else `~/.config/draftsmith`.
    Raises WriteError where nothing tells where home is.
    """
    return _own_folder("CONFIG", ".config")


def _own_folder(kind: str, usual: str) -> Path:
    own = os.environ.get(f"DRAFTSMITH_{kind}")
    try:
        if own:
            return Path(own).expanduser()
        return Path(os.environ.get(f"XDG_{kind}_HOME") or Path.home() / usual) / "draftsmith"
    except RuntimeError as error:  # pathlib's
        raise WriteError(
            f"there is no home folder to keep files in: set DRAFTSMITH_{kind} to a folder"
        ) from error


def open_text(path: Path, errors: str = "strict") -> IO[str]:
    """Open a text for reading, by its ending: plain, .gz or .xz; a byte order mark is left out."""
    opened = PACKED.get(path.suffix, open)(path, "rt", encoding="utf-8-sig", errors=errors)
    return cast(IO[str], opened)


def no_utf8(text: str) -> tuple[int, str] | None:
    """Where what was read with errors="surrogateescape" is no UTF-8 first, and how to say so."""
    wrong = re.search("[\udc80-\udcff]", text)
    return wrong and (wrong.start(), f"not UTF-8 (byte 0x{ord(wrong[0]) - 0xDC00:x})")


def file_about(model: str, kind: str, suffix: str) -> Path:
    """The file of this kind about a model, in the cache folder, named after its hub id or folder.

    Raises WriteError where there is no such folder.
    """
    folder = Path(model).expanduser()
    identity = str(folder.resolve()) if folder.is_dir() else model
    named = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    readable = re.sub(r"[^\w.-]+", "-", Path(identity).name)[:60]
    return cache_folder() / kind / f"{readable}-{named}{suffix}"


def known_about(model: str, kind: str, suffix: str) -> Path | None:
    """That file if there is one to be read; a model made in memory has no name, and so none.

    A folder that may not be looked into is logged: what was learnt of the model is not used then.
    """
    try:
        path = file_about(model, kind, suffix)
    except WriteError:  # there is no home folder, so nothing was kept
        return None
    try:
        return path if model and path.is_file() else None
    except OSError as error:
        _LOG.warning("what is known about %s is not used: %s: %s", model, path, _reason(error))
        return None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise LoadError, naming `path`, for what goes wrong with files inside."""
    try:
        yield
    except _UNREADABLE as error:
        raise LoadError(f"{path} cannot be read: {_reason(error)}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise WriteError, naming `path`, for what goes wrong with files inside."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {_reason(error)}") from error


def _reason(error: Exception) -> object:
    return getattr(error, "strerror", None) or error


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises ValueError for what is no JSON or no UTF-8 (`no_utf8`), for more nesting than Python
    follows, and for strings with half a surrogate pair, which no tokenizer takes and no file holds.
    """
    if wrong := no_utf8(text):
        raise ValueError(wrong[1])
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("not usable JSON (nested too deeply)") from error
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):x}"
        raise ValueError(f"not usable text ({half} is half a surrogate pair)") from error
    return value


def write_text(path: Path, text: str) -> None:
    """Write a text whole or not at all; raises WriteError."""
    write_chunks(path, [text.encode("utf-8")])


def write_chunks(path: Path, chunks: Iterable[bytes]) -> int:
    """Write a file whole or not at all, and see it on disk; returns its CRC-32.

    Until it is whole, the file that was there stays, also for readers that have it mapped. Of
    several writers the last one to finish wins. What is no regular file, a pipe say, is written
    directly. Raises WriteError.
    """
    total = 0
    with writing(path), _replacing(path) as file:
        for chunk in chunks:
            file.write(chunk)
            total = zlib.crc32(chunk, total)
    return total


def check_writable(path: Path) -> None:
    """Raise WriteError if `path` cannot be written: before the work, not after it."""
    with writing(path):
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder; give a file")
        if not path.exists() or path.is_file():
            fresh, file = _create_beside(path.resolve())
            fresh.unlink()
            file.close()


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new file, which takes the place of `path` if nothing fails."""
    if path.exists() and not path.is_file():
        with path.open("wb") as direct:
            yield direct
        return
    target = path.resolve()  # a link is followed, so that it stays one
    _remove_abandoned(target)
    fresh, file = _create_beside(target)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if os.name == "nt":  # which renames no open file
                file.close()
            os.replace(fresh, target)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def _create_beside(target: Path) -> tuple[Path, IO[bytes]]:
    """Create an empty file beside `target` under a name of its own, locked while it is open."""
    while True:
        fresh = target.with_name(f"{_stem(target)}{secrets.token_hex(8)}{NEW}")
        file = fresh.open("xb")
        if lock(file) and not os.fstat(file.fileno()).st_nlink:
            file.close()  # another writer took it for abandoned before it was locked
            continue
        return fresh, file


def _stem(target: Path) -> str:
    """Return how the names of new files for `target` begin; short enough for any file system."""
    return f"{target.name[:50]}."


def _remove_abandoned(target: Path) -> None:
    """Delete what killed writers of `target` left: new files that nobody has locked."""
    if fcntl is None:
        return
    name = re.compile(re.escape(_stem(target)) + "[0-9a-f]{16}" + re.escape(NEW))
    try:
        names = os.listdir(target.parent)
    except PermissionError:  # files can be written to some folders that cannot be listed
        return
    for left in map(target.with_name, filter(name.fullmatch, names)):
        try:
            with left.open("r+b") as file:
                if lock(file, wait=False):
                    left.unlink(missing_ok=True)
        except (FileNotFoundError, PermissionError):  # finished meanwhile, or another user's
            continue


def lock(file: IO[bytes], *, wait: bool = True) -> bool:
    """Lock a file until it is closed; return whether the lock was granted.

    It is not where the system or the file system knows no locks, and, unless `wait`, where
    somebody else has it.
    """
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NOT_LOCKED:
            return False
        raise
    return True


_NOT_LOCKED = {errno.EWOULDBLOCK, errno.EACCES, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS,
               errno.EINVAL}  # fmt: skip
"""Errors of `flock`: locked by somebody else, or no locks on this file system."""


def sync_folder(folder: Path) -> None:
    """See a folder's names on disk, where the system knows how to."""
    if os.name == "nt":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def digest(key: object) -> str:
    """A fingerprint of what JSON can say."""
    return hashlib.sha256(json.dumps(key, default=str).encode()).hexdigest()[:24]
