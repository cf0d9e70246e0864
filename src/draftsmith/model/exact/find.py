"""Tests whether a model's passes can be exact on this processor, and at which widths."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.core.draft import Draft
from draftsmith.errors import UnsupportedError
from draftsmith.model.exact.store import DTYPES
from draftsmith.model.exact.widths import ROWS, Widths, watched
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner

_TRIED = (1, 2, 5, 16, 33)
"""Widths at which the whole model is tried."""
_PASSES = 16
"""Most passes of each."""


@torch.inference_mode()
def exactly(loaded: LoadedModel) -> LoadedModel:
    """Return the same model with exact passes: each row is bit-equal whatever else is computed.

    Raises UnsupportedError with the reason if this processor cannot do that.
    """
    reason = _refusal(loaded)
    if reason is not None:
        raise UnsupportedError(f"exact=True: {reason}")
    source = random.Random(0)
    ids = [source.randrange(loaded.vocab_size) for _ in range(ROWS)]
    untested = replace(loaded, exact=Widths([]))
    parts = watched(loaded.model, lambda: _logits(untested, ids, ROWS))
    exact = replace(loaded, exact=Widths(parts))
    whole = _logits(exact, ids, ROWS)
    for width in _TRIED:
        some = ids[: _PASSES * width]
        if not torch.equal(_logits(exact, some, width), whole[: len(some)]):
            raise UnsupportedError(
                f"exact=True: passes over {width} tokens give other logits than one over {ROWS}, "
                "although every module agrees; decode without exact=True"
            )
    return exact


def _refusal(loaded: LoadedModel) -> str | None:
    capabilities = loaded.capabilities
    if not capabilities.packed:
        why = (
            "; ".join(capabilities.reasons) or f"it runs with {capabilities.attention!r} attention"
        )
        return f"{loaded.name} cannot share passes ({why})"
    if loaded.device.type != "cpu":
        return f"{loaded.name} is on {loaded.device}; exact passes need a CPU"
    if loaded.dtype not in DTYPES:
        known = ", ".join(sorted(str(one).removeprefix("torch.") for one in DTYPES))
        return f"{loaded.name} is in {loaded.dtype_name}; exact attention supports {known}"
    return None


def _logits(loaded: LoadedModel, ids: list[int], width: int) -> Tensor:
    """(len(ids), V) logits after every token of a text, computed in passes of one width."""
    runner, found = Runner(loaded), []
    row = runner.open(ids[:1])
    for begin in range(0, len(ids), width):
        chain = Draft.chain(ids[begin + 1 : begin + width], "self-test")
        found.append(runner.forward([row], [chain])[0].logits)
        runner.commit([row], [range(len(chain))], [ids[begin + 1 : begin + width + 1]])
    runner.close(row)
    return torch.cat(found)
