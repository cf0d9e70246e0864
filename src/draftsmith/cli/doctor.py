"""`draftsmith doctor`: what this machine and this model can do together."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text

from draftsmith.cli.loading import busy, idle, load_model, set_threads, waiting
from draftsmith.cli.options import Json, MachineOptions, PlaceOptions
from draftsmith.cli.render import facts_table, plain_table
from draftsmith.cli.report import print_json, stdout

if TYPE_CHECKING:
    from draftsmith.model.choice import Measured
    from draftsmith.model.loaded import LoadedModel

_PRICED = (1, 16)
"""Widths of passes whose price is told when they are exact."""


@dataclass(frozen=True, kw_only=True)
class ExamineOptions(PlaceOptions):
    """Which model is examined."""

    spelt: ClassVar = {"named": "MODEL"}

    named: str | None = None
    """The same as --model."""

    def load(self) -> LoadedModel:
        """The model, in the checkpoint's own dtype."""
        options = asdict(self)
        return load_model(named=options.pop("named"), machine=MachineOptions(**options))


def doctor(chosen: ExamineOptions, as_json: Json = False) -> None:
    """Examine a model on this machine: what works, why not more, what a pass costs.

    [bold]Examples[/bold]

    draftsmith doctor

    draftsmith doctor Qwen/Qwen3-0.6B --device cuda
    """
    loaded = chosen.load()
    set_threads(idle())
    with waiting("measuring …"):
        record = examine(loaded)
    if as_json:
        print_json(record)
    else:
        show(record)


def examine(loaded: LoadedModel) -> dict[str, Any]:
    """Everything `doctor` finds out, as plain values."""
    from draftsmith.model.load import choice_file, folder_of, load
    from draftsmith.model.measure import compare_dtypes, versions

    capabilities, model = loaded.capabilities, describe(loaded)
    record: dict[str, Any] = {
        "busy": busy(),
        "versions": versions() | {"python": platform.python_version()},
        "machine": machine(loaded),
        "model": model,
        "capabilities": asdict(capabilities) | {"explained": capabilities.explain()},
        "linear_layers": loaded.prepacked.explain() if loaded.prepacked else None,
        "exact": exactness(loaded),
        "rows_independent": not any(r.startswith("rows of a pass") for r in capabilities.reasons),
    }
    packed = loaded.prepacked is not None
    again = partial(load, loaded.name, None, device=loaded.device, prepack=packed)
    measured, _ = compare_dtypes(loaded, lambda dtype: again(dtype=dtype), thorough=True)
    if loaded.device.type == "cpu":
        measured.save(choice_file(folder_of(loaded.name), {}, packed))
    record["pass_seconds"], record["not_measured"] = measured.seconds, measured.left_out
    record["recommendation"] = recommend(measured, capabilities.shape)
    return record


def exactness(loaded: LoadedModel) -> dict[str, Any]:
    """Whether passes can be exact here, and what they cost then over the usual ones."""
    from draftsmith.errors import UnsupportedError
    from draftsmith.model.exact.find import exactly
    from draftsmith.model.measure import pass_cost

    try:
        exact = exactly(loaded)
    except UnsupportedError as error:
        return {"refused": str(error)}
    assert exact.exact is not None
    usual, price = (pass_cost(one, widths=_PRICED, context=500) for one in (loaded, exact))
    prices = {width: price[width] / usual[width] for width in usual}
    return {"explained": exact.exact.explain(), "relative_cost": prices}


def machine(loaded: LoadedModel) -> dict[str, Any]:
    """Where the model runs."""
    import torch

    from draftsmith.model.devices import name_of
    from draftsmith.model.measure import memory_bytes, processor

    on_cpu = loaded.device.type == "cpu"
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(loaded.device),
        "name": processor() if on_cpu else name_of(loaded.device),
        "memory_bytes": memory_bytes(loaded.device),
        "torch_threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }


def describe(loaded: LoadedModel) -> dict[str, Any]:
    """The model in numbers."""
    from draftsmith.model.measure import parameters_of

    return {
        "name": loaded.name,
        "type": loaded.config.model_type,
        "parameters": parameters_of(loaded),
        "dtype": loaded.dtype_name,
        "context_length": loaded.context_length,
        "vocab_size": loaded.vocab_size,
        "tokenizer": loaded.tokenizer is not None,
        "chat_template": bool(getattr(loaded.tokenizer, "chat_template", None)),
        "quantized": bool(getattr(loaded.model, "is_quantized", False)),
    }


def recommend(measured: Measured, shape: str) -> dict[str, Any]:
    """Which dtype, and whether drafts pay, in numbers and in sentences."""
    dtype = measured.best
    costs = measured.seconds[dtype]
    relative = {width: seconds / costs[1] for width, seconds in costs.items()}
    exact = (
        "answers are the same token for token with any drafter"
        if dtype == "float32"
        else "near-ties may fall differently with drafts than without"
    )
    said = [f"--dtype measured takes {measured.explain()}; {exact}."]
    said.append(_about_drafts(relative, shape))
    return {"dtype": dtype, "relative_cost": relative, "explained": said}


def _about_drafts(relative: dict[int, float], shape: str) -> str:
    if shape == "plain" or len(relative) < 2:
        return "Drafts are of no use here: this model verifies one token per pass."
    width = max(w for w in relative if w <= 8)
    drafted, needed = width - 1, max(0.0, relative[width] - 1)
    head = f"A pass over {width} tokens costs {relative[width]:.2f} plain ones: "
    if needed >= drafted:
        return head + "drafts do not pay here; use -d none."
    verdict = "drafts pay almost always" if needed < 1 else "drafts pay where much is copied"
    return f"{head}{verdict} (from {needed:.1f} accepted of {drafted} drafted tokens on)."


def show(record: dict[str, Any]) -> None:
    """The record for a person."""
    console = stdout()
    facts = {name: ", ".join(_facts(record[name])) for name in ("versions", "machine", "model")}
    console.print(facts_table(facts))
    console.print("\n[bold]What it can do")
    for line in record["capabilities"]["explained"]:
        console.print(Text(f"- {line}", "yellow" if line.startswith("Refused") else ""))
    console.print(
        "- Rows of a pass do not influence each other."
        if record["rows_independent"]
        else "- Rows of a pass influence each other: drafts would change the answer."
    )
    if record["linear_layers"]:
        console.print(f"- {record['linear_layers']}.")
    exact = record["exact"]
    if "refused" in exact:
        console.print(Text(f"- Refused: {exact['refused']}", "yellow"))
    else:
        priced = exact["relative_cost"].items()
        told = ", ".join(f"{price:.2f}× for {width}" for width, price in priced)
        console.print(f"- exact=True: {exact['explained']}; passes cost {told} tokens.")
    console.print("\n[bold]Milliseconds of a pass, by how many tokens it covers")
    costs = record["pass_seconds"]
    table = plain_table("tokens", *map(str, next(iter(costs.values()))), header=True)
    for name, seconds in costs.items():
        table.add_row(name, *(f"{1000 * s:.1f}" for s in seconds.values()))
        relative = (f"{s / seconds[1]:.2f}×" for s in seconds.values())
        table.add_row("  relative", *relative, style="dim")
    console.print(table)
    if record["busy"]:
        console.print(f"({record['busy']})")
    console.print("\n[bold]Recommendation")
    for line in record["recommendation"]["explained"]:
        console.print(f"- {line}")


def _facts(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        shown = value
        if isinstance(value, bool):
            shown = "yes" if value else "no"
        elif isinstance(value, int):
            shown = f"{value:,}"
        yield f"{name.replace('_', ' ')} {'unknown' if value is None else shown}"
