"""From files to sequences: what is rearranged, what is kept out, which ids are free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from draftsmith import builtin
from draftsmith.errors import OptionError
from draftsmith.lab.train.evaluate import by_depth, standard_loss
from draftsmith.lab.train.recipe import Texts
from draftsmith.lab.train.texts import held_out_stream, sequences, stream
from draftsmith.lab.train.trainable import free_tokens, open_trainable
from draftsmith.model.adaptive import AdaptiveTokens
from draftsmith.model.load import read_model

END, PREFIX, SUFFIX, MIDDLE = 1, 7, 8, 9
"""Markers of the built-in model's tokenizer."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(builtin.path())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    for number in range(40):
        (tmp_path / "src" / f"m{number:02}.py").write_text(f"def f{number}(x):\n    return x\n")
    (tmp_path / "readme.md").write_text("A short text.\n" * 3)
    lines = [json.dumps({"text": f"<|user|>say {n}<|end|>"}) for n in range(20)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    return tmp_path


def split(stream: np.ndarray) -> list[list[int]]:
    """The documents of a stream; the marker that ends each also begins it."""
    ends = np.flatnonzero(stream == END) + 1
    return [part[:-1].tolist() for part in np.split(stream, ends)[:-1] if len(part) > 1]


def test_only_code_is_rearranged(folder: Path, tokenizer: Any) -> None:
    texts = Texts(paths=[folder / "src", folder / "readme.md"], prose=[folder / "chats.jsonl"])
    found = split(stream(texts, tokenizer, 1.0, seed=0))
    code, prose = found[:40], found[40:]
    assert all(ids[0] == PREFIX and SUFFIX in ids and MIDDLE in ids for ids in code)
    assert not any(PREFIX in ids for ids in prose)
    assert tokenizer.decode(prose[0]) == "A short text.\n" * 3
    assert prose[1][0] == 2, "special tokens are read as such"
    plain = split(stream(texts, tokenizer, 0.0, seed=0))
    assert tokenizer.decode(plain[3]) == "def f3(x):\n    return x\n"
    one, again, other = (stream(texts, tokenizer, 0.5, seed) for seed in (3, 3, 4))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_held_out_text_is_in_no_training_text(folder: Path, tokenizer: Any) -> None:
    secret = " ".join(f"name{i}" for i in range(50))
    (folder / "src" / "z.py").write_text("x = 1\n" * 100 + secret + "\n")
    (folder / "secret.txt").write_text(secret)
    texts = Texts(paths=[folder / "src"], held_out=[folder / "secret.txt"])
    whole = tokenizer.decode(stream(texts, tokenizer, 0.0, seed=0))
    assert "x = 1\n" * 100 in whole
    assert "name7" not in whole
    assert "name7" in tokenizer.decode(held_out_stream(texts, tokenizer))


def test_sequences_overlap_by_the_token_between() -> None:
    views = sequences(np.arange(10, dtype=np.int32), 3, "texts")
    assert views.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    begun = sequences(np.arange(10, dtype=np.int32), 3, "texts", before=[99])
    assert begun.tolist() == [[99, 0, 1, 2], [99, 3, 4, 5], [99, 6, 7, 8]]
    with pytest.raises(OptionError, match="have 3 tokens in all, and one sequence needs 4"):
        sequences(np.arange(3, dtype=np.int32), 3, "texts")


def test_reserved_tokens_are_free() -> None:
    trainable = open_trainable(str(builtin.path()), 2)
    names = trainable.loaded.tokenizer.convert_ids_to_tokens(list(trainable.tokens))  # type: ignore[union-attr]
    assert names == ["<|reserved_0|>", "<|reserved_1|>"]
    free = free_tokens(trainable.model, trainable.loaded.tokenizer)
    assert len(free) == 32
    table = trainable.model.get_input_embeddings().weight
    first, second = (table[token] for token in trainable.tokens)
    assert torch.equal(first, second), "a token that means nothing begins as the mean of all"


def test_a_token_that_was_trained_before_keeps_its_row() -> None:
    source = str(builtin.path("edit-7m-sdsat"))
    known = AdaptiveTokens.load(source)
    assert known is not None
    before = read_model(source, {}, "float32").get_input_embeddings().weight
    again = open_trainable(source, len(known.tokens), tokens=known.tokens)
    table = again.model.get_input_embeddings().weight
    assert torch.equal(table[list(known.tokens)], before[list(known.tokens)])


def test_drafts_by_depth_against_a_model_that_counts() -> None:
    """It continues n with n+1, sees through two adaptive tokens, and is wrong at the third."""
    a, vocabulary = 99, 100

    def logits(ids: torch.Tensor) -> torch.Tensor:
        says = torch.zeros_like(ids)
        for row, text in enumerate(ids.tolist()):
            last, depth = 0, 0
            for place, token in enumerate(text):
                last, depth = (last, depth + 1) if token == a else (token, 0)
                says[row, place] = last + depth + 1 if depth < 3 else 0
        scores = torch.nn.functional.one_hot(says, vocabulary).float() * 9
        scores[..., a] = 100.0  # never counts: the adaptive token has no probability
        return scores

    rows = np.stack([np.arange(start, start + 21) for start in range(1, 7)]).astype(np.int32)
    adaptive = AdaptiveTokens(tokens=(a,), L=2, objective="improved")
    found = by_depth(logits, rows, adaptive, depths=5)
    assert found.accuracy == found.agreement == (1.0, 1.0, 0.0, 0.0, 0.0)
    assert found.accepted == (1.0, 2.0, 2.0, 2.0, 2.0)
    assert found.places == 6
    assert standard_loss(logits, rows, [a]) == pytest.approx(
        float(np.log(np.exp(9) + 98) - 9), rel=1e-4
    )
