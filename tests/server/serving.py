"""A server over the tiny model: in this process, listening in a thread, or the command itself."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx2
import pytest
from benchmarks.turns import Guard
from starlette.testclient import TestClient

import tiny
from draftsmith import Grammar
from draftsmith.engine.engine import Engine
from draftsmith.engine.sequence import Piece
from draftsmith.model.load import load
from draftsmith.server.api import Api
from draftsmith.server.app import application
from draftsmith.server.calls.source import Call, Part, TextPart, add
from draftsmith.server.keys import Keys
from draftsmith.server.reader import Reader
from draftsmith.server.run import Draining, server
from draftsmith.server.settings import Settings

Ask = Callable[..., httpx2.Response]
"""(path, chat template, what the model answers or None, fields of the body) → the response."""
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
USER = {"role": "user", "content": "hello"}
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 2}, TEXT: {"prompt": "hello", "max_tokens": 2},
    RESPONSES: {"input": "hello", "max_output_tokens": 2},
    MESSAGES: {"messages": [USER], "max_tokens": 2},
    "/tokenize": {"prompt": "hello"}, "/detokenize": {"tokens": [5]},
}  # fmt: skip
"""A short request for each endpoint."""
CALLING = "{% for t in tools or [] %}<tool_call>{{ t | tojson }}{% endfor %}" + tiny.TEMPLATE
"""A chat template with tools."""
TAGGED = "{# </think> #}" + tiny.TEMPLATE
OPENED = TAGGED.replace("assistant: {{", "assistant: <think>\n{{")
CLOSED = OPENED.replace("<think>\n{{", "<think>\n\n</think>\n\n{{")
"""Chat templates with reasoning, which the model begins, the prompt begins or the prompt ends."""
MODEL = "edit-1m"
"""What the command serves unless it is told otherwise."""
SHOWN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""Tags that are tokens and stand in the text."""
HIDDEN = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|python_tag|>",
          "[TOOL_CALLS]", "[ARGS]"]  # fmt: skip
"""Tags that are tokens and do not."""


@cache
def loaded() -> Any:
    """In float64, so that who shares a pass decides no token."""
    return load(copy.deepcopy(tiny.model(context=2048)).double(), tiny.tokenizer())


def engine(drafter: Any = "auto", **options: Any) -> Engine:
    return Engine(loaded(), drafter=drafter, **options)


def api_of(made: Engine | None = None, keys: tuple[str, ...] = (), **settings: Any) -> Api:
    chosen = {"port": 0, "max_output": 64} | settings
    return Api(made or engine(), Settings(**chosen), Keys(keys), "tiny")


def merged(parts: Iterable[Part]) -> list[Part]:
    """The parts of an answer, whole."""
    found = list[Part]()
    for part in parts:
        add(found, part)
    return found


def parsed(reader: Reader, parts: Iterable[str]) -> list[Part]:
    """What a reader makes of an answer that comes in parts."""
    found = [part for text in parts for part in reader.push([Piece(text, 9, "target", 0.0)])]
    return merged(found + reader.end())


def read(reader: Reader, parts: Iterable[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """What is thought, said and called in an answer that comes in parts."""
    found = parsed(reader, parts)
    texts = [part for part in found if isinstance(part, TextPart)]
    thought = "".join(part.text for part in texts if part.thought)
    said = "".join(part.text for part in texts if not part.thought)
    calls = [(part.name, part.arguments) for part in found if isinstance(part, Call)]
    return thought, said, calls


def split(rng: random.Random, text: str) -> list[str]:
    """A text in parts of any size."""
    parts = []
    while text:
        size = rng.choice([1, 2, 3, 5, 8, 40])
        parts.append(text[:size])
        text = text[size:]
    return parts


def streamed_calls(chunks: Sequence[Any]) -> list[Any]:
    """The calls of a streamed chat's first choice, put together as OpenAI's client does."""
    found = list[Any]()
    for chunk in chunks:
        for choice in chunk["choices"]:
            for delta in choice["delta"].get("tool_calls", ()):
                if delta["index"] == len(found):
                    found.append(copy.deepcopy(delta))
                else:
                    assert delta["index"] == len(found) - 1
                    assert delta.keys() == {"index", "function"}
                    found[-1]["function"]["arguments"] += delta["function"]["arguments"]
    return found


@contextmanager
def client_of(api: Api | None = None) -> Iterator[TestClient]:
    with TestClient(application(api or api_of())) as client:
        yield client


@contextmanager
def templated(template: str, **settings: Any) -> Iterator[TestClient]:
    """A client of a server whose model has this chat template."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = template
    with client_of(api_of(Engine(load(loaded().model, tokenizer)), **settings)) as client:
        yield client


@contextmanager
def saying(made: Engine, answer: Callable[[], Grammar | None]) -> Iterator[None]:
    """The model says in chats what it is told to, unless that is None."""
    prepare = made.prepare

    def prepared(options: dict[str, Any], began: float | None = None) -> Any:
        fixed = answer() if "thoughts" in options else None
        more = {} if fixed is None else {"grammar": fixed, "thoughts": None}
        return prepare(options | more, began)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "prepare", prepared)
        yield


@contextmanager
def listening(api: Api, buffered: int | None = None, made: Draining | None = None) -> Iterator[str]:
    """Serve from a thread; its address. `buffered`: bytes that its connections may hold."""
    made = made or server(api)
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        until(lambda: made.started)
        listener = made.servers[0].sockets[0]
        if buffered is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffered)
        port = listener.getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        made.should_exit = True
        api.worker.draining = True
        thread.join()


def until(holds: Callable[[], bool], seconds: float = 120, every: float = 0.005) -> None:
    """Wait for something that must come; the time only ends what hangs."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come"
        time.sleep(every)


class Served:
    """`draftsmith serve` in a process of its own, as its users start it."""

    def __init__(self, *options: str, **environment: str) -> None:
        arguments = ["serve", "-m", MODEL, "--dtype", "float32", "--port", "0", *options]
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from draftsmith.cli import main; main()", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            process_group=0,
        )
        self._guard = Guard(self.process.pid)
        self.lines: list[str] = []
        self._reading = threading.Thread(target=self._read)
        self._reading.start()
        try:
            until(lambda: self.process.poll() is not None or self.address != "", 300)
            assert self.process.poll() is None, self.lines
        except BaseException:
            self.end(signal.SIGKILL)
            raise

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def address(self) -> str:
        found = re.search(r"http://[\d.:]+", "".join(self.lines))
        return found[0] if found else ""

    def end(self, sign: signal.Signals = signal.SIGTERM) -> int:
        """The exit code after a signal."""
        if self.process.poll() is None:
            self.process.send_signal(sign)
        code = self.process.wait(300)
        self._reading.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        assert not [line for line in self.lines if '"event": "a pass' in line]
        self._guard.close()
        return code

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGKILL)


def events(response: httpx2.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream that ends as it should."""
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def stream_of(response: httpx2.Response) -> list[dict[str, Any]]:
    """The events of a response's stream, each of which says what it is and its number."""
    lines = response.text.split("\n")
    found = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    names = [line[7:] for line in lines if line.startswith("event: ")]
    assert names == [event["type"] for event in found]
    numbers = [event["sequence_number"] for event in found if "sequence_number" in event]
    assert numbers in ([], list(range(len(found))))  # Anthropic's have none
    return found


def responded(ask: Ask, template: str, answer: Any, **more: Any) -> tuple[Any, list[str]]:
    """A response, which is the same whole and in events, and the types of its events."""
    body = {"input": "hello", "max_output_tokens": 300} | more
    whole = ask(RESPONSES, template, answer, **body).json()
    told = stream_of(ask(RESPONSES, template, answer, stream=True, **body))
    done, begun, written = list[Any](), None, ""
    for event in told:
        if event["type"].endswith("output_item.added"):
            begun, written = event["item"]["id"], ""
        elif event["type"].endswith(".delta"):
            assert event["item_id"] == begun
            written += event["delta"]
        elif event["type"].endswith("output_item.done"):
            item = event["item"]
            text = item["content"][0]["text"] if "content" in item else None
            assert item["id"] == begun
            assert written == item.get("arguments", item.get("input", text))
            done.append(item)
    assert done == told[-1]["response"]["output"]
    assert told[-1]["response"]["status"] == whole["status"]
    for one, other in zip(whole["output"], done, strict=True):
        for name in one.keys() - {"id", "call_id"}:
            assert one[name] == other[name], name
    return whole, [event["type"].partition(".")[2] for event in told]


def said(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text that a chat's events bring for one choice."""
    mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in mine)


def figures(client: TestClient) -> dict[str, float]:
    """What /metrics tells, by name and labels."""
    lines = client.get("/metrics").text.splitlines()
    rows = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}


def rows(api: Api) -> int:
    """Rows that somebody uses."""
    runner = api.engine.resources.runner
    kept = len(api.engine.resources.prefixes)
    return len(runner.store._rows) - kept  # type: ignore[attr-defined]


def idle(api: Api) -> bool:
    """Whether nobody has a row, a place in line or a thread's attention."""
    return not (api.worker.open or api.engine.resources.admitted or rows(api))
