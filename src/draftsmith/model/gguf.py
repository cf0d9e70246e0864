"""GGUF files: checked, dequantized once, and from then on a folder like any other.

transformers reads such a file in half a minute (`gguf_file=`) and trusts what its header says. So
the header is held against the file first, and what was read is kept as safetensors in a cache
folder that is named after the file's SHA-256.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.errors import LoadError, WriteError, first_line
from draftsmith.storage import cache_folder, reading, write_text

_VERSIONS = (2, 3)
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a metadata value by its type number."""
_STRING, _ARRAY, _UINT16, _UINT32, _BOOL = 8, 9, 2, 4, 7
_DEEPEST = 4
"""Arrays within arrays; real files have none."""
_SEAL = "converted.json"
"""Written last: a cache folder without it is not whole."""
_CHECKED = "checked.json"
"""Sizes and times of the weights when their sums were last found right."""
_NEW = ".new-"
_ABANDONED_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as the header announces it."""

    name: str
    shape: tuple[int, ...]
    kind: int
    """Number of its quantization type (`gguf.GGMLQuantizationType`)."""
    offset: int
    """Bytes from the start of the tensor data."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says of itself."""

    architecture: str
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    """Bytes before the tensor data."""
    adds_bos: bool
    """Whether texts begin with the beginning-of-sequence token."""

    @property
    def parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors)


def converted(path: Path) -> Path:
    """The folder with the dequantized weights and the tokenizer of a GGUF file, made if need be.

    Weights are kept in float32, exactly as `gguf` dequantizes them, in `storage.cache_folder`.
    Raises LoadError for a file that is damaged or that transformers cannot read, WriteError where
    the folder cannot be written.
    """
    with reading(path):
        name = f"{path.stem}-{_sha256(path)[:32]}"
    folder = cache_folder() / "gguf" / name
    if not _whole(folder):
        _convert(path, read_header(path), folder)
    return folder


def read_header(path: Path) -> Header:
    """The header, checked against the file's size; raises LoadError."""
    gguf = _package()
    with reading(path), path.open("rb") as file:
        header = _Reader(file, path).header()
    size, end = path.stat().st_size, 0
    for tensor in header.tensors:
        end = max(end, header.data_offset + tensor.offset + _tensor_bytes(gguf, tensor, path))
    if end > size:
        raise LoadError(
            f"{path} is cut off: its header announces {end:,} bytes, the file has {size:,}; "
            "download it again"
        )
    return header


class _Reader:
    """Reads a header value by value; nothing is believed that the file is too short for."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path = file, path
        self._left = path.stat().st_size

    def header(self) -> Header:
        if self._left < 4 or self._bytes(4) != b"GGUF":
            raise LoadError(f"{self._path} is no GGUF file: it does not begin with 'GGUF'")
        version = self._number("<I")
        if version not in _VERSIONS:
            raise LoadError(
                f"{self._path} has GGUF version {version}; versions 2 and 3 can be read, "
                "little-endian"
            )
        tensor_count, value_count = self._number("<Q"), self._number("<Q")
        values: dict[str, Any] = {}
        for _ in range(value_count):
            name = self._string()
            values[name] = self._value(self._number("<I"))
        parts = values.get("split.count")
        if isinstance(parts, int) and parts > 1:
            raise LoadError(
                f"{self._path} is one of {parts} parts of a model; merge them first: "
                "llama-gguf-split --merge FIRST_PART MERGED.gguf"
            )
        tensors = tuple(self._tensor() for _ in range(tensor_count))
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise LoadError(f"{self._path} is damaged: alignment {alignment!r}")
        start = -(-self._file.tell() // alignment) * alignment
        # Where the file does not say, SentencePiece's models do, as in llama.cpp.
        spm = values.get("tokenizer.ggml.model") == "llama"
        adds_bos = bool(values.get("tokenizer.ggml.add_bos_token", spm))
        return Header(str(values.get("general.architecture", "")), tensors, start, adds_bos)

    def _tensor(self) -> TensorInfo:
        name, dimensions = self._string(), self._number("<I")
        self._expect(8 * dimensions)
        shape = tuple(self._number("<Q") for _ in range(dimensions))
        return TensorInfo(name, shape, self._number("<I"), self._number("<Q"))

    def _value(self, kind: int, depth: int = 0) -> Any:
        """A metadata value; of arrays, and of numbers that are no count, only that they fit."""
        if kind == _STRING:
            return self._string()
        if kind == _UINT32:
            return self._number("<I")
        if kind == _UINT16:
            return self._number("<H")
        if kind == _BOOL:
            return bool(self._number("<B"))
        if kind in _SCALARS:
            return self._skip(_SCALARS[kind])
        if kind != _ARRAY or depth == _DEEPEST:
            raise LoadError(f"{self._path} is damaged: a metadata value of type {kind}")
        inner, length = self._number("<I"), self._number("<Q")
        if inner in _SCALARS:
            return self._skip(_SCALARS[inner] * length)
        for _ in range(length):
            self._value(inner, depth + 1)
        return None

    def _string(self) -> str:
        return self._bytes(self._number("<Q")).decode("utf-8", "replace")

    def _number(self, code: str) -> int:
        number: int = struct.unpack(code, self._bytes(struct.calcsize(code)))[0]
        return number

    def _bytes(self, count: int) -> bytes:
        self._expect(count)
        self._left -= count
        return self._file.read(count)

    def _skip(self, count: int) -> None:
        self._expect(count)
        self._left -= count
        self._file.seek(count, os.SEEK_CUR)

    def _expect(self, count: int) -> None:
        if count > self._left:
            raise LoadError(
                f"{self._path} is damaged or cut off: its header goes on for {count:,} bytes where "
                f"the file has {self._left:,} left"
            )


def _tensor_bytes(gguf: Any, tensor: TensorInfo, path: Path) -> int:
    """Bytes of a tensor's blocks; raises LoadError for a type that cannot be dequantized."""
    try:
        kind = gguf.GGMLQuantizationType(tensor.kind)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise LoadError(
            f"{path} has the quantization type {tensor.kind} (tensor {tensor.name!r}), which the "
            "installed gguf package cannot dequantize; take a file with another quantization, "
            "e.g. Q8_0 or Q4_K_M"
        ) from error
    count = math.prod(tensor.shape)
    if count % block:
        raise LoadError(f"{path} is damaged: tensor {tensor.name!r} has the shape {tensor.shape}")
    return int(count // block * size)


def _package() -> Any:
    try:
        import accelerate  # noqa: F401  transformers asks for it
        import gguf
        import gguf.quants
    except ImportError as error:
        raise LoadError(
            f"GGUF files need the packages gguf and accelerate ({first_line(error)}): "
            "pip install 'draftsmith[gguf]'"
        ) from error
    return gguf


def _convert(path: Path, header: Header, folder: Path) -> None:
    """Let transformers dequantize the file, into a folder that appears whole or not at all."""
    parent, needed = folder.parent, 4 * header.parameters
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        _remove_abandoned(parent)
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
    except OSError as error:
        raise _unwritable(parent, error) from error
    try:
        if free < needed:
            raise WriteError(
                f"{path.name} needs {needed / 1e6:,.1f} MB in {parent}, where {free / 1e6:,.1f} MB "
                "are free; set DRAFTSMITH_CACHE to a folder with more room"
            )
        model, tokenizer = _read(path, header)
        try:
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)
            _seal(new)
            _publish(new, folder)
        except (OSError, SafetensorError) as error:
            raise _unwritable(parent, error) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _unwritable(folder: Path, error: Exception) -> WriteError:
    return WriteError(
        f"the converted weights cannot be written to {folder} "
        f"({getattr(error, 'strerror', None) or error}); set DRAFTSMITH_CACHE to a folder that can "
        "be written"
    )


def _read(path: Path, header: Header) -> tuple[Any, Any]:
    """Model and tokenizer as transformers reads them, the weights in float32."""
    options: dict[str, Any] = {"gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
        if getattr(tokenizer, "add_bos_token", header.adds_bos) != header.adds_bos:
            tokenizer.add_bos_token = header.adds_bos  # transformers 4 does not ask the file
        if hasattr(transformers, "GgufConfig"):  # where it exists, blocks may stay quantized
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model, told = AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=torch.float32, output_loading_info=True, **options
        )
    except Exception as error:  # every architecture has a reader of its own, which fails in its way
        raise LoadError(
            f"transformers {transformers.__version__} cannot read {path.name} (architecture "
            f"{header.architecture or 'not named'}): {first_line(error)}"
        ) from error
    if lacking := sorted(told["missing_keys"]):  # transformers has filled them at random
        raise LoadError(
            f"{path.name} lacks {len(lacking)} of the model's tensors, {lacking[0]} first; "
            "download it again, or merge its parts first"
        )
    return model, tokenizer


def _seal(folder: Path) -> None:
    files = {file.name: [file.stat().st_size, _sha256(file)] for file in _weights(folder)}
    write_text(folder / _SEAL, json.dumps(files, indent=1) + "\n")


def _whole(folder: Path) -> bool:
    """Whether a folder has the weights that were written, by size and sum.

    Sums are computed again only where a file was written since they were found right.
    """
    try:
        files = json.loads((folder / _SEAL).read_text(encoding="utf-8"))
        present = {file.name: file for file in _weights(folder)}
        if present.keys() != files.keys():
            return False
        stats = {name: file.stat() for name, file in present.items()}
        stamps = json.dumps([[name, s.st_size, s.st_mtime_ns] for name, s in stats.items()])
        note = folder / _CHECKED
        with suppress(OSError, ValueError):  # a note that cannot be read costs sums, no more
            if note.read_text(encoding="utf-8") == stamps:
                return True
        right = all(
            stats[name].st_size == size and _sha256(present[name]) == digest
            for name, (size, digest) in files.items()
        )
    except (OSError, ValueError, AttributeError, TypeError):
        return False
    if right:
        with suppress(WriteError):
            write_text(note, stamps)
    return right


def _publish(new: Path, folder: Path) -> None:
    """Give the folder its name; another process that converts the same file may have been first."""
    if _whole(folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    try:
        new.rename(folder)
    except OSError:
        if not _whole(folder):
            raise


def _remove_abandoned(parent: Path) -> None:
    """Delete what a conversion that was killed has left."""
    for left in parent.glob(f"{_NEW}*"):
        with suppress(OSError):  # one that is under way may get its name, and so be gone
            if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _weights(folder: Path) -> Iterator[Path]:
    return iter(sorted(folder.glob("*.safetensors")))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
