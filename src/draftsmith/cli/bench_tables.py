"""What the bench's results look like in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from draftsmith.cli.render import plain_table

if TYPE_CHECKING:
    from draftsmith.bench.cost import CostTable
    from draftsmith.bench.estimate import Estimate
    from draftsmith.bench.rows import Row

_DEPTHS = (1, 2, 3, 4, 6, 8, 10, 16, 32, 64)


def replay_table(rows: Sequence[Row], names: Mapping[str, str], categories: bool) -> Table:
    """Sums by suite, turn and Spec-Bench task; with `categories` by every category, too."""
    table = plain_table(
        "", "records", "tokens", "tokens\nper pass", "drafted\nper pass", "copied", "µs per\npass",
        header=True,
    )  # fmt: skip
    several = {row.suite for row in rows if row.turn is not None and row.turn > 1}
    last = None
    for row in rows:
        if not _wanted(row, several, categories):
            continue
        place = row.suite, row.category, row.turn
        if place != last:
            if last and last[0] != row.suite:
                table.add_row()
            title = Text(_title(row), "bold" if row.category is None and row.turn is None else "")
            table.add_row(title, f"{row.records:,}", f"{row.stats.tokens:,}")
        table.add_row(
            f"  {names[row.drafter]}",
            "",
            "",
            f"{row.stats.tokens_per_pass:.3f}",
            f"{row.drafted_per_pass:.2f}",
            f"{row.stats.accepted_share:.1%}",
            f"{row.drafter_us_per_pass:.1f}",
        )
        last = place
    return table


def _wanted(row: Row, several: set[str], categories: bool) -> bool:
    """Leave out what repeats a sum (turn 1 of one) or was not asked for."""
    from draftsmith.bench.suites import TASKS

    if row.turn is not None and row.suite not in several:
        return False
    if row.category is None:
        return row.suite != "spec_bench" or row.turn is None
    if row.suite == "spec_bench" and row.category in TASKS:
        return row.turn is None
    return categories


def _title(row: Row) -> str:
    turn = f"turn {row.turn}" if row.turn is not None else ""
    return ", ".join(filter(None, (row.suite, row.category, turn)))


def depth_table(rows: Sequence[Row], names: Mapping[str, str]) -> Table:
    """Of the drafts that reached a position, the share accepted up to there."""
    sums = [row for row in rows if row.category is None and row.turn is None]
    deepest = max((len(row.stats.drafted_by_depth) for row in sums), default=0)
    depths = [d for d in _DEPTHS if d <= deepest]
    table = plain_table("accepted, by position", *map(str, depths), header=True)
    last = ""
    for row in sums:
        if row.suite != last:
            table.add_row(Text(row.suite, "bold"))
        shares = row.acceptance_by_depth
        cells = [f"{shares[d - 1]:.0%}" if d <= len(shares) else "" for d in depths]
        table.add_row(f"  {names[row.drafter]}", *cells)
        last = row.suite
    return table


def cost_table(table: CostTable) -> Table:
    """Milliseconds of a step, and in plain steps, by positions."""
    places = sorted({(point.batch, point.context) for point in table.points})
    heads = [f"batch {batch}, {context} cached" for batch, context in places]
    shown = plain_table("positions", *heads, header=True)
    cells = {(p.batch, p.context, p.positions): p.ms for p in table.points}
    for positions in sorted({point.positions for point in table.points}):
        row = []
        for place in places:
            ms, plain = cells[(*place, positions)], cells[(*place, 1)]
            row.append(f"{ms:.2f} ms ({ms / plain:.2f}×)")
        shown.add_row(str(positions), *row)
    for context, ms in table.prefill_ms.items():
        shown.add_row(f"prompt of {context}", f"{ms:.1f} ms")
    return shown


def estimate_table(rows: Sequence[Estimate], names: Mapping[str, str]) -> Table:
    """Predicted speed-ups."""
    shown = plain_table(
        "", "records", "speed-up", "tokens\nper pass", "cost of\na pass", "time in\ndrafter",
        "time in\nprompts", header=True,
    )  # fmt: skip
    last = ""
    for row in rows:
        suite = row.suite or "all"
        if suite != last:
            shown.add_row(Text(suite, "bold"), f"{row.records:,}")
        shown.add_row(
            f"  {names[row.drafter]}",
            "",
            f"{row.speedup:.2f}×",
            f"{row.tokens_per_pass:.2f}",
            f"{row.pass_cost:.2f}×",
            f"{row.drafter_share:.1%}",
            f"{row.prefill_share:.1%}",
        )
        last = suite
    return shown
