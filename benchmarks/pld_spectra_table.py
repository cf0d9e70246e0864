"""Tokens per pass, nodes per pass and tokens per second of PLD+, SPECTRA, and all they compare to.

    draftsmith tune pld-plus edit-7m ../shared/data/prompts/humaneval.jsonl.gz   # its heads
    draftsmith corpus build -m edit-7m --no-filter --texts ... -o all.corpus     # REST
    draftsmith corpus build -m edit-7m --keep 2000 --texts ... -o best.corpus    # RETRIEVAL
    python -m benchmarks.pld_spectra_table ../shared/data --rest all.corpus --corpus best.corpus

Two suites: held-out edits (see live_prompts.py), and Spec-Bench's question answering, with and
without passages. Greedy, in float32, on one thread; every drafter has the budget of its paper, so
that tokens and nodes are the same on every machine. Each answer is kept in --output at once, and
the same command goes on where it was interrupted; Ctrl-C shows the prompts that all have answered.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from benchmarks import live_prompts
from draftsmith import builtin
from draftsmith.bench import suites
from draftsmith.bench.arms import build, parse_arm
from draftsmith.bench.generations import ResultFile
from draftsmith.bench.records import Record
from draftsmith.bench.run import RunPlan, measure
from draftsmith.bench.settings import settings
from draftsmith.bench.summary import Summary, sections
from draftsmith.core.sampling import SamplingParams
from draftsmith.model.load import load

EDITS, QUESTIONS = "edits", "questions"

ARMS = {
    "none": "none",
    "prompt_lookup, K = 10": "prompt_lookup(tokens=10)",
    "prompt_lookup, K = 70": "prompt_lookup(tokens=70)",
    "copyspec": "copyspec",
    "PLD+ hidden, K = 10": "pld_plus(K=10)",
    "PLD+ hidden, K = 70": "pld_plus(K=70)",
    "PLD+ attention, K = 10": "pld_plus(rank=attention,K=10)",
    "PLD+ attention, K = 70": "pld_plus(rank=attention,K=70)",
    "… a quarter of the heads, K = 10": "pld_plus(rank=attention,heads=12,K=10)",
    "… one layer, maximum, K = 10": "pld_plus(rank=attention,heads=layer,K=10)",
    "… one layer, sum, K = 10": "pld_plus(rank=attention,heads=layer,combine=sum,K=10)",
    "… all layers, maximum, K = 10": "pld_plus(rank=attention,heads=all,K=10)",
    "… all layers, sum, K = 10": "pld_plus(rank=attention,heads=all,combine=sum,K=10)",
    "RETRIEVAL": "retrieval(corpus={corpus})",
    "REST": "retrieval(corpus={rest})",
    "SPECTRA": "spectra(corpus={corpus})",
    "SPECTRA-CORE": "spectra",
    "… without forward": "spectra(forward=False)",
    "… without backward": "spectra(backward=False)",
    "… without sub-n-grams": "spectra(sub_ngrams=False)",
    "lookahead": "lookahead",
    "SPECTRA, τ = 1": "spectra(tau=1,positions=staggered,corpus={corpus})",
    "SPECTRA-CORE, τ = 1": "spectra(tau=1,positions=staggered)",
    "… without forward, τ = 1": "spectra(tau=1,positions=staggered,forward=False)",
    "… without backward, τ = 1": "spectra(tau=1,positions=staggered,backward=False)",
    "… without sub-n-grams, τ = 1": "spectra(tau=1,positions=staggered,sub_ngrams=False)",
}
"""Rows of the table, by what one types."""


def questions(data: Path, number: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Spec-Bench's questions, half of them with passages, evenly spread."""
    found = suites.read(data / "prompts" / "spec_bench.jsonl").records
    for category in ("qa", "rag"):
        records = [record for record in found if record.category == category]
        for record in suites.sample(records, number // 2):
            messages = list(map(dict, record.messages))
            yield {"id": record.id, "messages": messages, "max_new_tokens": tokens}


def prompts(args: argparse.Namespace) -> list[Record]:
    """Both suites, in the form that `draftsmith bench run` reads, too."""
    path = args.output.with_suffix(".prompts.jsonl")
    edits = live_prompts.prompts(args.data, args.context, args.edits)
    lines = [
        {**edit, "suite": EDITS, "max_new_tokens": min(edit["max_new_tokens"], args.tokens)}
        for edit in edits
    ]
    asked = questions(args.data, args.questions, args.tokens)
    lines += [{**question, "suite": QUESTIONS} for question in asked]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return suites.read(path).records


def specs(args: argparse.Namespace) -> dict[str, str]:
    """What to type → row of the table, for the arms whose corpus was given."""
    folders = {"corpus": args.corpus, "rest": args.rest}
    chosen = {}
    for name, spec in ARMS.items():
        needed = [key for key in folders if f"{{{key}}}" in spec]
        if args.only and name not in args.only:
            continue
        if all(folders[key] for key in needed):
            given = {key: repr(str(folders[key])) for key in needed}
            chosen[spec.format(**given) + "@drafter"] = name
        else:
            print(f"left out: {name}, which needs --{needed[0]}", file=sys.stderr)
    return chosen


def table(tables: dict[str | None, list[Summary]], names: dict[str, str]) -> Iterator[str]:
    """Lines of Markdown, one row for each arm; the sums only where there is one suite."""
    suites_ = list(tables)[1:] or [None]
    head = "".join(f" {s or 'all'}: tokens per pass | nodes per pass | tokens/s |" for s in suites_)
    yield f"| |{head}"
    yield "|---" + 3 * len(suites_) * "|---" + "|"
    by_arm: dict[str, dict[str | None, Summary]] = {}
    for suite in suites_:
        for summary in tables[suite]:
            by_arm.setdefault(summary.arm, {})[suite] = summary
    for arm, found in by_arm.items():
        cells = []
        for suite in suites_:
            one = found[suite]
            assert one.stats is not None
            nodes = (one.stats.drafted + one.stats.probes) / one.passes
            same = "" if one.identical == one.compared else f" ({one.identical}/{one.compared})"
            cells += [f"{one.tokens_per_pass:.3f}{same}", f"{nodes:.1f}",
                      f"{one.tokens_per_second.value:.0f}"]  # fmt: skip
        yield f"| {names[arm]} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("-m", "--model", default=builtin.DEFAULT)
    parser.add_argument("--corpus", type=Path, help="a ranked corpus")
    parser.add_argument("--rest", type=Path, help="an unranked corpus")
    parser.add_argument("--edits", type=int, default=40)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=160, help="longest answer")
    parser.add_argument("--context", type=int, default=2048, help="edit and answer, at most")
    parser.add_argument("--only", action="append", help="a row of the table; may be repeated")
    parser.add_argument("-o", "--output", type=Path, default=Path("pld_spectra.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load(args.model, dtype="float32")
    names, records = specs(args), prompts(args)
    arms = build(model, [parse_arm(spec) for spec in names])
    plan = RunPlan(model, arms, records, SamplingParams(), warmup=0)
    file = ResultFile(args.output, settings(plan))
    with Progress() as progress:
        task = progress.add_task("answering", total=plan.size)
        try:
            measure(plan, file, lambda by: progress.advance(task, by))
        except KeyboardInterrupt:
            print("interrupted; the same command goes on", file=sys.stderr)
    answers = Counter(row.id for row in file.rows)
    rows = [row for row in file.rows if answers[row.id] == len(arms)]
    if not rows:
        sys.exit("no prompt was answered by all yet")
    section = sections([rows])[0]
    suites_ = Counter({row.id: row.suite for row in rows}.values())
    counts = ", ".join(f"{number} {suite}" for suite, number in suites_.items())
    print(f"{section.title}; {counts}, at most {args.tokens} tokens each\n")
    print(*table(section.tables, names), sep="\n")


if __name__ == "__main__":
    main()
