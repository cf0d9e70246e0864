"""The report as one HTML page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from draftsmith import html
from draftsmith.lab.bench.cost import CostTable
from draftsmith.lab.bench.plots import PHASES, STYLE, Plots, cost_colours, cost_curve, legend
from draftsmith.lab.bench.report import (
    HEADS,
    NOTE,
    VERSUS_HEADS,
    cells,
    differing,
    facts,
    headline,
    versus_cells,
)
from draftsmith.lab.bench.summary import Section, Summary
from draftsmith.lab.bench.versus import Comparison

_LONG = 12
"""A figure with at least this many characters gets the full width of a phone."""


def page(
    sections: Sequence[Section],
    comparison: Comparison | None = None,
    cost: CostTable | None = None,
) -> str:
    """Return the page; raises OptionError if matplotlib is not installed."""
    title = "Decoding speed"
    if len(sections) == 1:
        title += f": {sections[0].title}"
    parts: list[str] = []
    for section in sections:
        heading = f"<h2>{escape(section.title)}</h2>" if len(sections) > 1 else ""
        parts.append(heading + _section(section, cost if not parts else None))
    if comparison is not None:
        sentence = f"A is {comparison.a}, B is {comparison.b}. {differing(comparison)}"
        figures = _html_table(VERSUS_HEADS, versus_cells(comparison))
        parts.append(f"<h2>B over A</h2><p>{escape(sentence)}</p>{figures}")
    body = f"<h1>{escape(title)}</h1>\n" + "\n".join(parts)
    return html.page(f"draftsmith bench: {title}", body, _STYLE + STYLE)


def _section(section: Section, cost: CostTable | None) -> str:
    plots = Plots(section)
    sentence = headline(section)
    note = NOTE.format(baseline=section.baseline)
    arms = [(s.arm, plots.colour[s.arm], not s.ours) for s in section.whole]
    tables = [
        (f"<h3>{escape(suite)}</h3>" if suite is not None else "") + _table(section, summaries)
        for suite, summaries in section.tables.items()
    ]
    rows = "".join(f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in facts(section))
    return "\n".join(
        (
            f'<p class="headline">{escape(sentence)}</p>' if sentence else "",
            tables[0],
            f'<p class="note">{escape(note[0].upper() + note[1:])}.</p>',
            legend(arms),
            f'<div class="cards">{"".join(_cards(section, plots, cost))}</div>',
            *tables[1:],
            f"<h3>Setup</h3><dl>{rows}</dl>",
        )
    )


def _cards(section: Section, plots: Plots, cost: CostTable | None) -> Iterator[str]:
    phases = [(title, colour, False) for title, colour in PHASES.values()]
    if all(plots.ours.values()):
        phases.pop()
    found = [
        ("Speed-up", f"Tokens per second over {section.baseline}; bars: 95 % intervals.",
         plots.speedups(), ""),
        ("Where the time goes", "Milliseconds per token, the mean over all runs.", plots.time(),
         legend(phases)),
        ("Tokens per pass", "Against draft tokens sent along with a pass; dashed: transformers, "
         "which does not report its drafts.", plots.width(), ""),
        ("Accepted by position", "Share of the drafts that reached a position and were accepted "
         "that far.", plots.depth(), ""),
        ("Accepted by source", "Of the tokens that each source drafted.", plots.source(), ""),
        ("Accepted against passes", "One dot per prompt; many passes are a long answer.",
         plots.passes(), ""),
    ]  # fmt: skip
    if cost is not None:
        contexts = [(f"{n} cached tokens", c, False) for n, c in cost_colours(cost).items()]
        found.append(("Cost of a pass", f"{cost.title}.", cost_curve(cost), legend(contexts)))
    for title, note, drawing, key in found:
        if drawing:
            yield (
                f'<section class="card"><h3>{escape(title)}</h3><p class="note">{escape(note)}</p>'
                f"{drawing}{key}</section>"
            )


def _table(section: Section, summaries: Sequence[Summary]) -> str:
    rows = [cells(s, section.baseline) for s in summaries]
    used = [i for i in range(len(HEADS)) if any(row[i] for row in rows)]
    return _html_table([HEADS[i] for i in used], [[row[i] for i in used] for row in rows])


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{_cells(columns, row)}</tr>\n" for row in rows)
    return (
        f'<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n'
        "</table></div>"
    )


def _cells(columns: Sequence[str], row: Sequence[str]) -> str:
    first, *rest = row
    # A name may be broken after brackets and commas.
    name = escape(first).replace("(", "(<wbr>").replace(",", ",<wbr>")
    shown = [f'<td class="arm">{name}</td>']
    for column, content in zip(columns[1:], rest, strict=True):
        long = ' class="long"' if len(content) > _LONG else ""
        # Figures are emphasized; intervals and remarks are not.
        figure = re.sub(r" ([\[(].*)", r" <small>\1</small>", escape(content))
        figure = f"<span>{figure}</span>" if content else ""
        shown.append(f'<td{long} data-head="{escape(column)}">{figure}</td>')
    return "".join(shown)


_STYLE = """
p { margin: 0 0 12px; max-width: 74ch; }
.headline { font-size: 1.1rem; margin: 14px 0 16px; max-width: none; }
.cards { columns: 3 340px; column-gap: 20px; margin: 20px 0; }
.card { padding: 16px 18px; margin: 0 0 20px; break-inside: avoid; }
.card svg { display: block; width: 100%; height: auto; max-width: 430px; }
.table { overflow-x: auto; margin: 16px 0 10px; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { text-align: right; padding: 7px 0 7px 11px; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: var(--soft); font-weight: 500; border-bottom: 1px solid var(--rule);
  vertical-align: bottom; }
td { border-bottom: 1px solid var(--rule); font-variant-numeric: tabular-nums; }
td small { color: var(--soft); font-size: 0.75rem; }
td.arm { font-weight: 600; white-space: normal; }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; padding: 0; margin: 8px 0;
  font-size: 0.85rem; }
.key li { display: flex; align-items: center; gap: 6px; }
.key i { width: 11px; height: 11px; border: 2px solid; border-radius: 50%; flex: none; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; font-size: 0.85rem;
  margin: 10px 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 700px) {
  .card { padding: 14px; }
  .table { overflow: visible; }
  table, tbody { display: block; }
  thead { display: none; }
  tr { display: grid; grid-template-columns: 1fr 1fr; column-gap: 22px; padding: 8px 0;
    border-bottom: 1px solid var(--rule); }
  td, td:first-child { border: 0; padding: 1px 0; display: flex; justify-content: space-between;
    gap: 10px; text-align: right; white-space: normal; }
  td.arm, td.long { grid-column: 1 / -1; }
  td.arm { display: block; text-align: left; padding-bottom: 2px; overflow-wrap: anywhere; }
  td:not(.arm)::before { content: attr(data-head); color: var(--soft); text-align: left; }
  td:not(.arm):empty { display: none; }
}
"""
