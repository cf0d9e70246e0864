"""Defects that only a device shows, each named after its entry, and others of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pretended
import pytest
from both import BYTES, DRAFTERS, GREEDY, IDS, MANY, SAMPLED, SMALL, Both, named, on, same

import tiny
from architectures import build
from draftsmith.drafters.draft_model.draft_model import DraftModel
from draftsmith.engine.engine import Engine


@contextmanager
def like_mps() -> Iterator[None]:
    """Copies that do not block happen late, and there is no float64."""
    with pretended.late_copies(), pretended.without_float64():
        yield


@pytest.fixture(scope="module")
def mps(engines: Both, folder: Path, device: str) -> Both:
    """The CPU's engine beside one that was loaded on such a device."""
    with like_mps():
        return Both(
            engines.cpu,
            Engine.from_pretrained(folder, device=device, drafter="none", prepack=False),
            engines._known,
        )


def test_d1_the_self_test_finds_what_it_finds_elsewhere(mps: Both) -> None:
    assert mps.device.model.capabilities == mps.cpu.model.capabilities


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_d1_and_d4_every_drafter_on_a_device_like_mps(
    mps: Both, folder: Path, drafter: str
) -> None:
    options = {"drafter": named(drafter, folder), "max_new_tokens": 20, "budget": 8}
    with like_mps():
        mps.generate(IDS, **options, **GREEDY)
        mps.generate(IDS, **options, **SAMPLED)
        mps.generate(MANY, **options, **GREEDY)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "falcon", "gpt_neo", "qwen3_next"])
def test_d1_masks_of_other_architectures(device: str, name: str) -> None:
    """Windows, sinks, padded rows, chains and recurrent states."""
    model = build(name)
    cpu = Engine.from_pretrained(model)
    with like_mps():
        there = Engine.from_pretrained(on(device, model))
        assert there.model.capabilities == cpu.model.capabilities
        for drafter in ("auto", "copyspec(gamma=2)"):
            options = {"drafter": drafter, "max_new_tokens": 12, "budget": 8}
            same(cpu.generate(MANY, **options), there.generate(MANY, **options))


def draft_model(device: str, algorithm: str, **options: Any) -> DraftModel:
    """A tiny one of another vocabulary, of which it drafts everything it may."""
    tokenizer = tiny.tokenizer(BYTES if algorithm == "slrs" else SMALL)
    model = on("cpu", tiny.model())
    model.resize_token_embeddings(len(tokenizer))
    own: dict[str, Any] = {"algorithm": algorithm, "tokens": 3, "confidence": 0} | options
    return DraftModel(model.to(device), tokenizer=tokenizer, **own)


@pytest.mark.parametrize("algorithm", ["union", "tli", "slem", "slrs", "reproducible"])
def test_d4_draft_models_without_float64(mps: Both, device: str, algorithm: str) -> None:
    own: dict[str, Any] = {"algorithm": algorithm}
    if algorithm == "reproducible":
        own = {"algorithm": "tli", "reproducible": True}
    texts = ["def foo(x): return x + 1", "the quick brown fox jumps over the lazy dog"]
    expected, drafter = draft_model("cpu", **own), draft_model(device, **own)
    for more in (GREEDY, {"temperature": 0.9, "seed": 4}):
        options = {"max_new_tokens": 10, "budget": "drafter", **more}
        cpu = mps.cpu.generate(texts, drafter=expected, **options)
        with like_mps():
            same(cpu, mps.device.generate(texts, drafter=drafter, **options))
