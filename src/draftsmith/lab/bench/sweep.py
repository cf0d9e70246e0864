"""Many replays: every record with every drafter, in several processes, resumable."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import product

import torch

from draftsmith import __version__
from draftsmith.core.drafter import Drafter
from draftsmith.drafters.cascade import members
from draftsmith.drafters.corpus.files import Header
from draftsmith.drafters.retrieval import Retrieval
from draftsmith.drafters.spectra import Spectra
from draftsmith.errors import DraftsmithError, LoadError, PromptError
from draftsmith.lab.bench.encoding import Encoding
from draftsmith.lab.bench.records import Record
from draftsmith.lab.bench.replay import Replay, ReplayBudget, check, replay
from draftsmith.lab.bench.suites import OnError
from draftsmith.lab.lines import Finished
from draftsmith.storage import digest, expanded

CHUNK = 8
"""Records per task of a process."""

Job = tuple[int, Record, tuple[Drafter, ...]]
"""A record's number, the record, and the drafters that have not replayed it yet."""


@dataclass(frozen=True, slots=True)
class Done:
    """One record replayed with one drafter."""

    record: Record
    drafter: str
    replay: Replay


@dataclass(slots=True)
class Sweep:
    """All replays, in the order of the records, and a line for each record left out."""

    done: list[Done] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Replayer:
    """Replays records; sent to the worker processes."""

    encoding: Encoding
    budget: ReplayBudget | None = None
    on_error: OnError = "fail"
    max_tokens: int | None = None
    """Answers are cut after this many tokens."""

    def settings(self, record: Record) -> str:
        """Return what the counts depend on, in addition to record and drafter."""
        names = self.encoding.tokenizer, self.encoding.template, self.encoding.vocabulary(record)
        return repr((__version__, names, self.budget, self.max_tokens))

    def __call__(self, jobs: Sequence[Job]) -> list[tuple[int, dict[str, Replay] | str]]:
        """Return each job's number with its replays by drafter, or why there are none."""
        return [(number, self._one(record, drafters)) for number, record, drafters in jobs]

    def _one(self, record: Record, drafters: Sequence[Drafter]) -> dict[str, Replay] | str:
        try:
            ids = self.encoding(record)
        except PromptError as error:
            if self.on_error == "fail":
                raise
            return str(error)
        answer, limit = ids.answer, record.max_new_tokens
        if self.max_tokens is not None and self.max_tokens < len(answer):
            answer, limit = answer[: self.max_tokens], self.max_tokens
        return {
            str(d): replay(ids.prompt, answer, d, ids.vocab_size, self.budget, limit)
            for d in drafters
        }


def sweep(
    records: Sequence[Record],
    drafters: Sequence[Drafter],
    replayer: Replayer,
    processes: int = 1,
    finished: Finished | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Sweep:
    """Replay every answered record with every drafter; `advance` counts finished records.

    Raises LoadError if no record has an answer, DraftsmithError if a process is killed, and what
    `Encoding` and `replay` raise.
    """
    answered = [record for record in records if record.answered]
    if not answered:
        raise LoadError(
            "these records have no outputs, so there is nothing to replay; a recorded answer is "
            "the field 'output' beside 'messages' or 'prompt'"
        )
    replayer.encoding.check(answered)
    finished = finished or Finished()
    keys = [digest([asdict(record), replayer.settings(record)]) for record in answered]
    for drafter in drafters:
        check(drafter)
    for record, drafter in product(answered, drafters):
        drafter.needs_of(replayer.encoding.facts(record))  # a corpus may have another vocabulary
    names = {str(d): [str(d), *(h.sums for h in corpora(d)), *_code(d)] for d in drafters}
    jobs = [
        (number, record, missing)
        for number, (record, key) in enumerate(zip(answered, keys, strict=True))
        if (missing := tuple(d for d in drafters if not finished.get((key, names[str(d)]))))
    ]
    advance(len(answered) - len(jobs))
    result = Sweep()
    if silent := len(records) - len(answered):
        result.wrong.append(f"{silent} record{'s have' if silent > 1 else ' has'} no output")
    for number, found in _run(jobs, replayer, processes):
        if isinstance(found, str):
            result.wrong.append(found)
        else:
            for name, one in found.items():
                finished.add((keys[number], names[name]), one.as_dict())
        advance(1)
    result.done = [
        Done(record, name, Replay.from_dict(one))
        for record, key in zip(answered, keys, strict=True)
        for name, known in names.items()
        if (one := finished.get((key, known)))
    ]
    if not result.done:
        raise LoadError(f"no record could be replayed; the first: {result.wrong[-1]}")
    return result


def corpora(drafter: Drafter) -> Iterator[Header]:
    """Yield the headers of the corpora that a drafter, or a member of it, uses."""
    for member in members(drafter):
        if isinstance(member, Retrieval | Spectra) and member.corpus is not None:
            yield Header.load(expanded(member.corpus))


def _code(drafter: Drafter) -> Iterator[str]:
    """Yield digests of the modules of a drafter, or its members, that are not draftsmith's."""
    for member in members(drafter):
        module = sys.modules[type(member).__module__]
        if not module.__name__.startswith("draftsmith."):
            with suppress(OSError, TypeError):  # it has no file
                yield digest(inspect.getsource(module))


def _run(
    jobs: Sequence[Job], replayer: Replayer, processes: int
) -> Iterator[tuple[int, dict[str, Replay] | str]]:
    if processes <= 1 or len(jobs) <= CHUNK:
        for job in jobs:
            yield from replayer([job])
        return
    # Spawned, not forked: torch's threads do not survive a fork.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, spawn, _begin_worker)
    try:
        chunks = [jobs[i : i + CHUNK] for i in range(0, len(jobs), CHUNK)]
        with _deaf_to_interrupts():
            futures = [pool.submit(replayer, chunk) for chunk in chunks]
        for future in as_completed(futures):
            yield from future.result()
    except BrokenProcessPool as error:
        raise DraftsmithError(
            f"one of {processes} processes ended abruptly, perhaps for lack of memory; give fewer "
            "--processes, and --resume FILE to keep finished replays"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    """Compute in one thread, and end when the process that started this one has ended."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Make processes started in the context ignore Ctrl-C, which would leave the pool hanging."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change signals, and only it is interrupted
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
