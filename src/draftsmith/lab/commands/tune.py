"""`draftsmith tune`: find a drafter's settings for a model."""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from rich.text import Text

from draftsmith.cli.commands import HELP
from draftsmith.cli.loading import bar, load_model, short
from draftsmith.cli.options import Count, Json, MachineOptions, PlaceOptions, SomeTokens, group
from draftsmith.cli.render import plain_table
from draftsmith.cli.report import note, print_json, stdout
from draftsmith.lab.commands.bench_options import tell
from draftsmith.lab.commands.bench_report import text_table

if TYPE_CHECKING:
    from draftsmith.drafters.calibration import Calibration
    from draftsmith.lab.lines import Finished
    from draftsmith.model.loaded import LoadedModel

_SHOWN = 5
"""Layers, and heads per line, in the tables."""
_FEW = 1_000
"""Tokens of answers below which a calibration says little."""


@dataclass(frozen=True)
class TunedOptions(MachineOptions):
    """Which model is tuned for; unlike elsewhere, it must be named."""

    model: Annotated[str, Parameter(alias="-m")] = field()


@group("Answers", 1)
@dataclass(frozen=True)
class TuneOptions:
    """What the model answers."""

    prompts: Path
    """A file of prompts, as for draftsmith bench run."""
    _: KW_ONLY
    limit: Annotated[Count, Parameter(alias="-n")] = 20
    """Prompts that are used; for CopySpec, conversations of each suite and task."""
    max_new_tokens: SomeTokens = 128
    """Longest answer, in tokens."""


def pld_plus(machine: TunedOptions, chosen: TuneOptions, *, json_: Json = False) -> None:
    """Calibrate PLD+ for a model: which heads copy, which layer tells where, how far copies hold.

    The result is a small file in your cache folder that `pld_plus` reads from then on. If the
    command is interrupted, give the same command again to resume.

    Example

    draftsmith tune pld-plus Qwen/Qwen2.5-0.5B-Instruct prompts.jsonl -n 10
    """
    loaded = load_model(machine)
    from draftsmith.engine.engine import Engine
    from draftsmith.lab.tune.pld_plus import CalibrationPlan, calibrate

    prompts = read(chosen.prompts, loaded, chosen.limit)
    plan = CalibrationPlan(Engine(loaded, drafter="none"), prompts, chosen.max_new_tokens)
    finished = begun(loaded, ".partial.jsonl")
    with bar("calibrating", plan.size) as advance:
        found = calibrate(plan, finished, advance)
    path = found.save()
    if json_:
        print_json(json.loads(path.read_text(encoding="utf-8")))
    else:
        show(found, plan.attends)
    if not plan.attends:
        why = "; ".join(loaded.capabilities.reasons)
        note(f"heads were not tested, because this model's attention cannot be recorded: {why}")
    finished.forget()
    note(f"saved in {path}; pld_plus uses it from now on")


@dataclass(frozen=True)
class CopySpecOptions(TuneOptions):
    """Options of `tune copyspec`."""

    _: KW_ONLY
    cost: str | None = None
    """What a pass costs: see draftsmith bench estimate."""
    max_new_tokens: SomeTokens = 256


def copyspec(machine: TunedOptions, chosen: CopySpecOptions, *, json_: Json = False) -> None:
    """Choose CopySpec's γ for a model: what γ = 1 … 10 would have brought on its own answers.

    The model answers every prompt plainly, all turns of a conversation. Without --cost, the cost of
    a pass is measured now. If the command is interrupted, give the same command again to resume.

    Example

    draftsmith tune copyspec Qwen/Qwen2.5-0.5B-Instruct prompts.jsonl -n 10
    """
    from draftsmith.lab.bench import suites
    from draftsmith.lab.bench.cost import parse_cost

    records = suites.sample(suites.read(chosen.prompts).records, chosen.limit)
    curve = None if chosen.cost is None else parse_cost(chosen.cost)
    loaded = load_model(machine)
    from draftsmith.engine.engine import Engine
    from draftsmith.lab.tune.copyspec import GAMMAS, HEADS, answers, best, cost_here, measured

    engine, finished = Engine(loaded, drafter="none"), begun(loaded, ".copyspec.jsonl")
    limit = chosen.max_new_tokens
    with bar("answering", len(records)) as advance:
        texts, wrong = answers(engine, records, limit, finished, advance)
    curve, found = curve or cost_here(loaded), []
    with bar("replaying", len(GAMMAS)) as advance:
        for gamma in GAMMAS:
            found.append(measured(engine, texts, limit, curve, gamma))
            advance(1)
    if json_:
        print_json({"rows": [one.as_dict() for one in found]})
    else:
        console, fastest = stdout(), best(found)
        cells = [[*one.cells(), "← fastest" * (one is fastest)] for one in found]
        console.print(text_table((*HEADS, " "), cells, console.width))
    tell(wrong)
    finished.forget()


def auto(place: PlaceOptions = PlaceOptions()) -> None:
    """Ask a model once what it says after each of its 4,096 lowest ids, mostly frequent tokens.

    This takes as long as a prompt of 4,096 tokens. The result is a small file in your cache folder.
    From then on, `auto` starts every answer of this model with it.

    Example

    draftsmith tune auto Qwen/Qwen2.5-0.5B-Instruct
    """
    loaded = load_model(place)
    from draftsmith.drafters.bigrams import path_of, save
    from draftsmith.lab.tune.auto import bigrams, check, size

    check(loaded)
    path = path_of(loaded.facts)
    with bar("asking", size(loaded)) as advance:
        save(path, bigrams(loaded, advance))
    note(f"saved in {path}; auto uses it for {short(loaded.name)} until you delete it")


def begun(model: LoadedModel, suffix: str) -> Finished:
    """Return the results that an interrupted calibration of this model stored."""
    from draftsmith.drafters.calibration import file_of
    from draftsmith.lab.lines import Finished

    return Finished(file_of(model.facts.name).with_suffix(suffix))


def read(path: Path, model: LoadedModel, limit: int) -> list[list[int]]:
    """Return the ids of the first prompts that fit the model, first turns only."""
    from draftsmith.errors import PromptError
    from draftsmith.lab.bench.run import encoded
    from draftsmith.lab.bench.suites import read as read_records

    found: list[list[int]] = []
    wrong = []
    for record in read_records(path).records:
        if len(found) < limit:
            try:
                found.append(encoded(model, record))
            except PromptError as error:
                wrong.append(f"{record.id}: {error}")
    tell(wrong)
    return found


def show(found: Calibration, attends: bool) -> None:
    """Print the results; `attends`: whether heads were tested."""
    console = stdout()
    counts = f": {found.tokens:,} tokens of {found.prompts} answers"
    console.print(Text.assemble((f"PLD+ on {found.model}", "bold"), counts))
    table = plain_table("", "mean accepted length", "", folds=1)
    layers = found.accepted["layer"]
    for layer in sorted(layers, key=lambda n: -layers[n])[:_SHOWN]:
        table.add_row(f"layer {layer}, K=10", f"{layers[layer]:.2f}", "")
    for rank, best in found.K.items():
        for K, length in found.accepted[rank].items():  # noqa: N806
            chosen = "← shortest within 1 % of the best" if int(K) == best else ""
            table.add_row(f"by {rank}, K={K}", f"{length:.2f}", chosen)
    console.print(table)
    if found.tokens < _FEW:
        note(f"note: {found.tokens:,} tokens are few; these figures change with other answers")
    total = found.layers * found.heads_per_layer
    if found.heads:
        first = ", ".join(f"{layer}.{head}" for layer, head, _ in found.heads[:_SHOWN])
        share = len(found.heads) / total
        console.print(f"{len(found.heads)} of {total} heads ({share:.0%}) copy; first {first} …")
    elif attends:
        console.print("No head copies, so pld_plus(rank=attention) needs its heads as an option.")


app = App(name="tune", help=HELP["tune"])
for command in (pld_plus, copyspec, auto):
    app.command(command)
