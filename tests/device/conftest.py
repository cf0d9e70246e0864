"""The pretended device for every test of this folder, skipped where there is no compiler.

With DRAFTSMITH_TEST_DEVICE=cuda:0, `test_device_paths.py` and `test_device_heads.py` ask a real
device. It draws other random numbers than a CPU, so samples are compared with `top_k=1` only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pretended
import pytest
import torch
from both import IDS, MANY, REAL, Both, strictly

import tiny
from draftsmith.engine.engine import Engine
from draftsmith.lab.corpus.index import write_index
from draftsmith.model.adaptive import AdaptiveTokens
from draftsmith.model.load import load
from frozen import Frozen, capturing


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    """The device "pretend:0", built and registered, or the real one."""
    if REAL:
        return REAL
    try:
        pretended.install()
    except pretended.NoCompiler as error:
        pytest.skip(str(error))
    return f"{pretended.NAME}:0"


@pytest.fixture
def simulated() -> None:
    """For tests that need random numbers or rules of the simulated device."""
    if REAL:
        pytest.skip(f"{REAL} draws other random numbers, and obeys its own rules")


@pytest.fixture(scope="session")
def second(device: str) -> str:
    """Another device: "pretend:1", a second real one, or the CPU."""
    other = device.replace("0", "1")
    return "cpu" if REAL and torch.accelerator.device_count() < 2 else other


@pytest.fixture
def there(device: str) -> Iterator[str]:
    """The same where `torch.accelerator` finds it."""
    with pretended.there():
        yield device


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, its tokenizer, adaptive tokens, and a corpus in `corpus`."""
    path = tmp_path_factory.mktemp("model")
    tiny.model().save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    AdaptiveTokens(tokens=(4,), L=3, objective="improved").save(path)
    texts = [IDS, *MANY, [*range(3, 99)] * 2]
    vocabulary = load(tiny.model(), tiny.tokenizer()).vocabulary
    assert vocabulary is not None
    write_index(path / "corpus", texts, vocabulary=vocabulary, examples=len(texts), model="tiny")
    return path


@pytest.fixture
def graphed(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same where passes are captured: a replay repeats the recorded operations alone."""
    if REAL:
        return device

    class Replayed(Frozen):
        def __init__(self, *given: Any) -> None:
            with pretended.capturing():
                super().__init__(*given)

        def __call__(self) -> Any:
            with pretended.capturing():
                return super().__call__()

    capturing(monkeypatch, pretended.NAME, Replayed)
    return device


@pytest.fixture(scope="session")
def engines(folder: Path, device: str) -> Both:
    """The model of `folder` on both sides."""
    with strictly():
        cpu, there = (
            Engine.from_pretrained(folder, device=where, drafter="none", prepack=False)
            for where in ("cpu", device)
        )
    assert there.model.device == torch.device(device)
    assert there.model.capabilities == cpu.model.capabilities
    return Both(cpu, there)
