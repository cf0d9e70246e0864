"""`draftsmith train sdsat` as its users type it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from command import call as run_command
from draftsmith.lab.train import run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.save(tmp_path / "model")
    (tmp_path / "code.py").write_text("\n".join(tiny.TEXT * 4))
    (tmp_path / "held_out.txt").write_text("brown dog return hello tokenizer " * 30)
    return tmp_path


def call(folder: Path, *args: object) -> Any:
    common = ["train", "sdsat", "-m", folder / "model", "--texts", folder / "code.py"]
    common += ["--length", 16, "--rows", 2, "--steps", 2, "--cpu"]
    out = () if "-o" in args else ("-o", folder / "out")
    return run_command(*common, *out, *args)


def test_it_trains_and_says_what_came_out(folder: Path) -> None:
    held_out = ("--held-out", folder / "held_out.txt")
    result = call(folder, "--infill", 0, "--add-token", *held_out, "--save-every", 1, "--L", 2)
    assert result.exit_code == 0, result.output
    assert "329 <|adaptive_0|>" in result.stdout
    assert "held-out loss" in result.stdout
    assert "step 1 of 2, 32 tokens: standard" in result.stderr
    settings = json.loads((folder / "out" / "sdsat.json").read_text())
    assert settings["L"] == settings["recipe"]["L"] == 2
    result = call(folder, "--infill", 0, "--add-token", "--json", "-o", folder / "other")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["tokens"], found["after"]) == ([329], None)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--add-token",), "give --infill=0"),
        (("--infill", 0), "add some with --add-token"),
        (("--objective", "best"), "unknown objective 'best'"),
        (("--infill", 0, "--add-token", "--length", 4000), "--length=4000"),
    ],
)
def test_bad_input_is_one_line(folder: Path, args: tuple[object, ...], says: str) -> None:
    result = call(folder, *args)
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert says in lines[0]
    assert not (folder / "out").exists()


@pytest.mark.parametrize("kind", ["sdsat", "eagle3"])
def test_missing_packages_are_named(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "NEEDED", ("accelerate", "no_such_package"))
    texts, out = folder / "code.py", folder / "out"
    result = run_command("train", kind, "-m", "no/model", "--texts", texts, "-o", out)
    assert result.exit_code == 2
    assert "training needs no_such_package; install" in result.stderr
