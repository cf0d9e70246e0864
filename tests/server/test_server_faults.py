"""Many at once, clients that leave, dawdle or flood, and everything that fails on the way."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf, nan
from time import perf_counter
from typing import Any

import httpx2
import pytest
import serving
from serving import CHAT, TEXT, api_of, client_of, engine, events, idle, listening, until
from starlette.types import Message

from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context
from draftsmith.engine import scheduler as scheduling
from draftsmith.engine.engine import Engine
from draftsmith.errors import LoadError, OptionError
from draftsmith.server import create_app
from draftsmith.server.app import application
from draftsmith.server.keys import Keys
from draftsmith.server.refusals import Refusal
from draftsmith.server.run import JsonLines, server
from draftsmith.server.settings import Settings
from draftsmith.server.worker import Deadline
from draftsmith.testing import Scripted
from draftsmith.text.grammar import Grammar

ASK = {"messages": [{"role": "user", "content": "the quick brown fox"}], "ignore_eos": True}


class Gate:
    """A drafter that drafts nothing, and stops every step while it is shut."""

    def __init__(self) -> None:
        self.open, self.stopped = threading.Event(), threading.Event()

    def __call__(self, _ctx: Context) -> Draft:
        self.stopped.set()
        assert self.open.wait(300)
        return Draft()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


def gated(gate: Gate, **options: Any) -> Engine:
    return engine(Scripted(gate), budget=2, **options)


# --- clients that leave, dawdle or flood --------------------------------------------------------


def send(client: socket.socket, address: str, **body: Any) -> None:
    """Connect and ask for a chat, without reading anything."""
    data = json.dumps(ASK | body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
    client.connect(("127.0.0.1", int(address.rpartition(":")[2])))
    client.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_gives_its_row_back_within_a_step(gate: Gate, stream: bool) -> None:
    api = api_of(gated(gate))
    with listening(api) as address:
        with socket.socket() as client:
            send(client, address, stream=stream)
            assert gate.stopped.wait(300)
            (sequence,) = api.engine.resources.admitted
            before = sequence.generated
        until(lambda: api.worker.open == 0)
        gate.open.set()
        until(lambda: idle(api))
    assert sequence.result().finish_reason == "cancelled"
    assert sequence.generated <= before + 1


def test_time_is_over_also_for_who_always_has_something_to_read() -> None:
    api = api_of(engine("none"))

    async def scenario() -> None:
        job = api.worker.job(1, perf_counter())
        prepared = api.engine.prepare({"max_new_tokens": 9})
        job.start(prepared.sequences([ASK["messages"]], streaming=True))
        while job._waiting.empty():
            await asyncio.sleep(0.001)
        job._deadline = 0.0
        with pytest.raises(Refusal) as refused:
            await anext(job.chunks())
        assert refused.value.code == "timeout"
        job.close()
        api.close()

    asyncio.run(scenario())


def test_an_answer_that_ended_before_others_of_its_request_does_not_run() -> None:
    api = api_of(engine("none"))

    async def scenario() -> None:
        job, ended = api.worker.job(2, perf_counter()), 0
        prepared = [api.engine.prepare({"max_new_tokens": n}) for n in (2, 300)]
        asked = [one.sequences([ASK["messages"]], streaming=True)[0] for one in prepared]
        job.start(asked)
        async for chunk in job.chunks():
            ended += chunk.result is not None
            assert api.worker.open == 2 - ended
            assert api.worker.running <= 2 - ended
        api.close()

    asyncio.run(scenario())


def test_who_stops_reading_is_cut_off() -> None:
    """Over a connection whose buffers are small, beside one who reads."""
    api = api_of(engine("none"), slow_reader=0.2, max_output=400)
    with listening(api, buffered=4096) as address, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        send(slow, address, stream=True, max_tokens=400, logprobs=True, top_logprobs=20)
        got = slow.recv(12)
        other = httpx2.post(address + CHAT, json=ASK | {"max_tokens": 60}, timeout=600)
        assert other.json()["usage"]["completion_tokens"] == 60
        until(lambda: idle(api))
        while data := slow.recv(1 << 16):
            got += data
        assert got.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in got


def test_a_full_queue_is_reported_and_empties(gate: Gate) -> None:
    api = api_of(gated(gate, max_batch=1), queue=3)
    with listening(api) as address, ThreadPoolExecutor(8) as threads:

        def ask(_: int) -> httpx2.Response:
            return httpx2.post(address + CHAT, json=ASK | {"max_tokens": 2}, timeout=600)

        waiting = [threads.submit(ask, number) for number in range(8)]
        until(lambda: sum(one.done() for one in waiting) == 4)
        refused = [one.result() for one in waiting if one.done()]
        assert {response.status_code for response in refused} == {429}
        assert all(response.headers["retry-after"] == "1" for response in refused)
        assert refused[0].json()["error"]["code"] == "queue_full"
        figures = httpx2.get(address + "/metrics").text
        assert 'vllm:num_requests_waiting{model_name="tiny"} 3.0' in figures
        assert httpx2.get(address + "/health").status_code == 200
        gate.open.set()
        answered = [one.result() for one in waiting if one.result().status_code == 200]
        assert len(answered) == 4
        until(lambda: idle(api))
        many = httpx2.post(address + CHAT, json=ASK | {"n": 5})
        assert many.json()["error"]["param"] == "n"


def test_time_is_limited(gate: Gate) -> None:
    with client_of(api_of(gated(gate), timeout=0.3)) as client:
        streamed = client.post(CHAT, json=ASK | {"stream": True})
        late = streamed.status_code == 504  # where even preparing takes longer
        told = streamed.json() if late else events(streamed)[-1]
        assert told["error"]["code"] == "timeout"
        # The step still goes on, and nobody can be put in line.
        assert client.post(CHAT, json=ASK).status_code == 504
        assert client.get("/health").status_code == 200
        gate.open.set()


# --- what fails -------------------------------------------------------------------------------


def test_a_grammar_that_takes_too_long_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    api, ends = api_of(engine("none")), threading.Event()
    grammars, usual = api.engine.model.grammars, api.settings
    build = grammars._build

    def slow(grammar: Grammar, end_ids: tuple[int, ...]) -> Any:
        assert grammar.text != "explodes" or ends.wait(300)
        return build(grammar, end_ids)

    monkeypatch.setattr(grammars, "_build", slow)

    def asked(pattern: str) -> httpx2.Response:
        body = ASK | {"response_format": {"type": "regex", "pattern": pattern}, "max_tokens": 5}
        return httpx2.post(address + CHAT, json=body, timeout=600)

    body = ASK | {"stream": True, "max_tokens": 64}
    with listening(api) as address, httpx2.stream("POST", address + CHAT, json=body) as stream:
        try:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            api.settings = replace(usual, grammar_seconds=0.01)
            refused = asked("explodes")
            api.settings, api.worker.seconds = replace(usual, grammar_seconds=200), 0.01
            assert asked("explodes").status_code == 504, "it counts for the request's time"
            api.settings, api.worker.seconds = usual, usual.timeout
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "response_format"
            assert "too long" in refused.json()["error"]["message"]
            assert asked("[a-f]{3}").status_code == 200
            assert [line for line in lines if line][-1] == "data: [DONE]"
        finally:
            ends.set()
        until(lambda: idle(api))


def test_a_grammar_is_not_blamed_for_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time begins when a thread takes it."""
    api, ends, limits = api_of(engine("none")), threading.Event(), list[float]()
    grammars, deadline = api.engine.model.grammars, Deadline
    build = grammars._build

    def slow(grammar: Grammar, end_ids: tuple[int, ...]) -> Any:
        assert not grammar.text.startswith("slow") or ends.wait(300)
        return build(grammar, end_ids)

    def limited(when: float, *given: Any, **fields: Any) -> Any:
        limits.append(when)
        return deadline(when, *given, **fields)

    monkeypatch.setattr(grammars, "_build", slow)
    monkeypatch.setattr("draftsmith.server.api.Deadline", limited)

    def asked(pattern: str) -> int:
        body = ASK | {"response_format": {"type": "regex", "pattern": pattern}, "max_tokens": 5}
        return httpx2.post(address + CHAT, json=body, timeout=600).status_code

    with listening(api) as address, ThreadPoolExecutor(5) as clients:
        try:
            before = [clients.submit(asked, f"slow{n}") for n in range(4)]
            until(lambda: len(limits) == 4)
            last = clients.submit(asked, "[a-f]{3}")
            until(lambda: api._compiling._work_queue.qsize() == 1)
            assert len(limits) == 4
        finally:
            ends.set()
        assert [one.result() for one in (*before, last)] == [200] * 5
        assert len(limits) == 5


def test_a_worker_that_fails_is_reported_and_no_request_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = api_of()

    def fails(*_: Any) -> None:
        raise SystemExit("nobody expected this")

    with listening(api) as address:
        monkeypatch.setattr(scheduling, "step", fails)
        assert httpx2.post(address + CHAT, json=ASK).status_code == 503
        assert httpx2.get(address + "/health").status_code == 503


def test_an_error_nobody_expected_is_reported_without_its_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = api_of()

    def secret(*_: Any) -> Any:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(api, "_prepare", secret)
    with listening(api) as address:
        response = httpx2.post(address + CHAT, json=ASK)
        assert response.status_code == 500
        assert "secret" not in response.text
        assert response.json()["error"]["code"] == "internal_error"
        assert api.worker.open == 0


# --- the end ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("drain", "signals"), [(3600.0, 1), (3600.0, 2), (0.0, 1)])
def test_a_stream_ends_properly_when_the_server_does(
    gate: Gate, drain: float, signals: int
) -> None:
    at_once = signals == 2 or not drain
    api = api_of(gated(gate), drain=drain)
    made = server(api)
    with listening(api, made=made) as address, ThreadPoolExecutor(1) as asking:
        body = ASK | {"stream": True, "max_tokens": 6}
        going = asking.submit(httpx2.post, address + CHAT, json=body, timeout=600)
        assert gate.stopped.wait(300)
        for _ in range(signals):
            made.handle_exit(15, None)
        until(lambda: api.worker.draining)
        if at_once:
            until(lambda: api.worker.open == 0)
        gate.open.set()
        chunks = events(going.result())
    if at_once:
        assert chunks[-1]["error"]["code"] == "unavailable"
    else:
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert not api.worker.alive
    with pytest.raises(Refusal, match="shutting down"):
        api.worker.job(1, perf_counter())
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(address + "/health")


# --- keys and origins ---------------------------------------------------------------------------


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_only_known_keys_are_served() -> None:
    with client_of(api_of(keys=("one", "two", "schlüssel"))) as client:
        for path in ("/v1/models", "/health", "/metrics"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers=bearer("two")).status_code == 200
        for key, status in (("schlüssel", 200), ("schlussel", 401)):
            header = b"authorization", b"Bearer " + key.encode()
            assert client.get("/v1/models", headers=[header]).status_code == status
        for headers in ({}, bearer("three"), bearer(""), {"Authorization": "Basic b25l"}):
            response = client.post(CHAT, json=ASK, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        assert client.post(CHAT, json=ASK, headers=bearer("one")).status_code == 200
    with client_of(api_of(keys=("one",), public=True)) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 200
        assert client.get("/metrics").status_code == 401


def test_keys_that_a_program_gives_are_checked() -> None:
    """An empty one would open the server to requests without a key."""
    for wrong in ([""], ["one", " "], "", [None]):
        with pytest.raises(OptionError, match="keys must be non-empty strings"):
            create_app(engine(), keys=wrong)
    keys = Keys("secret")
    assert keys.salt("secret")
    with pytest.raises(Refusal):
        keys.salt("s")


def test_keys_do_not_share_what_is_kept() -> None:
    body = {"prompt": "the quick brown fox jumps over the lazy dog " * 4, "max_tokens": 2}

    def reused(client: Any, key: str, **more: Any) -> int:
        usage = client.post(TEXT, json=body | more, headers=bearer(key)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    with client_of(api_of(keys=("one", "two"))) as client:
        assert reused(client, "one") == 0
        assert reused(client, "one") > 16
        assert reused(client, "two") == 0
        assert reused(client, "two", cache_salt="ours") == 0
        assert reused(client, "one", cache_salt="ours") > 16


def test_keys_are_read_from_a_file_and_the_environment(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n  one \n\ntwo\n", encoding="utf-8")
    keys = Keys.read(file, {"DRAFTSMITH_API_KEYS": "three, four,"})
    assert len({keys.salt(key) for key in ("one", "two", "three", "four")}) == 4
    for wrong in (None, "", "five", "# of the team", "ünïcode"):
        with pytest.raises(Refusal):
            keys.salt(wrong)
    assert Keys.read(None, {}).salt(None) == ""
    with pytest.raises(LoadError, match="cannot read"):
        Keys.read(tmp_path / "none", {})
    (tmp_path / "empty").write_text("# nobody\n", encoding="utf-8")
    with pytest.raises(LoadError, match="holds no API key"):
        Keys.read(tmp_path / "empty", {})
    for nothing in ("", ",", " "):  # a secret that came out empty must not open the server
        with pytest.raises(LoadError, match="holds no API key"):
            Keys.read(None, {"DRAFTSMITH_API_KEYS": nothing})
    (tmp_path / "windows").write_text("five\n", encoding="utf-8-sig")
    assert Keys.read(tmp_path / "windows", {}).salt("five")


def test_pages_of_others_may_ask_only_where_they_are_named() -> None:
    headers = {"Origin": "https://example.org"}
    with client_of(api_of()) as client:
        assert "access-control-allow-origin" not in client.get("/health", headers=headers).headers
    for cors in (("https://example.org",), "https://example.org"):
        with client_of(api_of(cors=cors)) as client:
            told = client.get("/health", headers=headers).headers
            assert told["access-control-allow-origin"] == "https://example.org"
            other = client.get("/health", headers={"Origin": "https://example.com"}).headers
            assert "access-control-allow-origin" not in other


def test_settings_that_cannot_work_are_refused() -> None:
    for name in ("max_output", "queue", "timeout", "drain", "max_body", "port"):
        with pytest.raises(OptionError, match=name):
            Settings(**{name: -1})
    for name, value in (("timeout", nan), ("drain", inf), ("port", 65536)):
        with pytest.raises(OptionError, match=name):
            Settings(**{name: value})


def test_limits_of_prompt_and_answer_are_the_servers() -> None:
    with client_of(api_of(max_context=20, max_output=5)) as client:
        assert client.post(TEXT, json={"prompt": [5] * 21}).status_code == 400
        answer = client.post(TEXT, json={"prompt": [5] * 20, "max_tokens": None}).json()
        assert answer["usage"]["completion_tokens"] <= 5
        default = client.post(TEXT, json={"prompt": [5]})
        assert default.json()["usage"]["completion_tokens"] <= 5
        assert "warning" not in default.headers
        refused = client.post(TEXT, json={"prompt": [5], "max_tokens": 5, "drafter": "copyspec"})
        assert refused.json()["error"]["param"] == "drafter"
        body = {"prompt": [5] * 20, "max_tokens": 5, "drafter": "none", "return_stats": True}
        plain = client.post(TEXT, json=body)
        assert plain.json()["stats"]["attempts"] == 0


def test_the_log_counts_the_tokens_of_an_answer_that_was_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = list[dict[str, Any]]()
    monkeypatch.setattr(
        "draftsmith.server.api.log.info", lambda event, **extra: told.append({event: extra})
    )
    api = api_of(max_output=400)
    body = {"prompt": [5, 6, 7], "max_tokens": 400, "stream": True, "ignore_eos": True}
    with listening(api) as address:
        with httpx2.stream("POST", address + TEXT, json=body, timeout=600) as stream:
            lines = stream.iter_lines()
            for _ in range(3):
                assert next(line for line in lines if line).startswith("data: ")
        until(lambda: any("answered" in event for event in told))
    (line,) = (event["answered"]["extra"]["fields"] for event in told if "answered" in event)
    assert line["finish_reasons"] == ["cancelled"]
    assert line["prompt_tokens"] == 3
    assert 3 <= line["completion_tokens"] < 400


def test_the_log_tells_of_requests_without_their_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="draftsmith.server")
    with client_of(api_of()) as client:
        client.post(TEXT, json={"prompt": "the quick brown fox", "max_tokens": 3})
        client.post(TEXT, json={"prompt": "the quick", "stop": ""})
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records
             if record.name.startswith("draftsmith")]  # fmt: skip
    assert [line["event"] for line in lines] == ["answered", "refused"]
    assert lines[0]["completion_tokens"] == 3
    assert lines[0]["finish_reasons"] == ["length"]
    assert lines[1]["status"] == 400
    assert "quick" not in json.dumps(lines)


@pytest.mark.parametrize("path", [CHAT, serving.RESPONSES, serving.MESSAGES])
def test_the_log_says_what_ended_a_stream(
    gate: Gate, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """It tells a limit from a client that has left."""
    caplog.set_level("INFO", logger="draftsmith.server")
    api = api_of(gated(gate))
    with client_of(api) as client, ThreadPoolExecutor(1) as asking:
        going = asking.submit(client.post, path, json=serving.ASK[path] | {"stream": True})
        assert gate.stopped.wait(300)
        assert client.portal is not None
        client.portal.call(api.worker.end_all)
        assert going.result().status_code == 200
        gate.open.set()
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records
             if record.name.startswith("draftsmith")]  # fmt: skip
    assert [line["event"] for line in lines] == ["refused", "answered"]
    assert (lines[0]["status"], lines[0]["code"]) == (503, "unavailable")
    assert lines[0]["id"] == lines[1]["id"]


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    """Nor its key, which is checked later: a client may have crashed."""

    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    async def run() -> list[Any]:
        sent = list[Any]()

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"content-length", b"99")]
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers,
                 "query_string": b"", "http_version": "1.1", "scheme": "http"}  # fmt: skip
        await application(api_of(timeout=0.1))(scope, receive, send)
        return sent

    begin, *_ = asyncio.run(run())
    assert begin["status"] == 408
