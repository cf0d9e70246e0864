"""Fit what `auto` believes of a trained head, after `logits.py`.

    draftsmith bench run PROMPTS.jsonl -m smollm2 --dtype float32 -a none -o ANSWERS.jsonl
    python recipes/auto/head.py ANSWERS.jsonl HEAD prior.safetensors

SmolLM2 and an EAGLE-3 head read SmolLM2's plain greedy answers. The prior predicts them with the
head's rows beside the rows of the model's logits, and learns the cells and weights of the head.
All else in the prior stays.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from logits import PASS, Passes, in_turns, known_rows, read_on

from draftsmith.drafters.eagle3 import Eagle3
from draftsmith.drafters.logit_rows import ROW, TOP, WHOLE, WIDTH, best
from draftsmith.drafters.mixer import Mixer, with_head, without_head
from draftsmith.drafters.mixer_prior import Priors, save, untaught_head
from draftsmith.drafters.mixer_prior import load as load_prior
from draftsmith.lab.bench import generations
from draftsmith.lab.train.eagle3 import Lessons
from draftsmith.lab.train.recipe import HeadRecipe
from draftsmith.model.load import load


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
    def read(self, ids: list[int], prompt: int) -> Passes:
        tokens = torch.tensor([ids])
        states, logits = self.lessons.target(tokens)
        head = np.zeros((PASS, len(ids)), ROW)
        for k, own in enumerate(self.lessons.unrolled(tokens, states)):
            probs, found = own[0].softmax(-1).topk(TOP)
            part = head[k, 1 : 1 + len(probs)]
            part["tokens"], part["probs"] = self.lessons.ids[found], probs * WHOLE
        rows = best(ids, logits[0]).view(np.int32).reshape(-1, WIDTH)[prompt - 1 : -1]
        return Passes(ids, prompt, rows, np.zeros((0, 2 + WIDTH), np.int32), head)


def teach(mixer: Mixer, passes: Sequence[Passes], bigrams: Any) -> Mixer:
    """Return the input of a head, learned beside a mixer that stays as it is."""
    found = untaught_head(mixer)
    for one, earlier, rate in in_turns(passes, mixer.indexes):
        joined = with_head(mixer.copy(), found)
        read_on(joined, one, earlier, rate, bigrams)
        _, found = without_head(joined)
    return found


def answers(path: Path, reader: Reader) -> Iterator[Passes]:
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
    known = known_rows(reader.lessons.loaded)
    found, priors = list(answers(options.answers, reader)), load_prior(options.prior)
    heads = {n: teach(mixer, found, known) for n, mixer in priors.mixers.items()}
    save(options.prior, Priors(priors.mixers, heads))


if __name__ == "__main__":
    main()
