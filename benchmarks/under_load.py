"""Several requests at once: plain, `auto`, and transformers' own continuous batching.

    python -m benchmarks.under_load --data ../shared/data      # ten minutes on two quiet cores
    python -m benchmarks.under_load --quick -o /tmp/try        # two, on prompts of the demo

Sixteen prompts, in waves of 1, 2, 4, 8, 16 that are asked together, each by a thread of its own:
held-out edits for a built-in model, Spec-Bench, MT-Redundant, HumanEval and edits for any other.
The arms answer every wave in turn, greedily, on one model whose linear layers are laid out once;
each has an engine of its own, which keeps no prefixes and learns as it goes. A pair is a wave; the
peer answers every prompt once. The same command goes on after an interruption; another folder
begins anew. The exit code is 1 where `auto` is slower than plain.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.live_smollm2 import FILES
from benchmarks.paired import Ratio, ratio
from benchmarks.shared import held_out, picture, setup, table
from draftsmith import Engine, builtin
from draftsmith.bench.plots import draw_lines
from draftsmith.bench.suites import evenly, read, sample
from draftsmith.engine.request import encode, end_ids
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel, last_part
from draftsmith.storage import Finished, digest, write_text
from draftsmith.text.tokenizer import render_chat

PLAIN, AUTO, PEER = ARMS = ("none", "auto", "generate_batch")
LONGEST = 640
"""Tokens of a prompt at most."""
LEAST, LEAST_LOW = 0.98, 0.95
"""What `auto` must reach of plain's tokens per second, and the lower end of its interval."""

Ids = list[int]
Found = dict[str, Any]
"""What an arm made of a wave: numbers of `tokens` and `passes`, `seconds` until the last token, by
request those until the `first` and of `each` later one, and what tells its `answers` apart."""


def prompts(name: str, model: LoadedModel, data: Path | None, count: int) -> list[Ids]:
    """So many prompts; without data those of the demo, told apart by a number."""
    ours = builtin.is_ours(builtin.resolve(name))
    if data is None:
        file, what = builtin.demo()
        turns = cycle(talk[0][1] for talk in builtin.talks())
        talks = ([{"role": "user", "content": f"{n}. {turn}"}] for n, turn in enumerate(turns))
        edits = (builtin.edit_messages(f"shop{n}.py", what, file) for n in range(count))
        return [encode(model, messages) for messages in islice(edits if ours else talks, count)]
    if ours:
        found = (edit["prompt"] for edit in held_out(data, model.tokenizer, 2 * LONGEST))
        return list(islice((ids for ids in found if len(ids) <= LONGEST), count))
    records = sample([r for file in FILES for r in read(data / file).records], max(1, count // 4))
    asked = [render_chat(model.tokenizer, list(r.messages)) for r in records if r.turn == 1]
    asked = [ids for ids in asked if len(ids) <= LONGEST]
    return [asked[i] for i in evenly(len(asked), count)]


def drafting(model: LoadedModel, drafter: str) -> Callable[[Sequence[Ids], int], Found]:
    """An engine's answers to callers in threads."""
    engine = Engine(model, drafter=drafter, prefixes=0)

    def ask(wave: Sequence[Ids], tokens: int) -> Found:
        begin = perf_counter()

        def one(ids: Ids) -> tuple[Ids, int, float, float]:
            late = perf_counter() - begin
            result = engine.generate(ids, max_new_tokens=tokens, temperature=0)
            first, last = late + result.stats.first_token_seconds, perf_counter() - begin
            return result.tokens, result.stats.passes, first, last

        with ThreadPoolExecutor(len(wave)) as threads:
            return summed(list(threads.map(one, wave)))

    return ask


def peer(model: LoadedModel, most: int, length: int) -> Callable[[Sequence[Ids], int], Found]:
    """Answers of `generate_batch`, which keeps its memory for the next wave.

    So many requests of such a length at most. The settings are the best of those tried.
    """
    settings = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=most * (length // 32 + 2),
        max_batch_tokens=256,
        max_requests_per_batch=most,
        scheduler_type="prefill_first",
        allow_block_sharing=False,
        auto_switch_to_flash=False,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=end_ids(model) or -1)

    def ask(wave: Sequence[Ids], tokens: int) -> Found:
        begin = perf_counter()
        found = model.model.generate_batch(
            list(wave),
            generation_config=greedy,
            continuous_batching_config=settings,
            record_timestamps=True,
            persistent_manager=True,
            max_new_tokens=tokens,
        ).values()
        wrong = next((one.error for one in found if one.error), None)
        if wrong or len(found) < len(wave):
            return {"refused": wrong or "it answered only a part of the prompts"}
        times = [[at - begin for at in one.timestamps] for one in found]
        both = zip(found, times, strict=True)
        return summed([(one.generated_tokens, len(at), at[0], at[-1]) for one, at in both])

    return ask


def summed(answers: Sequence[tuple[Ids, int, float, float]]) -> Found:
    """Of tokens, passes, seconds until the first token and until the last, by request."""
    tokens, passes, first, last = zip(*answers, strict=True)
    return {
        "tokens": sum(map(len, tokens)),
        "passes": sum(passes),
        "seconds": max(last),
        "first": first,
        "each": [(b - a) / max(1, len(t) - 1) for t, _, a, b in answers],
        "answers": [digest(ids) for ids in tokens],
    }


class Load:
    """One model under one number of requests after the other."""

    def __init__(self, name: str, dtype: str, args: argparse.Namespace, done: Finished) -> None:
        self.args, self.done, self.title = args, done, f"{last_part(name)}, {dtype}"
        model = load(name, dtype=dtype, prepack=True)
        self.prompts = prompts(name, model, args.data, args.prompts)
        self.arms = {arm: drafting(model, arm) for arm in (PLAIN, AUTO)}
        length = max(map(len, self.prompts)) + args.tokens
        self.arms[PEER] = peer(model, max(args.concurrency), length)

    def waves(self, rows: int) -> Iterator[tuple[int, list[Ids], Sequence[str]]]:
        """Number, prompts and arms of every wave; the peer answers each prompt once."""
        own = max(1, len(self.prompts) // rows)
        for number in range(max(own, self.args.waves)):
            turn, place = divmod(number, own)
            order = random.Random(turn).sample(self.prompts, len(self.prompts))
            wave = list(islice(cycle(order), place * rows, (place + 1) * rows))
            arms = ARMS if number < own else (PLAIN, AUTO)
            yield number, wave, arms[:: 1 if number % 2 else -1]

    def expected_seconds(self) -> float:
        """How long all takes: as if every arm were plain, from a wave of the least and the most."""
        sizes = self.args.concurrency
        ends = [min(sizes), max(sizes)]
        a, b = (self._ask(PLAIN, list(islice(cycle(self.prompts), n)))["seconds"] for n in ends)
        slope = (b - a) / max(1, ends[1] - ends[0])
        counts = {rows: 3 + sum(len(arms) for *_, arms in self.waves(rows)) for rows in sizes}
        return sum(n * (a + slope * (rows - ends[0])) for rows, n in counts.items())

    def measured(self, rows: int) -> list[dict[str, Found]]:
        """By wave, what every arm made of it."""
        asked, found, cold = list(self.waves(rows)), [], True
        for number, wave, arms in asked:
            facts = {"model": self.title, "at_once": rows, "wave": number}
            rest = [self.args.tokens, self.args.threads, digest(wave)]
            keys = {arm: [*facts.values(), arm, *rest] for arm in arms}
            if cold and any(key not in self.done for key in keys.values()):
                for arm in ARMS:  # an engine learns what passes of so many rows cost
                    self._ask(arm, asked[0][1])
                cold = False
            for arm, key in keys.items():
                if key not in self.done:
                    self.done.add(key, facts | {"arm": arm} | self._ask(arm, wave))
            found.append({arm: self.done[key] for arm, key in keys.items()})
        return found

    def _ask(self, arm: str, wave: Sequence[Ids]) -> Found:
        try:
            return self.arms[arm](wave, self.args.tokens)
        except Exception as error:
            if arm != PEER:
                raise
            return {"refused": f"{type(error).__name__}: {error}"}


def over(waves: Sequence[dict[str, Found]], arm: str) -> Ratio:
    """An arm's tokens per second over plain's, wave by wave."""
    both = [(wave[arm], wave[PLAIN]) for wave in waves if arm in wave]
    speeds = ([one["tokens"] / one["seconds"] for one in pair] for pair in both)
    return ratio(*zip(*speeds, strict=True))


HEADS = ("at once", "arm", "tokens/s", "over plain, by wave", "waves", "first token, ms",
         "a later one", "tokens/pass", "plain's answers")  # fmt: skip


def lines(rows: int, waves: Sequence[dict[str, Found]]) -> Iterator[Sequence[str]]:
    """The table's, one for each arm."""
    for arm in ARMS:
        own = [wave[arm] for wave in waves if arm in wave]
        refused = next((one["refused"] for one in own if "refused" in one), None)
        if refused:
            yield str(rows), f"`{arm}`", f"cannot run: {refused}", *[""] * (len(HEADS) - 3)
            continue
        total = {name: sum(one[name] for one in own) for name in ("tokens", "passes", "seconds")}
        ms = [1e3 * median(x for one in own for x in one[name]) for name in ("first", "each")]
        answers = [(wave[arm]["answers"], wave[PLAIN]["answers"]) for wave in waves if arm in wave]
        same = [a == b for both in answers for a, b in zip(*both, strict=True)]
        yield (
            str(rows), f"`{arm}`", f"{total['tokens'] / total['seconds']:.1f}",
            "1" if arm == PLAIN else str(over(waves, arm)), str(len(own)),
            *(f"{x:.1f}" for x in ms), f"{total['tokens'] / total['passes']:.2f}",
            f"{sum(same)} of {len(same)}",
        )  # fmt: skip


def plot(found: dict[int, list[dict[str, Found]]]) -> str:
    """Tokens per second over requests at once, a line for each arm."""
    drawn = []
    for number, arm in enumerate(ARMS):
        points = []
        for rows, waves in found.items():
            own = [wave[arm] for wave in waves if "seconds" in wave.get(arm, ())]
            points += [(rows, median(one["tokens"] / one["seconds"] for one in own))] * bool(own)
        if points:
            drawn.append((points, "o-", {"color": f"C{number}", "markersize": 3}))
    label = f"tokens per second: {', '.join(ARMS)}"
    axes = {"xlabel": "requests at once", "ylabel": "tokens per second", "title": label}
    return picture(draw_lines(label, drawn, **axes))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, print and write all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="the folder with prompts/, recorded/, corpora/")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/load"))
    parser.add_argument("--models", nargs="+", default=["edit-7m", "smollm2"])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--waves", type=int, default=8, help="pairs of every concurrency at least")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="4 prompts, 1 and 4 at once, 3 waves")
    args = parser.parse_args(argv)
    if args.quick:
        args.prompts, args.concurrency, args.tokens, args.waves = 4, [1, 4], 32, 3
    torch.set_num_threads(args.threads)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    done = Finished(args.output / "under_load.jsonl")
    loads = [Load(name, dtype, args, done) for name in args.models for dtype in args.dtypes]
    minutes = (f"{one.title} {one.expected_seconds() / 60:.1f}" for one in loads)
    print("minutes if nothing is known yet:", *minutes, flush=True)
    said, slower = [f"{setup()}. At most {args.tokens} tokens an answer.\n"], False
    for one in loads:
        found = {}
        for rows in args.concurrency:
            found[rows] = one.measured(rows)
            speed = over(found[rows], AUTO)
            bad = speed.median < LEAST or speed.low < LEAST_LOW
            slower |= bad
            print(f"{one.title}, {rows} at once: auto / plain {speed}{' SLOWER' * bad}", flush=True)
        rows = [line for number, waves in found.items() for line in lines(number, waves)]
        said += [f"## {one.title}\n", table(HEADS, rows)]
        write_text(args.output / f"under_load.{one.title.replace(', ', '.')}.svg", plot(found))
    write_text(args.output / "under_load.md", "\n".join(said))
    print("\n".join(said))
    sys.exit(slower)


if __name__ == "__main__":
    main()
