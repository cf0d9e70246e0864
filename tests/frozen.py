"""Stands in for a CUDA graph: repeats recorded operations on the same tensors, without Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftsmith.model.loaded import LoadedModel


class Recorder(TorchDispatchMode):
    """Records each operation with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made


class Frozen:
    """A recorded pass. A replay computes the operations that were recorded, and nothing else."""

    made: list[Frozen] = []  # noqa: RUF012  emptied by `freeze`

    def __init__(self, body: Callable[[], Any], _device: Any, _memory: Any) -> None:
        self.used = self.replays = 0
        body()
        with Recorder() as recorder:
            self.outputs = body()
        self.calls = recorder.calls
        Frozen.made.append(self)

    def __call__(self) -> Any:
        self.replays += 1
        for func, args, kwargs, made in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                fresh = isinstance(old, Tensor) and old.data_ptr() != new.data_ptr()
                if fresh and not _shared(old, new):
                    old.copy_(new)
        return self.outputs


def _shared(old: Tensor, new: Tensor) -> bool:
    return old.untyped_storage().data_ptr() == new.untyped_storage().data_ptr()


def freeze(monkeypatch: Any, model: LoadedModel) -> list[Frozen]:
    """Let the passes of a model be recorded and replayed; returns what is recorded."""
    Frozen.made = []
    monkeypatch.setattr("draftsmith.model.graphs.Captured", Frozen)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", object)
    model.graphs.captures = True
    return Frozen.made


def capturing(monkeypatch: Any, device: str, captured: Any = Frozen) -> None:
    """Let passes on devices of this type be captured, as `captured` does."""
    monkeypatch.setattr("draftsmith.model.graphs.CAPTURED", (device,))
    monkeypatch.setattr("draftsmith.model.graphs.Captured", captured)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", object)


def unable(_body: Any, device: torch.device, _memory: Any) -> Any:
    """A capture that fails, as on a device that cannot capture."""
    raise RuntimeError(f"operation not permitted on {device} when stream is capturing\nmore")
