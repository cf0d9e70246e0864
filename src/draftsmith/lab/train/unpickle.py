"""Pickled tensors → safetensors: the only place where a pickle is read, and only its tensors."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.errors import LoadError, OptionError, first_line
from draftsmith.lab.train.run import kept_whole

_NAMES = "pytorch_model.bin", "model.bin"


def unpickle(folder: Path) -> Path:
    """Write `model.safetensors` of the pickled tensors in a folder; returns the new file.

    Raises LoadError for a pickle that holds more than tensors, OptionError where there is nothing
    to do, WriteError.
    """
    path = next((folder / name for name in _NAMES if (folder / name).is_file()), None)
    new = folder / "model.safetensors"
    if path is None:
        raise OptionError(f"{folder} has neither {' nor '.join(_NAMES)}")
    if new.exists():
        raise OptionError(f"{new} exists already; nothing is overwritten")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise LoadError(f"{path} cannot be read as tensors: {first_line(error)}") from error
    if not (isinstance(found, dict) and all(isinstance(t, Tensor) for t in found.values())):
        raise LoadError(f"{path} holds more than tensors by name")
    with kept_whole(new, advice="give the same command again"):
        save_file({name: tensor.clone().contiguous() for name, tensor in found.items()}, new)
        new.chmod(path.stat().st_mode)  # safetensors makes it readable for its owner only
    return new
