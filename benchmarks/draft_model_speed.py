"""What drafting with a small model costs, and what it brings beside transformers' own.

    python -m benchmarks.draft_model_speed cost                     # a minute
    python -m benchmarks.draft_model_speed live ../shared/data      # ten minutes on two cores

`cost`: seconds per drafted token over a bare forward of the drafter (model, its own cache, one
token), in turn. `live`: held-out edits, one answer by every arm in turn, greedy: ours with both
companions of the built-in model, transformers' assisted generation with the same ones, CopySpec
and both together. Ratios are totals over the prompts, with intervals over prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.live_prompts import prompts as held_out
from benchmarks.paired import ratio
from draftsmith import builtin
from draftsmith.bench.answer import Answer, Ask
from draftsmith.bench.arms import Arm, build, parse_arm
from draftsmith.bench.run import in_turn
from draftsmith.bench.summary import bootstrap
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context
from draftsmith.core.sampling import SamplingParams, TorchSampler
from draftsmith.drafters.draft_model.draft_model import DraftModel
from draftsmith.drafters.draft_model.drafting import BoundDraftModel
from draftsmith.model.forward import cache_name
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.text.tokenizer import encode, render_chat

DRAFTS, TOKENS = 20, 5
"""Drafts per timed run, and tokens per draft."""


# ---------------------------------------------------------------------------------- the cost


def bare(loaded: LoadedModel, ids: Sequence[int]) -> float:
    """Seconds of one forward over one token behind `ids`, with transformers' own cache."""
    model, cache = loaded.model, {cache_name(loaded.model.forward): DynamicCache()}
    with torch.inference_mode():
        model(torch.tensor([list(ids)]), **cache, use_cache=True, logits_to_keep=1)
        token = torch.tensor([[5]])
        begin = perf_counter()
        for _ in range(DRAFTS * TOKENS):
            model(token, **cache, use_cache=True)
        return (perf_counter() - begin) / (DRAFTS * TOKENS)


def drafting(drafter: BoundDraftModel, ids: Sequence[int], sampling: SamplingParams) -> float:
    """Seconds per drafted token, each draft following one that was accepted whole."""
    ctx = Context(
        list(ids), len(ids), 8192, sampling, TorchSampler.seeded(0), budget=TOKENS, depth=TOKENS
    )
    state = drafter.open(ctx)

    def draft() -> Draft:
        [made] = drafter.draft([state], [ctx])
        ctx.ids = [*ctx.ids, *made.tokens, 5]
        return made

    draft()  # reads the prompt
    seconds, drafted = 0.0, 0
    for _ in range(DRAFTS):
        begin = perf_counter()
        drafted += len(draft())
        seconds += perf_counter() - begin
    state.close()
    return seconds / drafted


def cost(model: str, context: int, runs: int) -> None:
    config = DraftModel(model, tokens=TOKENS, confidence=0, algorithm="standard")
    loaded = load(model, dtype="bfloat16")
    # Reading ahead would make tokens cheaper than a forward; here the loop itself is timed.
    drafter: Any = DraftModel(
        loaded.model, TOKENS, confidence=0, algorithm="standard", tokenizer=loaded.tokenizer,
        copies=False,
    ).bind(loaded.facts)  # fmt: skip
    text = "\n".join(builtin.demo()) * context  # it repeats, so that no draft ends early
    ids = encode(loaded.tokenizer, text[: 8 * context])[:context]
    distributions = {
        "greedy": SamplingParams(),
        "temperature 1": SamplingParams(temperature=1.0),
        "top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
    }
    arms: dict[str, Callable[[], float]] = {"bare": lambda: bare(loaded, ids)}
    for name, sampling in distributions.items():
        arms[name] = lambda s=sampling: drafting(drafter, ids, s)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for run in range(runs + 1):
        for name, arm in arms.items():
            taken = arm()
            if run:  # the first one warms up
                seconds[name].append(taken)
    print(f"{config.model}, bfloat16, context {context}, {torch.get_num_threads()} threads")
    for name in distributions:
        found = ratio(seconds[name], seconds["bare"])
        print(f"  {name:14} {1e6 * found.a_seconds:6.0f} µs a token, {found} of a bare forward")


# ------------------------------------------------------------------------------------- live


def live(options: argparse.Namespace) -> None:
    same, other, limit, most = options.same, options.other, options.limit, options.draft
    model = load(options.target, dtype="bfloat16")
    own, bytes_ = builtin.resolve(same), builtin.resolve(other)
    specs = {
        "plain": "none",
        "hf generate": "hf:generate",
        f"draft_model, {same}": f"draft_model(model={same!r}, tokens={most})",
        f"hf assisted, {same}": f"hf:assisted(model={own!r})",
        f"draft_model, {other}": f"draft_model(model={other!r}, tokens={most})",
        f"hf assisted, {other}": f"hf:assisted(model={bytes_!r})",
        "copyspec": "copyspec",
        "both": f"copyspec+draft_model(model={same!r}, tokens={most})",
    }
    arms: dict[str, Arm] = dict(
        zip(specs, build(model, [parse_arm(spec) for spec in specs.values()]), strict=True)
    )
    edits = [
        (render_chat(model.tokenizer, edit["messages"]), min(edit["max_new_tokens"], limit))
        for edit in held_out(options.data, options.tokens, options.prompts)
    ]
    answers: dict[str, list[Answer]] = {name: [] for name in arms}
    for number, (ids, longest) in enumerate([edits[0], *edits]):
        ask = Ask(ids, longest, SamplingParams())
        for name in in_turn(list(arms), number):
            answer = arms[name].answer(ask)
            if number:  # the first one warms up
                answers[name].append(answer)
    plain = answers["plain"]
    print(f"{len(edits)} held-out edits, at most {limit} tokens, bfloat16, "
          f"{torch.get_num_threads()} threads")  # fmt: skip
    print(f"{'arm':26} tokens/s  over plain               tokens/pass  same answer")
    for name, found in answers.items():
        tokens = sum(len(a.tokens) for a in found)
        rate = tokens / sum(a.seconds for a in found)
        per_pass = tokens / sum(a.passes for a in found)
        same_answer = sum(a.tokens == b.tokens for a, b in zip(found, plain, strict=True))
        print(f"{name:26} {rate:8.1f}  {over(found, plain):22} {per_pass:11.2f}  "
              f"{same_answer}/{len(found)}")  # fmt: skip
    for name in (same, other):
        ours, theirs = answers[f"draft_model, {name}"], answers[f"hf assisted, {name}"]
        print(f"ours over transformers' with {name}: {over(ours, theirs)}")
    for name in ("copyspec", f"draft_model, {same}"):
        print(f"both over {name}: {over(answers['both'], answers[name])}")


def over(a: Sequence[Answer], b: Sequence[Answer]) -> str:
    """How many times the tokens per second of `b` those of `a` are."""

    def speedup(pairs: Sequence[tuple[Answer, Answer]]) -> float:
        rates = [
            sum(len(p[side].tokens) for p in pairs) / sum(p[side].seconds for p in pairs)
            for side in (0, 1)
        ]
        return rates[0] / rates[1]

    pairs = list(zip(a, b, strict=True))
    low, high = bootstrap(pairs, speedup)
    return f"{speedup(pairs):.2f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["cost", "live"])
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--target", default=builtin.DEFAULT)
    parser.add_argument("--same", default="edit-1m", help="a drafter with the target's vocabulary")
    parser.add_argument("--other", default="edit-bytes", help="a drafter with another one")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=2048, help="longest prompt with its answer")
    parser.add_argument("--limit", type=int, default=256, help="most new tokens per answer")
    parser.add_argument("--draft", type=int, default=20, help="most tokens of a draft, as theirs")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.what == "cost":
        cost(options.same, options.context, options.runs)
        return
    if options.data is None:
        parser.error("live needs the folder of the recorded data")
    live(options)


if __name__ == "__main__":
    main()
