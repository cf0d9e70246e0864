"""Defaults from the user's file, shell completion, names of models, and what `--json` prints."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from command import SCHEMAS, call, fails
from draftsmith import builtin
from draftsmith.cli.commands import application, known


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTSMITH_CONFIG", str(tmp_path))
    return tmp_path / "config.toml"


def test_what_is_typed_wins_over_the_file_and_the_file_over_the_default(
    file: Path, model: str
) -> None:
    options = "max-new-tokens = 3\nraw = true\nn = 2\njson = true\n"
    file.write_text(f'[run]\nmodel = "{model}"\n{options}')
    told = json.loads(call("run", "hello").stdout)
    assert told["model"] == model
    assert [len(answer["tokens"]) for answer in told["answers"]] == [3, 3]
    plain = call("run", "hello", "--json=false", "-n", 1, "--max-tokens", 2, "--stats").stderr
    assert "answer       2 tokens" in plain
    (chat, *_) = call("chat", "-m", model, "--max-new-tokens", 1, stdin="").stderr.splitlines()
    assert Path(model).name in chat


def test_the_file_is_shown(file: Path) -> None:
    file.write_text('[bench.run]\nruns = 3\n\n[run]\nstop = ["a", "b"]\n')
    shown = call("config")
    assert str(file) in shown.stderr
    lines = [line.split() for line in shown.stdout.splitlines()[1:]]
    assert lines == [["bench", "run", "--runs", "3"], ["run", "--stop", '["a",', '"b"]']]
    told = json.loads(call("config", "--json").stdout)
    assert told["options"][0] == {"command": "bench run", "option": "runs", "value": 3}
    file.write_bytes(b"\xef\xbb\xbf[run]\nmodel = 2026-01-01\n")  # as some editors begin files
    assert json.loads(call("config", "--json").stdout)["options"][0]["value"] == "2026-01-01"
    file.unlink()
    assert "has no defaults" in call("config").stderr
    file.write_text('[run]\nstop = ["[/INST]"]\nmodel = "[red]x :smile:"\n')
    shown = call("config").stdout
    assert '["[/INST]"]' in shown
    assert '"[red]x :smile:"' in shown
    file.write_text("[run]\ntemperature = nan\n")
    assert "no finite number" in fails(2, "config", "--json")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('[run]\nmodle = "x"', "option of run in FILE 'modle'. Did you mean 'model'?"),
        ('[run]\nm = "x"', "option of run in FILE 'm'"),
        ('[rnu]\nmodel = "x"', "command in FILE 'rnu'. Did you mean 'run'?"),
        ('model = "x"', "command in FILE 'model'"),
        ("run = 1", "run in FILE must be a table of options: [run]"),
        ("[run]\nthreads = 0", "[threads] in FILE, table run must be an integer >= 1, got 0"),
        ("[run]\nseed = 2.5", "[seed] from FILE, table run"),
        ('[run]\nraw = "perhaps"', 'unable to convert "perhaps" into bool'),
        ("[run", "cannot read FILE"),
        ("[bench.rnu]\nruns = 3", "command of bench"),
        ("[bench]\nmodel = 'x'", "command of bench"),
        ("[bench.run]\nmax-tokens = 4\nmax-new-tokens = 5", "are one option"),
        pytest.param("a = " + 3000 * "[", "cannot read FILE", id="deep"),
    ],
)
def test_what_the_file_cannot_mean_is_refused(file: Path, text: str, wanted: str) -> None:
    """By all commands below a table that no command reads."""
    file.write_text(text)
    records = file.with_name("records.jsonl")
    records.write_text('{"prompt": "a"}\n')
    wanted = wanted.replace("FILE", str(file))
    assert wanted in fails(2, "config")
    reader = ("bench", "run", records) if "bench" in text else ("run", "hello")
    assert wanted in fails(2, *reader)
    assert call("--help").exit_code == 0


@pytest.mark.parametrize(
    "shell", ["bash", *(pytest.param(shell, marks=pytest.mark.slow) for shell in ("zsh", "fish"))]
)
def test_completion_knows_commands_and_options(shell: str) -> None:
    script = call("--show-completion", "--shell", shell)
    assert script.exit_code == 0, script.stderr
    for word in ("chat", "replay", "max-new-tokens", "on-error"):
        assert word in script.stdout
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script.stdout, text=True, check=True)


def test_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    told = json.loads(call("models", "--json").stdout)
    names = {one["name"]: one["stands_for"] for one in told["names"]}
    assert names["edit-7m"] == str(builtin.path("edit-7m"))
    assert [one["name"] for one in told["names"] if one["default"]] == [builtin.default()]
    assert told["cached"] == [{"id": "org/name", "bytes": 2}]
    shown = call("models").stdout
    assert "smollm2" in shown
    assert "org/name" in shown
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    assert json.loads(call("models", "--json").stdout)["cached"] == []
    (tmp_path / "none").write_text("")
    assert "hub's cache cannot be read" in fails(2, "models")


def test_every_json_has_a_schema() -> None:
    def find(app, words):  # type: ignore[no-untyped-def]
        if app.default_command and "--json" in app.assemble_argument_collection():
            yield " ".join(words)
        for name in app:
            if not name.startswith("-"):
                yield from find(app[name], [*words, name])

    found = {one for name in known() for one in find(application([name])[name], [name])}
    assert found <= SCHEMAS.keys()


def test_paths_in_the_file_may_be_below_the_home_folder(
    file: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 50)
    file.write_text(f'[run]\nmodel = "{model}"\nattribute-html = "~/page.html"\n')
    assert call("run", "hello", "--max-tokens", 2).exit_code == 0
    assert (tmp_path / "page.html").exists()
    assert (
        call(
            "corpus", "build", "-m", model, "--texts", text, "--output=~/made", "--no-filter"
        ).exit_code
        == 0
    )
    assert (tmp_path / "made").is_dir()
