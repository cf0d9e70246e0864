"""vLLM itself with its own proposers and with ours, on the same prompts.

    python -m benchmarks.vllm_live FOLDER PROMPTS.jsonl

In the Python that has vLLM installed; each proposer in a process of its own
(`benchmarks/vllm_session.py`), all prompts at once, greedily. FOLDER is a model's, a line of
PROMPTS.jsonl a list of token ids. The table has tokens per pass, drafted tokens, answers equal to
those without drafts, and microseconds of drafting.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

from benchmarks.shared import Blocks, Options, run, table

HEADS = ("proposer", "tokens a pass", "drafted", "µs a request and step", "seconds",
         "plain's answers")  # fmt: skip


def parser() -> Options:
    made = Options("vllm_live", __doc__)
    made.add_argument("folder", help="of the model")
    made.add_argument("prompts", type=Path)
    made.add_argument("--width", type=int, default=4, help="most drafted tokens")
    made.add_size("--tokens", 64, 8, "tokens of an answer")
    return made


def arms(width: int) -> dict[str, dict[str, Any]]:
    """Return the options of vLLM for each proposer."""
    most = {"num_speculative_tokens": width}
    ours = {"method": "custom_class", "model": "draftsmith.integrations.vllm.Proposer", **most}
    found: dict[str, dict[str, Any]] = {
        "plain": {},
        "ngram(1..3)": {"speculative_config": {
            "method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, **most}},
        "suffix": {"speculative_config": {"method": "suffix", **most}},
    }  # fmt: skip
    for drafter in ("copyspec", "prompt_lookup", "auto"):
        options = {"draftsmith": {"drafter": drafter}}
        found[drafter] = {"speculative_config": ours, "additional_config": options}
    return found


def session(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a process of its own and return its result; raise its last line of output."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("vllm_session.py"))],
        input=json.dumps(job), capture_output=True, text=True,
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    made = next(line for line in done.stdout.splitlines() if line.startswith('{"answers"'))
    found: dict[str, Any] = json.loads(made)
    return found


def measure(args: argparse.Namespace) -> Blocks:
    asked = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    rows, plain = [], None
    for name, options in arms(args.width).items():
        llm = {
            "model": args.folder, "dtype": "float32", "enforce_eager": True, "seed": 0,
            "max_model_len": 2048, "max_num_seqs": 32, "disable_log_stats": False, **options,
        }  # fmt: skip
        job = {"llm": llm, "prompts": asked, "max_tokens": args.tokens, "one_process": True}
        try:
            found = args.results.recall([name, job], partial(session, job))
        except RuntimeError as error:
            rows.append([name, f"{error}", *[""] * 4])
            continue
        answers, counts = found["answers"][0], found["metrics"]
        plain = answers if name == "plain" else plain
        drafted, accepted = (counts.get(f"vllm:spec_decode_num_{what}_tokens", 0)
                             for what in ("draft", "accepted"))  # fmt: skip
        passes = counts["vllm:generation_tokens"] - accepted
        same = "" if plain is None else f"{sum(map(eq, plain, answers))} of {len(asked)}"
        figures = (f"{counts['vllm:generation_tokens'] / passes:.2f}", f"{drafted / passes:.2f}",
                   f"{1e6 * found['seconds'] / max(1, found.get('asked', 0)):.0f}")  # fmt: skip
        rows.append([name, *figures, f"{found['wall']:.1f}", same])
    yield table(HEADS, rows)


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
