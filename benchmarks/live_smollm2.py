"""SmolLM2 live, beside transformers' own generation: one command, tables and plots.

    python -m benchmarks.live_smollm2 ../shared/data -o benchmarks/results/smollm2
    python -m benchmarks.live_smollm2 ../shared/data -o /tmp/try --limit 1 --max-new-tokens 16

Spec-Bench's six tasks, MT-Redundant, HumanEval and edits of real commits, greedy, in float32 and,
where the processor has it, in bfloat16. It runs `draftsmith tune auto`, `bench cost`, `run` and
`report`, and says so: five arms answer every prompt in turn in one process, on one model whose
linear layers are laid out once, for all of them: plain decoding, transformers' own, its prompt
lookup, and `auto` without and with what was tuned. The prompt lookup has the setting that is
fastest on this machine, of plain's answers replayed under the measured cost of a pass. In bfloat16,
where passes of other widths round to other tokens, every arm is made to give the answers that plain
decoding gave before (`bench run --dictate`), so that all write the same. In float32 plain's answers
are replayed for every drafter that looks at ids alone, too, and for what `bench estimate` predicts.
The same command goes on after an interruption. Prompts, answers and the whole report stay in
`answers/`; what lies beside it is figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared import picture, table
from draftsmith.bench import generations
from draftsmith.bench.encoding import Encoding
from draftsmith.bench.estimate import Estimate, automatic, estimate
from draftsmith.bench.generations import Generation
from draftsmith.bench.plots import Plots
from draftsmith.bench.records import Record
from draftsmith.bench.replay import ReplayBudget
from draftsmith.bench.report import facts, same
from draftsmith.bench.suites import read, sample
from draftsmith.bench.summary import Section, sections
from draftsmith.bench.sweep import Replayer, sweep
from draftsmith.cli import app
from draftsmith.core.target import Needs
from draftsmith.drafters import registry
from draftsmith.errors import OptionError
from draftsmith.model.measure import CostTable
from draftsmith.storage import write_text

FILES = ("prompts/spec_bench.jsonl", "prompts/mt_redundant.jsonl", "prompts/humaneval.jsonl.gz",
         "recorded/commit_edits.jsonl.xz")  # fmt: skip
Estimates = dict[str, dict[str | None, Estimate]]
"""Of every drafter, by part of the prompts; None: all."""
LOOKUP = "hf:prompt_lookup"
GRID = [(tokens, ngram) for tokens in (3, 4, 5, 7, 10, 15, 20) for ngram in (1, 2, 3, 4)]
"""Settings of transformers' prompt lookup."""
FIGURES = ("id", "suite", "category", "turn", "arm", "seconds", "first_token_seconds", "passes",
           "drafted", "accepted", "phases", "divergence", "gap", "began", "load")  # fmt: skip
"""What of a row is published: neither prompts nor answers."""


def draftsmith(*words: object) -> None:
    """Run a command of ours in this process; ends the script if it fails."""
    given = list(map(str, words))
    print("\n$ draftsmith", *given, flush=True)
    if code := app(given, standalone_mode=False):
        sys.exit(code)


def minutes(records: Sequence[Record], tokens: int, cost: CostTable) -> float:
    """How long an arm's answers take at most: as if nothing were ever accepted, or ended early."""
    seconds = 0.0
    for record in records:
        # Four characters a token, and an answer for every earlier turn.
        texts = [message["content"] for message in record.messages]
        length = sum(tokens if text is None else len(text) // 4 for text in texts)
        seconds += cost.prefill_seconds(length) + tokens * cost.seconds(1, length + tokens / 2)
    return seconds / 60


def id_drafters() -> list[str]:
    """Every drafter that needs neither a model's states nor an option, but none."""
    found = []
    for name in registry.names():
        try:
            if registry.lookup(name).needs == Needs() and registry.parse(name).preferred_width():
                found.append(name)
        except OptionError:  # It needs a folder, a model or members.
            continue
    return found


def replayed(
    rows: Sequence[Generation], names: dict[str, str], budget: ReplayBudget, cost: CostTable
) -> Estimates:
    """What drafters, by what to call them, would have made of plain's answers."""
    records = [
        replace(
            Record(row.id, row.suite, row.category, row.turn),
            prompt_ids=tuple(row.prompt_ids),
            output_ids=tuple(row.output_ids),
            max_new_tokens=row.max_new_tokens,
        )
        for row in rows
        if row.arm == "none"
    ]
    made = {str(registry.parse(spec)): (name, registry.parse(spec)) for name, spec in names.items()}
    done = sweep(records, [d for _, d in made.values()], Replayer(Encoding(), budget)).done
    found: Estimates = {name: {} for name in names}
    for one in estimate(done, cost):
        found[made[one.drafter][0]][one.suite] = one
    return found


def lookups(rows: Sequence[Generation], cost: CostTable) -> Estimates:
    """transformers' prompt lookup, replayed by its settings, the fastest first.

    By passes alone: what drafting took in this replay is another time another.
    """
    grid = {f"tokens={t},ngram={n}": f"prompt_lookup(tokens={t}, max={n})" for t, n in GRID}
    found = replayed(rows, grid, ReplayBudget(), cost).items()
    every = [(by[None].tokens_per_pass / by[None].pass_cost, name, by) for name, by in found]
    return {name: by for _, name, by in sorted(every, key=lambda one: -one[0])}


def short(part: str | None) -> str:
    """What a part is called in a table."""
    return "all" if part is None else part.removeprefix("spec_bench, ")


def live(section: Section, predicted: dict[str | None, Estimate]) -> Iterator[list[str]]:
    """A line per part: speeds over plain decoding, and what was predicted for `auto`."""
    for part, summaries in section.tables.items():
        by_arm = {summary.arm: summary for summary in summaries}
        plain, *arms = (by_arm[arm] for arm in section.settings["arms"])
        yield [
            short(part),
            str(plain.prompts),
            f"{plain.tokens_per_second.value:.1f}",
            *(arm.speedup.shown("×") for arm in arms),
            f"{predicted[part].speedup:.2f}×",
            *(f"{arm.tokens_per_pass:.2f}" for arm in arms[1:]),
            *(same(arm, own=False) for arm in arms),
        ]


LIVE = ("", "prompts", "plain, tokens/s", "`model.generate`", "its prompt lookup", "`auto`",
        "`auto`, tuned", "`auto` from ids, estimated", "tokens/pass: lookup", "`auto`", "tuned",
        "same answer: `generate`", "lookup", "`auto`", "tuned")  # fmt: skip


def per_pass(found: Estimates) -> str:
    """Tokens per pass by part, and the estimated speed over plain decoding."""
    places = list(next(iter(found.values())))
    rows = (
        [name, *(f"{by[p].tokens_per_pass:.2f}" for p in places), f"{by[None].speedup:.2f}×"]
        for name, by in found.items()
    )
    return table(("", *map(short, places), "estimated speed"), rows)


def publish(rows: Sequence[Generation], args: argparse.Namespace, path: Path) -> None:
    """What was counted and timed: a line about the run, then one per answer."""
    chosen = f"--limit {args.limit} --max-new-tokens {args.max_new_tokens}"
    command = f"python -m benchmarks.live_smollm2 DATA {chosen} --threads {args.threads}"
    lines: list[dict[str, Any]] = [{"command": command, "settings": rows[0].settings}]
    for row in rows:
        figures = {name: getattr(row, name) for name in FIGURES}
        lines.append(figures | {"tokens": len(row.output_ids), "prompt": len(row.prompt_ids)})
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def tell(section: Section, cost: CostTable) -> str:
    """The tables of one dtype."""
    ids = id_drafters()
    free = replayed(section.rows, {f"`{name}`": name for name in ids}, automatic(cost), cost)
    setup = "".join(f"- {name}: {value}\n" for name, value in facts(section))
    (peer,) = {row.arm for row in section.rows if row.arm.startswith(LOOKUP)}
    setup += f"- transformers' prompt lookup: {peer.removeprefix(LOOKUP)}\n"
    said = [f"## {section.title}\n", setup, table(LIVE, live(section, free["`auto`"]))]
    if section.settings["dtype"] == "float32":  # Other dtypes' answers repeat as much.
        fixed = {f"`{name}`, its own width": name for name in ids}
        said += [
            "Plain's answers replayed, tokens per pass:\n",
            per_pass(free | replayed(section.rows, fixed, ReplayBudget(), cost)),
            f"transformers' prompt lookup, the best six of {len(GRID)} settings, replayed:\n",
            per_pass(dict(islice(lookups(section.rows, cost).items(), 6))),
        ]
    return "\n".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="the folder with prompts/ and recorded/")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/smollm2"))
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--limit", type=int, default=5, help="conversations of each suite and task")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    known = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtypes = args.dtype or ["float32", *(["bfloat16"] if known else [])]
    if "bfloat16" not in dtypes and not known:
        print("without bfloat16: this processor does not compute in it")
    answers = args.output / "answers"
    answers.mkdir(parents=True, exist_ok=True)
    costs: dict[str, CostTable] = {}
    for dtype in dtypes:
        file = args.output / f"cost.{dtype}.json"
        if not file.is_file():
            draftsmith("bench", "cost", args.model, "--dtype", dtype, "--threads", args.threads,
                       "--contexts", "128,512,1024", "--batches", "1", "-o", file)  # fmt: skip
        costs[dtype] = CostTable.load(file)
    files = [args.data / name for name in FILES]
    records = sample([record for file in files for record in read(file).records], args.limit)
    shown = ", ".join(
        f"{dtype} {6 * minutes(records, args.max_new_tokens, cost):.1f}"
        for dtype, cost in costs.items()
    )
    print(f"{len(records)} prompts, five arms, plain twice; minutes at most: {shown}", flush=True)
    draftsmith("tune", "auto", args.model)
    results = {dtype: answers / f"{dtype}.jsonl" for dtype in dtypes}
    for dtype in dtypes:
        asked: list[object] = [*files, "--limit", args.limit]
        common = ("-m", args.model, "--dtype", dtype, "--threads", args.threads,
                  "--max-new-tokens", args.max_new_tokens, "--resume")  # fmt: skip
        plain = answers / f"{dtype}.plain.jsonl"
        draftsmith("bench", "run", *asked, *common, "--arm", "none", "--out", plain)
        best = next(iter(lookups(generations.read(plain).entries, costs[dtype])))
        drafters = "auto(tuned=False)", "auto"
        arms = [word for arm in ("none", "hf:generate", f"{LOOKUP}({best})", *drafters)
                for word in ("--arm", arm)]  # fmt: skip
        if dtype != "float32":
            asked = [plain, "--dictate"]
        draftsmith("bench", "run", *asked, *common, *arms, "--out", results[dtype])
    draftsmith("bench", "report", *results.values(), "-o", answers,
               "--cost", args.output / f"cost.{dtypes[0]}.json")  # fmt: skip
    said = []
    for dtype, file in results.items():
        (section,) = sections([generations.read(file).entries])
        publish(section.rows, args, args.output / f"{dtype}.jsonl")
        write_text(args.output / f"{dtype}.svg", picture(Plots(section).speedups()))
        said.append(tell(section, costs[dtype]))
    write_text(args.output / "tables.md", "\n".join(said))
    print("\n".join(said))


if __name__ == "__main__":
    main()
