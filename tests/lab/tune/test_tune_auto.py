"""What a model says after a token alone: how it is asked, and who hears it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from architectures import build, prompt
from command import call as run_command
from draftsmith.drafters.logit_rows import TOP
from draftsmith.engine.engine import Engine
from draftsmith.errors import OptionError, UnsupportedError
from draftsmith.lab.tune import auto as tuning
from draftsmith.model.load import load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.save(tmp_path / "model")


def test_rows_are_what_the_model_says_behind_a_line_break(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "CHUNK", 150)  # the vocabulary is no multiple of it
    model, heard = load(folder), list[int]()
    found = tuning.bigrams(model, heard.append)
    assert sum(heard) == len(found) == tuning.size(model) == model.vocab_size
    before = model.tokenizer("\n")["input_ids"]
    with torch.inference_mode():
        for row in found[::37]:
            logits = model.model(torch.tensor([[*before, row["after"] - 1]])).logits[0, -1]
            chosen = logits[torch.tensor(row["tokens"]).long()]
            assert torch.allclose(chosen, logits.topk(TOP).values, atol=1e-5)


def test_the_command_keeps_what_auto_then_begins_with(folder: Path, kept: Path) -> None:
    ran = run_command("tune", "auto", str(folder))
    assert ran.exit_code == 0, ran.output
    assert "until you delete it" in " ".join(ran.stderr.split())
    assert [file.suffix for file in (kept / "auto").iterdir()] == [".safetensors"]
    engine = Engine(load(folder))
    assert engine.drafter.bigrams is not None  # type: ignore[attr-defined]
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.0, "seed": 1}
    plain = engine.generate(prompt(12), drafter="none", **options)
    assert engine.generate(prompt(12), **options).tokens == plain.tokens


def test_models_that_cannot_be_asked() -> None:
    with pytest.raises(OptionError, match="made in memory has no name"):
        tuning.check(load(build("llama"), tokenizer=tiny.tokenizer()))
    mamba = build("mamba")
    mamba.config._name_or_path = "some/mamba"
    with pytest.raises(UnsupportedError, match="cannot verify trees"):
        tuning.check(load(mamba, tokenizer=tiny.tokenizer()))


def test_a_place_that_cannot_be_written_is_reported_before_the_work(
    folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.write_text("a file in the place of the folder")
    monkeypatch.setattr(tuning, "bigrams", lambda *_: pytest.fail("it was asked"))
    ran = run_command("tune", "auto", str(folder))
    assert ran.exit_code == 2
    assert "cannot be written" in " ".join(ran.stderr.split())
