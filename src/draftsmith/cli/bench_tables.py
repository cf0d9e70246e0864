"""What the bench's results look like in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from draftsmith.cli.render import plain_table

if TYPE_CHECKING:
    from draftsmith.bench.cost import CostTable
    from draftsmith.bench.estimate import Estimate
    from draftsmith.bench.rows import Row

_DEPTHS = (1, 2, 3, 4, 6, 8, 10, 16, 24, 32, 48, 64)


def replay_table(rows: Sequence[Row], names: Mapping[str, str], categories: bool) -> Table:
    """Sums by suite, turn and Spec-Bench task; with `categories` by every category, too."""
    table = plain_table(
        "suite", "part", "drafter", "records", "tokens", "tokens/pass", "drafted/pass", "copied",
        "drafter µs/pass", header=True,
    )  # fmt: skip
    for column in table.columns[1:3]:
        column.justify = "left"
    several = {row.suite for row in rows if row.turn is not None and row.turn > 1}
    last = ("", "")
    for row in rows:
        if not _wanted(row, several, categories):
            continue
        place = (row.suite, _part(row))
        if place[0] != last[0] and last[0]:
            table.add_row()
        table.add_row(
            row.suite if row.suite != last[0] else "",
            place[1] if place != last else "",
            names[row.drafter],
            f"{row.records:,}",
            f"{row.stats.tokens:,}",
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


def _part(row: Row) -> str:
    parts = [row.category or "", f"turn {row.turn}" if row.turn is not None else ""]
    return ", ".join(filter(None, parts)) or "all"


def depth_table(rows: Sequence[Row], names: Mapping[str, str]) -> Table:
    """Of the drafts that reached a position, the share accepted up to there."""
    sums = [row for row in rows if row.category is None and row.turn is None]
    deepest = max((len(row.stats.drafted_by_depth) for row in sums), default=0)
    depths = [d for d in _DEPTHS if d <= deepest]
    table = plain_table("suite", "drafter", *map(str, depths), header=True)
    table.columns[1].justify = "left"
    last = ""
    for row in sums:
        shares = row.acceptance_by_depth
        cells = [f"{shares[d - 1]:.0%}" if d <= len(shares) else "" for d in depths]
        table.add_row(row.suite if row.suite != last else "", names[row.drafter], *cells)
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
        "suite", "drafter", "records", "tokens/pass", "cost of a pass", "drafter's time",
        "prompt's time", "speed-up", "without prompts", header=True,
    )  # fmt: skip
    shown.columns[1].justify = "left"
    for row in rows:
        shown.add_row(
            row.suite or "all",
            names[row.drafter],
            f"{row.records:,}",
            f"{row.tokens_per_pass:.2f}",
            f"{row.pass_cost:.2f}×",
            f"{row.drafter_share:.1%}",
            f"{row.prefill_share:.1%}",
            f"{row.speedup:.2f}×",
            f"{row.decode_speedup:.2f}×",
        )
    return shown
