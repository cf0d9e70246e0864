"""What several of these scripts need: held-out edits, a model to time, sessions, tables."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith import builtin
from draftsmith.bench.answer import Ask
from draftsmith.bench.plots import STYLE
from draftsmith.bench.records import Record
from draftsmith.bench.run import RunPlan, asked
from draftsmith.core.budget import FixedBudget
from draftsmith.core.drafter import Context, Drafter
from draftsmith.core.loop import start
from draftsmith.core.sampling import Distribution, SamplingParams, TorchSampler
from draftsmith.core.session import Session
from draftsmith.core.target import Target
from draftsmith.errors import PromptError
from draftsmith.model.measure import processor
from draftsmith.text.tokenizer import encode, render_chat

HELD_OUT = ("pallets+flask", "TheAlgorithms+Python")
"""Repositories that the built-in model was not trained on."""
ROOM = 64
"""Tokens an answer may be longer than the real new file."""


def held_out(data: Path, tokenizer: Any, tokens: int) -> Iterator[dict[str, Any]]:
    """Held-out edits whose prompt and answer have at most `tokens` tokens, lowest hash first.

    Rows of the corpus with their `repository`, `messages`, `prompt` in ids, and `limit` of tokens.
    """
    rows = []
    for repository in HELD_OUT:
        with lzma.open(data / "corpora" / "edits" / f"{repository}.jsonl.xz", "rt") as lines:
            rows += [{"repository": repository.replace("+", "/"), **json.loads(li)} for li in lines]
    for row in sorted(rows, key=lambda row: (row["commit"], row["path"])):
        messages = builtin.edit_messages(row["path"], row["message"], row["before"])
        prompt = render_chat(tokenizer, messages)
        limit = len(encode(tokenizer, row["after"])) + ROOM
        if len(prompt) + limit <= tokens:
            yield {**row, "messages": messages, "prompt": prompt, "limit": limit}


def random_llama() -> Any:
    """A random Llama of 100M parameters in bfloat16, grouped heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=640,
        intermediate_size=1792,
        num_hidden_layers=14,
        num_attention_heads=10,
        num_key_value_heads=5,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def started(
    target: Target,
    ids: Sequence[int],
    drafter: Drafter,
    width: int,
    vocab_size: int,
    limit: int = 100_000,
    budget: Any = None,
    **options: Any,
) -> Session:
    """A greedy session that has read its prompt; `width` nodes a step, or what `budget` says."""
    session = Session(
        ids,
        drafter=drafter,
        budget=budget or FixedBudget(width),
        distribution=Distribution((), greedy=True),
        sampler=TorchSampler.seeded(0),
        vocab_size=vocab_size,
        limit=limit,
        **options,
    )
    start(session, target)
    target.prefill(session.row)
    return session


def context(ids: list[int], vocab_size: int, budget: int, depth: int, **taps: Any) -> Context:
    """What a drafter sees, without a session."""
    return Context(
        ids=ids,
        prompt_length=len(ids),
        vocab_size=vocab_size,
        sampling=SamplingParams(),
        sampler=TorchSampler.seeded(0),
        budget=budget,
        depth=depth,
        **taps,
    )


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Ids of a random text for `random_llama`."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(10, 30_000, (count,), generator=generator).tolist()
    return ids


def asks(plan: RunPlan) -> Iterator[tuple[Record, Ask]]:
    """Every first-turn prompt that fits the model."""
    for record in plan.records:
        try:
            yield record, asked(plan, record, 0)
        except PromptError:
            continue


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def picture(drawn: str) -> str:
    """A drawing of `bench.plots` as a file of its own."""
    drawn = drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return drawn.replace(">", f"><style>{STYLE} svg {{ font-family: sans-serif }}</style>", 1)


def setup() -> str:
    """Where figures come from: a line above them."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    return f"{processor()}, {torch.get_num_threads()} threads, {versions}, {when} UTC"
