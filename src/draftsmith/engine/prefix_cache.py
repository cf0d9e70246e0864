"""Prefix cache: rows of finished requests, kept for requests with the same beginning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.core.drafter import common_prefix
from draftsmith.engine.sequence import TextSequence
from draftsmith.model.changes import state
from draftsmith.model.runner import Runner

_NOT_REUSED = "an earlier sequence that begins alike could not be reused"
NOT_KEPT = "the sequence could not be kept for later requests"
_NOT_COPIED = (
    "This prompt begins like an earlier one but is read again: keys cannot be copied if a drafter "
    "reads the model's attention, or if rotary angles depend on the length of a pass."
)
LEAST = 16
"""Minimum number of common tokens; computing fewer again costs as much as copying them."""


@dataclass(eq=False, slots=True)
class Kept:
    """A row that is not in use, with the conditions under which it was computed."""

    row: Any
    key: Any
    bytes: int
    """Size of the row."""


class PrefixCache:
    """Kept rows, the least recently used first."""

    def __init__(self, runner: Runner, most: int) -> None:
        """`most`: maximum number of kept rows; 0 disables sharing."""
        self.runner = runner
        self.most = most
        self._kept: list[Kept] = []
        self._reported = False
        """Whether a notice about a prompt that is read again was given."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """Size of the kept rows."""
        return sum(kept.bytes for kept in list(self._kept))

    def label(self, sequence: TextSequence) -> None:
        """Set the conditions of a sequence's row; sequences with equal keys can share rows."""
        if self.most:
            weights = state(self.runner.loaded.model)
            sequence.key = weights, *self._conditions(sequence)

    def _conditions(self, sequence: TextSequence) -> tuple[Any, ...]:
        """Return the conditions of a row, except for the weights."""
        return autocast_mode(self.runner.loaded.device), sequence.needs, sequence.salt

    def match(self, sequence: TextSequence, sequences: Sequence[TextSequence]) -> None:
        """Reuse the longest computed prefix of a sequence, from a kept row or from one in use.

        A kept row is taken over if most of it is common; else its keys are copied.
        """
        if not self.most:
            return
        runner, store, key = self.runner, self.runner.store, sequence.key
        for old in [old for old in self._kept if old.key[0] != key[0]]:
            self.close(old.row, runner)  # the weights have changed
        candidates: list[tuple[Any, Kept | None]] = [
            (kept.row, kept) for kept in self._kept if kept.key == key
        ]
        if store.copies:
            candidates += [(other.row, None) for other in sequences if other.key == key]
        reached = [store.reach(row, common_tokens(row.ids, sequence)) for row, _ in candidates]
        common = max(reached, default=0)
        if common < LEAST:
            if any(kept and common_tokens(row.ids, sequence) >= LEAST for row, kept in candidates):
                self._say(sequence, runner.loaded.capabilities.rereads)
            return
        row, kept = candidates[reached.index(common)]
        try:
            if kept is not None and self._serves(kept, common):
                sequence.row, empty = row, sequence.row  # in this order, an interrupt loses no row
                self._kept.remove(kept)
                runner.close(empty)
                row.rewinds = sequence.of_chat
                runner.extend(row, sequence.ids, sequence.needs)
            else:
                runner.copy(row, sequence.row, common)
        except (MemoryError, RuntimeError) as error:  # no memory: torch raises a RuntimeError
            sequence.note(_NOT_REUSED, error)
            runner.close(sequence.row)
            sequence.row = runner.open(sequence.ids, sequence.needs)
            sequence.row.rewinds = sequence.of_chat
            return
        sequence.stats.reused_tokens = sequence.row.cached
        if not sequence.row.cached:
            self._say(sequence, _NOT_COPIED)

    def ends(self, sequence: TextSequence) -> bool:
        """Return whether a prompt's last token needs a pass of its own.

        It does for recurrent models: their state cannot be cut, and a request with the same prompt
        computes the last token again.
        """
        recurrent = self.runner.loaded.capabilities.cache == "replay"
        return bool(self.most and recurrent and sequence.prompt_length > LEAST)

    def _say(self, sequence: TextSequence, why: str | None) -> None:
        """Add a notice to the first sequence with a prompt that is read again."""
        if why and not self._reported:
            self._reported = True
            sequence.remarks += (f"{why} (reported once)",)

    def mark(self, sequence: TextSequence) -> None:
        """Keep the state at the end of a sequence's prompt for other requests, once it is read.

        The last token is left out, because a request with the same prompt computes it again.
        """
        row = sequence.row
        end = sequence.prompt_length - 1
        if sequence.marked or row is None or row.cached < end:
            return
        sequence.marked = True
        already = row.mark is not None and row.mark[0] == end
        if self.most and end >= LEAST and not already:
            try:
                self.runner.mark(row)
            except (MemoryError, RuntimeError) as error:
                sequence.note(NOT_KEPT, error)

    def coming(self, sequence: TextSequence, waiting: Sequence[TextSequence]) -> bool:
        """Whether an earlier sequence is computing the beginning of this one, so it can wait."""
        sharing = self.most and self.runner.store.copies and not sequence.needs.attention_heads
        if not sharing or sequence not in waiting:
            return False
        earlier = [j for j in waiting[: waiting.index(sequence)] if j.key == sequence.key]
        shared = [(common_tokens(j.ids, sequence), j.row.cached) for j in earlier]
        return any(common >= LEAST and cached < common for common, cached in shared)

    def insert(self, sequence: TextSequence) -> None:
        """Keep the row of a finished sequence, or close it."""
        row = sequence.row
        if row.cached < LEAST:
            self.close(row, self.runner)
            return
        try:
            self.runner.unshare(row)
        except (MemoryError, RuntimeError) as error:  # no memory: torch raises a RuntimeError
            sequence.note(NOT_KEPT, error)
            self.close(row, self.runner)
            return
        size = self.runner.row_bytes(row.cached, row.rewinds) + self.runner.store.mark_bytes(row)
        size += row.taps.bytes if row.taps else 0
        self._kept.append(Kept(row, sequence.key, size))
        while len(self._kept) > self.most:
            self.close(self._kept[0].row, self.runner)

    def close(self, row: Any, runner: Runner) -> None:
        """Close a row, also a kept one; an interrupt may have left a sequence's row there."""
        self._kept = [kept for kept in self._kept if kept.row is not row]
        runner.close(row)

    def others(self, sequence: TextSequence) -> list[Kept]:
        """Return the kept rows, except for one that a waiting sequence will take over."""
        conditions = self._conditions(sequence)
        candidates = [
            (common_tokens(k.row.ids, sequence), k) for k in self._kept if k.key[1:] == conditions
        ]
        common, best = max(candidates, key=lambda one: one[0], default=(0, None))
        return [k for k in self._kept if k is not best or not self._serves(k, common)]

    def _serves(self, kept: Kept, common: int) -> bool:
        """Whether a sequence with `common` tokens takes a row over, instead of copying keys."""
        return common >= LEAST and (2 * common > kept.row.cached or not self.runner.store.copies)


def autocast_mode(device: torch.device) -> tuple[tuple[str, torch.dtype], ...]:
    """Return (device type, dtype) pairs with autocast in this thread, for a model on `device`."""
    kinds = dict.fromkeys(("cpu", device.type))
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in kinds
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    )


def common_tokens(ids: list[int], sequence: TextSequence) -> int:
    """Return how many of `ids` a sequence begins with, except for its last token."""
    wanted: list[int] = sequence.ids
    return min(common_prefix(ids, wanted), len(wanted) - 1)
