"""What `draftsmith bench run` adds to the time of generating without it, in paired runs.

    python -m benchmarks.bench_overhead prompts.jsonl --dtype bfloat16 --threads 2

Two arms in turn: the bench with plain decoding (file, rows, memory, comparison and all), and a bare
loop of `engine.generate` over the same prompts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.paired import in_turn, ratio
from benchmarks.shared import asks
from draftsmith import builtin
from draftsmith.bench import suites
from draftsmith.bench.arms import build, parse_arm
from draftsmith.bench.generations import ResultFile
from draftsmith.bench.run import RunPlan, encoded, measure
from draftsmith.bench.settings import settings
from draftsmith.core.sampling import SamplingParams
from draftsmith.engine.engine import Engine
from draftsmith.model.load import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--arm", default="none")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load(builtin.path(), dtype=args.dtype)
    records = [record for name in args.files for record in suites.read(name).records]
    spec = parse_arm(args.arm)
    plan = RunPlan(model, build(model, [spec]), records, SamplingParams(), warmup=0,
                max_new_tokens=args.max_new_tokens)  # fmt: skip
    engine = Engine(model, drafter=spec.drafter or "none", budget=spec.budget, prefixes=0)

    def with_bench() -> None:
        with tempfile.TemporaryDirectory() as folder:
            measure(plan, ResultFile(Path(folder) / "results.jsonl", settings(plan)))

    # From the same prompts: tokenizing them is no part of the bench's own share.
    prompts = [(record, ask.limit) for record, ask in asks(plan)]

    def bare() -> None:
        for record, limit in prompts:
            ids = encoded(model, record)
            engine.generate(ids, max_new_tokens=limit, temperature=0.0)

    benched, plain = in_turn([with_bench, bare], args.pairs)
    found = ratio(benched, plain)
    print(f"{len(prompts)} prompts, {args.pairs} pairs: with the bench {found.a_seconds:.2f} s, "
          f"without {found.b_seconds:.2f} s, ratio {found}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
