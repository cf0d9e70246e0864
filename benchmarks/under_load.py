"""Several requests at once: plain, `auto`, and transformers' own continuous batching.

    python -m benchmarks.under_load --data ../shared/data      # 25 minutes on two quiet cores
    python -m benchmarks.under_load --quick -o /tmp/try        # two, on prompts of the demo

1, 2, 4, 8, 16 callers, each of which asks its next prompt when it has an answer, four in a round:
held-out edits for a built-in model, Spec-Bench, MT-Redundant, HumanEval and edits for any other.
Every arm is a process with a model, whose linear layers are laid out, and an engine, which keeps no
prefixes and learns as it goes. All answer a round side by side, greedily, a second each in turn
(`paired.side_by_side`). A pair is a round; the peer answers the first ones only. The same command
goes on after an interruption; another folder begins anew. The exit code is 1 where `auto` is slower
than plain.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle, islice, product
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.guard import Guard
from benchmarks.live_smollm2 import FILES
from benchmarks.paired import AWAKE, Clock, Ratio, ratio, side_by_side, wake
from benchmarks.shared import held_out, picture, setup, table
from draftsmith import Engine, builtin
from draftsmith.bench.plots import draw_lines
from draftsmith.bench.suites import evenly, read, sample
from draftsmith.engine.request import end_ids
from draftsmith.model.load import load, read_tokenizer
from draftsmith.model.loaded import LoadedModel, last_part
from draftsmith.model.openmp import end_team
from draftsmith.storage import Finished, digest, write_text
from draftsmith.text.tokenizer import render_chat

PLAIN, AUTO, PEER = ARMS = ("none", "auto", "generate_batch")
LONGEST = 640
"""Tokens of a prompt at most."""
LEAST, LEAST_LOW = 0.98, 0.95
"""What `auto` must reach of plain's tokens per second, and the lower end of its interval."""

TURNS = 4
"""Prompts that a caller asks one after the other in a round: in one alone the slowest decides."""
PEERS = 2
"""Rounds of the peer."""

Ids = list[int]
Talk = list[dict[str, str]]
Found = dict[str, Any]
"""What an arm made of a round: numbers of `tokens` and `passes`, `seconds` until the last token, by
request those until the `first` and of `each` later one, and what tells its `answers` apart."""


class Told(NamedTuple):
    """An answer, the passes it took, and when it was asked for, began, and said its last."""

    answer: Ids | str
    tokens: int
    passes: int
    asked: float
    first: float
    last: float


Answers = list[Told] | str
"""What was answered, or why nothing was."""
Arm = Callable[[Sequence[Ids], int, int], Answers]
"""Answers prompts for so many callers with so many tokens each."""


def talks(name: str, tokenizer: Any, data: Path | None, count: int) -> list[Talk]:
    """So many chats; without data those of the demo, told apart by a number."""
    ours = builtin.is_ours(builtin.resolve(name))
    if data is None:
        file, what = builtin.demo()
        turns = cycle(talk[0][1] for talk in builtin.talks())
        asked = ([{"role": "user", "content": f"{n}. {turn}"}] for n, turn in enumerate(turns))
        edits = (builtin.edit_messages(f"shop{n}.py", what, file) for n in range(count))
        return list(islice(edits if ours else asked, count))
    if ours:
        short = (e for e in held_out(data, tokenizer, 2 * LONGEST) if len(e["prompt"]) <= LONGEST)
        return [edit["messages"] for edit in islice(short, count)]
    records = sample([r for file in FILES for r in read(data / file).records], max(1, count // 4))
    found = [[dict(message) for message in r.messages] for r in records if r.turn == 1]
    found = [talk for talk in found if len(render_chat(tokenizer, talk)) <= LONGEST]
    return [found[i] for i in evenly(len(found), count)]


def drafting(model: LoadedModel, drafter: str) -> Arm:
    """An engine's answers to callers in threads."""
    engine = Engine(model, drafter=drafter, prefixes=0)

    def one(ids: Ids, tokens: int) -> Told:
        asked = perf_counter()
        result = engine.generate(ids, max_new_tokens=tokens, temperature=0)
        stats = result.stats
        first = asked + stats.first_token_seconds
        return Told(result.tokens, len(result.tokens), stats.passes, asked, first, perf_counter())

    def ask(asked: Sequence[Ids], callers: int, tokens: int) -> Answers:
        with ThreadPoolExecutor(callers) as threads:
            return list(threads.map(one, asked, [tokens] * len(asked)))

    return ask


def peer(model: LoadedModel, most: int, length: int) -> Arm:
    """Answers of transformers' continuous batching, which keeps its memory for the next round.

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

    def ask(asked: Sequence[Ids], callers: int, tokens: int) -> Answers:
        with model.model.continuous_batching_context_manager(
            generation_config=greedy,
            continuous_batching_config=settings,
            persistent_manager=True,
        ) as manager:
            end_team()  # it has warmed up in this thread, whose workers would let others' sleep
            begins, found = dict[str, float](), dict[str, Any]()
            waiting = iter(asked)

            def add(number: int) -> None:
                for ids in islice(waiting, number):
                    asked_at = perf_counter()
                    key = manager.add_request(ids, None, tokens, record_timestamps=True)
                    begins[key] = asked_at

            add(callers)
            while len(found) < len(begins):
                one = manager.get_result(timeout=1)
                if one is None and not manager.is_running():
                    return "it ended before it had answered"
                if one is not None and one.error:
                    return str(one.error)
                if one is not None and one.is_finished():
                    found[one.request_id] = one
                    add(1)
        answers = []
        for key, asked_at in begins.items():
            ids, at = found[key].generated_tokens, found[key].timestamps
            answers.append(Told(ids, len(ids), len(at), asked_at, at[0], at[-1]))
        return answers

    return ask


def answering(
    pipe: Connection, arm: str, name: str, dtype: str, threads: int, most: int, length: int
) -> None:
    """A process: an arm that loads a model, and answers what comes through the pipe."""
    with pipe, suppress(EOFError):  # until nobody asks any more
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        torch.set_num_threads(threads)
        model = load(name, dtype=dtype, prepack=True)
        ask = peer(model, most, length) if arm == PEER else drafting(model, arm)
        while True:
            try:
                pipe.send(ask(*pipe.recv()))
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}")


def summed(answers: Answers, clock: Clock) -> Found:
    """Of the answers of a round, by the clock of the process that gave them."""
    if isinstance(answers, str):
        return {"refused": answers}
    said, tokens, passes, *times = zip(*answers, strict=True)
    asked, first, last = (list(map(clock, at)) for at in times)
    each = zip(first, last, tokens, strict=True)
    return {
        "tokens": sum(tokens),
        "passes": sum(passes),
        "seconds": max(last) - min(asked),
        "first": [b - a for a, b in zip(asked, first, strict=True)],
        "each": [(b - a) / max(1, count - 1) for a, b, count in each],
        "answers": [digest(answer) for answer in said],
    }


class Load:
    """One model under one number of requests after the other."""

    def __init__(self, name: str, dtype: str, args: argparse.Namespace, done: Finished) -> None:
        self.args, self.done, self.title = args, done, f"{last_part(name)}, {dtype}"
        tokenizer = read_tokenizer(name, {})
        chats = talks(name, tokenizer, args.data, args.prompts)
        self.prompts = [render_chat(tokenizer, chat) for chat in chats]
        length = max(map(len, self.prompts)) + args.tokens
        self._how = name, dtype, args.threads, max(args.concurrency), length
        self._arms: dict[str, tuple[Any, Connection]] = {}
        self._guards: list[Guard] = []

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in self._arms.values():
            pipe.close()
            wake(process.pid)  # it ends by itself
            process.join()
        for guard in self._guards:
            guard.close()

    def rounds(self, callers: int) -> Iterator[tuple[int, list[Ids], Sequence[str]]]:
        """Number, prompts and arms of every round."""
        order = cycle(random.Random(callers).sample(self.prompts, len(self.prompts)))
        for number in range(self.args.rounds):
            arms = ARMS if number < PEERS else (PLAIN, AUTO)
            yield number, list(islice(order, TURNS * callers)), arms[:: 1 if number % 2 else -1]

    def measured(self, callers: int) -> list[dict[str, Found]]:
        """By round, what every arm made of it."""
        found, warm = [], set[str]()
        for number, prompts, arms in self.rounds(callers):
            facts = {"model": self.title, "at_once": callers, "round": number}
            rest = [AWAKE, self.args.tokens, self.args.threads, digest(prompts)]
            keys = {arm: [*facts.values(), arm, *rest] for arm in arms}
            missing = [arm for arm in arms if keys[arm] not in self.done]
            # An engine learns what passes of so many rows cost.
            cold = [arm for arm in missing if arm not in warm]
            warm |= self._ask(cold, prompts[:callers], callers).keys()
            for arm, one in self._ask(missing, prompts, callers).items():
                self.done.add(keys[arm], facts | {"arm": arm} | one)
            found.append({arm: self.done[key] for arm, key in keys.items()})
        return found

    def _ask(self, arms: Sequence[str], prompts: Sequence[Ids], callers: int) -> dict[str, Found]:
        """What arms say to the same prompts, side by side."""
        tasks = {}
        for arm in arms:
            process, pipe = self._started(arm)

            def task(pipe: Connection = pipe) -> Answers:
                try:
                    pipe.send((prompts, callers, self.args.tokens))
                    answers: Answers = pipe.recv()
                except (EOFError, OSError):
                    return "its process ended"
                return answers

            tasks[process.pid] = task
        found = {
            arm: summed(*one) for arm, one in zip(arms, side_by_side(tasks).values(), strict=True)
        }
        for arm, one in found.items():
            if arm != PEER and "refused" in one:
                raise RuntimeError(f"{arm}: {one['refused']}")
        return found

    def _started(self, arm: str) -> tuple[Any, Connection]:
        if arm not in self._arms:
            ours, theirs = multiprocessing.Pipe()
            spawned = multiprocessing.get_context("spawn")
            process = spawned.Process(target=answering, args=(theirs, arm, *self._how), daemon=True)
            process.start()
            theirs.close()
            self._guards.append(Guard(process.pid))  # it is asleep most of the time
            self._arms[arm] = process, ours
            self._ask([arm], self.prompts[:1], 1)  # until it has loaded
        return self._arms[arm]


def over(rounds: Sequence[dict[str, Found]], arm: str) -> Ratio:
    """An arm's tokens per second over plain's, round by round."""
    both = [(one[arm], one[PLAIN]) for one in rounds if arm in one]
    speeds = ([one["tokens"] / one["seconds"] for one in pair] for pair in both)
    return ratio(*zip(*speeds, strict=True))


HEADS = ("at once", "arm", "tokens/s", "over plain, by round", "rounds", "first token, ms",
         "a later one", "tokens/pass", "plain's answers")  # fmt: skip


def lines(
    callers: int,
    rounds: Sequence[dict[str, Found]],
    arms: Sequence[str],
    heads: Sequence[str],
    figures: Callable[[list[Found]], list[str]],
) -> Iterator[Sequence[str]]:
    """Those of a table under `heads`, one for each arm, with the `figures` of its rounds."""
    for arm in arms:
        own = [one[arm] for one in rounds if arm in one]
        refused = next((one["refused"] for one in own if "refused" in one), None)
        if refused:
            yield str(callers), f"`{arm}`", f"cannot run: {refused}", *[""] * (len(heads) - 3)
            continue
        tokens, seconds = (sum(one[name] for one in own) for name in ("tokens", "seconds"))
        answers = [(one[arm]["answers"], one[PLAIN]["answers"]) for one in rounds if arm in one]
        same = [a == b for both in answers for a, b in zip(*both, strict=True)]
        yield (
            str(callers), f"`{arm}`", f"{tokens / seconds:.1f}",
            "1" if arm == PLAIN else str(over(rounds, arm)), str(len(own)),
            *figures(own), f"{sum(same)} of {len(same)}",
        )  # fmt: skip


def medians(own: list[Found]) -> list[str]:
    """Milliseconds to the first token and for a later one, and tokens per pass."""
    ms = [[1e3 * x for one in own for x in one[name]] for name in ("first", "each")]
    tokens, passes = (sum(one[name] for one in own) for name in ("tokens", "passes"))
    return [*(f"{median(x):.1f}" for x in ms), f"{tokens / passes:.2f}"]


def plot(found: dict[int, list[dict[str, Found]]], arms: Sequence[str] = ARMS) -> str:
    """Tokens per second over requests at once, a line for each arm."""
    drawn = []
    for number, arm in enumerate(arms):
        points = []
        for callers, rounds in found.items():
            own = [one[arm] for one in rounds if "seconds" in one.get(arm, ())]
            if own:
                points.append((callers, median(one["tokens"] / one["seconds"] for one in own)))
        if points:
            drawn.append((points, "o-", {"color": f"C{number}", "markersize": 3, "label": arm}))
    label = f"tokens per second: {', '.join(arms)}"
    axes = {"xlabel": "requests at once", "ylabel": "tokens per second"}
    return picture(draw_lines(label, drawn, **axes))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, print and write all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="the folder with prompts/, recorded/, corpora/")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/load"))
    parser.add_argument("--models", nargs="+", default=["edit-7m", "smollm2"])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompts", type=int, default=64, help="asked in turn, again and again")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of every number of callers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="4 prompts, 1 and 4 at once, 3 rounds")
    args = parser.parse_args(argv)
    if args.quick:
        args.prompts, args.concurrency, args.tokens, args.rounds = 4, [1, 4], 32, 3
    torch.set_num_threads(args.threads)
    done = Finished(args.output / "under_load.jsonl")
    said, slower = [f"{setup()}. At most {args.tokens} tokens an answer.\n"], False
    for name, dtype in product(args.models, args.dtypes):
        found = {}
        with Load(name, dtype, args, done) as one:
            for callers in args.concurrency:
                found[callers] = one.measured(callers)
                speed = over(found[callers], AUTO)
                bad = speed.median < LEAST or speed.low < LEAST_LOW
                slower |= bad
                slow = " SLOWER" * bad
                print(f"{one.title}, {callers} at once: auto / plain {speed}{slow}", flush=True)
        rows = [line for own in found.items() for line in lines(*own, ARMS, HEADS, medians)]
        said += [f"## {one.title}\n", table(HEADS, rows)]
        write_text(args.output / f"under_load.{one.title.replace(', ', '.')}.svg", plot(found))
    write_text(args.output / "under_load.md", "\n".join(said))
    print("\n".join(said))
    sys.exit(slower)


if __name__ == "__main__":
    main()
