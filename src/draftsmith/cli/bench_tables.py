"""What the bench's results look like in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from draftsmith.cli.render import plain_table

if TYPE_CHECKING:
    from draftsmith.bench.estimate import Estimate
    from draftsmith.bench.rows import ReplaySum
    from draftsmith.model.measure import CostTable

_DEPTHS = (1, 2, 3, 4, 6, 8, 10, 16, 32, 64)


def _grouped(
    heads: Sequence[str], rows: Iterable[tuple[Sequence[str], str, Sequence[str]]]
) -> Table:
    """Lines of (title and figures of their group, name, figures); a group's come once, above."""
    table = plain_table(*heads, header=True)
    last: Sequence[str] = ()
    for group, name, figures in rows:
        if group != last:
            table.add_row(Text(group[0], "bold"), *group[1:])
            last = group
        table.add_row(f"  {name}", *[""] * (len(heads) - 1 - len(figures)), *figures)
    return table


def replay_table(rows: Sequence[ReplaySum], names: Mapping[str, str]) -> Table:
    """Sums by suite, turn and Spec-Bench task."""
    heads = ("", "records", "tokens", "tokens\nper pass", "drafted\nper pass", "copied",
             "µs per\npass")  # fmt: skip
    several = {row.suite for row in rows if row.turn is not None and row.turn > 1}
    lines = (
        (
            (_title(row), f"{row.records:,}", f"{row.stats.tokens:,}"),
            names[row.drafter],
            (
                f"{row.stats.tokens_per_pass:.3f}",
                f"{row.drafted_per_pass:.2f}",
                f"{row.stats.accepted_share:.1%}",
                f"{row.drafter_us_per_pass:.1f}",
            ),
        )
        for row in rows
        if _wanted(row, several)
    )
    return _grouped(heads, lines)


def _wanted(row: ReplaySum, several: set[str]) -> bool:
    """Leave out what repeats a sum (turn 1 of one), and categories that are no tasks."""
    from draftsmith.bench.suites import TASKS

    if row.suite == "spec_bench":
        return row.turn is None and row.category in (None, *TASKS)
    return row.category is None and (row.turn is None or row.suite in several)


def _title(row: ReplaySum) -> str:
    turn = f"turn {row.turn}" if row.turn is not None else ""
    return ", ".join(filter(None, (row.suite, row.category, turn)))


def depth_table(rows: Sequence[ReplaySum], names: Mapping[str, str]) -> Table:
    """Of the drafts that reached a position, the share accepted up to there."""
    sums = [row for row in rows if row.category is None and row.turn is None]
    deepest = max((len(row.stats.drafted_by_depth) for row in sums), default=0)
    depths = [d for d in _DEPTHS if d <= deepest]

    def shares(row: ReplaySum) -> list[str]:
        known = row.stats.acceptance_by_depth
        return [f"{known[d - 1]:.0%}" if d <= len(known) else "" for d in depths]

    lines = (((row.suite,), names[row.drafter], shares(row)) for row in sums)
    return _grouped(("accepted, by position", *map(str, depths)), lines)


def cost_table(table: CostTable) -> Table:
    """Milliseconds of a step, and in plain steps, by positions."""
    places = sorted({(point.batch, point.context) for point in table.points})
    heads = [f"batch {batch}, {context} cached" for batch, context in places]
    shown = plain_table("positions", *heads, header=True)
    cells = {(p.batch, p.context, p.positions): p.ms for p in table.points}
    for positions in sorted({point.positions for point in table.points}):
        times = [(cells[(*place, positions)], cells[(*place, 1)]) for place in places]
        shown.add_row(str(positions), *(f"{ms:.2f} ms ({ms / one:.2f}×)" for ms, one in times))
    for context, ms in table.prefill_ms.items():
        shown.add_row(f"prompt of {context}", f"{ms:.1f} ms")
    return shown


def estimate_table(rows: Sequence[Estimate], names: Mapping[str, str]) -> Table:
    """Predicted speed-ups."""
    heads = ("", "records", "speed-up", "tokens\nper pass", "cost of\na pass", "time in\ndrafter",
             "time in\nprompts")  # fmt: skip
    lines = (
        (
            (row.suite or "all", f"{row.records:,}"),
            names[row.drafter],
            (
                f"{row.speedup:.2f}×",
                f"{row.tokens_per_pass:.2f}",
                f"{row.pass_cost:.2f}×",
                f"{row.drafter_share:.1%}",
                f"{row.prefill_share:.1%}",
            ),
        )
        for row in rows
    )
    return _grouped(heads, lines)
