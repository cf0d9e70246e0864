"""Draft models that are real (tiny) models: what they are fed, what they refuse, who hosts them."""

from __future__ import annotations

import copy
import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted import same_answers
from pairs import Parrot

import tiny
from architectures import RECURRENT, VOCAB, build, prompt
from draftsmith import accelerate, builtin
from draftsmith.cli.render import label
from draftsmith.core.drafter import Drafter
from draftsmith.drafters.cascade import Cascade
from draftsmith.drafters.copyspec import CopySpec
from draftsmith.drafters.draft_model import draft_model
from draftsmith.drafters.draft_model.draft_model import DraftModel
from draftsmith.drafters.longest_match import LongestMatch
from draftsmith.drafters.registry import parse
from draftsmith.engine.engine import Engine
from draftsmith.errors import DraftsmithError, LoadError, OptionError, UnsupportedError
from draftsmith.model.load import load
from draftsmith.model.runner import Runner
from replica import contents
from tiers import slow_after

TEXTS = [
    "def foo(x): return x + 1",
    "the quick brown fox jumps over the lazy dog, hello world",
    "the",
    "tabs\tand\r\nline ends,   spaces, émojis 🦊 and 中文 text",
]


def engine(drafter: Any = "none", model: Any = None, **options: Any) -> Engine:
    tokenizer = options.pop("tokenizer", tiny.tokenizer())
    target = tiny.model() if model is None else model
    return Engine.from_pretrained(
        target, tokenizer=tokenizer, drafter=drafter, budget="drafter", **options
    )


def small(vocab: int = 300, **changes: Any) -> Any:
    """A drafter with a tokenizer of another size."""
    model = copy.deepcopy(tiny.model())
    model.resize_token_embeddings(len(tiny.tokenizer(vocab)))
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


def drafters() -> dict[str, DraftModel]:
    other = {"model": small(), "tokenizer": tiny.tokenizer(300), "confidence": 0}
    own = {"model": tiny.model(), "tokenizer": tiny.tokenizer(), "confidence": 0}
    return {
        "itself": DraftModel(**own),
        "shallower": DraftModel(**own | {"model": tiny.model(layers=1)}, tokens=3),
        "tli": DraftModel(**other, algorithm="tli"),
    }


def test_a_drafter_that_is_the_target_is_accepted_whole() -> None:
    serving = engine(drafters()["itself"])
    for options in ({}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9}):
        stats = serving.generate(TEXTS[0], max_new_tokens=48, **options).stats
        assert stats.accepted == stats.drafted
        assert stats.tokens_per_pass == 6 or stats.tokens < 48


def test_the_reason_for_the_algorithm_is_reported() -> None:
    other = DraftModel(small(), tokenizer=tiny.tokenizer(300))
    told = engine(other).generate("the", max_new_tokens=2).notices
    assert any("draft_model uses tli" in n and "overlap is large" in n for n in told)


def test_an_algorithm_that_cannot_be_used_is_not_chosen() -> None:
    """Bytes suggest slrs, whose longest proposal needs more context than this model has."""
    loaded = load("edit-bytes")
    loaded.model.config.max_position_embeddings = 100
    drafter = DraftModel(loaded.model, tokenizer=loaded.tokenizer)
    answer = Engine.from_pretrained("edit-1m", drafter=drafter).generate("def", max_new_tokens=4)
    assert any("uses slem" in notice and "context" in notice for notice in answer.notices)


def test_reproducible_answers_do_not_depend_on_the_drafter() -> None:
    answers = []
    for name in ("itself", "tli"):
        drafter = DraftModel(**vars(drafters()[name]) | {"reproducible": True})
        answers.append(
            engine(drafter).generate(TEXTS[0], max_new_tokens=40, temperature=1.0, seed=5)
        )
    drafter = DraftModel(tiny.model(), tokenizer=tiny.tokenizer(), reproducible=True)
    plain = engine(drafter).generate(TEXTS[0], max_new_tokens=40, temperature=1.0, seed=5, budget=0)
    assert answers[0].tokens == answers[1].tokens == plain.tokens
    assert answers[0].stats.accepted == answers[0].stats.drafted
    other = engine(drafter).generate(TEXTS[0], max_new_tokens=40, temperature=1.0, seed=6)
    assert other.tokens != plain.tokens


# ------------------------------------------------------------------------- the drafter's cache


def test_rows_of_the_cache_are_given_back() -> None:
    serving = engine(drafters()["tli"])
    bound: Any = serving.drafter
    rows = bound.runner.store._rows
    serving.generate(TEXTS, max_new_tokens=8)
    stream = serving.stream("the", max_new_tokens=50)
    for _ in range(5):
        next(stream)
    stream.close()
    chat = serving.chat(max_new_tokens=12)
    chat.send("hello world")
    chat.send("the quick brown fox")  # the state follows the second turn
    expected = engine().chat(max_new_tokens=12)
    for message in ("hello world", "the quick brown fox"):
        expected.send(message)
    assert chat.messages == expected.messages
    serving.generate(TEXTS, max_new_tokens=8)
    assert len(rows) == 1, "only the chat's row is open"
    del chat  # nobody closes it
    gc.collect()
    serving.generate("the", max_new_tokens=8)
    assert len(rows) <= 1


def test_the_memory_of_a_draft_model_with_shorter_tokens_is_counted() -> None:
    target = Engine.from_pretrained("edit-1m", drafter=DraftModel("edit-bytes", algorithm="slem"))
    bound: Any = target.drafter
    text = "\n".join(builtin.demo())
    ids = len(target.model.tokenizer.encode(text))
    assert bound.bytes_for(ids) >= 2 * bound.runner.row_bytes(len(text.encode()))
    limited = dataclasses.replace(drafters()["tli"], model=small(max_position_embeddings=64))
    bound = engine(limited).drafter
    state = bound.copier.bytes_for(2 * 100_000)
    assert bound.bytes_for(100_000) <= 2 * bound.runner.row_bytes(64) + state


def test_the_users_model_is_left_alone() -> None:
    model = small()
    before = copy.deepcopy(model.state_dict())
    settings = model.config.to_dict(), model.generation_config.to_dict()
    engine(DraftModel(model, tokenizer=tiny.tokenizer(300), algorithm="tli")).generate(
        TEXTS[0], max_new_tokens=20, temperature=1.0
    )
    assert (model.config.to_dict(), model.generation_config.to_dict()) == settings
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]


# -------------------------------------------------------------------------------- bad inputs


def test_a_drafter_without_tokenizer() -> None:
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM has no tokenizer.*tokenizer="):
        engine(DraftModel(tiny.model()))
    with pytest.raises(UnsupportedError, match="the target has no tokenizer"):
        engine(DraftModel(tiny.model(), tokenizer=tiny.tokenizer()), tokenizer=None)
    vouched = DraftModel(tiny.model(), algorithm="standard", confidence=0)
    stats = engine(vouched).generate(TEXTS[0], max_new_tokens=12).stats
    assert stats.accepted == stats.drafted


def test_hidden_ends_of_the_drafter_end_the_draft() -> None:
    """A generation config may name more ends than the tokenizer does."""
    model = copy.deepcopy(tiny.model())
    answer = engine().generate(TEXTS[0], max_new_tokens=30).tokens
    model.generation_config.eos_token_id = [2, answer[2], 10_000]
    drafter = DraftModel(model, tokenizer=tiny.tokenizer(), confidence=0, tokens=8)
    result = engine(drafter).generate(TEXTS[0], max_new_tokens=30)
    assert result.tokens == answer
    # It ends the draft, is accepted, and the answer goes on.
    assert result.stats.accepted == result.stats.drafted
    assert result.stats.accepted_by_depth[0] > result.stats.accepted_by_depth[3]


@pytest.mark.slow
def test_a_shorter_context_slides() -> None:
    """The drafter reads the end of the text only, in a window that moves in strides."""
    model = copy.deepcopy(tiny.model())
    model.config.max_position_embeddings = 40
    drafter = DraftModel(model, tokenizer=tiny.tokenizer(), confidence=0)
    serving = engine(drafter)
    result = serving.generate(TEXTS[0], max_new_tokens=80)
    assert result.tokens == engine().generate(TEXTS[0], max_new_tokens=80).tokens
    assert len(result.tokens) == 80
    assert result.stats.attempts >= result.stats.passes - 1
    bound: Any = serving.drafter
    state: Any = bound.open(None)
    windows = [state._window(range(length)) for length in range(1, 300)]
    assert [window[-1] for window in windows] == [*range(299)]
    assert max(map(len, windows)) == 35
    assert min(map(len, windows[40:])) > 20
    assert len({window[0] for window in windows}) < 30
    with pytest.raises(OptionError, match="< 40, the context of"):
        engine(DraftModel(model, tokenizer=tiny.tokenizer(), tokens=40))


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_drafters_work_or_say_why_not(name: str) -> None:
    target = build("llama")
    plain = Engine.from_pretrained(target, drafter="none")
    drafter = DraftModel(build(name), algorithm="standard", confidence=0)
    try:
        serving = Engine.from_pretrained(target, drafter=drafter, budget="drafter")
    except UnsupportedError as error:
        assert name in ("mamba",) or "transformers" in str(error)  # noqa: PT017
        assert "cannot draft" in str(error)  # noqa: PT017
        return
    result = serving.generate(prompt(20), max_new_tokens=24)
    assert result.tokens == plain.generate(prompt(20), max_new_tokens=24).tokens
    itself = Engine.from_pretrained(build(name), drafter=drafter, budget="drafter")
    stats = itself.generate(prompt(20), max_new_tokens=24).stats
    assert stats.accepted == stats.drafted > 0


@pytest.mark.slow
def test_vocabularies_may_be_padded_differently() -> None:
    serving = Engine.from_pretrained(build("llama"), budget="drafter")
    for extra in (-40, 40):
        model = build("llama", vocab_size=VOCAB + extra)
        drafter = DraftModel(model, algorithm="standard", confidence=0)
        [found] = same_answers(serving, [prompt(9)], drafter, max_new_tokens=20)
        sampled = serving.generate(prompt(9), drafter=drafter, max_new_tokens=20, temperature=1.0)
        assert found.stats.drafted
        assert sampled.stats.drafted


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"tokens": 0}, OptionError, "tokens must be an integer >= 1, got 0"),
        ({"confidence": 1.5}, OptionError, "confidence must be"),
        ({"confidence": True}, OptionError, "got True"),
        ({"algorithm": "best"}, OptionError, "algorithm must be 'auto' .* got 'best'"),
        ({"model": "./nowhere"}, LoadError, "no folder ./nowhere"),
        ({"model": 7}, LoadError, "got int"),
        ({"dtype": "float32"}, OptionError, "live model"),
        ({"device": "cpu"}, OptionError, "live model"),
        ({"model": "small", "algorithm": "standard"}, OptionError, "one vocabulary"),
        ({"model": "training"}, OptionError, "training mode"),
    ],
)
def test_bad_options_are_told_before_anything_runs(
    options: dict[str, Any], error: type[DraftsmithError], match: str
) -> None:
    given = {"model": tiny.model(), "tokenizer": tiny.tokenizer()} | options
    if given["model"] == "small":
        given |= {"model": small(), "tokenizer": tiny.tokenizer(300)}
    elif given["model"] == "training":
        given["model"] = copy.deepcopy(tiny.model()).train()
    with pytest.raises(error, match=match):
        engine(DraftModel(**given))


def test_an_unbound_drafter_says_so() -> None:
    drafter = DraftModel("somewhere")
    with pytest.raises(UnsupportedError, match="was not bound"):
        drafter.open(None)  # type: ignore[arg-type]
    assert str(drafter).startswith("draft_model(model='somewhere', tokens=5, confidence=0.4, ")
    assert "model=LlamaForCausalLM" in str(DraftModel(tiny.model()))


# ------------------------------------------------------------------------------------ hosts


def test_generate_shares_its_noise_with_a_reproducible_drafter() -> None:
    model = copy.deepcopy(tiny.model())
    ids = torch.tensor([tiny.tokenizer()(TEXTS[0])["input_ids"]])
    drafter = DraftModel(**vars(drafters()["tli"]) | {"reproducible": True})
    with accelerate(model, drafter, budget=4, tokenizer=tiny.tokenizer()) as fast:
        answers = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            answers += [model.generate(ids, max_new_tokens=16, do_sample=True) for _ in range(2)]
        assert fast.stats is not None
        assert fast.stats.by_source["draft_model"].drafted
    assert torch.equal(answers[0], answers[2])
    assert not torch.equal(answers[0], answers[1])  # the seed moves on, as torch's does
    assert not torch.equal(answers[0], answers[4])


@pytest.mark.parametrize(
    ("typed", "model"),
    [
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("./a folder/8b", "./a folder/8b"),
        (r"C:\models\1b", r"C:\models\1b"),
        ("'a=(b, c)'", "a=(b, c)"),
        ('"it\'s"', "it's"),
        ("1b+2b", "1b+2b"),
    ],
)
def test_text_needs_no_quotes(typed: str, model: str) -> None:
    for more in ("", ", tokens=3", ", confidence=1e-2, reproducible=True"):
        drafter: Any = parse(f"copyspec + draft_model(model={typed}{more})")
        assert drafter.drafters[1].model == model
    assert parse(f"draft_model(algorithm = tli , model = {typed} )").algorithm == "tli"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "copier"), [("shallower", Parrot), ("tli", LongestMatch)])
@pytest.mark.parametrize("after_copies", slow_after(1, [False, True]))
@pytest.mark.parametrize("temperature", slow_after(1, [1.0, 0.0]))
def test_the_drafters_cache_equals_a_fresh_prefill(
    name: str,
    copier: type[Drafter],
    after_copies: bool,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After every draft, whatever was drafted and accepted before it."""
    monkeypatch.setattr(draft_model, "LongestMatch", copier)
    model = drafters()[name]
    serving = engine(Cascade((CopySpec(gamma=1, block=4), model)) if after_copies else model)
    top: Any = serving.drafter
    bound = top.drafters[1] if after_copies else top
    checked = 0
    original = bound.draft

    def checking(states: Any, contexts: Any) -> Any:
        nonlocal checked
        made = original(states, contexts)
        for state, ctx in zip(states, contexts, strict=True):
            row, runner, text = state.row, bound.runner, bound.translate().begin(ctx)
            fresh: Any = Runner(runner.loaded)
            again = fresh.open([*row.ids, 3])
            fresh.prefill(again)
            for ours, theirs in zip(contents(runner, row), contents(fresh, again), strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
            assert state.translation.ids == text == (row.ids + row.pending)[: len(text)]
            checked += 1
        return made

    object.__setattr__(bound, "draft", checking)
    serving.resources.max_batch = 3
    found = serving.generate(TEXTS, max_new_tokens=30, temperature=temperature, seed=1)
    assert checked > 12
    assert any("copyspec" in one.stats.by_source for one in found) == after_copies


def test_the_label_of_a_bound_drafter_has_no_model(tmp_path: Path) -> None:
    """It stands in one line of a terminal."""
    folder = str(tiny.save(tmp_path))
    engine = Engine.from_pretrained(folder, drafter=f"draft_model(model='{folder}')")
    assert label(engine.drafter) == f"draft_model(model='{folder}')"
