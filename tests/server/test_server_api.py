"""What the endpoints answer, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving import CHAT, TEXT, api_of, client_of, engine, events, figures, loaded, said
from starlette.testclient import TestClient

import tiny
from draftsmith.server.schema import ChatRequest, CompletionRequest, ResponsesRequest

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "the quick brown fox"}]}
COMPLETION = {"model": "tiny", "prompt": "the quick brown fox jumps over", "max_tokens": 12}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with client_of(api_of(allow_drafters=True)) as client:
        yield client


def chat(client: TestClient, **more: Any) -> Any:
    response = client.post(CHAT, json=ASK | {"max_tokens": 12} | more)
    assert response.status_code == 200, response.text
    return response.json()


def complete(client: TestClient, **more: Any) -> Any:
    response = client.post(TEXT, json=COMPLETION | more)
    assert response.status_code == 200, response.text
    return response.json()


def test_models_are_listed(client: TestClient) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert model["max_model_len"] == 2048
    assert client.get("/v1/models/tiny").json() == model
    assert client.get("/v1/models/a/b").status_code == 404
    assert client.get("/health").json() == {"status": "ok"}


def test_a_chat_is_answered_as_the_engine_does(client: TestClient) -> None:
    alone = engine("none").generate(ASK["messages"], max_new_tokens=12)
    told = chat(client)
    assert told["object"] == "chat.completion"
    (choice,) = told["choices"]
    assert choice["message"] == {"role": "assistant", "content": alone.text, "refusal": None}
    assert choice["finish_reason"] == "length"
    usage = told["usage"]
    assert usage["prompt_tokens"] == len(alone.prompt_tokens)
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == len(alone.prompt_tokens) + 12
    body = {"max_tokens": 12, "stream": True, "stream_options": {"include_usage": True}}
    response = client.post(CHAT, json=ASK | body)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert len(chunks) > 4
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert said(chunks) == alone.text
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("seed", range(2))
def test_s7_each_choice_ends_in_a_chunk_of_its_own_with_its_own_reason(
    client: TestClient, path: str, seed: int
) -> None:
    """Clients that join the chunks (litellm) take the first end for that of choice 0."""
    body = {CHAT: ASK, TEXT: COMPLETION}[path] | {
        "n": 3,
        "seed": seed,
        "temperature": 1.5,
        "max_tokens": 12,
        "stop": ["e", "o"],
    }
    whole = {c["index"]: c for c in client.post(path, json=body).json()["choices"]}
    chunks = events(client.post(path, json=body | {"stream": True}))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ends = [choice for choice in choices if choice["finish_reason"]]
    reasons = {choice["index"]: choice["finish_reason"] for choice in ends}
    assert len(ends) == 3
    assert ends[0]["index"] == 0
    assert reasons == {index: choice["finish_reason"] for index, choice in whole.items()}
    assert all(not end.get("text") and not end.get("delta") for end in ends)
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[-1]["finish_reason"]
        if path == TEXT:
            assert "".join(choice["text"] for choice in mine) == whole[index]["text"]
        else:
            assert said(chunks, index) == whole[index]["message"]["content"]


def test_completions_take_texts_and_ids(client: TestClient) -> None:
    ids = client.post("/tokenize", json={"prompt": COMPLETION["prompt"]}).json()["tokens"]
    one = complete(client)["choices"][0]["text"]
    assert complete(client, prompt=ids)["choices"][0]["text"] == one
    both = complete(client, prompt=[COMPLETION["prompt"], "def foo(x)"], n=2)
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in both["choices"]][:2] == [one, one]
    other = complete(client, prompt="def foo(x)")
    assert both["choices"][2]["text"] == other["choices"][0]["text"]
    prompts = complete(client)["usage"]["prompt_tokens"] + other["usage"]["prompt_tokens"]
    assert both["usage"]["prompt_tokens"] == prompts


def test_text_goes_to_tokens_and_back(client: TestClient) -> None:
    told = client.post("/tokenize", json={"prompt": "hello world"}).json()
    assert told["count"] == len(told["tokens"])
    back = client.post("/detokenize", json={"tokens": told["tokens"]}).json()
    assert back == {"prompt": "hello world"}
    chat_ids = client.post("/tokenize", json={"messages": ASK["messages"]}).json()["tokens"]
    assert chat_ids == engine().prepare({}).encode(ASK["messages"])


def test_stops_and_the_options_of_sampling_are_the_engines(client: TestClient) -> None:
    plain = complete(client)["choices"][0]["text"]
    stop = plain[2:4]
    told = complete(client, stop=[stop])["choices"][0]
    assert told["text"] == plain[: plain.index(stop)]
    assert told["finish_reason"] == "stop"
    options: dict[str, Any] = {
        "temperature": 0.8, "seed": 3, "top_k": 5, "top_p": 0.9, "min_p": 0.02,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1,
    }  # fmt: skip
    alone = engine("none").generate(
        COMPLETION["prompt"], n=3, max_new_tokens=12, logit_bias={70: 5.0, 80: -100.0}, **options
    )
    several = complete(client, n=3, logit_bias={"70": 5, "80": -100}, **options)
    assert [choice["text"] for choice in several["choices"]] == [answer.text for answer in alone]
    assert several["usage"]["prompt_tokens"] == len(alone[0].prompt_tokens)
    every = complete(client, logit_bias={"2": 100}, max_tokens=5)
    assert every["choices"][0]["finish_reason"] == "stop"
    assert complete(client, logit_bias={"2": 100}, max_tokens=5, ignore_eos=True)["usage"][
        "completion_tokens"
    ] == 5  # fmt: skip
    stopped = complete(client, logit_bias={"70": 100}, stop_token_ids=[70], ignore_eos=True)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] == 1
    assert complete(client, max_tokens=0)["choices"][0]["text"] == ""


def test_logprobs_are_the_models_own(client: TestClient) -> None:
    """Of the raw logits: temperature, truncation and penalties do not show, nor do drafts."""
    prompt = "the quick brown fox jumps over the quick brown fox jumps"
    told = complete(client, prompt=prompt, logprobs=3, temperature=0.5, top_k=3, seed=1,
                    presence_penalty=0.5)  # fmt: skip
    seen = told["choices"][0]["logprobs"]
    model = loaded()
    ids = engine("none").generate(
        prompt, max_new_tokens=12, temperature=0.5, top_k=3, seed=1, presence_penalty=0.5
    )
    with torch.no_grad():
        logits = model.model(torch.tensor([ids.prompt_tokens + ids.tokens])).logits[0]
    exact = logits[len(ids.prompt_tokens) - 1 : -1].log_softmax(-1)
    for row, token, logprob, top in zip(
        exact, ids.tokens, seen["token_logprobs"], seen["top_logprobs"], strict=True
    ):
        assert logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert list(top.values())[-1] == pytest.approx(float(row.max()), abs=1e-5)
    text, ends = told["choices"][0]["text"], [*seen["text_offset"][1:], None]
    assert seen["text_offset"][0] == 0
    for token, start, end in zip(seen["tokens"], seen["text_offset"], ends, strict=True):
        assert text[start:end].endswith(token) or token.startswith("bytes:")
    content = chat(client, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    assert all(len(token["top_logprobs"]) == 2 for token in content)
    assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] for token in content)
    assert bytes(b for token in content for b in token["bytes"])


@pytest.mark.parametrize(("seed", "stop"), [(0, None), (1, ["qu", "\ufffd\ufffd\ufffd\ufffdno"])])
def test_s6_each_offset_is_where_the_tokens_own_text_begins(
    client: TestClient, seed: int, stop: list[str] | None
) -> None:
    """Also behind bytes that form no character, and where a stop string holds text back."""
    asked = {"temperature": 1.5, "seed": seed, "max_tokens": 60, "logprobs": 0, "stop": stop}
    (choice,) = complete(client, **asked)["choices"]
    text, seen = choice["text"], choice["logprobs"]
    placed = list(zip(seen["tokens"], seen["text_offset"], strict=True))
    for token, start in placed:
        if not token.startswith("bytes:") and token not in ("<pad>", "<s>", "</s>"):
            assert token.startswith(text[start:][: len(token)])
    starts = [start for _, start in placed]
    assert starts == sorted(starts)
    assert any(token.startswith("bytes:") for token, _ in placed)
    streamed = events(client.post(TEXT, json=COMPLETION | asked | {"stream": True}))
    parts = [part for chunk in streamed for part in chunk["choices"]]
    assert [at for part in parts for at in part["logprobs"]["text_offset"]] == starts


def test_s6_an_end_token_stands_behind_bytes_that_form_no_character(client: TestClient) -> None:
    byte = tiny.tokenizer().encode("€")[0]
    bias = {"logit_bias": {str(byte): 100}, "max_tokens": 3, "logprobs": 0, "temperature": 0}
    (choice,) = complete(client, **bias)["choices"]
    assert choice["text"] == "\ufffd" * 3
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    ends = bias | {"logit_bias": {"2": 100, str(byte): 50}, "min_tokens": 2}
    (choice,) = complete(client, **ends)["choices"]
    assert choice["logprobs"]["tokens"] == ["bytes:\\xe2", "bytes:\\xe2", "</s>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_sources_drafts_and_figures_are_told_when_asked(client: TestClient) -> None:
    asked = {"max_tokens": 40, "ignore_eos": True, "return_drafts": True, "return_sources": True,
             "drafter": "auto", "budget": 8}  # fmt: skip
    told = complete(client, return_stats=True, **asked)
    [choice], stats = told["choices"], told["stats"]
    assert len(choice["drafts"]) == stats["passes"]
    guesses = [guess for drafted in choice["drafts"] for guess in drafted]
    assert len(guesses) == stats["drafted"]
    assert sum(right for *_, right in guesses) == stats["accepted"] > 0
    for drafted in choice["drafts"]:
        assert all(-1 <= parent < number for number, (_, parent, _, _) in enumerate(drafted))
        accepted = [number for number, (*_, right) in enumerate(drafted) if right]
        assert [drafted[number][1] for number in accepted] == [-1, *accepted][: len(accepted)]
    accepted = [source for _, _, source, right in guesses if right]
    assert accepted == [source for _, source in choice["sources"] if source != "target"]
    assert all(text for text, *_ in guesses)
    assert "".join(text for text, _ in choice["sources"]) == choice["text"]
    assert len(choice["sources"]) == 40 == stats["tokens"]
    streamed = events(client.post(TEXT, json=COMPLETION | asked | {"stream": True}))
    parts = [part for chunk in streamed for part in chunk["choices"]]
    assert [drafted for part in parts for drafted in part["drafts"]] == choice["drafts"]
    assert [len(part["drafts"]) for part in parts] == [1] * (len(parts) - 1) + [0]
    plain = complete(client)
    assert "stats" not in plain
    assert not {"sources", "drafts"} & plain["choices"][0].keys()


def test_a_prediction_is_drafted_from_and_counted(client: TestClient) -> None:
    answer = chat(client, max_tokens=40, ignore_eos=True)
    assert "completion_tokens_details" not in answer["usage"]
    text = answer["choices"][0]["message"]["content"]
    told = chat(client, max_tokens=40, ignore_eos=True, drafter="prompt_lookup", budget="drafter",
                prediction={"type": "content", "content": text})  # fmt: skip
    assert told["choices"][0]["message"]["content"] == text
    details = told["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 5
    expected = 40 + details["rejected_prediction_tokens"]
    assert told["usage"]["completion_tokens"] == expected


def test_gaps_are_filled_by_models_that_know_them() -> None:
    api = api_of()
    vocabulary = dict.fromkeys(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], 5)
    api.tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary)
    with client_of(api) as client:
        filled = complete(client, prompt="a", suffix="c")
        plain = complete(client, prompt="<fim_prefix>a<fim_suffix>c<fim_middle>")
        assert filled["choices"] == plain["choices"]
        refused = client.post(TEXT, json=COMPLETION | {"prompt": [[5]], "suffix": "c"})
        assert "needs a text" in refused.json()["error"]["message"]


def test_s5_docs_describe_every_endpoint_and_field_and_load_nothing(client: TestClient) -> None:
    response, told = client.get("/docs"), client.get("/openapi.json").json()
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert {CHAT, TEXT, "/v1/responses", "/v1/models", "/tokenize",
            "/detokenize", "/health", "/metrics"} <= told["paths"].keys()  # fmt: skip
    page = response.text
    assert "src=" not in page
    assert "http" not in page.replace("http-equiv", "")
    for path in told["paths"]:
        assert f" {path}</code>" in page
    for kind in (ChatRequest, CompletionRequest, ResponsesRequest):
        for name in kind.model_fields:
            assert f"<code>{name}</code>" in page
    assert "list of Message" in page
    with client_of(api_of(keys=("one",))) as keyed:
        assert keyed.get("/docs").status_code == keyed.get("/openapi.json").status_code == 200


def test_metrics_count_what_was_done() -> None:
    body = {"prompt": "the quick brown fox jumps", "max_tokens": 40, "min_tokens": 40}
    with client_of(api_of(engine(answers=4_000_000, budget=8))) as client:
        first, again = (complete(client, **body, return_stats=True) for _ in range(2))
        found = figures(client)
    both, one = [first["stats"], again["stats"]], '{model_name="tiny"}'
    assert found["vllm:generation_tokens_total" + one] == 80
    assert found["vllm:prompt_tokens_total" + one] == 2 * first["usage"]["prompt_tokens"]
    for name, counted in (
        ("drafts", "attempts"), ("draft_tokens", "drafted"), ("accepted_tokens", "accepted"),
    ):  # fmt: skip
        total = found[f"vllm:spec_decode_num_{name}_total{one}"]
        assert total == sum(stats[counted] for stats in both)
    assert found["vllm:num_requests_running" + one] == 0
    assert 0 < found["vllm:kv_cache_usage_perc" + one] < 0.5  # of a kept row
    assert found["vllm:time_to_first_token_seconds_count" + one] == 2
    assert found['vllm:request_success_total{finished_reason="length",model_name="tiny"}'] == 2
    accepted = {name: value for name, value in found.items()
                if name.startswith("draftsmith:accepted_tokens_by_source_total{")}  # fmt: skip
    assert sum(accepted.values()) == sum(stats["accepted"] for stats in both)
    (earlier,) = (value for name, value in accepted.items() if 'source="auto.earlier"' in name)
    assert earlier == again["stats"]["by_source"]["auto.earlier"]["accepted"] > 20


def test_what_can_be_got_answers_head(client: TestClient) -> None:
    """Load balancers and monitors ask so."""
    for path in ("/health", "/", "/v1/models", "/v1/models/tiny", "/metrics", "/docs"):
        head, got = client.head(path), client.get(path)
        assert head.status_code == 200, path
        assert head.headers["content-type"] == got.headers["content-type"]
    assert client.head("/v1/models/other").status_code == 404
    assert client.head(CHAT).status_code == 405
