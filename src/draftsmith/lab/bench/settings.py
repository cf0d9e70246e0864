"""Settings that a live run's figures depend on. Only runs with equal settings are combined."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from draftsmith.core.sampling import SamplingParams
from draftsmith.drafters import bigrams
from draftsmith.lab.bench.arms import SAMPLED, Ours
from draftsmith.lab.bench.machine import linear_layers, machine
from draftsmith.lab.bench.run import RunPlan
from draftsmith.lab.bench.sweep import corpora
from draftsmith.lab.fingerprint import fingerprint
from draftsmith.model.devices import name_of
from draftsmith.model.loaded import last_part
from draftsmith.model.measure import versions
from draftsmith.storage import digest


def settings(plan: RunPlan, **more: Any) -> dict[str, Any]:
    """Return what the rows of a run have in common, in plain values without host paths."""
    model, records = plan.model, plan.records
    asked = [
        [r.id, r.suite, list(map(dict, r.messages)), r.prompt, r.prompt_ids, r.max_new_tokens]
        for r in records
    ]
    answers = [[r.output, r.output_ids] for r in records]
    usual, own = SamplingParams(), plan.sampling
    filters = {n: getattr(own, n) for n in SAMPLED if getattr(own, n) != getattr(usual, n)}
    ours = [arm.engine.drafter for arm in plan.arms if isinstance(arm, Ours)]
    read = [header.sums for drafter in ours for header in corpora(drafter)]
    return {
        "model": last_part(model.name),
        "weights": fingerprint(model),
        "dtype": model.dtype_name,
        "linear layers": linear_layers(model),
        "device": name_of(model.device),
        "threads": torch.get_num_threads(),
        "arms": [arm.name for arm in plan.arms],
        "prompts": f"{len(records)} ({digest(asked)[:12]})",
        "temperature": own.temperature,
        "seed": own.seed,
        **filters,
        "max_new_tokens": plan.max_new_tokens,
        "warmup": plan.warmup,
        **({"dictated": digest(answers)} if plan.dictate else {}),
        "budgets": [arm.budget for arm in plan.arms],
        **({"corpora": digest(read)} if read else {}),
        **({} if bigrams.load(model.facts) is None else {"tuned": "auto"}),
        **more,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
    }


@cache
def commit() -> str | None:
    """Git commit of this source tree, with `+` if files differ; None if it is not a checkout.

    "unknown" with the reason if git fails.
    """
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    here = Path(__file__).parent
    if not any((folder / ".git").exists() for folder in here.parents):
        return None
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        message = getattr(error, "stderr", None) or str(error)
        return f"unknown ({message.strip().splitlines()[0]})"
    return done.stdout.strip()
