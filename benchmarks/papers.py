"""Figures of three papers that recorded answers can check, ours and theirs.

    python -m benchmarks.papers DATA
    python -m benchmarks.papers DATA --quick

No model is run: answers that the papers' models gave are replayed. A speed-up is at most the tokens
per pass; the rest is the cost of wider passes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from tokenizers import Tokenizer

from benchmarks.shared import Blocks, Options, recorded, run, table
from draftsmith.drafters.registry import parse
from draftsmith.lab.bench.encoding import Encoding
from draftsmith.lab.bench.rows import summarize
from draftsmith.lab.bench.suites import sample, task
from draftsmith.lab.bench.sweep import Done, Replayer, sweep
from draftsmith.text.vocab import Vocabulary, intersect

Line = tuple[str, str, str]
"""Label, theirs, ours."""
COPYSPEC = "copyspec(gamma=3, block=10)"
COPIED = {"mt_redundant": 0.3235, "mt_bench": 0.2053}
"""CopySpec, table 1, Qwen2.5-72B: share of copied output tokens, both turns."""
TURN_2 = {
    "mt_redundant": (2.02, 1.81, 1.20, 2.13, 2.33, 3.08, 1.47, 2.28),
    "mt_bench": (1.54, 1.53, 1.10, 1.40, 1.24, 1.02, 1.15, 1.30),
}
"""CopySpec, tables 2 and 11, Qwen2.5-72B: speed-up of the second turn by category."""
CATEGORIES = (
    "coding", "extraction", "humanities", "math", "reasoning", "roleplay", "stem", "writing",
)  # fmt: skip
PLD = {
    "mt_bench": 1.63, "translation": 1.05, "summarization": 2.62, "qa": 1.14,
    "math_reasoning": 1.61, "rag": 1.88,
}  # fmt: skip
"""PLD+, table 11, Vicuna-7B: speed-up of prompt lookup by Spec-Bench task."""
OVERLAP = ("llama3", "qwen2", 109_566)
"""Heterogeneous vocabularies, table 9: |T ∩ D| of Llama-3.1 and Qwen2."""


def parser() -> Options:
    made = Options("papers", __doc__, data="needed")
    made.add_size("--limit", None, 1, "conversations of each suite and task")
    return made


def replays(args: argparse.Namespace, suite: str, drafter: str) -> list[Done]:
    """Replay the recorded answers of a suite."""
    records = sample(recorded(args.data, suite), args.limit)
    replayer, known = Replayer(Encoding((args.data / "tokenizers",))), args.results.finished
    return sweep(records, [parse(drafter)], replayer, finished=known).done


def per_pass(value: float) -> str:
    return f"{value:.2f} tokens a pass"


def copyspec(args: argparse.Namespace) -> Iterator[Line]:
    """Yield the copied share, and tokens per pass with the measured speed-up."""
    for suite, share in COPIED.items():
        rows = {
            (row.category, row.turn): row.stats for row in summarize(replays(args, suite, COPYSPEC))
        }
        yield f"CopySpec, {suite}, copied", f"{share:.2%}", f"{rows[None, None].accepted_share:.2%}"
        for category, speedup in zip(CATEGORIES, TURN_2[suite], strict=True):
            if (stats := rows.get((category, 2))) is not None:
                what = f"CopySpec, {suite}, turn 2, {category}"
                yield what, f"{speedup:.2f}× faster", per_pass(stats.tokens_per_pass)


def pld(args: argparse.Namespace) -> Iterator[Line]:
    """Yield prompt lookup on Spec-Bench, averaged over answers, as Spec-Bench averages speeds."""
    done = replays(args, "spec_bench", "prompt_lookup(max=3)")
    for name, speedup in PLD.items():
        members = [one.replay.stats.tokens_per_pass for one in done if task(one.record) == name]
        yield f"prompt lookup, {name}", f"{speedup:.2f}× faster", per_pass(mean(members))


def vocabularies(data: Path) -> Iterator[Line]:
    """Yield the number of tokens that two vocabularies share."""
    first, second, theirs = OVERLAP
    files = [data / "tokenizers" / name / "tokenizer.json" for name in (first, second)]
    ours = intersect(*(Vocabulary.of(Tokenizer.from_file(str(path))) for path in files)).size
    yield f"tokens shared by {first} and {second}", f"{theirs:,}", f"{ours:,}"


def measure(args: argparse.Namespace) -> Blocks:
    yield table(("", "theirs", "ours"), [*copyspec(args), *pld(args), *vocabularies(args.data)])


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
