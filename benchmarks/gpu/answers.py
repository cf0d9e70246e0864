"""Tokens per second on recorded answers, beside transformers' own generation."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.gpu.card import timely
from benchmarks.gpu.models import Model
from benchmarks.gpu.passes import DTYPE
from benchmarks.gpu.texts import Text, texts
from benchmarks.shared import table
from draftsmith.core.sampling import SamplingParams
from draftsmith.lab.bench.answer import Ask
from draftsmith.lab.bench.arms import Arm, build, parse_arm
from draftsmith.lab.bench.run import answered, in_turn
from draftsmith.lab.bench.summary import Pace, interval, rate, speed_ratio

ARMS = ("none", "auto", "prompt_lookup")
PEERS = ("hf:generate", "hf:static", "hf:prompt_lookup")
AGAINST = "hf:static"
HEADS = ("bfloat16, recorded answers", "tokens/s", f"over `{AGAINST}`", "tokens/pass",
         "host alone, ms/pass")  # fmt: skip


def names(args: argparse.Namespace) -> list[str]:
    """Return the arms: drafters with the store "packed", others with the name of theirs."""
    ours = [name if store == "packed" else f"{name} {store}"
            for store in args.store for name in ARMS]  # fmt: skip
    return [*ours, *PEERS]


def compare(model: Model, args: argparse.Namespace) -> Iterator[str]:
    """Yield the table: every arm gives every answer, in turn."""
    known: dict[tuple[str, str], list[Any]] = {}
    every, wanted = names(args), texts(args.data, args.limit, args.tokens)
    arms = cache(lambda: {arm.name: arm for arm in ready(model, every, wanted)})
    for number, text in enumerate(wanted):
        for name in in_turn(every, number):
            key = [model.shape, text.name, args.tokens]
            once = lambda name=name, text=text: measured(model, arms()[name], text)  # noqa: E731
            if (found := timely(args, name, key, once)) is not None:
                known[name, text.name] = found
    whole = [text.name for text in wanted if all((name, text.name) in known for name in every)]
    if whole:
        lines = (line(name, [known[name, text] for text in whole],
                      [known[AGAINST, text] for text in whole]) for name in every)  # fmt: skip
        yield f"## {model.shape}: {len(whole)} of {len(wanted)} answers\n\n{table(HEADS, lines)}"


def ready(model: Model, names: Sequence[str], wanted: Sequence[Text]) -> list[Arm]:
    """Return the arms after untimed answers.

    To the longest prompt: transformers' static cache keeps the largest size, so that nothing is
    compiled again. Of arms with our static store to all prompts, so that graphs are captured.
    """
    arms = []
    for name in names:
        drafter, _, store = name.partition(" ")
        spec = replace(parse_arm(drafter), name=name)
        arms += build(model.loaded(DTYPE, store or "packed"), [spec])
        longest = max(wanted, key=lambda one: len(one.prompt))
        for text in wanted if store else [longest]:
            measured(model, arms[-1], text)
    return arms


def measured(model: Model, arm: Arm, text: Text) -> list[Any]:
    """Return tokens, seconds, passes, and seconds between the passes (None: not known)."""
    loaded = model.loaded(DTYPE)
    loaded.model.recite(text.prompt, text.answer)
    found = answered(arm, Ask(text.prompt, len(text.answer), SamplingParams()))
    length = len(text.answer)
    if found.tokens[:length] != [*text.answer]:  # transformers 4's prompt lookup adds a token
        raise SystemExit(f"{arm.name} does not give the recorded answer {text.name}")
    between = None
    if found.stats is not None:
        spent = found.stats.seconds
        between = found.seconds - spent.prefill - spent.target
    return [length, found.seconds, found.passes, between]


def line(name: str, own: Sequence[list[Any]], other: Sequence[list[Any]]) -> list[str]:
    """Return one line of the table, with intervals over the answers."""
    paces: list[list[Pace]] = [[(one[0], one[1]) for one in side] for side in (own, other)]
    passes, between = sum(one[2] for one in own), [one[3] for one in own]
    idle = "" if None in between else f"{1e3 * sum(between) / passes:.2f}"
    over = interval([*zip(*paces, strict=True)], speed_ratio).shown("×")
    return [f"`{name}`", interval(paces[0], rate).shown("", 1), over,
            f"{sum(one[0] for one in own) / passes:.2f}", idle]  # fmt: skip
