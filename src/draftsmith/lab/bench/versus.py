"""Compares two files of results arm by arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.errors import OptionError
from draftsmith.lab.bench.generations import Generation, differences
from draftsmith.lab.bench.summary import (
    Interval,
    ambiguous,
    interval,
    paces,
    rate,
    speed_ratio,
    without_nan,
)


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


@dataclass(frozen=True, slots=True)
class Comparison:
    """All arms that A and B share, and how their settings differ."""

    a: str
    b: str
    rows: list[Versus]
    changed: list[str]

    def as_dict(self) -> dict[str, Any]:
        rows = [without_nan(asdict(row)) for row in self.rows]
        return {"a": self.a, "b": self.b, "settings_differ": self.changed, "rows": rows}


def compare_files(
    a: Sequence[Generation], b: Sequence[Generation], names: tuple[str, str]
) -> Comparison:
    """Compare two files.

    Raises OptionError if they have no arm and prompt in common, or other prompts with the same ids.
    """
    if (found := ambiguous(a, b)) is not None:
        raise OptionError(
            f"{found} is one prompt in {names[0]} and another one in {names[1]}; give every prompt "
            "an id of its own"
        )
    suites = list(dict.fromkeys(r.suite for r in a))
    rows = [
        _versus(suite, arm, *sides)
        for arm in dict.fromkeys(r.arm for r in a)
        for suite in (None, *(suites if len(suites) > 1 else ()))
        if all(sides := _shared(a, b, arm, suite))
    ]
    if not rows:
        raise OptionError(f"{names[0]} and {names[1]} have no arm and prompt in common")
    before, now = a[0].settings, b[0].settings
    changed = differences(before, now)
    if before.get("commit") != now.get("commit"):
        changed.append(f"commit: {before.get('commit')} there, {now.get('commit')} now")
    return Comparison(*names, rows, changed)


def _shared(
    a: Sequence[Generation], b: Sequence[Generation], arm: str, suite: str | None
) -> list[list[Generation]]:
    """Return one arm's rows in A and in B, of the prompts that both have."""
    wanted = [[r for r in rows if r.arm == arm and suite in (None, r.suite)] for rows in (a, b)]
    ids = set.intersection(*({r.id for r in rows} for rows in wanted))
    return [[r for r in rows if r.id in ids] for rows in wanted]


def _versus(
    suite: str | None, arm: str, a: Sequence[Generation], b: Sequence[Generation]
) -> Versus:
    before, now = paces(a), paces(b)
    first, second = ({r.id: r.output_ids for r in reversed(rows)} for rows in (a, b))
    return Versus(
        suite=suite,
        arm=arm,
        prompts=len(before),
        a_tokens_per_second=rate(list(before.values())),
        b_tokens_per_second=rate(list(now.values())),
        ratio=interval([(now[name], pace) for name, pace in before.items()], speed_ratio),
        a_tokens_per_pass=_per_pass(a),
        b_tokens_per_pass=_per_pass(b),
        identical=sum(tokens == second[name] for name, tokens in first.items()),
    )


def _per_pass(rows: Sequence[Generation]) -> float:
    return sum(len(r.output_ids) for r in rows) / max(1, sum(r.passes for r in rows))
