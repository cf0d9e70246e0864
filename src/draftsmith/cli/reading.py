"""Texts from files and from standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from draftsmith.errors import LoadError


def read_text(path: str) -> str:
    """A text file, or standard input for -; raises LoadError for what is no text."""
    if path == "-":
        return _decoded(sys.stdin.buffer.read(), "standard input")
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror or error}") from error
    return _decoded(data, path)


def _decoded(data: bytes, name: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LoadError(f"{name} is not UTF-8 text (byte {error.start} does not fit)") from error
    if "\0" in text:
        raise LoadError(f"{name} is not text: it contains zero bytes")
    return text
