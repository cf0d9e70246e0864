"""Texts to train and to measure on: `python texts.py --corpora CORPORA --out TEXTS`.

Code as it is, and edits in the built-in model's chat template. `CORPORA` has the folders `code/`
and `edits/` that `recipes/builtin/README.md` describes; the repositories that the built-in model
is measured on are held out.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "builtin"))
import common

from draftsmith import builtin

SHORT = 1500
"""Characters of an edited file at most, so that question and answer fit into a sequence."""


def code(corpora: Path, *, measured: bool) -> Iterator[str]:
    """Python files."""
    for row in common.read_rows(corpora, "code", measured=measured):
        if row["path"].endswith(".py") and len(row["text"]) > 200:
            yield row["text"]


def edits(corpora: Path, *, measured: bool) -> Iterator[str]:
    """Small commits as the built-in model is asked for them, with the right answer."""
    for row in common.read_rows(corpora, "edits", measured=measured):
        if max(len(row["before"]), len(row["after"])) <= SHORT:
            [asked] = builtin.edit_messages(row["path"], row["message"], row["before"])
            answer = f"{common.ASSISTANT}{common.FILE}{row['after']}{common.END}"
            yield f"{common.USER}{asked['content']}{common.END}{answer}"


def write(path: Path, texts: Iterable[str], characters: int) -> None:
    """A random choice of the texts, up to so many characters."""
    shuffled = list(texts)
    random.Random(1).shuffle(shuffled)
    with path.open("w", encoding="utf-8") as file:
        for text in shuffled:
            if characters <= 0:
                break
            characters -= len(text)
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for kind in (code, edits):
        name = f"{kind.__name__}.jsonl"
        write(args.out / name, kind(args.corpora, measured=False), 2_000_000)
        write(args.out / f"held_out_{name}", kind(args.corpora, measured=True), 70_000)


if __name__ == "__main__":
    main()
