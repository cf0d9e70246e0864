"""Teach the prior of `auto` what the model's own logits are worth: what follows `fit.py`.

    draftsmith bench run PROMPTS.jsonl -m smollm2 --dtype float32 -a none -o ANSWERS.jsonl
    python recipes/auto/logits.py ANSWERS.jsonl prior.safetensors

SmolLM2 is made to give its plain greedy answers again, in passes with the trees that `auto` drafts
from ids alone; of every node the row is kept that `auto` would keep. Then the prior predicts the
answers with these rows and the model's bigrams, and learns what they are worth. What it believes of
ids stays.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from columns import Answer
from fit import FORGETTING, remember

from draftsmith.bench import generations
from draftsmith.core.drafter import Context
from draftsmith.core.sampling import Gumbel, SamplingParams
from draftsmith.drafters.auto import PACE, Mixture
from draftsmith.drafters.mixture.belief import AFTER, VALUES, Belief, banks_of
from draftsmith.drafters.mixture.bigrams import placed
from draftsmith.drafters.mixture.candidates import CELLS, LARGEST, new_work
from draftsmith.drafters.mixture.compiled import Ints, filled, floats
from draftsmith.drafters.mixture.contexts import ORDERS, Bank, new_bank, put
from draftsmith.drafters.mixture.grow import NOTHING, advance
from draftsmith.drafters.mixture.prior import load as load_prior
from draftsmith.drafters.mixture.prior import prior, save, untaught
from draftsmith.drafters.mixture.rows import KNOWN, WIDTH, best
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner
from draftsmith.tune.auto import bigrams

COST = 0.012
"""Of a node, in plain passes: wider trees than one would want to draft."""
RATE, EPOCHS, PASS = 0.002, 3, 2
"""Of the weights; how often all is read; tokens of a pass while it is."""


@dataclass(slots=True)
class Passes:
    """A prompt and its answer, as the model said it."""

    ids: list[int]
    prompt: int
    """Tokens of the prompt."""
    rows: np.ndarray
    """(answer, WIDTH) that each token of the answer was said by."""
    aside: np.ndarray
    """(rejected, 2 + WIDTH) length of the text before the pass, node, row."""


def record(runner: Runner, ids: list[int], prompt: int) -> Passes:
    """Let the model give an answer again; keep the rows."""
    state, length, rows, aside = Mixture(prior(1)), prompt, [], []
    context = Context(ids[:prompt], prompt, 2**30, SamplingParams(), Gumbel(0), budget=LARGEST)
    state.widths, state.costs = floats([0.0, LARGEST]), floats([1.0, 1.0 + COST * LARGEST])
    state.take(context)
    state.read()
    row = runner.open(ids[:prompt])
    runner.prefill(row)
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
        end = length + len(path) + 1
        rows += [found[0], *(found[1 + one] for one in path)]
        aside += [[length, n, *found[1 + n]] for n in range(len(draft)) if n not in path]
        runner.commit([row], [path], [ids[length:end]])
        state.told, context.ids = length, ids[:end]
        state.take(context)
        state.tokens += PACE * (end - length - state.tokens)
        state.cost += PACE * (1 + COST * len(draft) - state.cost)
        length = end
    runner.close(row)
    none = np.zeros((0, 2 + WIDTH), np.int32)
    return Passes(ids, prompt, np.array(rows), np.array(aside, np.int32) if aside else none)


def answers(path: Path, model: LoadedModel) -> Iterator[Passes]:
    """Yield all plain answers of a file, given again."""
    runner = Runner(model)
    with torch.inference_mode():
        for row in generations.read(path).entries:
            if row.arm == "none":
                yield record(runner, [*row.prompt_ids, *row.output_ids], len(row.prompt_ids))
                print(row.id, flush=True)


def teach(belief: Belief, passes: Sequence[Passes], bigrams: Ints) -> None:
    """Let a belief that knows ids learn what rows are worth, and keep what it believes of ids."""
    forget_rows(belief)
    before = Belief(floats(belief.cells), floats(belief.weights))
    for epoch in range(EPOCHS):
        order, memory = [*passes], new_bank()
        random.Random(epoch).shuffle(order)
        for one in order:
            read_on(belief, one, memory, RATE * 0.6**epoch, bigrams)
            if banks_of(belief) > 1:
                answer = Answer(None, one.ids[: one.prompt], one.ids[one.prompt :], 0)
                memory = remember(memory, answer)
    restore(belief, before)


def read_on(belief: Belief, one: Passes, memory: Bank, rate: float, bigrams: Ints) -> None:
    """Let the belief predict an answer, pass by pass, so that rows come when they would."""
    work = new_work(banks_of(belief))._replace(rows=filled(bigrams))
    bank, length = put(new_bank(), 0, one.ids, 1), one.prompt
    while length < len(one.ids):
        end = min(len(one.ids), length + PASS)
        work = work._replace(new=filled(said(one, length, end)))
        advance(bank, end, 0, 0, one.prompt, memory, belief, work, rate, FORGETTING, 1.0, NOTHING)
        length = end


def said(one: Passes, start: int, end: int) -> list[int]:
    """Return the rows of a pass that told ids[start:end], as `auto` keeps them."""
    mine = (start <= one.aside[:, 0]) & (one.aside[:, 0] < end) & (one.aside[:, 1] < LARGEST)
    rejected = one.aside[mine][:, 2:].reshape(-1).tolist()
    accepted = one.rows[start - one.prompt : end - one.prompt].reshape(-1).tolist()
    return [*rejected, *accepted]


def forget_rows(belief: Belief) -> None:
    """Make rows weigh nothing, whomever they name."""
    inputs, blank = banks_of(belief) * ORDERS, untaught(banks_of(belief))
    belief.cells[inputs * CELLS * VALUES :] = blank.cells[inputs * CELLS * VALUES :]
    for at, named in weights_of(inputs, belief):
        if named:
            belief.weights[at : at + inputs + 2] = belief.weights[at - inputs - 2 : at]
        belief.weights[at + inputs] = 0.0


def restore(belief: Belief, before: Belief) -> None:
    """Set back what holds where no row names a candidate."""
    inputs = banks_of(belief) * ORDERS
    belief.cells[: inputs * CELLS * VALUES] = before.cells[: inputs * CELLS * VALUES]
    for at, named in weights_of(inputs, belief):
        if not named:
            for place in (*range(at, at + inputs), at + inputs + 1):
                belief.weights[place] = before.weights[place]


def weights_of(inputs: int, belief: Belief) -> Iterator[tuple[int, bool]]:
    """Yield where each set of weights begins, and whether it is for those that a row names."""
    for row, at in enumerate(range(0, len(belief.weights), inputs + 2)):
        yield at, row >= AFTER and (row - AFTER) % KNOWN == 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", type=Path, help="plain answers of `draftsmith bench run`")
    parser.add_argument("prior", type=Path, help="what fit.py wrote; it is taught in place")
    options = parser.parse_args()
    model = load("smollm2", dtype="float32", prepack=True)
    known = placed(np.array(bigrams(model), np.int32), 1 << 30)
    passes, priors = list(answers(options.answers, model)), load_prior(options.prior)
    for belief in priors.values():
        teach(belief, passes, known)
    save(options.prior, priors)


if __name__ == "__main__":
    main()
