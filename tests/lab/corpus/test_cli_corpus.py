"""`draftsmith corpus` as its users type it."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_build import some_texts

import command
import tiny
from draftsmith.drafters.corpus.files import BUILDING, HEADER
from draftsmith.lab.corpus import build as building

call = partial(command.call, "corpus")
fails = partial(command.fails, 2, "corpus")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    [folder] = some_texts(tmp_path_factory.mktemp("texts"))
    return folder


@pytest.fixture(scope="module")
def built(model: str, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "c"
    result = call("build", "-m", model, "--texts", texts, "--no-filter", "-o", folder)
    assert result.exit_code == 0, result.output
    assert "not ranked" in result.stdout
    return folder


def test_build_ranks_and_says_so(model: str, texts: Path, tmp_path: Path) -> None:
    command = ("build", "-m", model, "--texts", texts, "--keep", 5, "--piece", 20, "-o")
    result = call(*command, tmp_path / "c", "--json")
    assert result.exit_code == 0, result.output
    header = json.loads(result.stdout)
    assert header["examples"] == 5
    assert header["settings"]["keep"] == 5
    assert header["perplexity"]["highest kept"] < header["perplexity"]["highest"]
    again = call(*command, tmp_path / "c")
    assert again.exit_code == 0
    assert "was built before; delete it to build it again" in again.stderr
    assert "5 of" in again.stdout


def test_info_tells_what_is_there_once_it_is_whole(built: Path, tmp_path: Path) -> None:
    shown = call("info", built)
    assert shown.exit_code == 0
    assert "32 documents, 1 repeated" in shown.stdout
    assert json.loads(call("info", built, "--json").stdout)["documents"] == 31
    damaged = shutil.copytree(built, tmp_path / "damaged")
    tokens = damaged / "tokens.bin"
    tokens.write_bytes(b"\1" + tokens.read_bytes()[1:])
    assert "tokens.bin is damaged" in fails("info", damaged)


def test_errors_are_one_line(model: str, texts: Path, built: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    both = ("--keep", 5, "--no-filter")
    assert "--no-filter specified multiple times" in fails(
        "build", "-m", model, "--texts", texts, *both, "-o", new
    )
    assert "no file or folder" in fails("build", "-m", model, "--texts", "x", "-o", new)
    keep = ("--keep", 5, "-o", built)
    assert "holds another corpus" in fails("build", "-m", model, "--texts", texts, *keep)
    assert "is not a corpus" in fails("info", tmp_path)
    assert "there is no folder" in fails("info", new)


def test_ctrl_c_tells_how_to_go_on(
    model: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_args: Any) -> Any:
        raise KeyboardInterrupt

    command = ("build", "-m", model, "--texts", texts, "-o", tmp_path / "c")
    with monkeypatch.context() as patch:
        patch.setattr(building, "log_likelihoods", interrupted)
        result = call(*command)
    assert result.exit_code == 130
    assert "give the same command again" in result.stderr
    assert (tmp_path / "c" / BUILDING).is_dir()
    assert call(*command).exit_code == 0
    assert (tmp_path / "c" / HEADER).is_file()
