"""The report as one HTML file: nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from draftsmith.bench.cost import CostTable
from draftsmith.bench.plots import COLOURS, PHASES, Plots, cost_curve, legend
from draftsmith.bench.report import (
    NOTE,
    VERSUS_HEADS,
    Report,
    cells,
    differing,
    facts,
    headline,
    heads,
    versus_cells,
)
from draftsmith.bench.style import CSS
from draftsmith.bench.summary import Section, Summary

_LONG = 12
"""Characters from which a figure takes a phone's whole width."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{css}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def page(report: Report, cost: CostTable | None = None) -> str:
    """The whole page."""
    several = len(report.sections) > 1
    parts = []
    for number, section in enumerate(report.sections):
        heading = f"<h2>{escape(section.title)}</h2>" if several else ""
        parts.append(heading + _section(section, cost if not number else None))
    if report.comparison is not None:
        parts.append(_comparison(report))
    title = "Decoding speed"
    if len(report.sections) == 1:
        title += f": {report.sections[0].title}"
    body = f"<h1>{escape(title)}</h1>\n" + "\n".join(parts)
    return _PAGE.format(title=escape(f"draftsmith bench: {title}"), css=CSS, body=body)


def _section(section: Section, cost: CostTable | None) -> str:
    plots = Plots(section)
    said = headline(section)
    arms = legend([(plots.style(s.arm), s.arm) for s in section.whole])
    suites = "".join(
        f"<h3>{escape(str(suite))}</h3>"
        + _table(section, [s for s in section.suites if s.suite == suite])
        for suite in dict.fromkeys(s.suite for s in section.suites)
    )
    return "\n".join(
        (
            f'<p class="headline">{escape(said)}</p>' if said else "",
            _table(section, section.whole),
            f'<p class="note" style="margin-top:10px">{escape(_note(section))}.</p>',
            arms,
            f'<div class="cards">{"".join(_cards(section, plots, cost))}</div>',
            suites,
            _facts(section),
        )
    )


def _note(section: Section) -> str:
    note = NOTE.format(baseline=section.baseline)
    return note[0].upper() + note[1:]


def _cards(section: Section, plots: Plots, cost: CostTable | None) -> list[str]:
    phases = [(f"p{i}", title) for i, (_, title) in enumerate(PHASES)]
    if not all(plots.ours.values()):
        phases.append(("p5", "not told apart"))
    base = section.baseline
    found = [
        ("Speed-up", f"Tokens per second over {base}; bars: 95 % intervals.", plots.speedups(), ""),
        ("Where the time goes", "Milliseconds per token.", plots.time(), legend(phases)),
        ("Tokens per pass", "Against draft tokens sent along with a pass.", plots.width(), ""),
        ("Accepted by position", "Share of the drafts that reached a position and were accepted "
         "that far.", plots.depth(), ""),
        ("Accepted by source", "Of the tokens that each source drafted.", plots.source(), ""),
        ("Accepted against passes", "One dot per answer.", plots.passes(), ""),
    ]  # fmt: skip
    if cost is not None:
        contexts = [(f"a{1 + i % (COLOURS - 1)}", f"{c} cached tokens")
                    for i, c in enumerate(cost.contexts)]  # fmt: skip
        name = cost.model.rstrip("/").rsplit("/", 1)[-1]
        note = f"{name}, {cost.dtype}, threads: {cost.threads}."
        found.append(("Cost of a pass", note, cost_curve(cost), legend(contexts)))
    return [
        f'<section class="card"><h3>{escape(title)}</h3><p class="note">{escape(note)}</p>'
        f"{drawing}{key}</section>"
        for title, note, drawing, key in found
        if drawing
    ]


def _table(section: Section, summaries: Sequence[Summary]) -> str:
    columns = heads(summaries)
    rows = [cells(s, section.baseline) for s in summaries]
    used = [i for i in range(len(columns)) if any(i < len(row) and row[i] for row in rows)]
    return _html_table(
        [columns[i] for i in used],
        [[row[i] if i < len(row) else "" for i in used] for row in rows],
    )


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{_cells(columns, row)}</tr>\n" for row in rows)
    return (
        f'<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n'
        "</table></div>"
    )


def _cells(columns: Sequence[str], row: Sequence[str]) -> str:
    first, *rest = row
    shown = [f'<td class="arm">{_breakable(first)}</td>']
    for column, content in zip(columns[1:], rest, strict=True):
        long = ' class="long"' if len(content) > _LONG else ""
        shown.append(f'<td{long} data-head="{escape(column)}">{_small_interval(content)}</td>')
    return "".join(shown)


def _breakable(name: str) -> str:
    """A name that may be broken behind its brackets and commas."""
    return escape(name).replace("(", "(<wbr>").replace(",", ",<wbr>")


def _small_interval(content: str) -> str:
    """Figures stand out, their intervals and remarks do not."""
    figure, bracket, remark = content.partition(" [")
    if not bracket:
        figure, bracket, remark = content.partition(" (")
    if not bracket:
        return f"<span>{escape(content)}</span>" if content else ""
    return f"<span>{escape(figure)} <small>{escape(bracket.strip() + remark)}</small></span>"


def _facts(section: Section) -> str:
    rows = "".join(f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in facts(section))
    return f"<h3>Setup</h3><dl>{rows}</dl>"


def _comparison(report: Report) -> str:
    found = report.comparison
    assert found is not None
    return (
        f"<h2>B over A</h2><p>A is {escape(found.a)}, B is {escape(found.b)}. "
        f"{escape(differing(found))}</p>" + _html_table(VERSUS_HEADS, versus_cells(found))
    )
