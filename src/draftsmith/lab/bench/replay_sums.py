"""Sums of replays by suite, category and turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.core.stats import Stats, total
from draftsmith.lab.bench.suites import task
from draftsmith.lab.bench.sweep import Done


@dataclass(frozen=True, slots=True)
class ReplaySum:
    """Result of one drafter on some records; category or turn is None if summed."""

    suite: str
    category: str | None
    turn: int | None
    drafter: str
    records: int
    stats: Stats

    @property
    def title(self) -> str:
        turn = None if self.turn is None else f"turn {self.turn}"
        return ", ".join(filter(None, (self.suite, self.category, turn)))

    @property
    def drafted_per_pass(self) -> float:
        return self.stats.drafted / self.stats.passes if self.stats.passes else 0.0

    @property
    def drafter_us_per_pass(self) -> float:
        """Microseconds of drafting per pass, of one process on this machine."""
        return 1e6 * self.stats.seconds.draft / self.stats.passes if self.stats.passes else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the row as `--json` prints it."""
        return {
            "suite": self.suite,
            "category": self.category,
            "turn": self.turn,
            "drafter": self.drafter,
            "records": self.records,
            "tokens": self.stats.tokens,
            "passes": self.stats.passes,
            "tokens_per_pass": self.stats.tokens_per_pass,
            "drafted_per_pass": self.drafted_per_pass,
            "copied_share": self.stats.accepted_share,
            "drafter_us_per_pass": self.drafter_us_per_pass,
        }


def summarize(done: Sequence[Done]) -> list[ReplaySum]:
    """Return rows for every suite, category, turn and drafter, and sums over categories and turns.

    Spec-Bench's eight MT-Bench categories also appear as their sum, the task mt_bench.
    """
    groups: dict[tuple[str, str | None, int | None, str], list[Stats]] = {}
    for one in done:
        record = one.record
        for category in dict.fromkeys((None, task(record), record.category)):
            for turn in (None, record.turn):
                place = (record.suite, category, turn, one.drafter)
                groups.setdefault(place, []).append(one.replay.stats)
    # Sums first, then in the order of the records and of the drafters.
    seen = dict.fromkeys(part for place in groups for part in enumerate(place))
    order = {part: number for number, part in enumerate(seen)}
    order |= {(2, turn): turn or 0 for *_, turn, _ in groups}
    places = sorted(groups, key=lambda place: [order[part] for part in enumerate(place)])
    return [ReplaySum(*place, len(groups[place]), total(groups[place])) for place in places]
