"""Threads that have computed leave no team of OpenMP's workers behind (`engine/openmp.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from draftsmith.engine.openmp import _pause

SCRIPT = """
import json, os, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
from draftsmith import Engine
from draftsmith.engine.openmp import end_team
from tests import tiny

def workers():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

def compute(ids=None, scores=None):
    torch.rand(1 << 20).exp()  # large enough for every worker
    return scores

torch.set_num_threads(3)
model, tokenizer = tiny.model(), tiny.tokenizer()
end_team()
before = workers()  # of others: making a model leaves some
compute()
loaded = workers()
engine = Engine.from_pretrained(model, tokenizer=tokenizer, drafter="none")
made = workers()

def answer(_):
    with alone:
        engine.generate("hello", max_new_tokens=4, processors=compute)
    together.wait()  # so that each has a thread of its own, which lives on

alone, together = threading.Lock(), threading.Barrier(3)
with ThreadPoolExecutor(3) as pool:
    list(pool.map(answer, range(3)))
    answered = workers()

computing = threading.Event()

def held_up(ids, scores):
    computing.set()
    while not engine.scheduler._turn.awaited:
        time.sleep(0.001)
    return compute(ids, scores)

engine.scheduler.add(engine.prepare({"processors": held_up}).job([1, 2, 3]))
with ThreadPoolExecutor(2) as pool:
    first = pool.submit(engine.scheduler.step)
    computing.wait()
    pool.submit(engine.scheduler.step).result()  # waits for the first
    first.result()
    handed_over = workers()
print(json.dumps([n - before for n in (loaded, made, answered, handed_over)]))
"""


@pytest.mark.skipif(_pause() is None, reason="only GNU's OpenMP keeps a team for every thread")
def test_threads_leave_no_team_behind() -> None:
    """Else all together are more than there are cores, and each sleeps between two operations."""
    given = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=given, check=True
    )
    loaded, made, answered, handed_over = json.loads(run.stdout)
    assert loaded == 2, "two workers help the one that computes"
    assert made == 0, "other threads may ask the engine"
    assert answered == 0
    assert handed_over == 0, "another thread may make the next step"
