"""CopySpec's share of copied tokens, ours and the paper's.

    python -m benchmarks.papers DATA
    python -m benchmarks.papers DATA --quick

No model is run: answers that the paper's model gave are replayed.
"""

from __future__ import annotations

import argparse

from benchmarks.shared import Blocks, Options, recorded, run, table
from draftsmith.core.stats import total
from draftsmith.drafters.registry import parse
from draftsmith.lab.bench.encoding import Encoding
from draftsmith.lab.bench.suites import sample
from draftsmith.lab.bench.sweep import Replayer, sweep

COPYSPEC = "copyspec(gamma=3, block=10)"
COPIED = {"mt_redundant": 0.3235, "mt_bench": 0.2053}
"""CopySpec, table 1, Qwen2.5-72B: share of copied output tokens, both turns."""


def parser() -> Options:
    made = Options("papers", __doc__, data="needed")
    made.add_size("--limit", None, 1, "conversations of each suite")
    return made


def measure(args: argparse.Namespace) -> Blocks:
    replayer, lines = Replayer(Encoding((args.data / "tokenizers",))), []
    for suite, share in COPIED.items():
        records = sample(recorded(args.data, suite), args.limit)
        found = sweep(records, [parse(COPYSPEC)], replayer, finished=args.results.finished)
        ours = total([one.replay.stats for one in found.done]).accepted_share
        lines.append((f"CopySpec, {suite}, copied", f"{share:.2%}", f"{ours:.2%}"))
    yield table(("", "theirs", "ours"), lines)


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
