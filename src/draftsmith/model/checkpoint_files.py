"""Tensors of a checkpoint by name, without the model that they belong to.

For what transformers does not load: trained heads, beside a model or in its own files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HfHubHTTPError
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from draftsmith import builtin
from draftsmith.errors import LoadError, first_line
from draftsmith.storage import parse_json, reading

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLES = "pytorch_model.bin", "model.bin", "pytorch_model.bin.index.json"


class Checkpoint:
    """The configuration and the safetensors files of a folder or a hub id."""

    def __init__(self, source: str) -> None:
        """Raises LoadError where there is no checkpoint, or only a pickled one."""
        self.source = source = builtin.resolve(source)
        config = self._file("config.json")
        if config is None:
            raise LoadError(f"{source} has no config.json; give a folder or a hub id that has one")
        self.config: dict[str, Any] = self._json(config)
        self.files = self._files()
        """Name of a tensor → its file."""

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the tensors of these names, on the CPU; raises LoadError for damaged files."""
        found: dict[str, Tensor] = {}
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        for path, inside in by_file.items():
            with reading(path), safe_open(path, "pt") as file:
                found |= {name: file.get_tensor(name) for name in inside}
        return found

    def _files(self) -> dict[str, Path]:
        if index := self._file(_INDEX):
            names = self._json(index).get("weight_map")
            if not isinstance(names, dict):
                raise LoadError(f"{index} has no weight_map; save the checkpoint again")
            files = {file: self._file(file) for file in set(names.values())}
            if missing := [file for file, path in files.items() if path is None]:
                raise LoadError(f"{self.source} has no {missing[0]}, which its index names")
            return {name: path for name, file in names.items() if (path := files[file])}
        if single := self._file(_SINGLE):
            with reading(single), safe_open(single, "pt") as file:
                return dict.fromkeys(file.keys(), single)
        if pickled := next(filter(self._file, _PICKLES), None):
            raise LoadError(
                f"{self.source} has {pickled} only, a pickle, which can run code; download it, and "
                "run `draftsmith train unpickle FOLDER`, which reads its tensors and runs nothing"
            )
        raise LoadError(f"{self.source} has no {_SINGLE}")

    def _file(self, name: str) -> Path | None:
        """A file of the checkpoint, of a hub id from the cache or the hub; None if it has none."""
        if os.path.exists(self.source):
            return path if (path := Path(self.source, name)).is_file() else None
        try:
            found = cached_file(self.source, name, _raise_exceptions_for_missing_entries=False)
        except (OSError, ValueError, HfHubHTTPError) as error:
            raise LoadError(
                f"{self.source!r} cannot be read: no such folder, and the hub did not deliver it "
                f"({first_line(error)})"
            ) from error
        return None if found is None else Path(found)

    @staticmethod
    def _json(path: Path) -> dict[str, Any]:
        try:
            found = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LoadError(f"{path} cannot be read: {first_line(error)}") from error
        if not isinstance(found, dict):
            raise LoadError(f"{path} cannot be read: it holds no JSON object")
        return found
