"""`draftsmith doctor`: what this machine and this model can do together."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from rich.text import Text

from draftsmith.cli.loading import busy, load_model, own_threads, quiet, waiting
from draftsmith.cli.options import Device, Json, MachineOptions, Model, ModelArgument
from draftsmith.cli.render import dtype_of, facts_table, plain_table, plural
from draftsmith.cli.report import print_json, stdout
from draftsmith.errors import DraftsmithError, first_line

if TYPE_CHECKING:
    from draftsmith.model.loaded import LoadedModel

DTYPES = {"float32": 4, "bfloat16": 2}
"""Bytes per parameter."""
_MEMORY_SHARE = 0.5
"""Loading in another type is only tried where it leaves half of the memory free."""

_PACKAGES = ("draftsmith", "torch", "transformers", "tokenizers")

Costs = dict[str, dict[int, float]]


def doctor(
    named: ModelArgument = None,
    model: Model = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Examine a model on this machine: what works, why not more, what a pass costs.

    [bold]Examples[/bold]

    draftsmith doctor

    draftsmith doctor Qwen/Qwen3-0.6B --device cuda
    """
    loaded = load_model(model, MachineOptions(device=device), named)
    with waiting("measuring …"), quiet():
        record = examine(loaded)
    if as_json:
        print_json(record)
    else:
        show(record)


def examine(loaded: LoadedModel) -> dict[str, Any]:
    """Everything `doctor` finds out, as plain values."""
    import torch

    capabilities, model = loaded.capabilities, describe(loaded)
    record: dict[str, Any] = {
        "busy": busy(),
        "versions": {name: version(name) for name in _PACKAGES},
        "machine": machine(loaded),
        "model": model,
        "capabilities": asdict(capabilities) | {"explained": capabilities.explain()},
        "rows_independent": not any(r.startswith("rows of a pass") for r in capabilities.reasons),
    }
    record["versions"]["python"] = platform.python_version()
    with own_threads():
        threads = by_threads(loaded) if loaded.device.type == "cpu" else {}
        advice = about_threads(threads)
        if advice:
            torch.set_num_threads(1)
        costs, skipped = measure(loaded, model, record["machine"]["memory_bytes"])
        record["measured_on_threads"] = torch.get_num_threads()
    record["plain_pass_by_threads"] = {count: seconds[1] for count, seconds in threads.items()}
    record["pass_seconds"], record["not_measured"] = costs, skipped
    record["recommendation"] = recommend(costs, capabilities.shape, model["dtype"])
    record["recommendation"]["explained"] += advice
    return record


def machine(loaded: LoadedModel) -> dict[str, Any]:
    """Where the model runs."""
    import torch

    name, memory = platform.processor() or platform.machine(), None
    if loaded.device.type == "cuda":
        properties = torch.cuda.get_device_properties(loaded.device)
        name, memory = properties.name, properties.total_memory
    elif hasattr(os, "sysconf"):  # not on Windows
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(loaded.device),
        "name": name,
        "memory_bytes": memory,
        "torch_threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }


def describe(loaded: LoadedModel) -> dict[str, Any]:
    """The model in numbers."""
    return {
        "name": loaded.name,
        "type": loaded.config.model_type,
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "dtype": dtype_of(loaded),
        "context_length": loaded.context_length,
        "vocab_size": loaded.vocab_size,
        "tokenizer": loaded.tokenizer is not None,
        "chat_template": bool(getattr(loaded.tokenizer, "chat_template", None)),
        "quantized": bool(getattr(loaded.model, "is_quantized", False)),
    }


def measure(
    loaded: LoadedModel, model: dict[str, Any], memory: int | None
) -> tuple[Costs, dict[str, str]]:
    """Seconds of a pass by dtype and width; and the dtypes left out, with the reason."""
    from draftsmith.model.load import load
    from draftsmith.model.measure import pass_cost

    costs, skipped = {model["dtype"]: pass_cost(loaded)}, {}
    for name, size in DTYPES.items():
        needed = model["parameters"] * size
        if name in costs:
            continue
        if model["quantized"]:
            skipped[name] = "the model is quantized"
        elif memory is not None and needed > _MEMORY_SHARE * memory:
            skipped[name] = f"its weights alone would take {needed / 1e9:.1f} GB"
        else:
            try:
                packed = loaded.prepacked is not None
                other = load(loaded.name, dtype=name, device=loaded.device, prepack=packed)
                costs[name] = pass_cost(other)
            except (DraftsmithError, RuntimeError) as error:
                skipped[name] = first_line(error)
    return costs, skipped


def by_threads(loaded: LoadedModel) -> dict[int, dict[int, float]]:
    """Seconds of a plain and a wide pass with torch's number of threads and with one."""
    import torch

    from draftsmith.model.measure import WIDE, pass_cost

    seconds = {}
    with own_threads() as usual:
        for threads in sorted({usual, 1}):
            torch.set_num_threads(threads)
            seconds[threads] = pass_cost(loaded, widths=(1, WIDE))
    return seconds


def about_threads(seconds: dict[int, dict[int, float]]) -> list[str]:
    """Advice where more threads only get in each other's way."""
    from draftsmith.model.measure import cheapest

    usual = max(seconds, default=1)
    if usual == 1 or cheapest(seconds, {usual}) == usual:
        return []
    faster = sum(seconds[usual].values()) / sum(seconds[1].values())
    return [
        f"One thread is {faster:.1f} times as fast as {usual} here (a small model, or "
        "other work on this machine): use --threads 1."
    ]


def recommend(costs: Costs, shape: str, own: str) -> dict[str, Any]:
    """Which dtype, and whether drafts pay, in numbers and in sentences."""
    from draftsmith.model.measure import cheapest

    dtype = cheapest(costs, {"float32"})
    relative = {width: seconds / costs[dtype][1] for width, seconds in costs[dtype].items()}
    said = [_about_dtype(dtype, own, costs), _about_drafts(relative, shape)]
    return {"dtype": dtype, "relative_cost": relative, "explained": said}


def _about_dtype(dtype: str, own: str, costs: Costs) -> str:
    if len(costs) == 1:
        return f"Use {dtype}, the only type measured."
    from draftsmith.model.measure import WIDE

    own_costs = costs[dtype]
    wide = max(width for width in own_costs if width <= WIDE)
    others = ", ".join(
        f"{seconds[1] / own_costs[1]:.2f} and {seconds[wide] / own_costs[wide]:.2f} times in {name}"
        for name, seconds in costs.items()
        if name != dtype
    )
    option = "" if dtype == own else f" (--dtype {dtype}; the checkpoint is {own})"
    exact = (
        "its answers are the same token for token with any drafter"
        if dtype == "float32"
        else "near-ties may fall differently with drafts than without"
    )
    return (
        f"Use {dtype}{option}: a plain pass and one over {plural(wide, 'token')} cost {others} "
        f"what they cost in {dtype}; {exact}."
    )


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
    threads = plural(record["measured_on_threads"], "thread")
    on = f" (on {threads})" if record["plain_pass_by_threads"] else ""
    console.print(f"\n[bold]Milliseconds of a pass, by how many tokens it covers{on}")
    costs = record["pass_seconds"]
    table = plain_table("tokens", *map(str, next(iter(costs.values()))), header=True)
    for name, seconds in costs.items():
        table.add_row(name, *(f"{1000 * s:.1f}" for s in seconds.values()))
        relative = (f"{s / seconds[1]:.2f}×" for s in seconds.values())
        table.add_row("  relative", *relative, style="dim")
    console.print(table)
    for name, reason in record["not_measured"].items():
        console.print(Text(f"{name} not measured: {reason}"))
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
