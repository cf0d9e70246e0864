"""Half precision compared with float32: answers that differ by its rounding, and by ours.

    python -m benchmarks.half_precision prompts.jsonl --model Qwen/Qwen2.5-0.5B-Instruct --limit 50

SPECTRA's appendix F: a pass over several positions rounds differently from one over a single
position, so near ties can be decided differently. Plain decoding in bfloat16 differs from float32
for the same reason. Every first turn that fits the model is answered plainly and with --drafter, in
both dtypes. The table counts answers that differ, and where.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.shared import Blocks, Options, answers, run, table
from draftsmith.core.sampling import SamplingParams
from draftsmith.lab.bench.arms import build, parse_arm
from draftsmith.lab.bench.run import RunPlan
from draftsmith.lab.bench.suites import read, sample
from draftsmith.model.agreement import first_difference
from draftsmith.model.load import load

FULL = "float32"
HEADS = ("answers of", "differ from", "prompts", "differing", "first, median")


def parser() -> Options:
    made = Options("half_precision", __doc__)
    made.add_argument("files", nargs="+")
    made.add_argument("-m", "--model", default="smollm2")
    made.add_argument("--drafter", default="copyspec@drafter", help="as `bench run --arm` has it")
    made.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    made.add_size("--limit", 50, 1, "conversations of each suite")
    made.add_size("--max-new-tokens", 256, 8, "most tokens of an answer")
    return made


Found = Mapping[str, Sequence[Sequence[int]]]


def difference(found: Found, of: str, than: str) -> list[str]:
    """Return a line of the table: how many answers of one arm differ from another's."""
    pairs = zip(found[of], found[than], strict=True)
    first = sorted(at for a, b in pairs if (at := first_difference(a, b)) is not None)
    share = f"{len(first)} ({len(first) / len(found[of]):.0%})"
    return [of, than, f"{len(found[of])}", share, f"{first[len(first) // 2] + 1}" if first else ""]


def measure(args: argparse.Namespace) -> Blocks:
    drafter, plain = parse_arm(args.drafter), parse_arm("none")
    if drafter.drafter is None or drafter.drafter.preferred_width() == 0:
        raise SystemExit(f"--drafter {args.drafter} does not draft; give one that does")
    records = [record for name in args.files for record in read(name).records if record.turn == 1]
    arms = []
    for dtype in (FULL, args.dtype):
        model = load(args.model, dtype=dtype, prepack=True)
        specs = [replace(spec, name=f"{spec.name}, {dtype}") for spec in (plain, drafter)]
        arms += build(model, specs)
    how = {"max_new_tokens": args.max_new_tokens}
    plan = RunPlan(model, arms, sample(records, args.limit), SamplingParams(), **how)
    rows = sorted(answers(args.output, "half_precision", plan).rows, key=lambda row: row.id)
    names = [arm.name for arm in arms]
    found = {name: [row.output_ids for row in rows if row.arm == name] for name in names}
    exact, ours_exact, half, ours = names
    pairs = ((half, exact), (ours, half), (ours, exact), (ours_exact, exact))
    yield table(HEADS, [difference(found, *pair) for pair in pairs])


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
