"""`draftsmith bench`: what a drafter saves, measured on recorded answers and on this machine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from draftsmith.cli.bench_tables import cost_table, depth_table, estimate_table, replay_table
from draftsmith.cli.loading import busy, checked_device, quiet, resolve, short, waiting
from draftsmith.cli.options import Json, grouped
from draftsmith.cli.render import label
from draftsmith.cli.report import note, stderr, stdout
from draftsmith.errors import OptionError

if TYPE_CHECKING:
    from draftsmith.bench.replay import ReplayBudget
    from draftsmith.bench.suites import OnError, Reading
    from draftsmith.bench.sweep import Sweep
    from draftsmith.core.drafter import Drafter

_RECORDS = "Records"
_SHOWN = 5
"""Wrong lines that are named; the rest is only counted."""

DEFAULT_DRAFTERS = ["prompt_lookup", "copyspec", "auto"]


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """Which recorded answers, and how they become tokens."""

    files: Annotated[
        list[str] | None,
        typer.Argument(
            show_default=False, metavar="FILES",
            help="JSON lines (plain, .gz, .xz) with messages or prompt, and output; or names of "
            "suites in --data, e.g. mt-redundant or spec-bench/rag.",
        ),
    ] = None  # fmt: skip
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter", "-d", metavar="NAME", show_default=", ".join(DEFAULT_DRAFTERS),
            help="Who guesses, e.g. 'copyspec(gamma=3)'; may be given several times.",
        ),
    ] = None  # fmt: skip
    data: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_RECORDS, metavar="DIR",
            help="Folder with recorded/ and tokenizers/.",
        ),
    ] = None  # fmt: skip
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", "-t", rich_help_panel=_RECORDS, metavar="NAME",
            help="The tokenizer of the model that answered, where the records do not name it: "
            "a model's folder or hub id, or a name in tokenizers/.",
        ),
    ] = None  # fmt: skip
    template: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_RECORDS, metavar="NAME",
            help="Chat template, where the tokenizer has none: qwen2, llama2 (Vicuna) or llama3.",
        ),
    ] = None  # fmt: skip
    limit: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_RECORDS, metavar="N", min=1, show_default="all",
            help="Conversations of each suite and Spec-Bench task, evenly spread.",
        ),
    ] = None  # fmt: skip
    max_tokens: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_RECORDS, metavar="N", min=1, show_default="whole answers",
            help="Cut answers after N tokens.",
        ),
    ] = None  # fmt: skip
    on_error: Annotated[
        str,
        typer.Option(
            rich_help_panel=_RECORDS, metavar="skip|fail", help="What a wrong line does."
        ),
    ] = "fail"  # fmt: skip
    processes: Annotated[
        int,
        typer.Option(rich_help_panel=_RECORDS, metavar="N", min=1, help="Replay in N processes."),
    ] = 1
    resume: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_RECORDS, metavar="FILE",
            help="Remember finished replays here, and go on from them.",
        ),
    ] = None  # fmt: skip

    def drafters(self) -> list[Drafter]:
        """The drafters asked for, each once."""
        from draftsmith.drafters.registry import parse

        found = [parse(spec) for spec in self.drafter or DEFAULT_DRAFTERS]
        return list({str(drafter): drafter for drafter in found}.values())

    def names(self) -> dict[str, str]:
        """How tables call the drafters: without the options that are defaults."""
        return {str(drafter): label(drafter) for drafter in self.drafters()}

    def errors(self) -> OnError:
        """What a wrong line does, checked."""
        if self.on_error not in ("skip", "fail"):
            raise OptionError(f"--on-error {self.on_error!r} is unknown; give skip or fail")
        return cast("OnError", self.on_error)

    def reading(self) -> Reading:
        """All records of all files."""
        from draftsmith.bench import suites

        whole = suites.Reading()
        for name in self.files or self._everything():
            if not Path(name).exists() and self.data is not None:
                part = suites.recorded(name, self.data, self.errors())
            elif not Path(name).exists() and name.partition("/")[0] in suites.NAMED:
                raise OptionError(f"{name} is a suite; give --data with the folder that holds it")
            else:
                part = suites.read(name, self.errors())
            whole.records += part.records
            whole.wrong += part.wrong
        return whole

    def _everything(self) -> list[str]:
        found = sorted((self.data / "recorded").glob("*.jsonl*")) if self.data else []
        if not found:
            raise OptionError("nothing to replay: give files of recorded answers, or --data DIR")
        return list(map(str, found))

    def folders(self) -> tuple[Path, ...]:
        """Where tokenizers are looked for: --data, beside the files, and one level above."""
        near = [Path(name).parent for name in self.files or () if Path(name).exists()]
        places = [*([self.data] if self.data else []), *(p for n in near for p in (n, n / ".."))]
        return tuple(dict.fromkeys((place / "tokenizers").resolve() for place in places))

    def sweep(self, budget: ReplayBudget | None) -> Sweep:
        """Read and replay, with a progress bar."""
        from draftsmith.bench.encoding import Encoding
        from draftsmith.bench.journal import Journal
        from draftsmith.bench.replay import check
        from draftsmith.bench.suites import sample
        from draftsmith.bench.sweep import Replayer, sweep

        drafters = self.drafters()
        for drafter in drafters:
            check(drafter)
        with waiting("reading …"):
            reading = self.reading()
        records = sample(reading.records, self.limit)
        encoding = Encoding(self.folders(), self.tokenizer, self.template)
        replayer = Replayer(encoding, budget, self.errors(), self.max_tokens)
        with Journal(self.resume) as journal, _bar("replaying", len(records)) as advance:
            result = sweep(records, drafters, replayer, self.processes, journal, advance)
        result.wrong[:0] = reading.wrong
        return result


bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure what drafters save: on recorded answers, and on this machine.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def replay(
    records: RecordOptions,
    categories: Annotated[
        bool, typer.Option("--categories", help="Show every category, too.")
    ] = False,
    json_: Json = False,
) -> None:
    """Feed recorded answers to drafters and count the passes they would have saved. No model.

    [bold]Examples[/bold]

    draftsmith bench replay log.jsonl --tokenizer Qwen/Qwen2.5-7B-Instruct

    draftsmith bench replay mt-redundant --data DIR -d copyspec -d 'copyspec(gamma=5)'
    """
    from draftsmith.bench.rows import summarize

    result = records.sweep(None)
    rows = summarize(result.done)
    if json_:
        _print_json({"rows": [row.as_dict() for row in rows]})
    else:
        console = stdout()
        names = records.names()
        console.print(replay_table(rows, names, categories))
        console.print("", depth_table(rows, names), sep="\n")
    _tell(result.wrong)


def cost(
    model: Annotated[
        str | None,
        typer.Argument(show_default="built-in", help="A Hugging Face hub id or a folder."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to save the table.")
    ] = Path("cost.json"),
    contexts: Annotated[
        str, typer.Option(metavar="N,N,…", help="Cached tokens before the pass.")
    ] = "128,512,2048",
    batches: Annotated[str, typer.Option(metavar="N,N,…", help="Sequences per pass.")] = "1,4",
    positions: Annotated[
        str | None,
        typer.Option(metavar="N,N,…", show_default="14 from 1 to 128", help="Widths of a pass."),
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Times of each.")] = 9,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", show_default="the checkpoint's", help="e.g. bfloat16."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", show_default="cpu", help="cpu, cuda, …")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, show_default="torch's choice")
    ] = None,
    json_: Json = False,
) -> None:
    """Measure what a pass costs here by its width, context and batch size, and save it as JSON.

    [bold]Example[/bold]

    draftsmith bench cost Qwen/Qwen2.5-0.5B-Instruct --dtype bfloat16 -o cost.json
    """
    lengths, rows = _numbers("contexts", contexts), _numbers("batches", batches)
    widths = _numbers("positions", positions) if positions else None
    source = resolve(model)
    with waiting(f"loading {short(source)} …"), quiet():
        import torch

        from draftsmith.bench.measure_cost import POSITIONS, Grid, measure_cost
        from draftsmith.model.load import load

        if threads is not None:
            torch.set_num_threads(threads)
        loaded = load(source, dtype=dtype, device=checked_device(device))
    grid = Grid(sorted({1, *(widths or POSITIONS)}), lengths, rows, repeats)
    if warning := busy():
        note(f"note: {warning}")
    with _bar("measuring", len(lengths) * len(rows)) as advance:
        table = measure_cost(loaded, grid, lambda _: advance(1))
    table.save(output)
    if json_:
        _print_json(table.as_dict())
    else:
        stdout().print(cost_table(table))
    note(f"saved in {output}")


def estimate(
    records: RecordOptions,
    cost: Annotated[
        str,
        typer.Option(
            metavar="FILE|SLOPE",
            help="What `draftsmith bench cost` saved; or a number: the price of a further position "
            "in plain passes.",
        ),
    ],
    budget: Annotated[
        str,
        typer.Option(
            metavar="N",
            help="Draft tokens per pass: a number, auto (what pays here), or drafter (its own).",
        ),
    ] = "auto",
    plain_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS", help="With a slope: milliseconds of a plain pass, to weigh the drafter's."
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Predict from a log of answers how much faster each drafter would make them.

    [bold]Example[/bold]

    draftsmith bench estimate log.jsonl --tokenizer MODEL --cost cost.json
    """
    from draftsmith.bench.cost import CostTable, parse_cost
    from draftsmith.bench.estimate import automatic
    from draftsmith.bench.estimate import estimate as predict
    from draftsmith.bench.replay import ReplayBudget
    from draftsmith.cli.loading import _budget

    curve = parse_cost(cost, plain_ms)
    wanted = _budget(budget)
    if wanted == "auto":
        rule = automatic(curve)
    else:
        rule = ReplayBudget(None if wanted == "drafter" else int(wanted))
    result = records.sweep(rule)
    rows = predict(result.done, curve)
    if json_:
        _print_json({"rows": [row.as_dict() for row in rows]})
    else:
        stdout().print(estimate_table(rows, records.names()))
    _tell(result.wrong)
    if isinstance(curve, CostTable):
        note(f"cost of a pass: {curve.model}, {curve.dtype}, {curve.threads} threads")


for _command in (replay, cost, estimate):
    bench.command()(grouped(_command))


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise OptionError(f"--{option} {text!r} cannot work; give numbers such as 1,4")
    return numbers


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False))


def _tell(wrong: Sequence[str]) -> None:
    """What was left out, on stderr."""
    for line in wrong[:_SHOWN]:
        note(f"left out: {line}")
    if len(wrong) > _SHOWN:
        note(f"left out: {len(wrong) - _SHOWN} more; {len(wrong)} in all")


@contextlib.contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if somebody is watching."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = stderr()
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        number = bar.add_task(what, total=total)
        yield lambda done: bar.advance(number, done)
