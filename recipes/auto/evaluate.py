"""Test `auto` on recorded answers: tokens and nodes per pass of thirteen columns.

    python recipes/auto/evaluate.py DATA -o benchmarks/results

A column's prior is fitted on the other family's columns (`fit.py`), so never on the column nor on
its kind. "rest" are answers on which no prior was fitted, "picked" those on which the other
family's prior was. The memory has the earlier answers of the same file, and what was learned from
them.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import harmonic_mean, mean

from columns import COLUMNS, TALK, WORK, Answer, streams
from fit import fit, remember

from draftsmith.core.drafter import Context, DrafterState
from draftsmith.core.stats import Stats, total
from draftsmith.drafters.auto import Auto, AutoState
from draftsmith.drafters.context_index import ContextIndex, new_index
from draftsmith.drafters.mixer import Mixer
from draftsmith.drafters.mixer_prior import adaptable
from draftsmith.drafters.tree_search import LARGEST
from draftsmith.lab.bench.machine import machine
from draftsmith.lab.bench.replay import ReplayBudget, replay
from draftsmith.lab.bench.report import table

COSTS = {
    ("ids alone", "rest"): 0.0131, ("ids alone", "picked"): 0.0124,
    ("with memory", "rest"): 0.00985, ("with memory", "picked"): 0.0095,
}  # fmt: skip
"""Cost of a node, chosen so that 12 of them are drafted per pass, with memory 16."""


@dataclass(frozen=True, eq=False, repr=False)
class Judged(Auto):
    """`auto` with a given mixer and index of earlier answers."""

    mixer: Mixer | None = None
    answers: ContextIndex | None = None

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        assert self.mixer is not None
        return AutoState(self, self.mixer, self.answers)


Priors = dict[bool, Mixer]
"""Whether it is for TALK → prior fitted on the other family."""


def fitted(data: Sequence[Sequence[Answer]], indexes: int) -> Priors:
    return {True: fit(data, WORK, indexes), False: fit(data, TALK, indexes)}


def judge(
    data: Sequence[Sequence[Answer]], priors: Priors, cost: float, *, memory: bool, picked: bool
) -> dict[str, Stats]:
    """Return every column's counts, if a node adds `cost` plain passes to a pass."""
    budget = ReplayBudget(curve=((0, 1.0), (LARGEST, 1 + cost * LARGEST)))
    found: dict[str, list[Stats]] = defaultdict(list)
    for stream in data:
        answers, mixers = new_index(), {talk: adaptable(one) for talk, one in priors.items()}
        for answer in stream:
            if answer.column and answer.picked == picked:
                if not memory:
                    mixers = {talk: adaptable(one) for talk, one in priors.items()}
                mixer = mixers[answer.column in TALK]
                drafter = Judged(mixer=mixer, answers=answers if memory else None)
                one = replay(answer.prompt, answer.ids, drafter, answer.vocab_size, budget)
                found[answer.column].append(one.stats)
            if memory:
                answers = remember(answers, answer)
    return {column: total(stats) for column, stats in found.items()}


def summary(counts: dict[str, Stats]) -> tuple[float, float]:
    """Return the harmonic mean over columns of tokens per pass, and the mean of nodes per pass."""
    tokens = harmonic_mean([stats.tokens_per_pass for stats in counts.values()])
    return tokens, mean(stats.drafted / stats.passes for stats in counts.values())


def columns(arms: dict[str, dict[str, Stats]]) -> str:
    """Return columns by arms: tokens per pass at nodes per pass."""
    rows = []
    for column in COLUMNS:
        found = (arm[column] for arm in arms.values())
        shown = (f"{s.tokens_per_pass:.3f} at {s.drafted / s.passes:.1f}" for s in found)
        rows.append([column, *shown])
    means = ("**{:.3f}** at {:.2f}".format(*summary(arm)) for arm in arms.values())
    return table(["", *arms], [*rows, ["harmonic mean", *means]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="folder for the table, auto_columns.md")
    options = parser.parse_args()
    data, arms = list(streams(options.data)), {}
    for indexes, name in ((1, "ids alone"), (2, "with memory")):
        priors = fitted(data, indexes)
        for picked, part in ((False, "rest"), (True, "picked")):
            how = {"memory": indexes == 2, "picked": picked}
            arms[f"{name}, {part}"] = judge(data, priors, COSTS[name, part], **how)
    command = "python recipes/auto/evaluate.py DATA -o benchmarks/results"
    head = ["# auto_columns\n", f"- Command: `{command}`", f"- Machine: {machine()}",
            f"- Versions: draftsmith {version('draftsmith')}",
            f"- Date: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC\n"]  # fmt: skip
    text = "\n".join([*head, columns(arms), ""])
    print(text)
    if options.output:
        (options.output / "auto_columns.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
