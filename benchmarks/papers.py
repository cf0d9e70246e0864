"""The figures of five papers that recorded answers can check, ours beside theirs.

    python -m benchmarks.papers ../shared/data [--limit 20]

The folder holds `recorded/` and `tokenizers/` (see docs/measuring.md). No model is run: what needs
one, or a drafter that does not exist here yet, is listed with the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

from tokenizers import Tokenizer

from benchmarks.named_suites import recorded
from draftsmith.bench.encoding import Encoding
from draftsmith.bench.rows import ReplaySum, summarize
from draftsmith.bench.suites import sample, task
from draftsmith.bench.sweep import Done, Replayer, sweep
from draftsmith.drafters.registry import names, parse
from draftsmith.text.vocab import Vocabulary, intersect

Line = tuple[str, str, str]
"""(what, theirs, ours)"""

COPIED = {"mt_redundant": 0.3235, "mt_bench": 0.2053}
"""CopySpec, table 1, Qwen2.5-72B: share of output tokens that were copied, both turns."""

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

MISSING = {
    "CopySpec": [
        "tokens per second: they are those of 72B models on four A100s",
        "GSM8K in three turns, CNN/DM, HumanEval of the five models: their answers are not public "
        "in the recordings (our HumanEval answers are of Qwen2.5-Coder-32B)",
        "CopySpec with a draft model (tables 3, 5, 10, 16–18): needs both models",
    ],
    "PLD+": [
        "PLD+ itself: ranks by hidden states or attention, which a recording does not have",
        "code and text editing: the answers of Vicuna on these tasks are not recorded",
        "attribution on QuoteSum (table 10): benchmarks/quotesum.py does",
    ],
    "Heterogeneous vocabularies": [
        "acceptance and speed of SLEM and TLI: need a target and a draft model",
        "the other pairs of table 9: their tokenizers are not in the data",
        "combinations per token (table 5): benchmarks/exact_covers.py does",
        "injectivity (table 11): docs/vocabularies.md has it",
    ],
    "SPECTRA": [
        "tokens per step (tables 1, 2): the internal guesses come from the model's own logits",
        "retrieval alone (1.31 on GSM8K, 1.50 on MT-Bench): needs the corpus ranked by the model",
    ],
    "SDSAT": [
        "everything: its drafts are predictions of a model fine-tuned with the adaptive token",
    ],
}


DRAFTERS = {
    "CopySpec": ["copyspec"],
    "PLD+": ["pld_plus"],
    "Heterogeneous vocabularies": ["draft_model"],
    "SPECTRA": ["spectra", "retrieval"],
    "SDSAT": ["sdsat"],
}


class Replays:
    """Replays of named suites, each made once."""

    def __init__(self, data: Path, limit: int | None) -> None:
        self.data, self.limit = data, limit
        self.encoding = Encoding((data / "tokenizers",))

    def __call__(self, suite: str, drafter: str) -> list[Done]:
        records = sample(recorded(suite, self.data), self.limit)
        return sweep(records, [parse(drafter)], Replayer(self.encoding)).done


def copyspec(replays: Replays) -> Iterator[Line]:
    """Copied share, and tokens per pass beside the measured speed-up."""
    for suite, share in COPIED.items():
        rows = summarize(replays(suite.replace("_", "-"), "copyspec(gamma=3, block=10)"))
        ours = find(rows, None, None).stats.accepted_share
        yield f"{suite}, copied share", f"{share:.2%}", f"{ours:.2%}"
        for category, speedup in zip(CATEGORIES, TURN_2[suite], strict=True):
            row = find(rows, category, 2)
            theirs = f"{speedup:.2f}× faster"
            yield f"{suite}, turn 2, {category}", theirs, f"{per_pass(row.stats.tokens_per_pass)}"


def pld(replays: Replays) -> Iterator[Line]:
    """Prompt lookup on Spec-Bench, averaged over answers, as Spec-Bench averages speeds."""
    done = replays("spec-bench", "prompt_lookup(max=3)")
    for name, speedup in PLD.items():
        members = [one.replay.stats.tokens_per_pass for one in done if task(one.record) == name]
        yield f"prompt lookup, {name}", f"{speedup:.2f}× faster", per_pass(mean(members))


def vocabularies(data: Path) -> Iterator[Line]:
    """Shared tokens of two vocabularies."""
    first, second, theirs = OVERLAP
    files = [data / "tokenizers" / name / "tokenizer.json" for name in (first, second)]
    ours = intersect(*(Vocabulary.of(Tokenizer.from_file(str(path))) for path in files)).size
    yield f"tokens shared by {first} and {second}", f"{theirs:,}", f"{ours:,}"


def find(rows: Sequence[ReplaySum], category: str | None, turn: int | None) -> ReplaySum:
    """The row of one category and turn; None is the sum."""
    return next(row for row in rows if (row.category, row.turn) == (category, turn))


def per_pass(value: float) -> str:
    return f"{value:.2f} tokens a pass"


def show(paper: str, lines: Iterator[Line]) -> None:
    print(f"\n{paper}")
    for number, (what, theirs, ours) in enumerate(lines):
        if number == 0:
            print(f"{'':46} {'theirs':>16} {'ours':>20}")
        print(f"  {what:44} {theirs:>16} {ours:>20}")
    absent = [name for name in DRAFTERS[paper] if name not in names()]
    if absent:
        print(f"  not here yet: {', '.join(absent)}")
    for reason in MISSING[paper]:
        print(f"  not checked: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", default=Path("../shared/data"))
    parser.add_argument("--limit", type=int, help="conversations of each suite and task")
    options = parser.parse_args()
    if not (options.data / "recorded").is_dir():
        parser.error(f"no recorded answers in {options.data}; give the folder with recorded/")
    replays = Replays(options.data, options.limit)
    print("A speed-up is at most the tokens a pass gives; the rest goes into wider passes.")
    show("CopySpec", copyspec(replays))
    show("PLD+", pld(replays))
    show("Heterogeneous vocabularies", vocabularies(options.data))
    show("SPECTRA", iter(()))
    show("SDSAT", iter(()))


if __name__ == "__main__":
    main()
