"""Two files of results beside each other: what changed between them, arm by arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.bench.generations import Generation
from draftsmith.bench.settings import differences
from draftsmith.bench.summary import Interval, interval, paces, rate, speed_ratio
from draftsmith.errors import OptionError


@dataclass(frozen=True, slots=True)
class Versus:
    """One arm in A and in B, on the prompts that both have; suite None for all."""

    suite: str | None
    arm: str
    prompts: int
    a_tokens_per_second: float
    b_tokens_per_second: float
    ratio: Interval
    """B over A: above 1, B is faster."""
    a_tokens_per_pass: float
    b_tokens_per_pass: float
    identical: int
    """Prompts with the same tokens in both."""

    def as_dict(self) -> dict[str, Any]:
        made = {name: getattr(self, name) for name in self.__dataclass_fields__}
        found = self.ratio
        return made | {"ratio": {"value": found.value, "low": found.low, "high": found.high}}


@dataclass(frozen=True, slots=True)
class Comparison:
    """All arms that A and B share, and how their settings differ."""

    a: str
    b: str
    rows: list[Versus]
    changed: list[str]

    def as_dict(self) -> dict[str, Any]:
        rows = [row.as_dict() for row in self.rows]
        return {"a": self.a, "b": self.b, "settings_differ": self.changed, "rows": rows}


def compare_files(
    a: Sequence[Generation], b: Sequence[Generation], names: tuple[str, str]
) -> Comparison:
    """Raises OptionError if A and B have no arm and prompt in common."""
    arms = [arm for arm in dict.fromkeys(r.arm for r in a) if any(r.arm == arm for r in b)]
    suites = list(dict.fromkeys(r.suite for r in a))
    rows = []
    for arm in arms:
        for suite in (None, *(suites if len(suites) > 1 else ())):
            mine = [r for r in a if r.arm == arm and suite in (None, r.suite)]
            theirs = [r for r in b if r.arm == arm and suite in (None, r.suite)]
            if (row := _versus(suite, arm, mine, theirs)) is not None:
                rows.append(row)
    if not rows:
        raise OptionError(f"{names[0]} and {names[1]} have no arm and prompt in common")
    before, now = a[0].settings, b[0].settings
    changed = differences(before, now)
    if before.get("commit") != now.get("commit"):
        changed.append(f"commit: {before.get('commit')} there, {now.get('commit')} now")
    return Comparison(*names, rows, changed)


def _versus(
    suite: str | None, arm: str, a: Sequence[Generation], b: Sequence[Generation]
) -> Versus | None:
    before, now = paces(a), paces(b)
    shared = [name for name in before if name in now]
    if not shared:
        return None
    a, b = ([r for r in rows if r.id in set(shared)] for rows in (a, b))
    first = {r.id: r.output_ids for r in reversed(a)}
    second = {r.id: r.output_ids for r in reversed(b)}
    ratio = interval([(now[name], before[name]) for name in shared], speed_ratio)
    return Versus(
        suite=suite,
        arm=arm,
        prompts=len(shared),
        a_tokens_per_second=rate([before[name] for name in shared]),
        b_tokens_per_second=rate([now[name] for name in shared]),
        ratio=ratio,
        a_tokens_per_pass=_per_pass(a),
        b_tokens_per_pass=_per_pass(b),
        identical=sum(first[name] == second[name] for name in shared),
    )


def _per_pass(rows: Sequence[Generation]) -> float:
    return sum(len(r.output_ids) for r in rows) / max(1, sum(r.passes for r in rows))
