"""Judge `auto` on recorded answers: python recipes/auto/evaluate.py ../shared/data -o FOLDER

A column is drafted for with a prior fitted on the other family's columns (`fit.py`), so never on
the column, nor on its kind. "rest" are answers that no prior at all was fitted on, "picked" those
that the other family's prior was. The memory holds the earlier answers of the same file, and what
was learnt from them. Prints tokens and nodes per pass; writes `columns.md` and `calibration.png`.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import harmonic_mean, mean

from columns import COLUMNS, TALK, WORK, Answer, streams
from fit import fit, remember

from draftsmith.bench.replay import ReplayBudget, replay
from draftsmith.core.draft import ROOT, Draft
from draftsmith.core.drafter import Context, DrafterState, Outcome
from draftsmith.drafters.auto import Auto, AutoState
from draftsmith.drafters.context_index import ContextIndex, new_index
from draftsmith.drafters.mixer import Mixer
from draftsmith.drafters.mixer_prior import adaptable
from draftsmith.drafters.tree_search import LARGEST

COSTS = {
    ("ids alone", "rest"): 0.0131, ("ids alone", "picked"): 0.0124,
    ("with memory", "rest"): 0.00985, ("with memory", "picked"): 0.0095,
}  # fmt: skip
"""What a node is taken to cost, so that at most 12 of them are drafted a pass, with memory 16."""
BINS = 10


@dataclass(slots=True)
class Tally:
    """What became of a column's passes and nodes."""

    passes: int = 0
    nodes: int = 0
    tokens: int = 0
    said: list[int] = field(default_factory=lambda: [0] * BINS)
    """Nodes whose parent was right, by the chance that was said."""
    right: list[int] = field(default_factory=lambda: [0] * BINS)

    def note(self, draft: Draft, path: Sequence[int]) -> None:
        """One pass: its draft, and which of it was accepted."""
        kept = {ROOT, *path}
        for node, (parent, chance) in enumerate(
            zip(draft.parents, draft.chances or (), strict=True)
        ):
            if parent in kept:
                place = min(BINS - 1, int(chance * BINS))
                self.said[place] += 1
                self.right[place] += node in kept


@dataclass(frozen=True, eq=False, repr=False)
class Judged(Auto):
    """`auto` with a given mixer and index of earlier answers, watched."""

    mixer: Mixer | None = None
    answers: ContextIndex | None = None
    tally: Tally | None = None

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        assert self.mixer is not None
        state = Watched(self.mixer, chain=self.chain, answers=self.answers)
        state.tally = self.tally or Tally()
        return state


class Watched(AutoState):
    """Its state."""

    tally: Tally

    def observe(self, ctx: Context, outcome: Outcome) -> None:
        self.tally.note(outcome.draft, outcome.verdict.path)
        super().observe(ctx, outcome)


@dataclass(frozen=True, slots=True)
class Priors:
    """By family: fitted on the other."""

    talk: Mixer
    work: Mixer

    @classmethod
    def fitted(cls, data: Sequence[Sequence[Answer]], indexes: int) -> Priors:
        return cls(fit(data, WORK, indexes), fit(data, TALK, indexes))

    def fresh(self) -> dict[bool, Mixer]:
        """Copies that learn, by whether they are for TALK."""
        return {True: adaptable(self.talk), False: adaptable(self.work)}


def judge(
    data: Sequence[Sequence[Answer]],
    priors: Priors,
    cost: float,
    *,
    memory: bool,
    picked: bool,
    chain: bool = False,
) -> dict[str, Tally]:
    """Every column's tally, where a node makes a pass `cost` plain passes dearer."""
    budget = ReplayBudget(curve=((0, 1.0), (LARGEST, 1 + cost * LARGEST)))
    tallies: dict[str, Tally] = defaultdict(Tally)
    for stream in data:
        answers, mixers = new_index(), priors.fresh()
        for answer in stream:
            if answer.column and answer.picked == picked:
                if not memory:
                    mixers = priors.fresh()
                tally = tallies[answer.column]
                drafter = Judged(
                    mixer=mixers[answer.column in TALK],
                    answers=answers if memory else None,
                    tally=tally,
                )
                object.__setattr__(drafter, "chain", chain)
                stats = replay(answer.prompt, answer.ids, drafter, answer.vocab_size, budget).stats
                tally.passes += stats.passes
                tally.nodes += stats.drafted
                tally.tokens += stats.tokens
            if memory:
                answers = remember(answers, answer)
    return tallies


def summary(tallies: dict[str, Tally]) -> tuple[float, float]:
    """Harmonic mean over columns of tokens per pass, and mean of nodes per pass."""
    found = tallies.values()
    return harmonic_mean([t.tokens / t.passes for t in found]), mean(
        t.nodes / t.passes for t in found
    )


def table(arms: dict[str, dict[str, Tally]]) -> str:
    """Columns by arms: tokens per pass at nodes per pass."""
    lines = ["| | " + " | ".join(arms) + " |", "|---" * (1 + len(arms)) + "|"]
    for column in COLUMNS:
        cells = (arm[column] for arm in arms.values())
        shown = (f"{t.tokens / t.passes:.3f} at {t.nodes / t.passes:.1f}" for t in cells)
        lines.append(f"| {column} | " + " | ".join(shown) + " |")
    means = (f"**{tokens:.3f}** at {nodes:.2f}" for tokens, nodes in map(summary, arms.values()))
    return "\n".join([*lines, "| harmonic mean | " + " | ".join(means) + " |"])


def total(tallies: Sequence[Tally]) -> Tally:
    """The nodes of all."""
    whole = Tally()
    for tally in tallies:
        whole.said = [a + b for a, b in zip(whole.said, tally.said, strict=True)]
        whole.right = [a + b for a, b in zip(whole.right, tally.right, strict=True)]
    return whole


def calibration(whole: Tally) -> str:
    """Of the nodes said to be right with a chance in each tenth, how many were."""
    lines = ["| chance said | nodes | right |", "|---|---|---|"]
    for place, (said, right) in enumerate(zip(whole.said, whole.right, strict=True)):
        share = f"{right / said:.3f}" if said else ""
        lines.append(f"| {place / BINS:.1f} to {(place + 1) / BINS:.1f} | {said} | {share} |")
    return "\n".join(lines)


def plot(tallies: dict[str, Tally], file: Path) -> None:
    """Share that was right by the chance that was said: all columns, and each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 5.4), dpi=110)
    middles = [(place + 0.5) / BINS for place in range(BINS)]
    axes.fill_between(
        [0, 1], [-0.03 - 0.05, 0.92], [0.13 - 0.05, 1.08], color="0.93", label="asked for"
    )
    for column, tally in [*tallies.items(), ("all columns", total([*tallies.values()]))]:
        found = zip(middles, tally.said, tally.right, strict=True)
        points = [(middle, right / said) for middle, said, right in found if said >= 50]
        style = (
            {"color": "black", "linewidth": 2.2} if column == "all columns" else {"linewidth": 0.8}
        )
        axes.plot(*zip(*points, strict=True), marker=".", label=column, **style)
    axes.set(xlabel="chance said", ylabel="share right", xlim=(0, 1), ylim=(0, 1))
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--output", "-o", type=Path, help="folder for the table and the plot")
    parser.add_argument("--cost", type=float, help="of a node, in plain passes")
    parser.add_argument("--chain", action="store_true", help="the best chain instead of a tree")
    options = parser.parse_args()
    data = list(streams(options.data))
    arms = {}
    for indexes, name in ((1, "ids alone"), (2, "with memory")):
        priors = Priors.fitted(data, indexes)
        for picked, part in ((False, "rest"), (True, "picked")):
            cost = options.cost or COSTS[name, part]
            arms[f"{name}, {part}"] = judge(
                data, priors, cost, memory=indexes == 2, picked=picked, chain=options.chain
            )
    alone = {
        c: total([arms[f"ids alone, {part}"][c] for part in ("rest", "picked")]) for c in COLUMNS
    }
    text = f"{table(arms)}\n\nIds alone, all columns:\n\n{calibration(total([*alone.values()]))}\n"
    print(text)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "columns.md").write_text(text, encoding="utf-8")
        plot(alone, options.output / "calibration.png")


if __name__ == "__main__":
    main()
