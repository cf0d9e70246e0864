"""What `auto` takes: to open a prompt, and for a pass (`draft` and `observe`), by context length.

    python -m benchmarks.auto_speed ../shared/data

Contexts are recorded answers one after another, and three texts that are the worst for contexts.
Every pass is told the next tokens of the text. Processor time of one core; bytes of the contexts.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import mean, median
from time import thread_time

import torch

from benchmarks.named_suites import recorded
from benchmarks.shared import context
from draftsmith.bench.encoding import Encoding
from draftsmith.core.drafter import Outcome
from draftsmith.core.target import RowOutput
from draftsmith.core.verify import verify_greedy
from draftsmith.drafters.auto import AutoState
from draftsmith.drafters.context_index import ContextIndex
from draftsmith.drafters.mixer_prior import prior

LENGTHS = (1_000, 8_000, 32_000, 128_000)
PASSES = 200
AHEAD = 70
VOCABULARY = 262_144


def opened(ids: list[int], answers: ContextIndex | None) -> tuple[AutoState, float]:
    """A state that has read the ids, and the seconds."""
    state = AutoState(prior(1 if answers is None else 2), answers=answers)
    begin = thread_time()
    state.take(context(ids, VOCABULARY, 64, 64))
    state.read()
    return state, thread_time() - begin


def measure(text: Sequence[int], length: int, answers: ContextIndex | None = None) -> list[str]:
    """A line of the table."""
    ids = list(text[:length])
    state, _ = opened(ids, answers)
    reading = min(opened(ids, answers)[1] for _ in range(5))
    nothing, seconds, nodes = torch.empty((0, 0)), [], []
    for _ in range(PASSES):
        ctx = context(ids, VOCABULARY, 64, 64)
        begin = thread_time()
        draft = state.draft(ctx)
        took = thread_time() - begin
        truth = text[len(ids) : len(ids) + AHEAD]
        choices = [truth[depth] for depth in (0, *draft.node_depths())]
        verdict = verify_greedy(draft, choices, lambda *_: False)
        ids += verdict.tokens
        begin = thread_time()
        state.observe(ctx, Outcome(draft, verdict, RowOutput(nothing)))
        seconds.append(took + thread_time() - begin)
        nodes.append(len(draft))
    held = state.text.nbytes / len(ids)
    return [
        f"{length:,}", f"{1e3 * reading:.1f}", f"{1e6 * median(seconds):.0f}",
        f"{1e6 * mean(seconds):.0f}", f"{mean(nodes):.1f}", f"{held:.0f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    options = parser.parse_args()
    encoding = Encoding((options.data / "tokenizers",))
    answers = [encoding(record) for record in recorded("mt-redundant", options.data)]
    told = [token for answer in answers for token in (*answer.prompt, *answer.answer)]
    most = LENGTHS[-1] + PASSES * AHEAD
    noise = random.Random(0)
    texts: dict[str, list[int]] = {
        "recorded answers": list(islice(cycle(told), most)),
        "one token": [7] * most,
        "period two": [7, 8] * (most // 2),
        "all different": noise.sample(range(VOCABULARY), most),
    }
    memory = opened(told[-100_000:], None)[0].text
    print("| text | tokens | open, ms | a pass, µs: median | mean | nodes | bytes a token |")
    print("|---|---|---|---|---|---|---|")
    for name, text in texts.items():
        for length in LENGTHS:
            print(f"| {name} | " + " | ".join(measure(text, length)) + " |", flush=True)
    print("| answers, with a memory of 100,000 tokens | " + " | ".join(
        measure(texts["recorded answers"], 8_000, memory)) + " |")  # fmt: skip


if __name__ == "__main__":
    main()
