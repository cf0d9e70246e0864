"""`auto` as engines run it, beside transformers' prompt lookup on the layers as they were loaded.

    python -m benchmarks.as_loaded ../shared/data            # about 20 minutes on two quiet cores
    python -m benchmarks.as_loaded ../shared/data --limit 1 --max-new-tokens 16 -o /tmp/try

All turns of the prompts of `live_smollm2`, greedy, in turn in one process. Only `auto`'s model has
its linear layers laid out, so this is what someone gains who comes from `model.generate`;
`live_smollm2` compares drafters on the same layers. Where rounding depends on a pass's width
(bfloat16), both arms are made to give the answers that plain decoding gave before, so that they
write the same. The same command goes on after an interruption: prompts and answers stay in
`answers/`, what lies beside it is figures.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.live_smollm2 import FILES, short
from benchmarks.shared import table
from draftsmith.bench.arms import build, parse_arm
from draftsmith.bench.generations import Generation, ResultFile
from draftsmith.bench.report import facts, same
from draftsmith.bench.run import RunPlan, measure
from draftsmith.bench.settings import settings
from draftsmith.bench.suites import read, sample
from draftsmith.bench.summary import Section, sections
from draftsmith.core.sampling import SamplingParams
from draftsmith.model.load import load
from draftsmith.storage import write_text

LOOKUP = "hf:prompt_lookup(tokens=7,ngram=4)"
"""Its best on these layers: of 3, 4, 5, 7 and 10 tokens within 2 % of the fastest."""
HEADS = ("", "prompts", "prompt lookup, tokens/s", "`auto`, tokens/s", "`auto` / prompt lookup",
         "tokens/pass: lookup", "`auto`", "same answer")  # fmt: skip


def tell(section: Section) -> str:
    """The table of one dtype: a line per part of the prompts."""
    rows = [
        [
            short(part),
            str(auto.prompts),
            f"{lookup.tokens_per_second.value:.1f}",
            f"{auto.tokens_per_second.value:.1f}",
            auto.speedup.shown("×"),
            f"{lookup.tokens_per_pass:.2f}",
            f"{auto.tokens_per_pass:.2f}",
            same(auto, own=False),
        ]
        for part, (lookup, auto) in section.tables.items()
    ]
    known = dict(facts(section))
    told = f"{known['Machine']}, {known['Runs in']}, measured {known['Measured']}"
    return f"## {section.settings['dtype']}\n\n{told}.\n\n{table(HEADS, rows)}"


def run(plan: RunPlan, path: Path, **told: str) -> list[Generation]:
    """All rows of a plan, of which those in the file are there already."""
    file = ResultFile(path, settings(plan, **told))
    for line in measure(plan, file, lambda _: print(".", end="", flush=True)):
        print(line)
    return file.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="the folder with prompts/ and recorded/")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/smollm2"))
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--limit", type=int, default=3, help="conversations of each suite and task")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    records = sample([r for name in FILES for r in read(args.data / name).records], args.limit)
    answers = args.output / "answers"
    answers.mkdir(parents=True, exist_ok=True)
    said = [f"At most {args.max_new_tokens} tokens an answer."]
    for dtype in args.dtypes:
        loaded, packed = (load(args.model, dtype=dtype, prepack=packed) for packed in (False, True))
        arms = [build(loaded, [parse_arm(LOOKUP)])[0], build(packed, [parse_arm("auto")])[0]]
        limit = {"max_new_tokens": args.max_new_tokens}
        plan = RunPlan(packed, arms, records, SamplingParams(), **limit)
        if dtype != "float32":
            plain = answers / f"as_loaded.{dtype}.plain.jsonl"
            run(replace(plan, arms=build(packed, [parse_arm("none")])), plain)
            plan = replace(plan, records=read(plain).records, dictate=True)
        rows = run(plan, answers / f"as_loaded.{dtype}.jsonl", peer="as loaded")
        (section,) = sections([rows])
        said.append(tell(section))
        print(f"\n\n{said[-1]}", flush=True)
    write_text(args.output / "as_loaded.md", "\n\n".join(said))


if __name__ == "__main__":
    main()
