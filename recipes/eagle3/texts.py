"""Recorded answers → texts to train a head on, in the chat format of SmolLM2."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

HELD_OUT = 40
"""Answers that are kept out of the training."""
SHORTEST = 100
"""Characters of an answer that is used."""


def texts(paths: list[Path]) -> list[str]:
    """The last question and the answer of each record, in an order that is always the same."""
    found = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if len(record["output"]) >= SHORTEST:
                question = record["messages"][-1]["content"]
                turns = ("user", question), ("assistant", record["output"])
                found.append("".join(f"<|im_start|>{r}\n{t}<|im_end|>\n" for r, t in turns))
    random.Random(1).shuffle(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recorded", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    found = texts(args.recorded)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", found[:-HELD_OUT]), ("held_out", found[-HELD_OUT:])):
        lines = (json.dumps({"text": text}) + "\n" for text in part)
        (args.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
