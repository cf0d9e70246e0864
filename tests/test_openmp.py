"""Threads that may have computed leave no team of OpenMP's workers behind (`model/openmp.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.model.openmp import _pause

SCRIPT = """
import json, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, {tests!r})
import tiny
import torch
from draftsmith import Engine, accelerate
from draftsmith.model.openmp import end_team

def workers():
    # A thread that has been joined may still be listed for a moment.
    return min(count() for _ in range(20))

def count():
    time.sleep(0.01)
    return len(os.listdir("/proc/self/task")) - threading.active_count()

def compute(ids=None, scores=None):
    torch.rand(1 << 20).exp()  # large enough for every worker
    return scores

torch.set_num_threads(3)
model, tokenizer = tiny.model(), tiny.tokenizer()
end_team()
before = workers()  # of others: making a model leaves some
compute()
seen = {{"computed": workers()}}
accelerate(model).restore()
seen["accelerated"] = workers()
compute()
engine = Engine.from_pretrained(model, tokenizer=tokenizer, drafter="none")
seen["loaded"] = workers()

def answer(_):
    with alone:
        engine.generate("hello", max_new_tokens=4, processors=compute)
    together.wait()  # so that each has a thread of its own, which lives on

alone, together = threading.Lock(), threading.Barrier(3)
with ThreadPoolExecutor(3) as pool:
    list(pool.map(answer, range(3)))
    seen["answered"] = workers()

driving, computed = threading.Event(), threading.Event()

def held_up(ids, scores):
    compute()
    own = workers()
    driving.set()
    computed.wait()
    for _ in range(100):  # the other one is about to wait
        seen["waiting"] = before + workers() - own
        if seen["waiting"] == before:
            break
    return scores

def wait():
    compute()
    computed.set()
    engine.generate([4, 5, 6], max_new_tokens=1)

with ThreadPoolExecutor(2) as pool:
    first = pool.submit(engine.generate, [1, 2, 3], max_new_tokens=1, processors=held_up)
    driving.wait()
    pool.submit(wait).result()
    first.result()

compute()
child = os.fork()
if not child:
    compute()
    end_team()
    os._exit(0)
seen["forked"] = os.waitpid(child, 0)[1] + before
print(json.dumps({{when: number - before for when, number in seen.items()}}))
"""


@pytest.mark.slow
@pytest.mark.skipif(_pause() is None, reason="only GNU's OpenMP keeps a team for every thread")
def test_threads_leave_no_team_behind() -> None:
    """Else all together are more than there are cores, and each sleeps between two operations."""
    kept = {name: value for name, value in os.environ.items() if "OMP_" not in name}
    code = SCRIPT.format(tests=str(Path(__file__).parent))
    run = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=kept, check=True,
        timeout=1800,
    )  # fmt: skip
    left = json.loads(run.stdout)
    assert left.pop("computed") == 2, "two workers help the one that computes"
    assert left == dict.fromkeys(["accelerated", "loaded", "answered", "waiting", "forked"], 0)
