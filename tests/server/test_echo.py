"""Completions that tell their prompt back, with its log-probabilities, as harnesses ask."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from serving import TEXT, api_of, client_of, engine, events, figures, idle, loaded
from starlette.testclient import TestClient
from tokenizers.normalizers import Lowercase
from tokenizers.processors import TemplateProcessing
from transformers import MambaConfig, MambaForCausalLM

import tiny
from draftsmith.engine.engine import Engine
from draftsmith.model.load import load
from draftsmith.server.api import Api

PROMPT = "the quick brown fox jumps over the lazy dog €🦊, hello world" * 6
HARNESS = {"echo": True, "logprobs": 1, "max_tokens": 0}


@pytest.fixture(scope="module")
def api() -> Api:
    return api_of()


@pytest.fixture(scope="module")
def client(api: Api) -> Iterator[TestClient]:
    with client_of(api) as made:
        yield made


def ask(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    response = client.post(TEXT, json={"prompt": PROMPT, "temperature": 0} | body)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"])


def test_a_prompt_that_is_scored_under_a_salt_is_shared_under_it_only(client: TestClient) -> None:
    def cached(**more: Any) -> Any:
        body = {"prompt": PROMPT[5:], "max_tokens": 1, "temperature": 0} | more
        return client.post(TEXT, json=body).json()["usage"]["prompt_tokens_details"]

    cached(echo=True, logprobs=1, cache_salt="mine")
    assert cached() == {"cached_tokens": 0}
    assert cached(cache_salt="mine")["cached_tokens"] > 0


def exact(model: Any, ids: list[int]) -> torch.Tensor:
    """(T-1, V) the model's own log-probabilities of what follows each token."""
    with torch.no_grad():
        scores: torch.Tensor = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return scores[:-1]


def check(model: Any, ids: list[int], seen: dict[str, Any], top: int) -> None:
    assert seen["token_logprobs"][0] is None
    assert seen["top_logprobs"][0] is None
    for row, token, logprob, best in zip(
        exact(model, ids), ids[1:], seen["token_logprobs"][1:], seen["top_logprobs"][1:],
        strict=True,
    ):  # fmt: skip
        assert logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert len(best) - top in (0, 1)
        assert any(value == pytest.approx(logprob, abs=1e-5) for value in best.values())
        if top:
            assert max(best.values()) == pytest.approx(float(row.max()), abs=1e-5)


@pytest.mark.parametrize("top", [0, 5])
def test_s5_a_prompt_is_returned_with_what_the_model_gives_its_tokens(
    client: TestClient, top: int
) -> None:
    ids = tiny.tokenizer().encode(PROMPT)
    assert len(ids) > 100
    for prompt in (PROMPT, ids):
        (choice,) = ask(client, **HARNESS | {"logprobs": top, "prompt": prompt})
        assert choice["text"] == PROMPT
        assert choice["finish_reason"] == "length"
        check(loaded().model, ids, choice["logprobs"], top)
        starts, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
        assert starts == sorted(starts)
        for token, start in zip(tokens, starts, strict=True):
            assert token.startswith("bytes:") or PROMPT[start:].startswith(token)


def test_s5_the_answer_follows_the_prompt_and_is_the_same(client: TestClient, api: Api) -> None:
    asked = {"max_tokens": 9, "n": 2, "temperature": 0.9, "seed": 3, "logprobs": 2}
    plain = ask(client, **asked)
    before = figures(client)
    body = {"prompt": PROMPT} | asked | {"echo": True}
    response = client.post(TEXT, json=body).json()
    for alone, choice in zip(plain, response["choices"], strict=True):
        assert choice["text"] == PROMPT + alone["text"]
        ids = len(choice["logprobs"]["tokens"]) - len(alone["logprobs"]["tokens"])
        assert choice["logprobs"]["tokens"][ids:] == alone["logprobs"]["tokens"]
        starts = [len(PROMPT) + start for start in alone["logprobs"]["text_offset"]]
        assert choice["logprobs"]["text_offset"][ids:] == starts
        assert choice["finish_reason"] == alone["finish_reason"]
    assert response["usage"]["prompt_tokens"] == ids
    after, new = figures(client), response["usage"]["completion_tokens"]
    for name, more in (("prompt", 2 * ids), ("generation", new)):  # without those of the scoring
        name = f'vllm:{name}_tokens_total{{model_name="tiny"}}'
        assert after[name] - before[name] == more
    chunks = events(client.post(TEXT, json=body | {"stream": True}))
    for index, whole in enumerate(response["choices"]):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(part["text"] for part in parts) == whole["text"]
        for name in ("tokens", "text_offset"):
            assert [x for p in parts for x in p["logprobs"][name]] == whole["logprobs"][name]
    assert idle(api)


def test_s5_many_prompts_are_returned_each_with_its_own(client: TestClient) -> None:
    prompts = ["hello", "the quick brown", "def foo(x): return x", "é"]
    told = ask(client, prompt=prompts, **HARNESS)
    assert [choice["text"] for choice in told] == prompts
    for prompt, choice in zip(prompts, told, strict=True):
        check(loaded().model, tiny.tokenizer().encode(prompt), choice["logprobs"], 1)
    (one,) = ask(client, prompt=[5], **HARNESS)
    assert one["logprobs"]["token_logprobs"] == [None]
    (bare,) = ask(client, echo=True, max_tokens=3)
    assert bare["text"].startswith(PROMPT)
    assert bare["logprobs"] is None
    both = ask(client, prompt=["hello", "the"], echo=True, n=2, max_tokens=1, logprobs=0)
    for choice, prompt in zip(both, ["hello", "hello", "the", "the"], strict=True):
        assert choice["text"].startswith(prompt)


def test_a_prompt_that_fills_the_context_is_scored(client: TestClient) -> None:
    ids = [*range(5, 105)] * 99
    ids = ids[: loaded().context_length]
    (choice,) = ask(client, prompt=ids, **HARNESS)
    check(loaded().model, ids, choice["logprobs"], 1)
    body = {"prompt": ids, "max_tokens": 1}
    assert client.post(TEXT, json=body).status_code == 400
    assert client.post(TEXT, json={"prompt": [*ids, 5]} | HARNESS).status_code == 400


def test_s5_end_tokens_within_a_prompt_and_options_change_nothing(client: TestClient) -> None:
    ids = [1, 5, 2, 9, 2, 2, 0, 40]
    more = {"stop": ["a"], "presence_penalty": 1.0, "logit_bias": {"7": 9}, "temperature": 2,
            "top_k": 1, "min_tokens": 0}  # fmt: skip
    (choice,) = ask(client, prompt=ids, **HARNESS | more)
    check(loaded().model, ids, choice["logprobs"], 1)
    assert choice["logprobs"]["tokens"][:3] == ["<s>", tiny.tokenizer().decode([5]), "</s>"]


def test_offsets_count_special_tokens_that_the_prompt_names(client: TestClient) -> None:
    prompt = "<s>hello world</s>the fox"
    (choice,) = ask(client, **HARNESS | {"prompt": prompt})
    seen = choice["logprobs"]
    assert "</s>" in seen["tokens"]
    for token, start in zip(seen["tokens"], seen["text_offset"], strict=True):
        assert prompt[start:].startswith(token)


def test_offsets_do_not_count_tokens_that_the_tokenizer_adds() -> None:
    tokenizer = copy.deepcopy(tiny.tokenizer())
    backend = tokenizer.backend_tokenizer
    begin, end = tokenizer.bos_token, tokenizer.eos_token
    ids = [(begin, tokenizer.bos_token_id), (end, tokenizer.eos_token_id)]
    backend.normalizer = Lowercase()
    backend.post_processor = TemplateProcessing(single=f"{begin} $A {end}", special_tokens=ids)
    for prompt, wanted in ("Hello fox", [0, 0, 5, 9]), ("<s>Hello fox", [0, 0, 3, 8, 12]):
        given = tokenizer(prompt)["input_ids"]
        with client_of(api_of(Engine(load(loaded().model, tokenizer)))) as client:
            (choice,) = ask(client, **HARNESS | {"prompt": prompt})
        starts = choice["logprobs"]["text_offset"]
        assert len(starts) == len(given)
        assert starts[0] == 0
        assert starts[-1] == len(prompt)
        assert sorted({*starts} & {*wanted}) == sorted({*wanted})


def counting(made: Api) -> list[int]:
    """A list that gets an item with every pass."""
    passes: list[int] = []
    forward = made.engine.resources.runner.forward

    def counted(*given: Any, **options: Any) -> Any:
        passes.append(1)
        return forward(*given, **options)

    made.engine.resources.runner.forward = counted  # type: ignore[method-assign]
    return passes


def test_s5_a_pass_scores_many_tokens() -> None:
    made = api_of(engine("none"))
    passes = counting(made)
    with client_of(made) as client:
        (choice,) = ask(client, **HARNESS)
    assert len(passes) <= len(choice["logprobs"]["tokens"]) // 64 + 3


def test_a_prompt_that_the_server_refuses_is_not_scored() -> None:
    made = api_of(engine("none"), max_context=20)
    passes = counting(made)
    with client_of(made) as client:
        before = len(passes)
        for ids, status in ([5] * 21, 400), ([5] * 20, 200):
            response = client.post(TEXT, json={"prompt": ids} | HARNESS)
            assert response.status_code == status
            assert (len(passes) > before) == (status == 200)


@pytest.mark.skipif(
    transformers.__version__ < "5",
    reason="transformers 4 decodes Mamba wrongly after prompts of one or two tokens",
)
def test_s5_every_kind_of_model_scores() -> None:
    """One whose state cannot be rewound, and a tokenizer that puts a token before every text."""
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=len(tiny.tokenizer()), hidden_size=32, num_hidden_layers=2,
                         pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
    recurrent = MambaForCausalLM(config).eval()
    text = "the quick brown fox"
    with client_of(api_of(Engine(load(recurrent, tiny.tokenizer())))) as client:
        (choice,) = ask(client, prompt=text, **HARNESS)
    check(recurrent, tiny.tokenizer().encode(text), choice["logprobs"], 1)
    tokenizer, model = tiny.sentencepiece(), copy.deepcopy(tiny.model())
    with client_of(api_of(Engine(load(model, tokenizer)))) as client:
        (choice,) = ask(client, prompt="once upon 日本", **HARNESS)
    assert choice["text"] == "once upon 日本"
    ids = tokenizer("once upon 日本")["input_ids"]
    assert ids[0] == 1
    check(model, ids, choice["logprobs"], 1)
    starts = choice["logprobs"]["text_offset"]
    assert starts == sorted(starts)
    assert starts[-1] == len("once upon 日")
