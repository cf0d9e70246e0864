"""Quality of attribution: QuoteSum's quotes and our copies, with PLD+'s table 10.

    python -m benchmarks.quotesum DATA
    python -m benchmarks.quotesum DATA --model smollm2 -d pld_plus

The answers of the dev set were written by people, with quotes in brackets. The brackets are
removed, and the quotes must be found again. The tokens are forced through the loop, so no model is
needed; with --model one runs, for PLD+'s hidden states. The table has precision, recall and F1 of
the tokens in our copies against those in quotes, as means over answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from statistics import mean

from tokenizers import Tokenizer

from benchmarks.quotes import Item, Origins, copied, items
from benchmarks.shared import Blocks, Options, run, table
from draftsmith import Engine
from draftsmith.drafters.registry import parse
from draftsmith.lab.bench.answer import Dictated
from draftsmith.lab.bench.replay import replay
from draftsmith.lab.fingerprint import fingerprint

LENGTHS = (2, 5, 8)
"""Shortest copies that count, as in the paper."""
THEIRS = ["PLD+(h), test set", "0.96 / 0.96 / 0.96", "0.98 / 0.85 / 0.90", "0.99 / 0.70 / 0.79"]
"""PLD+, table 10."""
IDS = ["copyspec", "prompt_lookup", "longest_match"]
Scores = tuple[float | None, float | None, float]
"""Precision, recall, F1; None if nothing was found, or nothing is quoted."""


def parser() -> Options:
    made = Options("quotesum", __doc__, data="needed")
    made.add_argument("-d", "--drafter", nargs="+", default=IDS)
    made.add_argument("-m", "--model", help="for drafters that read its states")
    made.add_argument("--tokenizer", default="llama2", help="without a model: one of tokenizers/")
    made.add_argument("--bare", action="store_true", help="count drafted tokens only")
    made.add_size("--limit", 265, 2, "answers")
    return made


def forced(item: Item, drafter: str, engine: Engine) -> Origins:
    """Return the origin of each token, with a model that is forced to give the answer."""
    dictated = Dictated(len(item.prompt), item.answer)
    result = engine.generate(item.prompt, drafter=drafter, budget="drafter", temperature=0.0,
                             max_new_tokens=len(item.answer), processors=dictated)  # fmt: skip
    assert result.tokens == item.answer
    return result.origins


def score(found: set[int], quoted: set[int]) -> Scores:
    both, whole = len(found & quoted), len(found) + len(quoted)
    precision, recall = (both / len(one) if one else None for one in (found, quoted))
    return precision, recall, 2 * both / whole if whole else 0.0


def cell(scores: Sequence[Scores]) -> str:
    """Return the means over answers."""
    means = (mean([x for x in one if x is not None] or [0.0]) for one in zip(*scores, strict=True))
    return " / ".join(f"{value:.2f}" for value in means)


def measure(args: argparse.Namespace) -> Blocks:
    engine = Engine.from_pretrained(args.model) if args.model else None
    weights = engine and [fingerprint(engine.model), engine.model.dtype_name]
    file = args.data / "tokenizers" / args.tokenizer / "tokenizer.json"
    tokenizer = (
        engine.model.tokenizer.backend_tokenizer if engine else Tokenizer.from_file(f"{file}")
    )
    data = [*items(args.data / "prompts" / "quotesum_dev.jsonl", tokenizer, args.limit)]
    every = cell([score({*range(len(item.answer))}, item.quoted) for item in data])
    rows = [THEIRS, ["every token called a quote", every, "", ""]]
    for drafter in args.drafter:
        made, origins = parse(drafter), []
        for item in data:
            if engine is None:
                size = tokenizer.get_vocab_size()
                origins.append(replay(item.prompt, item.answer, made, size).origins)
            else:
                key, once = [drafter, weights, *item[:2]], partial(forced, item, drafter, engine)
                origins.append(args.results.recall(key, once))
        rows.append([drafter])
        for length in LENGTHS:
            pairs = zip(data, origins, strict=True)
            found = [(copied(*pair, length, args.bare), pair[0].quoted) for pair in pairs]
            rows[-1].append(cell([score(*pair) for pair in found]))
    heads = ("precision / recall / F1", *(f"{length} tokens" for length in LENGTHS))
    yield f"{len(data)} answers of the dev set\n\n{table(heads, rows)}"


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
