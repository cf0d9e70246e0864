"""The scripts that measure shared passes, on a tiny model: what they run, show and go on from."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from pathlib import Path
from time import sleep

import pytest
from benchmarks import batch_cost, paired, prefix_reuse, server_load, under_load

import tiny


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """What every script is given: a model, a folder, one thread."""
    tiny.model(1, 2048).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    return [str(tmp_path / "model"), "--threads", "1", "-o", str(tmp_path / "out")]


def run(main: Callable[[Sequence[str]], None], words: Sequence[str]) -> None:
    """What a clock finds may break a promise."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code in (False, True)


def known(words: Sequence[str]) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(words[-1]).glob("*.jsonl")}


Echo = subprocess.Popen[str]


@pytest.fixture
def echoes() -> Iterator[list[Echo]]:
    """Two processes that say what they hear, asleep."""
    pipe = subprocess.PIPE
    found = [subprocess.Popen(["cat"], stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    try:
        for echo in found:
            paired.sleep(echo.pid)
        yield found
    finally:
        for echo in found:
            echo.kill()
            echo.communicate()


def heard(echo: Echo, said: str) -> str:
    assert echo.stdin is not None
    assert echo.stdout is not None
    echo.stdin.write(said + "\n")
    echo.stdin.flush()
    return echo.stdout.readline().strip()


def falls_asleep(echo: Echo) -> bool:
    """Waits: a signal takes its time to come."""
    return os.WIFSTOPPED(os.waitpid(echo.pid, os.WUNTRACED)[1])


def wakes_up(echo: Echo) -> bool:
    return os.WIFCONTINUED(os.waitpid(echo.pid, os.WCONTINUED)[1])


@pytest.mark.skipif(sys.platform == "win32", reason="nobody sleeps there")
def test_processes_take_turns_and_are_woken_by_an_interrupt(
    echoes: list[Echo], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = {echo.pid: partial(heard, echo, f"it is {echo.pid}") for echo in echoes}
    found = paired.side_by_side(tasks)
    assert [said for said, _ in found.values()] == [f"it is {echo.pid}" for echo in echoes]
    for _, clock in found.values():
        assert clock(0.0) == 0 < clock(inf)
    assert all(map(falls_asleep, echoes))
    assert paired.side_by_side({}) == {}

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(paired, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        paired.side_by_side(tasks)
    assert all(map(wakes_up, echoes))


@pytest.mark.slow
def test_batch_cost_has_a_line_per_promise(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--quick", "--newcomer", "200", "--models", *words]
    run(batch_cost.main, given)
    said = (Path(words[-1]) / "batch_cost.md").read_text(encoding="utf-8")
    for most, count in ((1.1, 1), (2.5, 2)):
        assert len(re.findall(rf"\| {most} \| [\d.]+ / [\d.]+ \w+ \|", said)) == count
    assert re.search(r"^\| bytes of 8 rows of 1 to 200 .* \| kept \|$", said, re.MULTILINE)
    assert re.search(r"^About \d+ minutes", capsys.readouterr().out, re.MULTILINE)
    before = known(words)
    run(batch_cost.main, given)  # nothing is left to do
    assert known(words) == before


@pytest.mark.slow
def test_under_load_compares_three_arms(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    given = ["--quick", "--models", *words]
    run(under_load.main, given)
    said = (Path(words[-1]) / "under_load.md").read_text(encoding="utf-8")
    for rows in (1, 4):
        assert re.search(rf"\| {rows} \| `none` \| [\d.]+ \| 1 \| 3 \|", said)
        assert re.search(rf"\| {rows} \| `auto` \| .* \| (\d+) of \1 \|", said)
        peer = re.search(rf"\| {rows} \| `generate_batch` \| (.*)", said)
        assert peer is not None
        assert re.search(r"cannot run: \w+|\| (\d+) of \1 \|", peer[1])
    assert said in capsys.readouterr().out
    assert [*Path(words[-1]).glob("*.svg")]
    before = known(words)
    run(under_load.main, given)
    assert known(words) == before


@pytest.mark.slow
def test_server_load_asks_every_server(words: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    given = ["--clients", "1", "2", "--rounds", "2", "--tokens", "8", "--prompts", "4",
             "--transformers", str(tmp_path / "none"), "--models", *words]  # fmt: skip
    run(server_load.main, given)
    said = (Path(words[-1]) / "server_load.md").read_text(encoding="utf-8")
    for clients, chats in ((1, 12), (2, 16)):
        for arm in ("none", "auto"):
            line = rf"\| {clients} \| `{arm}` \| [\d.]+ \| .* \| {chats} of {chats} \|"
            assert re.search(line, said), said
        assert f"| {clients} | `transformers serve` | cannot run: there is no {tmp_path}" in said
        assert f"| {clients} | `llama-server` | cannot run: it takes GGUF files only" in said
    before = known(words)
    run(server_load.main, given)
    assert known(words) == before


@pytest.mark.slow
def test_prefixes_are_computed_once(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        prefix_reuse.main(["--quick", "--shared", "100", "-m", *words])
    assert not ended.value.code  # counts, not times, decide
    said = (Path(words[-1]) / "prefix_reuse.md").read_text(encoding="utf-8")
    assert "| second of two that share 100 | 132 | 32 | 32 | 132 |" in said
    assert len(re.findall(r"^\| turn \d+ \|", said, re.MULTILINE)) == len(prefix_reuse.TURNS)
    before = known(words)
    with pytest.raises(SystemExit):
        prefix_reuse.main(["--quick", "--shared", "100", "-m", *words])
    assert known(words) == before


def test_a_process_ends_with_the_one_that_started_it() -> None:
    """A server that sleeps between its turns stayed when the benchmark was killed."""
    code = (
        "import os, signal, subprocess, sys, time\n"
        "from benchmarks.guard import Guard\n"
        "for group in ({}, {'process_group': 0}):\n"
        "    process = subprocess.Popen(['sleep', '3000'], **group)\n"
        "    guard = Guard(process.pid)\n"
        "    os.kill(process.pid, signal.SIGSTOP)\n"
        "    print(process.pid, flush=True)\n"
        "ended = subprocess.Popen(['sleep', '0'])\n"
        "guard = Guard(ended.pid)\n"
        "ended.wait()\n"
        "guard.close()\n"
        "print('closed', flush=True)\n"
        "time.sleep(3000)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout as told:
        started = [int(told.readline()), int(told.readline())]
        assert told.readline() == "closed\n"
    parent.kill()
    parent.wait()
    for process in started:
        while _lives(process):
            sleep(0.01)


def _lives(process: int) -> bool:
    """Whether a process is there and not merely waits to be collected."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(
        ["ps", "-o", "state=", "-p", str(process)], capture_output=True, text=True
    )
    return state.stdout.strip() not in ("", "Z")
