"""The engine as its users call it."""

from __future__ import annotations

import copy
import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import GenerationConfig

import tiny
from at_once import twice_at_once
from draftsmith.core import loop
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.core.sampling import SamplingParams
from draftsmith.drafters.cascade import Cascade
from draftsmith.drafters.draft_model.draft_model import DraftModel
from draftsmith.engine.chat import Chat
from draftsmith.engine.engine import Engine
from draftsmith.engine.request import Options, end_ids, sampling
from draftsmith.engine.result import GenerationResult
from draftsmith.errors import (
    GenerationInterrupted,
    LoadError,
    OptionError,
    PromptError,
)
from draftsmith.model.load import load
from draftsmith.testing import Scripted
from faults import Raises
from heap import young_heap
from scripted import altered, binding, oracle

IDS = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer(), drafter="copyspec")


# ------------------------------------------------------------------------------ sampling


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 0.0, "repetition_penalty": 1.3, "min_new_tokens": 10},
    ],
    ids=str,
)
def test_the_distribution_is_the_one_of_transformers(
    engine: Engine, options: dict[str, Any]
) -> None:
    """Same seed, same options, same tokens as `model.generate`."""
    for seed in range(4 if options["temperature"] else 1):
        ours = engine.generate(IDS, seed=seed, max_new_tokens=20, **options).tokens
        torch.manual_seed(seed)
        theirs: dict[str, Any] = {"top_k": 0} | options
        sample = theirs.pop("temperature") > 0
        if sample:
            theirs["temperature"] = options["temperature"]
        else:
            theirs.pop("top_k")
        prompt = torch.tensor([IDS])
        out = tiny.model().generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=sample,
            max_new_tokens=20,
            **theirs,
        )
        assert ours == out[0, len(IDS) :].tolist()


def test_penalties_and_bias(engine: Engine) -> None:
    free = engine.generate(IDS, max_new_tokens=30).tokens
    banned = free[0]
    biased = engine.generate(IDS, max_new_tokens=30, logit_bias={banned: float("-inf")}).tokens
    assert banned not in biased
    forced = engine.generate(IDS, max_new_tokens=3, logit_bias={17: 1e4}).tokens
    assert forced == [17, 17, 17]
    once = engine.generate(IDS, max_new_tokens=5, logit_bias={17: 50.0}, presence_penalty=1e4)
    assert once.tokens.count(17) == 1
    spread = engine.generate(IDS, max_new_tokens=30, frequency_penalty=100.0).tokens
    assert max(map(spread.count, spread)) <= 2


def test_processors_may_write_in_place_in_any_dtype() -> None:
    def forbids_padding(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 0] = -1.0
        return scores

    double = Engine.from_pretrained(copy.deepcopy(tiny.model()).double())
    assert len(double.generate(IDS, max_new_tokens=5, processors=forbids_padding).tokens) == 5


def test_processors_may_have_weights(engine: Engine) -> None:
    """As in transformers, no gradients are computed for them."""
    bias = torch.nn.Parameter(torch.zeros(tiny.model().config.vocab_size))
    tracked = []

    def biased(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tracked.append((scores + bias).requires_grad)
        return scores + bias

    with torch.enable_grad():
        found = engine.generate(IDS, max_new_tokens=5, processors=biased)
    assert found.tokens == engine.generate(IDS, max_new_tokens=5).tokens
    assert tracked
    assert not any(tracked)


def test_logprobs_are_those_of_the_distribution(engine: Engine) -> None:
    result = engine.generate(IDS, max_new_tokens=10, logprobs=True)
    assert result.logprobs is not None
    with torch.inference_mode():
        logits = tiny.model()(torch.tensor([[*IDS, *result.tokens]])).logits[0, len(IDS) - 1 : -1]
    expected = logits.log_softmax(-1)[range(10), result.tokens]
    assert torch.allclose(torch.tensor(result.logprobs), expected, atol=1e-5)


# --------------------------------------------------------------------------- ends and text


def test_special_tokens_can_be_stop_strings(engine: Engine) -> None:
    forced = {"logit_bias": {1: 1e4}, "max_new_tokens": 10}
    result = engine.generate(IDS, stop="<s>", **forced)
    assert result.tokens == [1]
    assert result.finish_reason == "stop"
    with pytest.raises(OptionError, match="contains the special token '<s>'"):
        engine.generate(IDS, stop="a<s>", **forced)


@pytest.fixture(scope="module")
def spaced() -> Engine:
    """A tokenizer that drops the space before the first word of all."""
    return Engine.from_pretrained(tiny.model(), tokenizer=tiny.sentencepiece(), drafter="copyspec")


def tale(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A distribution that says ` a time`, then ends."""
    a, time, end = tiny.sentencepiece().convert_tokens_to_ids(["▁a", "▁time", "</s>"])
    scores[:, {a: time, time: end}.get(int(ids[0, -1]), a)] = 1000.0
    return scores


def test_what_goes_on_a_text_keeps_its_first_space(spaced: Engine) -> None:
    whole = spaced.generate("once upon", processors=tale)
    assert whole.text == "".join(whole.token_texts()) == " a time"
    stream = spaced.stream("once upon", processors=tale)
    assert [piece.text for piece in stream] == [" a", " time", ""]
    assert stream.result.text == whole.text
    assert spaced.generate("once upon", processors=tale, stop="time").text == " a "
    assert spaced.generate("once upon", processors=tale, stop=" a").text == ""
    several = spaced.generate(["once upon", "a b"], n=2, seed=1, processors=tale)
    assert [[one.text for one in each] for each in several] == [[" a time"] * 2] * 2


def test_whole_characters_stay_before_one_that_the_limit_cuts(spaced: Engine) -> None:
    names = [f"<0x{byte:02X}>" for byte in "日本".encode()]
    ids = tiny.sentencepiece().convert_tokens_to_ids(names)

    def written(prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, ids[prefix.shape[1] - 3]] = 1000.0
        return scores

    whole = spaced.generate([5, 6, 7], processors=written, max_new_tokens=5)
    pieces = spaced.stream([5, 6, 7], processors=written, max_new_tokens=5)
    assert whole.text == "".join(piece.text for piece in pieces) == "日\ufffd\ufffd"


def test_what_begins_a_text_has_no_space_before_it(spaced: Engine) -> None:
    ids = tiny.sentencepiece()("once upon")["input_ids"]
    messages = [{"role": "user", "content": "once upon"}]
    for prompt in (ids, messages, "<s>"):
        assert spaced.generate(prompt, processors=tale).text == "a time"
        stream = spaced.stream(prompt, processors=tale)
        assert [piece.text for piece in stream] == ["a", " time", ""]
    chat = spaced.chat(processors=tale)
    assert chat.send("once upon").text == "a time"
    both = spaced.generate(["once upon", ids], processors=tale)
    assert [one.text for one in both] == [" a time", "a time"]
    assert ["".join(one.token_texts()) for one in both] == [" a time", "a time"]


def test_the_context_ends_the_answer(engine: Engine) -> None:
    limit = engine.model.context_length
    assert limit == 512
    result = engine.generate([5, 6, 7] * 168, max_new_tokens=100, temperature=0.0)
    assert len(result.tokens) <= 8
    assert result.finish_reason in ("length", "stop")


# ------------------------------------------------------------------------------------ chat


def fresh_start(engine: Engine, chat: Chat, message: str) -> GenerationResult:
    """The answer of a chat, which must be that of an engine without a chat's state."""
    history = [*chat.messages, {"role": "user", "content": message}]
    answer = chat.send(message)
    assert answer.tokens == engine.generate(history, **chat.options).tokens
    return answer


def test_chat_keeps_cache_and_answers_like_a_fresh_start(engine: Engine) -> None:
    chat = engine.chat("be brief", max_new_tokens=12)
    for message in ("hello world", "this is a test", "the quick brown fox"):
        answer = fresh_start(engine, chat, message)
    assert answer.stats.reused_tokens > 20
    assert [m["role"] for m in chat.messages] == ["system", *["user", "assistant"] * 3]


def fails(call: int) -> Raises:
    return Raises(RuntimeError("out of ideas"), call)


def test_a_chat_stays_usable_whatever_becomes_of_a_turn(engine: Engine) -> None:
    chat = engine.chat(max_new_tokens=30)
    chat.stream("hello").close()
    assert chat.messages == [], "a stream that is never read leaves no trace"
    fresh_start(engine, chat, "hello world")
    before = list(chat.messages)
    with pytest.raises(RuntimeError, match="out of ideas"):
        chat.send("and now", processors=fails(1))
    assert chat.messages == before
    fresh_start(engine, chat, "this is a test")
    del chat.messages[2:]  # edited
    fresh_start(engine, chat, "return x")
    chat.messages.clear()
    with pytest.raises(GenerationInterrupted, match="out of ideas") as caught:
        chat.send("hello world", processors=fails(6))
    assert len(caught.value.partial[0].tokens) >= 5
    fresh_start(engine, chat, "and now")
    stream = chat.stream("hello world")
    next(stream)
    stream.close()
    assert chat.messages[-1]["content"] == stream.result.text, "a cancelled turn joins"
    fresh_start(engine, chat, "and now")


def test_a_history_that_is_edited_while_a_stream_is_open_stays_edited(engine: Engine) -> None:
    chat = engine.chat(max_new_tokens=8)
    chat.send("hello world")
    left = chat.stream("the quick brown fox")
    next(left)
    loaded = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "fox"}]
    chat.messages = [*loaded]
    answer = chat.send("and now")
    assert chat.messages[:2] == loaded
    contents = [message["content"] for message in chat.messages[2:]]
    assert contents == ["the quick brown fox", left.result.text, "and now", answer.text]
    assert answer.tokens == engine.generate(chat.messages[:-1], **chat.options).tokens


def test_so_many_resting_chats_as_rows_keep_what_their_drafter_knows() -> None:
    closed = list[str]()

    class State(DrafterState):
        def draft(self, ctx: Context) -> Draft:  # noqa: ARG002
            return EMPTY

        def close(self) -> None:
            closed.append("state")

    class Keeps(Drafter):
        name = "keeps"

        def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
            return State()

    engine = Engine(load(tiny.model(), tiny.tokenizer()), drafter=Keeps(), prefixes=2)
    chats = [engine.chat(max_new_tokens=4) for _ in range(5)]
    for chat in chats:
        fresh_start(engine, chat, "hello world")
        del closed[:]
    for _ in range(3):
        fresh_start(engine, chats[-1], "and again")
        del closed[:]
    chats[-2].reset()
    assert closed == ["state"]  # one of the two that rested last
    chats[0].reset()
    assert closed == ["state"]
    fresh_start(engine, chats[1], "and again")


def test_a_drafter_that_cannot_follow_an_edited_chat_starts_again(engine: Engine) -> None:
    closed = list[int]()

    truncate = Mock(side_effect=RuntimeError("no way back"))
    onward = altered(lambda _: EMPTY, truncate=truncate, close=lambda: closed.append(1))
    chat = engine.chat(max_new_tokens=4, drafter=onward)
    chat.send("hello world")
    chat.messages[0]["content"] = "this is a test"
    answer = chat.send("and now")
    assert any("no way back" in notice for notice in answer.notices)
    assert answer.stats.drafter_failures == 0
    assert len(closed) == 1
    chat.reset()
    assert len(closed) == 2


def test_a_new_turn_ends_the_one_before(engine: Engine) -> None:
    chat = engine.chat(max_new_tokens=20)
    first = chat.stream("hello world")
    next(first)
    second = chat.send("this is a test")
    assert list(first) == []
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2
    assert second.tokens == engine.generate(chat.messages[:-1], max_new_tokens=20).tokens


# ------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), RuntimeError("stop")])
def test_what_stops_a_step_half_way_leaves_its_tokens_and_text(
    engine: Engine, error: BaseException
) -> None:
    answer = engine.generate(IDS, max_new_tokens=20, drafter="none").tokens

    options: dict[str, Any] = {
        "drafter": oracle(answer, 3),
        "budget": 3,
        "stop": "never to be seen",
    }
    raised = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else GenerationInterrupted
    with pytest.raises(raised, match="stop") as caught:
        engine.generate(IDS, processors=Raises(error, 7), **options)
    (partial,) = caught.value.partial  # type: ignore[attr-defined]
    assert len(partial.sources) == len(partial.tokens)
    assert partial.text == tiny.tokenizer().decode(partial.tokens, skip_special_tokens=True)
    assert partial.tokens == answer[: len(partial.tokens)]
    assert partial.finish_reason == ("error" if raised is GenerationInterrupted else "cancelled")
    assert len(partial.tokens) == 6 or raised is KeyboardInterrupt
    assert partial.tokens


def test_without_a_tokenizer_ids_still_work() -> None:
    bare = Engine.from_pretrained(tiny.model())
    assert bare.generate(IDS, max_new_tokens=3).tokens
    with pytest.raises(LoadError, match="no tokenizer"):
        bare.generate("hello")
    with pytest.raises(LoadError, match="no tokenizer"):
        bare.stream(IDS)


def test_threads_that_bring_the_same_new_drafter_bind_it_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a draft model: loaded twice it takes twice the memory."""
    drafter, found = Scripted(lambda _: EMPTY), list[Any]()
    bound, _ = twice_at_once(
        monkeypatch, Scripted, "bind", lambda: found.append(engine.drafting(drafter))
    )
    assert bound == 1
    assert found[0] is found[1]


def test_e8_nobody_waits_for_a_drafter_that_another_call_loads(engine: Engine) -> None:
    loading, go, bound = threading.Event(), threading.Event(), list[Any]()

    def load_slowly() -> None:
        bound.append(1)
        loading.set()
        assert go.wait(300)

    slow = binding(load_slowly)
    other = threading.Thread(
        target=lambda: engine.generate(IDS, drafter=slow, budget=2, max_new_tokens=2)
    )
    other.start()
    try:
        assert loading.wait(300)
        for drafter in (
            Scripted(lambda _: EMPTY),
            "none",
            *(f"copyspec(gamma={n})" for n in range(2, 6)),
        ):
            assert engine.generate(IDS, drafter=drafter, max_new_tokens=2).tokens
    finally:
        go.set()
        other.join()
    engine.drafting(slow)
    assert len(bound) == 1, "other drafters do not displace one that is being loaded"


def test_drafters_that_cannot_be_bound_displace_no_others(engine: Engine) -> None:
    def fail() -> None:
        for gamma in (3, 4, 5):  # other calls, meanwhile
            engine.drafting(f"copyspec(gamma={gamma})")
        raise OptionError("no")

    kept = engine.drafting("copyspec(gamma=2)")
    for _ in range(10):
        with pytest.raises(OptionError):
            engine.drafting(binding(fail))
    assert engine.drafting("copyspec(gamma=2)") is kept


@young_heap()
@pytest.mark.parametrize("how", ["cascade", "fails", "stalls", "under way"])
def test_e5_weights_of_a_draft_model_go_when_other_drafters_came(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tiny.model(), tiny.tokenizer(), drafter="none")
    weights = tiny.model.__wrapped__()
    tokenizer = tiny.tokenizer()
    drafter: Drafter = DraftModel(weights, tokenizer=tokenizer, confidence=0, tokens=3)
    if how == "cascade":
        drafter = Cascade((Scripted(lambda _ctx: EMPTY), drafter))
    engine.generate(IDS, max_new_tokens=12, drafter=drafter)
    if how == "fails":
        weights.forward = None
        result = engine.generate(IDS, max_new_tokens=12, drafter=drafter, budget=3)
        assert result.stats.drafter_failures == 1
    if how == "stalls":
        with monkeypatch.context() as patched:
            patched.setattr(loop, "LONGEST_DRAFT", -1e9)
            result = engine.generate(IDS, max_new_tokens=12, drafter=drafter, budget=3)
        assert result.stats.drafter_failures == 1
        assert any("DrafterStalled" in notice for notice in result.notices)
    going = engine.stream(IDS, max_new_tokens=12, drafter=drafter)
    next(going)
    gone = weakref.ref(weights)
    del drafter, weights
    for _ in range(8):
        engine.generate(IDS, max_new_tokens=2, drafter=Scripted(lambda _ctx: EMPTY))
    if how == "under way":
        list(going)  # what it takes is recorded still
    del going
    gc.collect()
    assert gone() is None


def test_drafters_without_fields_are_told_apart(engine: Engine) -> None:
    class Watching(Drafter):
        name = "watching"

        def __init__(self, seen: list[int]) -> None:
            object.__setattr__(self, "seen", seen)

        def open(self, ctx: Context) -> DrafterState:
            return Scripted(lambda ctx: self.seen.append(len(ctx.ids)) or EMPTY).open(ctx)

    for _ in range(2):
        seen: list[int] = []
        engine.generate(IDS, drafter=Watching(seen), budget=4, max_new_tokens=3)
        assert seen == [len(IDS), len(IDS) + 1]  # the last token leaves nothing to draft


def test_generation_config_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=7, eos_token_id=[2, 9], repetition_penalty=1.05
    )
    monkeypatch.setattr(tiny.model(), "generation_config", config)
    fresh = Engine.from_pretrained(tiny.model())
    assert end_ids(fresh.model) == [2, 9]
    assert sampling(fresh.model, {}) == SamplingParams(
        temperature=0.6, top_k=7, repetition_penalty=1.05
    )
    assert sampling(fresh.model, {"temperature": 0.0}).temperature == 0.0


def test_filters_of_a_generation_config_may_be_out_of_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers checks none of them, and a greedy answer needs none."""
    config = GenerationConfig()
    config.top_k, config.top_p, config.min_p = 0, 0.0, 0.0
    monkeypatch.setattr(tiny.model(), "generation_config", config)
    fresh = Engine.from_pretrained(tiny.model())
    best = fresh.generate(IDS, max_new_tokens=4).tokens
    assert fresh.generate(IDS, max_new_tokens=4, temperature=1.0, seed=1).tokens == best
    config.top_k, config.top_p, config.min_p = -1, 1.5, 1.0
    monkeypatch.setattr(tiny.model(), "generation_config", config)
    fresh = Engine.from_pretrained(tiny.model())
    assert len(fresh.generate(IDS, max_new_tokens=4).tokens) == 4
    found = sampling(fresh.model, {"temperature": 1.0})
    assert (found.top_k, found.top_p) == (0, 1.0)
    assert 0.999 < found.min_p < 1


def test_a_least_number_of_new_tokens_replaces_a_least_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny.model()
    plain = model.generate(torch.tensor([IDS]), max_new_tokens=20, do_sample=False)[0].tolist()
    config = GenerationConfig(min_length=len(IDS) + 12, eos_token_id=plain[len(IDS) + 3])
    monkeypatch.setattr(model, "generation_config", config)
    for least in (None, 2, 6):
        wanted = {"max_new_tokens": 20, "min_new_tokens": least}
        expected = model.generate(torch.tensor([IDS]), do_sample=False, **wanted)[0].tolist()
        found = Engine.from_pretrained(model).generate(IDS, temperature=0.0, **wanted)
        assert found.tokens == expected[len(IDS) :]


def test_an_answer_may_cross_an_inference_mode(engine: Engine) -> None:
    stream = engine.stream(IDS, max_new_tokens=6, repetition_penalty=1.2)
    with torch.inference_mode():
        next(stream)
    assert len([*stream]) == 5


def test_processors_come_in_the_order_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias is added before the penalty, or a penalty above 1 would shrink another number."""
    model = tiny.model()
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        prompt = torch.randint(5, 300, (1, 12), generator=generator)
        biased = torch.randint(5, 300, (40,), generator=generator).tolist()
        settings: dict[str, Any] = {
            "sequence_bias": {(token,): 6.0 for token in biased},
            "repetition_penalty": 1.8,
            "typical_p": 0.9,
        }
        config = GenerationConfig(
            **settings,
            no_repeat_ngram_size=3,
            bad_words_ids=[[biased[0]], [biased[1], biased[2]]],
            min_length=20,
            min_new_tokens=9,
            begin_suppress_tokens=biased[3:6],
            suppress_tokens=biased[6:9],
            max_new_tokens=24,
            eos_token_id=2,
            pad_token_id=0,
        )
        monkeypatch.setattr(model, "generation_config", config)
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt))[0, 12:].tolist()
        found = Engine.from_pretrained(model, drafter="copyspec(gamma=1)").generate(prompt)
        assert found.tokens == expected
        assert any("typical_p=0.9 is not applied" in notice for notice in found.notices)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"top_h": 0.4}, ["top_h=0.4 is not applied; pass processors=…"]),
        ({"encoder_repetition_penalty": 1.3}, ["encoder_repetition_penalty=1.3 is not applied"]),
        ({"forced_eos_token_id": 1}, ["forced_eos_token_id=1 is not applied"]),
        ({"forced_bos_token_id": 0, "max_time": 1.0}, ["forced_bos_token_id=0", "max_time=1.0"]),
        ({"typical_p": 1.0, "num_beams": 1, "epsilon_cutoff": 0.0}, []),
        ({"max_length": 64}, []),  # `max_new_tokens` always limits the answer instead
    ],
    ids=str,
)
def test_settings_of_the_model_that_are_not_applied_are_told(
    settings: dict[str, Any], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(tiny.model())
    monkeypatch.setattr(model, "generation_config", GenerationConfig(**settings))
    engine = Engine.from_pretrained(model)
    notices = [notice for notice in engine.notices if "is not applied" in notice]
    assert len(notices) == len(told)
    assert all(part in notice for part, notice in zip(told, notices, strict=True))


class Guided:
    """Holds a model beside a state of its own, as transformers' guidance does."""

    def __init__(self, model: Any, seen: Callable[[Guided], None]) -> None:
        self.parts = [{"model": model}, model.lm_head.weight]
        self.forward, self.seen = model.forward, seen
        self.calls = torch.zeros(1)

    def __call__(self, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen(self)
        return scores


def test_copies_of_processors_share_the_models_they_hold(engine: Engine) -> None:
    model, seen = tiny.model(), set[Guided]()
    guided = Guided(model, lambda twin: seen.add(twin))
    engine.generate([IDS, IDS[:5], IDS[:7]], n=2, processors=guided, max_new_tokens=4)
    assert len(seen) == 6
    for twin in seen:
        assert twin.parts[0]["model"] is model
        assert twin.parts[1] is model.lm_head.weight
        assert twin.forward.__self__ is model
        assert twin.calls == 4
    assert guided.calls == 0


def test_prompts_of_every_kind(engine: Engine) -> None:
    tokenizer = tiny.tokenizer()
    options: dict[str, Any] = {"max_new_tokens": 5}
    expected = engine.generate(IDS, **options).tokens
    ids = torch.tensor(IDS)
    mask = torch.ones(1, len(IDS))
    for prompt in ({"input_ids": ids[None], "attention_mask": mask}, {"input_ids": IDS}):
        assert engine.generate(prompt, **options).tokens == expected
        with engine.stream(prompt, **options) as stream:
            assert [piece.token for piece in stream] == expected
    texts = ["hello world, this", "the"]
    wanted = [engine.generate(text, **options).tokens for text in texts]
    tokenizer.padding_side, side = "left", tokenizer.padding_side
    try:
        for kind in ("pt", "np", None):
            batch = tokenizer(texts, return_tensors=kind, padding=True)
            assert [r.tokens for r in engine.generate(batch, **options)] == wanted
            one = tokenizer(texts[0], return_tensors=kind)
            assert engine.generate(one, **options).tokens == wanted[0]
    finally:
        tokenizer.padding_side = side
    assert len(engine.generate(ids[None].repeat(2, 1), **options)) == 2
    assert len(engine.generate([ids, ids[:3]], **options)) == 2
    with pytest.raises(PromptError, match="attention mask"):
        engine.generate({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]})
    for ids, mask, shapes in (
        ([5, 6, 7], [1, 1], "3, got 2"),
        ([5, 6, 7], [1, 1, 1, 1], "3, got 4"),
        ([[5, 6, 7]], [[1, 1]], r"\[3\], got \[2\]"),
        ([[5, 6, 7], [6, 7, 8]], [[1, 1, 1]], r"\[3, 3\], got \[3\]"),
        ([5, 6, 7], [[1, 1, 1]], r"3, got \[3\]"),
    ):
        with pytest.raises(PromptError, match=f"as many values as input_ids, {shapes}"):
            engine.generate({"input_ids": ids, "attention_mask": mask})
    with pytest.raises(PromptError, match="several prompts"):
        engine.stream([IDS, IDS])
    with pytest.raises(PromptError, match=r"prompt 1 of 2: .*empty"):
        engine.generate(["hello", ""])


def test_options_are_complete() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {name for name in Options.__annotations__ if name in fields} == fields


def test_the_largest_seeds_work(engine: Engine) -> None:
    for seed in (2**64 - 1, -(2**63)):
        options: dict[str, Any] = {"temperature": 1e-30, "seed": seed, "max_new_tokens": 3}
        assert len(engine.generate(IDS, **options).tokens) == 3


@pytest.mark.slow
def test_a_compiled_model_takes_prompts_of_any_length() -> None:
    """Numbers that differ from pass to pass become symbols for the compiler."""
    plain, compiled = tiny.model(1, 2048), torch.compile(tiny.model(1, 2048), backend="eager")
    engines = [Engine(load(model), drafter="copyspec(gamma=2)") for model in (plain, compiled)]
    assert engines[1].model.capabilities.packed
    for length in (60, 700):
        prompt = [5 + i % 40 for i in range(length)]
        expected, got = (e.generate(prompt, max_new_tokens=12, temperature=0) for e in engines)
        assert got.tokens == expected.tokens
