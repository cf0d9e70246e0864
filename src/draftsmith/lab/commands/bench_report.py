"""`draftsmith bench report`: tables, Markdown and a page from files of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from draftsmith.cli.options import Json, group
from draftsmith.cli.render import plain_table
from draftsmith.cli.report import note, print_json, stdout
from draftsmith.errors import OptionError

if TYPE_CHECKING:
    from draftsmith.lab.bench.generations import Generation
    from draftsmith.lab.bench.summary import Section
    from draftsmith.lab.bench.versus import Comparison

_SPARE = ("memory", "per prompt", "later tokens", "first token", "drafted/pass", "tokens/pass",
          "prompts", "A tokens/pass", "B tokens/pass", "A tokens/s", "B tokens/s", "tokens/s",
          "attempts", "similarity", "copied")  # fmt: skip
"""Columns to drop on a narrow terminal, in this order."""


@group("Results", 1)
@dataclass(frozen=True)
class ReportOptions:
    """Files to report, and the output folder."""

    files: tuple[Path, ...] = ()
    """Results of bench run."""
    _: KW_ONLY
    output: Annotated[Path | None, Parameter(alias="-o")] = None
    """Write report.html and report.md into this folder."""
    compare: tuple[Path, Path] | None = None
    """Show what changed from A to B."""
    cost: Path | None = None
    """Also plot the costs in this file of `bench cost`."""


def report(chosen: ReportOptions = ReportOptions(), *, json_: Json = False) -> None:
    """Show results of `draftsmith bench run`: speeds, acceptance, where the time goes.

    Examples

    draftsmith bench report results.jsonl -o report/
    draftsmith bench report --compare before.jsonl after.jsonl
    """
    output = chosen.output
    if not chosen.files and chosen.compare is None:
        raise OptionError("nothing to report: give FILES of results, or --compare A B")
    if chosen.cost is not None and (output is None or not chosen.files):
        raise OptionError("--cost FILE is a plot of a page of results; give FILES and --output")
    from draftsmith.lab.bench import plots
    from draftsmith.lab.bench.cost import CostTable
    from draftsmith.lab.bench.page import page
    from draftsmith.lab.bench.report import markdown
    from draftsmith.lab.bench.summary import sections
    from draftsmith.lab.bench.versus import compare_files
    from draftsmith.storage import write_text, writing

    if output is not None:
        plots.check()
    table = CostTable.load(chosen.cost) if chosen.cost is not None else None
    rows = [_rows(path) for path in chosen.files]
    comparison = None
    if chosen.compare is not None:
        a, b = chosen.compare
        comparison = compare_files(_rows(a), _rows(b), (a.name, b.name))
    found = sections(rows)
    if json_:
        shown = None if comparison is None else comparison.as_dict()
        print_json({"sections": [s.as_dict() for s in found], "compare": shown})
    else:
        show_sections(found)
        if comparison is not None:
            _show_comparison(comparison)
    if output is not None:
        texts = {
            "report.html": page(found, comparison, table),
            "report.md": markdown(found, comparison),
        }
        with writing(output):
            output.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_text(output / name, text)
            note(f"wrote {output / name}")


def _rows(path: Path) -> list[Generation]:
    from draftsmith.lab.bench.generations import read

    found = read(path)
    if found.torn:
        note(
            f"left out: the last line of {path}, which is incomplete; resume the interrupted "
            "`bench run` with --resume"
        )
    return found.entries


def show_sections(found: Sequence[Section]) -> None:
    """Print the main table of every setup, and of every suite."""
    from draftsmith.lab.bench.report import HEADS, NOTE, cells, headline

    console = stdout()
    for section in found:
        console.print(Text(section.title, "bold"))
        for suite, summaries in section.tables.items():
            if suite is not None:
                console.print(Text(f"\n{suite}", "bold"))
            rows = [cells(s, section.baseline) for s in summaries]
            console.print(text_table(HEADS, rows, console.width))
        if sentence := headline(section):
            console.print(Text(f"\n{sentence}"), soft_wrap=True)
        console.print(Text(NOTE.format(baseline=section.baseline), "dim"), soft_wrap=True)


def _show_comparison(found: Comparison) -> None:
    """Print the table of A and B."""
    from draftsmith.lab.bench.report import VERSUS_HEADS, differing, versus_cells

    console = stdout()
    console.print(Text(f"A is {found.a}, B is {found.b}", "bold"))
    console.print(text_table(VERSUS_HEADS, versus_cells(found), console.width))
    console.print(Text(differing(found), "dim"), soft_wrap=True)


def text_table(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> Table:
    """Make a table without empty columns; drops less important ones to fit into `width`.

    Names the dropped ones below.
    """
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    used = [i for i in range(len(columns)) if widths[i]]
    for spare in _SPARE:
        if sum(max(widths[i], len(columns[i])) + 2 for i in used) - 2 <= width:
            break
        used = [i for i in used if columns[i] != spare]
    table = plain_table(*(columns[i] for i in used))
    left = [columns[i] for i in range(len(columns)) if widths[i] and i not in used]
    if left:
        table.caption = f"left out for lack of width: {', '.join(left)}"
        table.caption_justify, table.caption_style = "left", "dim"
    for row in cells:
        table.add_row(*(Text(row[i]) for i in used))
    return table
