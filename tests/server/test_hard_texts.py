"""Texts that are hard to send on."""

from __future__ import annotations

import json

import httpx2
import pytest
from serving import CHAT, api_of, client_of, events, listening, said

ASK = {"messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": 12}
HARD = "é\u0085\u2028🦊\u2029\u200d👩🏽\ud7ff\ufffd"
"""Ends of lines to some, and characters of several tokens."""


def test_hard_texts_come_whole() -> None:
    """Also to those who read lines as Python's `str.splitlines` sees them."""
    form = {"response_format": {"type": "regex", "pattern": f"({HARD}){{2}}"}, "max_tokens": 64}
    body = ASK | form | {"stream": True, "logprobs": True, "return_sources": True}
    with listening(api_of()) as address, httpx2.Client(timeout=600) as client:
        whole = client.post(address + CHAT, json=body | {"stream": False}).json()["choices"][0]
        response = client.post(address + CHAT, json=body)
        with client.stream("POST", address + CHAT, json=body) as lines:
            read = [line for line in lines.iter_lines() if line.startswith("data: {")]
    assert whole["message"]["content"] == HARD * 2
    chunks = events(response)
    assert said(chunks) == HARD * 2
    assert said([json.loads(line.removeprefix("data: ")) for line in read]) == HARD * 2
    choices = [chunk["choices"][0] for chunk in chunks]
    told = [token for choice in choices for token in choice["logprobs"]["content"]]
    spelt = bytes(byte for token in told for byte in token["bytes"]).decode()
    assert spelt == HARD * 2 + "</s>"
    assert "".join(text for choice in choices for text, _ in choice["sources"]) == HARD * 2


@pytest.mark.parametrize("stop", ["\u2029\u200d", "a🦊"])
def test_stops_of_several_tokens_are_seen_in_streams(stop: str) -> None:
    form = {"response_format": {"type": "regex", "pattern": HARD}, "max_tokens": 64, "stop": stop}
    with client_of() as client:
        for prediction in ({}, {"prediction": {"type": "content", "content": HARD}}):
            chunks = events(client.post(CHAT, json=ASK | form | prediction | {"stream": True}))
            assert said(chunks) == HARD.partition(stop)[0]
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
