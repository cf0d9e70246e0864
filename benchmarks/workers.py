"""A checkout of draftsmith that answers prompts in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.turns import Guard

WORKER = """
import json, sys
from time import perf_counter
import torch
torch.set_num_threads(int(sys.argv[3]))
from draftsmith import Engine
engine = Engine.from_pretrained(sys.argv[1], dtype=sys.argv[2], prefixes=0)
for line in sys.stdin:
    prompts, drafter, tokens = json.loads(line)
    begin = perf_counter()
    found = engine.generate(prompts, drafter=drafter, max_new_tokens=tokens, temperature=0.0)
    seconds = perf_counter() - begin
    print("@" + json.dumps([seconds, [one.tokens for one in found]]), flush=True)
"""


class Checkout:
    """A process that answers with the code of one checkout."""

    def __init__(self, source: Path, model: str, dtype: str, threads: int) -> None:
        words = [sys.executable, "-c", WORKER, model, dtype, str(threads)]
        env = os.environ | {"PYTHONPATH": str(source.resolve())}
        self._process = subprocess.Popen(
            words, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._guard = Guard(self._process.pid)

    def ask(self, *call: Any) -> tuple[float, list[list[int]]]:
        """Return the seconds of a call, and the tokens of its answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("@"):
                seconds, tokens = json.loads(line[1:])
                return seconds, tokens
        raise SystemExit("a checkout ended; the lines above say why")

    def close(self) -> None:
        """End the process."""
        with self._process:
            self._process.kill()
        self._guard.close()
