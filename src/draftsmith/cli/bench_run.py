"""`draftsmith bench run`: live measurements with a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftsmith.cli.bench_options import FileOptions, tell
from draftsmith.cli.bench_report import show_sections
from draftsmith.cli.loading import bar, busy, load_model, quiet, waiting
from draftsmith.cli.options import COST, Budget, Json, MachineOptions, Model
from draftsmith.cli.report import note, print_json
from draftsmith.errors import OptionError

if TYPE_CHECKING:
    from draftsmith.bench.run import RunPlan

DEFAULT_ARMS = ["none", "hf:generate", "hf:prompt_lookup", "prompt_lookup", "copyspec", "auto"]


def run(
    prompts: FileOptions,
    machine: MachineOptions,
    model: Model = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            "-a",
            metavar="SPEC",
            show_default=", ".join(DEFAULT_ARMS),
            help="Who answers, may be given several times: a drafter, with a budget behind @ "
            "(copyspec@8), or transformers' hf:generate, hf:prompt_lookup(tokens=10), "
            "hf:assisted(model=FOLDER).",
        ),
    ] = None,
    budget: Budget = "auto",
    cost: Annotated[str | None, COST] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            show_default="the record's, else 256",
            help="Longest answer, in tokens.",
        ),
    ] = None,
    runs: Annotated[
        int, typer.Option("--runs", "-r", metavar="R", min=1, help="Times of every answer.")
    ] = 1,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 takes the best token.")] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of sampling.")] = 0,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Where the results go.")
    ] = Path("results.jsonl"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with FILE.")] = False,
    json_: Json = False,
) -> None:
    """Let a model answer prompts, with drafters and with transformers' own generation.

    Every prompt is answered by every arm in turn: the same weights, dtype, threads and prompts.
    Each answer is one line of FILE, at once on disk; `draftsmith bench report FILE` shows them.
    An automatic budget learns from the clock; with --cost it decides by that, and the same passes
    are made again.

    [bold]Examples[/bold]

    draftsmith bench run prompts.jsonl -m Qwen/Qwen2.5-0.5B-Instruct --dtype bfloat16

    draftsmith bench run prompts.jsonl -a none -a copyspec@4 -a copyspec@16 --limit 10
    """
    from draftsmith.bench.arms import build, parse_arm
    from draftsmith.bench.estimate import automatic
    from draftsmith.core.budget import RecordedCost
    from draftsmith.core.sampling import SamplingParams
    from draftsmith.engine.request import checked_budget
    from draftsmith.model.measure import parse_cost
    from draftsmith.storage import check_writable

    SamplingParams(temperature=temperature, seed=seed)
    usual = checked_budget(budget)
    specs = [parse_arm(text, usual) for text in arm or DEFAULT_ARMS]
    curve = dict(automatic(parse_cost(cost)).curve) if cost is not None else None
    if out.is_file() and out.stat().st_size and not resume:
        raise OptionError(f"{out} exists; go on with --resume, or give another --out")
    check_writable(out)
    records = prompts.read().records
    loaded = load_model(model, machine)
    with waiting("preparing …"), quiet():
        from draftsmith.bench.run import RunPlan
        from draftsmith.engine.request import sampling as filtered

        # With the filters that the model's own generation_config sets, as the engine would.
        options = {"temperature": temperature, "seed": seed}
        sampling = filtered(loaded, options)
        arms = build(loaded, specs, None if curve is None else RecordedCost(curve))
        plan = RunPlan(loaded, arms, records, sampling, runs, max_new_tokens=max_new_tokens)
    if warning := busy():
        note(f"note: {warning}")
    shown = curve and [round(seconds / curve[0], 4) for seconds in curve.values()]
    _measure(plan, out, {"cost": shown} if shown else {}, json_)


def _measure(plan: RunPlan, out: Path, told: dict[str, Any], json_: bool) -> None:
    from draftsmith.bench.generations import ResultFile
    from draftsmith.bench.run import measure
    from draftsmith.bench.settings import settings
    from draftsmith.bench.summary import sections

    chosen = {
        "temperature": plan.sampling.temperature,
        "seed": plan.sampling.seed,
        "max_new_tokens": plan.max_new_tokens,
        "warmup": plan.warmup,
        "budgets": [arm.budget for arm in plan.arms],
        **told,
    }
    common = settings(plan.model, plan.arms, plan.records, **chosen)
    file = ResultFile(out, common)
    with bar("answering", plan.size) as advance:
        try:
            with quiet():
                wrong = measure(plan, file, common, advance)
        except BaseException:
            if file.rows:
                note(f"{len(file.rows)} of {plan.size} answers are in {out}; go on with --resume")
            raise
    found = sections([file.rows])
    if json_:
        print_json({"file": str(out), "sections": [section.as_dict() for section in found]})
    else:
        show_sections(found)
    tell(wrong)
    note(f"{len(file.rows)} answers are in {out}")
