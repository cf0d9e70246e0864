"""Greedy answers with a draft model of another vocabulary are those of plain decoding.

Real tokenizers and texts that are hard to carry over; models that are small, random, or oracles.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

import pytest
import torch
from pairs import pair_of
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from draftsmith import builtin
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.core.target import ModelFacts
from draftsmith.drafters.draft_model.draft_model import ALGORITHMS, BoundDraftModel, DraftModel
from draftsmith.engine.engine import Engine
from draftsmith.testing import ToyTarget
from draftsmith.text.vocab import Vocabulary, complete
from tiers import slow_after

TOKENIZERS = {"llama2": "llama2", "gpt2": "gpt2", "qwen2": "qwen2", "t5": "t5-small"}

TOKENS = 3
"""Most tokens per draft."""

PIECES = (
    "Once upon a time there was a little girl. ",
    "def add(a, b):\n    return a + b\n",
    "emoji 🦊🚀👩‍👩‍👧 and 🇫🇷 ",
    "中文字符，还有标点。",
    "tabs\tin\t\tlines\t",
    "Windows\r\nline\r\n\r\nends\r\n",
    "many   repeated     spaces      ",
    "naïve café Ωμέγα ǅ ﬁ ",
    "<|im_start|>user\nhello<|im_end|>\n",
    "<|user|>say it<|end|><|assistant|>",
    "<s>[INST] it </s> <|endoftext|>",
    "x_1 = {'a': [1, 22, 333]}  # done\n",
)


def prompts(target: str, count: int) -> list[list[int]]:
    """Ids of `count` texts of a few pieces; every tenth ends inside a character."""
    tokenizer = load(target).model.tokenizer
    table = Vocabulary.of(tokenizer)
    made = []
    for number in range(count):
        rng = random.Random(number)
        # The first ones are each piece alone.
        pieces = [PIECES[number]] if number < len(PIECES) else rng.sample(PIECES, rng.randint(1, 4))
        if number % 10 == 9:
            ids = tokenizer("".join(pieces) + "🦊")["input_ids"][:-1]
            written = table.bytes_of(ids)
            assert complete(written) != written
        else:
            ids = tokenizer("".join(pieces))["input_ids"]
        made.append(ids)
    return made


# ------------------------------------------------------------------------------------- models


@cache
def load(target: str) -> Engine:
    known = {"stories260K": SHARED[0] / "weights" / "stories260K"} if SHARED else {}
    source = known.get(target) or builtin.path(target)
    return Engine.from_pretrained(source, drafter="none", dtype="float32", budget="drafter")


SHARED: list[Path] = []


@pytest.fixture(autouse=True)
def _shared(shared_data: Path) -> None:
    SHARED[:] = [shared_data]


@cache
def tokenizer_of(name: str) -> Any:
    file = SHARED[0] / "tokenizers" / TOKENIZERS[name] / "tokenizer.json"
    return PreTrainedTokenizerFast(tokenizer_file=str(file))


class Reading(ToyTarget):
    """An oracle: at a text that begins one of `truths` it says how that one goes on.

    Every tenth token is another one. A tokenizer that rewrites its input is read as it writes.
    """

    def __init__(self, vocabulary: Vocabulary, truths: Sequence[bytes]) -> None:
        super().__init__(vocabulary.size, shape="chain")
        self.vocabulary, self.wrong = vocabulary, vocabulary.ids[b"x"]
        self.truths = [vocabulary.bytes_of(vocabulary.encode(complete(one))) for one in truths]

    def logits(self, prefix: Sequence[int]) -> Tensor:
        text, ids = self.vocabulary.bytes_of(prefix), self.vocabulary.ids
        known = ((truth, place(truth, text)) for truth in self.truths)
        rest = next((truth[at : at + 20] for truth, at in known if at is not None), b"")
        said = next((ids[rest[:n]] for n in range(20, 0, -1) if rest[:n] in ids), self.wrong)
        if crc32(text, len(prefix)) % 10 == 0:
            said = self.wrong
        return torch.full((self.vocab_size,), -30.0).index_fill(0, torch.tensor(said), 0.0)


def place(truth: bytes, text: bytes) -> int | None:
    """Where `text` ends in `truth`; space does not count, since it may come and go at the seams."""
    if truth.startswith(text):
        return len(text)
    bare = b"".join(text.split())
    ends = [at for at in range(len(truth) + 1) if b"".join(truth[:at].split()) == bare]
    return ends[-1 if text[-1:].isspace() else 0] if ends else None


@dataclass(frozen=True, eq=False, repr=False)
class OracleText(Drafter):
    """A draft model that knows the true answers, in the words of its own tokenizer."""

    tokenizer: str
    truths: Sequence[bytes] = field(default=())

    name: ClassVar[str] = "oracle_text"

    def bind(self, model: ModelFacts) -> Drafter:
        target = Vocabulary.of(model.tokenizer, model.vocab_size)
        own = Vocabulary.of(tokenizer_of(self.tokenizer))
        pair = pair_of(target, own, tokens=TOKENS, source=self.name)
        config = DraftModel("oracle", tokens=TOKENS, algorithm="slem")
        return BoundDraftModel(
            config, Reading(own, self.truths), ALGORITHMS["slem"](pair), True, ""
        )

    def preferred_width(self) -> int:
        return TOKENS

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        raise AssertionError("bound before use")


# -------------------------------------------------------------------------------------- tests


@cache
def plain(target: str, count: int, length: int) -> list[list[int]]:
    engine = load(target)
    return [engine.generate(ids, max_new_tokens=length).tokens for ids in prompts(target, count)]


def check(
    target: str, drafter: Drafter, asked: Sequence[list[int]], right: Sequence[list[int]]
) -> float:
    """Assert equal answers to every prompt; the share of drafts accepted."""
    drafted = accepted = 0
    length = max(map(len, right))
    for ids, tokens in zip(asked, right, strict=True):
        found = load(target).generate(ids, max_new_tokens=length, drafter=drafter)
        assert found.tokens == tokens, f"{ids} of {target} with {drafter}"
        drafted += found.stats.drafted
        accepted += found.stats.accepted
    assert drafted
    return accepted / drafted


MODELS = ["edit-bytes slem", "edit-bytes slrs", "edit-bytes tli", "edit-1m slem", "edit-1m tli"]


@pytest.mark.parametrize("name", slow_after(2, MODELS))
def test_greedy_answers_with_a_real_draft_model(name: str) -> None:
    target = "edit-7m" if name in MODELS[:2] else "stories260K"
    model, algorithm = name.split()
    drafter = DraftModel(model, tokens=TOKENS, algorithm=algorithm)  # type: ignore[arg-type]
    check(target, drafter, prompts(target, len(PIECES)), plain(target, len(PIECES), 6))


MANY = int(os.environ.get("DRAFTSMITH_PROMPTS", "12"))
"""Prompts of a slow case."""


@pytest.mark.slow
@pytest.mark.parametrize("target", [pytest.param("edit-7m", marks=pytest.mark.slow), "stories260K"])
@pytest.mark.parametrize("name", slow_after(1, TOKENIZERS))
def test_an_oracle_in_other_words(target: str, name: str) -> None:
    """An oracle of answers that go on for a draft beyond those it is asked for."""
    table = Vocabulary.of(load(target).model.tokenizer)
    asked, longer = prompts(target, MANY), plain(target, MANY, 10 + TOKENS)
    truths = tuple(table.bytes_of([*ids, *found]) for ids, found in zip(asked, longer, strict=True))
    accepted = check(target, OracleText(name, truths), asked, [tokens[:10] for tokens in longer])
    # The built-in model continues such texts with spaces one by one and halves of characters: text
    # that no tokenizer would write so, and that no drafter of other words can meet.
    if target == "stories260K":
        assert accepted > 0.5
