"""Measure an exported model: `python evaluate.py --model M --corpora C --data D --out R.json`.

What counts is free-running output: greedy answers to edits of repositories the model never saw.
Teacher-forced figures on the held-out rows come beside them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import synth
import torch
from common import ID, SPECIALS, TEXT_END, read_rows
from rows import CHANGED, COPIED, PROMPT, Rows
from torch.nn.functional import cross_entropy

from draftsmith import Engine, builtin


def ratio(first: str, second: str) -> float:
    """difflib's similarity of two texts, by words rather than characters (faster, no junk rule)."""
    parts = [re.findall(r"\w+|\s+|[^\w\s]", text) for text in (first, second)]
    return SequenceMatcher(None, *parts, autojunk=False).ratio()


def done_share(before: str, after: str, answer: str) -> float:
    """How much of the wanted change the answer makes: of its lines gone and its lines added."""
    old, wanted, new = (Counter(text.splitlines()) for text in (before, after, answer))
    done = ((old - wanted) & (old - new)).total() + ((wanted - old) & (new - old)).total()
    return done / max(1, (old - wanted).total() + (wanted - old).total())


def answered(engine: Engine, edits: list[dict[str, Any]], context: int) -> dict[str, float]:
    """Answer every edit freely, write the answer into it, and judge them all."""
    for edit in edits:
        before, after = edit["before"], edit["after"]
        messages = builtin.edit_messages(edit["path"], edit["message"], before)
        size = len(engine.model.tokenizer(messages[0]["content"])["input_ids"]) + 8
        room = min(context - size, int(1.3 * size) + 100)
        result = engine.generate(messages, temperature=0.0, max_new_tokens=room)
        edit["answer"] = answer = result.text
        edit["similar"], edit["old_similar"] = ratio(after, answer), ratio(before, after)
        edit["differs"], edit["exact"] = answer != before, answer == after
        edit["done"] = done_share(before, after, answer)
        edit["stopped"] = result.finish_reason == "stop"
    return {
        "count": len(edits),
        "median_similarity_to_new_file": median(e["similar"] for e in edits),
        "mean_similarity_to_new_file": mean(e["similar"] for e in edits),
        "median_similarity_of_old_to_new_file": median(e["old_similar"] for e in edits),
        "differs_from_old_file": mean(e["differs"] for e in edits),
        "change_done": mean(e["done"] for e in edits),
        "change_fully_done": mean(e["done"] == 1 for e in edits),
        "exact": mean(e["exact"] for e in edits),
        "ended_by_itself": mean(e["stopped"] for e in edits),
    }


def commits(corpora: Path) -> Iterator[dict[str, Any]]:
    """Edits of the measured repositories, lowest commit hashes first."""
    rows = read_rows(corpora, "edits", measured=True)
    for row in sorted(rows, key=lambda row: (row["commit"], row["path"])):
        if row["before"] != row["after"]:
            yield {name: row[name] for name in ("commit", "path", "message", "before", "after")}


def instructions(corpora: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Program-made edits of the measured repositories' files, without end."""
    rng = random.Random(seed)
    measured = read_rows(corpora, "code", measured=True)
    rows = [row for row in measured if 400 < len(row["text"]) < 8000]
    # Names and words from the measured files themselves: none was seen in training as such.
    names = sorted({n for row in rows for n in synth.NAME.findall(row["text"])})
    words = sorted({w for row in rows for w in synth.WORD.findall(row["text"])})
    maker = synth.Maker(rng, names, words)
    while True:
        row = rng.choice(rows)
        made = maker.make(synth.window(rng, row["text"]), True)
        if made is not None:
            yield {
                "path": row["path"],
                **dict(zip(("message", "before", "after"), made, strict=True)),
            }


def first_that_fit(
    edits: Iterator[dict[str, Any]], count: int, engine: Engine, context: int
) -> list[dict[str, Any]]:
    """The first edits whose prompt and right answer fit the context."""
    taken: list[dict[str, Any]] = []
    while len(taken) < count and (edit := next(edits, None)) is not None:
        texts = (edit["path"], edit["message"], edit["before"], edit["after"])
        if sum(len(engine.model.tokenizer(text)["input_ids"]) for text in texts) + 40 <= context:
            taken.append(edit)
    return taken


@torch.inference_mode()
def forced(model: Any, data: Path, name: str, count: int) -> dict[str, float]:
    """Loss and accuracy on held-out rows, by what a token is."""
    rows = Rows(data / f"held_{name}.npz")
    losses, right, kinds = [], [], []
    for number in random.Random(1).sample(range(len(rows)), min(count, len(rows))):
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
            result[f"{what}_loss"], result[f"{what}_accuracy"] = (
                float(loss[at].mean()), float(hit[at].mean())
            )  # fmt: skip
    return result


@torch.inference_mode()
def repeats(model: Any) -> dict[str, float]:
    """Accuracy on the second time of a span of random ids."""
    random_ids = torch.Generator().manual_seed(1)
    first = torch.full((4, 1), ID[TEXT_END])
    result = {}
    for span in (32, 128, 512, 1024, 2000):
        size = (4, span)
        ids = torch.randint(len(SPECIALS), model.config.vocab_size, size, generator=random_ids)
        ids = ids.repeat(1, 2)
        guess = model(torch.cat((first, ids), dim=1)).logits[:, span + 1 : -1].argmax(-1)
        result[str(span)] = float((guess == ids[:, span + 1 :]).float().mean())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="prepared rows, for the held-out loss")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--answers", type=Path, help="also write every answer here")
    parser.add_argument("--commits", type=int, default=40)
    parser.add_argument("--instructions", type=int, default=60)
    parser.add_argument("--held-rows", type=int, default=60)
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()

    engine = Engine.from_pretrained(args.model, dtype="float32")
    context = engine.model.context_length
    results: dict[str, Any] = {"repeated_random_span_accuracy": repeats(engine.model.model)}
    if args.data:
        results["held_out"] = {
            name: forced(engine.model.model, args.data, name, args.held_rows)
            for name in ("edits", "synth", "instruct", "text")
        }
    answers = {}
    for name, edits, count in (
        ("instructions", instructions(args.corpora, args.seed), args.instructions),
        ("commits", commits(args.corpora), args.commits),
    ):
        if count:
            answers[name] = first_that_fit(edits, count, engine, context)
            results[name] = answered(engine, answers[name], context)
    text = json.dumps(results, indent=2)
    args.out.write_text(text + "\n", encoding="utf-8")
    if args.answers:
        args.answers.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
