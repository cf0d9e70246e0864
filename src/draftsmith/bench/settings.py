"""What a live run's figures depend on; two runs may be put together only if it is the same."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from draftsmith.bench.arms import Arm
from draftsmith.bench.records import Record
from draftsmith.model.fingerprint import fingerprint
from draftsmith.model.loaded import LoadedModel, last_part
from draftsmith.model.measure import linear_layers, machine, versions
from draftsmith.storage import digest


def settings(
    model: LoadedModel,
    arms: Sequence[Arm],
    records: Sequence[Record],
    **chosen: Any,
) -> dict[str, Any]:
    """Everything that the rows of a run have in common, in plain values without host paths."""
    asked = [
        [r.id, r.suite, list(map(dict, r.messages)), r.prompt, r.prompt_ids, r.max_new_tokens]
        for r in records
    ]
    device = model.device
    return {
        "model": last_part(model.name),
        "weights": fingerprint(model),
        "dtype": model.dtype_name,
        "linear layers": linear_layers(model),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "arms": [arm.name for arm in arms],
        "prompts": f"{len(records)} ({digest(asked)[:12]})",
        **chosen,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`threads: 1 there, 2 now` for every setting that is not the same.

    The commit is left out: whoever works on a repository commits while a long run is paused.
    """
    names = [name for name in {**before, **now} if name != "commit"]
    return [
        f"{name}: {_shown(before.get(name))} there, {_shown(now.get(name))} now"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)


@cache
def commit() -> str | None:
    """Git commit of this source tree, `+` behind it if files differ; None if it is no checkout."""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    here = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
