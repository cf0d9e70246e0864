"""What fails is told to whoever asked, by every way of asking, and never passed over."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Sequence
from functools import partial
from itertools import count, cycle
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub.errors import GatedRepoError

import tiny
from architectures import build, prompt
from command import call
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, DrafterState
from draftsmith.core.target import ModelFacts
from draftsmith.drafters.sdsat import SDSAT
from draftsmith.engine.call import Call
from draftsmith.engine.engine import Engine
from draftsmith.errors import (
    DraftsmithError,
    GenerationInterrupted,
    LoadError,
    OptionError,
    UnknownName,
    UnsupportedError,
    WriteError,
)
from draftsmith.integrations.transformers import DraftingNotice, accelerate
from draftsmith.model import adaptive
from draftsmith.model.runner import Runner
from draftsmith.testing import Scripted
from failed_passes import FAILED_PASSES
from faults import Raises
from tiers import slow_after

PROMPT = [{"role": "user", "content": "the quick brown fox " * 3}]
NEW = 12

# --- E1: streams and chats raise what generate raises ---------------------------------------------


def generate(engine: Engine, prompt: Any, **options: Any) -> Any:
    return engine.generate(prompt, **options)


def stream_in_context(engine: Engine, prompt: Any, **options: Any) -> Any:
    with engine.stream(prompt, **options) as pieces:
        return [*pieces]


ENTRIES: dict[str, Any] = {
    "stream": lambda engine, prompt, **options: [*engine.stream(prompt, **options)],
    "stream in context": stream_in_context,
    "submit": lambda engine, prompt, **options: engine.submit(prompt, **options).result(),
    "submit, read": lambda engine, prompt, **options: [*engine.submit(prompt, **options)],
    "chat.send": lambda engine, prompt, **options: engine.chat(**options).send(
        prompt[0]["content"]
    ),
    "chat.stream": lambda engine, prompt, **options: (
        [*engine.chat().stream(prompt[0]["content"], **options)]
    ),
}


ERRORS: list[Exception] = [
    ValueError("a value does not fit"),
    OptionError("an option does not fit"),
    UnsupportedError("this cannot be done"),
    StopIteration("at its end"),
]


def engine_of(**options: Any) -> Engine:
    """An engine over a model of its own, which a test may change."""
    model = copy.deepcopy(tiny.model())
    return Engine.from_pretrained(model, tokenizer=copy.copy(tiny.tokenizer()), **options)


def raised(entry: Any, engine: Engine, prompt: Any, **options: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  any kind is asked for
        entry(engine, prompt, **options)
    return caught.value


def same(error: Exception, expected: Exception) -> None:
    """Assert that two ways of asking raise alike, causes included."""
    assert type(error) is type(expected)
    assert str(error) == str(expected)
    if isinstance(expected, GenerationInterrupted) and isinstance(error, GenerationInterrupted):
        assert type(error.__cause__) is type(expected.__cause__)
        assert error.partial[0].tokens == expected.partial[0].tokens
        assert error.partial[0].finish_reason == expected.partial[0].finish_reason


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer(), drafter="none")


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize("when", [1, 5])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_e1_a_processors_error_is_raised(
    engine: Engine, error: Exception, when: int, entry: Any
) -> None:
    def asked(entry: Any) -> Exception:
        fails = Raises(error, when)
        return raised(entry, engine, PROMPT, processors=fails, max_new_tokens=NEW)

    expected = asked(generate)
    assert when == 1 or isinstance(expected, GenerationInterrupted)
    same(asked(entry), expected)


class Refuses(Scripted):
    """A drafter with options that do not fit."""

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        raise OptionError("gamma")


def breaks_its_head(engine: Engine) -> None:
    fails = Mock(side_effect=ValueError("the layer does not fit"))
    engine.model.model.get_output_embeddings().register_forward_hook(fails)


def breaks_its_text(engine: Engine, most: int) -> None:
    """Let decoding fail; with a stop string `generate` decodes while tokens come, as streams do."""
    own, decodings = engine.model.tokenizer.decode, count(1)

    def decode(*given: Any, **named: Any) -> Any:
        if next(decodings) > most:
            raise ValueError("no such character")
        return own(*given, **named)

    engine.model.tokenizer.decode = decode


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], Any, str]] = {
    "memory": ({"memory": 20_000}, {"max_new_tokens": 200}, None, "memory=20,000"),
    "layer": ({"drafter": "none"}, {}, breaks_its_head, "the layer does not fit"),
    "layer, with drafts": (
        {"drafter": "copyspec(gamma=1)"}, {}, breaks_its_head, "the layer does not fit",
    ),
    "drafter": ({"drafter": Refuses(lambda _: EMPTY), "budget": 3}, {}, None, "gamma"),
    "text": ({}, {"stop": "\0never"}, partial(breaks_its_text, most=4), "no such character"),
    "later text": ({}, {"stop": "\0never"}, partial(breaks_its_text, most=20), "no such character"),
}  # fmt: skip
"""Options of the engine and of the call, what is broken, and what the error says."""


PAIRS = [(fault, ([*ENTRIES] * 2)[n + m]) for m in range(6) for n, fault in enumerate(FAULTS)]
"""Each fault with each entry; the first six have every fault and every entry once."""


@pytest.mark.failing_passes
@pytest.mark.parametrize(("fault", "entry"), slow_after(len(FAULTS), PAIRS))
def test_e1_what_generate_raises_is_raised(fault: str, entry: str) -> None:
    options, asked, breaks, said = FAULTS[fault]
    prompt = [{"role": "user", "content": "the quick brown fox " * (60 if asked else 3)}]

    def found(entry: Any) -> Exception:
        engine = engine_of(**{"drafter": "none", "prefixes": 0} | options)
        if breaks is not None:
            breaks(engine)
        return raised(entry, engine, prompt, **{"max_new_tokens": NEW} | asked)

    expected, error = found(generate), found(ENTRIES[entry])
    assert said in str(error)
    if "text" in fault:  # a stream may decode another number of times
        assert type(error) is type(expected)
    else:
        same(error, expected)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("read", [0, 3])
def test_e1_a_model_put_into_training_mode_after_stream_is_reported(read: int, chat: bool) -> None:
    engine = engine_of(drafter="none")
    asks = engine.chat().stream if chat else engine.stream
    pieces = asks("the quick brown fox", max_new_tokens=NEW)
    for _ in range(read):
        next(pieces)
    engine.model.model.train()
    with pytest.raises(GenerationInterrupted if read else OptionError, match="training mode"):
        list(pieces)
    assert len(pieces.result.tokens) == read
    for ask in (engine.generate, engine.stream, engine.submit):
        with pytest.raises(OptionError, match=r"training mode.*model\.eval\(\)"):
            ask("the quick brown fox")
    engine.model.model.eval()
    assert len(engine.generate("the quick brown fox", max_new_tokens=4).tokens) == 4


@pytest.mark.parametrize("when", [1, 5])
@pytest.mark.parametrize("what", ["processor", "stop rule", "streamer"])
def test_e1_an_accelerated_model_raises_what_callbacks_raise(what: str, when: int) -> None:
    model, error = copy.deepcopy(tiny.model()), ValueError("a value does not fit")

    def asked() -> Exception:
        own = Raises(error, when + (what == "streamer"))  # a streamer is given the prompt, too
        streamer = SimpleNamespace(put=lambda ids: own(ids, ids), end=lambda: None)
        option: dict[str, Any] = {
            "processor": {"logits_processor": [own]},
            "stop rule": {"stopping_criteria": [lambda ids, _: own(ids, ids).sum(-1) < 0]},
            "streamer": {"streamer": streamer},
        }[what]
        with pytest.raises(type(error)) as caught:
            model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=NEW, **option)
        return caught.value

    plainly = asked()
    with accelerate(model, "copyspec(gamma=1)"):
        assert asked() is plainly is error


def test_e1_a_stream_that_failed_ends_and_its_engine_serves(engine: Engine) -> None:
    pieces = engine.stream(PROMPT, processors=Raises(ValueError("once"), 1), max_new_tokens=4)
    with pytest.raises(ValueError, match="once"):
        next(pieces)
    assert pieces.closed
    assert list(pieces) == []
    assert pieces.result.finish_reason == "error"
    assert len(engine.generate(PROMPT, max_new_tokens=4).tokens) == 4


def test_e1_the_commands_say_what_failed(tmp_path: Any) -> None:
    model = copy.deepcopy(tiny.model())
    model.config.max_position_embeddings = 10**12
    model.generation_config.max_length = None
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    much = ("-m", tmp_path, "--max-new-tokens", 10**11, "-d", "none")
    done = call("run", *much, "the quick brown fox")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "Error: this request" in done.stderr
    assert "memory" in done.stderr
    told = json.loads(call("run", *much, "--json", "the quick brown fox").stdout)
    assert "memory" in told["error"]
    done = call("chat", *much, stdin="the quick brown fox\n")
    assert "Error: this request" in done.stderr
    assert done.stdout.strip() == ""


# --- E2: passes that fail and are repeated --------------------------------------------------------

COPIES = "the quick brown fox jumps over the lazy dog " * 3
WRONG = 7
"""A token that no prompt and no answer here has."""


def wrong(ctx: Context) -> Draft:
    return Draft.chain([WRONG][: ctx.budget], "scripted")


def break_drafts(model: Any, errors: Sequence[Exception]) -> None:
    """Let passes of one sequence fail that carry drafts, or of several that draft `WRONG`.

    With several errors, one after the other.
    """
    left = cycle(errors)

    def fails(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        ids = given["input_ids"]
        alone = ids.shape[1] > 1 and int(given["position_ids"].min()) > 0
        if bool((ids == WRONG).any()) or (alone and getattr(model, "serves_one", False)):
            raise next(left)

    model.register_forward_pre_hook(fails, with_kwargs=True)


def failing_engine(*errors: Exception, **options: Any) -> Engine:
    engine = engine_of(**{"drafter": Scripted(wrong), "budget": 2, "prefixes": 0} | options)
    break_drafts(engine.model.model, errors or [RuntimeError("no mask")])
    return engine


def told_once(notices: Any, text: str) -> str:
    """The one notice that names an error."""
    (notice,) = (one for one in notices if text in one)
    return str(notice)


def break_logits(model: Any) -> None:
    """Let passes that draft `WRONG` give NaN."""
    wide = []

    def watch(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        wide[:] = [bool((given["input_ids"] == WRONG).any())]

    model.register_forward_pre_hook(watch, with_kwargs=True)
    model.get_output_embeddings().register_forward_hook(
        lambda _module, _args, logits: logits * torch.nan if wide[0] else logits
    )


@pytest.mark.failing_passes
def test_a_recurrent_state_that_could_not_be_restored_is_restored_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading the prefix again fails, too, as it does where there is no memory."""
    engine = Engine(build("falcon_h1", eos_token_id=None), drafter="none", prefixes=0)
    if engine.model.capabilities.shape != "chain":
        pytest.skip("; ".join(engine.model.capabilities.reasons))
    ids = prompt(140)
    monkeypatch.setattr("draftsmith.model.runner._CHUNK_CPU", 50)
    plain = engine.generate(ids, max_new_tokens=8).tokens
    passes = 0

    def fails(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes in (2, 3):
            raise torch.OutOfMemoryError("no room for this")

    hook = engine.model.model.register_forward_pre_hook(fails)
    answer = engine.generate(ids, max_new_tokens=8)
    hook.remove()
    assert answer.tokens == plain
    assert answer.stats.failed_passes == 2


def break_long_parts(model: Any) -> None:
    """Let passes fail that read more than sixteen tokens of a prompt."""

    def fails(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        if given["input_ids"].shape[1] > 16:
            raise torch.OutOfMemoryError("no room for this")

    model.register_forward_pre_hook(fails, with_kwargs=True)


@pytest.mark.failing_passes
@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        *((partial(break_drafts, errors=[kind("no mask")]), f"{kind.__name__}: no mask")
          for kind in (RuntimeError, FutureWarning, torch.OutOfMemoryError, AssertionError)),
        (break_logits, "not finite"),
        (break_long_parts, "part of the prompt failed and was repeated with a smaller part (OutOf"),
    ],
)  # fmt: skip
def test_e2_a_pass_that_fails_is_repeated_counted_and_told(breaks: Any, said: str) -> None:
    engine = engine_of(drafter=Scripted(wrong), budget=2, prefixes=0)
    plain = engine.generate(COPIES, drafter="none", max_new_tokens=20)
    assert plain.stats.failed_passes == 0
    assert plain.notices == ()
    breaks(engine.model.model)
    result = engine.generate(COPIES, max_new_tokens=20)
    assert result.tokens == plain.tokens
    assert result.stats.as_dict()["failed_passes"] == result.stats.failed_passes > 0
    told_once(result.notices, said)
    assert FAILED_PASSES


@pytest.mark.failing_passes
def test_e2_each_kind_of_error_is_reported_once() -> None:
    engine = failing_engine(RuntimeError("one"), RuntimeError("another"), ValueError("a value"))
    result = engine.generate(COPIES, max_new_tokens=20)
    assert result.stats.failed_passes > 3
    told_once(result.notices, "one")
    told_once(result.notices, "a value")
    assert len(result.notices) == 2


@pytest.mark.failing_passes
def test_e2_only_answers_that_had_a_draft_count_it() -> None:
    engine = failing_engine()
    request = engine.prepare({"max_new_tokens": 12})
    drafted = request.sequences([COPIES])[0]
    plain = engine.prepare({"max_new_tokens": 12, "drafter": "none"}).sequences([COPIES])[0]
    with Call(engine.resources, [plain, drafted]) as both:
        both.run()
    assert plain.result().tokens == drafted.result().tokens
    assert drafted.result().stats.failed_passes > 0
    assert plain.result().stats.failed_passes == 0
    assert plain.result().notices == ()


@pytest.mark.failing_passes
def test_e2_an_accelerated_model_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, errors, forward = copy.deepcopy(tiny.model()), [RuntimeError("no mask")], Runner.forward

    def broken(self: Runner, rows: Any, drafts: Any, take: Any = None) -> Any:
        if any(drafts) and errors:
            raise errors.pop()
        return forward(self, rows, drafts, take)

    ids = torch.tensor([tiny.tokenizer()(COPIES)["input_ids"]])
    plain = model.generate(ids, max_new_tokens=12)
    with accelerate(model, Scripted(wrong), budget=4) as handle:
        monkeypatch.setattr(Runner, "forward", broken)
        with pytest.warns(DraftingNotice, match="no mask") as told:
            assert torch.equal(model.generate(ids, max_new_tokens=12), plain)
        assert len(told) == 1
        assert handle.stats is not None
        assert handle.stats.failed_passes > 0
        errors.append(RuntimeError("no mask"))
        assert torch.equal(model.generate(ids, max_new_tokens=12), plain)
        assert handle.stats.failed_passes > 0


@pytest.mark.failing_passes
def test_e2_the_command_notes_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save(tmp_path)
    load = Engine.from_pretrained.__func__  # type: ignore[attr-defined]

    def broken(cls: Any, *given: Any, **named: Any) -> Engine:
        engine: Engine = load(cls, *given, **named)
        break_drafts(engine.model.model, [RuntimeError("no mask")])
        engine.model.model.serves_one = True
        return engine

    monkeypatch.setattr(Engine, "from_pretrained", classmethod(broken))
    drafted = ("run", "-m", tmp_path, "--max-new-tokens", 60, "-d", "copyspec(gamma=1)")
    asked = (*drafted, "--budget", 4, "--dtype", "float32", COPIES)
    assert call(*asked).stderr.count("no mask") == 1
    record = json.loads(call(*asked, "--json").stdout)
    assert record["answers"][0]["stats"]["failed_passes"] > 0
    told_once(record["notices"], "no mask")


def test_e2_drafting_that_fails_for_several_answers_at_once_is_reported() -> None:
    class Alone(Scripted):
        def draft(self, states: Any, contexts: Any) -> Any:
            if len(states) > 1:
                raise RuntimeError("one at a time")
            return super().draft(states, contexts)

    engine = engine_of(drafter=Alone(lambda _: EMPTY), budget=3)
    found = engine.generate([COPIES, COPIES[4:]], max_new_tokens=8)
    for result in found:
        assert result.stats.drafter_failures > 0
        told_once(result.notices, "one at a time")


# --- nothing fails silently -----------------------------------------------------------------------


@pytest.mark.parametrize("gated", [False, True])
def test_a_hub_that_does_not_answer_is_no_model_without_adaptive_tokens(
    gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> str:
        raise OSError("the hub does not answer") from (
            GatedRepoError("gated", response=Mock()) if gated else ConnectionError()
        )

    monkeypatch.setattr(adaptive, "cached_file", refuses)
    facts = ModelFacts(layers=2, heads=2, name="someone/model")
    with pytest.raises(LoadError, match="the hub does not answer"):
        SDSAT(k=2).bind(facts)


def test_a_name_that_is_no_hub_id_has_no_adaptive_tokens() -> None:
    for name in ("no such folder", "some/where/else.gguf"):
        with pytest.raises(UnsupportedError, match="not trained with"):
            SDSAT(k=2).bind(ModelFacts(layers=2, heads=2, name=name))


@pytest.mark.parametrize("error", [
    GenerationInterrupted("cut", [1]), UnknownName("option", "tempreture", ["temperature"]),
    OptionError("wrong"), WriteError("full"),
])  # fmt: skip
def test_errors_pass_through_pickle_and_copy(error: DraftsmithError) -> None:
    for made in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(made) is type(error)
        assert (str(made), made.args, vars(made)) == (str(error), error.args, vars(error))
