"""Recorded answers → texts to train a head on, in the chat format of SmolLM2.

    python -m recipes.eagle3.texts DATA --out WORK/texts

DATA has the public files that `benchmarks` reads, and `corpora/instruct`. What
`benchmarks/live_smollm2.py` measures on is left out: every conversation that begins alike.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections.abc import Iterator
from pathlib import Path

from benchmarks.shared import live, recorded

SUITES = ("spec_bench", "mt_bench", "mt_redundant", "humaneval", "gsm8k_json")
HELD_OUT = 40
"""Answers that the training is measured on."""
SHORTEST, LONGEST = 100, 2000
"""Characters of an answer at least, and of a question at most."""
MEASURED = 5
"""Conversations of each kind that the benchmark measures on."""

Turns = list[tuple[str, str]]


def conversations(data: Path) -> Iterator[Turns]:
    """All turns of each recorded conversation, then pairs of question and answer."""
    for suite in SUITES:
        last: dict[str, Turns] = {}
        for record in recorded(data, suite):
            turns = [(m["role"], m["content"] or "") for m in record.messages]
            last[record.conversation] = [*turns, ("assistant", record.output or "")]
        yield from last.values()
    with lzma.open(data / "corpora/instruct/t0_50k.jsonl.xz", "rt") as lines:
        for pair in map(json.loads, lines):
            if len(pair["prompt"]) <= LONGEST:
                yield [("user", pair["prompt"]), ("assistant", pair["completion"])]


def texts(data: Path) -> list[str]:
    """The conversations with answers that are long enough, in an order that is always the same."""
    measured = {(m["content"] or "").strip() for r in live(data, MEASURED) for m in r.messages}
    found = [
        "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
        for turns in conversations(data)
        if len(turns[-1][1]) >= SHORTEST
        and not measured.intersection(text.strip() for _, text in turns)
    ]
    random.Random(1).shuffle(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    found = texts(args.data)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", found[:-HELD_OUT]), ("held_out", found[-HELD_OUT:])):
        lines = (json.dumps({"text": text}) + "\n" for text in part)
        (args.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
