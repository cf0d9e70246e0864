"""GGUF files: read by transformers, checked, and saved once as an ordinary model folder.

transformers dequantizes such a file in half a minute (`gguf_file=`). The result is kept as
safetensors in a cache folder named after the file's SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from tokenizers.decoders import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftsmith.errors import LoadError, WriteError, first_line
from draftsmith.model.building import BUILDING
from draftsmith.model.gguf_config import configured
from draftsmith.model.gguf_file import File, read_file
from draftsmith.storage import cache_folder, reading, write_text

FORMAT = 3
"""Add one where a conversion writes something else, so that files are converted again."""
_SEAL = "complete.json"
"""Format, and sizes and times of all files. Written last: without it a folder is incomplete."""
_NEW = ".new-"
_ABANDONED_SECONDS = 86400.0


def converted(path: Path) -> Path:
    """Return the folder with the dequantized weights and the tokenizer of a GGUF file.

    The folder is made in `storage.cache_folder` if it does not exist. Weights are float32, exactly
    as `gguf` dequantizes them. Raises LoadError for a damaged file or one that transformers cannot
    read correctly, WriteError if the folder cannot be written.
    """
    with reading(path):
        name = f"{path.stem}-{_sha256(path)[:32]}"
    folder = cache_folder() / "gguf" / name
    if not _whole(folder):
        _convert(read_file(path), folder)
    return folder


def _convert(file: File, folder: Path) -> None:
    """Let transformers dequantize the file to a folder that appears only when complete."""
    parent, needed = folder.parent, 4 * file.parameters
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
                f"{file.path.name} needs {needed / 1e6:,.1f} MB in {parent}, where "
                f"{free / 1e6:,.1f} MB are free; set DRAFTSMITH_CACHE to a folder with more room"
            )
        with BUILDING:
            model, tokenizer, older = _read(file)
        try:
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)
            settings = older | json.loads((new / "config.json").read_text(encoding="utf-8"))
            write_text(new / "config.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")
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


def _read(file: File) -> tuple[Any, Any, dict[str, Any]]:
    """Read the model in float32, the tokenizer, and settings under the names of transformers 4."""
    where, options = file.path.parent, {"gguf_file": file.path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
        if getattr(tokenizer, "add_bos_token", file.adds_bos) != file.adds_bos:
            tokenizer.add_bos_token = file.adds_bos  # transformers 4 ignores the file's value
        for name in ("bos", "eos", "padding"):
            if (one := file.named(name)) is not None:
                setattr(tokenizer, f"{name[:3]}_token", one)
        if file.values.get("tokenizer.ggml.model") == "gpt2":
            # transformers 4 drops the space before the first word of a text.
            tokenizer.backend_tokenizer.decoder = ByteLevel()
        config, older = configured(AutoConfig.from_pretrained(where, **options), file)
        if hasattr(transformers, "GgufConfig"):  # if it exists, blocks could stay quantized
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model, info = AutoModelForCausalLM.from_pretrained(
            where, config=config, dtype=torch.float32, output_loading_info=True, **options
        )
    except LoadError:
        raise
    # Every architecture has its own reader, with errors of its own.
    except Exception as error:
        why = first_line(error)
        if "ignore_mismatched_sizes" in why:
            why = "its tensors have other sizes than its metadata says"
        raise LoadError(
            f"transformers {transformers.__version__} cannot read {file.path.name} (architecture "
            f"{file.architecture or 'not named'}): {why}"
        ) from error
    # transformers initialized these at random.
    if lacking := sorted(info["missing_keys"]):
        raise LoadError(
            f"{file.path.name} lacks {len(lacking)} of the model's tensors ({lacking[0]} first); "
            "download it again, or merge its parts first"
        )
    return model, tokenizer, older


def _seal(folder: Path) -> None:
    write_text(folder / _SEAL, json.dumps(_state(folder), indent=1) + "\n")


def _whole(folder: Path) -> bool:
    """Whether a folder has the files that this version writes, and nothing wrote to them since."""
    try:
        sealed = json.loads((folder / _SEAL).read_text(encoding="utf-8"))
        return bool(sealed == _state(folder))
    except (OSError, ValueError):
        return False


def _state(folder: Path) -> dict[str, Any]:
    """Format of a folder, and name, size and time of each of its files."""
    stats = ((file.name, file.stat()) for file in sorted(folder.iterdir()) if file.name != _SEAL)
    files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return {"format": FORMAT, "files": files}


def _publish(new: Path, folder: Path) -> None:
    """Rename the folder to its final name, unless another process has made it meanwhile."""
    if _whole(folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    try:
        new.rename(folder)
    except OSError:
        if not _whole(folder):
            raise


def _remove_abandoned(parent: Path) -> None:
    """Delete what killed conversions left."""
    for left in parent.glob(f"{_NEW}*"):
        # A running conversion may rename its folder meanwhile.
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
