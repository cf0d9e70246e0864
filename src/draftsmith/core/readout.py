"""What a step reads of its pass: finite flags, next tokens, and each position's highest logits.

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
from torch.nn.functional import pad

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
    target has computed are replaced or dropped if a sequence does not take the best logits.
    """
    found = _rechosen(sequences, drafts, outputs)
    unread = [i for i, o in enumerate(outputs) if o.finite and o.choices is None and len(o.logits)]
    rows = [(sequences[i], drafts[i], outputs[i].logits) for i in unread]
    on_cpu = all(logits.device.type == "cpu" for _, _, logits in rows)
    for i, (ok, choices, best) in zip(unread, (_here if on_cpu else _copied)(rows), strict=True):
        found[i] = replace(outputs[i], finite=ok, choices=choices, highest=best)
    return found


def _rechosen(
    sequences: abc.Sequence[Sequence],
    drafts: abc.Sequence[Draft],
    outputs: abc.Sequence[RowOutput],
) -> list[RowOutput]:
    """Return the outputs; those with choices get the choices of the sequence's distribution."""
    found, chosen = [*outputs], dict[int, Tensor]()
    for i, (sequence, draft, output) in enumerate(zip(sequences, drafts, outputs, strict=True)):
        distribution = sequence.distribution
        if output.choices is None or (distribution.picks_best and not distribution.banned):
            continue
        found[i] = replace(output, choices=None)
        tokens = _choices(sequence, draft, output.logits) if output.finite else None
        if tokens is not None:
            chosen[i] = tokens[: 1 + draft.size]
    if chosen:
        numbers = torch.cat([*chosen.values()]).tolist()
        for i, tokens in chosen.items():
            own, numbers = numbers[: len(tokens)], numbers[len(tokens) :]
            found[i] = replace(found[i], choices=_valid(own))
    return found


def _choices(sequence: Sequence, draft: Draft, logits: Tensor) -> Tensor | None:
    """Return (N,) tokens that follow the positions of `logits` (N, V), computed on their device.

    Those that follow probes have no meaning. A token below 0 could not be chosen. None: the tokens
    must be chosen one by one, because they depend on the prefix, or on what a drafter drew.
    """
    distribution, sampler = sequence.distribution, sequence.sampler
    if distribution.picks_best:
        return distribution.best(logits)
    one_by_one = distribution.lazy or distribution.greedy or bool(draft.proposals)
    # On a CPU it costs less to compute only the distributions at accepted nodes.
    if one_by_one or not sampler.predicts or logits.device.type == "cpu":
        return None
    draws = (0, *draft.tree_depths())[: 1 + draft.size]
    probs = distribution.scores(None, logits[: len(draws)]).softmax(-1)
    tokens = sampler.predict(probs, draws).to(probs.device)
    tokens = torch.where(probs[:, 0].isnan(), -1, tokens)
    return pad(tokens, (0, len(logits) - len(draws)))


def _valid(tokens: list[int]) -> list[int] | None:
    """Return tokens that were all chosen; else None, so that `verify` raises the error."""
    return None if min(tokens) < 0 else tokens


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
    if all(s.distribution.picks_best and not s.distribution.banned for s, _, _ in rows):
        tokens = logits.argmax(-1)
    else:
        chosen = [(one, _choices(s, draft, one)) for s, draft, one in rows]
        tokens = torch.cat(
            [
                one.new_full((len(one),), -1, dtype=torch.long) if own is None else own
                for one, own in chosen
            ]
        )
    numbers = summary(logits, tokens).cpu()
    found: list[_Read] = []
    for _, draft, one in rows:
        own, numbers = numbers[: len(one)], numbers[len(one) :]
        usable, choices, best = unpacked(own, draft)
        found.append((usable, _valid(choices) if usable else None, best))
    return found


def summary(logits: Tensor, choices: Tensor) -> Tensor:
    """Return numbers (N, 2 + 2k), int32: all that `unpacked` reads of (N, V) logits.

    They are a finite flag, `choices` (N,), and ids and values of the highest logits.
    """
    values, ids = highest(logits)
    flags = torch.stack([finite([logits]).int(), choices.int()], dim=1)
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
