"""What a step reads of its pass: finite flags, arg-max, and the highest logits of each position.

The host waits for an accelerator whenever it reads from it. So everything that a step reads of its
rows is computed there, and copied to the host at once.

Shapes: `N` positions of a row, `V` vocabulary.
"""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.draft import Draft
from draftsmith.core.sequence import Sequence
from draftsmith.core.target import Highest, RowOutput

HIGHEST = 8
"""Number of the highest logits of a position that are read."""
_BLOCK = 64
"""Size of the blocks of neighbouring logits that are searched first."""

_Row = tuple[Sequence, Draft, Tensor]
_Read = tuple[bool, abc.Sequence[int] | None, Highest | None]


def read(
    sequences: abc.Sequence[Sequence],
    drafts: abc.Sequence[Draft],
    outputs: abc.Sequence[RowOutput],
) -> list[RowOutput]:
    """Return the outputs of a pass with what the step and its drafters need on the host.

    On a CPU `highest` stays None: a drafter reads logits there when it needs them. Choices that the
    target has computed are replaced if a sequence bans ids, and dropped if it processes logits.
    """
    found = [_own(*one) for one in zip(sequences, drafts, outputs, strict=True)]
    unread = [i for i, o in enumerate(outputs) if o.finite and o.choices is None and len(o.logits)]
    rows = [(sequences[i], drafts[i], outputs[i].logits) for i in unread]
    on_cpu = all(logits.device.type == "cpu" for _, _, logits in rows)
    for i, (ok, choices, best) in zip(unread, (_here if on_cpu else _copied)(rows), strict=True):
        found[i] = replace(outputs[i], finite=ok, choices=choices, highest=best)
    return found


def _own(sequence: Sequence, draft: Draft, output: RowOutput) -> RowOutput:
    """Return an output with the choices of the sequence's own distribution, if it has choices."""
    distribution = sequence.distribution
    if output.choices is None or (distribution.picks_best and not distribution.banned):
        return output
    choices = None
    if output.finite and distribution.picks_best:
        choices = distribution.best(output.logits[: 1 + draft.size]).tolist()
    return replace(output, choices=choices)


def _here(rows: abc.Sequence[_Row]) -> list[_Read]:
    """Read logits that are on the CPU."""
    drafted = [logits for _, draft, logits in rows if draft]
    flags: list[bool] = finite(drafted).tolist() if drafted else []
    found: list[_Read] = []
    for sequence, draft, logits in rows:
        usable, choices = True, None
        if draft:
            usable, flags = all(flags[: len(logits)]), flags[len(logits) :]
        if usable and sequence.distribution.picks_best:
            choices = sequence.distribution.best(logits[: 1 + draft.size]).tolist()
        found.append((usable, choices, None))
    return found


def _copied(rows: abc.Sequence[_Row]) -> list[_Read]:
    """Read logits that are on an accelerator, with one copy to the host."""
    logits = torch.cat([logits for _, _, logits in rows])
    allowed = logits
    if any(sequence.distribution.banned for sequence, _, _ in rows):
        allowed = torch.cat([s.distribution.allowed(one) for s, _, one in rows])
    numbers = summary(logits, allowed).cpu()
    found: list[_Read] = []
    for sequence, draft, one in rows:
        own, numbers = numbers[: len(one)], numbers[len(one) :]
        usable, choices, best = unpacked(own, draft)
        picks = usable and sequence.distribution.picks_best
        found.append((usable, choices if picks else None, best))
    return found


def summary(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return numbers (N, 2 + 2k), int32: all that `unpacked` reads of (N, V) logits.

    They are a finite flag, the arg-max of `allowed`, and ids and values of the highest logits.
    """
    values, ids = highest(logits)
    flags = torch.stack([finite([logits]).int(), allowed.argmax(-1).int()], dim=1)
    bits = values.float().view(torch.int32)  # some devices have no float64
    return torch.cat([flags, ids.int(), bits], dim=1)


def unpacked(numbers: Tensor, draft: Draft) -> tuple[bool, list[int], Highest]:
    """Return finite flag, choices and highest logits of one row, from a `summary` on the host."""
    own: Any = numbers.numpy()
    k = own.shape[1] // 2 - 1
    best = Highest(own[:, 2 + k :].view("f4"), own[:, 2 : 2 + k])
    usable = not draft or bool(own[:, 0].all())
    return usable, own[: 1 + draft.size, 1].tolist(), best


def finite(logits: abc.Sequence[Tensor]) -> Tensor:
    """Return flags for all positions of several rows (N, V): computed without overflow.

    A state that is not finite makes every logit of its position NaN or infinite, so a sample of
    columns suffices. Single logits may be infinite (masked ids).
    """
    samples = [one[:, :: max(1, one.shape[-1] // 64)] for one in logits]
    return (samples[0] if len(samples) == 1 else torch.cat(samples)).isfinite().any(-1)


def highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the `HIGHEST` highest logits (N, k) of (N, V), in falling order, and their token ids.

    Searching the best blocks first, then the best logits in them, takes a quarter of the time.
    """
    n, V = logits.shape  # noqa: N806
    if V % _BLOCK or V < HIGHEST * _BLOCK:
        values, ids = logits.topk(min(HIGHEST, V))
        return values, ids
    blocks = logits.view(n, -1, _BLOCK)
    chosen = blocks.amax(-1).topk(HIGHEST).indices
    few = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    values, places = few.topk(HIGHEST)
    return values, chosen.gather(1, places // _BLOCK) * _BLOCK + places % _BLOCK
