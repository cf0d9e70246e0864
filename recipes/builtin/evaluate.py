"""Measure an exported model: `evaluate.py --model M --corpora C --data D --out results.json`.

What counts is free-running output: greedy answers to edits of repositories the model never saw.
Teacher-forced figures on the held-out rows come beside them. Uses only transformers and what was
exported, so it measures what is shipped.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections import Counter
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import common
import numpy as np
import synth
import torch
from store import CHANGED, COPIED, SKIPPED, Reader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerFast as Tokenizer


def ratio(first: str, second: str) -> float:
    """difflib's similarity of two texts, by words rather than characters (faster, no junk rule)."""
    parts = [re.findall(r"\w+|\s+|[^\w\s]", text) for text in (first, second)]
    return SequenceMatcher(None, *parts, autojunk=False).ratio()


def change_of(before: str, after: str) -> tuple[Counter[str], Counter[str]]:
    """The lines an edit takes away and the lines it adds."""
    old, new = Counter(before.splitlines()), Counter(after.splitlines())
    return old - new, new - old


def done_share(before: str, after: str, answer: str) -> float:
    """How much of the wanted change the answer makes: of its lines gone and its lines added."""
    gone, added = change_of(before, after)
    done_gone, done_added = change_of(before, answer)
    wanted = gone.total() + added.total()
    return ((gone & done_gone).total() + (added & done_added).total()) / max(1, wanted)


def generate(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    edits: list[dict[str, Any]],
    context: int,
    size: int,
) -> None:
    """Write the greedy answer of every edit into it; prompts of like length share a batch."""
    for edit in edits:
        prompt = common.edit_prompt(edit["path"], edit["message"], edit["before"])
        edit["ids"] = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
    order = sorted(edits, key=lambda edit: len(edit["ids"]))
    for start in range(0, len(order), size):
        part = order[start : start + size]
        widest = max(len(edit["ids"]) for edit in part)
        pad = tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (widest - len(e["ids"])) + e["ids"] for e in part])
        room = min(context - widest, int(1.3 * widest) + 100)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=(ids != pad).long(), do_sample=False, max_new_tokens=room
            )
        for edit, row in zip(part, out[:, widest:].tolist(), strict=True):
            stop = next((i for i, t in enumerate(row) if t in tokenizer.all_special_ids), None)
            edit["answer"] = tokenizer.decode(row if stop is None else row[:stop])
            edit["stopped"] = stop is not None
            edit["new_tokens"] = len(row) if stop is None else stop
        print(f"answered {min(start + size, len(order))} of {len(order)}", flush=True)


def judge(edits: list[dict[str, Any]]) -> dict[str, Any]:
    for edit in edits:
        before, after, answer = edit["before"], edit["after"], edit["answer"]
        edit["ratio"] = ratio(after, answer)
        edit["ratio_to_before"] = ratio(before, answer)
        edit["differs"] = answer != before
        edit["exact"] = answer == after
        edit["done"] = done_share(before, after, answer)
    count = len(edits)
    return {
        "count": count,
        "median_ratio_to_new_file": statistics.median(e["ratio"] for e in edits),
        "mean_ratio_to_new_file": statistics.mean(e["ratio"] for e in edits),
        "median_ratio_to_old_file": statistics.median(e["ratio_to_before"] for e in edits),
        "old_file_median_ratio_to_new_file": statistics.median(
            ratio(e["before"], e["after"]) for e in edits
        ),
        "differs_from_old_file": sum(e["differs"] for e in edits) / count,
        "change_done_mean": statistics.mean(e["done"] for e in edits),
        "change_fully_done": sum(e["done"] == 1 for e in edits) / count,
        "exact": sum(e["exact"] for e in edits) / count,
        "ended_by_itself": sum(e["stopped"] for e in edits) / count,
    }


def commits(corpora: Path, tokenizer: Tokenizer, context: int, count: int) -> list[dict[str, Any]]:
    """Edits of the measured repositories that fit, lowest commit hashes first."""
    rows = sorted(
        common.read_rows(corpora, "edits", measured=True), key=lambda r: (r["commit"], r["path"])
    )
    taken = []
    for row in rows:
        prompt = common.edit_prompt(row["path"], row["message"], row["before"])
        size = len(tokenizer(prompt)["input_ids"]) + len(tokenizer(row["after"])["input_ids"])
        if size + 8 <= context and row["before"] != row["after"]:
            taken.append({k: row[k] for k in ("commit", "path", "message", "before", "after")})
            if len(taken) == count:
                break
    return taken


def instructions(
    corpora: Path, tokenizer: Tokenizer, context: int, count: int, seed: int
) -> list[dict[str, Any]]:
    """Program-made edits of the measured repositories' files, a third each small, middle, large."""
    rng = random.Random(seed)
    rows = [
        row
        for row in common.read_rows(corpora, "code", measured=True)
        if 400 < len(row["text"]) < 8000
    ]
    # Names and words from the measured files themselves: none was seen in training as such.
    names = sorted({n for row in rows for n in synth.NAME.findall(row["text"])})
    words = sorted({w for row in rows for w in synth.WORD.findall(row["text"])})
    maker = synth.Maker(rng, names, words)
    taken: list[dict[str, Any]] = []
    while len(taken) < count:
        row = rng.choice(rows)
        made = maker.make(synth.window(rng, row["text"]), True)
        if made is None:
            continue
        message, before, after = made
        if sum(len(tokenizer(text)["input_ids"]) for text in made) + 40 <= context:
            edit = {"path": row["path"], "message": message, "before": before, "after": after}
            taken.append(edit)
    return taken


@torch.inference_mode()
def forced(model: PreTrainedModel, data: Path, name: str, rows: int) -> dict[str, float]:
    """Loss and accuracy on held-out rows, answers only where a row has an answer."""
    reader = Reader(data, f"held_{name}")
    sums: dict[str, list[float]] = {}
    picked = random.Random(1).sample(range(len(reader)), min(rows, len(reader)))
    for number in picked:
        ids, classes = reader.row(number)
        ids, classes = ids[:2048], classes[:2048]
        if name == "text":  # as the tokenizer gives it
            ids = np.append(model.config.bos_token_id, ids)
            classes = np.append(np.uint8(SKIPPED), classes)
        if len(ids) < 2:
            continue
        logits = model(torch.from_numpy(ids)[None]).logits[0, :-1].float()
        targets = torch.from_numpy(ids[1:])
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        right = logits.argmax(-1) == targets
        label = torch.from_numpy(classes[1:].copy())
        named = {"copied": COPIED, "changed": CHANGED}
        masks = {key: label == value for key, value in named.items()}
        if name == "text":
            masks = {"all": label != SKIPPED}
        elif name == "instruct":
            masks = {"answer": label == CHANGED}
        else:
            masks["answer"] = label != SKIPPED
        for key, mask in masks.items():
            entry = sums.setdefault(key, [0.0, 0.0, 0.0])
            entry[0] += float(losses[mask].sum())
            entry[1] += float(right[mask].sum())
            entry[2] += float(mask.sum())
    result: dict[str, float] = {"rows": len(picked)}
    for key, (loss, hits, total) in sums.items():
        if total:
            result[f"{key}_loss"] = loss / total
            result[f"{key}_accuracy"] = hits / total
    return result


@torch.inference_mode()
def repeats(model: PreTrainedModel, first_plain: int) -> dict[str, float]:
    """Accuracy on the second time of a span of random ids."""
    random_ids = torch.Generator().manual_seed(1)
    first = torch.full((4, 1), model.config.bos_token_id)
    result = {}
    for span in (32, 128, 512, 1024, 2000):
        ids = torch.randint(
            first_plain, model.config.vocab_size, (4, span), generator=random_ids
        ).repeat(1, 2)
        guess = model(torch.cat((first, ids), dim=1)).logits[:, span + 1 : -1].argmax(-1)
        result[str(span)] = float((guess == ids[:, span + 1 :]).float().mean())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="prepared rows, for the held-out loss")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--answers", type=Path, help="also write every answer here")
    parser.add_argument("--commits", type=int, default=40)
    parser.add_argument("--instructions", type=int, default=60)
    parser.add_argument("--held-rows", type=int, default=60)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()

    since = time.time()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    context = model.config.max_position_embeddings
    results: dict[str, Any] = {"parameters": model.num_parameters()}
    results["repeated_random_span_accuracy"] = repeats(model, len(common.SPECIALS))
    if args.data:
        results["held_out"] = {
            name: forced(model, args.data, name, args.held_rows)
            for name in ("edits", "synth", "instruct", "text")
        }
    print(json.dumps(results, indent=1), flush=True)

    answers: dict[str, list[dict[str, Any]]] = {}
    if args.instructions:
        made = instructions(args.corpora, tokenizer, context, args.instructions, args.seed)
        generate(model, tokenizer, made, context, args.batch)
        results["instructions"] = judge(made)
        answers["instructions"] = made
        print(json.dumps(results["instructions"], indent=1), flush=True)
    if args.commits:
        mined = commits(args.corpora, tokenizer, context, args.commits)
        generate(model, tokenizer, mined, context, args.batch)
        results["commits"] = judge(mined)
        first = mined[:10]
        results["commits"]["first_ten_that_differ"] = sum(e["differs"] for e in first)
        results["commits"]["first_ten"] = [
            {k: e[k] for k in ("commit", "path", "ratio", "differs", "done")} for e in first
        ]
        answers["commits"] = mined
    for edits in answers.values():
        for edit in edits:
            edit.pop("ids")
    results["seconds"] = round(time.time() - since)
    args.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if args.answers:
        args.answers.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
