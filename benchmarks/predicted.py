"""Predicted outputs: edits with the old file only in the prediction.

    python -m benchmarks.predicted DATA

Fifty held-out commits. The prompt is the commit's message, and the answer is forced to be the new
file. The table counts passes of `auto` without a prediction and with the old file as one, and its
accepted and rejected tokens. Passes have a recorded cost, so that trees are repeatable.
"""

from __future__ import annotations

import argparse
from itertools import islice
from typing import Any

from benchmarks.shared import RECORDED, Blocks, Options, held_out, run, table
from draftsmith import Engine
from draftsmith.core.stats import PREDICTION
from draftsmith.lab.bench.answer import Dictated
from draftsmith.model.load import load
from draftsmith.text.tokenizer import encode

HEADS = ("edits", "tokens", "passes without", "with a prediction", "ratio", "accepted", "rejected")


def parser() -> Options:
    made = Options("predicted", __doc__, data="needed")
    made.add_argument("-m", "--model", default="edit-7m")
    made.add_size("--limit", 50, 2, "edits")
    made.add_size("--context", 4096, 600, "most tokens of prompt and answer")
    return made


def counts(engine: Engine, edit: dict[str, Any]) -> list[int]:
    """Return tokens, passes without and with the prediction, and its accepted, rejected tokens."""
    tokenizer = engine.model.tokenizer
    prompt = encode(tokenizer, f"{edit['path']}: {edit['message']}")
    answer = [*encode(tokenizer, edit["after"]), int(tokenizer.eos_token_id)]
    options: dict[str, Any] = {
        "max_new_tokens": len(answer),
        "temperature": 0.0,
        "processors": Dictated(len(prompt), answer),
    }
    without = engine.generate(prompt, **options)
    found = engine.generate(prompt, prediction=edit["before"], **options)
    assert without.tokens == found.tokens == answer
    guesses, accepted = found.stats.by_source[PREDICTION], found.accepted_prediction_tokens
    assert accepted == found.sources.count(PREDICTION) == guesses.accepted
    passes = without.stats.passes, found.stats.passes
    return [len(answer), *passes, accepted, found.rejected_prediction_tokens]


def measure(args: argparse.Namespace) -> Blocks:
    engine = Engine(load(args.model, dtype="float32", prepack=True), cost=RECORDED)
    edits = [*islice(held_out(args.data, engine.model.tokenizer, args.context), args.limit)]
    found = zip(*(counts(engine, edit) for edit in edits), strict=True)
    tokens, without, given, accepted, rejected = map(sum, found)
    figures = (len(edits), tokens, without, given, f"{without / given:.2f}", accepted, rejected)
    yield table(HEADS, [[f"{figure}" for figure in figures]])


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
