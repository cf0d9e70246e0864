"""`draftsmith bench run` and `bench half`: live measurements with a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftsmith.cli.bench_report import print_json, show_sections, text_table
from draftsmith.cli.loading import busy, parse_budget, quiet, resolve, short, waiting
from draftsmith.cli.options import Json
from draftsmith.cli.report import note, stdout
from draftsmith.errors import OptionError

if TYPE_CHECKING:
    from draftsmith.bench.records import Record
    from draftsmith.bench.run import Plan
    from draftsmith.core.sampling import SamplingParams
    from draftsmith.model.loaded import LoadedModel

DEFAULT_ARMS = ["none", "hf:generate", "hf:prompt_lookup", "prompt_lookup", "copyspec", "auto"]


@dataclass(frozen=True, kw_only=True)
class LiveOptions:
    """Which prompts are answered, by which model, how."""

    files: Annotated[
        list[str] | None,
        typer.Argument(
            show_default=False, metavar="FILES",
            help="JSON lines (plain, .gz, .xz) with messages or prompt; or names of suites in "
            "--data, e.g. mt-redundant or humaneval.",
        ),
    ] = None  # fmt: skip
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="MODEL", show_default="built-in",
            help="A Hugging Face hub id or a folder.",
        ),
    ] = None  # fmt: skip
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with prompts/ and recorded/.")
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, show_default="all",
            help="Conversations of each suite and Spec-Bench task, evenly spread.",
        ),
    ] = None  # fmt: skip
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, show_default="the record's, else 256",
            help="Longest answer, in tokens.",
        ),
    ] = None  # fmt: skip
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", show_default="cpu", help="cpu, cuda, …")
    ] = None
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, show_default="torch's choice")
    ] = None

    def records(self) -> list[Record]:
        """The prompts, in the order of the files."""
        from draftsmith.bench import suites

        if not self.files:
            raise OptionError("nothing to answer: give FILES of prompts, or suites with --data DIR")
        found: list[Record] = []
        with waiting("reading …"):
            for name in self.files:
                if Path(name).exists() or self.data is None:
                    found += suites.read(name).records
                else:
                    found += suites.prompts(name, self.data)
        return suites.sample(found, self.limit)

    def load(self, dtype: str | None) -> LoadedModel:
        """The model, quietly."""
        source = resolve(self.model)
        with waiting(f"loading {short(source)} …"), quiet():
            import torch

            from draftsmith.model.load import load

            if self.threads is not None:
                torch.set_num_threads(self.threads)
            return load(source, dtype=dtype, device=self.device)


def run(
    live: LiveOptions,
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
    budget: Annotated[
        str,
        typer.Option(
            metavar="N",
            help="Draft tokens per pass for arms that name none: a number, auto, or drafter.",
        ),
    ] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", show_default="the checkpoint's", help="e.g. bfloat16."),
    ] = None,
    runs: Annotated[
        int, typer.Option("--runs", "-r", metavar="R", min=1, help="Times of every answer.")
    ] = 1,
    warmup: Annotated[
        int, typer.Option(metavar="N", min=0, help="Prompts begun by every arm beforehand.")
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

    [bold]Examples[/bold]

    draftsmith bench run prompts.jsonl -m Qwen/Qwen2.5-0.5B-Instruct --dtype bfloat16

    draftsmith bench run mt-redundant --data DIR -a none -a copyspec@4 -a copyspec@16 --limit 10
    """
    from draftsmith.bench.arms import build, parse_arm
    from draftsmith.core.sampling import SamplingParams

    sampling = SamplingParams(temperature=temperature, seed=seed)
    usual = parse_budget(budget)
    specs = [parse_arm(text, usual) for text in arm or DEFAULT_ARMS]
    if out.exists() and out.stat().st_size and not resume:
        raise OptionError(f"{out} exists; go on with --resume, or give another --out")
    records = live.records()
    model = live.load(dtype)
    with waiting("preparing …"), quiet():
        from draftsmith.bench.run import Plan

        plan = Plan(model, build(model, specs), records, _checked(model, sampling), runs, warmup,
                    live.max_new_tokens)  # fmt: skip
    if warning := busy():
        note(f"note: {warning}")
    _measure(plan, out, resume, json_)


def _checked(model: LoadedModel, sampling: SamplingParams) -> SamplingParams:
    """With the filters that the model's own generation_config sets, as the engine would."""
    from draftsmith.engine import request

    options = {"temperature": sampling.temperature, "seed": sampling.seed}
    return request.sampling(model, options)


def _measure(plan: Plan, out: Path, resume: bool, json_: bool) -> None:
    from draftsmith.bench.generations import ResultFile
    from draftsmith.bench.run import measure
    from draftsmith.bench.settings import settings
    from draftsmith.bench.summary import sections
    from draftsmith.cli.bench_records import tell
    from draftsmith.cli.progress import bar

    chosen = {
        "temperature": plan.sampling.temperature,
        "seed": plan.sampling.seed,
        "max_new_tokens": plan.max_new_tokens,
        "warmup": plan.warmup,
        "budgets": [arm.budget for arm in plan.arms],
    }
    common = settings(plan.model, plan.arms, plan.records, **chosen)
    with ResultFile(out, common, resume) as file, bar("answering", plan.size) as advance:
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


def half(
    live: LiveOptions,
    drafter: Annotated[
        str, typer.Option("--drafter", "-d", metavar="NAME", help="Who guesses.")
    ] = "copyspec",
    budget: Annotated[
        str, typer.Option(metavar="N", help="Draft tokens per pass: a number, auto, or drafter.")
    ] = "drafter",
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="The half precision: bfloat16 or float16.")
    ] = "bfloat16",
    json_: Json = False,
) -> None:
    """Count the answers that differ between float32 and half precision, plainly and with drafts.

    [bold]Example[/bold]

    draftsmith bench half prompts.jsonl -m Qwen/Qwen2.5-0.5B-Instruct --limit 50
    """
    from draftsmith.bench.arms import Spec, parse_arm
    from draftsmith.core.sampling import SamplingParams

    spec = parse_arm(drafter, parse_budget(budget))
    if spec.drafter is None or spec.drafter.preferred_width() == 0:
        raise OptionError(f"--drafter {drafter} does not draft; give one that does, e.g. copyspec")
    if dtype == "float32":
        raise OptionError("--dtype float32 is no half precision; give bfloat16 or float16")
    records = live.records()
    models = [live.load("float32"), live.load(dtype)]
    from draftsmith.bench.half import half as count
    from draftsmith.bench.report import HALF_HEADS, half_cells
    from draftsmith.bench.run import Plan
    from draftsmith.cli.progress import bar

    greedy = SamplingParams()
    full, low = (
        Plan(model, [], records, greedy, max_new_tokens=live.max_new_tokens) for model in models
    )
    with bar("answering", len(records)) as advance:
        found = count(full, low, Spec(spec.name, spec.drafter, spec.budget), advance)
    if json_:
        print_json({"rows": [one.as_dict() for one in found]})
    else:
        stdout().print(text_table(HALF_HEADS, half_cells(found)))
    if found[0].prompts < len(records):
        note(f"left out: {len(records) - found[0].prompts} prompts that do not fit or need answers")
