"""`draftsmith serve` as its users start it; the clients they use have a file of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from serving import MODEL, Served

from command import fails

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
            served.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason": "length"' in rest[-2]
        assert served.process.wait(300) == 0
    assert answers.exists()
    logged = [json.loads(line) for line in served.lines if line.startswith("{")]
    assert [line["event"] for line in logged].count("answered") == 2
    assert "rename" not in "".join(served.lines)


@pytest.mark.slow
def test_the_command_can_be_killed_and_started_again() -> None:
    with Served() as served:
        assert served.end(signal.SIGKILL) == -signal.SIGKILL
    with Served() as again:
        assert httpx2.get(again.address + "/health").json() == {"status": "ok"}
        assert again.end(signal.SIGINT) == 0


def test_wrong_options_are_one_line(tmp_path: Path) -> None:
    assert "--max-output" in fails(2, "serve", "--max-output", "0")
    assert "cannot read" in fails(2, "serve", "--api-keys", tmp_path / "none")


def test_what_to_install_is_told_where_something_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("draftsmith.server.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert "pip install 'draftsmith[server]'" in fails(2, "serve", "-m", MODEL)


def test_draftsmith_needs_nothing_of_the_extra() -> None:
    code = (
        "import sys\n"
        "for name in ('fastapi', 'uvicorn', 'pydantic', 'sse_starlette', 'prometheus_client'):\n"
        "    sys.modules[name] = None\n"
        "import draftsmith, draftsmith.cli\n"
        "from draftsmith import Engine\n"
        "from draftsmith.server.settings import Settings\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
