"""`draftsmith vocab` as its users type it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer, normalizers

import command
import tiny
from draftsmith import builtin

call = partial(command.call, "vocab")
fails = partial(command.fails, 2, "vocab")


def shown(*args: object, stdin: str | None = None) -> str:
    result = call(*args, stdin=stdin)
    assert result.exit_code == 0, result.output
    output: str = result.stdout
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    tiny.tokenizer().save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def lowering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Tokenizer.from_str(tiny.tokenizer().backend_tokenizer.to_str())
    made.normalizer = normalizers.Lowercase()
    path = tmp_path_factory.mktemp("lowering") / "tokenizer.json"
    made.save(str(path))
    return path


def test_the_same_vocabulary_needs_no_translation(folder: Path) -> None:
    found = shown(folder, folder / "tokenizer.json")
    assert "Use draft_model(…, algorithm='standard'): the two vocabularies are the same." in found
    pieces = -(-len("\n".join(builtin.demo())) // 100)
    assert f"yes (0/{pieces})" in found
    found = shown("edit-7m", folder)
    assert found.splitlines()[1].split()[:3] == ["edit-7m", "8,192", "42"]
    assert f"edit-7m ← {folder.name}" in found


def test_changed_texts_are_shown(folder: Path, lowering: Path) -> None:
    text = lowering.parent / "text.txt"
    text.write_text("plain Text and\tmore\n")
    found = shown(folder, lowering, text)
    assert "no (1/1)" in found
    assert "lowering0 changes 'Text and\\tmore\\n' into 'text and\\tmore\\n'." in found


def test_text_comes_from_standard_input_too(folder: Path) -> None:
    found = json.loads(shown(folder, folder, "-", "--json", stdin="hello world"))
    tokens = len(tiny.tokenizer()("hello world")["input_ids"])
    about = found["tokenizers"][str(folder)]
    assert about["tokens_per_character"] == tokens / len("hello world")
    assert about["tokens"] == len(tiny.tokenizer())
    (pair,) = found["pairs"]
    assert pair["same"]
    assert pair["of_target"] == pair["of_drafter_text"] == 1


def test_every_pair_of_more_than_two(folder: Path, lowering: Path) -> None:
    three = folder, lowering, "--also", folder / "tokenizer.json"
    found = json.loads(shown(*three, "--json"))
    assert len(found["tokenizers"]) == 3
    assert len(found["pairs"]) == 6
    table = shown(*three)
    assert table.count("←") == 1 + 6
    assert "Use draft_model" not in table


def test_bad_input_is_named(folder: Path, tmp_path: Path) -> None:
    assert "neither tokenizer_config.json nor tokenizer.json" in fails(folder, tmp_path)
    (tmp_path / "broken.json").write_text("{}")
    assert "cannot be read as a tokenizer" in fails(folder, tmp_path / "broken.json")
    assert "cannot read" in fails(folder, folder, tmp_path / "absent.txt")
    assert "is empty" in fails(folder, folder, "-", stdin="")
    (tmp_path / "image.txt").write_bytes(b"\x89PNG\xff")
    assert "not UTF-8" in fails(folder, folder, tmp_path / "image.txt")
    missing = tmp_path / "no" / "such" / "model"
    assert f"there is no folder {missing}" in fails(folder, missing)


def test_g3_every_name_of_a_model_works(tiny_smollm2: Path, folder: Path) -> None:
    for name in ("smollm2", tiny_smollm2):
        told = json.loads(shown(name, folder, "--json"))
        assert told["pairs"][0]["shared"] >= len(tiny.tokenizer()) - 3
        assert shown(name, folder).count(Path(name).name) >= 2
