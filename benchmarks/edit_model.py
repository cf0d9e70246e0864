"""Measure a model of recipes/builtin: `edit_model.py --model M --corpora C --data D --out R.json`.

What counts is free-running output: greedy answers to edits of repositories the model never saw.
Teacher-forced figures on the held-out rows come beside them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from draftsmith import Engine, builtin

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "builtin"))
import synth
from common import ID, TEXT_END, read_rows
from prepare import WORD
from rows import CHANGED, COPIED, PROMPT, Rows

Edit = tuple[str, str, str, str]  # path, message, before, after


def ratio(first: str, second: str) -> float:
    """difflib's similarity of two texts, by words rather than characters (faster, no junk rule)."""
    parts = WORD.findall(first), WORD.findall(second)
    return SequenceMatcher(None, *parts, autojunk=False).ratio()


def done_share(before: str, after: str, answer: str) -> float:
    """How much of the wanted change the answer makes: of its lines gone and its lines added."""
    old, wanted, new = (Counter(text.splitlines()) for text in (before, after, answer))
    done = ((old - wanted) & (old - new)).total() + ((wanted - old) & (new - old)).total()
    return done / max(1, (old - wanted).total() + (wanted - old).total())


def answered(engine: Engine, edits: Iterator[Edit], count: int) -> dict[str, float]:
    """Answer freely the first edits that fit the context with their right answers; judge them."""
    context = engine.model.context_length

    def tokens(text: str) -> int:
        return len(engine.model.tokenizer(text)["input_ids"])

    fitting = (edit for edit in edits if sum(map(tokens, edit)) + 40 <= context)
    judged = []
    for path, message, before, after in islice(fitting, count):
        messages = builtin.edit_messages(path, message, before)
        size = tokens(messages[0]["content"]) + 8
        room = min(context - size, int(1.3 * size) + 100)
        result = engine.generate(messages, temperature=0.0, max_new_tokens=room)
        done = done_share(before, after, result.text)
        judged.append(
            {
                "similarity_to_new_file": ratio(after, result.text),
                "similarity_of_old_to_new_file": ratio(before, after),
                "differs_from_old_file": result.text != before,
                "change_done": done,
                "change_fully_done": done == 1,
                "exact": result.text == after,
                "ended_by_itself": result.finish_reason == "stop",
            }
        )
    found = {name: mean(each[name] for each in judged) for name in judged[0]}
    medians = {
        f"median_{name}": median(each[name] for each in judged)
        for name in judged[0]
        if name.startswith("similarity")
    }
    return found | medians


def commits(corpora: Path) -> Iterator[Edit]:
    """Edits of the measured repositories, lowest commit hashes first."""
    rows = read_rows(corpora, "edits", measured=True)
    for row in sorted(rows, key=lambda row: (row["commit"], row["path"])):
        if row["before"] != row["after"]:
            yield row["path"], row["message"], row["before"], row["after"]


def instructions(corpora: Path) -> Iterator[Edit]:
    """Program-made edits of the measured repositories' files, without end."""
    rng = random.Random(2)
    measured = read_rows(corpora, "code", measured=True)
    rows = [row for row in measured if 400 < len(row["text"]) < 8000]
    # Names and words from the measured files themselves: none was seen in training as such.
    texts = [row["text"] for row in rows]
    maker = synth.Maker(rng, texts, texts)
    while True:
        row = rng.choice(rows)
        made = maker.make(synth.window(rng, row["text"]), True)
        if made is not None:
            yield row["path"], *made


@torch.inference_mode()
def forced(model: Any, data: Path, name: str) -> dict[str, float]:
    """Loss and accuracy on held-out rows, by what a token is."""
    rows = Rows(data / f"held_{name}.npz")
    losses, right, kinds = [], [], []
    for number in random.Random(1).sample(range(len(rows)), min(60, len(rows))):
        ids, classes = rows[number]
        ids, classes = ids[:2048], classes[:2048]
        if name == "text":  # as the tokenizer gives it
            ids, classes = np.append(ID[TEXT_END], ids), np.append(np.uint8(0), classes)
        logits = model(torch.from_numpy(ids)[None]).logits[0, :-1].float()
        targets = torch.from_numpy(ids[1:])
        losses.append(cross_entropy(logits, targets, reduction="none"))
        right.append(logits.argmax(-1) == targets)
        kinds.append(torch.from_numpy(classes[1:].copy()))
    loss, hit, kind = torch.cat(losses), torch.cat(right).float(), torch.cat(kinds)
    result = {}
    for what, number in (("copied", COPIED), ("changed", CHANGED), ("text", PROMPT)):
        if (at := kind == number).any():
            result[f"{what}_loss"] = float(loss[at].mean())
            result[f"{what}_accuracy"] = float(hit[at].mean())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--model", "--corpora", "--data", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--edits", type=int, default=10, help="of each kind, to be answered")
    args = parser.parse_args()
    engine = Engine.from_pretrained(str(args.model), dtype="float32")
    held_out = ("edits", "synth", "instruct", "text")
    results = {
        "held_out": {name: forced(engine.model.model, args.data, name) for name in held_out},
        "instructions": answered(engine, instructions(args.corpora), args.edits),
        "commits": answered(engine, commits(args.corpora), args.edits),
    }
    text = json.dumps(results, indent=2)
    args.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
