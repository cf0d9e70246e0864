"""`draftsmith bench`: what a drafter saves, on recorded answers and on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from rich.table import Table
from rich.text import Text

from draftsmith.cli.commands import HELP
from draftsmith.cli.loading import bar, busy, load_model
from draftsmith.cli.options import Count, Json, MachineOptions, group
from draftsmith.cli.render import plain_table
from draftsmith.cli.report import note, print_json, stdout
from draftsmith.errors import OptionError
from draftsmith.lab.commands import bench_report, bench_run
from draftsmith.lab.commands.bench_options import AnswerOptions, tell

if TYPE_CHECKING:
    from draftsmith.lab.bench.cost import CostTable
    from draftsmith.lab.bench.estimate import Estimate
    from draftsmith.lab.bench.replay_sums import ReplaySum

_DEPTHS = (1, 2, 3, 4, 6, 8, 10, 16, 32, 64)


def replay(answers: AnswerOptions, *, json_: Json = False) -> None:
    """Feed recorded answers to drafters and count the passes they would have saved. No model.

    Examples

    draftsmith bench replay log.jsonl --tokenizer Qwen/Qwen2.5-7B-Instruct
    draftsmith bench replay log.jsonl --tokenizer MODEL -d copyspec -d 'copyspec(gamma=5)'
    """
    from draftsmith.lab.bench.replay_sums import summarize

    result = answers.replay(None)
    rows = summarize(result.done)
    if json_:
        print_json({"rows": [row.as_dict() for row in rows]})
    else:
        console, names = stdout(), answers.names()
        console.print(replay_table(rows, names))
        if any(row.stats.drafted for row in rows):
            console.print("", depth_table(rows, names), sep="\n")
    tell(result.wrong)


@group("Passes", 3)
@dataclass(frozen=True, kw_only=True)
class GridOptions:
    """What is measured, and where it is saved."""

    output: Annotated[Path, Parameter(alias="-o")] = Path("cost.json")
    """Where to save the table."""
    contexts: str = "128,512,2048"
    """Cached tokens before the pass."""
    positions: Annotated[str | None, Parameter(show_default="14 from 1 to 128")] = None
    """Widths of a pass."""
    repeats: Count = 9
    """Times of each."""


def cost(
    machine: MachineOptions = MachineOptions(),
    *,
    chosen: GridOptions = GridOptions(),
    json_: Json = False,
) -> None:
    """Measure what a pass costs here by its width and context, and save it as JSON.

    Example

    draftsmith bench cost Qwen/Qwen2.5-0.5B-Instruct --dtype bfloat16 -o cost.json
    """
    from draftsmith.storage import check_writable

    lengths = _numbers("contexts", chosen.contexts)
    widths = _numbers("positions", chosen.positions) if chosen.positions else None
    check_writable(chosen.output)
    loaded = load_model(machine)
    from draftsmith.lab.bench.cost import Grid, measure_cost

    grid = Grid(sorted({1, *(widths or Grid().positions)}), lengths, chosen.repeats)
    if warning := busy():
        note(f"note: {warning}")
    with bar("measuring", len(lengths)) as advance:
        table = measure_cost(loaded, grid, advance)
    table.save(chosen.output)
    if json_:
        print_json(table.as_dict())
    else:
        stdout().print(table.title, soft_wrap=True)
        stdout().print(cost_table(table))
    note(f"saved in {chosen.output}")


def estimate(
    answers: AnswerOptions,
    *,
    cost: Annotated[
        str,
        Parameter(
            help="What a pass costs by its width: what draftsmith bench cost saved; or a number, "
            "the price of a further position in plain passes."
        ),
    ],
    budget: Annotated[
        str,
        Parameter(
            help="Draft tokens per pass: a number, auto (what pays here), or drafter (its own)."
        ),
    ] = "auto",
    json_: Json = False,
) -> None:
    """Predict from a log of answers how much faster each drafter would make them.

    Example

    draftsmith bench estimate log.jsonl --tokenizer MODEL --cost cost.json
    """
    from draftsmith.engine.drafting import checked_budget
    from draftsmith.lab.bench.cost import CostTable, parse_cost
    from draftsmith.lab.bench.estimate import automatic
    from draftsmith.lab.bench.estimate import estimate as predict
    from draftsmith.lab.bench.replay import ReplayBudget

    curve = parse_cost(cost)
    wanted = checked_budget(budget)
    if wanted == "auto":
        rule = automatic(curve)
    else:
        rule = ReplayBudget(None if wanted == "drafter" else int(wanted))
    result = answers.replay(rule)
    rows = predict(result.done, curve)
    if json_:
        print_json({"rows": list(map(asdict, rows))})
    else:
        stdout().print(estimate_table(rows, answers.names()))
    tell(result.wrong)
    if isinstance(curve, CostTable):
        note(f"cost of a pass: {curve.title}")


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise OptionError(f"--{option} must be numbers >= 1 such as 1,4, got {text!r}")
    return numbers


def _grouped(
    heads: Sequence[str], rows: Iterable[tuple[Sequence[str], str, Sequence[str]]]
) -> Table:
    """Make a table of (title and figures of a group, name, figures), with a line per group."""
    table = plain_table(*heads)
    last: Sequence[str] = ()
    for title, name, figures in rows:
        if title != last:
            table.add_row(Text(title[0], "bold"), *title[1:])
            last = title
        table.add_row(f"  {name}", *[""] * (len(heads) - 1 - len(figures)), *figures)
    return table


def replay_table(rows: Sequence[ReplaySum], names: Mapping[str, str]) -> Table:
    """Sums by suite, turn and Spec-Bench task."""
    heads = ("", "records", "tokens", "tokens\nper pass", "drafted\nper pass", "copied",
             "µs per\npass")  # fmt: skip
    several = {row.suite for row in rows if row.turn is not None and row.turn > 1}
    lines = (
        (
            (row.title, f"{row.records:,}", f"{row.stats.tokens:,}"),
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
    """Whether a row is shown: not if it repeats a sum, or if its category is not a task."""
    from draftsmith.lab.bench.suites import TASKS

    if row.suite == "spec_bench":
        return row.turn is None and row.category in (None, *TASKS)
    return row.category is None and (row.turn is None or row.suite in several)


def depth_table(rows: Sequence[ReplaySum], names: Mapping[str, str]) -> Table:
    """Share of the drafts accepted up to a position, of those that reached it."""
    sums = [row for row in rows if row.category is None and row.turn is None]
    deepest = max((len(row.stats.drafted_by_depth) for row in sums), default=0)
    depths = [d for d in _DEPTHS if d <= deepest]

    def shares(row: ReplaySum) -> list[str]:
        known = row.stats.acceptance_by_depth
        return [f"{known[d - 1]:.0%}" if d <= len(known) else "" for d in depths]

    lines = (((row.suite,), names[row.drafter], shares(row)) for row in sums)
    return _grouped(("accepted, by position", *map(str, depths)), lines)


def cost_table(table: CostTable) -> Table:
    """Milliseconds of a step, and plain steps, by positions."""
    contexts = table.contexts
    heads = [f"{context} cached" for context in contexts]
    shown = plain_table("positions", *heads)
    cells = {(p.context, p.positions): p.ms for p in table.points}
    for positions in sorted({point.positions for point in table.points}):
        times = [(cells[context, positions], cells[context, 1]) for context in contexts]
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


app = App(name="bench", help=HELP["bench"])
for command in (replay, cost, estimate, bench_run.run, bench_report.report):
    app.command(command)
