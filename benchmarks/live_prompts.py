"""Prompts for a live run: edits of files that the built-in model was not trained on.

    python -m benchmarks.live_prompts ../shared/data -o prompts.jsonl
    draftsmith bench run prompts.jsonl -m edit-7m --dtype bfloat16 --threads 2
    draftsmith bench report results.jsonl -o report/

The commits of pallets/flask and TheAlgorithms/Python with the lowest hashes whose prompt and real
answer have at most `--tokens` tokens together. An answer may be 64 tokens longer than the real one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.shared import held_out
from draftsmith import builtin


def prompts(data: Path, tokens: int, first: int) -> Iterator[dict[str, Any]]:
    """The first held-out edits that fit, in the form that `draftsmith bench` reads."""
    tokenizer = AutoTokenizer.from_pretrained(builtin.path())
    for edit in islice(held_out(data, tokenizer, tokens), first):
        yield {
            "id": f"{edit['repository']}/{edit['commit'][:12]}/{edit['path']}",
            "suite": edit["repository"],
            "messages": edit["messages"],
            "reference": edit["after"],
            "max_new_tokens": edit["limit"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("prompts.jsonl"))
    parser.add_argument("-n", "--number", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    with args.output.open("w", encoding="utf-8") as file:
        for prompt in prompts(args.data, args.tokens, args.number):
            file.write(json.dumps(prompt, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
