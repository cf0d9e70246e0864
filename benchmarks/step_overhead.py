"""What our loop costs beside the model: paired runs, medians, 95 % bootstrap intervals.

    python -m benchmarks.step_overhead            # everything, about five minutes on two cores
    python -m benchmarks.step_overhead --runs 10  # quicker, wider intervals

Prints one line per promise; the exit code is 1 if the upper end of an interval breaks one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from benchmarks.paired import Ratio, in_turn, ratio
from benchmarks.shared import context, random_ids, random_llama, started
from draftsmith import builtin
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context
from draftsmith.core.loop import step
from draftsmith.drafters.registry import parse
from draftsmith.engine.engine import Engine
from draftsmith.model.forward import cache_name
from draftsmith.model.runner import Runner
from draftsmith.testing import Scripted


def plain_against_generate(engine: Engine, tokens: int, runs: int) -> Ratio:
    """Our plain decoding over transformers' `generate`, seconds over seconds."""
    model = engine.model.model
    ids = list(range(10, 74))
    prompt = torch.tensor([ids])
    mask = torch.ones_like(prompt)
    fixed: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens}

    def theirs() -> None:
        model.generate(prompt, attention_mask=mask, do_sample=False, pad_token_id=0, **fixed)

    def ours() -> None:
        engine.generate(ids, drafter="none", temperature=0.0, **fixed)

    a, b = in_turn([ours, theirs], runs)
    return ratio(a, b)


def step_against_forward(engine: Engine, width: int, runs: int) -> Ratio:
    """One whole step with a chain of `width` drafts over the model's bare forward of that width.

    Both start from the same 256 cached positions; the bare arm only forwards.
    """
    model = engine.model.model
    ids, drafts = random_ids(257), random_ids(width, seed=1)
    scripted = Scripted(lambda ctx: Draft.chain(drafts[: ctx.budget], "scripted"))
    runner = Runner(engine.model)
    session = started(runner, ids, scripted, width, engine.model.vocab_size)
    cache = DynamicCache()
    own = {cache_name(model.forward): cache}
    wide = torch.tensor([[ids[-1], *drafts]])

    def ours() -> None:
        step([session], runner)

    def bare() -> None:
        with torch.inference_mode():
            past = cache.get_seq_length()
            positions = torch.arange(past, past + width + 1)[None]
            model(input_ids=wide, position_ids=positions, **own, use_cache=True)

    with torch.inference_mode():
        model(input_ids=torch.tensor([ids[:-1]]), **own, use_cache=True)
    length = cache.get_seq_length()
    a: list[float] = []
    b: list[float] = []
    for run in range(runs + 3):
        timed: dict[Callable[[], None], float] = {}
        for arm in (ours, bare) if run % 2 else (bare, ours):
            begin = perf_counter()
            arm()
            timed[arm] = perf_counter() - begin
        # Keep both caches at about the same length: one token per step was accepted.
        length += 1
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
        if run >= 3:
            a.append(timed[ours])
            b.append(timed[bare])
    return ratio(a, b)


def always_wrong(engine: Engine, tokens: int, runs: int) -> tuple[Ratio, Ratio, int]:
    """An always-wrong drafter of 10 tokens over plain decoding: automatic and fixed budget.

    Also returns in which step it drafted first.
    """
    ids = list(range(10, 74))
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "temperature": 0.0}
    answer = engine.generate(ids, drafter="none", **options).tokens
    first_draft = 0

    def guess(ctx: Context) -> Draft:
        right = answer[len(ctx.ids) - ctx.prompt_length :][: min(10, ctx.budget)]
        return Draft.chain([(token + 1) % ctx.vocab_size for token in right], "scripted")

    wrong = Scripted(guess)

    def watch(ctx: Context) -> Draft:
        nonlocal first_draft
        draft = wrong.propose(ctx)
        if draft.tokens and not first_draft:
            first_draft = len(ctx.ids) - ctx.prompt_length + 1
        return draft

    watched = Scripted(watch)

    def automatic() -> None:
        nonlocal first_draft
        first_draft = 0
        result = engine.generate(ids, drafter=watched, budget="auto", **options)
        assert result.tokens == answer, "an always-wrong drafter changed the answer"

    def plainly() -> None:
        engine.generate(ids, drafter="none", **options)

    def fixed() -> None:
        engine.generate(ids, drafter=wrong, budget=10, **options)

    a, b, c = in_turn([automatic, plainly, fixed], runs)
    return ratio(a, b), ratio(c, b), first_draft


def index_microseconds(length: int = 100_000, steps: int = 1000) -> float:
    """Median microseconds of CopySpec's drafting per step in a constant context."""
    ids = [7] * length
    ctx = context(ids, vocab_size=100, budget=10, depth=10)
    state = parse("copyspec(gamma=3, block=10)").open(ctx)
    state.draft(ctx)
    seconds = []
    for _ in range(steps):
        ids.append(7)
        begin = perf_counter()
        state.draft(ctx)
        seconds.append(perf_counter() - begin)
    return 1e6 * sorted(seconds)[steps // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} threads, {args.runs} paired runs")
    broken = False

    def report(name: str, figure: Ratio | float, limit: float | None, unit: str = "") -> None:
        nonlocal broken
        worst = figure.high if isinstance(figure, Ratio) else figure
        fits = limit is None or worst <= limit
        broken |= not fits
        shown = f"{figure}" if isinstance(figure, Ratio) else f"{figure:.2f}"
        promise = "reported" if limit is None else f"at most {limit:g}{unit}"
        print(f"{'ok ' if fits else 'BAD'} {name:58} {shown}{unit}  ({promise})", flush=True)

    small = Engine.from_pretrained(builtin.path(), dtype="bfloat16", prefixes=0)
    large = Engine.from_pretrained(random_llama(), prefixes=0)
    report("copyspec draft, 100,000 constant tokens", index_microseconds(), 20, " µs")
    report("plain / generate, built-in", plain_against_generate(small, 128, args.runs), 1.0)
    report("plain / generate, 100M bf16", plain_against_generate(large, 96, args.runs), 1.0)
    for width in (0, 7, 15):
        figure = step_against_forward(large, width, 2 * args.runs)
        report(f"step / bare forward of {width + 1}, 100M bf16", figure, 1.05)
    # In float32: where two logits tie in bfloat16, a wide pass may break the tie the other way.
    exact = Engine.from_pretrained(builtin.path(), dtype="float32", prefixes=0)
    auto, fixed, first = always_wrong(exact, 512, args.runs)
    report("always wrong, budget auto / plain, built-in", auto, 1.10)
    report("   its first draft came in step", float(first), 20)
    report("always wrong, fixed 10 / plain, built-in", fixed, None)
    sys.exit(broken)


if __name__ == "__main__":
    main()
