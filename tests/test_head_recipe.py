"""The texts that a head is trained on: a model's own answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from draftsmith import Engine

pytest.importorskip("recipes.eagle3.answers", reason="recipes are in a clone of the repository")
from recipes.eagle3 import answers

QUESTIONS = ["Rename a to b\n\na = 1\nprint(a)\n", "Remove the print\n\nc = 2\nprint(c)\n", "Say x"]


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Run the command on the built-in model; return the lines of its file."""
    asked, out = folder / "questions.jsonl", folder / "answers.jsonl"
    asked.write_text("".join(json.dumps({"text": text}) + "\n" for text in QUESTIONS))
    options = {"model": "edit-1m", "out": out, "made-up": 2, "rows": 2} | options
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", ["answers", str(asked), *words])
    answers.main()
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_the_model_answers_as_it_does_alone(monkeypatch: Any, tmp_path: Path) -> None:
    """In batches of padded prompts; every text has the chat template and the greedy answer."""
    monkeypatch.setattr(answers, "ANSWER_TOKENS", 12)
    found = run(monkeypatch, tmp_path, **{"made-up": 0})
    assert [line["batch"] for line in found] == [0, 0, 1]
    engine = Engine.from_pretrained("edit-1m", device="cpu", dtype="float32")
    expected = set()
    for text in QUESTIONS:
        alone = engine.generate([{"role": "user", "content": text}], max_new_tokens=12,
                                temperature=0.0, drafter="none")  # fmt: skip
        tokenizer = engine.model.tokenizer
        ids = [*alone.prompt_tokens, *alone.tokens]
        expected.add(tokenizer.decode(ids))
    assert {line["text"] for line in found} == expected


@pytest.mark.slow
def test_it_goes_on_after_the_batches_that_are_stored(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(answers, "ANSWER_TOKENS", 4)
    assert run(monkeypatch, tmp_path, seconds=0) == []
    whole = run(monkeypatch, tmp_path)
    kept = [line for line in whole if line["batch"] == 0]
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert run(monkeypatch, tmp_path) == whole
