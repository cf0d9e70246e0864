"""Questions → a model's own answers: the texts that its head should be trained on.

    python -m recipes.eagle3.answers WORK/texts/questions.jsonl -m smollm2 --out WORK/answers.jsonl

A head that was trained on what other models said is right less often, because it has to name what
its own target says next. So the target answers itself, greedily: first questions that it makes up,
when only the beginning of a user's turn is given (source: Magpie, arXiv 2406.08464), then those of
the file. It is made for a GPU with much memory. Texts are stored after each batch, and the same
command goes on with what is missing. No batch begins after --seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from draftsmith.model.load import load
from draftsmith.text.tokenizer import encode, render_chat

MARK = "\u0007"
"""A character that no template has."""
QUESTION_TOKENS, ANSWER_TOKENS = 128, 192
SHORTEST = 12
"""Characters of a made-up question at least."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("questions", type=Path, help="a file of lines with a text each")
    made.add_argument("-m", "--model", default="smollm2")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--made-up", type=int, default=8192, help="questions of the model itself")
    made.add_argument("--rows", type=int, default=2048, help="sequences of a batch")
    made.add_argument("--longest", type=int, default=512, help="most tokens of a question")
    made.add_argument("--seconds", type=float, default=float("inf"), help="no batch begins later")
    return made


@torch.inference_mode()
def continued(model: Any, prompts: Sequence[Sequence[int]], most: int, ends: set[int],
              **how: Any) -> list[list[int]]:  # fmt: skip
    """Return what follows each prompt, up to the token that ends it; one batch."""
    width = max(map(len, prompts))
    filler, ids = min(ends), [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    padded = [[filler] * (width - len(prompt)) + [*prompt] for prompt in prompts]
    mask = torch.tensor(ids, device=model.device)
    out: Tensor = model.generate(
        torch.tensor(padded, device=model.device), attention_mask=mask, max_new_tokens=most,
        eos_token_id=sorted(ends), pad_token_id=filler, **how,
    )  # fmt: skip
    rows = out[:, width:].tolist()
    cut = [next((i + 1 for i, t in enumerate(row) if t in ends), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, cut, strict=True)]


def made_up(loaded: Any, args: argparse.Namespace, ends: set[int]) -> Iterator[str]:
    """Yield questions that the model asks when it is to say what a user says."""
    rendered = loaded.tokenizer.decode(
        render_chat(loaded.tokenizer, [{"role": "user", "content": MARK}])
    )
    opened = encode(loaded.tokenizer, rendered[: rendered.index(MARK)])
    for seed in range(-(-args.made_up // args.rows)):
        torch.manual_seed(seed)
        rows = continued(loaded.model, [opened] * args.rows, QUESTION_TOKENS, ends, do_sample=True,
                         temperature=1.0, top_p=1.0, top_k=0)  # fmt: skip
        texts = (loaded.tokenizer.decode(row[:-1]).strip() for row in rows if row[-1] in ends)
        yield from (text for text in texts if len(text) >= SHORTEST)


def batches(prompts: list[list[int]], rows: int) -> list[list[list[int]]]:
    """Return batches of prompts of similar length, the batches in the order of their first."""
    some = [prompts[i : i + 8 * rows] for i in range(0, len(prompts), 8 * rows)]
    sorted_ = [prompt for part in some for prompt in sorted(part, key=len)]
    return [sorted_[i : i + rows] for i in range(0, len(sorted_), rows)]


def main() -> None:
    args = parser().parse_args()
    ends_at = perf_counter() + args.seconds
    loaded = load(args.model, dtype="bfloat16" if torch.accelerator.is_available() else "float32")
    tokenizer = loaded.tokenizer
    ends = {tokenizer.eos_token_id}
    asked = args.out.with_suffix(".questions.json")
    if not asked.exists():
        texts = list(dict.fromkeys(made_up(loaded, args, ends)))
        lines = args.questions.read_text(encoding="utf-8").splitlines()
        asked.write_text(json.dumps(texts + [json.loads(line)["text"] for line in lines]))
    chats = [[{"role": "user", "content": text}] for text in json.loads(asked.read_text())]
    prompts = [render_chat(tokenizer, chat) for chat in chats]
    parts = batches([p for p in prompts if len(p) <= args.longest], args.rows)
    with args.out.open("a+", encoding="utf-8") as file:
        file.seek(0)
        done = len({json.loads(line)["batch"] for line in file})
        for number, part in enumerate(tqdm(parts[done:], unit="batch"), done):
            if perf_counter() > ends_at:
                break
            rows = continued(loaded.model, part, ANSWER_TOKENS, ends, do_sample=False)
            texts = [tokenizer.decode(p + row) for p, row in zip(part, rows, strict=True)]
            file.write("".join(json.dumps({"text": t, "batch": number}) + "\n" for t in texts))
            file.flush()


if __name__ == "__main__":
    main()
