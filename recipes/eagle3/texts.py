"""Recorded answers → texts to train a head on, in the chat format of SmolLM2, and questions.

    python -m recipes.eagle3.texts DATA --out WORK/texts

DATA has the public files that `benchmarks` reads, and `corpora/instruct`. What
`benchmarks/live_smollm2.py` measures on is left out: every conversation that begins alike. The
questions are for `recipes.eagle3.answers`; most of them have no recorded answer.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections.abc import Iterator
from pathlib import Path

from benchmarks.shared import LIVE, live, recorded

from draftsmith.lab.bench.suites import read

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


def measured(data: Path) -> set[str]:
    """All messages of the conversations that the benchmark measures on."""
    return {(m["content"] or "").strip() for r in live(data, MEASURED) for m in r.messages}


def questions(data: Path) -> list[str]:
    """Different first messages, but those measured on, in an order that is always the same."""
    known = [r.messages[0] for name in LIVE for r in read(data / name).records]
    with lzma.open(data / "corpora/instruct/t0_50k.jsonl.xz", "rt") as lines:
        texts = [json.loads(line)["prompt"] for line in lines]
    texts += [m["content"] or "" for m in known if m["role"] == "user"]
    banned = measured(data)
    found = {text: None for text in texts if len(text) <= LONGEST and text.strip() not in banned}
    own = sorted(found)
    random.Random(2).shuffle(own)
    return own


def texts(data: Path) -> list[str]:
    """The conversations with answers that are long enough, in an order that is always the same."""
    banned = measured(data)
    found = [
        "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
        for turns in conversations(data)
        if len(turns[-1][1]) >= SHORTEST
        and not banned.intersection(text.strip() for _, text in turns)
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
    parts = {
        "train": found[:-HELD_OUT], "held_out": found[-HELD_OUT:], "questions": questions(args.data)
    }  # fmt: skip
    for name, part in parts.items():
        lines = (json.dumps({"text": text}) + "\n" for text in part)
        (args.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
