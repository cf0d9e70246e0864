"""`draftsmith bench`: what a drafter saves, measured on recorded answers and on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from draftsmith.cli.bench_options import AnswerOptions, tell
from draftsmith.cli.bench_tables import cost_table, depth_table, estimate_table, replay_table
from draftsmith.cli.loading import bar, busy, load_model
from draftsmith.cli.options import Json, MachineOptions
from draftsmith.cli.report import note, print_json, stdout
from draftsmith.errors import OptionError


def replay(answers: AnswerOptions, json_: Json = False) -> None:
    """Feed recorded answers to drafters and count the passes they would have saved. No model.

    [bold]Examples[/bold]

    draftsmith bench replay log.jsonl --tokenizer Qwen/Qwen2.5-7B-Instruct

    draftsmith bench replay log.jsonl --tokenizer MODEL -d copyspec -d 'copyspec(gamma=5)'
    """
    from draftsmith.bench.rows import summarize

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


@dataclass(frozen=True, kw_only=True)
class GridOptions(MachineOptions):
    """What is measured, of which model, and where it is saved."""

    panel: ClassVar = "Passes"
    spelt: ClassVar = {"named": "MODEL", "output": "--output -o FILE"}

    named: str | None = None
    """The same as --model."""
    output: Path = Path("cost.json")
    """Where to save the table."""
    contexts: str = "128,512,2048"
    """Cached tokens before the pass."""
    batches: str = "1,4"
    """Sequences per pass."""
    positions: str | None = None
    """Widths of a pass. [14 from 1 to 128]"""
    repeats: int = 9
    """Times of each."""


def cost(chosen: GridOptions, json_: Json = False) -> None:
    """Measure what a pass costs here by its width, context and batch size, and save it as JSON.

    [bold]Example[/bold]

    draftsmith bench cost Qwen/Qwen2.5-0.5B-Instruct --dtype bfloat16 -o cost.json
    """
    from draftsmith.storage import check_writable

    lengths, rows = _numbers("contexts", chosen.contexts), _numbers("batches", chosen.batches)
    widths = _numbers("positions", chosen.positions) if chosen.positions else None
    check_writable(chosen.output)
    loaded = load_model(chosen, chosen.named)
    from draftsmith.model.measure import Grid, measure_cost

    grid = Grid(sorted({1, *(widths or Grid().positions)}), lengths, rows, chosen.repeats)
    if warning := busy():
        note(f"note: {warning}")
    with bar("measuring", len(lengths) * len(rows)) as advance:
        table = measure_cost(loaded, grid, lambda _: advance(1))
    table.save(chosen.output)
    if json_:
        print_json(table.as_dict())
    else:
        stdout().print(table.title, markup=False, soft_wrap=True)
        stdout().print(cost_table(table))
    note(f"saved in {chosen.output}")


@dataclass(frozen=True, kw_only=True)
class EstimateOptions(AnswerOptions):
    """What a pass costs, and how much is drafted."""

    cost: str
    """What a pass costs by its width: what `draftsmith bench cost` saved; or a number, the price of
    a further position in plain passes."""
    budget: str = "auto"
    """Draft tokens per pass: a number, auto (what pays here), or drafter (its own)."""


def estimate(chosen: EstimateOptions, json_: Json = False) -> None:
    """Predict from a log of answers how much faster each drafter would make them.

    [bold]Example[/bold]

    draftsmith bench estimate log.jsonl --tokenizer MODEL --cost cost.json
    """
    from draftsmith.bench.estimate import automatic
    from draftsmith.bench.estimate import estimate as predict
    from draftsmith.bench.replay import ReplayBudget
    from draftsmith.engine.request import checked_budget
    from draftsmith.model.measure import CostTable, parse_cost

    curve = parse_cost(chosen.cost)
    wanted = checked_budget(chosen.budget)
    if wanted == "auto":
        rule = automatic(curve)
    else:
        rule = ReplayBudget(None if wanted == "drafter" else int(wanted))
    result = chosen.replay(rule)
    rows = predict(result.done, curve)
    if json_:
        print_json({"rows": list(map(asdict, rows))})
    else:
        stdout().print(estimate_table(rows, chosen.names()))
    tell(result.wrong)
    if isinstance(curve, CostTable):
        note(f"cost of a pass: {curve.title}")


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise OptionError(f"--{option} {text!r} cannot work; give numbers such as 1,4")
    return numbers
