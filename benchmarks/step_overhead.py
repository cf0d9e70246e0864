"""Overhead of our loop over the model.

    python -m benchmarks.step_overhead            # everything, about five minutes on two cores

On the built-in model and on a random Llama of 100M parameters. Seconds are compared pair by pair.
The exit code is 1 if the upper end of an interval breaks a promise.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from transformers.cache_utils import DynamicCache

from benchmarks import shared
from benchmarks.shared import Blocks, Options, random_ids, run
from draftsmith import Engine
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context
from draftsmith.model.forward import cache_name
from draftsmith.testing import Scripted

Pairs = list[list[float]]


def parser() -> Options:
    made = Options("step_overhead", __doc__)
    made.add_size("--runs", 30, 2, "pairs; steps have twice as many")
    made.add_size("--tokens", 512, 64, "tokens of an answer against an always-wrong drafter")
    return made


def plain_and_generate(engine: Engine, args: argparse.Namespace) -> Pairs:
    """Return seconds of our plain decoding and of transformers' `generate`."""
    ids, length = random_ids(64), args.tokens // 4
    exact = {"max_new_tokens": length, "min_new_tokens": length}
    ours = partial(engine.generate, ids, drafter="none", temperature=0, **exact)
    theirs = partial(engine.model.model.generate, torch.tensor([ids]), do_sample=False, **exact)
    return shared.timed([ours, partial(theirs, pad_token_id=0)], args.runs)


def step_and_forward(engine: Engine, width: int, args: argparse.Namespace) -> Pairs:
    """Return seconds of a step with `width` wrong drafts, and of a bare forward of equal width."""
    ids, wrong = random_ids(257), random_ids(width, seed=1)
    drafter = Scripted(lambda ctx: Draft.chain(wrong[: ctx.budget], "scripted"))
    steps = engine.stream(ids, drafter=drafter, budget=width, max_new_tokens=2000, temperature=0)
    model, cache = engine.model.model, DynamicCache()
    own = {cache_name(model.forward): cache}

    def forward(new: list[int], keep: int) -> None:
        with torch.inference_mode():
            past = cache.get_seq_length()
            places = torch.arange(past, past + len(new))[None]
            model(torch.tensor([new]), position_ids=places, **own, use_cache=True)
            for layer in cache.layers:
                layer.keys = layer.keys[..., : past + keep, :]
                layer.values = layer.values[..., : past + keep, :]

    forward(ids[:-1], 256)
    bare = partial(forward, [ids[-1], *wrong], 1)  # one token is kept, as in our step
    return shared.timed([partial(next, steps), bare], 2 * args.runs, warmup=3)


def wrong_and_plain(engine: Engine, budget: int | str, args: argparse.Namespace) -> Pairs:
    """Return seconds with a drafter of ten wrong tokens, and of plain decoding."""
    exact = {"max_new_tokens": args.tokens, "min_new_tokens": args.tokens, "temperature": 0}
    answer = engine.generate(random_ids(64), drafter="none", **exact).tokens

    def guess(ctx: Context) -> Draft:
        right = answer[len(ctx.ids) - ctx.prompt_length :][: min(10, ctx.budget)]
        return Draft.chain([(token + 1) % ctx.vocab_size for token in right], "scripted")

    answering = partial(engine.generate, random_ids(64), **exact)
    wrong = partial(answering, drafter=Scripted(guess), budget=budget)
    return shared.timed([wrong, partial(answering, drafter="none")], args.runs)


def measure(args: argparse.Namespace) -> Blocks:
    small = Engine.from_pretrained("edit-7m", dtype="bfloat16", prefixes=0)
    # In float32: a tie in bfloat16 may be decided differently by a wide pass.
    exact = Engine.from_pretrained("edit-7m", dtype="float32", prefixes=0)
    big = Engine.from_pretrained(shared.random_llama(), tokenizer=small.model.tokenizer, prefixes=0)
    promises: list[shared.Promise] = [
        ("plain / generate, edit-7m", 1.0, partial(plain_and_generate, small, args)),
        ("plain / generate, 100M", 1.0, partial(plain_and_generate, big, args)),
        *((f"step / bare forward of {width + 1}, 100M", 1.05,
           partial(step_and_forward, big, width, args)) for width in (0, 7, 15)),
        ("always wrong, budget auto / plain", 1.1, partial(wrong_and_plain, exact, "auto", args)),
        ("always wrong, fixed 10 / plain", None, partial(wrong_and_plain, exact, 10, args)),
    ]  # fmt: skip
    ratios, broken = shared.promised(promises)
    yield ratios
    return broken


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
