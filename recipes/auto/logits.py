"""Fit the prior of `auto` on the model's own logits, after `fit.py`.

    draftsmith bench run PROMPTS.jsonl -m smollm2 --dtype float32 -a none -o ANSWERS.jsonl
    python recipes/auto/logits.py ANSWERS.jsonl prior.safetensors

SmolLM2 repeats its plain greedy answers, in passes with the trees that `auto` drafts from ids
alone. Of every node, the row that `auto` would keep is stored. Then the prior predicts the answers
with these rows and the model's bigrams, and learns their weights. Its weights of ids stay.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from columns import Answer
from fit import FORGETTING, remember
from untaught import save, untaught

from draftsmith.core.drafter import Context
from draftsmith.core.sampling import Gumbel, SamplingParams
from draftsmith.drafters.auto import PACE, Auto, AutoState
from draftsmith.drafters.bigrams import table_of
from draftsmith.drafters.context_index import ContextIndex, new_index, with_ids
from draftsmith.drafters.logit_rows import ROW, WIDTH, best
from draftsmith.drafters.mixer import AFTER, NAMED, ROOT_KEY, Mixer, longer_key
from draftsmith.drafters.mixer_prior import load as load_prior
from draftsmith.drafters.mixer_prior import prior
from draftsmith.drafters.tree_search import (
    LARGEST,
    NO_DRAFT,
    NO_ROWS,
    START,
    advance,
    new_search,
)
from draftsmith.lab.bench import generations
from draftsmith.lab.tune.auto import bigrams
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner

COST = 0.012
"""Cost of a node in plain passes: lower than real, so that trees are wider than usual."""
RATE, EPOCHS, PASS = 0.002, 3, 2
"""Rate of the weights; passes over the data; tokens per pass of the target during them."""


@dataclass(slots=True)
class Passes:
    """A prompt and its answer, with the rows of the model, and of a head if there is one."""

    ids: list[int]
    prompt: int
    """Tokens of the prompt."""
    rows: np.ndarray
    """(answer, WIDTH) row from which each token of the answer was chosen."""
    aside: np.ndarray
    """(rejected, 2 + WIDTH) length of the text before the pass, node, row."""
    head: Any = None
    """(PASS, n) ROW: at [k, i] the head's row for the token after the first i + 1 + k, drafted
    after i + 1."""

    def emitted(self, start: int, end: int) -> Any:
        """Return the rows, (n,) ROW, of a pass that emitted ids[start:end], as `auto` keeps
        them."""
        passed, node = self.aside[:, 0], self.aside[:, 1]
        mine = (start <= passed) & (passed < end) & (node < LARGEST)
        accepted = self.rows[start - self.prompt : end - self.prompt]
        rows = np.concatenate([self.aside[mine][:, 2:], accepted], dtype=np.int32)
        return rows.view(ROW)[:, 0]

    def drafted(self, start: int, end: int) -> Any:
        """Return the rows, (n,) ROW, that the head gave before that pass along its tokens."""
        if self.head is None:
            return NO_ROWS
        rows, key = self.head[: end - start, start - 1].copy(), ROOT_KEY
        for row, token in zip(rows, self.ids[start:end], strict=True):
            row["after"] = key
            key = longer_key(key, token)
        return rows


def record(runner: Runner, ids: list[int], prompt: int) -> Passes:
    """Let the model repeat an answer; keep the rows."""
    state, length, rows, aside = AutoState(Auto(), prior(1)), prompt, [], []
    context = Context(ids[:prompt], prompt, 2**30, SamplingParams(), Gumbel(0), budget=LARGEST)
    state.line = np.array([[0.0, 1.0], [LARGEST, 1.0 + COST * LARGEST]])
    state.take(context)
    state.read()
    row = runner.open(ids[:prompt])
    runner.prefill(row)
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
        end = length + len(path) + 1
        rows += [found[0], *(found[1 + one] for one in path)]
        aside += [[length, n, *found[1 + n]] for n in range(len(draft)) if n not in path]
        runner.commit([row], [path], [ids[length:end]])
        state.emitted, context.ids = length, ids[:end]
        state.take(context)
        state.tokens += PACE * (end - length - state.tokens)
        state.cost += PACE * (1 + COST * len(draft) - state.cost)
        length = end
    runner.close(row)
    none = np.zeros((0, 2 + WIDTH), np.int32)
    return Passes(ids, prompt, np.array(rows), np.array(aside, np.int32) if aside else none)


def answers(path: Path, model: LoadedModel) -> Iterator[Passes]:
    """Yield all plain answers of a file, repeated."""
    runner = Runner(model)
    with torch.inference_mode():
        for row in generations.read(path).entries:
            if row.arm == "none":
                yield record(runner, [*row.prompt_ids, *row.output_ids], len(row.prompt_ids))
                print(row.id, flush=True)


def teach(mixer: Mixer, passes: Sequence[Passes], bigrams: Any) -> None:
    """Let a mixer fitted on ids learn the weights of rows, and keep its weights of ids."""
    forget_rows(mixer)
    before = mixer.copy()
    for one, answers, rate in in_turns(passes, mixer.indexes):
        read_on(mixer, one, answers, rate, bigrams)
    restore(mixer, before)


def in_turns(
    passes: Sequence[Passes], indexes: int
) -> Iterator[tuple[Passes, ContextIndex, float]]:
    """Yield each answer in every epoch, with the index of earlier answers and the rate."""
    for epoch in range(EPOCHS):
        order, answers = [*passes], new_index()
        random.Random(epoch).shuffle(order)
        for one in order:
            yield one, answers, RATE * 0.6**epoch
            if indexes > 1:
                answer = Answer(None, one.ids[: one.prompt], one.ids[one.prompt :], 0)
                answers = remember(answers, answer)


def read_on(mixer: Mixer, one: Passes, answers: ContextIndex, rate: float, bigrams: Any) -> None:
    """Let the mixer predict an answer, pass by pass, so that rows come when they would."""
    search, rows = new_search(), bigrams.copy()
    text, length = with_ids(new_index(), 0, one.ids, 1), one.prompt
    while length < len(one.ids):
        end = min(len(one.ids), length + PASS)
        advance(
            text, end, 0, 0, one.prompt, answers, rows, one.emitted(length, end),
            one.drafted(length, end), length, mixer, search, rate, FORGETTING, 1.0, NO_DRAFT, START,
        )  # fmt: skip
        length = end


def forget_rows(mixer: Mixer) -> None:
    """Set the weights of rows to zero, whatever candidates they name."""
    mixer.cells[-1] = untaught(mixer.indexes).cells[-1]
    mixer.weights[AFTER + 1 :: NAMED] = mixer.weights[AFTER::NAMED]
    mixer.weights[:, -2] = 0.0


def restore(mixer: Mixer, before: Mixer) -> None:
    """Restore the weights that apply where no row names a candidate."""
    mixer.cells[:-1] = before.cells[:-1]
    unnamed = [*range(AFTER), *range(AFTER, len(mixer.weights), NAMED)]
    for column in (*range(mixer.weights.shape[1] - 2), -1):  # all but the row's own
        mixer.weights[unnamed, column] = before.weights[unnamed, column]


def known_rows(model: LoadedModel) -> Any:
    """Return the table of rows, (ROWS,) ROW, that the model's bigrams give before any text."""
    return table_of(bigrams(model).view(np.int32).reshape(-1, WIDTH), 1 << 30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", type=Path, help="plain answers of `draftsmith bench run`")
    parser.add_argument("prior", type=Path, help="what fit.py wrote; it is taught in place")
    options = parser.parse_args()
    model = load("smollm2", dtype="float32", prepack=True)
    known = known_rows(model)
    passes, priors = list(answers(options.answers, model)), load_prior(options.prior)
    for mixer in (priors["1"], priors["2"]):
        teach(mixer, passes, known)
    save(options.prior, priors)


if __name__ == "__main__":
    main()
