"""Rounds of requests that several arms answer in turns: under_load, server_load, agents.

In a round each caller asks a few prompts, the next one after each answer. Every arm is a process
with a model. All arms answer the same round in turns (`turns.side_by_side`). Engines and servers
learn while they run, so every arm first answers some prompts that are not measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks.shared import held_out, live, ratio, table
from benchmarks.turns import AWAKE, Clock, Sleeper, side_by_side
from draftsmith import builtin
from draftsmith.lab.bench.suites import evenly
from draftsmith.lab.bench.summary import Interval
from draftsmith.storage import digest
from draftsmith.text.tokenizer import render_chat

PLAIN, AUTO = "none", "auto"
LONGEST = 640
"""Most tokens of a prompt."""
LEAST, LEAST_LOW = 0.98, 0.95
"""Promise: tokens per second of `auto` over plain's, and the lower end of the interval."""
SMALL, MORE = 8, 3
"""A round of fewer requests is noisy, so there are up to three times as many rounds."""
MANY = 32
"""Most prompts that are answered first, without being measured."""
WARM = 1000
"""Number of the round that has these."""
Chat = list[dict[str, str]]
Found = dict[str, Any]
"""Figures of an arm in a round: `tokens`, `passes`, `seconds`, `prompt`, `cached`, `first`, `each`,
`answers`.

By request, `first` and `each` are milliseconds to the first token and for each later one, and
`answers` are digests.
"""
Rounds = list[dict[str, Found]]


class Refused(Exception):
    """An arm cannot be started or did not answer; the message has the reason."""


class Said(NamedTuple):
    """One answer, its passes, times of request, first and last token, and its prompt's tokens."""

    answer: object
    tokens: int
    passes: int
    asked: float
    first: float
    last: float
    prompt: int = 0
    cached: int | None = None
    """Tokens of the prompt that an earlier request had computed; None: unknown."""


class Arm(Protocol):
    """A process that answers prompts."""

    sleeper: Sleeper

    def ask(self, prompts: Sequence[Any], at_once: int, tokens: int) -> list[Said]:
        """Answer prompts of `at_once` callers with at most `tokens` each; raise Refused."""

    def end(self) -> None:
        """End the process."""


Answer = tuple[list[int], int]
"""Token ids, and their number of passes."""
Answerer = Callable[[list[Any], int, int], list[Answer]]
"""(prompts, callers, most tokens) → answers."""


class Worker:
    """An arm that is a function in a process of its own."""

    def __init__(self, make: Callable[..., Answerer], *how: Any) -> None:
        """`make(*how)` is called in the new process."""
        self._pipe, theirs = multiprocessing.Pipe()
        spawned = multiprocessing.get_context("spawn")
        self._process = spawned.Process(target=work, args=(theirs, make, how), daemon=True)
        self._process.start()
        theirs.close()
        self.sleeper = Sleeper(self._process.pid or 0)
        self._pipe.recv()  # it is ready
        self.sleeper.sleep()

    def ask(self, prompts: Sequence[Any], at_once: int, tokens: int) -> list[Said]:
        """Answer all prompts of a round; they end together."""
        begin = perf_counter()
        self._pipe.send((prompts, at_once, tokens))
        answers = self._pipe.recv()
        if isinstance(answers, str):
            raise Refused(answers)
        times = begin, begin, perf_counter()
        return [Said(ids, len(ids), passes, *times) for ids, passes in answers]

    def end(self) -> None:
        """End the process."""
        self.sleeper.end()
        self._process.join()


def work(pipe: Connection, make: Callable[..., Answerer], how: Sequence[Any]) -> None:
    """Answer requests from the pipe until it is closed."""
    answer = make(*how)
    pipe.send("ready")
    while True:
        try:
            pipe.send(answer(*pipe.recv()))
        except (EOFError, KeyboardInterrupt):
            return
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


def chats(name: str, tokenizer: Any, data: Path | None, count: int) -> list[Chat]:
    """Return `count` chats for a model, shuffled.

    Without a folder, these are the demo's chats with different numbers. With one, built-in models
    get held-out edits, and all others get the prompts of `live`.
    """
    ours = builtin.is_ours(builtin.resolve(name))
    if data is None:
        file, what = builtin.demo()
        turns = cycle(talk[0][1] for talk in builtin.talks())
        asked = ([{"role": "user", "content": f"{n}. {turn}"}] for n, turn in enumerate(turns))
        edits = (builtin.edit_messages(f"shop{n}.py", what, file) for n in range(count))
        found = list(islice(edits if ours else asked, count))
    elif ours:
        short = (e for e in held_out(data, tokenizer, 2 * LONGEST) if len(e["prompt"]) <= LONGEST)
        found = [edit["messages"] for edit in islice(short, count)]
    else:
        records = live(data, max(1, count // 4))
        first = [[dict(message) for message in r.messages] for r in records if r.turn == 1]
        fitting = [chat for chat in first if len(render_chat(tokenizer, chat)) <= LONGEST]
        found = [fitting[i] for i in evenly(len(fitting), count)]
    return random.Random(0).sample(found, len(found))


@dataclass
class Load:
    """Rounds of one model, answered by every arm.

    Plain and `auto` answer every round, the others only `args.peer_rounds` of them. A caller asks
    `args.requests` prompts per round. Before an arm is measured, it answers at most `args.warm`
    prompts at once.
    """

    args: argparse.Namespace
    title: str
    starts: Mapping[str, Callable[[], Arm]]
    """Functions that start the arms."""
    programs: Mapping[str, object]
    """Model and program of each arm; results of others are not used again."""
    prompts: Sequence[Any]
    marked: Callable[[str, Any], Any] = lambda _, prompt: prompt
    """Adds a different mark to every prompt."""
    _arms: dict[str, Arm] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)

    def compare(self) -> dict[int, Rounds]:
        """Return the rounds of every number of callers (`args.at_once`)."""
        found = dict[int, Rounds]()
        try:
            for at_once in self.args.at_once:
                found[at_once] = self._rounds(at_once)
                speed = over_plain(found[at_once]).shown("", 3)
                print(f"{self.title}, {at_once} at once: auto / plain {speed}", flush=True)
        finally:
            for arm in self._arms.values():
                arm.end()
        return found

    def _round(self, at_once: int, number: int) -> list[Any]:
        """Return the prompts of a round."""
        count, every = at_once * self.args.requests, self.prompts
        places = range(number * count, (number + 1) * count)
        return [self.marked(f"{at_once}.{n}", every[n % len(every)]) for n in places]

    def _rounds(self, at_once: int) -> Rounds:
        """Return the figures of every arm in each round."""
        args, found, warm = self.args, Rounds(), set[str]()
        times = max(1, min(MORE, SMALL // (at_once * args.requests)))
        for number in range(times * args.rounds):
            names = [*self.starts] if number < times * args.peer_rounds else [PLAIN, AUTO]
            prompts = self._round(at_once, number)
            same = [self.title, at_once, number, args.tokens, AWAKE, digest(prompts)]
            keys = {name: [name, *same, self.programs[name]] for name in names}
            made = {name: args.results.get(keys[name]) for name in names}
            missing = [name for name in names[:: 1 if number % 2 else -1] if not made[name]]
            cold = [name for name in missing if name not in warm]
            warm |= self._ask(
                cold, self._round(at_once, WARM)[: min(at_once, args.warm)], at_once
            ).keys()
            for name, one in self._ask(missing, prompts, at_once).items():
                made[name] = one
                # Not stored, because it may work the next time.
                if "refused" not in one:
                    args.results.add(keys[name], one)
            found.append(made)
        return found

    def _ask(self, names: Sequence[str], prompts: list[Any], at_once: int) -> dict[str, Found]:
        """Ask all arms for the same answers, in turns."""
        arms = {name: arm for name in names if (arm := self._arm(name)) is not None}
        tokens = self.args.tokens
        said = side_by_side(
            {arm.sleeper: partial(answered, arm, prompts, at_once, tokens) for arm in arms.values()}
        )
        found = {}
        for name in names:
            if name in arms:
                answers, clock = said[arms[name].sleeper]
                if isinstance(answers, str):
                    self._refused[name] = answers
                else:
                    found[name] = summed(answers, clock)
            if name in self._refused:
                if name in (PLAIN, AUTO):
                    raise Refused(f"{name}: {self._refused[name]}")
                found[name] = {"refused": self._refused[name]}
        return found

    def _arm(self, name: str) -> Arm | None:
        """Return an arm, which is started once; None if it was refused."""
        if name not in self._arms and name not in self._refused:
            print(f"{self.title}: starting {name}", flush=True)
            try:
                self._arms[name] = self.starts[name]()
            except Refused as refused:
                self._refused[name] = str(refused)
        return None if name in self._refused else self._arms[name]


def answered(arm: Arm, prompts: list[Any], at_once: int, tokens: int) -> list[Said] | str:
    """Return the answers, or the reason why there are none."""
    try:
        return arm.ask(prompts, at_once, tokens)
    except (Refused, OSError, EOFError) as error:
        return f"{type(error).__name__}: {error}".removeprefix("Refused: ")


def summed(said: Sequence[Said], clock: Clock) -> Found:
    """Return the figures of a round, by the clock of the process that answered."""
    answers, tokens, passes, *times, prompt, cached = zip(*said, strict=True)
    asked, first, last = ([clock(at) for at in moments] for moments in times)
    each = ((b - a) / max(1, n - 1) for a, b, n in zip(first, last, tokens, strict=True))
    return {
        "tokens": sum(tokens), "passes": sum(passes), "seconds": max(last) - min(asked),
        "prompt": sum(prompt), "cached": None if None in cached else sum(cached),
        "first": [1e3 * (b - a) for a, b in zip(asked, first, strict=True)],
        "each": [1e3 * seconds for seconds in each], "answers": [digest(one) for one in answers],
    }  # fmt: skip


def over_plain(rounds: Rounds, arm: str = AUTO) -> Interval:
    """Return an arm's tokens per second over plain's, round by round."""
    both = [(one[arm], one[PLAIN]) for one in rounds if arm in one]
    a, b = zip(*([one["tokens"] / one["seconds"] for one in pair] for pair in both), strict=True)
    return ratio(a, b)


def slower(found: Mapping[int, Rounds]) -> bool:
    """Return whether `auto` breaks the promise that it is not slower than plain decoding.

    A single round has no interval, and its ratio alone counts.
    """
    speeds = [over_plain(rounds) for rounds in found.values()]
    return any(speed.value < LEAST or speed.low < LEAST_LOW for speed in speeds)


def latencies(own: Sequence[Found]) -> list[str]:
    """Format milliseconds to the first token and for a later one: median, 95th percentile."""
    times = [[ms for one in own for ms in one[name]] for name in ("first", "each")]
    return [f"{np.percentile(ms, share):.1f}" for ms in times for share in (50, 95)]


def per_pass(own: Sequence[Found]) -> list[str]:
    """Format tokens per pass."""
    return [f"{sum(one['tokens'] for one in own) / sum(one['passes'] for one in own):.2f}"]


HEADS = ("at once", "arm", "tokens/s", "over plain, by round", "rounds", "plain's answers")


def block(
    title: str,
    found: Mapping[int, Rounds],
    heads: Sequence[str],
    more: Callable[[Sequence[Found]], list[str]],
) -> str:
    """Return a model's table: under `HEADS`, then what `more` returns under `heads`, by arm."""
    rows = []
    for at_once, rounds in found.items():
        for arm in rounds[0]:
            own = [one[arm] for one in rounds if arm in one]
            if refused := next((one["refused"] for one in own if "refused" in one), None):
                blank = [""] * (len(HEADS) - 3 + len(heads))
                rows.append([str(at_once), f"`{arm}`", f"cannot run: {refused}", *blank])
                continue
            tokens, seconds = (sum(one[name] for one in own) for name in ("tokens", "seconds"))
            both = ((one[arm]["answers"], one[PLAIN]["answers"]) for one in rounds if arm in one)
            same = [a == b for pair in both for a, b in zip(*pair, strict=True)]
            speed = "1" if arm == PLAIN else over_plain(rounds, arm).shown("", 3)
            rows.append([str(at_once), f"`{arm}`", f"{tokens / seconds:.1f}", speed, str(len(own)),
                         f"{sum(same)} of {len(same)}", *more(own)])  # fmt: skip
    return f"## {title}\n\n{table((*HEADS, *heads), rows)}"
