"""`draftsmith bench run`: live measurements with a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from draftsmith.cli.loading import bar, busy, load_model, waiting
from draftsmith.cli.options import Json, MachineOptions
from draftsmith.cli.report import note, print_json
from draftsmith.errors import OptionError
from draftsmith.lab.commands.bench_options import FileOptions, tell
from draftsmith.lab.commands.bench_report import show_sections

DEFAULT_ARMS = ("none", "hf:generate", "hf:prompt_lookup", "prompt_lookup", "copyspec", "auto")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Arms and their options, and the output file."""

    spelt: ClassVar = {"arm": "--arm -a SPEC", "runs": "--runs -r N", "out": "--out -o FILE"}

    arm: tuple[str, ...] = DEFAULT_ARMS
    """An arm: a drafter, with a budget after @ (copyspec@8), or transformers' hf:generate,
    hf:prompt_lookup(tokens=10), hf:assisted(model=FOLDER).
    """
    budget: str = "auto"
    """Draft tokens per pass: a number, auto (what pays here), or drafter (its own width)."""
    cost: str | None = None
    """Cost of a pass: see `draftsmith bench estimate`."""
    max_new_tokens: int | None = None
    """Longest answer, in tokens. [the record's, else 256]"""
    dictate: bool = False
    """Make every arm give the record's answer, so that rounding cannot separate them."""
    runs: int = 1
    """Repetitions of every answer."""
    temperature: float = 0.0
    """0 takes the best token."""
    seed: int = 0
    """Seed of sampling."""
    out: Path = Path("results.jsonl")
    """Output file."""
    resume: bool = False
    """Resume FILE."""


def run(
    prompts: FileOptions, machine: MachineOptions, chosen: RunOptions, json_: Json = False
) -> None:
    """Measure a model's answers to prompts, with drafters and transformers' own generation.

    Every arm answers every prompt in turn, with the same weights, dtype, threads and prompts. Each
    answer is one line of FILE, immediately on disk; `draftsmith bench report FILE` shows them. An
    automatic budget learns from measured times. With --cost it uses that instead, so passes are
    repeatable.

    [bold]Examples[/bold]

    draftsmith bench run prompts.jsonl -m Qwen/Qwen2.5-0.5B-Instruct --dtype bfloat16

    draftsmith bench run prompts.jsonl -a none -a copyspec@4 -a copyspec@16 --limit 10
    """
    from draftsmith.core.sampling import SamplingParams
    from draftsmith.engine.request import checked_budget
    from draftsmith.lab.bench.arms import build, parse_arm
    from draftsmith.lab.bench.cost import curve, parse_cost, recorded
    from draftsmith.storage import check_writable

    options: dict[str, Any] = {"temperature": chosen.temperature, "seed": chosen.seed}
    SamplingParams(**options)
    usual = checked_budget(chosen.budget)
    specs = [parse_arm(text, usual) for text in chosen.arm]
    costs = parse_cost(chosen.cost) if chosen.cost is not None else None
    out = chosen.out
    if out.is_file() and out.stat().st_size and not chosen.resume:
        raise OptionError(f"{out} exists; resume it with --resume, or give another --out")
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
        arms = build(loaded, specs, recorded(costs) if costs else None)
        how = {name: getattr(chosen, name) for name in ("runs", "max_new_tokens", "dictate")}
        plan = RunPlan(loaded, arms, asked.records, sampling, **how)
    if warning := busy():
        note(f"note: {warning}")
    seconds = list(curve(costs).values()) if costs else []
    more = {"cost": [round(one / seconds[0], 4) for one in seconds]} if costs else {}
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
