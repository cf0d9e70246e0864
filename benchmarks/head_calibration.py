"""How often drafted tokens are right where `auto` says so, without and with a trained head.

    python -m benchmarks.head_calibration DATA --head WORK/head     # five minutes

`auto` answers prompts greedily with a fixed number of nodes, so no count depends on a clock. A node
counts if the text up to its parent came true. The first table and the plot compare stated
probabilities with the share that was right, the second has right nodes per pass by their depth.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from benchmarks import shared
from benchmarks.judged import Recording, judged
from benchmarks.shared import Blocks, Options, run, table
from draftsmith import Engine
from draftsmith.lab.bench.generations import Generation
from draftsmith.model.load import load

BINS, DEPTHS = 10, 8


def parser() -> Options:
    made = Options("head_calibration", __doc__, data="needed")
    made.add_argument("-m", "--model", default="smollm2")
    made.add_argument("--head", required=True, help="folder of an EAGLE-3 head")
    made.add_size("--nodes", (6, 12), (6,), "nodes of a draft", nargs="+")
    made.add_size("--limit", 5, 1, "conversations of each kind")
    made.add_size("--max-new-tokens", 160, 8, "most tokens of an answer")
    return made


def answered(engine: Engine, drafter: Recording, nodes: int, row: Generation) -> list[Any]:
    """Return tokens and passes of a recorded answer, and the judged nodes."""
    drafter.kept.clear()
    options: Any = {"max_new_tokens": len(row.output_ids), "temperature": 0.0, "budget": nodes}
    found = engine.generate(row.prompt_ids, drafter=drafter, **options)
    assert found.tokens == row.output_ids
    ids = [*row.prompt_ids, *row.output_ids]
    every = [node for one in drafter.kept for node in judged(ids, *one)]
    return [len(row.output_ids), found.stats.passes, every]


def measure(args: argparse.Namespace) -> Blocks:
    plain = shared.plain_answers(args, model := load(args.model, dtype="float32", prepack=True))
    engine, depths, most = Engine(model), list[list[str]](), max(args.nodes)
    lines = [[f"{n / BINS:g} to {(n + 1) / BINS:g}"] for n in range(BINS)]
    files = shared.contents(Path(args.head), "*")
    heads, axes = ["probability"], (figure := Figure((5, 4), layout="constrained")).subplots()
    axes.plot([0, 1], [0, 1], color="grey", linestyle="dotted")
    arms = {"auto": Recording(), "with the head": Recording(head=f"eagle3(model={args.head})")}
    for (name, drafter), nodes in product(arms.items(), args.nodes):
        ask, recall = partial(answered, engine, drafter, nodes), args.results.recall
        head = [args.head, files] if drafter.head else None
        each = [recall(name, [row.prompt_ids, nodes, head], partial(ask, row)) for row in plain]
        tokens, passes = (sum(one[n] for one in each) for n in (0, 1))
        found = [node for one in each for node in one[2]]
        counts = (sum(n[1] for n in found if n[2] == d) for d in range(1, DEPTHS + 1))
        depths.append([f"{name}, {nodes} nodes", *(f"{n / passes:.2f}" for n in (tokens, *counts))])
        if nodes == most:
            bins = [list[bool]() for _ in range(BINS)]
            for chance, right, _ in found:
                bins[min(BINS - 1, int(BINS * chance))].append(right)
            shares = [fmean(own) if own else nan for own in bins]
            for line, own, share in zip(lines, bins, shares, strict=True):
                line += [f"{len(own):,}", f"{share:.2f}"]
            heads += [f"{name}: nodes", "right"]
            axes.plot([(n + 0.5) / BINS for n in range(BINS)], shares, marker="o", label=name)
    axes.set(xlabel="probability that auto stated", ylabel="share of nodes that were right")
    axes.legend()
    figure.savefig(args.output / "head_calibration.svg", metadata={"Date": None})
    yield f"At most {most} nodes\n\n{table(heads, lines)}"
    yield table(("per pass", "tokens", *(f"right at {d}" for d in range(1, DEPTHS + 1))), depths)


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
