"""The card, its driver, and the time that is left."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch

from draftsmith.model import devices
from draftsmith.model.measure import processor

ROOM = 1.5
"""Memory that a model needs, in sizes of its weights, also while its dtype is changed."""


def driver() -> str:
    """Return the version of the card's driver, as far as a command reports it."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(asked[0]) is None:
        return "unknown"
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip().partition("\n")[0] or "unknown"


def facts(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the device, and what drives it."""
    on_cpu = args.device.type == "cpu"
    yield "device", processor() if on_cpu else devices.name_of(args.device)
    if not on_cpu:
        runtime = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
        found = [f"{name} {number}" for name, number in runtime.items() if number]
        yield "driver", ", ".join([driver(), *found])


def fits(weights: int, device: torch.device) -> bool:
    """Return whether a model with this many bytes of weights can be used on a device."""
    memory = devices.own_memory(device)
    return memory is None or ROOM * weights <= memory[1]


def late(args: argparse.Namespace) -> bool:
    """Return whether no measurement may begin any more."""
    return perf_counter() > args.ends


def timely(args: argparse.Namespace, name: str, key: Any, compute: Callable[[], Any]) -> Any:
    """Return the result, which is computed only if a measurement may begin; else None."""
    if late(args) and args.results.get([name, key, args.how]) is None:
        return None
    return args.results.recall([name, key, args.how], compute)
