"""The benchmarks: what they share, that each runs at toy size, and what is left of a killed one."""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import lzma
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import gpu, servers, shared
from benchmarks import load as load_of
from benchmarks.gpu import checks
from benchmarks.lookup import measured_cost
from benchmarks.shared import Options

import heads
import tiny
from draftsmith.model.load import load

FOLDER = Path(shared.__file__).parent
FILES = {
    path.parent.name if path.stem == "__init__" else path.stem: path
    for path in (*FOLDER.glob("*.py"), *FOLDER.glob("*/__init__.py"))
}
BENCHMARKS = sorted(
    name for name, path in FILES.items() if "def parser(" in path.read_text(encoding="utf-8")
)
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="processes cannot be stopped there")


# ---------------------------------------------------------------------------- what they share


def test_a_promise_is_broken_by_the_upper_end_of_its_interval() -> None:
    slow, fast = ("slow", 1.2, lambda: [[1.0, 1.5], [1.0, 1.0]]), ("fast", 1.2, lambda: [[1], [2]])
    ratios, broken = shared.promised([slow, fast, ("free", None, lambda: [[9], [1]])])
    assert broken
    assert re.findall(r"\| (slow|fast|free) .*\| (.*) \|\n?", ratios) == [
        ("slow", "**broken**"), ("fast", "kept"), ("free", ""),
    ]  # fmt: skip
    assert not shared.promised([fast])[1]


def test_one_pair_has_no_interval() -> None:
    assert shared.shown([1.0], [2.0]) == "0.500"
    assert shared.shown([1.0, 1.0], [2.0, 2.0]) == "0.500 [0.500, 0.500]"
    assert shared.promised([("slow", 1.2, lambda: [[3], [2]])])[1]
    plain = {"tokens": 2, "seconds": 1.0}
    assert not load_of.slower({1: [{"none": plain, "auto": plain}]})
    assert load_of.slower({1: [{"none": plain, "auto": plain | {"seconds": 2.0}}]})


def blocks(args: argparse.Namespace) -> Iterator[str]:
    args.name += ".two"
    yield from ("first", "second")


def test_a_page_of_results_names_its_command_machine_and_date(tmp_path: Path) -> None:
    options = Options("x", "What.", data="needed")
    options.add_argument("--server", default="")
    words = [f"{tmp_path}/texts", "--quick", "--threads", "1", f"--server={tmp_path}/bin/a server"]
    shared.run(options, blocks, [*words, "-o", f"{tmp_path}/out"])
    title, known, *rest = (tmp_path / "out" / "x.two.md").read_text(encoding="utf-8").split("\n\n")
    assert (title, rest) == ("# x.two", ["first", "second\n"])
    lines = dict(line.removeprefix("- ").split(": ", 1) for line in known.splitlines())
    assert lines["Command"] == (
        "`python -m benchmarks.x DATA --quick --threads 1 '--server=a server' -o out`"
    )
    assert f"{shared.machine()}, 1 threads of {os.cpu_count()} cores" in lines["Machine"]
    assert f"torch {torch.__version__}" in lines["Versions"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", lines["Date"])


def test_runs_of_one_prompt_are_one_time() -> None:
    found = [("b", 9.0), ("a", 1.0), ("b", 5.0), ("a", 4.0), ("b", 6.0), ("a", 2.0)]
    rows: Any = [SimpleNamespace(id=key, output_ids=[1], seconds=at) for key, at in found]
    assert shared.seconds(rows) == [2.0, 6.0]


@pytest.mark.slow
def test_a_cost_is_measured_again_for_another_model(tmp_path: Path) -> None:
    models = [load(name, dtype="float32") for name in ("edit-1m", "edit-1m", "edit-7m")]
    first, same, other = (measured_cost(model, tmp_path, quick=True) for model in models)
    assert first == same
    assert (first.model, other.model) == ("edit-1m", "edit-7m")


def source(folder: Path, text: str) -> Path:
    (folder / "deep").mkdir(parents=True, exist_ok=True)
    (folder / "deep" / "code.py").write_text(text, encoding="utf-8")
    return folder


def test_results_of_changed_code_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "SOURCE", tmp_path / "src")
    measured: list[str] = []

    def once(args: argparse.Namespace) -> Iterator[str]:
        yield args.results.recall("key", lambda: measured.append(text) or text)

    for text in ("a", "a", "b", "a"):
        source(tmp_path / "src", text)
        shared.run(Options("x", "What."), once, ["-o", str(tmp_path / "out")])
        assert (tmp_path / "out" / "x.md").read_text(encoding="utf-8").endswith(f"\n\n{text}\n")
    assert measured == ["a", "b"]


class FakeArm:
    """An arm that answers each prompt with one token."""

    def __init__(self) -> None:
        self.sleeper: Any = self

    def ask(self, prompts: Any, *_: Any) -> list[load_of.Said]:
        return [load_of.Said("a", 1, 1, 0.0, 1.0, 2.0) for _ in prompts]

    def end(self) -> None: ...


def test_results_of_another_model_or_peer_are_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def started(arm: str, model: str, *_: Any) -> FakeArm:
        asked.append((arm, model))
        return FakeArm()

    def at_once(tasks: Any) -> Any:  # instead of processes in turns
        return {sleeper: (task(), lambda moment: moment) for sleeper, task in tasks.items()}

    monkeypatch.setattr(servers, "started", started)
    monkeypatch.setattr(load_of, "side_by_side", at_once)
    monkeypatch.setattr(servers, "ARMS", ("none", "auto", servers.LLAMA))
    (peer := tmp_path / "peer").write_text("one")
    peer.chmod(0o755)
    args = argparse.Namespace(
        at_once=[1], requests=1, rounds=1, peer_rounds=1, tokens=1, warm=1, prefixes=0,
        transformers="", llama_server=str(peer), results=shared.Results(tmp_path / "x.jsonl"),
    )  # fmt: skip

    def measured(model: str) -> list[tuple[str, str]]:
        asked.clear()
        chats: list[Any] = [[{"role": "user", "content": "hello"}]]
        servers.compare(args, model, "model, float32", chats, lambda _, chat: chat)
        return [*asked]

    arms = ("none", "auto", servers.LLAMA)
    assert set(measured("a/model")) == {(arm, "a/model") for arm in arms}
    assert measured("a/model") == []
    assert set(measured("b/model")) == {(arm, "b/model") for arm in arms}
    peer.write_text("another version")
    assert measured("b/model") == [(servers.LLAMA, "b/model")]


@pytest.mark.parametrize("page", sorted(FOLDER.glob("results/*.md")), ids=lambda page: page.stem)
def test_kept_results_name_a_command_that_can_be_given(page: Path) -> None:
    head = page.read_text(encoding="utf-8").partition("\n|")[0]
    assert head.startswith(f"# {page.stem}\n\n- Command: `python ")
    for name in ("Machine", "Date"):
        assert re.search(rf"^- {name}: \S", head, re.MULTILINE), f"{page.name} names no {name}"
    for line in re.findall(r"`(python [^`]+)`", head):
        _, module, *words = shlex.split(line.replace(" -m ", " "))
        if module.startswith("benchmarks."):
            importlib.import_module(module).parser().parse_args(words)
        else:
            assert (FOLDER.parent / module).is_file()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_is_short_and_says_how_it_is_run(name: str) -> None:
    own = FILES[name]
    for path in own.parent.glob("*.py") if own.stem == "__init__" else [own]:
        assert path.read_text(encoding="utf-8").count("\n") <= 100, path.name
    module = importlib.import_module(f"benchmarks.{name}")
    assert f"    python -m benchmarks.{name}" in module.__doc__
    assert module.parser().name == name


# ------------------------------------------------------------------------- processes in turn


KILLED = textwrap.dedent("""
    import signal, subprocess
    from benchmarks.turns import Sleeper, side_by_side

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    own = [subprocess.Popen(["sleep", "1000"], start_new_session=new) for new in (False, True)]
    tasks = {Sleeper(one.pid): one.wait for one in own}
    for sleeper in tasks:
        sleeper.sleep()
    print(*(one.pid for one in own), flush=True)
    side_by_side(tasks)
""")


@POSIX
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_benchmark_leaves_no_stopped_process(how: signal.Signals) -> None:
    """The guard of each process sees that the benchmark has ended, whatever ended it."""
    command = [sys.executable, "-c", KILLED]
    quiet: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=FOLDER.parent, text=True, **quiet) as benchmark:
        assert benchmark.stdout is not None
        left = list(map(int, benchmark.stdout.readline().split()))
        assert len(left) == 2
        assert all(map(there, left))
        benchmark.send_signal(how)
    while any(map(there, left)):  # the test's own limit ends it
        time.sleep(0.05)


def there(process: int) -> bool:
    """Return whether a process is there and has not ended."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process}/stat")
    try:
        return not status.parent.parent.is_dir() or status.read_text().rpartition(")")[2][1] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ------------------------------------------------------------------------------ all of them

TURNS = ["the quick brown fox jumps over the quick brown", "once more"]


def jsonl(*items: Any) -> bytes:
    return "".join(json.dumps(item) + "\n" for item in items).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in `model`, and texts like the public ones in `data`."""
    made = tmp_path_factory.mktemp("toys")
    tiny.model(1, 2048).save_pretrained(made / "model")
    tiny.tokenizer().save_pretrained(made / "model")
    asked = [
        {"question_id": n, "category": category, "turns": TURNS[:count]}
        for n, (category, count) in enumerate([("coding", 2), ("rag", 1)])
    ]
    for name in ("prompts", "recorded"):
        (made / "data" / name).mkdir(parents=True)
    prompts = made / "data" / "prompts"
    (prompts / "spec_bench.jsonl").write_bytes(jsonl(*asked))
    (prompts / "mt_redundant.jsonl").write_bytes(jsonl(asked[0]))
    task = {"task_id": "HumanEval/0", "prompt": "def foo(x):", "entry_point": "foo"}
    (prompts / "humaneval.jsonl.gz").write_bytes(gzip.compress(jsonl(task)))
    edit = {"suite": "commit_edits", "messages": [{"role": "user", "content": TURNS[0]}]}
    file = made / "data" / "recorded" / "commit_edits.jsonl.xz"
    file.write_bytes(lzma.compress(jsonl(edit)))
    head = heads.random_head(64, len(tiny.tokenizer()), 30, reads=1)
    heads.save(made / "head", head, layer_ids=(1,))
    return made


TOYS: dict[str, tuple[str, list[str]]] = {
    "batch_cost": ("--models MODEL --dtypes float32", ["| 1 plain row, packed / alone |"]),
    "newcomer": ("--models MODEL --dtypes float32", ["MODEL, float32: slow / usual |"]),
    "under_load": ("--models MODEL",
                   ["| 2 | `none` |", "| 2 | `auto` |", "| 2 | `generate_batch` |"]),
    "server_load": ("--models MODEL --transformers /nowhere",
                    ["| 2 | `auto` |", "`transformers serve` | cannot run: there is no /nowhere",
                     "`llama-server` | cannot run: it takes GGUF files only"]),
    "agents": ("--models MODEL --transformers /nowhere",
               ["| 2 | `none` |", "| 2 | `auto` |", ", float32, 2 turns",
                "`transformers serve` | cannot run: there is no /nowhere"]),
    "live_smollm2": ("DATA -m MODEL --dtypes bfloat16",
                     ["| all | 7 |", "| mt_redundant, turn 2 | 1 |", "dictated answers"]),
    "checkouts": ("DATA --other SRC -m MODEL --dtypes float32",
                  ["| none | 2 | 2 |", "| auto | 2 | 2 |", "| 10/10 |"]),
    "head_quality": ("DATA -m MODEL", ["7 prompts, at most 6 nodes", "| no head |",
                                       "| right in 0.7 |"]),
    "live_smollm2.head": ("DATA -m MODEL --dtypes float32 --head HEAD",
                          ["| all | 7 |", "- auto(head=eagle3(model=HEAD)) over auto: "]),
}  # fmt: skip
"""Results that a tiny model can give: what is typed, and what the table then has."""


def run(name: str, words: list[str]) -> None:
    """Run a benchmark at toy size; what a clock finds may break a promise."""
    module = importlib.import_module(f"benchmarks.{name.partition('.')[0]}")
    shared.run(module.parser(), module.measure, [*words, "--quick", "--threads", "1"])


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", TOYS)
def test_a_benchmark_runs_and_goes_on(name: str, folder: Path, tmp_path: Path) -> None:
    typed, wanted = TOYS[name]
    places = {"MODEL": str(folder / "model"), "DATA": str(folder / "data"),
              "SRC": str(FOLDER.parent / "src"), "HEAD": str(folder / "head")}  # fmt: skip
    words = [places.get(word, word) for word in typed.split()] + ["-o", str(tmp_path)]
    run(name, words)
    said = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
    for line in wanted:
        for word, place in places.items():
            line = line.replace(word, place)
        assert line in said
    assert "refused" not in said
    files: Callable[[], dict[str, bytes]] = lambda: {  # noqa: E731
        str(file): file.read_bytes() for file in tmp_path.rglob("*.jsonl")
    }
    before = files()
    run(name, words)  # nothing is left to do
    assert files() == before


@pytest.mark.slow
def test_a_wrong_token_ends_the_benchmark_of_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "first_difference", lambda *_: 3)
    words = ["--quick", "--device", "cpu", "--threads", "1", "-o", str(tmp_path)]
    assert shared.run(gpu.parser(), gpu.measure, words)
    said = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "| toy, float32, packed | 0 of 8 | 0 of 12 |" in said
    assert said.endswith("The benchmark ends.**\n")


def test_the_benchmark_of_a_device_keeps_its_time(tmp_path: Path) -> None:
    words = ["--quick", "--device", "cpu", "--threads", "1", "--seconds", "0", "-o", str(tmp_path)]
    assert not shared.run(gpu.parser(), gpu.measure, words)
    said = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert said.endswith("The 0 seconds are over; the same command goes on.\n")
    assert "passes after" not in said


SHARED = {
    "edits": "DATA --answers commit --dtype float32",
    "predicted": "DATA",
    "quotesum": "DATA",
    "vllm_drafters": "cost DATA",
    "sampled_distributions": "--draws 50",
}
"""Benchmarks that need the recorded data, or a model that ships."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_a_benchmark_of_recorded_data_runs(name: str, shared_data: Path, tmp_path: Path) -> None:
    words = [str(shared_data) if word == "DATA" else word for word in SHARED[name].split()]
    run(name, [*words, "-o", str(tmp_path)])
    [page] = tmp_path.glob(f"{name}*.md")
    assert re.search(r"^\| ---", page.read_text(encoding="utf-8"), re.MULTILINE)
