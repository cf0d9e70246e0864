"""Half precision beside float32: how many answers differ for its rounding, and how many for ours.

    python -m benchmarks.half_precision prompts.jsonl --model Qwen/Qwen2.5-0.5B-Instruct --limit 50

SPECTRA's appendix F: a pass over several positions rounds differently from one over a single
position, so in bfloat16 near ties can fall either way. Plain decoding in bfloat16 differs from
float32 for the same reason; the two counts belong side by side.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.shared import asks
from draftsmith import builtin
from draftsmith.bench import suites
from draftsmith.bench.arms import Ours, Spec, parse_arm
from draftsmith.bench.run import RunPlan
from draftsmith.core.sampling import SamplingParams
from draftsmith.drafters.registry import parse
from draftsmith.errors import LoadError
from draftsmith.model.agreement import first_difference
from draftsmith.model.load import load


@dataclass(frozen=True, slots=True)
class Difference:
    """How often one way of decoding gave another answer than another way."""

    of: str
    than: str
    prompts: int
    differing: int
    median_first: int | None
    """The median first token that differs, among the answers that do."""


def half(full: RunPlan, low: RunPlan, drafter: Spec) -> list[Difference]:
    """Answer the prompts of `full` plainly and with `drafter`, in float32 and in half precision.

    `full` and `low` differ in their model's dtype only. Raises LoadError if no prompt fits.
    """
    ways = {}
    for plan in (full, low):
        dtype = plan.model.dtype_name
        ways[f"plain, {dtype}"] = Ours(plan.model, Spec("plain", parse("none")))
        ways[f"{drafter.name}, {dtype}"] = Ours(plan.model, drafter)
    answers: dict[str, list[list[int]]] = {label: [] for label in ways}
    for _, ask in asks(full):
        greedy = replace(ask, sampling=replace(ask.sampling, temperature=0.0))
        for label, arm in ways.items():
            answers[label].append(arm.answer(greedy).tokens)
    exact, ours_exact, plain, ours = ways
    if not answers[exact]:
        raise LoadError("no prompt fits this model")
    pairs = [(plain, exact), (ours, plain), (ours, exact), (ours_exact, exact)]
    return [difference(a, b, answers[a], answers[b]) for a, b in pairs]


def difference(
    of: str, than: str, a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]
) -> Difference:
    """Count the answers in `a` that are not those in `b`."""
    found = [at for x, y in zip(a, b, strict=True) if (at := first_difference(x, y)) is not None]
    middle = sorted(found)[len(found) // 2] if found else None
    return Difference(of, than, len(a), len(found), middle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--model", default=builtin.DEFAULT)
    parser.add_argument("--drafter", default="copyspec@drafter", help="as `bench run --arm` has it")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--limit", type=int, help="prompts of each suite")
    parser.add_argument("--max-new-tokens", type=int)
    args = parser.parse_args()
    spec = parse_arm(args.drafter)
    if spec.drafter is None or spec.drafter.preferred_width() == 0:
        parser.error(f"--drafter {args.drafter} does not draft; give one that does, e.g. copyspec")
    read = [record for name in args.files for record in suites.read(name).records]
    records = suites.sample(read, args.limit)
    full, low = (
        RunPlan(load(builtin.resolve(args.model), dtype=dtype), [], records, SamplingParams(),
             max_new_tokens=args.max_new_tokens)
        for dtype in ("float32", args.dtype)
    )  # fmt: skip
    print(f"{'answers of':34}{'differ from':24}{'prompts':>8}{'differing':>16}{'first':>8}")
    for one in half(full, low, spec):
        share = f"{one.differing} ({one.differing / one.prompts:.0%})"
        first = "" if one.median_first is None else one.median_first + 1
        print(f"{one.of:34}{one.than:24}{one.prompts:8}{share:>16}{first:>8}")


if __name__ == "__main__":
    main()
