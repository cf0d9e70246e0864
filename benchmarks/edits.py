"""Ten real edits of held-out files: speed and quality of the answers.

    python -m benchmarks.edits DATA                        # the model's own answers
    python -m benchmarks.edits DATA --answers commit       # the commits' new files
    python -m benchmarks.edits DATA --write prompts.jsonl  # only write them, for `draftsmith bench`

The edits are held-out commits of pallets/flask and TheAlgorithms/Python, on which the built-in
models were not trained: those with the lowest hashes that fit into the context. A small model
mostly returns the file unchanged, which is easy to copy. With `--answers commit` every arm is
forced to give the commit's new file. Seconds are compared edit by edit. Quality is the similarity
(difflib's, by characters) to the commit's new file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import shared
from benchmarks.shared import Blocks, Options, run, seconds, table
from draftsmith.core.sampling import SamplingParams
from draftsmith.lab.bench.arms import build, parse_arm
from draftsmith.lab.bench.generations import Generation
from draftsmith.lab.bench.run import RunPlan
from draftsmith.lab.bench.suites import read
from draftsmith.model.load import load
from draftsmith.storage import write_text

ARMS = ("none", "copyspec(gamma=3,block=10)", "prompt_lookup", "auto", "hf:generate",
        "hf:prompt_lookup(tokens=10)")  # fmt: skip
PLAIN, LOOKUP = ARMS[0], ARMS[-1]


def parser() -> Options:
    made = Options("edits", __doc__, data="needed")
    made.add_argument("-m", "--model", default="edit-7m")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--answers", choices=["model", "commit"], default="model")
    made.add_argument("--write", type=Path, help="only write the prompts, to this file")
    made.add_size("--limit", 10, 2, "edits")
    made.add_size("--context", 4096, 600, "most tokens of prompt and answer")
    made.add_size("--runs", 3, 1, "answers of every arm to every edit")
    return made


def asked(edit: dict[str, Any]) -> dict[str, Any]:
    """Return an edit as `draftsmith bench` reads prompts, with the commit's new file as output."""
    name = f"{edit['repository']}/{edit['commit'][:12]}/{edit['path']}"
    return {"id": name, "suite": edit["repository"], "messages": edit["messages"],
            "output": edit["after"], "max_new_tokens": edit["limit"]}  # fmt: skip


def quality(rows: Sequence[Generation], before: dict[str, str]) -> str:
    """Return the quality of the answers; `before` has the old files by id."""

    def close(texts: Iterable[str]) -> float:
        pairs = zip(texts, (str(row.reference) for row in rows), strict=True)
        return median(SequenceMatcher(None, *pair, autojunk=False).ratio() for pair in pairs)

    differ = sum(row.text.strip() != before[row.id].strip() for row in rows)
    exact = sum(row.text.strip() == str(row.reference).strip() for row in rows)
    return (
        f"{differ} of {len(rows)} answers differ from the old file, {exact} are the commit's, "
        f"{sum(row.finish_reason == 'stop' for row in rows)} ended by themselves; "
        f"median similarity to the commit's {close(row.text for row in rows):.3f}, "
        f"of the old files {close(before[row.id] for row in rows):.3f}"
    )


def measure(args: argparse.Namespace) -> Blocks:
    model = load(args.model, dtype=args.dtype, prepack=True)
    edits = [*islice(shared.held_out(args.data, model.tokenizer, args.context), args.limit)]
    args.name += f".{args.answers}"
    path = args.write or args.output / "edits.prompts.jsonl"
    write_text(path, "".join(json.dumps(asked(edit)) + "\n" for edit in edits))
    if args.write:
        return
    arms, dictate = build(model, [parse_arm(arm) for arm in ARMS]), args.answers == "commit"
    plan = RunPlan(model, arms, read(path).records, SamplingParams(), args.runs, dictate=dictate)
    found, rows = shared.answers(args.output, args.name, plan).rows, []
    by_arm = {arm: [row for row in found if row.arm == arm] for arm in ARMS}
    for arm, own in by_arm.items():
        same = sum(row.divergence is None for row in own)
        others = (seconds(by_arm[name]) for name in (PLAIN, LOOKUP))
        speeds = (shared.shown(other, seconds(own)) for other in others)
        rows.append((f"`{arm}`", *speeds, f"{same} of {len(own)}"))
    heads = ("", "speed over plain", "over transformers' prompt lookup", "same answer")
    yield f"{len(edits)} edits, answers: {args.answers}'s, {args.dtype}\n\n{table(heads, rows)}"
    yield quality(by_arm[PLAIN], {asked(edit)["id"]: edit["before"] for edit in edits})


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
