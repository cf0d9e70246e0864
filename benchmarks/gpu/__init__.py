"""One accelerator in ten minutes: correct tokens, cost of passes, tokens per second.

    python -m benchmarks.gpu DATA            # the recorded answers of a folder
    python -m benchmarks.gpu                 # three edits that the built-in model makes
    python -m benchmarks.gpu --quick         # toy sizes, also on a CPU, in less than a minute

Llamas of the shapes of Llama-3.2-1B and Llama-3.1-8B with random weights, so nothing is downloaded.
The most important figures come first: correctness at a small shape, bandwidth, and then, for every
shape, correctness, the cost of passes, and answers. Every figure is on disk as soon as it is known.
No measurement begins after --seconds; the same command then goes on with what is missing. The exit
code is 1, and nothing more is measured, if drafted decoding gives other tokens than plain decoding.
"""

from __future__ import annotations

import argparse
from functools import partial
from time import perf_counter
from typing import get_args

import torch

from benchmarks.gpu import answers, card, checks, passes
from benchmarks.gpu.models import Model
from benchmarks.shared import Blocks, Options, table
from draftsmith.errors import OptionError
from draftsmith.model import devices
from draftsmith.model.loaded import Store


def parser() -> Options:
    made = Options("gpu", __doc__, data="optional")
    made.add_argument("--device", help="default: the accelerator, if there is one")
    made.add_argument("--store", nargs="+", choices=get_args(Store), default=get_args(Store),
                      help="stores of keys and values; static: with CUDA graphs")  # fmt: skip
    made.add_size("--shapes", ["1b", "8b"], ["toy"], "shapes", nargs="+", type=str)
    made.add_size("--limit", 6, 2, "recorded answers")
    made.add_size("--tokens", 256, 24, "most tokens of an answer")
    made.add_size("--widths", [1, 2, 4, 8, 16, 32, 64], [1, 4], "tokens of a pass", nargs="+")
    made.add_size("--rows", [1, 8], [1, 2], "rows of a pass", nargs="+")
    made.add_size("--runs", 20, 3, "passes of each width, and copies")
    made.add_size("--mib", 1024, 16, "MiB that are copied")
    made.add_size("--seconds", 480, 480, "no measurement begins later")
    return made


def measure(args: argparse.Namespace) -> Blocks:
    if args.quick and args.data:
        raise OptionError("--quick takes no DATA: its model has too small a vocabulary for it")
    args.ends = perf_counter() + args.seconds
    args.device = devices.usual() if args.device is None else torch.device(args.device)
    args.how = {"device": devices.name_of(args.device), "driver": card.driver()}
    yield table(("measured on", ""), card.facts(args))
    speed = 0.0
    for shape in dict.fromkeys(["toy" if args.quick else "small", *args.shapes]):
        model = Model(shape, args.device)  # which frees the one before
        if (yield from checks.compare(model, args)):
            return True
        if not speed:
            key = ["bandwidth", args.mib, args.runs, args.how]
            speed = args.results.recall(key, partial(passes.bandwidth, args))
            yield f"A copy of {args.mib} MiB reads and writes {speed / 1e9:,.0f} GB/s."
        if shape in args.shapes and card.fits(model.bytes(passes.DTYPE), args.device):
            yield from passes.curve(model, speed, args)
            yield from answers.compare(model, args)
    if card.late(args):
        yield f"The {args.seconds} seconds are over; the same command goes on."
    return False
