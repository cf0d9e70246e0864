"""Rows of finished requests, kept for the next request that begins like one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.core.drafter import common_prefix
from draftsmith.engine.autocast import autocast_mode
from draftsmith.engine.jobs import Job
from draftsmith.model.fingerprint import state
from draftsmith.model.runner import Runner

NOT_KEPT = "the sequence could not be kept for later requests"
_NOT_COPIED = (
    "This prompt begins like an earlier one and is read again: keys cannot be copied where a "
    "drafter looks at the model's attention, or where rotary angles depend on the length of a pass."
)
LEAST = 16
"""Common tokens below which computing them again is as good."""


@dataclass(eq=False, slots=True)
class Kept:
    """A row that nobody uses, and under what it was computed."""

    row: Any
    key: Any
    bytes: int
    """That it holds."""


class Prefixes:
    """Kept rows, the least recently used first."""

    def __init__(self, runner: Runner, most: int) -> None:
        """`most`: rows that are kept; with 0 nothing is ever shared."""
        self.runner = runner
        self.most = most
        self._kept: list[Kept] = []
        self._told = False
        """Whether a caller heard that its prompt was read again."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """That the kept rows hold."""
        return sum(kept.bytes for kept in list(self._kept))

    def label(self, job: Job) -> None:
        """Note under what a job's row is computed: equal keys can serve each other."""
        if self.most:
            weights = state(self.runner.loaded.model)
            job.key = weights, *self._conditions(job)

    def _conditions(self, job: Job) -> tuple[Any, ...]:
        """Under what a row is computed, beside the weights."""
        return autocast_mode(self.runner.loaded.device), job.session.needs, job.salt

    def borrow(self, job: Job, jobs: Sequence[Job]) -> None:
        """Let a job begin behind the longest prefix that is computed, kept or in use by another.

        A kept row is taken over where most of it serves; else its keys are copied.
        """
        if not self.most:
            return
        for old in [old for old in self._kept if old.key[0] != job.key[0]]:
            self.drop(old)  # the weights are others by now
        session, runner = job.session, self.runner
        mine: list[tuple[Any, Kept | None]] = [(k.row, k) for k in self._kept if k.key == job.key]
        if runner.copies:
            mine += [(other.session.row, None) for other in jobs if other.key == job.key]
        reached = [runner.reach(row, common_tokens(row.ids, job)) for row, _ in mine]
        common = max(reached, default=0)
        if common < LEAST:
            if max((common_tokens(row.ids, job) for row, kept in mine if kept), default=0) >= LEAST:
                self._say(job, runner.loaded.capabilities.rereads)
            return
        row, kept = mine[reached.index(common)]
        if kept is not None and self._serves(kept, common):
            session.row, empty = row, session.row  # first, so that an interrupt loses no row
            self._kept.remove(kept)
            runner.close(empty)
            row.rewinds = job.rewinds
            runner.extend(row, session.ids, session.needs)
        else:
            runner.copy(row, session.row, common)
        session.stats.reused_tokens = session.row.cached
        if not session.row.cached:
            self._say(job, _NOT_COPIED)

    def ends(self, job: Job) -> bool:
        """Whether a prompt's last token gets a pass of its own, since a state knows no shorter past
        and who has the same prompt computes that token again."""
        recurrent = self.runner.loaded.capabilities.cache == "replay"
        return bool(self.most and recurrent and job.session.prompt_length > LEAST)

    def _say(self, job: Job, why: str | None) -> None:
        """Tell the first caller whose prompt is read again that it is, and why."""
        if why and not self._told:
            self._told = True
            job.notices += (f"{why} (said once)",)

    def mark(self, job: Job) -> None:
        """Keep the end of a job's prompt for others, once it is read.

        But for its last token: who has the same prompt computes that one again.
        """
        session, row = job.session, job.session.row
        end = session.prompt_length - 1
        if job.marked or row is None or row.cached < end:
            return
        job.marked = True
        already = row.mark is not None and row.mark[0] == end
        if self.most and end >= LEAST and not already:
            self.runner.mark(row)

    def coming(self, job: Job, waiting: Sequence[Job]) -> bool:
        """Whether an earlier job is just computing what this one begins with: then it waits."""
        needs = job.session.needs
        if job not in waiting or not self.most or not self.runner.copies or needs.attention_heads:
            return False
        ahead = [j for j in waiting[: waiting.index(job)] if j.key == job.key]
        shared = [(common_tokens(j.session.ids, job), j.session.row.cached) for j in ahead]
        return any(common >= LEAST and cached < common for common, cached in shared)

    def keep(self, job: Job) -> None:
        """Keep an ended job's row, or close it."""
        row = job.session.row
        if not self.most or row.cached < LEAST:
            self.close(row, self.runner)
            return
        try:
            self.runner.part(row)
        except (MemoryError, RuntimeError) as error:  # no room: torch's is a RuntimeError
            job.session.note(NOT_KEPT, error)
            self.close(row, self.runner)
            return
        size = self.runner.row_bytes(row.cached, row.rewinds) + self.runner.mark_bytes(row)
        size += row.taps.bytes if row.taps else 0
        self._kept.append(Kept(row, job.key, size))
        while len(self._kept) > self.most:
            self.drop(self._kept[0])

    def close(self, row: Any, runner: Runner) -> None:
        """Close a row, which an interrupt may have left among those that are kept."""
        self._kept = [kept for kept in self._kept if kept.row is not row]
        runner.close(row)

    def others(self, job: Job) -> list[Kept]:
        """The kept rows, but for one that a job in line is going to take over."""
        own = self._conditions(job)
        mine = [(common_tokens(k.row.ids, job), k) for k in self._kept if k.key[1:] == own]
        common, best = max(mine, key=lambda one: one[0], default=(0, None))
        return [k for k in self._kept if k is not best or not self._serves(k, common)]

    def _serves(self, kept: Kept, common: int) -> bool:
        """Whether a job with so much in common takes a row over, rather than a copy of its keys."""
        return common >= LEAST and (2 * common > kept.row.cached or not self.runner.copies)

    def drop(self, kept: Kept) -> None:
        """Let a row go."""
        self._kept.remove(kept)
        self.runner.close(kept.row)


def common_tokens(ids: list[int], job: Job) -> int:
    """How many of these tokens a job begins with, but for its last."""
    wanted: list[int] = job.session.ids
    return min(common_prefix(ids, wanted), len(wanted) - 1)
