"""`draftsmith tune`: find the settings of a drafter that suit a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from draftsmith.cli.loading import bar, load_model
from draftsmith.cli.options import Json, MachineOptions
from draftsmith.cli.render import plain_table, plural
from draftsmith.cli.report import note, stdout

if TYPE_CHECKING:
    from draftsmith.drafters.calibration import Calibration
    from draftsmith.model.loaded import LoadedModel

_SHOWN = 5
"""Layers, and heads per line, in the tables."""


def pld_plus(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A hub id or a folder.")],
    prompts: Annotated[
        Path,
        typer.Argument(metavar="PROMPTS", help="A file of prompts, as for `draftsmith bench run`."),
    ],
    machine: MachineOptions,
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", min=1, help="Prompts that are used.")
    ] = 20,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=2, help="Longest answer, in tokens.")
    ] = 128,
    json_: Json = False,
) -> None:
    """Calibrate PLD+ for a model: which heads copy, which layer tells where, how far copies hold.

    The result is a small file in your cache folder that `pld_plus` reads from then on. If the
    command is interrupted, the same command goes on where it stopped.

    [bold]Example[/bold]

    draftsmith tune pld-plus Qwen/Qwen2.5-0.5B-Instruct prompts.jsonl -n 10
    """
    loaded = load_model(model, machine)
    from draftsmith.drafters.calibration import file_of
    from draftsmith.engine.engine import Engine
    from draftsmith.tune.finished import FinishedWork
    from draftsmith.tune.pld_plus import CalibrationPlan, calibrate

    plan = CalibrationPlan(
        Engine(loaded, drafter="none"), read(prompts, loaded, limit), max_new_tokens
    )
    finished = FinishedWork(file_of(loaded.facts.name).with_suffix(".partial.jsonl"))
    with bar("calibrating", plan.size) as advance:
        found = calibrate(plan, finished, advance)
    path = found.save()
    finished.forget()
    if json_:
        print(path.read_text(encoding="utf-8"), end="", flush=True)
    else:
        show(found, plan.attends)
    if not plan.attends:
        why = "; ".join(loaded.capabilities.reasons)
        note(f"heads were not looked at, since this model's attention cannot be recorded: {why}")
    if finished.recalled:
        note(f"{plural(finished.recalled, 'piece')} of work taken from an earlier run")
    note(f"saved in {path}; pld_plus uses it from now on")


def read(path: Path, model: LoadedModel, limit: int) -> list[list[int]]:
    """Ids of the first prompts that fit the model, first turns only."""
    from draftsmith.bench.run import encoded
    from draftsmith.bench.suites import read as read_records
    from draftsmith.errors import PromptError

    found: list[list[int]] = []
    for record in read_records(path).records:
        later = any(message["content"] is None for message in record.messages)
        if later or len(found) == limit:
            continue  # the earlier answers of a later turn are not known
        try:
            found.append(encoded(model, record))
        except PromptError as error:
            note(f"left out: {record.id}: {error}")
    return found


def show(found: Calibration, attends: bool) -> None:
    """What was found, for a person; `attends`: whether heads were looked at."""
    console = stdout()
    told = f": {found.tokens:,} tokens of {found.prompts} answers"
    console.print(Text.assemble((f"PLD+ on {found.model}", "bold"), told))
    table = plain_table("", "mean accepted length", header=True)
    layers = found.accepted["layer"]
    for layer in sorted(layers, key=lambda n: -layers[n])[:_SHOWN]:
        table.add_row(f"layer {layer}, K=10", f"{layers[layer]:.2f}")
    for rank, best in found.K.items():
        for K, length in found.accepted[rank].items():  # noqa: N806
            chosen = "  ← shortest within 1 % of the best" if int(K) == best else ""
            table.add_row(f"by {rank}, K={K}", f"{length:.2f}{chosen}")
    console.print(table)
    total = found.layers * found.heads_per_layer
    if found.heads:
        first = ", ".join(f"{layer}.{head}" for layer, head, _ in found.heads[:_SHOWN])
        share = len(found.heads) / total
        console.print(f"{len(found.heads)} of {total} heads ({share:.0%}) copy; first {first} …")
    elif attends:
        console.print("No head was seen copying, so pld_plus(rank=attention) needs heads by name.")
