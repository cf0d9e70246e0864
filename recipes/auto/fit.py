"""Fit the prior of `auto`: python recipes/auto/fit.py ../shared/data -o prior.safetensors

Every token of the picked answers is predicted once from the text before it, with a slow rate and no
forgetting; columns weigh alike, within a factor of 4 each way.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

from columns import COLUMNS, Answer, streams

from draftsmith.drafters.mixture.belief import Belief, banks_of
from draftsmith.drafters.mixture.candidates import new_work
from draftsmith.drafters.mixture.contexts import LENGTH, Bank, new_bank, put
from draftsmith.drafters.mixture.grow import NOTHING, advance
from draftsmith.drafters.mixture.prior import save, untaught

EMPTY = new_bank()
RATE = 0.001
FORGETTING = 1e6
"""Cases that a cell remembers while it is fitted."""
TYPICAL = 19_000
"""Tokens of a column of weight 1."""
LEADING = 8
"""Ids of a prompt's end that an answer's first tokens are remembered after."""


def remember(bank: Bank, answer: Answer) -> Bank:
    """The memory, with one more answer."""
    length, head = int(bank.marks[LENGTH]), answer.prompt[-LEADING:]
    end = length + len(head) + len(answer.ids)
    bank = put(bank, length, [*head, *answer.ids], 0)
    advance(
        bank, end, length + len(head), length, end, EMPTY, untaught(1), new_work(1),
        0.0, 1.0, 1.0, NOTHING,
    )  # fmt: skip
    return bank


def weights(data: Sequence[Sequence[Answer]]) -> dict[str | None, float]:
    """What a token of each column counts."""
    tokens = dict.fromkeys(COLUMNS, 1)
    for answer in (a for stream in data for a in stream if a.picked):
        tokens[answer.column or ""] += len(answer.ids)
    return {name: min(4.0, max(0.25, TYPICAL / n)) for name, n in tokens.items()}


def teach(belief: Belief, answer: Answer, earlier: Bank, rate: float, weight: float) -> None:
    """Let the belief predict an answer."""
    ids = answer.prompt + answer.ids
    advance(
        put(new_bank(), 0, ids, 1), len(ids), 0, 0, len(answer.prompt), earlier, belief,
        new_work(banks_of(belief)), rate, FORGETTING, weight, NOTHING,
    )  # fmt: skip


def fit(data: Sequence[Sequence[Answer]], columns: Sequence[str], banks: int) -> Belief:
    """A belief taught by the picked answers of these columns."""
    belief, weight = untaught(banks), weights(data)
    if banks == 1:
        chosen = [a for stream in data for a in stream if a.picked and a.column in columns]
        for epoch in range(2):
            random.Random(epoch).shuffle(chosen)
            for answer in chosen:
                rate = RATE * 0.4**epoch
                teach(belief, answer, EMPTY, rate, weight[answer.column])
        return belief
    for stream in data:
        memory = new_bank()
        for answer in stream:
            if answer.picked and answer.column in columns:
                teach(belief, answer, memory, RATE, weight[answer.column])
            memory = remember(memory, answer)
    return belief


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--output", "-o", type=Path, default=Path("prior.safetensors"))
    options = parser.parse_args()
    data = list(streams(options.data))
    save(options.output, {banks: fit(data, COLUMNS, banks) for banks in (1, 2)})


if __name__ == "__main__":
    main()
