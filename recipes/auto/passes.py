"""Record what SmolLM2's logits say: python recipes/auto/passes.py ANSWERS.jsonl -o passes.npz

ANSWERS are plain greedy answers, of `draftsmith bench run PROMPTS.jsonl -m smollm2 --dtype float32
-a none -o ANSWERS.jsonl`. The model is made to give each of them again, in passes with the trees
that `auto` drafts from ids alone, and of every node the row is kept that `auto` would keep; so are
the rows that `draftsmith tune auto` keeps of the model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.bench import generations
from draftsmith.core.drafter import Context
from draftsmith.core.sampling import Gumbel, SamplingParams
from draftsmith.drafters.auto import PACE, AutoState
from draftsmith.drafters.bigrams import table_of
from draftsmith.drafters.logit_rows import WIDTH, best
from draftsmith.drafters.mixer_prior import prior
from draftsmith.drafters.tree_search import LARGEST
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner
from draftsmith.tune.auto import bigrams

COST = 0.012
"""Of a node, in plain passes: wider trees than one would want to replay."""
HALVES = ("qa", "rag", "translation", "commit_edits")
"""Tasks of one half; what is fitted on it is judged on the others, and the other way round."""


@dataclass(slots=True)
class Passes:
    """A prompt and its answer."""

    task: str
    ids: list[int]
    prompt: int
    rows: np.ndarray
    """(answer, WIDTH) that each token of the answer was said by."""
    aside: np.ndarray
    """(rejected, 2 + WIDTH) length of the text before the pass, node, row."""

    @property
    def half(self) -> bool:
        return self.task in HALVES


def task_of(suite: str, category: str | None) -> str:
    """What an answer is counted under: MT-Bench's kinds are one."""
    if suite != "spec_bench":
        return "chat" if suite == "mt_redundant" else suite
    own = ("translation", "summarization", "qa", "math_reasoning", "rag")
    return category if category in own else "chat"


def read(path: Path) -> list[Passes]:
    """What `main` wrote."""
    with np.load(path) as found:
        return [
            Passes(
                name.split(":")[1], found[f"{name}.ids"].tolist(), int(found[f"{name}.prompt"]),
                found[f"{name}.rows"], found[f"{name}.aside"],
            )
            for name in found["names"].tolist()
        ]  # fmt: skip


def bigrams_of(path: Path) -> Any:
    """The model's bigrams, each in its place."""
    with np.load(path) as found:
        return table_of(found["bigrams"], 1 << 30)


def opened(ids: list[int], prompt: int, cost: float, state: AutoState) -> Context:
    """A context of the prompt, which the state has read; nodes cost so much."""
    told = ids[:prompt]
    context = Context(told, prompt, 2**30, SamplingParams(), Gumbel(0), budget=LARGEST)
    state.line = np.array([[0.0, 1.0], [LARGEST, 1.0 + cost * LARGEST]])
    state.take(context)
    state.read()
    return context


def follow(
    state: AutoState, context: Context, ids: list[int], start: int, end: int, cost: float
) -> None:
    """Tell the state what the pass said, and what its nodes cost."""
    state.emitted, context.ids = start, ids[:end]
    state.take(context)
    state.tokens += PACE * (end - start - state.tokens)
    state.cost += PACE * (1 + cost - state.cost)


def record(runner: Runner, task: str, ids: list[int], prompt: int) -> Passes:
    """One answer, given again."""
    state = AutoState(prior(1))
    context = opened(ids, prompt, COST, state)
    row = runner.open(ids[:prompt])
    runner.prefill(row)
    length, rows, aside = prompt, [], []
    while length < len(ids):
        context.depth = len(ids) - length
        draft = state.draft(context)
        logits = runner.forward([row], [draft])[0].logits
        found = best([ids[length - 1], *draft.tokens], logits).view(np.int32).reshape(-1, WIDTH)
        path, node, children = [], -1, draft.children()
        while length + len(path) < len(ids) - 1:
            child = children.get((node, ids[length + len(path)]))
            if child is None:
                break
            path.append(node := child)
        emitted = ids[length : length + len(path) + 1]
        rows += [found[0], *(found[1 + one] for one in path)]
        aside += [[length, n, *found[1 + n]] for n in range(len(draft)) if n not in path]
        runner.commit([row], [path], [emitted])
        end = length + len(emitted)
        follow(state, context, ids, length, end, COST * len(draft))
        length = end
    runner.close(row)
    empty = np.zeros((0, 2 + WIDTH), np.int32)
    return Passes(task, ids, prompt, np.array(rows), np.array(aside, np.int32) if aside else empty)


def answers(path: Path, model: LoadedModel) -> Iterator[Passes]:
    """All of them."""
    runner = Runner(model)
    with torch.inference_mode():
        for row in generations.read(path).entries:
            if row.arm == "none":
                ids = [*row.prompt_ids, *row.output_ids]
                yield record(runner, task_of(row.suite, row.category), ids, len(row.prompt_ids))
                print(row.id, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--output", "-o", type=Path, default=Path("passes.npz"))
    options = parser.parse_args()
    model = load("smollm2", dtype="float32", prepack=True)
    rows = bigrams(model).view(np.int32).reshape(-1, WIDTH)
    arrays, names = {"bigrams": rows}, []
    for number, one in enumerate(answers(options.answers, model)):
        names.append(f"{number}:{one.task}")
        arrays |= {
            f"{names[-1]}.ids": np.array(one.ids, np.int32),
            f"{names[-1]}.prompt": np.array(one.prompt),
            f"{names[-1]}.rows": one.rows,
            f"{names[-1]}.aside": one.aside,
        }
    np.savez_compressed(options.output, names=np.array(names), **arrays)


if __name__ == "__main__":
    main()
