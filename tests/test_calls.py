"""What callers may give: numbers and ids of any library, and errors that say what to do instead."""

from __future__ import annotations

import copy
import decimal
import fractions
import inspect
import json
import math
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from draftsmith.core.sampling import SamplingParams
from draftsmith.drafters.copyspec import CopySpec
from draftsmith.drafters.draft_model.draft_model import DraftModel
from draftsmith.drafters.longest_match import LongestMatch
from draftsmith.drafters.pld_plus import PldPlus
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.drafters.sdsat import SDSAT
from draftsmith.drafters.spectra import Lookahead, Spectra
from draftsmith.engine.engine import Engine, EngineOptions
from draftsmith.errors import LoadError, OptionError, PromptError, UnknownName
from draftsmith.integrations.transformers import accelerate
from draftsmith.model.load import load
from draftsmith.server.settings import Settings
from draftsmith.text.tokenizer import render_chat
from work import calls

MODEL = load(tiny.model(), tiny.tokenizer())
IDS = [5, 6, 7]
CHAT = [{"role": "user", "content": "hello"}]
ENGINE = Engine(MODEL, drafter="prompt_lookup", budget=4)


class Whole:
    """A number of somebody's own library."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Real:
    """The same for real numbers."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value


WHOLE: list[Callable[[int], Any]] = [
    np.int64, np.uint8, np.int16, lambda n: np.array(n, ">i4"),
    torch.tensor, lambda n: torch.tensor(n, dtype=torch.int16), Whole,
]  # fmt: skip
REAL: list[Callable[[float], Any]] = [
    np.float32, np.float64, np.array, torch.tensor, lambda x: torch.tensor(x, requires_grad=True),
    lambda x: torch.tensor(x, dtype=torch.bfloat16), fractions.Fraction, decimal.Decimal, Real,
]  # fmt: skip
NO_NUMBER: list[Any] = [
    True, np.True_, torch.tensor(True), "1", np.str_("1"), b"1", 1j, np.complex64(1), [1],
    np.array([1]), torch.tensor([1]), math.nan, math.inf, -math.inf, np.float32("nan"),
    torch.tensor(math.inf), decimal.Decimal("NaN"), object(), np.timedelta64(1), int,
]  # fmt: skip

WHOLE_OPTIONS: list[tuple[str, Callable[[Any], Any], int]] = [
    ("max_new_tokens", lambda n: SamplingParams(max_new_tokens=n).max_new_tokens, 3),
    ("seed", lambda n: SamplingParams(seed=n).seed, 3),
    ("budget", lambda n: ENGINE.drafting(budget=n).budget, 3),
    ("budget", lambda n: Engine(MODEL, budget=n).budget, 3),
    ("max_batch", lambda n: Engine(MODEL, max_batch=n).max_batch, 3),
    ("memory", lambda n: Engine(MODEL, memory=n).resources.memory, 100),
    ("prefixes", lambda n: Engine(MODEL, prefixes=n).resources.prefixes.most, 3),
    ("copyspec: gamma", lambda n: CopySpec(gamma=n).gamma, 3),
    ("copyspec: block", lambda n: CopySpec(block=n).block, 3),
    ("prompt_lookup: max", lambda n: PromptLookup(max=n).max, 3),
    ("longest_match: candidates", lambda n: LongestMatch(candidates=n).candidates, 3),
    ("sdsat: k", lambda n: SDSAT(k=n).k, 3),
    ("sdsat: passes", lambda n: SDSAT(k=2, passes=n).passes, 1),
    ("sdsat: tree", lambda n: SDSAT(k=2, tree=n).tree, 3),
    ("pld_plus: heads", lambda n: PldPlus(heads=n).heads, 3),
    ("pld_plus: layer", lambda n: PldPlus(layer=n).layer, 3),
    ("spectra: N", lambda n: Spectra(N=n).N, 3),
    ("lookahead: seed", lambda n: Lookahead(seed=n).seed, 3),
    ("draft_model: tokens", lambda n: DraftModel("x", tokens=n).tokens, 3),
    ("queue", lambda n: Settings(queue=n).queue, 3),
]
CALLS: list[tuple[str, Callable[[Any], Any], int]] = [
    ("n", lambda n: len(ENGINE.generate(IDS, n=n, max_new_tokens=2)), 2),
    ("budget", lambda n: accelerated(n), 3),
    ("max_new_tokens", lambda n: len(ENGINE.generate(IDS, max_new_tokens=n).tokens), 3),
    ("max_new_tokens", lambda n: len(ENGINE.chat().send("x", max_new_tokens=n).tokens), 3),
    ("min_length", lambda n: [*ENGINE.generate(IDS, max_new_tokens=1).copies(n), n][-1], 3),
]
"""Those that compute something."""
REAL_OPTIONS: list[tuple[str, Callable[[Any], Any]]] = [
    ("temperature", lambda x: SamplingParams(temperature=x).temperature),
    ("logit_bias[5]", lambda x: SamplingParams(logit_bias={5: x}).logit_bias[5]),
    ("temperature", lambda x: ENGINE.prepare({"temperature": x}).sampling.temperature),
    ("draft_model: confidence", lambda x: DraftModel("x", confidence=x).confidence),
    ("spectra: tau", lambda x: Spectra(tau=x).tau),
    ("pld_plus: threshold", lambda x: PldPlus(threshold=x).threshold),
    ("timeout", lambda x: Settings(timeout=x).timeout),
]


def accelerated(budget: Any) -> Any:
    with accelerate(tiny.model(), "copyspec", budget=budget) as handle:
        return handle.budget


def named(options: list[Any]) -> list[str]:
    return [f"{number} {option[0]}" for number, option in enumerate(options)]


@pytest.mark.parametrize(("name", "take", "value"), WHOLE_OPTIONS, ids=named(WHOLE_OPTIONS))
def test_e6_integers_of_any_library_are_integers(
    name: str, take: Callable[[Any], Any], value: int
) -> None:
    for made in WHOLE:
        assert operator.index(take(made(value))) == value, name
    for wrong in [*NO_NUMBER, 1.5, np.float32(2), torch.tensor(2.0), fractions.Fraction(1, 2)]:
        if name == "budget" and isinstance(wrong, str):
            continue  # as it is typed
        if name == "sdsat: tree" and isinstance(wrong, list | np.ndarray | torch.Tensor):
            continue  # candidates for each depth
        with pytest.raises(OptionError, match=r"must be .*, got "):
            take(wrong)


@pytest.mark.parametrize(("name", "take", "value"), CALLS, ids=named(CALLS))
def test_e6_calls_take_integers_of_any_library(
    name: str, take: Callable[[Any], Any], value: int
) -> None:
    for made in (np.int64, torch.tensor):
        assert operator.index(take(made(value))) == value, name
    for wrong in (True, np.array([1]), 1.5, torch.tensor(2.0), "one"):
        with pytest.raises(OptionError, match=r"must be .*, got "):
            take(wrong)


@pytest.mark.parametrize(("name", "take"), REAL_OPTIONS, ids=named(REAL_OPTIONS))
def test_e6_real_numbers_of_any_library_are_numbers(name: str, take: Callable[[Any], Any]) -> None:
    for made in REAL:
        assert float(take(made(0.5))) == 0.5, name
    for wrong in [*NO_NUMBER, 10**5000]:
        if name == "logit_bias[5]" and isinstance(wrong, float) and wrong == -math.inf:
            assert take(wrong) == -math.inf  # it forbids a token
            continue
        with pytest.raises(OptionError, match=r"must be .*, got "):
            take(wrong)


def test_e6_what_is_kept_is_pythons_own() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), seed=torch.tensor(5), logprobs=np.True_
    )  # fmt: skip
    kept = params.temperature, params.top_k, params.seed, params.logprobs
    assert [*map(type, kept)] == [float, int, int, bool]
    assert CopySpec(gamma=np.int64(3)) == CopySpec(gamma=3)  # the same for what is bound once
    assert str(CopySpec(gamma=torch.tensor(3))) == str(CopySpec(gamma=3))


ID_LISTS: list[Callable[[list[int]], Any]] = [
    list, tuple, np.array, lambda ids: np.array(ids, np.uint16), lambda ids: np.array([ids]),
    torch.tensor, lambda ids: torch.tensor([ids], dtype=torch.int32),
    lambda ids: [np.int64(i) for i in ids], lambda ids: [torch.tensor(i) for i in ids],
    lambda ids: [Whole(i) for i in ids],
]  # fmt: skip


@pytest.mark.parametrize("made", ID_LISTS)
def test_e6_ids_may_be_arrays_and_tensors(made: Callable[[list[int]], Any]) -> None:
    want = ENGINE.generate(IDS, max_new_tokens=8)
    assert ENGINE.generate(made(IDS), max_new_tokens=8).tokens == want.tokens
    assert [p.token for p in ENGINE.stream(made(IDS), max_new_tokens=8)] == want.tokens
    predicted = ENGINE.generate(IDS, max_new_tokens=8, prediction=made(want.tokens))
    assert predicted.tokens == want.tokens
    assert predicted.accepted_prediction_tokens > 0
    stopped = ENGINE.generate(IDS, max_new_tokens=8, stop_token_ids=made([want.tokens[3]]))
    assert stopped.tokens == want.tokens[: want.tokens.index(want.tokens[3]) + 1]
    if getattr(made(IDS), "ndim", 1) == 1:
        several = ENGINE.generate([made(IDS), made([5])], max_new_tokens=8)
        assert several[0].tokens == want.tokens


@pytest.mark.parametrize(
    "wrong",
    [5, 1.5, True, np.array(5), [1.5], [True], np.array([1.5]), np.array([True]), b"ab", {5, 6},
     [[5], [6]], [None], object()],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_e9_what_are_no_ids_is_named(wrong: Any) -> None:
    with pytest.raises(OptionError, match="prediction must be a text or token ids, got "):
        ENGINE.generate(IDS, prediction=wrong)
    if str(wrong) != "[[5], [6]]":  # two prompts
        with pytest.raises(
            PromptError, match="a prompt must be a text, token ids, or a list of mess"
        ):
            ENGINE.generate(wrong)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("a\ud83e", r"whole characters, got \\ud83e, half of a surrogate pair, at 1"),
        (["a", "\udc00"], "prompt 1 of 2: a text must have whole characters"),
        ([{"role": "user", "content": 5}], "content of a message must be a text.*, got 5"),
        ([{"role": "user", "content": b"x"}], "content of a message must be a text.*, got b'x'"),
        ([{"role": "user", "content": None}], "content of a message must be a text.*, got None"),
        ([{"role": "user", "content": [5]}], r"content of a message must be a text.*, got \[5\]"),
        ([{"role": "user", "content": "\ud800"}], "whole characters"),
        ([{"role": 5, "content": "x"}], "role of a message must be a text, got 5"),
        ([{"text": "hello"}], "'role' and 'content'"),
        ("", "empty"),
        ([], "empty"),
        ([""], "empty"),
        ([5] * 600, "600 tokens.*context is 512"),
        ([5, 99999], "99999"),
        (None, "NoneType"),
    ],
)
def test_e9_a_prompt_that_cannot_be_written_is_named(prompt: Any, said: str) -> None:
    with pytest.raises(PromptError, match=said):
        ENGINE.generate(prompt, max_new_tokens=2)
    if prompt != ["a", "\udc00"]:  # two prompts
        with pytest.raises(PromptError, match=said):
            ENGINE.stream(prompt, max_new_tokens=2)


@pytest.mark.parametrize("wrong", [5, None, b"x", {"role": "user"}, ["x"], IDS, "\ud800"])
def test_e9_what_is_no_message_of_a_chat_is_named(wrong: Any) -> None:
    chat = ENGINE.chat(max_new_tokens=2)
    for ask in (chat.send, chat.stream):
        with pytest.raises(PromptError, match=r"must (be a text|have whole characters).*, got "):
            ask(wrong)
    assert chat.messages == []
    assert chat.send("x").tokens


def test_e9_other_messages_go_to_the_template_as_they_are() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    assert ENGINE.generate([parts, call, parts], max_new_tokens=2).tokens


def test_e9_parts_reach_a_template_as_it_reads_them() -> None:
    """As text, unless the template reads lists; no template gets a list to write as Python does."""
    lists = tiny.TEMPLATE.replace("m['content']", "m['content'][0].text")
    texts = [{"type": "text", "text": "the quick"}, {"type": "text", "text": "brown"}]
    for template, shown in ((tiny.TEMPLATE, "the quick\nbrown"), (lists, "the quick")):
        tokenizer = copy.deepcopy(tiny.tokenizer())
        tokenizer.chat_template = template
        ids = render_chat(tokenizer, [{"role": "user", "content": texts}])
        assert f"user: {shown}</s>" in tokenizer.decode(ids)
    image = [*texts, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(PromptError, match="no parts other than texts"):
        ENGINE.generate([{"role": "user", "content": image}], max_new_tokens=2)


@pytest.mark.parametrize("wrong", [0, 5, b"x", ["x"], True])
def test_e9_a_salt_that_is_no_text_is_named(wrong: Any) -> None:
    """0 and False would share everything."""
    with pytest.raises(OptionError, match="cache_salt must be a text, got "):
        ENGINE.generate(IDS, cache_salt=wrong)


def test_switches_are_true_or_false() -> None:
    for wrong in (2, 1, 0, "true", None, np.array([True]), 1.0):
        with pytest.raises(OptionError, match="logprobs must be True or False, got"):
            SamplingParams(logprobs=wrong)
        with pytest.raises(OptionError, match="exact must be True or False, got"):
            Engine(MODEL, exact=wrong)
        with pytest.raises(OptionError, match="prepack must be True or False, got"):
            accelerate(tiny.model(), prepack=wrong)
    assert SamplingParams(logprobs=torch.tensor(True)).logprobs is True
    with pytest.raises(OptionError, match="logprobs must be True or False, got 2"):
        ENGINE.generate(IDS, logprobs=2)


# ------------------------------------------------------------------------------------- engines


def test_e9_an_engine_takes_a_model_in_any_form() -> None:
    """A transformers model with its tokenizer, what `load` returned, a name."""
    want = ENGINE.generate("hello world", max_new_tokens=5)
    for made in (
        Engine(tiny.model(), tiny.tokenizer()),
        Engine(tiny.model(), tokenizer=tiny.tokenizer()),
        Engine(MODEL),
        Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer()),
        Engine.from_pretrained(tiny.model(), tiny.tokenizer()),
        Engine.from_pretrained(MODEL),
    ):
        assert made.generate("hello world", max_new_tokens=5).tokens == want.tokens
    named = Engine("edit-1m", dtype="float32", drafter="none")
    assert named.generate("a", max_new_tokens=2).text is not None
    assert named.model.name == "edit-1m"


def test_both_ways_to_make_an_engine_know_the_same_options() -> None:
    taken = [*inspect.signature(Engine).parameters]
    assert ["model", "tokenizer", *EngineOptions.__annotations__] == taken


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Engine(MODEL, memory=0), "memory must be an integer >= 1"),
        (lambda: Engine(MODEL, memory=-5), "memory must be an integer >= 1"),
        (lambda: Engine(MODEL, max_batch=0), "max_batch must be an integer >= 1, got 0"),
        (lambda: Engine(MODEL, prefixes=-1), "prefixes must be an integer >= 0, got -1"),
        (lambda: Engine(MODEL, answers=-1), "answers must be an integer >= 0"),
        (lambda: Engine(MODEL, answers=5), "answers must be 0 or >= 1,000,000 .*got 5"),
        (lambda: Engine(MODEL, cost=0.02), "cost must be a CostCurve, got 0.02"),
        (lambda: Engine(MODEL, answers_file=5, answers=10**6), "answers_file must be a path"),
        (lambda: Engine(MODEL, answers_file="x\0y", answers=10**6), "answers_file must be a path"),
        *(((lambda given=given: ENGINE.generate(CHAT, chat_template_kwargs=given)),
           f"chat_template_kwargs must not set {next(iter(given))!r}")
          for given in ({"messages": []}, {"conversation": []}, {"tokenize": True}, {"self": 1},
                        {"return_dict": True}, {"tokenizer_kwargs": {}}, {5: 1})),
        *(((lambda drafter=drafter: ENGINE.generate(IDS, drafter=drafter)), said)
          for drafter, said in (
              ("sdsat", r"sdsat needs .*=…; write sdsat\("),
              ("draft_model", r"draft_model needs model=…; write draft_model\(model=…\)"),
              ("eagle3", r"eagle3 needs model=…; write eagle3\(model=…\)"),
              ("cascade", r"cascade needs drafters=…; write it like copyspec\+auto"),
              ("auto(head=eagle3())", r"eagle3 needs model=…"))),
        (lambda: Engine(MODEL, tiny.tokenizer()), r"options of load\(\), which has returned"),
        (lambda: Engine(MODEL, dtype="float32"), r"options of load\(\), which has returned"),
        (lambda: Engine(tiny.model(), dtype="float32"), "live model"),
        (lambda: Engine(tiny.model(), 5), "tokenizer must be .*, got 5"),
        (lambda: Engine(MODEL, drafter=5), r"drafter must be text such as .*, got 5"),
        (lambda: Engine(MODEL, drafter=CopySpec), r"create one: CopySpec\(…\)"),
        (lambda: Engine(MODEL, drafter=tiny.model()), "drafter must be text such as"),
        (lambda: Engine(MODEL, budget="wide"), "'auto' or 'drafter', got 'wide'"),
        (lambda: Engine(MODEL, budget=np.array([4, 5])), "budget must be .*, got array"),
        (lambda: ENGINE.chat(5), "system must be a text, got 5"),
        (lambda: ENGINE.chat(history=[]), "unknown option 'history'. Set or edit `chat.messages`"),
        *(((lambda given=given: ENGINE.generate(IDS, **given)), said) for given, said in (
            ({"drafter": "copyspec(match='middle')"}, "'middle'"),
            ({"drafter": "prompt_lookup(min=4)"}, "min must be <= max=3, got 4"),
            ({"drafter": "copyspec(3)"}, "options need names"),
            ({"drafter": "copyspec(gamma="}, "cannot be parsed"),
            ({"n": 0}, "n must be an integer >= 1, got 0"),
            ({"seed": 2**64}, f">= {-(2**63)} and <= {2**64 - 1}"),
            ({"seed": 2**64 - 1, "n": 2}, f"got {2**64}"),
            ({"temperature": 1e-45}, r"must be 0 \(greedy\) or at least 1e-30, got 1e-45"),
            ({"stop": ["", "a"]}, "non-empty strings"),
            ({"stop_token_ids": ["a"]}, "token ids"),
            ({"stop_token_ids": [99999]}, "99999"),
            ({"logit_bias": {99999: 1.0}}, "99999"))),
        (lambda: ENGINE.generate(IDS, stop=5), r"stop must be non-empty strings, got \(5,\)"),
        (lambda: ENGINE.generate(IDS, processors=5), "processors must be functions .*, got 5"),
        (lambda: SamplingParams(processors=print), "processors must be a tuple, got"),
        (lambda: ENGINE.generate(IDS, logit_bias=5), "logit_bias must map .*, got 5"),
        (lambda: ENGINE.generate(IDS, logit_bias={"a": 1.0}), "logit_bias must be .* got 'a'"),
        (lambda: ENGINE.generate(IDS, chat_template_kwargs=5), "must map names .*, got 5"),
        (lambda: ENGINE.generate(IDS, drafter=5), "drafter must be text such as .*, got 5"),
    ],
)  # fmt: skip
def test_e9_values_that_cannot_work_are_named(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        make()


@pytest.mark.parametrize(("process", "said"), [
    (lambda *_: None, r"a tensor of scores \(1, \d+\), got None"),
    (lambda _, scores: scores.numpy(), r"got array\("),
    (lambda *_: 5, "got 5"),
    (lambda _, scores: scores[:, :5], r"got \(1, 5\) of torch.float32"),
    (lambda _, scores: torch.cat([scores, scores], 1), "got "),
    (lambda _, scores: scores[0], "got "),
    (lambda _, scores: scores.repeat(2, 1), "got "),
    (lambda _, scores: scores > 0, "of torch.bool"),
    (lambda _, scores: scores * float("nan"), "without NaN"),
    (lambda _, scores: scores.index_fill(1, torch.tensor([3]), float("nan")), "without NaN"),
])  # fmt: skip
@pytest.mark.parametrize(("drafter", "temperature"), [("none", 1.0), ("prompt_lookup", 0)])
def test_e9_what_a_processor_returns_is_checked(
    process: Any, said: str, drafter: str, temperature: float
) -> None:
    options: Any = {"drafter": drafter, "temperature": temperature, "max_new_tokens": 4}
    with pytest.raises(OptionError, match=said):
        ENGINE.generate(IDS, processors=process, **options)


def test_e9_a_processor_is_not_blamed_for_the_models_nan() -> None:
    broken = copy.deepcopy(tiny.model())  # which other tests share
    with torch.no_grad():
        broken.lm_head.weight[5] = math.nan
    engine = Engine(load(broken, tiny.tokenizer()))
    assert engine.generate(IDS, processors=lambda _, scores: scores, max_new_tokens=3).tokens == (
        engine.generate(IDS, max_new_tokens=3).tokens
    )


@pytest.mark.parametrize("score", [math.inf, -math.inf])
def test_e9_scores_from_which_nothing_can_be_drawn_are_named(score: float) -> None:
    process: Any = lambda _, scores: torch.full_like(scores, score)  # noqa: E731
    with pytest.raises(OptionError, match="so no token can be drawn"):
        ENGINE.generate(IDS, processors=process, temperature=1.0, max_new_tokens=4)
    best = ENGINE.generate(IDS, processors=process, max_new_tokens=4).tokens
    assert best == [0] * 4, "as in transformers"


@pytest.mark.parametrize("wrong", [5, None, ["edit-1m"], type(tiny.model()), tiny.tokenizer()])
def test_e9_what_is_no_model_is_named(wrong: Any) -> None:
    with pytest.raises(LoadError, match="model must be a hub id, a folder or a transformers model"):
        Engine(wrong)
    with pytest.raises(LoadError, match=r"model must be a hub id, a folder or .*, got ''"):
        Engine("")
    with pytest.raises(LoadError, match=r"has no generate\(\) of transformers to accelerate"):
        accelerate(wrong)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda o: Engine(MODEL, **o), "option of Engine"),
        (lambda o: Engine.from_pretrained(MODEL, **o), "option of Engine"),
        (lambda o: load(tiny.model(), **o), "option of load"),
    ],
)
@pytest.mark.parametrize(
    ("option", "hint"),
    [("torch_dtype", "Use dtype."), ("load_in_4bit", "pass the model itself"),
     ("load_in_8bit", "pass the model itself"), ("quantization_config", "pass the model itself"),
     ("attn_implementation", "pass the model itself"), ("token", "hf auth login"),
     ("revison", "Did you mean 'revision'?")],
)  # fmt: skip
def test_e9_options_from_elsewhere_get_a_hint(
    make: Callable[[Any], Any], said: str, option: str, hint: str
) -> None:
    with pytest.raises(UnknownName) as caught:
        make({option: "x"})
    assert said in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Engine(MODEL, drafer="auto"), r"Did you mean 'drafter'\? Known"),
        (lambda: Engine(MODEL, store="pakced"), "unknown store 'pakced'. Did you mean 'packed'"),
        (lambda: Engine(MODEL, temperature=1.0), r"Pass it to generate\(\), stream"),
        (lambda: Engine(MODEL, temprature=1.0), "Did you mean 'temperature'.* Pass it to generate"),
        (lambda: Engine(MODEL, max_num_seqs=4), "Use max_batch"),
        (lambda: Engine(MODEL, assistant_model="x"), "draft_model"),
        (lambda: accelerate(tiny.model(), torch_dtype="x"), "when you load the model"),
        (lambda: accelerate(tiny.model(), do_sample=True), r"Pass it to model.generate\(\)"),
        (lambda: accelerate(tiny.model(), draftr="x"), "Did you mean 'drafter'"),
        (lambda: ENGINE.generate(IDS, torch_dtype="x"), "Pass it to Engine"),
        (lambda: ENGINE.generate(IDS, max_batch=4), "Pass it to Engine"),
        (lambda: ENGINE.generate(IDS, drafter="copyspec(gama=3)"), "Did you mean 'gamma'"),
        (lambda: ENGINE.generate(IDS, do_sample=2), "temperature"),
        (lambda: ENGINE.generate(IDS, max_length=2), "max_new_tokens"),
        (lambda: ENGINE.generate(IDS, num_return_sequences=2), "Use n"),
        (lambda: ENGINE.generate(IDS, num_beams=2), "Beam search"),
        (lambda: ENGINE.generate(IDS, max_tokens=4), "Did you mean 'max_new_tokens'"),
        (lambda: ENGINE.generate(IDS, response_format={}), "Grammar.json_schema"),
        (lambda: ENGINE.generate(input_ids=IDS), "Pass it first"),
        (lambda: ENGINE.generate(messages=[]), "Pass it first"),
        (lambda: ENGINE.stream(prompts="x"), "Pass it first"),
        (lambda: ENGINE.submit(messages=[]), "Pass it first"),
        (lambda: ENGINE.generate(IDS, stop_string="x"), "Did you mean 'stop_strings'.* Use stop"),
        (lambda: ENGINE.generate(IDS, store="static"), "Pass it to Engine"),
        (lambda: ENGINE.stream(IDS, progress=True), r"Only generate\(\) has it"),
        (lambda: ENGINE.stream(IDS, n=2), r"use generate\(\) for n answers"),
        (lambda: ENGINE.chat(dtype="float32"), "Pass it to Engine"),
        (lambda: ENGINE.chat(n=2), r"use generate\(\) for n answers"),
        (lambda: ENGINE.chat(temprature=1.0), "Did you mean 'temperature'"),
    ],
)  # fmt: skip
def test_e9_names_that_do_not_exist_get_a_hint(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(UnknownName, match=said):
        call()


# ----------------------------------------------------------------------------------- vocab_size


ASKED: dict[str, Callable[[list[Any]], Any]] = {
    "prompt": lambda ids: ENGINE.prepare({}).sequences([ids]),
    "prediction": lambda ids: ENGINE.prepare({"prediction": ids}).sequences([IDS]),
    "stop_token_ids": lambda ids: ENGINE.prepare({"stop_token_ids": ids}),
    "logit_bias": lambda ids: ENGINE.prepare({"logit_bias": dict.fromkeys(ids, 0.5)}),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", [int, np.int64, np.uint16])
def test_e11_an_id_takes_few_calls(kind: type, asked: str) -> None:
    """The width of the logits is not asked for each."""
    few, many = ([kind(5 + i) for i in range(length)] for length in (100, 300))
    ASKED[asked](few)
    assert calls(lambda: ASKED[asked](many)) - calls(lambda: ASKED[asked](few)) < 15 * 200


# --------------------------------------------------------------------------- what is printed


def test_objects_say_what_they_are() -> None:
    engine = Engine(MODEL, drafter="none", answers=2_000_000)
    chat, stream = engine.chat("be brief", max_new_tokens=3), engine.stream(IDS, max_new_tokens=3)
    assert repr(engine) == (
        "Engine('LlamaForCausalLM', drafter=none(), budget='auto', float32 on cpu)"
    )
    assert repr(engine.model) == "LoadedModel('LlamaForCausalLM', LlamaForCausalLM, float32 on cpu)"
    assert repr(engine.answers) == "AnswerCache(0 answers, 0 of 2,000,000 bytes)"
    assert repr(chat) == "Chat(1 message, 'LlamaForCausalLM')"
    chat.send("hello")
    assert repr(chat) == "Chat(3 messages, 'LlamaForCausalLM')"
    assert repr(stream) == "Stream(0 tokens, open)"
    next(stream)
    assert repr(stream) == "Stream(1 tokens, open)"
    list(stream)
    assert repr(stream) == "Stream(3 tokens, length)"
    cancelled = engine.stream(IDS, max_new_tokens=3)
    cancelled.close()
    assert repr(cancelled) == "Stream(0 tokens, cancelled)"
    result = repr(engine.generate(IDS, max_new_tokens=60))
    assert "60 tokens" in result
    assert len(result) < 200
    with accelerate(tiny.model(), "copyspec") as handle:
        assert repr(handle).startswith("Accelerated(LlamaForCausalLM, drafter=copyspec(gamma=3")
        assert len(repr(handle)) < 150


def test_a_result_is_plain_values_on_request() -> None:
    result = ENGINE.generate(IDS, max_new_tokens=6, logprobs=True, prediction=[5, 6])
    told = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert told["text"] == result.text
    assert told["tokens"] == result.tokens
    assert told["logprobs"] == result.logprobs
    assert told["stats"]["passes"] == result.stats.passes
    assert told["stats"]["tokens_per_pass"] == result.stats.tokens_per_pass
    json.dumps([r.to_dict() for r in ENGINE.generate([IDS, [5]], max_new_tokens=2)])
    json.dumps(ENGINE.chat(max_new_tokens=2).send("x").to_dict())


# ------------------------------------------------------------------------------ type checkers

TYPO = """
import numpy as np
from draftsmith import Engine

engine = Engine("smollm2")
engine.generate("x", temprature=0.5)
engine.generate("x", temperature=np.float32(0.5), max_new_tokens=np.int64(3), n=2)
engine.generate(["x"], prediction=np.array([5, 6]))
"""


@pytest.mark.slow
def test_a_type_checker_says_a_misspelt_option_in_a_few_words(tmp_path: Path) -> None:
    (tmp_path / "typo.py").write_text(TYPO)
    root = Path(__file__).parents[1]
    command = [
        sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"),
        "--cache-dir", str(root / ".mypy_cache"),
    ]  # fmt: skip
    told = subprocess.run(
        [*command, "typo.py"],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(root / "src")},
        capture_output=True,
        text=True,
    ).stdout
    lines = told.splitlines()
    assert 'did you mean "temperature"?' in lines[0]
    assert len(told) < 500
    assert all(":6:" in line for line in lines[:-1]), told
