"""Texts for training and measuring: `python texts.py --corpora CORPORA --out TEXTS`.

Code as it is, and edits in the built-in model's chat template. `CORPORA` has the folders `code/`
and `edits/` with a file REPOSITORY.jsonl.xz for each repository. Its lines have `path` and `text`,
or `path`, `message`, `before` and `after`. Repositories that measure the built-in model are held
out.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from draftsmith import builtin
from draftsmith.storage import open_text

MEASURED = ("pallets+flask", "TheAlgorithms+Python")
"""Repositories that the built-in models were not trained on."""

SHORT = 1500
"""Most characters of an edited file, so that question and answer fit into a sequence."""


def code(row: dict[str, str]) -> str | None:
    """Return a Python file; None for others."""
    return row["text"] if row["path"].endswith(".py") and len(row["text"]) > 200 else None


def edits(row: dict[str, str]) -> str | None:
    """Return a small commit as a prompt of the built-in model, with the right answer."""
    if max(len(row["before"]), len(row["after"])) > SHORT:
        return None
    [asked] = builtin.edit_messages(row["path"], row["message"], row["before"])
    answer = f"<|assistant|><|file|>{row['after']}<|end|>"
    return f"<|user|>{asked['content']}<|end|>{answer}"


def rows(folder: Path, *, measured: bool) -> Iterator[dict[str, str]]:
    """Yield the rows of all repositories that measure the built-in models, or of all others."""
    for path in sorted(folder.glob("*.jsonl.xz")):
        if (path.name.removesuffix(".jsonl.xz") in MEASURED) == measured:
            with open_text(path) as lines:
                yield from map(json.loads, lines)


def write(path: Path, shuffled: list[str], characters: int) -> None:
    """Write a random choice of the texts, up to `characters` characters."""
    random.Random(1).shuffle(shuffled)
    with path.open("w", encoding="utf-8") as file:
        while shuffled and characters > 0:
            text = shuffled.pop(0)
            characters -= len(text)
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for kind in (code, edits):
        for prefix, measured, characters in (("", False, 2_000_000), ("held_out_", True, 70_000)):
            found = rows(args.corpora / kind.__name__, measured=measured)
            texts = [text for row in found if (text := kind(row)) is not None]
            write(args.out / f"{prefix}{kind.__name__}.jsonl", texts, characters)


if __name__ == "__main__":
    main()
