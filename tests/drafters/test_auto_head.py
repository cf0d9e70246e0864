"""`auto` with a trained head: its rows, what is learned of them, and that nothing is lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from architectures import VOCAB, build
from draftsmith.core.draft import ROOT
from draftsmith.drafters import auto_head
from draftsmith.drafters.auto import Auto
from draftsmith.drafters.auto_head import HeadRows
from draftsmith.drafters.registry import parse
from draftsmith.drafters.trained_head import BoundHead
from draftsmith.drafters.tree_search import NODE
from draftsmith.engine.engine import Engine
from draftsmith.errors import LoadError, OptionError
from draftsmith.model.load import load
from draftsmith.testing import check_drafter
from heads import random_head, save

LAYERS = (1, 3, 4)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return save(tmp_path / "head", random_head(64, VOCAB, 40), layer_ids=LAYERS)


def test_contract(tmp_path: Path) -> None:
    tensors = random_head(4, 11, 3, reads=2, dtype=torch.float64, seed=2)
    tensors["d2t"] = torch.tensor([1, 3, 7])
    check_drafter(Auto(head=f"eagle3(model={save(tmp_path, tensors, layer_ids=(1, 2))})"), length=6)


def test_it_is_typed_like_any_option(folder: str) -> None:
    typed = parse(f"auto(head=eagle3(model={folder}, depth=2))")
    assert isinstance(typed, Auto)
    assert typed.head.depth == 2
    assert parse(str(typed)) == typed
    with pytest.raises(OptionError, match="must be a drafter with a trained head"):
        parse("auto(head=copyspec)")
    with pytest.raises(OptionError, match="guesses only"):
        parse("auto(head=mtp(sample=true))")


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_chat_goes_back_to_where_the_head_began(
    more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head read the end of a longer text, and the new one ends there, or beside it."""
    tokenizer = tiny.tokenizer()
    path = save(tmp_path, random_head(64, len(tokenizer), 60), layer_ids=LAYERS)
    first = [{"role": "user", "content": "the quick brown fox jumps"}]
    long = [*first, {"role": "assistant", "content": "é lazy dog over the"},
            {"role": "user", "content": "dog"}]  # fmt: skip
    engine = Engine(tiny.model(5), tokenizer, drafter=f"auto(head=eagle3(model={path}))")
    ends = [len(engine.prepare({}).encode(messages)) for messages in (first, long)]
    monkeypatch.setattr(auto_head, "RECENT", ends[1] - ends[0] + more)
    monkeypatch.setattr(auto_head.HeadRows, "worth", lambda self, *_: [] if self.places else [-1])
    chat = engine.chat(max_new_tokens=6)
    chat.messages = long[:-1]
    chat.send(long[-1]["content"])
    chat.messages = []
    found = chat.send(first[0]["content"])
    assert not found.notices
    assert found.tokens == engine.generate(first, drafter="none", max_new_tokens=6).tokens


def test_a_head_that_was_bound_to_another_model_is_bound_again(folder: str) -> None:
    one, other = (build("llama", num_hidden_layers=5, hidden_size=n) for n in (64, 32))
    bound = Engine(one, drafter=f"eagle3(model={folder})").drafter
    with pytest.raises(LoadError, match="width"):
        Engine(other, drafter=bound)


def counting(folder: Path) -> tuple[Any, str]:
    """A model that answers i + 1 to token i, and a head that knows it.

    Attention of the head looks at its own entry alone, whose embedding it copies into the state.
    """
    generator = torch.Generator().manual_seed(0)
    words = torch.zeros(VOCAB, 32)
    words[:, :16] = torch.nn.functional.normalize(torch.randn(VOCAB, 16, generator=generator))
    model = build("llama", hidden_size=32)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(words)
        model.lm_head.weight.copy_(20 * words.roll(1, 0))
        for block in model.model.layers:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    head = random_head(32, VOCAB, VOCAB, reads=1)
    half, attention = torch.eye(8), "layers.0.self_attn."
    for name in ("fc", "layers.0.mlp.down_proj", *(f"{attention}{x}_proj" for x in "qkvo")):
        head[f"{name}.weight"].zero_()
    for name in [name for name in head if "norm" in name]:
        head[name].fill_(1.0)
    for side in (0, 1):
        own = slice(8 * side, 8 * side + 8)
        head[f"{attention}q_proj.weight"][16 * side : 16 * side + 16, own] = 4 * half.repeat(2, 1)
        head[f"{attention}k_proj.weight"][own, own] = 4 * half
        head[f"{attention}v_proj.weight"][own, own] = half
        head[f"{attention}o_proj.weight"][own, 16 * side : 16 * side + 8] = 10 * half
    head |= {"embed_tokens.weight": words, "lm_head.weight": 5 * words.roll(1, 0)}
    return model, save(folder, head, layer_ids=(1,))


def test_a_head_knows_what_no_context_does(tmp_path: Path) -> None:
    """Nothing repeats in the answer. What the head says is drafted, and trusted more and more."""
    model, folder = counting(tmp_path)
    engine = Engine.from_pretrained(model)
    head = f"eagle3(model={folder})"
    alone, mixed, both = (
        engine.generate([[5]], max_new_tokens=60, drafter=drafter, budget=12)[0]
        for drafter in ("auto", f"auto(head={head})", head)
    )
    assert alone.tokens == mixed.tokens == both.tokens == list(range(6, 66))
    assert both.stats.passes < 20
    assert alone.stats.passes > 50
    assert mixed.stats.passes < 24


def test_a_head_reads_the_last_part_of_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_head, "RECENT", 8)
    rows: list[list[int]] = []
    ask = BoundHead.ask

    def asked(self: Any, several: Any, questions: Any) -> Any:
        rows.extend([*entries.row.ids, *entries.row.pending] for entries in several)
        return ask(self, several, questions)

    monkeypatch.setattr(BoundHead, "ask", asked)
    model, folder = counting(tmp_path)
    engine = Engine.from_pretrained(model, drafter=f"auto(head=eagle3(model={folder}))", budget=12)
    long = [7, 3, 9, 2, 8] * 9
    first, second = (
        engine.generate([[*ids, 5]], max_new_tokens=30)[0] for ids in (long, long[:20])
    )
    assert first.tokens == second.tokens == list(range(6, 36))
    assert second.stats.passes < 16
    assert rows[0] == [*long[-6:], 5, 6]


def test_a_head_is_not_asked_where_contexts_are_certain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = counting(tmp_path)
    engine, text = Engine.from_pretrained(model), list(range(6, 90))
    ask, asked, counts = BoundHead.ask, list[Any](), list[int]()
    monkeypatch.setattr(BoundHead, "ask", lambda *args: asked.append(args) or ask(*args))
    for ids in ([5], [*text, *text, 5]):
        asked.clear()
        options: dict[str, Any] = {"drafter": f"auto(head=eagle3(model={folder}))", "budget": 12}
        [found] = engine.generate([ids], max_new_tokens=60, **options)
        assert found.tokens == list(range(6, 66))
        counts.append(len(asked))
    assert counts[0] > 4 * counts[1]


def test_what_a_head_costs_is_counted_for_all_rows_that_wait(folder: str) -> None:
    """The first question finds at most 0.4 tokens, and takes 0.1 passes of 1 or of 8 rows."""
    auto = parse(f"auto(head=eagle3(model={folder}))").bind(load(build("llama")).facts)
    rows, none = HeadRows(auto.bound_head), np.zeros(0, NODE)
    asked = []
    for count in (1, 8):
        cost = SimpleNamespace(rows=count, drafting=lambda *_: 0.1)
        asked.append(rows.worth(none, SimpleNamespace(cost=cost, depth=4), 1.0))
    assert asked == [[ROOT], []]
