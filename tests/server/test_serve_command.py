"""`draftsmith serve` as its users start it; the clients they use have a file of their own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
from serving import MODEL, Served

from command import call, fails

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "a.py: rename x\n<|file|>x = 1\n"}],
       "max_tokens": 4}  # fmt: skip


def test_the_command_serves_and_ends_on_a_signal(tmp_path: Path) -> None:
    answers = tmp_path / "answers"
    with Served("--answers", "1000000", "--answers-file", str(answers)) as served:
        chat = served.address + "/v1/chat/completions"
        told = httpx2.post(chat, json=ASK, timeout=300).json()
        assert told["model"] == MODEL
        assert told["usage"]["completion_tokens"] == 4
        body = ASK | {"stream": True, "max_tokens": 200, "ignore_eos": True}
        with httpx2.stream("POST", chat, json=body, timeout=300) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            served.process.send_signal(signal.SIGHUP)  # of a closed terminal
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason": "length"' in rest[-2]
        while served.process.poll() is None and not answers.exists():
            served.process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        assert served.process.wait(300) in (0, -signal.SIGTERM)  # the latter after it saved
    assert answers.exists()
    logged = [json.loads(line) for line in served.lines if line.startswith("{")]
    said = [line["event"] for line in logged]
    running = next(n for n, event in enumerate(said) if "running on http" in event)
    assert said.index("warming up") < said.index("warm") < running
    assert [line["event"] for line in logged].count("answered") == 2
    assert all(line["level"] != "error" for line in logged)
    assert "rename" not in "".join(served.lines)


def test_wrong_options_are_one_line(tmp_path: Path) -> None:
    assert "--max-output" in fails(2, "serve", "--max-output", "0")
    assert "cannot read" in fails(2, "serve", "--api-keys", tmp_path / "none")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port}" in fails(2, "serve", "-m", tmp_path / "none", "--port", port)
    for host, warned in (("0.0.0.0", True), ("127.0.0.1", False)):
        done = call("serve", "-m", tmp_path / "none", "--host", host, "--port", "0")
        assert ("everybody who reaches" in done.stderr) == warned


@pytest.mark.slow
def test_the_first_answer_waits_for_nothing_that_others_do_not() -> None:
    """In a process of its own, where nothing is compiled or loaded yet."""
    code = (
        "import sys\n"
        f"sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}\n"
        "from serving import api_of, engine\n"
        "from draftsmith.compiled import compiling\n"
        "from draftsmith.text.grammar import Grammar\n"
        "made = engine('auto', answers=1_000_000)\n"
        "api_of(made).warm_up()\n"
        "before = compiling()\n"
        "assert before > 0\n"
        "assert not made.resources.prefixes and not made.answers.count\n"
        "schema = Grammar.json_schema({'enum': ['the quick brown fox', 'the lazy dog']})\n"
        "for more in ({}, {'prediction': 'the lazy dog'}, {'grammar': schema}):\n"
        "    made.generate('the quick brown fox ' * 4, max_new_tokens=20, **more)\n"
        "assert compiling() == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
