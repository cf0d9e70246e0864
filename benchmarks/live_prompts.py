"""Prompts for a live run: edits of files that the built-in model was not trained on.

    python benchmarks/live_prompts.py ../shared/data -o prompts.jsonl
    draftsmith bench run prompts.jsonl --dtype bfloat16 --threads 2
    draftsmith bench report results.jsonl -o report/

The commits of pallets/flask and TheAlgorithms/Python with the lowest hashes whose prompt and real
answer have at most `--tokens` tokens together. An answer may be 64 tokens longer than the real one.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from draftsmith import builtin
from draftsmith.text.tokenizer import encode, render_chat

HELD_OUT = ("pallets+flask", "TheAlgorithms+Python")
ROOM = 64


def prompts(data: Path, tokens: int, first: int) -> Iterator[dict[str, Any]]:
    """The first held-out edits that fit, in the form that `draftsmith bench` reads."""
    tokenizer = AutoTokenizer.from_pretrained(builtin.path())
    edits = []
    for repository in HELD_OUT:
        with lzma.open(data / "corpora" / "edits" / f"{repository}.jsonl.xz", "rt") as lines:
            edits += [(repository.replace("+", "/"), json.loads(line)) for line in lines]
    edits.sort(key=lambda edit: (edit[1]["commit"], edit[1]["path"]))
    found = 0
    for repository, edit in edits:
        if found == first:
            return
        messages = builtin.edit_messages(edit["path"], edit["message"], edit["before"])
        answer = len(encode(tokenizer, edit["after"])) + ROOM
        if len(render_chat(tokenizer, messages)) + answer <= tokens:
            found += 1
            yield {
                "id": f"{repository}/{edit['commit'][:12]}/{edit['path']}",
                "suite": repository,
                "messages": messages,
                "reference": edit["after"],
                "max_new_tokens": answer,
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
