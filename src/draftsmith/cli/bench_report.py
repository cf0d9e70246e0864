"""`draftsmith bench report`: tables, Markdown and a page from files of results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from draftsmith.cli.options import Json
from draftsmith.cli.render import plain_table
from draftsmith.cli.report import note, stdout
from draftsmith.errors import LoadError, OptionError

if TYPE_CHECKING:
    from draftsmith.bench.report import Report
    from draftsmith.bench.summary import Section, Summary


_SPARE = ("memory", "per prompt", "later tokens", "first token", "drafted/pass", "tokens/pass",
          "prompts", "A tokens/pass", "B tokens/pass", "A tokens/s", "tokens/s")  # fmt: skip
"""Columns that a narrow terminal can do without, the first one first."""


def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILES", help="Results of `bench run`.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Write report.html, report.md and, of HumanEval and MBPP, the answers here.",
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="Show what changed from A to B."),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="ARM", show_default="none", help="Speed-ups are over this arm."),
    ] = None,
    cost: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also plot what `bench cost` saved here."),
    ] = None,
    json_: Json = False,
) -> None:
    """Show results of `draftsmith bench run`: speeds, acceptance, where the time goes.

    [bold]Examples[/bold]

    draftsmith bench report results.jsonl -o report/

    draftsmith bench report --compare before.jsonl after.jsonl
    """
    if not files and compare is None:
        raise OptionError("nothing to report: give FILES of results, or --compare A B")
    from draftsmith.bench import generations
    from draftsmith.bench.cost import CostTable
    from draftsmith.bench.report import Report
    from draftsmith.bench.summary import sections
    from draftsmith.bench.versus import compare_files

    table = CostTable.load(cost) if cost is not None else None
    rows = [generations.read(path) for path in files or ()]
    comparison = None
    if compare is not None:
        a, b = (generations.read(path) for path in compare)
        comparison = compare_files(a, b, (compare[0].name, compare[1].name))
    found = Report(sections(rows, baseline) if rows else [], comparison)
    if json_:
        shown = None if comparison is None else comparison.as_dict()
        print_json({"sections": [s.as_dict() for s in found.sections], "compare": shown})
    else:
        show_sections(found.sections)
        show_comparison(found)
    if output is not None:
        for path in write(found, output, table):
            note(f"wrote {path}")


def write(found: Report, folder: Path, table: object = None) -> list[Path]:
    """The page, the Markdown and the exported answers; raises LoadError."""
    from draftsmith.bench.cost import CostTable
    from draftsmith.bench.page import page
    from draftsmith.bench.report import markdown
    from draftsmith.bench.scores import export

    cost = table if isinstance(table, CostTable) else None
    paths = [folder / "report.html", folder / "report.md"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(page(found, cost), encoding="utf-8")
        paths[1].write_text(markdown(found), encoding="utf-8")
    except OSError as error:
        raise LoadError(f"{folder} cannot be written: {error.strerror}") from error
    first = [row for s in found.sections for row in s.rows if row.run == 0]
    return [*paths, *export(first, folder)]


def show_sections(found: Sequence[Section]) -> None:
    """The main table of every setup, and of every suite."""
    from draftsmith.bench.report import NOTE, cells, headline, heads

    console = stdout()
    for section in found:
        console.print(Text(section.title, "bold"))
        groups: list[tuple[str | None, list[Summary]]] = [(None, section.whole)]
        for suite in dict.fromkeys(s.suite for s in section.suites):
            groups.append((suite, [s for s in section.suites if s.suite == suite]))
        for suite, summaries in groups:
            if suite is not None:
                console.print(Text(f"\n{suite}", "bold"))
            rows = [cells(s, section.baseline) for s in summaries]
            console.print(text_table(heads(summaries), rows, console.width))
        if said := headline(section):
            console.print(Text(f"\n{said}"), soft_wrap=True)
        console.print(Text(NOTE.format(baseline=section.baseline), "dim"), soft_wrap=True)


def show_comparison(found: Report) -> None:
    """The table of A and B."""
    from draftsmith.bench.report import VERSUS_HEADS, differing, versus_cells

    if (comparison := found.comparison) is None:
        return
    console = stdout()
    console.print(Text(f"A is {comparison.a}, B is {comparison.b}", "bold"))
    console.print(text_table(VERSUS_HEADS, versus_cells(comparison), console.width))
    console.print(Text(differing(comparison), "dim"), soft_wrap=True)


def text_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None
) -> Table:
    """Rows of text without their empty columns, and within `width` without the least needed."""
    cells = [[*row, *[""] * (len(columns) - len(row))] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    used = [i for i in range(len(columns)) if widths[i]]
    for spare in _SPARE if width is not None else ():
        if sum(max(widths[i], len(columns[i])) + 2 for i in used) - 2 <= (width or 0):
            break
        used = [i for i in used if columns[i] != spare]
    table = plain_table(*(columns[i] for i in used), header=True)
    for row in cells:
        table.add_row(*(Text(row[i]) for i in used))
    return table


def print_json(value: Any) -> None:
    """One JSON object on stdout; what is not a number becomes null."""
    typer.echo(json.dumps(_finite(value), ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if value != value else value
