"""SmolLM2 live, compared with transformers' own generation.

    python -m benchmarks.live_smollm2 DATA               # 50 minutes on two quiet cores
    python -m benchmarks.live_smollm2 DATA --as-loaded   # compared with layers as loaded
    python -m benchmarks.live_smollm2 DATA --head HEAD   # a trained head (`recipes/eagle3`)

Prompts of ten kinds, greedy, every arm in turn in one process: plain decoding, `model.generate`,
its prompt lookup at its best setting (`benchmarks/lookup.py`), and `auto` without and with
`draftsmith tune auto`, over one model with laid-out linear layers. With --as-loaded only those of
`auto` are laid out. In bfloat16, where the width of a pass changes its rounding, every arm must
give plain's answers (*dictated*).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from benchmarks import shared
from benchmarks.lookup import fastest, measured_cost
from benchmarks.shared import Blocks, Options, run, table
from draftsmith.cli import call
from draftsmith.core.sampling import SamplingParams
from draftsmith.lab.bench.arms import Arm, build, parse_arm
from draftsmith.lab.bench.report import facts, same
from draftsmith.lab.bench.run import RunPlan
from draftsmith.lab.bench.suites import read
from draftsmith.lab.bench.summary import Section, sections
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel

LOOKUP = "hf:prompt_lookup({})"
AS_LOADED = LOOKUP.format("tokens=7,ngram=4")
"""The best setting of transformers' prompt lookup on layers as loaded."""


def parser() -> Options:
    made = Options("live_smollm2", __doc__, data="needed")
    made.add_argument("-m", "--model", default="smollm2")
    made.add_argument("--dtypes", nargs="+", help="default: those that the processor computes in")
    made.add_argument("--as-loaded", action="store_true", help="lookup on the layers as loaded")
    made.add_argument("--head", help="folder of an EAGLE-3 head")
    made.add_size("--limit", 5, 1, "conversations of each kind")
    made.add_size("--max-new-tokens", 160, 8, "most tokens of an answer")
    return made


def arms(model: LoadedModel, plain: Path, args: argparse.Namespace) -> list[Arm]:
    """Return the arms; the first is the baseline."""
    if args.as_loaded:
        theirs = load(args.model, dtype=model.dtype_name, prepack=False)
        return [*build(theirs, [parse_arm(AS_LOADED)]), *build(model, [parse_arm("auto")])]
    cost = measured_cost(model, args.output / "answers", args.quick)
    best, head = LOOKUP.format(fastest(plain, cost)), f"eagle3(model={args.head})"
    rest = [head, f"auto(head={head})"] if args.head else ["hf:generate", "auto(tuned=False)"]
    return build(model, [parse_arm(name) for name in ("none", best, "auto", *rest)])


def by_kind(section: Section) -> str:
    """Return the setup, and a table with a line for each kind of prompt."""
    names = section.settings["arms"]
    heads = ["", "prompts", f"`{names[0]}`, tokens/s", *(f"`{name}`" for name in names[1:]),
             *(f"tokens/pass: `{name}`" for name in names), "same answers"]  # fmt: skip
    rows = []
    for part, summaries in section.tables.items():
        by_arm = {summary.arm: summary for summary in summaries}
        first, *rest = (by_arm[name] for name in names)
        speeds = (arm.speedup.shown("×") for arm in rest)
        passes = (f"{arm.tokens_per_pass:.2f}" for arm in (first, *rest))
        rows.append([(part or "all").removeprefix("spec_bench, "), f"{first.prompts}",
                     f"{first.tokens_per_second.value:.1f}", *speeds, *passes,
                     "; ".join(same(arm, own=False) for arm in rest)])  # fmt: skip
    lines = [f"- {name}: {value}" for name, value in facts(section)]
    own, others = [[n for n in names if n.startswith(kind)] for kind in ("auto", ("hf:p", "auto"))]
    lines += [f"- {a} over {b}: {shared.over(section.rows, a, b)}"
              for a, b in product(own, others) if a != b]  # fmt: skip
    return "\n".join([f"## {section.title}\n", *lines, "", table(heads, rows)])


def measure(args: argparse.Namespace) -> Blocks:
    args.name += ".as_loaded" * args.as_loaded + ".head" * bool(args.head)
    if not args.as_loaded and (failed := call(["tune", "auto", args.model])):
        raise SystemExit(failed)
    known = ["bfloat16"] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else []
    for dtype in args.dtypes or ["float32", *known]:
        model = load(args.model, dtype=dtype, prepack=True)
        asked, how = shared.live(args.data, args.limit), {"max_new_tokens": args.max_new_tokens}
        plan = RunPlan(model, build(model, [parse_arm("none")]), asked, SamplingParams(), **how)
        plain = shared.answers(args.output, f"live_smollm2.{dtype}.plain", plan).path
        more = {} if dtype == "float32" else {"records": read(plain).records, "dictate": True}
        plan = replace(plan, arms=arms(model, plain, args), **more)
        yield by_kind(*sections([shared.answers(args.output, f"{args.name}.{dtype}", plan).rows]))


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
