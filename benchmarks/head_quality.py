"""What a trained head brings to `auto`, by how often it is right.

    python -m benchmarks.head_quality DATA     # 40 minutes on one core

SmolLM2 repeats its plain greedy answers to prompts of ten kinds. At each place of the answer, a
*simulated* head names the model's own 64 best tokens, with normal noise on their logits. The noise
is so strong that the head's best token is the model's in the given share of the places, at every
depth; a temperature calibrates its probabilities. Off the answer it names what follows another
place. A pass costs 0.1 plain passes for the head and 0.013 for each node, so all counts are the
same on every machine. "Tokens per cost" has the cost of a plain pass as its unit.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from benchmarks import shared
from benchmarks.shared import Blocks, Options, run, table
from benchmarks.simulated import Plain, Quality, Simulated, WithHead, noisy, quality_for
from draftsmith import Engine
from draftsmith.drafters.auto import NODE_COST, Auto
from draftsmith.drafters.auto_head import PASS_COST
from draftsmith.model.load import load
from draftsmith.storage import digest

HEADS = ("head", "tokens per pass", "nodes per pass", "the head's passes per pass",
         "tokens per cost")  # fmt: skip


def parser() -> Options:
    made = Options("head_quality", __doc__, data="needed")
    made.add_argument("-m", "--model", default="smollm2")
    made.add_size("--shares", (0.3, 0.5, 0.7, 0.8), (0.7,), "heads", type=float, nargs="+")
    made.add_size("--nodes", (6, 12), (6,), "nodes of a draft", nargs="+")
    made.add_size("--limit", 2, 1, "conversations of each kind")
    made.add_size("--max-new-tokens", 160, 8, "most tokens of an answer")
    return made


def counts(engine: Engine, one: Plain, nodes: int, quality: Quality | None) -> list[int]:
    """Return tokens, passes, drafted nodes, and passes of the head; None: without one."""
    head, drafter, row = None, Auto(), one.row
    if quality is not None:
        head = Simulated(row.output_ids, noisy(one.logits, one.noise, quality))
        drafter = WithHead(drafter.bind(engine.model.facts), head)
    options: dict[str, Any] = {"max_new_tokens": len(row.output_ids), "temperature": 0.0}
    found = engine.generate(row.prompt_ids, drafter=drafter, budget=nodes, **options)
    assert found.tokens == row.output_ids
    stats = found.stats
    return [len(found.tokens), stats.passes, stats.drafted, head.passes if head else 0]


def measure(args: argparse.Namespace) -> Blocks:
    model = load(args.model, dtype="float32", prepack=True)
    plain = [Plain.of(row, model.model) for row in shared.plain_answers(args, model)]
    every = [torch.cat(parts) for parts in zip(*(one[1:] for one in plain), strict=True)]
    heads: dict[str, Quality | None] = {"no head": None}
    heads |= {f"right in {share:g}": quality_for(share, *every) for share in args.shares}
    engine = Engine(model)
    answers = digest([[one.row.prompt_ids, one.row.output_ids] for one in plain])
    for nodes in args.nodes:
        lines = list[list[str]]()
        for name, quality in heads.items():
            found = [
                args.results.recall(
                    [
                        name,
                        args.model,
                        one.row.prompt_ids,
                        one.row.output_ids,
                        nodes,
                        quality and answers,
                    ],
                    partial(counts, engine, one, nodes, quality),
                )
                for one in plain
            ]
            tokens, passes, drafted, asks = map(sum, zip(*found, strict=True))
            cost = passes + NODE_COST * drafted + PASS_COST * asks
            figures = tokens / passes, drafted / passes, asks / passes, tokens / cost
            lines.append([name, *(f"{figure:.2f}" for figure in figures)])
        yield f"{len(plain)} prompts, at most {nodes} nodes\n\n{table(HEADS, lines)}"


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
