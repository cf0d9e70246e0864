"""Fit the prior of `auto`: python recipes/auto/fit.py ../shared/data -o prior.safetensors

Every token of the picked answers is predicted once from the text before it, with a slow rate and no
forgetting. Columns have equal weights, within a factor of 4 each way.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

from columns import COLUMNS, Answer, streams
from untaught import save, untaught, untaught_head

from draftsmith.drafters.context_index import ContextIndex, new_index, with_ids
from draftsmith.drafters.mixer import Mixer
from draftsmith.drafters.tree_search import (
    NO_ANSWERS,
    NO_DRAFT,
    NO_ROWS,
    START,
    advance,
    index_ids,
    new_search,
)

RATE = 0.001
FORGETTING = 1e6
"""Cases that a cell averages over during fitting."""
TYPICAL = 19_000
"""Tokens of a column of weight 1."""
LEADING = 8
"""Last ids of a prompt, kept in the memory as context of an answer's first tokens."""


def remember(index: ContextIndex, answer: Answer) -> ContextIndex:
    """Return the index of earlier answers, with one more."""
    start, head = index.length, answer.prompt[-LEADING:]
    index = with_ids(index, start, [*head, *answer.ids], 0)
    index_ids(index, start + len(head) + len(answer.ids), start + len(head), start)
    return index


def weights(data: Sequence[Sequence[Answer]]) -> dict[str | None, float]:
    """Return the weight of a token of each column."""
    tokens = dict.fromkeys(COLUMNS, 1)
    for answer in (a for stream in data for a in stream if a.picked):
        tokens[answer.column or ""] += len(answer.ids)
    return {name: min(4.0, max(0.25, TYPICAL / n)) for name, n in tokens.items()}


def teach(mixer: Mixer, answer: Answer, earlier: ContextIndex, rate: float, weight: float) -> None:
    """Let the mixer predict an answer."""
    ids = answer.prompt + answer.ids
    advance(
        with_ids(new_index(), 0, ids, 1), len(ids), 0, 0, len(answer.prompt), earlier, NO_ROWS,
        NO_ROWS, NO_ROWS, 0, mixer, new_search(), rate, FORGETTING, weight, NO_DRAFT, START,
    )  # fmt: skip


def fit(data: Sequence[Sequence[Answer]], columns: Sequence[str], indexes: int) -> Mixer:
    """Return a mixer fitted on the picked answers of these columns."""
    mixer, weight = untaught(indexes), weights(data)
    if indexes == 1:
        chosen = [a for stream in data for a in stream if a.picked and a.column in columns]
        for epoch in range(2):
            random.Random(epoch).shuffle(chosen)
            for answer in chosen:
                rate = RATE * 0.4**epoch
                teach(mixer, answer, NO_ANSWERS, rate, weight[answer.column])
        return mixer
    for stream in data:
        answers = new_index()
        for answer in stream:
            if answer.picked and answer.column in columns:
                teach(mixer, answer, answers, RATE, weight[answer.column])
            answers = remember(answers, answer)
    return mixer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--output", "-o", type=Path, default=Path("prior.safetensors"))
    options = parser.parse_args()
    data = list(streams(options.data))
    mixers = {f"{indexes}": fit(data, COLUMNS, indexes) for indexes in (1, 2)}
    heads = {f"{key}.head": untaught_head(mixer) for key, mixer in mixers.items()}
    save(options.output, mixers | heads)


if __name__ == "__main__":
    main()
