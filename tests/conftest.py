"""Shared fixtures: where the optional recorded data lies, and one thread per test process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers.utils import logging

from draftsmith import builtin, storage
from draftsmith.drafters import bigrams
from draftsmith.model.choice import Measured

torch.set_num_threads(1)  # tests run tiny models: threads would only fight each other

# As the command sees to by the environment, before transformers is imported.
logging.disable_progress_bar()
logging.set_verbosity_error()

# The same examples everywhere, however slow the machine is at the moment.
settings.register_profile(
    "anywhere", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("anywhere")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Recorded answers, prompts, tokenizers and weights that are not part of the project."""
    default = Path(__file__).parents[2] / "shared" / "data"
    path = Path(os.environ.get("DRAFTSMITH_DATA", default))
    if not path.is_dir():
        pytest.skip(f"no recorded data: {path} does not exist (set DRAFTSMITH_DATA)")
    return path


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test leaves the dtype that it chose in the user's cache folder, or drafts with what was
    tuned there."""
    monkeypatch.setattr(Measured, "save", lambda *_: None)
    monkeypatch.setattr(bigrams, "known_about", lambda *_: None)


@pytest.fixture
def kept(forgetful: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: ARG001
    """A cache folder of the test's own, in which what was tuned is found again."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bigrams, "known_about", storage.known_about)
    return tmp_path / "cache"


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tells where home is, as for some services."""

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    for name in ("DRAFTSMITH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The name of the small real model, where the registry's package is installed."""
    if builtin.default() != builtin.SMOLLM2:
        pytest.skip(f"SmolLM2 is not installed: {builtin.GET_SMOLLM2}")
    return builtin.SMOLLM2
