"""Every answer of many concurrent requests of all kinds is the one that it has alone."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest
from serving import CHAT, api_of, client_of, engine, events, idle, listening, said, until

import heads
import tiny

REQUESTS = 24

Answers = list[tuple[str, str]]
"""Text and end of each of a request's answers."""


def mixed(rng: random.Random, number: int) -> dict[str, Any]:
    """A request of any kind; no other one has its prompt."""
    words = [
        rng.choice(["the", "quick", "fox", "def", "foo(x):", "hello", "lazy"]) for _ in "12345"
    ]
    text = " ".join([*words * rng.randint(1, 6), str(number)])
    messages = [{"role": "user", "content": text}]
    if number % 3 == 1:  # what many prompts begin with is computed once
        messages.insert(0, {"role": "system", "content": "the lazy fox says hello " * 8})
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "stream": number % 2 == 0}
    if number % 3 == 0:
        body |= {"temperature": 0.9, "seed": number, "n": 1 + number % 2}
    if number % 4 == 1:
        body["stop"] = rng.choice(["a", " t", "+"])
    if number % 5 == 2:
        body["response_format"] = {"type": "regex", "pattern": "[a-f]{2,12}"}
    if number % 10 == 4:
        schema = {
            "type": "object",
            "properties": {"of": {"enum": sorted({*words})}},
            "required": ["of"],
        }
        form = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
        body["response_format"] = form
    if number % 5 == 3:
        body["prediction"] = {"type": "content", "content": text}
    if number % 7 == 4:
        body |= {"logprobs": True, "top_logprobs": 2} if number % 2 else {"presence_penalty": 0.5}
    return body | {"messages": messages}


@cache
def many() -> list[dict[str, Any]]:
    rng = random.Random(19)
    return [mixed(rng, number) for number in range(REQUESTS)]


def answers_of(response: httpx2.Response, n: int) -> Answers:
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        choices = response.json()["choices"]
        return [(c["message"]["content"], c["finish_reason"]) for c in choices]
    chunks = events(response)
    ends = {choice["index"]: choice["finish_reason"] for chunk in chunks
            for choice in chunk["choices"] if choice["finish_reason"]}  # fmt: skip
    return [(said(chunks, index), ends[index]) for index in range(n)]


@cache
def plain_answers() -> list[Answers]:
    """One by one."""
    with client_of(api_of(engine("none", max_batch=1, prefixes=0))) as alone:
        return [answers_of(alone.post(CHAT, json=body), body.get("n", 1)) for body in many()]


@pytest.mark.parametrize("drafter", [
    "auto",
    "auto(head=eagle3(model=HEAD))",
    pytest.param("eagle3(model=HEAD)", marks=pytest.mark.slow),
])  # fmt: skip
def test_every_answer_is_the_one_it_has_alone(drafter: str, tmp_path: Path) -> None:
    head = heads.random_head(64, len(tiny.tokenizer()), 60, reads=1)
    drafter = drafter.replace("HEAD", heads.save(tmp_path, head, layer_ids=(1,)))
    api = api_of(engine(drafter, max_batch=8), queue=REQUESTS * 2)
    with listening(api) as address, ThreadPoolExecutor(16) as threads:

        def ask(body: dict[str, Any]) -> Answers:
            return answers_of(
                httpx2.post(address + CHAT, json=body, timeout=3000), body.get("n", 1)
            )

        found = list(threads.map(ask, many()))
        until(lambda: idle(api))
    assert found == plain_answers()
    source = drafter.partition("(")[0]
    assert f'model_name="tiny",source="{source}"' in api.metrics.text().decode()
