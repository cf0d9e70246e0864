"""Bandwidth of the device's memory, and milliseconds of a pass by its rows and width."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from statistics import median

import torch

from benchmarks.gpu.card import timely
from benchmarks.gpu.models import Model
from benchmarks.shared import table, timed
from draftsmith.model.measure import pass_cost

DTYPE = torch.bfloat16
CONTEXT = 256
HEADS = ("store", "rows", "tokens of each", "ms", "over one token", "over reading the weights")


def bandwidth(args: argparse.Namespace) -> float:
    """Return the bytes per second that a copy on the device reads and writes."""
    source = torch.ones(args.mib << 20, dtype=torch.uint8, device=args.device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if args.device.type != "cpu":
            torch.accelerator.synchronize(args.device)

    return 2 * source.nbytes / median(timed([copy], args.runs)[0])


def curve(model: Model, speed: float, args: argparse.Namespace) -> Iterator[str]:
    """Yield the cost of steps of our loop without drafters, by rows and width of their pass."""
    size, rows = model.bytes(DTYPE), list[list[str]]()
    least = size / speed
    for store, count in product(args.store, args.rows):

        def measured(store: str = store, count: int = count) -> dict[str, float]:
            loaded = model.loaded(DTYPE, store)
            widths = pass_cost(loaded, args.widths, CONTEXT, args.runs, count)
            return {f"{width}": seconds for width, seconds in widths.items()}

        key = [model.shape, store, count, args.widths, args.runs]
        if (found := timely(args, "passes", key, measured)) is None:
            break
        one = found[min(found, key=int)]
        rows += [[store, f"{count}", width, f"{1e3 * seconds:.2f}", f"{seconds / one:.2f}×",
                  f"{seconds / least:.2f}×"] for width, seconds in found.items()]  # fmt: skip
    if not rows:
        return
    yield (
        f"## {model.shape}, bfloat16: passes after {CONTEXT} tokens\n\n{table(HEADS, rows)}\n\n"
        f"A pass reads {size / 1e9:.2f} GB of weights: {1e3 * least:.2f} ms at this bandwidth."
    )
