"""Trainings of tiny heads: what is learned is what drafts, and stopping changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from architectures import VOCAB, build, prompt
from draftsmith.engine.engine import Engine
from draftsmith.errors import OptionError, UnsupportedError
from draftsmith.lab.train.eagle3 import HeadRecipe, HeadStep, train, with_new_head
from draftsmith.lab.train.run import Run
from draftsmith.lab.train.texts import Texts
from draftsmith.model.load import load
from heads import Plainly

RECIPE = HeadRecipe(vocabulary=300, layers=(1, 2), length=16, rows=2, steps=4)


class Killed(BaseException):
    """Nobody catches it, as nobody catches SIGKILL."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("\n".join(tiny.TEXT * 2))
    return Texts(paths=(path,))


def test_what_is_learned_is_what_drafts() -> None:
    """The loss is the cross entropy of what a draft would say at each place, by the definition."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "rms_norm_eps": 1e-5}
    loaded = load(build("llama", num_hidden_layers=3, **sizes))
    ids = torch.arange(0, VOCAB, 2)
    recipe = replace(RECIPE, decay=0.5)
    lessons = with_new_head(loaded, recipe, ids)
    tokens = torch.tensor([prompt(9, seed=1), prompt(9, seed=2)])
    loss, _ = lessons.losses(tokens)
    tensors = {n.removeprefix("fuse."): t for n, t in lessons.head.state_dict().items()}
    tensors |= {"embed_tokens.weight": lessons.head.embeddings, "d2t": ids - torch.arange(len(ids))}
    plainly, expected = Plainly(tensors, {}), 0.0
    for k in range(recipe.unrolled):
        found = []
        for row in tokens.tolist():
            with torch.inference_mode():
                out = loaded.model(torch.tensor([row]), output_hidden_states=True)
            full = out.logits[0].softmax(-1)
            g = plainly.fuse([out.hidden_states[layer][0, :-1] for layer in recipe.layers])
            for i in range(8 - k):
                path = row[i + 2 : i + 2 + k]
                with torch.no_grad():
                    _, q = plainly.next(row[: i + 2], g[: i + 1], path)
                found.append(-float((full[i + 1 + k][ids] * q.log()).sum()))
        expected += recipe.decay**k * sum(found) / len(found)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_training_that_was_killed_ends_like_an_unbroken_one(
    model: str, texts: Texts, tmp_path: Path
) -> None:
    def dying(row: HeadStep) -> None:
        if row.step == 3:
            raise Killed

    whole = train(model, RECIPE, texts, tmp_path / "whole", save_every=2)
    with pytest.raises(Killed):
        train(model, RECIPE, texts, tmp_path / "broken", save_every=2, follow=dying)
    with pytest.raises(OptionError, match="another training"):
        train(model, replace(RECIPE, seed=1), texts, tmp_path / "broken")
    half = tmp_path / "broken" / "training" / "step-000003"  # of a killed process
    half.mkdir()
    seen: list[int] = []
    train(model, RECIPE, texts, tmp_path / "broken", 2, follow=lambda row: seen.append(row.step))
    assert seen == [3, 4]
    ours, theirs = (load_file(tmp_path / n / "model.safetensors") for n in ("broken", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert len((tmp_path / "broken" / "training" / "log.csv").read_text().splitlines()) == 5
    assert not half.exists()
    assert whole.tokens == 4 * 2 * 16
    modes = {path.stat().st_mode for path in whole.folder.iterdir() if path.is_file()}
    assert len(modes) == 1
    with pytest.raises(OptionError, match="already holds a model"):
        train(model, RECIPE, texts, tmp_path / "whole")


@pytest.mark.slow
def test_the_log_is_complete_before_its_checkpoint(
    model: str, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged, save = list[tuple[int, int]](), Run.save

    def saved(run: Run, step: int, *state: Any) -> None:
        logged.append((step, len((run.training / "log.csv").read_text().splitlines()) - 1))
        save(run, step, *state)

    monkeypatch.setattr(Run, "save", saved)
    train(model, RECIPE, texts, tmp_path / "head", save_every=2)
    assert logged == [(2, 2), (4, 4)]


@pytest.mark.parametrize(
    ("length", "says"),
    [(16, "the held-out texts have 2 tokens in all"), (513, "the context of .* is 512 tokens")],
)
def test_unusable_texts_are_refused_before_the_training(
    model: str, texts: Texts, tmp_path: Path, length: int, says: str
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("hello")
    texts = replace(texts, held_out=(short,))
    with pytest.raises(OptionError, match=says):
        train(model, replace(RECIPE, length=length), texts, tmp_path / "head")
    assert not (tmp_path / "head").exists()


@pytest.mark.slow
def test_a_head_for_a_model_without_llamas_layout(texts: Texts, tmp_path: Path) -> None:
    sizes = {"vocab_size": len(tiny.tokenizer()), "n_layer": 3, "n_positions": 32}
    build("gpt2", **sizes).save_pretrained(tmp_path / "gpt2")
    tiny.tokenizer().save_pretrained(tmp_path / "gpt2")
    train(str(tmp_path / "gpt2"), replace(RECIPE, steps=1), texts, tmp_path / "head")
    engine = Engine.from_pretrained(str(tmp_path / "gpt2"))
    found = engine.generate("hello", max_new_tokens=8, drafter=f"eagle3(model={tmp_path / 'head'})")
    assert not found.stats.drafter_failures


def test_a_trained_head_drafts_what_its_target_says(
    model: str, texts: Texts, tmp_path: Path
) -> None:
    recipe = replace(RECIPE, steps=30, rows=8, learning_rate=5e-3)
    rows: list[Any] = []
    train(model, recipe, texts, tmp_path / "head", follow=rows.append)
    assert rows[-1].right > 2 * rows[0].right
    assert rows[-1].loss < 0.8 * rows[0].loss
    engine = Engine.from_pretrained(model)
    drafter = f"eagle3(model={tmp_path / 'head'})"
    plain = engine.generate("hello world", max_new_tokens=24, drafter="none")
    found = engine.generate("hello world", max_new_tokens=24, drafter=drafter, budget=8)
    assert found.tokens == plain.tokens
    assert found.stats.drafted > 20


@pytest.mark.slow
def test_a_training_goes_on_with_a_head_and_other_texts(
    model: str, texts: Texts, tmp_path: Path
) -> None:
    first, rows = tmp_path / "first", list[HeadStep]()
    recipe = replace(RECIPE, steps=30, rows=8, learning_rate=5e-3)
    train(model, recipe, texts, first, follow=rows.append)
    further = HeadRecipe(start=str(first), length=16, rows=8, steps=2, seed=1)
    train(model, further, texts, tmp_path / "second", follow=rows.append)
    assert rows[30].loss < 0.8 * rows[0].loss
    heads = [load_file(tmp_path / n / "model.safetensors") for n in ("first", "second")]
    assert heads[0].keys() == heads[1].keys()
    assert torch.equal(heads[0]["d2t"], heads[1]["d2t"])
    assert not torch.equal(heads[0]["fc.weight"], heads[1]["fc.weight"])
    configs = [(tmp_path / n / "config.json").read_text() for n in ("first", "second")]
    assert configs[0] == configs[1]
    with pytest.raises(OptionError, match="keeps its tokens and layers"):
        replace(further, vocabulary=100)
    heads[0]["embed_tokens.weight"] = torch.zeros(1, 1)
    save_file(heads[0], first / "model.safetensors")
    with pytest.raises(UnsupportedError, match="embeddings of their own"):
        train(model, further, texts, tmp_path / "third")
