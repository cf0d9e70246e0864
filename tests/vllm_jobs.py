"""Runs jobs of benchmarks/vllm_session.py, each in a fork of one process.

Importing vLLM takes longer than most jobs. Reads a job a line, writes its exit status a line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import vllm_session
from vllm import LLM  # noqa: F401  for all jobs


def run(job: dict[str, Any]) -> None:
    """Write the job's result and its log to files."""
    with open(job["log"], "w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    os.environ.update(job["environment"])
    Path(job["result"]).write_text(json.dumps(vllm_session.run(job)), encoding="utf-8")


if __name__ == "__main__":
    for line in sys.stdin:
        if not os.fork():
            run(json.loads(line))
            break
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
