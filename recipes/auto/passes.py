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

import numpy as np
import torch

from draftsmith.bench import generations
from draftsmith.core.drafter import Context
from draftsmith.core.sampling import Gumbel, SamplingParams
from draftsmith.drafters.auto import PACE, Mixture
from draftsmith.drafters.mixture.bigrams import placed
from draftsmith.drafters.mixture.candidates import LARGEST
from draftsmith.drafters.mixture.compiled import Ints, floats
from draftsmith.drafters.mixture.prior import prior
from draftsmith.drafters.mixture.rows import WIDTH, best
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


def bigrams_of(path: Path) -> Ints:
    """The model's bigrams, each in its place."""
    with np.load(path) as found:
        return placed(found["bigrams"], 1 << 30)


def opened(ids: list[int], prompt: int, cost: float, state: Mixture) -> Context:
    """A context of the prompt, which the state has read; nodes cost so much."""
    told = ids[:prompt]
    context = Context(told, prompt, 2**30, SamplingParams(), Gumbel(0), budget=LARGEST)
    state.widths, state.costs = floats([0.0, LARGEST]), floats([1.0, 1.0 + cost * LARGEST])
    state.take(context)
    state.read()
    return context


def follow(
    state: Mixture, context: Context, ids: list[int], start: int, end: int, cost: float
) -> None:
    """Tell the state what the pass said, and what its nodes cost."""
    state.told, context.ids = start, ids[:end]
    state.take(context)
    state.tokens += PACE * (end - start - state.tokens)
    state.cost += PACE * (1 + cost - state.cost)


def record(runner: Runner, task: str, ids: list[int], prompt: int) -> Passes:
    """One answer, given again."""
    state = Mixture(prior(1))
    context = opened(ids, prompt, COST, state)
    row = runner.open(ids[:prompt])
    runner.prefill(row)
    length, rows, aside = prompt, [], []
    while length < len(ids):
        context.depth = len(ids) - length
        draft = state.draft(context)
        logits = runner.forward([row], [draft])[0].logits
        found = np.array(best([ids[length - 1], *draft.tokens], logits), np.int32)
        found = found.reshape(-1, WIDTH)
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
    arrays, names = {"bigrams": np.array(bigrams(model), np.int32)}, []
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
