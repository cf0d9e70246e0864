"""The training recipe: initial weights that copy, and a step that leaves them able to."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

RECIPE = Path(__file__).parent.parent / "recipes" / "builtin"
REPEATED = 300


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """`headstart` and `model`, imported as the recipe's own scripts import them."""
    import importlib

    monkeypatch.syspath_prepend(str(RECIPE))
    return importlib.import_module("headstart"), importlib.import_module("model")


def copied(network: Any, ids: torch.Tensor) -> float:
    """Share of the second repetition that is said right."""
    with torch.no_grad():
        states = network.model(ids).last_hidden_state[0, REPEATED:-1]
    guess = (states @ network.model.embed_tokens.weight.T).argmax(-1)
    return float((guess == ids[0, REPEATED + 1 :]).float().mean())


def fresh(model: ModuleType, heads: int = 8, kv_heads: int = 4) -> Any:
    """A network of edit-7m's size but for its vocabulary."""
    config = tomllib.loads((RECIPE / "edit-7m.toml").read_text(encoding="utf-8"))
    sizes = {"vocab_size": 1000, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return model.fresh(**config["sizes"] | sizes)


def started(recipe: tuple[ModuleType, ModuleType], **sizes: int) -> tuple[Any, Any, torch.Tensor]:
    headstart, model = recipe
    torch.manual_seed(0)
    network = fresh(model, **sizes)
    span = torch.randint(42, 1000, (1, REPEATED))
    circuit = headstart.head_start(network, torch.randint(42, 1000, (500,)))
    return network, circuit, torch.cat((span, span), dim=1)


@pytest.mark.slow
def test_the_start_copies_and_steps_leave_it_alone(recipe: tuple[ModuleType, ModuleType]) -> None:
    network, circuit, ids = started(recipe, heads=8, kv_heads=4)
    moving = [p for p in network.parameters() if p.requires_grad]
    first = network.model.embed_tokens.weight.clone()
    circuit.protect()
    torch.testing.assert_close(network.model.embed_tokens.weight, first)
    with torch.no_grad():
        network.model.embed_tokens.weight += 0.1 * torch.randn(first.shape)
    circuit.protect()
    table = network.model.embed_tokens.weight
    torch.testing.assert_close(table.norm(dim=1), first.norm(dim=1))
    assert not any(
        p.requires_grad for layer in network.model.layers[:2] for p in layer.parameters()
    )
    assert len(moving) > 10
    assert copied(network, ids) > 0.97
    with pytest.raises(ValueError, match="head_start needs 3 layers, 4 heads"):
        started(recipe, heads=2, kv_heads=2)


MESSAGES = {
    "plain": ["ename", "Ġitem", "Ġto", "Ġproduct"],
    "arrow": ["name", "Ġitem", "Ġ->", "Ġproduct"],
    "quoted": ["place", "Ġ'", "item", "'", "Ġwith", "Ġ'", "product", "'"],
}


@pytest.mark.slow
@pytest.mark.parametrize("said", ["plain", pytest.param("arrow", marks=pytest.mark.slow), "quoted"])
def test_the_start_puts_one_word_in_place_of_another(
    recipe: tuple[ModuleType, ModuleType], said: str
) -> None:
    headstart, model = recipe
    torch.manual_seed(1)
    network = fresh(model)
    known = sorted({t for m in MESSAGES.values() for t in m if t[0] != "x"} | {"item", "product"})
    tokens = [*headstart.ID, *known]
    tokens += [f"x{i}" for i in range(1000 - len(tokens))]
    ids = {token: i for i, token in enumerate(tokens)}
    headstart.head_start(network, torch.randint(100, 1000, (500,)), tokens)
    before = torch.randint(100, 1000, (REPEATED,))
    before[20::40], before[30::40] = ids["item"], ids["Ġitem"]  # with a space and without
    after = before.clone()
    after[20::40], after[30::40] = ids["product"], ids["Ġproduct"]

    def row(message: list[str]) -> torch.Tensor:
        """What the next token of an edited answer is guessed to be."""
        user, file, answer, _ = (
            torch.tensor([ids[m]]) for m in ("<|user|>", "<|file|>", "<|assistant|>", "<|end|>")
        )
        words = torch.tensor([ids[token] for token in message])
        whole = torch.cat((user, words, file, before, answer, file, after))[None]
        with torch.no_grad():
            states = network.model(whole).last_hidden_state[0, -REPEATED - 1 : -1]
        return (states @ network.model.embed_tokens.weight.T).argmax(-1)

    follows = row(MESSAGES[said])
    assert float((follows == after).float().mean()) > 0.97
    assert float((follows[20::40] == ids["product"]).float().mean()) > 0.8
    assert float((follows[30::40] == ids["Ġproduct"]).float().mean()) > 0.8
    # Without an instruction the same words are copied.
    copies = row(["x7", "x8"])
    assert (copies[20::40] == ids["item"]).all()
