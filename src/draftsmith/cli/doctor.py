"""`draftsmith doctor`: what this machine and this model can do together."""

from __future__ import annotations

import os
import platform
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from draftsmith import builtin
from draftsmith.cli.loading import busy, load_model, waiting
from draftsmith.cli.options import Json, PlaceOptions
from draftsmith.cli.render import facts_table, plain_table
from draftsmith.cli.report import print_json, stdout
from draftsmith.errors import DraftsmithError, OptionError

if TYPE_CHECKING:
    from draftsmith.drafters.trained_head import HeadDrafter
    from draftsmith.model.loaded import LoadedModel

_WIDE = 16
"""Width of the pass that stands for all passes with drafts."""
_CLEARLY_CHEAPER = 0.9
"""Less than this of another one's time is no accident of measuring."""
_PRICED = (1, 16)
"""Widths of the passes that are timed for exact models."""


HeadOption = Annotated[
    str | None,
    Parameter(
        name="--head",
        help="A trained head to try, like 'eagle3(model=DIR)'.",
        show_default="mtp, if the checkpoint has one",
    ),
]


def doctor(
    place: PlaceOptions = PlaceOptions(), *, head: HeadOption = None, as_json: Json = False
) -> None:
    """Examine a model on this machine: what works, why not more, what a pass costs.

    Examples

    draftsmith doctor
    draftsmith doctor Qwen/Qwen3-0.6B --device cuda
    """
    tried = None if head is None else head_of(head)  # before anything is loaded
    loaded = load_model(place)
    with waiting("measuring …"):
        record = examine(loaded, tried)
    if as_json:
        print_json(record)
    else:
        show(record)


def head_of(text: str) -> HeadDrafter:
    """Return the drafter that `--head` names; raises OptionError."""
    from draftsmith.drafters.registry import parse
    from draftsmith.drafters.trained_head import HeadDrafter

    try:
        drafter = parse(text)
    except OptionError as error:
        raise OptionError(f"--head must be eagle3(model=…) or mtp(…); {error}") from None
    if not isinstance(drafter, HeadDrafter):
        raise OptionError(f"--head must be eagle3(model=…) or mtp(…), got {text}")
    return drafter


def examine(loaded: LoadedModel, head: HeadDrafter | None) -> dict[str, Any]:
    """Everything `doctor` finds out, as plain values; `head`: a drafter with a trained head."""
    from draftsmith.model.capabilities import DEPENDENT_ROWS
    from draftsmith.model.load import load
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
        "rows_independent": not any(r.startswith(DEPENDENT_ROWS) for r in capabilities.reasons),
    }
    prepack = loaded.prepacked is not None
    again = partial(load, loaded.name, None, device=loaded.device, prepack=prepack)
    seconds, left_out = compare_dtypes(loaded, lambda dtype: again(dtype=dtype))
    record["pass_seconds"], record["not_measured"] = seconds, left_out
    faithful = {"float32", model["dtype"], model["checkpoint_dtype"]}
    if builtin.is_gguf(loaded.name):  # its blocks of a few bits are rounded by more than bfloat16
        faithful.add("bfloat16")
    record["recommendation"] = recommend(seconds, faithful, capabilities.shape)
    record["trained_head"] = trained_head(loaded, head, seconds[loaded.dtype_name][1])
    return record


def trained_head(loaded: LoadedModel, head: HeadDrafter | None, plain: float) -> dict[str, Any]:
    """Which trained head fits, and what its step costs; `plain`: seconds of a plain pass."""
    from draftsmith.drafters.mtp import MTP
    from draftsmith.drafters.trained_head import BoundHead

    drafter = head or MTP()
    try:
        bound = drafter.bind(loaded.facts)
        assert isinstance(bound, BoundHead)
    except DraftsmithError as error:
        if head is not None:
            return {"refused": str(error)}
        width = getattr(loaded.config, "hidden_size", "unknown")
        fits = (
            "Its checkpoint has no trained head that can be used (--head mtp says why). An EAGLE-3 "
            f"head, --head 'eagle3(model=…)', must be trained for it: it reads states of the width "
            f"{width}, and names ids below {loaded.vocab_size}."
        )
        return {"explained": fits, "unusable": str(error)}
    spent = bound.step_seconds()
    cost = spent / plain
    explained = (
        f"{drafter} fits; a step of it takes {1000 * spent:.1f} ms, {cost:.2f} plain passes."
    )
    return {
        "drafter": str(drafter),
        "seconds": spent,
        "relative_cost": cost,
        "explained": explained,
    }


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
        "checkpoint_dtype": str(loaded.widened or loaded.dtype).removeprefix("torch."),
        "context_length": loaded.context_length,
        "vocab_size": loaded.vocab_size,
        "tokenizer": loaded.tokenizer is not None,
        "chat_template": bool(getattr(loaded.tokenizer, "chat_template", None)),
        "quantized": bool(getattr(loaded.model, "is_quantized", False)),
    }


def recommend(
    seconds: Mapping[str, Mapping[int, float]], faithful: Container[str], shape: str
) -> dict[str, Any]:
    """Which dtype, and whether drafts pay, in numbers and in sentences.

    `seconds`: dtype → tokens of a pass → seconds. Of the dtypes that hold the weights as well as
    the checkpoint does (`faithful`), float32 is recommended unless another one is clearly cheaper.
    """
    both = {name: _plain_and_wide(costs) for name, costs in seconds.items()}
    dtype = min((name for name in both if name in faithful), key=lambda name: sum(both[name]))
    if "float32" in both and sum(both[dtype]) > _CLEARLY_CHEAPER * sum(both["float32"]):
        dtype = "float32"
    costs = seconds[dtype]
    relative = {width: spent / costs[1] for width, spent in costs.items()}
    wide = max(width for width in costs if width <= _WIDE)
    said = [
        f"--dtype {dtype}: plain passes and those over {wide} tokens take {_ms(both[dtype])} ms"
    ]
    for name in both:
        if name != dtype:
            less = "" if name in faithful else " (which rounds these weights)"
            said.append(f"{_ms(both[name])} in {name}{less}")
    exact = (
        "answers are the same token for token with any drafter"
        if dtype == "float32"
        else "near-ties may fall differently with drafts than without"
    )
    explained = [f"{', '.join(said)}; {exact}.", _about_drafts(relative, shape)]
    if min(relative.values()) < _CLEARLY_CHEAPER:
        explained.append(
            "A wider pass took less time than a plain one, so other work disturbed these times: "
            "repeat on an idle machine."
        )
    return {"dtype": dtype, "relative_cost": relative, "explained": explained}


def _plain_and_wide(costs: Mapping[int, float]) -> tuple[float, float]:
    """Seconds of a plain pass, and of the widest up to `_WIDE`."""
    return costs[1], costs[max(width for width in costs if width <= _WIDE)]


def _ms(seconds: Sequence[float]) -> str:
    return " and ".join(f"{1000 * spent:.1f}" for spent in seconds)


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
    console.print("\nWhat it can do", style="bold")
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
        costs = ", ".join(f"{price:.2f}× for {width}" for width, price in priced)
        console.print(f"- exact=True: {exact['explained']}; passes cost {costs} tokens.")
    head = record["trained_head"]
    if "refused" in head:
        console.print(Text(f"- Refused: {head['refused']}", "yellow"))
    else:
        console.print(f"- {head['explained']}")
    console.print("\nMilliseconds of a pass, by how many tokens it covers", style="bold")
    costs = record["pass_seconds"]
    table = plain_table("tokens", *map(str, next(iter(costs.values()))))
    for name, seconds in costs.items():
        table.add_row(name, *(f"{1000 * s:.1f}" for s in seconds.values()))
        relative = (f"{s / seconds[1]:.2f}×" for s in seconds.values())
        table.add_row("  relative", *relative, style="dim")
    console.print(table)
    for name, reason in record["not_measured"].items():
        console.print(f"{name} was not tried: {reason}")
    if record["busy"]:
        console.print(f"({record['busy']})")
    console.print("\nRecommendation", style="bold")
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
