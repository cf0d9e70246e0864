"""Files: reading with one exception type, atomic writing, and the cache folder."""

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
from typing import IO, Any, cast

from safetensors import SafetensorError

from draftsmith.errors import LoadError, WriteError

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

_LOG = logging.getLogger("draftsmith")

NEW = ".new"
"""Suffix of files that are being written, after a name that is different for each writer."""

PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
"""Functions that open compressed files, by suffix."""

_UNREADABLE = OSError, EOFError, UnicodeDecodeError, SafetensorError, lzma.LZMAError, zlib.error


def cache_folder() -> Path:
    """Return the folder where draftsmith stores what it computes on this machine.

    It is `$DRAFTSMITH_CACHE`, else `$XDG_CACHE_HOME/draftsmith`, else `~/.cache/draftsmith`.
    Raises WriteError if there is no home folder.
    """
    return _own_folder("CACHE", ".cache")


def config_folder() -> Path:
    """Return the folder with the user's defaults of options.

    It is `$DRAFTSMITH_CONFIG`, else `$XDG_CONFIG_HOME/draftsmith`, else `~/.config/draftsmith`.
    Raises WriteError if there is no home folder.
    """
    return _own_folder("CONFIG", ".config")


def _own_folder(kind: str, default: str) -> Path:
    chosen = os.environ.get(f"DRAFTSMITH_{kind}")
    try:
        if chosen:
            return Path(chosen).expanduser()
        return Path(os.environ.get(f"XDG_{kind}_HOME") or Path.home() / default) / "draftsmith"
    except RuntimeError as error:  # raised by pathlib
        raise WriteError(
            f"there is no home folder to keep files in: set DRAFTSMITH_{kind} to a folder"
        ) from error


def expanded(path: str | Path) -> Path:
    """Return a path with `~` replaced by the home folder; without such a home it stays as it is."""
    return Path(os.path.expanduser(path))


def unpacking(path: Path) -> Callable[..., Any] | None:
    """Return what opens a compressed file, by its suffix; None for other files."""
    return PACKED.get(path.suffix.lower())


def open_text(path: Path, errors: str = "strict") -> IO[str]:
    """Open a plain, .gz or .xz text file for reading; a byte order mark is skipped."""
    opened = (unpacking(path) or open)(path, "rt", encoding="utf-8-sig", errors=errors)
    return cast(IO[str], opened)


def no_utf8(text: str) -> tuple[int, str] | None:
    """Return (position, message) of the first non-UTF-8 byte of a text; None if there is none.

    The text must have been read with errors="surrogateescape".
    """
    wrong = re.search("[\udc80-\udcff]", text)
    return wrong and (wrong.start(), f"not UTF-8 (byte 0x{ord(wrong[0]) - 0xDC00:x})")


def file_about(model: str, kind: str, suffix: str) -> Path:
    """Return the path in the cache folder for a file of this kind about a model.

    The file is named after the model's hub id or folder. Raises WriteError if there is no cache
    folder.
    """
    folder = expanded(model)
    identity = str(folder.resolve()) if os.path.isdir(folder) else model
    suffix_of_name = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    readable = re.sub(r"[^\w.-]+", "-", Path(identity).name)[:60]
    return cache_folder() / kind / f"{readable}-{suffix_of_name}{suffix}"


def known_about(model: str, kind: str, suffix: str) -> Path | None:
    """Return the path of `file_about` if the file exists; None if not, or if `model` is empty.

    If the folder cannot be accessed, a warning is logged and None is returned.
    """
    try:
        path = file_about(model, kind, suffix)
    except WriteError:  # without a home folder there are no files
        return None
    try:
        return path if model and path.is_file() else None
    except OSError as error:
        _LOG.warning("the saved file about %s is not used: %s: %s", model, path, _reason(error))
        return None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert errors of reading files into LoadError, with `path` in the message."""
    try:
        yield
    except _UNREADABLE as error:
        raise LoadError(f"{path} cannot be read: {_reason(error)}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert errors of writing files into WriteError, with `path` in the message."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {_reason(error)}") from error


def _reason(error: Exception) -> object:
    return getattr(error, "strerror", None) or error


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises ValueError for text that is not JSON or not UTF-8 (`no_utf8`), for nesting beyond
    Python's recursion limit, and for strings with an unpaired surrogate, which no tokenizer
    accepts.
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
    """Write a text file atomically; raises WriteError."""
    write_chunks(path, [text.encode("utf-8")])


def write_chunks(path: Path, chunks: Iterable[bytes]) -> int:
    """Write a file atomically and flush it to disk; return its CRC-32.

    The old file stays until the new one is complete, also for processes that have it mapped. Of
    several concurrent writers the last one to finish wins. A path that is not a regular file, such
    as a pipe, is written directly. Raises WriteError.
    """
    total = 0
    with writing(path), _replacing(path) as file:
        for chunk in chunks:
            file.write(chunk)
            total = zlib.crc32(chunk, total)
    return total


def check_writable(path: Path) -> None:
    """Raise WriteError if `path` cannot be written. Call it before long work."""
    with writing(path):
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder; give the path of a file")
        if not path.exists() or path.is_file():
            fresh, file = _create_beside(path.resolve())
            fresh.unlink()
            file.close()


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new file, which replaces `path` if no error is raised."""
    if path.exists() and not path.is_file():
        with path.open("wb") as direct:
            yield direct
        return
    target = path.resolve()  # follow a link, so that it remains a link
    _remove_abandoned(target)
    fresh, file = _create_beside(target)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if os.name == "nt":  # Windows cannot rename an open file
                file.close()
            os.replace(fresh, target)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def _create_beside(target: Path) -> tuple[Path, IO[bytes]]:
    """Create an empty file beside `target` under a unique name, locked while it is open."""
    while True:
        fresh = target.with_name(f"{_stem(target)}{secrets.token_hex(8)}{NEW}")
        file = fresh.open("xb")
        if lock(file) and not os.fstat(file.fileno()).st_nlink:
            file.close()  # another writer removed it as abandoned before it was locked
            continue
        return fresh, file


def _stem(target: Path) -> str:
    """Return the beginning of the names of new files for `target`, of limited length."""
    return f"{target.name[:50]}."


def _remove_abandoned(target: Path) -> None:
    """Delete new files that killed writers of `target` left: those that are not locked."""
    if fcntl is None:
        return
    name = re.compile(re.escape(_stem(target)) + "[0-9a-f]{16}" + re.escape(NEW))
    try:
        names = os.listdir(target.parent)
    except PermissionError:  # some writable folders cannot be listed
        return
    for left in map(target.with_name, filter(name.fullmatch, names)):
        try:
            with left.open("r+b") as file:
                if lock(file, wait=False):
                    left.unlink(missing_ok=True)
        except (FileNotFoundError, PermissionError):  # it was finished, or is another user's
            continue


def lock(file: IO[bytes], *, wait: bool = True) -> bool:
    """Lock a file until it is closed; return whether the lock was granted.

    Returns False if the system or file system has no locks, and, without `wait`, if another process
    holds the lock.
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
"""Errors of `flock` if another process holds the lock, or if the file system has no locks."""


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, where the system supports it."""
    if os.name == "nt":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def digest(key: object) -> str:
    """Return a fingerprint of a value that can be converted to JSON."""
    return hashlib.sha256(json.dumps(key, default=str).encode()).hexdigest()[:24]
