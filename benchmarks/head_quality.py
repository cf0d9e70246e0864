"""What a trained head brings to `auto`, by how often it is right.

    python -m benchmarks.head_quality DATA     # 40 minutes on one core

SmolLM2 repeats its plain greedy answers to prompts of ten kinds. At each place of the answer, a
*simulated* head names the model's own 64 best tokens, with normal noise on their logits. The noise
is so strong that the head's best token is the model's in the given share of the places, at every
depth. Off the answer it names what follows another place. A pass costs 0.1 plain passes for the
head and 0.013 for each node, so all counts are the same on every machine. "Tokens per
cost" has the cost of a plain pass as its unit.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from benchmarks import shared
from benchmarks.shared import Blocks, Options, run, table
from draftsmith import Engine
from draftsmith.core.draft import ROOT
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.core.sampling import SamplingParams
from draftsmith.drafters.auto import NODE_COST, Auto, AutoState
from draftsmith.drafters.auto_head import PASS_COST, HeadRows
from draftsmith.drafters.logit_rows import ROW, TOP, WHOLE
from draftsmith.drafters.mixer_prior import prior
from draftsmith.drafters.tree_search import LARGEST
from draftsmith.lab.bench.arms import build, parse_arm
from draftsmith.lab.bench.generations import Generation
from draftsmith.lab.bench.run import RunPlan
from draftsmith.model.load import load

BEST = 64
"""Tokens that the noise may bring to the top."""
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


class Simulated:
    """What `HeadRows` asks, in place of a bound head: it knows an answer in part."""

    config, chain, lock = SimpleNamespace(depth=6), False, nullcontext()

    def __init__(self, answer: list[int], rows: Any) -> None:
        self.answer, self.rows, self.passes = answer, rows, 0

    def begin(self, ctx: Context) -> int:
        """Return how many nodes it can be asked about after this text."""
        self.done, self.paths = len(ctx.ids) - ctx.prompt_length, list[list[int]]()
        return LARGEST

    def close(self) -> None:
        """Nothing is held."""

    def ask(self, _: Any, questions: Any) -> list[list[int]]:
        """Return the place in the answer whose row is given, for each node."""
        self.passes += 1
        above = lambda parent: [] if parent == ROOT else self.paths[parent]  # noqa: E731
        new = [[*above(parent), token] for token, parent in questions[0]]
        self.paths += new
        return [[self._place(path) for path in new or [[]]]]

    def _place(self, path: list[int]) -> int:
        place = self.done + len(path)
        right = self.answer[self.done : place] == path and place < len(self.answer)
        return place if right else sum(path) % len(self.answer)

    def likeliest(self, places: list[int], _: int) -> tuple[Any, Any]:
        """Return the tokens and probabilities of these places."""
        rows = self.rows[places]
        return torch.tensor(rows["tokens"]), torch.tensor(rows["probs"]) / WHOLE


class WithHead(Drafter):
    """`auto` with a simulated head."""

    name = "auto"

    def __init__(self, auto: Any, head: Simulated) -> None:
        self.auto, self.head = auto, HeadRows(cast("Any", head))
        self.head.entries = cast("Any", head)

    def open(self, ctx: Context) -> DrafterState:
        state = AutoState(prior(1), bigrams=self.auto.bigrams, head=self.head)
        state.take(ctx)
        state.read()
        return state


def noisy(logits: Tensor, noise: Tensor, strength: float) -> tuple[Any, float]:
    """Return the rows, (n,) ROW, of a head of a noise, and how often its best token is right."""
    probs, ids = logits.softmax(-1).topk(BEST)
    changed = probs.log() + strength * noise
    rest = (1 - probs.sum(-1, keepdim=True)).clamp_min(1e-6).log()  # all others, without noise
    found, places = torch.cat([changed, rest], -1).softmax(-1)[:, :-1].topk(TOP)
    rows = np.zeros(len(found), ROW)
    rows["tokens"], rows["probs"] = ids.gather(-1, places), found * WHOLE
    return rows, float((places[:, 0] == 0).float().mean())


def strength_for(share: float, logits: Tensor, noise: Tensor) -> float:
    """Return the noise with which a head is right in this share of the places."""
    low, high = 0.0, 64.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if noisy(logits, noise, middle)[1] > share else (low, middle)
    return low


class Plain(NamedTuple):
    """A plain answer, with the model's logits and the noise of a head at each of its places."""

    row: Generation
    logits: Tensor
    noise: Tensor

    @classmethod
    def of(cls, row: Generation, model: Any) -> Plain:
        ids, start = torch.tensor([[*row.prompt_ids, *row.output_ids]]), len(row.prompt_ids)
        with torch.inference_mode():
            logits = model(ids).logits[0, start - 1 : -1]
        generator = torch.Generator().manual_seed(start)
        return cls(row, logits, torch.randn((len(logits), BEST), generator=generator))


def counts(engine: Engine, one: Plain, nodes: int, strength: float | None) -> list[int]:
    """Return tokens, passes, drafted nodes, and passes of the head; None: without one."""
    head, drafter, row = None, Auto(), one.row
    if strength is not None:
        head = Simulated(row.output_ids, noisy(one.logits, one.noise, strength)[0])
        drafter = WithHead(drafter.bind(engine.model.facts), head)
    options: dict[str, Any] = {"max_new_tokens": len(row.output_ids), "temperature": 0.0}
    found = engine.generate(row.prompt_ids, drafter=drafter, budget=nodes, **options)
    assert found.tokens == row.output_ids
    stats = found.stats
    return [len(found.tokens), stats.passes, stats.drafted, head.passes if head else 0]


def measure(args: argparse.Namespace) -> Blocks:
    model = load(args.model, dtype="float32", prepack=True)
    asked, how = shared.live(args.data, args.limit), {"max_new_tokens": args.max_new_tokens}
    plan = RunPlan(model, build(model, [parse_arm("none")]), asked, SamplingParams(), **how)
    plain = [
        Plain.of(row, model.model)
        for row in shared.answers(args.output, f"{args.name}.plain", plan).rows
    ]
    every = [torch.cat(parts) for parts in zip(*(one[1:] for one in plain), strict=True)]
    heads = {"no head": None}
    heads |= {f"right in {share:g}": strength_for(share, *every) for share in args.shares}
    engine = Engine(model)
    for nodes in args.nodes:
        lines = list[list[str]]()
        for name, strength in heads.items():
            found = [
                args.results.recall(
                    name, [one.row.prompt_ids, nodes], partial(counts, engine, one, nodes, strength)
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
