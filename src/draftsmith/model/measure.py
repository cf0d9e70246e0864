"""How long a pass takes by its width: what speculation gains or loses on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Container, Mapping, Sequence
from typing import TypeVar

import torch

from draftsmith.core.draft import Draft
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.rows import SequenceRow
from draftsmith.model.runner import Runner


def pass_cost(
    loaded: LoadedModel,
    widths: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    context: int = 256,
    repeats: int = 7,
) -> dict[int, float]:
    """Median seconds of a verifying pass, by width in positions, after `context` cached ones.

    A plain target has one width, 1. Widths that do not fit the context length are left out.
    """
    runner = Runner(loaded)
    vocab = runner.vocab_size
    context = min(context, (loaded.context_length or context + 1) // 2)
    prompt = [i * 31 % vocab for i in range(context + 1)]
    row = runner.open(prompt)
    room = runner.room(row)
    drafts = {w: Draft.chain([(7 * i) % vocab for i in range(w - 1)], "cost") for w in widths}
    drafts = {w: d for w, d in drafts.items() if len(d) <= room}
    seconds: dict[int, list[float]] = {w: [] for w in drafts}
    for turn in range(repeats + 1):  # The first turn warms up.
        for width, draft in drafts.items():  # A slow moment hits all widths.
            spent = _timed(runner, row, prompt, draft)
            if turn:
                seconds[width].append(spent)
    runner.close(row)
    return {width: statistics.median(times) for width, times in seconds.items()}


def _timed(runner: Runner, row: SequenceRow, prompt: list[int], draft: Draft) -> float:
    runner.extend(row, prompt)
    runner.prefill(row)
    if runner.shape == "plain":  # Its prompt and root share the first pass; time the second.
        runner.extend(row, prompt[:-1])
        runner.forward([row], [draft])
        runner.commit([row], [[]], [prompt[-1:]])
    device = runner.loaded.device
    _wait(device)
    start = time.perf_counter()
    runner.forward([row], [draft])
    _wait(device)
    spent = time.perf_counter() - start
    runner.commit([row], [range(len(draft))], [[*draft.tokens, 0]])
    return spent


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


WIDE = 16
"""A pass over so many tokens stands for all that verify drafts."""
CLEARLY_CHEAPER = 0.9
"""Less than this of another one's time is no accident of measuring."""

Way = TypeVar("Way")


def cheapest(ways: Mapping[Way, Mapping[int, float]], usual: Container[Way]) -> Way:
    """The way to compute whose plain pass and wide pass take the least time together.

    `ways` are seconds by width, as `pass_cost` gives them: of a dtype, or a number of threads. One
    of the `usual` ways is chosen unless another one is clearly cheaper.
    """
    seconds = {way: _both(costs) for way, costs in ways.items()}
    best = min(seconds, key=lambda way: seconds[way])
    kept = min((way for way in ways if way in usual), key=lambda way: seconds[way], default=best)
    return kept if seconds[best] > CLEARLY_CHEAPER * seconds[kept] else best


def _both(costs: Mapping[int, float]) -> float:
    return costs[1] + costs[max(width for width in costs if width <= WIDE)]
