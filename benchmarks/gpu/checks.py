"""Whether drafted decoding gives the tokens of plain decoding."""

from __future__ import annotations

import argparse
from collections.abc import Generator
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.gpu.card import fits, timely
from benchmarks.gpu.models import Model
from benchmarks.shared import random_ids, table
from draftsmith import Engine, GenerationResult
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context
from draftsmith.model.agreement import first_difference, top_two_gap
from draftsmith.testing import Scripted

PROMPTS, TOKENS = 4, 32
TIE = 1e-5
"""Two logits that are closer than this count as equal in float32."""
HEADS = ("drafted against plain", "recorded answers", "own answers", "near ties", "accepted")


def script(answer: list[int], ctx: Context) -> Draft:
    """Return a tree with a wrong branch and, after it, up to four right tokens."""
    done = len(ctx.ids) - ctx.prompt_length
    right = answer[done : done + min(4, ctx.budget - 1)]
    if not right:
        return Draft()
    wrong = (right[0] + 1) % ctx.vocab_size
    parents = (-1, -1, *range(1, len(right)))
    return Draft((wrong, *right), parents, ("scripted",) * len(parents))


def answers(model: Model, dtype: torch.dtype, store: str, recited: bool) -> dict[str, Any]:
    """Return counts of answers with equal tokens, near ties and accepted tokens."""
    loaded = model.loaded(dtype)
    reference, engine = Engine(loaded, prefixes=0), Engine(model.loaded(dtype, store), prefixes=0)
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": 0}
    pairs: list[tuple[list[int], list[int], GenerationResult]] = []
    prompts = [random_ids(40 + 7 * seed, seed) for seed in range(PROMPTS)]
    for seed, prompt in enumerate(prompts):
        if recited:
            loaded.model.recite(prompt, random_ids(TOKENS, 100 + seed))
        plain = reference.generate(prompt, drafter="none", **options).tokens
        drafters = [Scripted(partial(script, plain)), "auto"] + ["none"] * (store != "packed")
        for drafter in drafters:
            found = engine.generate(prompt, drafter=drafter, budget=8, **options)
            pairs.append((prompt, plain, found))
    if not recited:
        together = engine.generate(prompts, drafter="auto", budget=8, **options)
        plains = [plain for _, plain, _ in pairs[:: len(pairs) // PROMPTS]]
        pairs += zip(prompts, plains, together, strict=True)
    if notices := [notice for *_, found in pairs for notice in found.notices]:
        raise SystemExit(f"{model.shape}, {dtype}: {notices[0]}")
    parted = [(prompt, plain, at) for prompt, plain, found in pairs
              if (at := first_difference(plain, found.tokens)) is not None]  # fmt: skip
    gaps = [] if recited else [top_two_gap(loaded, [*p, *plain[:at]]) for p, plain, at in parted]
    accepted = sum(found.stats.accepted for *_, found in pairs)
    equal = len(pairs) - len(parted)
    return {"compared": len(pairs), "equal": equal, "gaps": gaps, "accepted": accepted}


def compare(model: Model, args: argparse.Namespace) -> Generator[str, None, bool]:
    """Yield the table of one shape; return whether tokens differ.

    Plain decoding is that of the store "packed". In float32, only ties may be decided differently.
    In bfloat16, passes of different widths round differently, so recorded answers must be equal,
    and the other differences are counted.
    """
    rows, wrong = [], False
    for dtype, store in product((torch.float32, torch.bfloat16), args.store):
        name = f"{model.shape}, {str(dtype).removeprefix('torch.')}, {store}"
        if not fits(model.bytes(dtype), args.device):
            rows.append([name, "does not fit", "", "", ""])
            continue
        found = []
        for recited in (True, False):
            compared = partial(answers, model, dtype, store, recited)
            found.append(timely(args, "check", [name, recited], compared))
        if None in found:
            break
        said, own = found
        ties = [gap for gap in own["gaps"] if dtype != torch.float32 or gap < TIE]
        wrong |= said["equal"] < said["compared"] or len(ties) < len(own["gaps"])
        wrong |= not said["accepted"]
        equal = [f"{one['equal']} of {one['compared']}" for one in found]
        rows.append([name, *equal, f"gap ≤ {max(ties):.2g}" if ties else "none",
                     f"{said['accepted'] + own['accepted']}"])  # fmt: skip
    if rows:
        yield table(HEADS, rows)
    if wrong:
        yield "**Drafted decoding gives other tokens than plain decoding. The benchmark ends.**"
    return wrong
