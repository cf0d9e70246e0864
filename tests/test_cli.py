"""The command as its users type it: answers on stdout, the rest on stderr, and the exit codes."""

from __future__ import annotations

import copy
import inspect
import io
import json
import os
import re
import shlex
import shutil
import signal
import socketserver
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, fields, replace
from functools import partial, partialmethod
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_type_hints

import pytest
import torch
from cyclopts import Parameter
from cyclopts.completion.detect import ShellDetectionError
from huggingface_hub import constants
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, LlamaModel

import draftsmith
import heads
import tiny
from command import call, fails
from draftsmith import builtin
from draftsmith.cli import demo as cli_demo
from draftsmith.cli import doctor as cli_doctor
from draftsmith.cli import loading
from draftsmith.cli import run as cli_run
from draftsmith.cli.commands import HELP, application
from draftsmith.cli.options import ModelOptions, PlaceOptions, Sampling
from draftsmith.cli.report import interactive
from draftsmith.core.drafter import Drafter
from draftsmith.core.sampling import SamplingParams
from draftsmith.drafters import registry
from draftsmith.engine.call import Stream
from draftsmith.engine.engine import Engine
from draftsmith.errors import LoadError
from draftsmith.model import dtype as dtype_rule
from draftsmith.model.loaded import LoadedModel
from draftsmith.server import run as server_run
from draftsmith.text.repetition import looping, lost_lines, repeated_lines, surroundings
from faults import Raises

BEFORE = "def foo(x):\n    return x + 1\n\n\ndef bar(x):\n    return foo(x)\n"


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
def engine(model: str) -> Engine:
    return loading.load_engine(ModelOptions(model=model), {})


@pytest.fixture
def ask(model: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`draftsmith run`, for tests that are not about loading: the engine is loaded once."""
    monkeypatch.setattr(cli_run, "load_engine", lambda *_: engine)
    return partial(call, "run", "-m", model)


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file to be edited."""
    (tmp_path / "a.py").write_text(BEFORE)
    return str(tmp_path / "a.py")


@pytest.fixture
def own_builtin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation whose built-in model is the tiny one."""
    here = tmp_path / "builtin"
    save(here / "edit-7m")
    (here / "demo").mkdir()
    (here / "demo" / "before.txt").write_text(BEFORE)
    (here / "demo" / "message.txt").write_text("rename foo to baz\n")
    monkeypatch.setattr(builtin, "_HERE", here)
    monkeypatch.setattr(builtin, "__file__", str(here / "__init__.py"))
    monkeypatch.setattr(builtin, "find_spec", lambda _: None)


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


def test_commands_import_only_what_they_need() -> None:
    """The list of commands none of them, what needs no model no torch, drafters no transformers."""
    quick = ["run --help", "bench --help", "train sdsat --help", "models", "config",
             "run -m ./no/such/folder hello", "doctor /no/such/folder"]  # fmt: skip
    code = (
        "import sys; from draftsmith.cli import main\n"
        "print('IMPORTED', *sys.modules)\n"
        "for words in sys.argv[1:]:\n"
        "    try: main(words.split())\n"
        "    except SystemExit: pass\n"
        "    print('IMPORTED', *sys.modules)\n"
    )
    command = [sys.executable, "-c", code, "--help", *quick, "drafters"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(name in said for name in (*HELP, "draft_model"))
    found = [set(line.split()) for line in said.splitlines() if line.startswith("IMPORTED")]
    before, listed, *others, drafters = found
    assert not [name for name in listed - before if name.startswith("draftsmith")]
    for words, imported in zip(quick, others, strict=True):
        assert not imported & {"torch", "transformers"}, words
    assert "transformers" not in drafters


def test_a_command_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def greet(name: Annotated[str, Parameter(help="Whom.")], /) -> None:
        """Greet somebody."""
        print("hello", name)

    monkeypatch.setitem(sys.modules, "theirs", SimpleNamespace(greet=greet))
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
    assert "--stop is not UTF-8" in fails(2, "run", "-m", model, "hello", "--stop", wrong)
    assert "FOLDER is not UTF-8" in fails(2, "corpus", "info", wrong)


# --- run ---------------------------------------------------------------------------------------


def test_run_prints_what_the_engine_says(model: str) -> None:
    result = call("run", "-m", model, "hello world", "--max-new-tokens", "12")
    wanted = Engine.from_pretrained(model).generate(
        [{"role": "user", "content": "hello world"}], max_new_tokens=12
    )
    assert result.exit_code == 0
    assert result.stdout.removesuffix("\n") == wanted.text.removesuffix("\n")
    assert "cut after 12 tokens" in result.stderr


def test_run_reads_prompt_file_and_stdin(ask: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("hello world\n", encoding="utf-8")
    ask = partial(ask, "--max-new-tokens", "8")
    wanted = ask("hello world").stdout
    assert ask("-f", str(path)).stdout == wanted
    assert ask(stdin="hello world\n").stdout == wanted
    assert ask("-", stdin="hello world\r\n").stdout == wanted
    both = ask("do this", "-f", "-", stdin="hello world\n").stdout
    assert both == ask("do this\n\nhello world").stdout


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
    args = ["run", "-m", model, "hello hello hello", "--max-new-tokens", "30"]
    result = call(*args, "--stats", "--show-drafts", "-d", "copyspec(gamma=1)", "--budget", "4")
    assert result.stdout == call(*args).stdout  # no colours: this is no terminal
    for words in ("passes", "guessed by", "draft position", "target", "tokens per second",
                  "weights      float32"):  # fmt: skip
        assert words in result.stderr


def test_run_edit_predicts_the_file(ask: Any, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, seen = Engine.stream, dict[str, Any]()

    def noted(self: Engine, prompt: Any, **options: Any) -> Stream:
        seen.update(options)
        return stream(self, prompt, **options)

    monkeypatch.setattr(Engine, "stream", noted)
    record = json.loads(ask("--edit", file, "rename foo", "--json").stdout)
    tokens = len(tiny.tokenizer()(BEFORE)["input_ids"])
    answer = record["answers"][0]
    assert answer["finish_reason"] == "stop" or len(answer["tokens"]) == tokens * 5 // 4 + 128
    assert answer["stats"]["prompt_tokens"] > tokens
    assert seen["prediction"] == BEFORE


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_a_file_may_have_a_name_that_is_not_utf8(ask: Any, tmp_path: Path) -> None:
    path = os.fsdecode(os.path.join(os.fsencode(tmp_path), b"caf\xe9.py"))
    Path(path).write_text(BEFORE)
    assert ask("--edit", path, "rename foo", "--max-new-tokens", "2").exit_code == 0
    assert ask("-f", path, "--max-new-tokens", "2").exit_code == 0


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
REMARK = "# The file's own remark, with more words.\n" + BEFORE
PAGE = "# Title\n\nThis is the first sentence.\n\n```sh\nls\n```\n"
POEM = "The sun is out today.\nThe moon is not.\n"


@pytest.mark.parametrize(
    ("before", "after", "around"),
    [
        (BEFORE, BEFORE.replace("foo", "baz"), []),
        (BEFORE, FENCED, ["code fences", "words"]),
        (BEFORE, f"```python\n{BEFORE}```\n", ["code fences"]),
        (BEFORE, f"~~~\n{BEFORE}~~~", ["code fences"]),
        (BEFORE, f"```python\n{BEFORE}", ["code fences"]),  # cut before the end
        (BEFORE, f"Sure! Here's the file\n{BEFORE}", ["words"]),
        (BEFORE, f"Here is the new content of a.py:\n\n{BEFORE}", ["words"]),
        (BEFORE, f"{BEFORE}\nThe function is now called baz.\n", ["words"]),
        (BEFORE, "I cannot edit files, but I can help you.", ["words"]),
        (BEFORE, REMARK, []),
        (BEFORE, "", []),
        (PAGE, PAGE.replace("ls", "pwd"), []),
        (PAGE, PAGE.replace("first", "only"), []),
        (POEM, POEM.replace("sun", "rain"), []),
    ],
)
def test_what_stands_around_an_edited_file(before: str, after: str, around: list[str]) -> None:
    assert surroundings(before, after) == around


def test_lost_and_repeated_lines() -> None:
    renamed = BEFORE.replace("foo", "baz")
    assert lost_lines(BEFORE, renamed) == lost_lines(BEFORE, renamed + "more\n") == 0
    assert lost_lines(BEFORE, "".join(renamed.splitlines(keepends=True)[:4])) == 2
    assert lost_lines(BEFORE, "") == 6
    assert repeated_lines(BEFORE, BEFORE) == repeated_lines(BEFORE, renamed + "\n\nmore\n") == 0
    assert repeated_lines(BEFORE, BEFORE + "a.py now:\n" + BEFORE) == 4
    assert repeated_lines(BEFORE, "") == 0


def test_lost_lines_of_a_long_file_that_repeats_itself() -> None:
    parts = [f"def f{i}(x):\n    y = x + {i}\n    return y\n\n\n" for i in range(4_000)]
    edited = [part.replace("y", "z") for part in parts]
    assert lost_lines("".join(parts), "".join(edited)) == 0  # cubic work would take hours
    assert lost_lines("".join(parts), "".join(edited[:100] + edited[300:])) == 1_000


@pytest.mark.parametrize(
    ("after", "notes"),
    [
        (BEFORE, []),
        (BEFORE[:20], ["4 of the file's 6 lines are gone; compare before you use it"]),
        (2 * BEFORE, ["4 lines repeated; compare before you use it"]),
        (FENCED, ["code fences and words stand around the new file; take them out"]),
    ],
)
def test_an_edit_that_looks_wrong_is_reported(
    ask: Any, file: str, after: str, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Stream.result.fget  # type: ignore[attr-defined]
    ended = property(lambda one: replace(whole(one), text=after, finish_reason="stop"))
    monkeypatch.setattr(Stream, "result", ended)
    told = ask("--edit", file, "rename foo", "--max-new-tokens", "4").stderr
    assert told.splitlines() == [f"note: {note}" for note in notes]


def test_a_loop_differs_from_a_long_answer() -> None:
    assert looping([1, 2, *[7, 8] * 30]) == 2
    assert looping([5] * 48) == 1
    assert looping([5] * 47) == 0
    assert looping(list(range(20)) * 3) == 20
    assert looping(list(range(20)) * 2 + [1]) == 0
    assert looping(list(range(200))) == 0
    assert looping(list(range(200_000))) == 0  # quadratic work would take hours


def test_a_looping_answer_is_reported(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(_ids: Any, scores: Any) -> Any:
        scores[:, 40] = 1000.0
        return scores

    monkeypatch.setattr(Engine, "stream", partialmethod(Engine.stream, processors=stuck))
    result = ask("hello", "--max-new-tokens", "60")
    assert result.exit_code == 0
    assert "its end repeats the same 1 token, and was cut after 60" in result.stderr


@pytest.mark.usefixtures("own_builtin")
def test_the_builtin_model_says_what_it_is() -> None:
    few, told = ("--max-new-tokens", "2"), "answered by edit-7m, a small model that ships"
    said = call("run", "hello", *few).stderr
    assert told in said
    assert builtin.GET_SMOLLM2 in said
    assert told in call("chat", *few, stdin="hello").stderr
    assert told not in call("run", "-m", "edit-7m", "hello", *few).stderr


@pytest.mark.usefixtures("own_builtin")
def test_the_real_model_answers_where_it_is_installed(
    tiny_smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ("hello", "--max-new-tokens", "2", "--json")
    monkeypatch.setattr(builtin, "find_spec", lambda name: name != "gguf" and find_spec(name))
    assert "edit-7m" in json.loads(call("run", *few).stdout)["model"]  # nothing there to read it
    monkeypatch.setattr(builtin, "find_spec", find_spec)
    result = call("run", *few)
    assert json.loads(result.stdout)["model"] == str(tiny_smollm2)
    assert "ships with this package" not in result.stderr
    assert "edit-7m" in json.loads(call("run", "-m", "edit-7m", *few).stdout)["model"]


def test_run_stop_strings(ask: Any) -> None:
    ask = partial(ask, "hello", "--max-tokens", "20", "--json")
    text = json.loads(ask().stdout)["answers"][0]["text"]
    stop = next(c for c in text[2:] if c.isascii() and c.isprintable())
    answer = json.loads(ask("--stop", stop, "--stop", "never").stdout)["answers"][0]
    assert answer["text"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"


# --- bad input ---------------------------------------------------------------------------------


def test_unknown_folder(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    assert missing in fails(2, "run", "-m", missing, "hello")
    assert missing in fails(2, "doctor", missing)
    assert missing in fails(2, "doctor", "-m", missing)
    assert missing in fails(2, "chat", "-m", missing)


def test_missing_tokenizer_or_template(tmp_path: Path) -> None:
    folder = save(tmp_path / "bare", tokenizer=False)
    assert "tokenizer" in fails(2, "run", "-m", folder, "hello")
    folder = save(tmp_path / "plain", template=False)
    assert "chat template" in fails(2, "chat", "-m", folder)
    assert "chat template" in fails(2, "run", "-m", folder, "hello", "--system", "be brief")
    assert call("run", "-m", folder, "hello", "--system", "").exit_code == 0
    assert call("run", "-m", folder, "hello", "--max-new-tokens", "3").exit_code == 0


def test_missing_builtin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "_HERE", tmp_path)
    monkeypatch.setattr(builtin, "find_spec", lambda _: None)
    assert "edit-7m" in fails(2, "run", "hello")
    assert "reinstall" in fails(2, "demo")
    with pytest.raises(LoadError, match="no-such"):
        builtin.path("no-such")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("hello -d copyspek", "Did you mean 'copyspec'"),
        ("hello -d copyspec(gamma=0)", "copyspec: gamma must be an integer >= 1, got 0"),
        ("hello -d draft_model", "needs model=…; write draft_model(model=…)"),
        ("hello -d draft_model(temperature=-1)", "draft_model 'temperature'"),
        ("hello --threads 40000", "--threads must be at most 1024, got 40000"),
        ("hello --budget many", "--budget must be an integer >= 0"),
        ("hello --temperature -1", "--temperature must be a number >= 0 (0 is greedy), got -1.0"),
        ("hello --top-p 0", "--top-p must be a number > 0 and <= 1, got 0.0"),
        ("hello --max-new-tokens -3", "--max-new-tokens must be an integer >= 0, got -3"),
        ("hello --max-tokens -2", "--max-new-tokens must be an integer >= 0, got -2"),
        ("hello --stop ''", "--stop must be non-empty strings"),
        ("hello --seed 2.5", 'invalid value for --seed: unable to convert "2.5" into int'),
        ("hello --temprature 1", "unknown option: --temprature. Did you mean --temperature?"),
        ("--temprature 1 hello", "unknown option: --temprature. Did you mean --temperature?"),
        ("hello another", "unexpected argument 'another'"),
        ("hello --stop", "--stop requires an argument"),
        ("hello -n 0", "Error: -n must be an integer >= 1, got 0"),
        ("hello -m SmolLM2", "did you mean 'smollm2'?"),
        ("hello -m edit7m", "did you mean 'edit-7m'? The names are smollm2, edit-1m"),
        ("hello --device nonsense", "--device='nonsense' cannot be used here"),
        ("hello --dtype nonsense", "unknown dtype 'nonsense'"),
        ("- -f -", "standard input cannot be both PROMPT and --file"),
        ("- --prediction=-", "standard input cannot be both PROMPT and --prediction"),
        ("--edit=-", "standard input cannot be both PROMPT and --edit"),
        ("-f - --edit=-", "standard input cannot be both --file and --edit"),
        ("''", "the prompt is empty"),
        ("'  \n'", "the prompt is empty"),
        ("'" + "x " * 2000 + "'", "context is 512"),
    ],
    ids=lambda value: value[:30],
)
def test_bad_option_value(model: str, words: str, wanted: str) -> None:
    stdin = "" if words.startswith("'") else "x"
    assert wanted in fails(2, "run", "-m", model, *shlex.split(words), stdin=stdin)


def test_words_that_begin_with_a_hyphen(ask: Any) -> None:
    ask = partial(ask, "--max-new-tokens", 2)
    assert ask("hello", "--stop", "-", "--system", "- be brief").exit_code == 0
    assert ask("--", "--temprature").exit_code == 0


def test_of_an_option_given_twice_the_last_one_counts(model: str) -> None:
    result = call("run", "-m", "nothing", "hello", "--max-tokens", 2, "--json", "-m", model)
    assert json.loads(result.stdout)["model"] == model


def test_a_command_that_does_not_exist() -> None:
    assert "unknown command 'rum'. Did you mean 'run'?" in fails(2, "rum")
    assert "unknown option '--verison'. Did you mean '--version'?" in fails(2, "--verison")
    assert 'Did you mean "run"?' in fails(2, "bench", "rnu")
    assert "unexpected argument" in fails(2, "doctor", ".", "-m", ".")
    assert "FILES is missing" in fails(2, "bench", "replay")


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


def test_failing_half_way_keeps_what_there_is(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = Raises(RuntimeError("boom"), 5)
    plainly = partialmethod(Engine.stream, processors=fails, drafter="none")
    monkeypatch.setattr(Engine, "stream", plainly)
    result = ask("hello", "--json")
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


@pytest.mark.parametrize("given", [{}, {"THP_MEM_ALLOC_ENABLE": "0"}])
def test_commands_ask_torch_for_huge_pages(given: dict[str, str]) -> None:
    """Before torch is imported, and unless the user has chosen."""
    code = "import os, sys; from draftsmith.cli import main\n"
    code += "try:\n    main(['--version'])\n"
    code += "finally:\n    print(os.environ['THP_MEM_ALLOC_ENABLE'], 'torch' in sys.modules)"
    env = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    run = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, env=env | given
    )
    assert run.stdout.splitlines()[-1] == f"{given.get('THP_MEM_ALLOC_ENABLE', '1')} False"


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


@pytest.mark.parametrize("words", ["run --help", "--version", "models"])
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such pipes")
def test_help_into_a_closed_pipe_is_no_error(words: str) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "draftsmith", *words.split()]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_ctrl_c_while_the_command_is_imported_ends_it_quietly(tmp_path: Path) -> None:
    (tmp_path / "cyclopts.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "draftsmith", "--version"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


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
    lines = ["/drafer", "/drafter nobody", "/save", "/save /no/such/file",
             "/save ~nobody-of-this-name/x", "x " * 2000, "hello", "x " * 2000]  # fmt: skip
    result = call("chat", "-m", model, "--max-new-tokens", "4", stdin="\n".join(lines))
    assert result.exit_code == 0, result.output
    assert "--top-k must be" in fails(2, "chat", "-m", model, "--top-k", "-1")
    assert result.stderr.count("Error: ") == 7
    assert result.stderr.count("/reset begins a new conversation") == 1
    assert "Did you mean '/drafter'" in result.stderr
    assert result.stdout.strip()


@pytest.mark.failing_passes
def test_a_chat_goes_on_after_an_answer_without_memory(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LlamaModel.forward

    def scarce(*args: Any, **kwargs: Any) -> Any:
        if (places := kwargs.get("position_ids")) is not None and int(places.max()) > 100:
            raise torch.OutOfMemoryError("no memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", scarce)
    talk = tmp_path / "talk.json"
    args = ["chat", "-m", model, "--max-new-tokens", "4"]
    result = call(*args, stdin="\n".join(["hello", "fox " * 60, "and now", f"/save {talk}"]))
    assert result.exit_code == 0, result.output
    assert "out of memory (no memory)" in result.stderr
    assert [m["content"] for m in json.loads(talk.read_text())[::2]] == ["hello", "and now"]


# --- what takes long ---------------------------------------------------------------------------


def test_what_takes_long_is_said_in_a_pipe_too(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = partial(call, "run", "-m", model, "hello", "--max-new-tokens", "2")
    quick, started = run(), []

    class Late(threading.Timer):
        """A timer whose time is over as soon as it starts."""

        def start(self) -> None:
            started.append(self.interval)
            self.function(*self.args)

    monkeypatch.setattr(loading, "Timer", Late)
    slow = run()
    assert slow.stdout == quick.stdout
    lines = slow.stderr.splitlines()
    assert lines[0] == f"loading {Path(model).name} …"
    assert lines[1].startswith("waiting for the first token …")
    assert all(seconds > 1 for seconds in started)


def test_lines_are_drawn_again_only_where_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("FORCE_COLOR", "1")
    found = []
    for file, term in (Terminal(), "xterm"), (Terminal(), "dumb"), (io.StringIO(), "xterm"):
        monkeypatch.setenv("TERM", term)
        found.append(interactive(Console(file=file)))
    assert found == [True, False, False]


def test_completion_for_a_shell_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise ShellDetectionError("no SHELL")

    monkeypatch.setattr("cyclopts.completion.detect.detect_shell", unknown)
    assert "name bash, zsh, fish or powershell" in fails(2, "--show-completion")
    assert "_draftsmith" in call("--show-completion", "bash").stdout


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class HangsUp(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            asked.append(1)

    with socketserver.TCPServer(("127.0.0.1", 0), HangsUp) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        try:
            with pytest.raises(LoadError, match="'org/model' cannot be read: no such folder, and"):
                Engine("org/model")
            with pytest.raises(LoadError, match="the names known here are smollm2, edit-1m"):
                Engine("somemodel")
        finally:
            server.shutdown()
            thread.join()
    assert len(asked) <= 4  # the hub's library alone tries six times for each


# --- drafters and doctor -------------------------------------------------------------------------


def test_drafters_lists_all() -> None:
    result = call("drafters")
    for words in ("auto", "copyspec", "gamma=3, block=10", "none", "prompt_lookup"):
        assert words in result.stdout
    for line in result.stdout.splitlines():
        assert line == line.rstrip(), "tables in a pipe are not padded"


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
    monkeypatch.setattr(
        dtype_rule, "computes_in", lambda dtype, _: native or dtype == torch.float32
    )

    def asked(api: Any) -> Any:
        """A server whose one answer is made in its own way: in another thread."""
        served = threading.Thread(target=partial(api.engine.generate, [5, 6], max_new_tokens=2))
        return SimpleNamespace(run=lambda: (served.start(), served.join()))

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


def test_commands_share_the_names_of_options() -> None:
    for command in ("chat", "demo", "bench run", "bench replay", "bench estimate", "tune pld-plus",
                    "tune copyspec"):  # fmt: skip
        named = map(set, options_of(*command.split()).values())
        assert {"--max-new-tokens", "--max-tokens"} in named, command
    for command in ("run", "chat", "demo", "doctor", "bench run", "bench cost", "tune pld-plus"):
        assert "--no-prepack" in options_of(*command.split())["prepack"], command
    options = options_of("train", "sdsat")
    assert options["L"][0] == "--L"
    assert options["bfloat16"] == ("--bfloat16", "--float32")
    assert options["tokens"][0] == "--token"
    assert options["paths"][0] == "--texts"


def test_stats_name_the_phases_that_took_time(ask: Any) -> None:
    ask = partial(ask, "--max-new-tokens", "2", "--stats")
    assert "prefill" not in ask("hello").stderr
    assert " = prefill " in ask("hello " * 200).stderr


def test_a_foreign_drafter_is_listed_and_a_broken_one_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass(frozen=True)
    class Mine(Drafter):
        """Of somebody else."""

        path: str
        names: tuple[str, ...] = field(default_factory=tuple)
        other: Unknown = None  # type: ignore[name-defined]  # noqa: F821  for type checkers only

        name, summary = "mine", "a plugin"

        def open(self, ctx: Any) -> Any: ...

    monkeypatch.setitem(sys.modules, "theirs", SimpleNamespace(Mine=Mine))
    values = {"mine": "theirs:Mine", "broken": "no_such_module:Broken"}
    found = {name: EntryPoint(name, value, registry.GROUP) for name, value in values.items()}
    monkeypatch.setattr(registry, "_entries", lambda: found)
    result = call("drafters")
    assert "a plugin" in result.stdout
    assert "path=…, names=()" in result.stdout
    assert "drafter 'broken' (no_such_module:Broken) cannot be imported" in result.stderr
    assert "(required)" in call("drafters", "mine").stdout


def test_the_defaults_of_sampling_are_those_of_the_library() -> None:
    library = {one.name: one.default for one in fields(SamplingParams)}
    for name, hint in get_type_hints(Sampling, include_extras=True).items():
        shown = [part.show_default for part in getattr(hint, "__metadata__", ())]
        assert library[name] in (None, ()) or shown[-1] == str(library[name]), name


def test_help_shows_defaults_and_keeps_the_lines_of_examples() -> None:
    about = call("run", "--help").stdout
    assert '\ndraftsmith run "What is a list comprehension?"\nprintf ' in about
    assert '\n    [run]\n    model = "smollm2"\n' in call("config", "--help").stdout
    shown = " ".join(about.replace("│", " ").split())
    assert "an edit that lost or repeats lines of the file" in shown
    for words in ("-n INT Answers", "[default: 1]", "all. [default: 0]", "[default: auto]"):
        assert words in shown
    assert "[default: False]" not in shown
    assert "[default: prompt_lookup, copyspec" in call("bench", "replay", "--help").stdout
    assert "--no-stats" not in shown


def test_drafters_describes_one() -> None:
    result = call("drafters", "copyspec")
    assert '-d "copyspec(gamma=3, block=10)"' in result.stdout
    assert "Literal['first', 'last']" in result.stdout
    assert call("drafters", "copyspec(gamma=5)").stdout == result.stdout
    assert "Did you mean 'copyspec'" in fails(2, "drafters", "copispec")
    shown = call("drafters", "draft_model").stdout
    assert "Literal['auto', 'standard'" in shown
    assert "that token stays in the draft." in shown
    assert "\nsummary " not in shown, "only options are described"
    assert all(f"\n{name} " in call("drafters", "eagle3").stdout for name in ("nodes", "sample"))


def test_doctor(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = cli_doctor.examine(loading.load_model(PlaceOptions(model)), None)
    assert record["model"]["context_length"] == 512
    assert record["capabilities"]["shape"] == "tree"
    assert record["rows_independent"] is True
    assert set(record["pass_seconds"]) == {"float32", "bfloat16"}
    assert record["recommendation"]["dtype"] in record["pass_seconds"]
    cli_doctor.show(record)
    shown = capsys.readouterr().out
    for words in ("torch", "draft trees", "Recommendation", "bfloat16", "no trained head"):
        assert words in shown


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Passes take no time: dtype → whether the model that was asked for them is laid out."""
    asked: dict[str, bool] = {}

    def cost(loaded: LoadedModel, **_: Any) -> dict[int, float]:
        asked[str(loaded.dtype)] = loaded.prepacked is not None
        return {1: 1.0, 8: 1.0}

    monkeypatch.setattr("draftsmith.model.measure.pass_cost", cost)
    return asked


@pytest.mark.usefixtures("untimed")
def test_doctor_tries_a_trained_head(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((Path(model) / "config.json").read_text())
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    tensors = heads.random_head(width, vocabulary, 50)
    folder = heads.save(tmp_path, tensors, layer_ids=(1, 1, 1))
    record = json.loads(call("doctor", model, "--json", "--head", f"eagle3(model={folder})").stdout)
    assert record["trained_head"]["relative_cost"] > 0
    assert "fits; a step of it takes" in record["trained_head"]["explained"]
    missing = call("doctor", model, "--head", f"eagle3(model={tmp_path}/no)").stdout
    assert f"there is no folder {tmp_path}/no" in " ".join(missing.split())
    with monkeypatch.context() as patch:  # refused before the model is loaded
        patch.setattr(cli_doctor, "load_model", lambda *_: pytest.fail("loaded"))
        assert "--head must be" in fails(2, "doctor", model, "--head", folder)
        assert "Did you mean 'model'" in fails(2, "doctor", model, "--head", "eagle3(modle=x)")
    other = heads.save(tmp_path / "other", heads.random_head(width // 2, vocabulary, 50))
    assert "this model's have" in call("doctor", model, "--head", f"eagle3(model={other})").stdout


@pytest.mark.slow
@pytest.mark.usefixtures("untimed")
def test_doctor_says_why_the_head_of_a_checkpoint_is_not_used(model: str, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    record = json.loads(call("doctor", str(folder), "--json").stdout)
    assert f"{folder}: the head" in record["trained_head"]["unusable"]
    record = json.loads(call("doctor", model, "--json").stdout)
    assert "has no head for multi-token prediction" in record["trained_head"]["unusable"]
    assert "no trained head that can be used" in record["trained_head"]["explained"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--no-prepack"]])
def test_doctor_compares_types_laid_out_alike(
    model: str, flags: list[str], untimed: dict[str, bool]
) -> None:
    record = json.loads(call("doctor", model, "--json", *flags).stdout)
    assert bool(record["linear_layers"]) is not bool(flags)
    assert untimed == dict.fromkeys(("torch.float32", "torch.bfloat16"), not flags)


@pytest.mark.slow
@pytest.mark.usefixtures("untimed")
def test_doctor_says_which_dtype_was_not_tried(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.model.measure._too_much", lambda *_: "it is too large")
    assert "bfloat16 was not tried: it is too large" in call("doctor", model).stdout


def test_doctor_recommends_by_plain_and_wide_passes() -> None:
    def recommended(shape: str = "tree", **seconds: dict[int, float]) -> Any:
        return cli_doctor.recommend(seconds, {*seconds}, shape)

    slow_when_wide = recommended(float32={1: 1.0, 8: 1.5}, bfloat16={1: 0.5, 8: 5.0})
    assert slow_when_wide["dtype"] == "float32"
    assert "500.0 and 5000.0 in bfloat16" in slow_when_wide["explained"][0]
    assert "pay almost always" in slow_when_wide["explained"][1]
    close = recommended(float32={1: 1.0, 8: 1.5}, bfloat16={1: 0.9, 8: 1.5})
    assert close["dtype"] == "float32"
    faster = recommended(float32={1: 1.0, 8: 2.5}, bfloat16={1: 0.5, 8: 1.2})
    assert faster["dtype"] == "bfloat16"
    assert "near-ties" in faster["explained"][0]
    costs = {"float32": {1: 1.0, 8: 2.5}, "bfloat16": {1: 0.5, 8: 1.2}}
    rounding = cli_doctor.recommend(costs, {"float32"}, "tree")  # a float32 checkpoint
    assert rounding["dtype"] == "float32"
    assert "500.0 and 1200.0 in bfloat16 (which rounds these weights)" in rounding["explained"][0]
    assert "do not pay" in recommended(float32={1: 0.5, 8: 5.0})["explained"][1]
    assert "no use" in recommended("plain", float32={1: 1.0})["explained"][1]
    assert "idle machine" in recommended(float32={1: 1.0, 2: 0.3, 8: 1.5})["explained"][2]
    assert len(recommended(float32={1: 1.0, 2: 0.95, 8: 1.5})["explained"]) == 2


# --- demo --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_builtin")
def test_demo_without_the_real_model_edits_a_file() -> None:
    result = call("demo", "--max-new-tokens", "30")
    assert result.exit_code == 0, result.output
    for words in ("identical", "faster", "per pass", "rename foo to baz in shop.py"):
        assert words in result.stdout
    assert builtin.GET_SMOLLM2 in result.stderr


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
@pytest.mark.usefixtures("own_builtin")
def test_demo_reports_a_difference(monkeypatch: pytest.MonkeyPatch, dtype: str, code: int) -> None:
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
