"""SDSAT's speed with a trained model: every k, one pass and two, trees, and beside copying.

    python -m benchmarks.live_prompts ../shared/data -o prompts.jsonl
    python -m benchmarks.sdsat_speed MODEL prompts.jsonl -o sdsat/

Four live runs in the folder, each with its table: greedy with k from 1 to 13, in two passes and in
one, as in the paper's figures 3 and 4; copying and adaptive tokens alone and together; trees at
T = 0.2 and T = 1 with top-k 10 and top-p 0.95, as in its table 4. What is there is not measured
again, so a killed run goes on. Compare arms of one run only: its prompts were answered in turn.
"accepted" counts per pass that carried a draft. One pass needs a model that verifies trees; where
the self-test finds that it does not (`draftsmith doctor`), the table says so, and --dtype float32
may help.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from draftsmith.bench import suites
from draftsmith.bench.arms import Spec, build, parse_arm
from draftsmith.bench.generations import ResultFile
from draftsmith.bench.records import Record
from draftsmith.bench.run import RunPlan, measure
from draftsmith.bench.settings import settings
from draftsmith.bench.summary import Section, sections
from draftsmith.cli.loading import busy
from draftsmith.core.sampling import SamplingParams
from draftsmith.engine import request
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel

DEPTHS = range(1, 14)
WIDTHS = (8, 16, 24, 32, 48)
"""Nodes of a pass that drafts and asks at once; without a number every prefix gets k questions."""
TREES = (5, 7, 9, 11, 13)

GREEDY = [
    "none@0",
    *(f"sdsat(k={k})@drafter" for k in DEPTHS),
    *(f"sdsat(k={k},passes=1)@drafter" for k in DEPTHS),
    *(f"sdsat(k=13,passes=1)@{width}" for width in WIDTHS),
    "sdsat(k=13)@auto",
    "sdsat(k=13,passes=1)@auto",
]
TOGETHER = [
    "none@0",
    *(f"{drafter}@{budget}" for budget in (16, "auto") for drafter in (
        "copyspec", "sdsat(k=13)", "sdsat(k=13,passes=1)",
        "copyspec+sdsat(k=13)", "copyspec+sdsat(k=13,passes=1)",
    )),
]  # fmt: skip
SAMPLED = [
    "none@0",
    *(f"sdsat(k={k})@drafter" for k in TREES),
    *(f"sdsat(k={k},tree={nodes})@drafter" for k in TREES for nodes in (16, 32, 64)),
    *(f"sdsat(k={k},tree=(3,2,1))@drafter" for k in TREES),
    *(f"sdsat(k={k},passes=1)@24" for k in TREES),
]
PARTS: dict[str, tuple[list[str], dict[str, float]]] = {
    "greedy": (GREEDY, {"temperature": 0.0}),
    "together": (TOGETHER, {"temperature": 0.0}),
    "T=0.2": (SAMPLED, {"temperature": 0.2, "top_k": 10, "top_p": 0.95, "seed": 0}),
    "T=1": (SAMPLED, {"temperature": 1.0, "top_k": 10, "top_p": 0.95, "seed": 0}),
}


def answered(
    model: LoadedModel,
    records: Sequence[Record],
    specs: Sequence[Spec],
    sampling: SamplingParams,
    path: Path,
    runs: int,
    tokens: int,
) -> Section:
    """Every prompt by every arm; what the file has is kept."""
    plan = RunPlan(model, build(model, specs), records, sampling, runs, max_new_tokens=tokens)
    common = settings(plan, top_k=sampling.top_k, top_p=sampling.top_p)

    def advance(count: int) -> None:
        done[0] += count
        print(f"\r{path.stem}: {done[0]} of {plan.size} answers", end="", file=sys.stderr)

    done = [0]
    file = ResultFile(path, common)
    for line in measure(plan, file, advance):
        print(f"\n{line}", file=sys.stderr)
    print(file=sys.stderr)
    return sections([file.rows])[0]


def table(section: Section) -> str:
    """Markdown, an arm a row."""
    lines = [
        "| arm | tokens/s over plain | tokens/pass | accepted | equal answers |",
        "|---|---|---|---|---|",
    ]
    for arm in section.whole:
        stats = arm.stats
        accepted = stats.accepted / stats.attempts if stats is not None and stats.attempts else 0.0
        lines.append(
            f"| `{arm.arm}` | {arm.speedup.shown('')} | {arm.tokens_per_pass:.2f} | "
            f"{accepted:.2f} | {arm.identical} of {arm.compared} |"
        )
    return "\n".join(lines)


def limits(model: LoadedModel) -> str:
    """Why one pass and trees are not what they should be here; empty where they are."""
    able = model.capabilities
    return "" if able.shape == "tree" else f"\n{able.shape} only: {'; '.join(able.reasons)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("sdsat"))
    parser.add_argument("-p", "--part", choices=PARTS, action="append")
    parser.add_argument("-n", "--number", type=int, default=12, help="prompts, evenly spread")
    parser.add_argument("-r", "--runs", type=int, default=2)
    parser.add_argument("-t", "--tokens", type=int, default=192, help="of an answer")
    parser.add_argument("-a", "--arm", action="append", help="instead of the part's own")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    records = suites.sample(suites.read(args.prompts).records, args.number)
    model = load(args.model, dtype=args.dtype)
    args.output.mkdir(parents=True, exist_ok=True)
    if warning := busy():
        print(f"note: {warning}", file=sys.stderr)
    for part in args.part or PARTS:
        arms, options = PARTS[part]
        specs = [parse_arm(arm) for arm in args.arm or arms]
        sampling = request.sampling(model, options)
        path = args.output / f"{part}.jsonl"
        section = answered(model, records, specs, sampling, path, args.runs, args.tokens)
        page = f"## {part}: {section.title}\n\n{table(section)}\n{limits(model)}"
        (args.output / f"{part}.md").write_text(page, encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main()
