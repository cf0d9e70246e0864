"""Fit what `auto` believes of a trained head, after `logits.py`.

    draftsmith bench run PROMPTS.jsonl -m smollm2 --dtype float32 -a none -o ANSWERS.jsonl
    PYTHONPATH=. python recipes/auto/head.py ANSWERS.jsonl prior.safetensors

SmolLM2 reads its plain greedy answers. Simulated heads of several qualities name what comes next
(`benchmarks/simulated.py`). The prior predicts the answers with the heads' rows beside the rows of
the model's logits, and learns the cells and weights of a head. All else in the prior stays.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.simulated import Plain, Quality, noisy, quality_for
from logits import PASS, Passes, in_turns, known_rows, read_on
from untaught import save, untaught_head

from draftsmith.drafters.logit_rows import ROW, WIDTH, best
from draftsmith.drafters.mixer import Mixer, with_head, without_head
from draftsmith.drafters.mixer_prior import load as load_prior
from draftsmith.lab.bench import generations
from draftsmith.model.load import load

SHARES = (0.3, 0.5, 0.7, 0.8)
"""Shares of the places in which the heads are right."""
FASTER = 5
"""Rate of a head's weights, over that of the logits' weights: they have few cases."""


def read(one: Plain, quality: Quality) -> Passes:
    """Return an answer with the rows of the model, and of a head of this quality."""
    prompt, ids = len(one.row.prompt_ids), [*one.row.prompt_ids, *one.row.output_ids]
    own, head = noisy(one.logits, one.noise, quality), np.zeros((PASS, len(ids)), ROW)
    for k in range(PASS):
        first = max(0, 1 + k - prompt)
        head[k, prompt - 1 - k + first : len(ids) - 1 - k] = own[first:]
    rows = best(ids[prompt - 1 : -1], one.logits).view(np.int32).reshape(-1, WIDTH)
    return Passes(ids, prompt, rows, np.zeros((0, 2 + WIDTH), np.int32), head)


def teach(mixer: Mixer, passes: Sequence[Passes], bigrams: Any) -> Mixer:
    """Return the input of a head, learned beside a mixer that stays as it is."""
    found = untaught_head(mixer)
    for one, earlier, rate in in_turns(passes, mixer.indexes):
        joined = with_head(mixer, found)
        read_on(joined, one, earlier, FASTER * rate, bigrams)
        _, found = without_head(joined)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", type=Path, help="plain answers of `draftsmith bench run`")
    parser.add_argument("prior", type=Path, help="what logits.py wrote; the head's part is set")
    options = parser.parse_args()
    model = load("smollm2", dtype="float32", prepack=False)
    rows = [row for row in generations.read(options.answers).entries if row.arm == "none"]
    plain = [Plain.of(row, model.model) for row in rows if row.output_ids]
    every = [torch.cat(parts) for parts in zip(*(one[1:] for one in plain), strict=True)]
    heads = [quality_for(share, *every) for share in SHARES]
    passes, known = [read(one, head) for head in heads for one in plain], known_rows(model)
    priors = load_prior(options.prior)
    taught = {f"{key}.head": teach(priors[key], passes, known) for key in ("1", "2")}
    save(options.prior, priors | taught)


if __name__ == "__main__":
    main()
