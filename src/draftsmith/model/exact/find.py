"""Whether a model's passes can be exact on this processor, and at which widths."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.draft import Draft
from draftsmith.errors import UnsupportedError
from draftsmith.model.exact.store import DTYPES
from draftsmith.model.exact.widths import ROWS, Widths, watched
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner

_TRIED = (1, 2, 5, 16, 33)
"""Widths of the passes that the whole model is tried with."""


class _AnyWidth:
    """Before anything is known."""

    def at_least(self, width: int) -> int:
        return width


@torch.inference_mode()
def exactly(loaded: LoadedModel) -> LoadedModel:
    """The same model with passes whose rows come out alike, to the bit, in any company.

    Raises UnsupportedError with the reason where that cannot be on this processor.
    """
    reason = _refusal(loaded)
    if reason is not None:
        raise UnsupportedError(f"exact=True: {reason}")
    source = random.Random(0)
    ids = [source.randrange(loaded.vocab_size) for _ in range(ROWS)]
    free: Any = _AnyWidth()
    parts = watched(loaded.model, lambda: _logits(replace(loaded, exact=free), ids, ROWS))
    exact = replace(loaded, exact=Widths(parts))
    whole = _logits(exact, ids, ROWS)
    for width in _TRIED:
        if not torch.equal(_logits(exact, ids, width), whole):
            raise UnsupportedError(
                f"exact=True: passes over {width} tokens give other logits than one over {ROWS}, "
                "by something that is no module of its own; decode without exact=True"
            )
    return exact


def _refusal(loaded: LoadedModel) -> str | None:
    abilities = loaded.capabilities
    if not abilities.packed:
        why = "; ".join(abilities.reasons) or f"it runs with {abilities.attention!r} attention"
        return f"{loaded.name} cannot share passes ({why})"
    if loaded.device.type != "cpu":
        return f"{loaded.name} is on {loaded.device}; only CPU passes have been made exact"
    if loaded.dtype not in DTYPES:
        known = ", ".join(sorted(str(one).removeprefix("torch.") for one in DTYPES))
        return f"{loaded.name} is in {loaded.dtype_name}; its attention computes {known}"
    return None


def _logits(loaded: LoadedModel, ids: list[int], width: int) -> Tensor:
    """(len(ids), V) after every token of a text that is read in passes of a width."""
    runner, found = Runner(loaded), []
    row = runner.open(ids[:1])
    for begin in range(0, len(ids), width):
        chain = Draft.chain(ids[begin + 1 : begin + width], "self-test")
        found.append(runner.forward([row], [chain])[0].logits)
        runner.commit([row], [range(len(chain))], [ids[begin + 1 : begin + width + 1]])
    runner.close(row)
    return torch.cat(found)
