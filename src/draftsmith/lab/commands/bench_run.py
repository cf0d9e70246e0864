"""`draftsmith bench run`: live measurements with a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from draftsmith.cli.loading import bar, busy, load_model, waiting
from draftsmith.cli.options import Count, Json, MachineOptions, SomeTokens, group
from draftsmith.cli.report import note, print_json
from draftsmith.errors import OptionError
from draftsmith.lab.commands.bench_options import FileOptions, tell
from draftsmith.lab.commands.bench_report import show_sections

DEFAULT_ARMS = ("none", "hf:generate", "hf:prompt_lookup", "prompt_lookup", "copyspec", "auto")


@group("Answers", 3)
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Arms and their options, and the output file."""

    arm: Annotated[tuple[str, ...], Parameter(alias="-a")] = DEFAULT_ARMS
    """An arm: a drafter, with a budget after @ (copyspec@8), or transformers' hf:generate,
    hf:prompt_lookup(tokens=10), hf:assisted(model=FOLDER). May be given several times."""
    budget: str = "auto"
    """Draft tokens per pass: a number, auto (what pays here), or drafter (its own width)."""
    cost: str | None = None
    """What a pass costs: see `draftsmith bench estimate`."""
    max_new_tokens: Annotated[
        SomeTokens | None, Parameter(show_default="the record's, else 256")
    ] = None
    """Longest answer, in tokens."""
    dictate: bool = False
    """Let every arm give the answer that the record has: the same tokens, where rounding could
    part them."""
    runs: Annotated[Count, Parameter(alias="-r")] = 1
    """Times of every answer."""
    temperature: float = 0.0
    """0 takes the best token."""
    seed: int = 0
    """Of sampling."""
    out: Annotated[Path, Parameter(name=("--output", "--out", "-o"))] = Path("results.jsonl")
    """Where the results go."""
    resume: bool = False
    """Go on with the file of results."""


def run(
    prompts: FileOptions,
    *,
    machine: MachineOptions = MachineOptions(),
    chosen: RunOptions = RunOptions(),
    json_: Json = False,
) -> None:
    """Measure a model's answers to prompts, with drafters and transformers' own generation.

    Every arm answers every prompt in turn, with the same weights, dtype, threads and prompts. Each
    answer is one line of FILE, immediately on disk; `draftsmith bench report FILE` shows them. An
    automatic budget learns from measured times. With --cost it uses that instead, so passes are
    repeatable.

    Examples

    draftsmith bench run prompts.jsonl -m Qwen/Qwen2.5-0.5B-Instruct --dtype bfloat16
    draftsmith bench run prompts.jsonl -a none -a copyspec@4 -a copyspec@16 --limit 10
    """
    from draftsmith.core.cost import RecordedCost
    from draftsmith.core.sampling import SamplingParams
    from draftsmith.engine.drafting import checked_budget
    from draftsmith.lab.bench.arms import build, parse_arm
    from draftsmith.lab.bench.cost import curve, parse_cost
    from draftsmith.lab.lines import check_lines
    from draftsmith.storage import check_writable

    options: dict[str, Any] = {"temperature": chosen.temperature, "seed": chosen.seed}
    SamplingParams(**options)
    usual = checked_budget(chosen.budget)
    specs = [parse_arm(text, usual) for text in chosen.arm]
    costs = curve(parse_cost(chosen.cost)) if chosen.cost is not None else {}
    out = chosen.out
    if out.is_file() and out.stat().st_size and not chosen.resume:
        raise OptionError(f"{out} exists; resume it with --resume, or give another --output")
    check_lines(out)
    check_writable(out)
    asked = prompts.read()
    tell(asked.wrong)
    loaded = load_model(machine)
    with waiting("preparing …"):
        from draftsmith.engine.request import sampling as filtered
        from draftsmith.lab.bench.generations import ResultFile
        from draftsmith.lab.bench.run import RunPlan, measure
        from draftsmith.lab.bench.settings import settings
        from draftsmith.lab.bench.summary import sections

        # With the filters of the model's own generation_config, as in the engine.
        sampling = filtered(loaded, options)
        arms = build(loaded, specs, RecordedCost(costs) if costs else None)
        how = {name: getattr(chosen, name) for name in ("runs", "max_new_tokens", "dictate")}
        plan = RunPlan(loaded, arms, asked.records, sampling, **how)
    if warning := busy():
        note(f"note: {warning}")
    more = {"cost": [round(s / costs[0], 4) for s in costs.values()]} if costs else {}
    file = ResultFile(out, settings(plan, **more))
    with bar("answering", plan.size) as advance:
        try:
            wrong = measure(plan, file, advance)
        except BaseException:
            if file.rows:
                note(f"{len(file.rows)} of {plan.size} answers are in {out}; resume with --resume")
            raise
    found = sections([file.rows])
    if json_:
        print_json({"file": str(out), "sections": [section.as_dict() for section in found]})
    else:
        show_sections(found)
    tell(wrong)
    note(f"{len(file.rows)} answers are in {out}")
