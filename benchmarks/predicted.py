"""Predicted outputs: fifty edits whose old file only the prediction tells.

    python -m benchmarks.predicted ../shared/data

The held-out commits with the lowest hashes (`benchmarks/edits.py` says whose). The prompt is the
commit's message, the answer is dictated: a logits processor leaves no other token than the new
file's next one. Passes of `auto` without a prediction and with the old file as one, and what of it
was accepted and rejected. Passes have a recorded cost, as in `benchmarks/structured.py`.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks import shared
from benchmarks.structured import NODE
from draftsmith import Engine, builtin
from draftsmith.bench.answer import Dictated
from draftsmith.core.cost import LADDER, RecordedCost
from draftsmith.core.stats import PREDICTION
from draftsmith.text.tokenizer import encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cost = RecordedCost({width: 1 + NODE * width for width in (0, *LADDER)})
    loaded = Engine.from_pretrained(builtin.path(), dtype="float32").model
    engine, tokenizer = Engine(loaded, cost=cost), loaded.tokenizer
    context = loaded.context_length
    assert context is not None
    edits = list(islice(shared.held_out(args.data, tokenizer, context), args.count))
    print(f"{shared.setup()}: {len(edits)} edits", flush=True)
    passes, told = [0, 0], [0, 0]
    tokens = guessed = 0
    for number, edit in enumerate(edits, 1):
        prompt = encode(tokenizer, f"{edit['path']}: {edit['message']}")
        answer = [*encode(tokenizer, edit["after"]), int(tokenizer.eos_token_id)]
        options: dict[str, Any] = {
            "max_new_tokens": len(answer),
            "temperature": 0.0,
            "processors": Dictated(len(prompt), answer),
        }
        got = [
            engine.generate(prompt, **options),
            engine.generate(prompt, prediction=edit["before"], **options),
        ]
        for i, result in enumerate(got):
            assert result.tokens == answer
            passes[i] += result.stats.passes
        of = got[1].stats.by_source[PREDICTION]
        told[0] += got[1].accepted_prediction_tokens
        told[1] += got[1].rejected_prediction_tokens
        assert of.drafted == of.accepted + of.rejected + of.unread
        guessed += got[1].sources.count(PREDICTION)
        tokens += len(answer)
        print(f"{number}: {tokens} tokens, passes {passes[0]} and {passes[1]}, "
              f"ratio {passes[0] / passes[1]:.2f}, of predictions {told[0]} accepted "
              f"and {told[1]} rejected", flush=True)  # fmt: skip
    assert guessed == told[0]


if __name__ == "__main__":
    sys.exit(main())
