"""Fit what `auto` believes of a trained head, after `logits.py`.

    draftsmith bench run PROMPTS.jsonl -m smollm2 --dtype float32 -a none -o ANSWERS.jsonl
    python recipes/auto/head.py ANSWERS.jsonl HEAD prior.safetensors

SmolLM2 and an EAGLE-3 head read SmolLM2's plain greedy answers. The prior predicts them with the
head's rows beside the rows of the model's logits, and learns the cells and weights of the head.
All else in the prior stays.
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

from draftsmith.drafters.bigrams import table_of
from draftsmith.drafters.context_index import new_index, with_ids
from draftsmith.drafters.eagle3 import Eagle3
from draftsmith.drafters.logit_rows import ROW, TOP, WHOLE, WIDTH, best
from draftsmith.drafters.mixer import ROOT_KEY, Mixer, longer_key, with_head, without_head
from draftsmith.drafters.mixer_prior import Priors, save, untaught_head
from draftsmith.drafters.mixer_prior import load as load_prior
from draftsmith.drafters.tree_search import NO_DRAFT, START, advance, new_search
from draftsmith.lab.bench import generations
from draftsmith.lab.train.eagle3 import Lessons
from draftsmith.lab.train.recipe import HeadRecipe
from draftsmith.lab.tune.auto import bigrams
from draftsmith.model.load import load

RATE, EPOCHS, PASS = 0.002, 3, 2
"""Rate of the weights; passes over the data; tokens per pass of the target during them."""


@dataclass(slots=True)
class Read:
    """A prompt and its answer, with the rows that a model and its head gave."""

    ids: list[int]
    prompt: int
    """Tokens of the prompt."""
    rows: Any
    """(n,) ROW: the model's row after each token."""
    head: Any
    """(PASS, n) ROW: at [k, i] the head's row for the token after the first i + 1 + k, drafted
    after i + 1."""


class Reader:
    """A model and its head."""

    def __init__(self, model: str, head: str) -> None:
        loaded = load(model, dtype="float32", prepack=False)
        bound: Any = Eagle3(model=head).bind(loaded.facts)
        recipe = HeadRecipe(layers=bound.wants.hidden_layers, unrolled=PASS)
        ids = torch.arange(loaded.vocab_size) if bound.head.ids is None else bound.head.ids
        self.lessons = Lessons(loaded, recipe, ids)
        self.lessons.head = bound.head

    @torch.inference_mode()
    def read(self, ids: list[int], prompt: int) -> Read:
        tokens = torch.tensor([ids])
        states, logits = self.lessons.target(tokens)
        head = np.zeros((PASS, len(ids)), ROW)
        for k, own in enumerate(self.lessons.unrolled(tokens, states)):
            probs, found = own[0].softmax(-1).topk(TOP)
            part = head[k, 1 : 1 + len(probs)]
            part["tokens"], part["probs"] = self.lessons.ids[found], probs * WHOLE
        return Read(ids, prompt, best(ids, logits[0]), head)


def teach(mixer: Mixer, answers: Sequence[Read], bigrams: Any) -> Mixer:
    """Return the input of a head, learned beside a mixer that stays as it is."""
    found = untaught_head(mixer)
    for epoch in range(EPOCHS):
        order, earlier = [*answers], new_index()
        random.Random(epoch).shuffle(order)
        for one in order:
            joined = with_head(mixer.copy(), found)
            read_on(joined, one, earlier, bigrams.copy(), RATE * 0.6**epoch)
            _, found = without_head(joined)
            if mixer.indexes > 1:
                answer = Answer(None, one.ids[: one.prompt], one.ids[one.prompt :], 0)
                earlier = remember(earlier, answer)
    return found


def read_on(mixer: Mixer, one: Read, earlier: Any, rows: Any, rate: float) -> None:
    """Let the mixer predict an answer, pass by pass, so that rows come when they would."""
    text, search, length = with_ids(new_index(), 0, one.ids, 1), new_search(), one.prompt
    while length < len(one.ids):
        end, key = min(len(one.ids), length + PASS), ROOT_KEY
        head = one.head[: end - length, length - 1].copy()
        for k in range(end - length):
            head[k]["after"] = key
            key = longer_key(key, one.ids[length + k])
        new = one.rows[length - 1 : end - 1]
        advance(
            text, end, 0, 0, one.prompt, earlier, rows, new, head, length, mixer, search, rate,
            FORGETTING, 1.0, NO_DRAFT, START,
        )  # fmt: skip
        length = end


def answers(path: Path, reader: Reader) -> Iterator[Read]:
    """Yield all plain answers of a file, read by a model and its head."""
    for row in generations.read(path).entries:
        if row.arm == "none":
            yield reader.read([*row.prompt_ids, *row.output_ids], len(row.prompt_ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", type=Path, help="plain answers of `draftsmith bench run`")
    parser.add_argument("head", help="folder of the head")
    parser.add_argument("prior", type=Path, help="what logits.py wrote; the head's part is set")
    options = parser.parse_args()
    reader = Reader("smollm2", options.head)
    known = table_of(bigrams(reader.lessons.loaded).view(np.int32).reshape(-1, WIDTH), 1 << 30)
    found, priors = list(answers(options.answers, reader)), load_prior(options.prior)
    heads = {n: teach(mixer, found, known) for n, mixer in priors.mixers.items()}
    save(options.prior, Priors(priors.mixers, heads))


if __name__ == "__main__":
    main()
