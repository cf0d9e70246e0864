"""A real model's passes on a CPU: in transformers, with packed layers, and in llama.cpp.

    python -m benchmarks.passes                      # float32 and bfloat16
    python -m benchmarks.passes --runs 5 --dtypes float32

Two tables. Tokens per second of complete greedy answers, prompt included: `model.generate` on
layers as loaded, and our plain loop on these and on laid-out layers. Milliseconds of a pass by
width after 256 tokens, in turn, each after two untimed ones of its own; with `llama-cpp-python`
installed also llama.cpp's, on the same weights in bfloat16.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.shared import Blocks, Options, random_ids, run, shown, table, timed
from draftsmith import Engine, builtin
from draftsmith.core.draft import Draft
from draftsmith.model.load import load
from draftsmith.model.runner import Runner

CONTEXT = 256
WIDTHS = (1, 2, 4, 8, 16, 32)
ANSWERS = ("model.generate", "plain, layers as loaded", "plain, laid out")
LAYERS = ("layers as loaded", "laid out")
PROMPT = "Tell the story of the night on which the lamp of a lighthouse went out."


def parser() -> Options:
    made = Options("passes", __doc__)
    made.add_argument("-m", "--model", default="smollm2")
    made.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    made.add_size("--runs", 9, 1, "answers of every arm, a quarter of its passes")
    made.add_size("--tokens", 100, 8, "tokens of an answer")
    return made


def answering(engines: list[Engine], tokens: int) -> dict[str, Callable[[], object]]:
    """Return the arms of the first table."""
    messages = [{"role": "user", "content": PROMPT}]
    ids = torch.tensor([engines[0].generate(messages, max_new_tokens=1).prompt_tokens])
    exact: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    # No attention mask: nothing is padded, and without one transformers need not inspect it.
    theirs = partial(engines[0].model.model.generate, ids, do_sample=False, pad_token_id=0, **exact)
    ours = [partial(engine.generate, messages, temperature=0, **exact) for engine in engines]
    return dict(zip(ANSWERS, (theirs, *ours), strict=True))


def passing(engine: Engine) -> Callable[[int], object]:
    """Return a function that runs a pass over `width` tokens and keeps none of them."""
    runner = Runner(engine.model)
    row = runner.open(random_ids(CONTEXT + 1))
    runner.prefill(row)
    return lambda width: runner.forward([row], [Draft.chain(range(10, 9 + width), "fixed")])


def measure(args: argparse.Namespace) -> Blocks:
    llama = None
    if importlib.util.find_spec("llama_cpp") is not None and builtin.is_gguf(args.model):
        from benchmarks.llama import Llama

        llama = Llama(Path(builtin.resolve(args.model)), CONTEXT, max(WIDTHS))
    for dtype in args.dtypes:
        models = [load(args.model, dtype=dtype, prepack=packed) for packed in (False, True)]
        engines = [Engine(model, drafter="none", prefixes=0) for model in models]
        arms, how = answering(engines, args.tokens), {"dtype": dtype, "tokens": args.tokens}
        found = args.results.recall(
            "answers", args.model, lambda arms=arms: timed([*arms.values()], args.runs),
            runs=args.runs, **how,
        )  # fmt: skip
        rows = [[name, f"{args.tokens / median(own):.1f}", shown(found[0], own)]
                for name, own in zip(arms, found, strict=True)]  # fmt: skip
        heads = ("answers", "tokens/s", "over model.generate")
        yield f"## {args.model}, {dtype}\n\n{table(heads, rows)}"
        ways = dict(zip(LAYERS, map(passing, engines), strict=True))
        if llama is not None and dtype == "bfloat16":
            ways["llama.cpp"] = llama.run
        rows = []
        for width in WIDTHS:
            timing = [partial(way, width) for way in ways.values()]
            found = args.results.recall(
                f"{width} tokens", args.model,
                lambda timing=timing: timed(timing, 4 * args.runs, before=2),
                ways=[*ways], runs=args.runs, **how,
            )  # fmt: skip
            rows.append([f"{width}", *(f"{1e3 * median(own):.1f}" for own in found),
                         shown(*found[:2])])  # fmt: skip
        yield table(("tokens", *(f"{way}, ms" for way in ways), "as loaded / laid out"), rows)


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
