"""`accelerate`: in every mode of `generate`, the output of plain `generate`."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
import threading
import warnings
from collections.abc import Callable
from functools import cache, partial
from itertools import dropwhile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import architectures
import tiny
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context
from draftsmith.drafters.calibration import Calibration
from draftsmith.drafters.draft_model.draft_model import DraftModel
from draftsmith.errors import OptionError
from draftsmith.integrations.transformers import (
    DraftingNotice,
    NotAcceleratedWarning,
    accelerate,
    restore,
)
from draftsmith.model.capabilities import Capabilities
from draftsmith.model.loaded import LoadedModel
from draftsmith.testing import Scripted
from faults import Raises
from scripted import Gambler, binding

QUIET = partial(warnings.catch_warnings, action="ignore", category=NotAcceleratedWarning)
PADDING = 0
IDS = {"vocab_size": 300, "pad_token_id": PADDING, "bos_token_id": 1, "eos_token_id": 2}


def oracle(result: Any) -> Scripted:
    """Knows the answer that `generate` gave, and lies in half of its drafts."""
    answer = [*dropwhile(lambda token: token == PADDING, sequences(result)[0].tolist())]

    def propose(ctx: Context) -> Draft:
        done, sampler = len(ctx.ids), random.Random(len(ctx.ids))
        guess = answer[done : done + min(8, ctx.budget)]
        if guess and sampler.random() < 0.5:
            wrong = sampler.randrange(len(guess))
            guess[wrong] = (guess[wrong] + 1) % ctx.vocab_size
        return Draft.chain(guess, "oracle")

    return Scripted(propose)


class Recorder(LogitsProcessor):
    """Stateful: its output depends on how often it was called; remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.seen.append((input_ids.shape[1], int(input_ids[0, -1])))
        scores = scores.clone()
        scores[:, len(self.seen) % 7] += 3
        return scores


class Sevens(StoppingCriteria):
    """Stops at a multiple of seven, late enough; remembers its calls."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: Any, _scores: Any, **_: Any) -> Any:
        self.seen.append(input_ids.shape[1])
        done = input_ids.shape[1] >= 60 and int(input_ids[0, -1]) % 7 == 0
        return torch.full((len(input_ids),), done, dtype=torch.bool)


class Collector(BaseStreamer):
    """Keeps what was put, piece by piece."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.ends = 0

    def put(self, value: Any) -> None:
        self.seen.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


def peaked(model: Any) -> Any:
    """Weights large enough that the best token is clearly the best."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.35)
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    padding = copy.deepcopy(tiny.tokenizer())
    padding.padding_side = "left"
    return padding


make_llama: Any = tiny.model.__wrapped__


@pytest.fixture(scope="module")
def llama() -> Any:
    return make_llama()


_START = torch.randint(3, 300, (1, 30), generator=torch.Generator().manual_seed(1))
PROMPT = torch.cat([_START, _START[:, :10]], 1)
"""(1, 40); its end repeats its beginning, so that copying hits."""
PADDED = torch.cat([torch.full((1, 5), PADDING), PROMPT], 1)


def stop_text(model: Any, tokenizer: Any) -> str:
    """The text of a whole token inside the plain answer."""
    answer = plain(model, max_new_tokens=40)[0, PROMPT.shape[1] + 12 :]
    texts = (tokenizer.decode([token]) for token in answer.tolist())
    return next(text for text in texts if len(text) > 1 and "�" not in text)


def asked_of(model: Any, *args: Any, **options: Any) -> Any:
    """The answer of `generate` as it is now, to `PROMPT` unless another one is given."""
    torch.manual_seed(5)
    given = args or "input_ids" in options
    return model.generate(*args, **options if given else {"inputs": PROMPT} | options)


def plain(model: Any, *args: Any, **options: Any) -> Any:
    assert "generate" not in vars(model)
    return asked_of(model, *args, **options)


def ours(model: Any, drafter: Any, *args: Any, budget: Any = 8, **options: Any) -> Any:
    """(result, handle) of the accelerated call; no notice, and nothing left on the model."""
    with accelerate(model, drafter, budget=budget) as handle:
        result = asked_of(model, *args, **options)
    assert handle.last_notice is None
    assert "generate" not in vars(model)
    return result, handle


def check_calls(model: Any, *calls: tuple[dict[str, Any], str | None]) -> None:
    """Calls are answered as before, accelerated or plainly for a reason; each is warned of once."""
    expected, warned = [plain(model, **options) for options, _ in calls], set[str]()
    with accelerate(model, "copyspec(gamma=1)", budget=4) as handle:
        for (options, reason), wanted in zip(calls, expected, strict=True):
            if reason and reason not in warned:
                with pytest.warns(NotAcceleratedWarning, match=reason):
                    same(asked_of(model, **options), wanted)
                warned.add(reason)
            same(asked_of(model, **options), wanted)  # a second warning would be an error
            assert (handle.stats is None) == bool(reason)
            assert (reason or "None") in str(handle.last_notice)


def sequences(result: Any) -> Any:
    return result if torch.is_tensor(result) else result.sequences


Make = Callable[[Any, Any], dict[str, Any]]
MODES: dict[str, Make] = {
    "greedy": lambda *_: {},
    "max_length": lambda *_: {"max_length": 77},
    "default config": lambda *_: {"generation_config": GenerationConfig(max_new_tokens=33)},
    "penalties": lambda *_: {
        "repetition_penalty": 1.05, "no_repeat_ngram_size": 12, "min_new_tokens": 30,
    },
    "sampling": lambda *_: {"do_sample": True, "temperature": 0.3},
    "stateful processor, sampling": lambda *_: {
        "do_sample": True, "logits_processor": LogitsProcessorList([Recorder()]),
    },
    "own length outlasts the config": lambda *_: {
        "max_new_tokens": 5, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(70)]),
    },
    "criterion": lambda *_: {"stopping_criteria": StoppingCriteriaList([Sevens()])},
    "stop string": lambda model, tokenizer: {
        "stop_strings": [stop_text(model, tokenizer)], "tokenizer": tokenizer,
    },
    "stop string as criterion": lambda model, tokenizer: {
        "stopping_criteria": StoppingCriteriaList(
            [StopStringCriteria(tokenizer, stop_text(model, tokenizer))]
        ),
    },
    "streamer": lambda *_: {"streamer": Collector()},
    "scores": lambda *_: {"return_dict_in_generate": True, "output_scores": True},
    "scores and logits": lambda *_: {
        "do_sample": True, "return_dict_in_generate": True,
        "output_scores": True, "output_logits": True,
    },
    "guidance with negative prompt": lambda *_: {
        "guidance_scale": 1.5, "negative_prompt_ids": PROMPT[:, 3:9],
    },
    "synthid": lambda *_: {
        "do_sample": True,
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3, 4], ngram_len=3),
    },
    "end token in a block": lambda model, _: {
        "eos_token_id": [2, int(plain(model, max_new_tokens=40)[0, -7])],
    },
    "one token": lambda *_: {"max_new_tokens": 1},
    "prefill in chunks": lambda *_: {"prefill_chunk_size": 16},
    "ids of 32 bits": lambda *_: {"inputs": PROMPT.int()},
    "a limit that is a tensor": lambda *_: {"max_new_tokens": torch.tensor(8)},
    "labels, which Seq2SeqTrainer passes on": lambda *_: {"labels": PROMPT},
    "padding, which processors see": lambda *_: {
        "inputs": PADDED, "attention_mask": (PADDED != PADDING).long(),
        "logits_processor": LogitsProcessorList([Recorder()]),
    },
}  # fmt: skip
BATCHES: dict[str, Make] = {
    **{name: MODES[name] for name in ("greedy", "penalties", "stop string")},
    "uneven ends": lambda model, _: {
        "eos_token_id": [2, *model.generate(**batch(), max_new_tokens=20)[:2, -1].tolist()],
    },
    "no end": lambda *_: {"eos_token_id": None},
}


def asked(make: Make, model: Any, tokenizer: Any) -> dict[str, Any]:
    """The arguments of `generate` in a mode: at most 40 new tokens, if it does not say how many."""
    options = make(model, tokenizer)
    limited = options.keys() & {"max_length", "generation_config"}
    return options if limited else {"max_new_tokens": 40} | options


def same(first: Any, second: Any) -> None:
    """Equal sequences; scores and logits equal up to what a wider pass may round differently."""
    assert sequences(first).tolist() == sequences(second).tolist()
    assert sequences(first).dtype == sequences(second).dtype
    if torch.is_tensor(first):
        assert torch.is_tensor(second)
        return
    assert type(first) is type(second)
    for name in ("scores", "logits"):
        ours, theirs = getattr(first, name), getattr(second, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), atol=1e-4, rtol=1e-4)


def observed(options: dict[str, Any]) -> list[Any]:
    """What the objects passed to `generate` saw."""
    watchers = [
        *options.get("logits_processor", ()),
        *options.get("stopping_criteria", ()),
        options.get("streamer"),
    ]
    return [(getattr(w, "seen", None), getattr(w, "ends", None)) for w in watchers]


@pytest.fixture(scope="module")
def plainly(llama: Any, tokenizer: Any) -> Callable[[str], tuple[Any, list[Any]]]:
    """What plain `generate` answers in a mode, and what the objects passed to it saw."""

    @cache
    def found(mode: str) -> tuple[Any, list[Any]]:
        options = asked(MODES[mode], llama, tokenizer)
        return plain(llama, **options), observed(options)

    return found


@pytest.mark.parametrize("drafter", ["auto", "oracle"])
@pytest.mark.parametrize("mode", MODES)
def test_mode_equals_plain_generate(
    mode: str, drafter: str, llama: Any, tokenizer: Any, plainly: Any
) -> None:
    (expected, seen), mine = plainly(mode), asked(MODES[mode], llama, tokenizer)
    chosen: Any = oracle(expected) if drafter == "oracle" else drafter
    result, handle = ours(llama, chosen, **mine)
    same(result, expected)
    assert observed(mine) == seen
    stats = handle.stats
    assert stats.tokens == sequences(result).shape[1] - mine.get("inputs", PROMPT).shape[1]
    assert stats.drafter_failures == 0
    if drafter == "oracle" and stats.tokens > 20:
        assert 0 < stats.accepted < stats.drafted
        assert stats.passes < stats.tokens


def test_stop_string_in_the_models_config(tokenizer: Any) -> None:
    model = make_llama()
    text = stop_text(model, tokenizer)
    model.generation_config.stop_strings = [text]
    before = copy.deepcopy(model.generation_config.to_dict())
    expected = plain(model, max_new_tokens=40, tokenizer=tokenizer)
    assert expected.shape[1] < 80
    result, _ = ours(model, "auto", max_new_tokens=40, tokenizer=tokenizer)
    same(result, expected)
    given = GenerationConfig(max_new_tokens=40, pad_token_id=0)
    same(ours(model, "auto", generation_config=given, tokenizer=tokenizer)[0], expected)
    with accelerate(model), pytest.raises(ValueError, match="could not locate a tokenizer"):
        model.generate(PROMPT, max_new_tokens=40)
    assert model.generation_config.to_dict() == before


def test_model_defaults_and_their_switch() -> None:
    """`use_model_defaults` exists up to transformers 4."""
    model = make_llama()
    model.generation_config.repetition_penalty = 1.3
    given = GenerationConfig(max_new_tokens=30, pad_token_id=0)
    for switch in (None, True, False):
        options: dict[str, Any] = {"generation_config": given}
        if switch is not None:
            if "use_model_defaults" not in inspect.signature(model.generate).parameters:
                continue
            options["use_model_defaults"] = switch
        same(ours(model, "auto", **options)[0], plain(model, **options))


def test_nothing_of_the_users_is_changed(llama: Any, tokenizer: Any) -> None:
    config = GenerationConfig(max_new_tokens=20, stop_strings=["zz"], pad_token_id=0)
    criteria = StoppingCriteriaList([Sevens()])
    given, own = config.to_dict(), llama.generation_config.to_dict()
    attention = llama.config._attn_implementation
    options = {"generation_config": config, "stopping_criteria": criteria, "tokenizer": tokenizer}
    same(ours(llama, "auto", **options)[0], plain(llama, **options))
    assert config.to_dict() == given
    assert llama.generation_config.to_dict() == own
    assert llama.config._attn_implementation == attention
    assert [type(c) for c in criteria] == [Sevens]


# Batches


def batch() -> dict[str, Any]:
    """Three prompts of different lengths, padded on the left."""
    lengths = (40, 23, 31)
    ids = torch.zeros((3, 40), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, 40 - length :] = PROMPT[0, row : row + 40].roll(row)[-length:]
        mask[row, 40 - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("drafter", ["auto", "oracle"])
@pytest.mark.parametrize("mode", BATCHES)
def test_batch_equals_plain_generate(mode: str, drafter: str, llama: Any, tokenizer: Any) -> None:
    options = batch() | asked(BATCHES[mode], llama, tokenizer)
    torch.manual_seed(5)
    expected = llama.generate(**options)
    # The oracle knows row 0, whose prompt has no padding.
    chosen: Any = oracle(expected) if drafter == "oracle" else drafter
    with accelerate(llama, chosen, budget=8) as handle:
        result = llama.generate(**options)
    assert handle.last_notice is None
    same(result, expected)
    assert handle.stats is not None
    assert drafter != "oracle" or handle.stats.accepted > 0


def test_sampled_batch_follows_the_distribution(llama: Any) -> None:
    """No same-seed equality (rows are drawn one by one), but the same distribution."""
    prompt, rows = PROMPT[:, :6], 600
    options = {"do_sample": True, "temperature": 2.0, "top_k": 4, "max_new_tokens": 2}
    first = plain(llama, prompt, num_return_sequences=rows, **options)[:, 6:]
    with accelerate(llama, "copyspec(gamma=1)", budget=4) as handle:
        second = llama.generate(prompt, num_return_sequences=rows, **options)[:, 6:]
    assert handle.last_notice is None
    assert second.shape == first.shape
    keys = [tuple(pair) for pair in torch.cat([first, second]).tolist()]
    for key in set(keys):
        share = [
            float((half == torch.tensor(key)).all(1).float().mean()) for half in (first, second)
        ]
        assert abs(share[0] - share[1]) < 0.11


def test_sampled_drafts_follow_the_seed(llama: Any) -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 4.0, "max_new_tokens": 30}
    q = torch.arange(llama.config.vocab_size).div(30).softmax(-1)
    with accelerate(llama, Gambler(q, width=4), budget=4) as handle:
        torch.manual_seed(3)
        runs = [llama.generate(PROMPT, **options).tolist() for _ in range(2)]
        assert handle.stats is not None
        assert 0 < handle.stats.accepted < handle.stats.drafted
        torch.manual_seed(3)
        assert [llama.generate(PROMPT, **options).tolist() for _ in range(2)] == runs
    assert runs[0] != runs[1]


# What is not accelerated


def batched(**options: Any) -> Make:
    return lambda *_: {"inputs": PROMPT.repeat(2, 1), "max_new_tokens": 12} | options


REFUSED: dict[str, tuple[str, Make]] = {
    "beams": ("beam search", lambda *_: {"num_beams": 3}),
    "assistant": ("assistant_model was given", lambda *_: {"assistant_model": make_llama()}),
    "own loop": ("custom_generate was given", lambda *_: {
        "custom_generate": lambda _model, input_ids, **_: input_ids[:, :3],
    }),
    "embeddings": ("inputs_embeds was given", lambda model, _: {
        "inputs": None, "inputs_embeds": model.get_input_embeddings()(PROMPT).detach(),
    }),
    "static cache": ("cache_implementation='static'", lambda *_: {
        "cache_implementation": "static",
    }),
    "no cache": ("use_cache=False", lambda *_: {"use_cache": False}),
    "attentions": ("output_attentions", lambda *_: {
        "output_attentions": True, "return_dict_in_generate": True,
    }),
    "mask with gaps, streamed": ("attention mask", lambda *_: {
        "attention_mask": (torch.arange(PROMPT.shape[1]) != 7)[None].long(),
        "streamer": Collector(),
    }),
    "mask of another length": ("attention mask", lambda *_: {
        "attention_mask": (torch.arange(PROMPT.shape[1] + 1) > 3)[None].long(),
    }),
    "mask of twos": ("other values", lambda *_: {"attention_mask": torch.full_like(PROMPT, 2)}),
    "mask that counts": ("other values", lambda *_: {
        "attention_mask": torch.ones_like(PROMPT).cumsum(1),
    }),
    "batch, own processor": ("Recorder may keep a state", lambda *_: batched(
        logits_processor=LogitsProcessorList([Recorder()])
    )(None, None)),
    "batch, guidance": ("UnbatchedClassifierFreeGuidance", batched(guidance_scale=1.5)),
    "batch, streamer": ("a streamer", batched(streamer=Collector())),
    "batch, scores": ("scores", batched(return_dict_in_generate=True, output_scores=True)),
    "batch, no end id": ("without an end-of-sequence", batched(eos_token_id=None, max_time=99.0)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.output_attentions=True. is not supported")
@pytest.mark.parametrize("case", REFUSED)
def test_refused_call_runs_plainly_and_warns_once(case: str, llama: Any, tokenizer: Any) -> None:
    reason, make = REFUSED[case]

    def options() -> dict[str, Any]:
        return {"inputs": PROMPT, "max_new_tokens": 12} | make(llama, tokenizer)

    theirs, mine = options(), options()
    expected = plain(llama, **theirs)
    with accelerate(llama) as handle:
        with pytest.warns(NotAcceleratedWarning, match="not accelerated") as told:
            result = asked_of(llama, **mine)
        assert [reason in str(w.message) for w in told if w.category is NotAcceleratedWarning] == [
            True
        ]
        assert reason in str(handle.last_notice)
        assert handle.stats is None
        llama.generate(**options())  # a second warning would be an error
        assert reason in str(handle.last_notice)
        llama.generate(PROMPT, max_new_tokens=5)
        assert handle.last_notice is None
    same(result, expected)
    assert observed(mine) == observed(theirs)


def test_modes_kept_in_hub_repositories_still_ask_for_them(llama: Any) -> None:
    """No network here: what matters is that the error is the original one."""
    options: dict[str, Any] = {"max_new_tokens": 5, "penalty_alpha": 0.6, "top_k": 4}
    with pytest.raises(Exception, match=r".") as theirs:
        llama.generate(PROMPT, **options)
    with accelerate(llama), pytest.raises(type(theirs.value)) as mine:
        llama.generate(PROMPT, **options)
    assert str(mine.value) == str(theirs.value)


def test_encoder_decoder_generates_as_before() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)
    model = T5ForConditionalGeneration(config).eval()
    ids = torch.arange(5, 15)[None]
    expected = model.generate(ids, max_new_tokens=8)
    with pytest.warns(NotAcceleratedWarning, match="encoder-decoder") as told:
        handle = accelerate(model)
    assert told[0].filename == __file__, "it points at the line of the caller"
    same(model.generate(ids, max_new_tokens=8), expected)
    assert "encoder-decoder" in str(handle.last_notice)
    restore(model)


def without_rewind(live: Any, _tokenizer: Any) -> LoadedModel:
    reasons = ("its state cannot be rewound",)
    return LoadedModel(live, None, Capabilities("plain", "sdpa", "none", reasons), "tiny")


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (without_rewind, "cannot be rewound"),
        (Mock(side_effect=RuntimeError("no such layer")), "no such layer"),
    ],
)
def test_a_model_that_cannot_be_loaded_generates_as_before(
    load: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_llama()
    expected = plain(model, max_new_tokens=8)
    monkeypatch.setattr("draftsmith.integrations.transformers.load", load)
    with pytest.warns(NotAcceleratedWarning, match=why):
        accelerate(model)
    same(asked_of(model, max_new_tokens=8), expected)


def test_foreign_generate_is_left_alone() -> None:
    model = make_llama()
    model.generate = foreign = lambda *_args, **_kwargs: "theirs"
    with pytest.warns(NotAcceleratedWarning, match="replaced"), accelerate(model):
        assert model.generate(PROMPT) == "theirs"
    assert model.generate is foreign


def test_training_mode(llama: Any) -> None:
    with accelerate(llama):
        llama.train()
        try:
            with pytest.warns(NotAcceleratedWarning, match="training mode"):
                llama.generate(PROMPT, max_new_tokens=3)
            with pytest.raises(OptionError, match="eval"):
                accelerate(llama)
        finally:
            llama.eval()


# The handle


def test_a_calibration_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    model = make_llama()
    model.config._name_or_path = "some/model"
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    Calibration("some/model", layers, heads, 1, (), {}, {}, prompts=7, tokens=9).save()
    with pytest.warns(DraftingNotice, match="layer 1 from its calibration on 7 prompts"):
        accelerate(model, "pld_plus")
    accelerate(model, "pld_plus(layer=2)")


def test_it_looks_like_generate_and_can_be_taken_back(llama: Any) -> None:
    before, signature = torch.get_rng_state(), inspect.signature(llama.generate)
    first = accelerate(llama, "none")
    second = accelerate(llama, "auto")
    assert torch.equal(torch.get_rng_state(), before)
    assert inspect.signature(llama.generate) == signature
    assert llama.generate.__doc__ == type(llama).generate.__doc__
    first.restore()  # no longer in force: changes nothing
    assert vars(llama)["generate"] is second
    restore(llama)
    restore(llama)
    assert "generate" not in vars(llama)


def test_positional_arguments(llama: Any) -> None:
    arguments = (PROMPT, GenerationConfig(max_new_tokens=9), LogitsProcessorList([Recorder()]))
    expected = plain(llama, *copy.deepcopy(arguments))
    same(ours(llama, "auto", *copy.deepcopy(arguments))[0], expected)


# Interruptions and neighbours


def test_interrupted_model_stays_usable(llama: Any) -> None:
    interrupts = Raises(KeyboardInterrupt("enough"), 11)
    expected = plain(llama, max_new_tokens=40)
    with accelerate(llama, oracle(expected), budget=8) as handle:
        with pytest.raises(KeyboardInterrupt, match="enough"):
            llama.generate(PROMPT, max_new_tokens=40, logits_processor=[interrupts])
        same(llama.generate(PROMPT, max_new_tokens=40), expected)
        assert handle.stats is not None
        assert handle.stats.accepted > 0
    same(plain(llama, max_new_tokens=40), expected)


# Around generate


def test_pipeline(llama: Any, tokenizer: Any) -> None:
    def texts() -> Any:
        pipe = pipeline("text-generation", model=llama, tokenizer=tokenizer, device="cpu")
        one = pipe("the quick brown fox jumps. the quick", max_new_tokens=20, do_sample=False)
        two = pipe(
            ["def foo(x): return x", "the quick"],
            max_new_tokens=10,
            do_sample=False,
            batch_size=2,
        )
        return one, two

    expected = texts()
    with accelerate(llama, "copyspec(gamma=1)", budget=4) as handle:
        assert texts() == expected
        assert handle.last_notice is None
        assert handle.stats is not None


def with_adapter(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    made = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    return made


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize(
    "wrap", [with_adapter, partial(torch.compile, backend="eager")], ids=["adapter", "compiled"]
)
def test_a_model_in_another_one_runs_as_its_generate_does(wrap: Any) -> None:
    model = make_llama()
    whole = wrap(model)
    options = {"input_ids": PROMPT, "max_new_tokens": 30}
    expected = plain(whole, **options)
    result, handle = ours(whole, oracle(expected), **options)
    same(result, expected)
    assert handle.stats.accepted > 0
    assert "generate" not in vars(model)


def test_attention_that_is_exchanged_later_is_noticed(llama: Any) -> None:
    AttentionInterface.register(
        "theirs", lambda *args, **more: sdpa_attention_forward(*args, **more)
    )
    model = copy.deepcopy(llama)
    with accelerate(model) as handle:
        model.generate(PROMPT, max_new_tokens=4, do_sample=False)
        assert handle.last_notice is None
        model.set_attn_implementation("theirs")
        with pytest.warns(NotAcceleratedWarning, match="attention is 'theirs' now"):
            model.generate(PROMPT, max_new_tokens=4, do_sample=False)


@pytest.mark.slow
def test_double_precision(llama: Any) -> None:
    """`generate` rounds logits to single precision before anything else; so do we."""
    model = copy.deepcopy(llama).double()
    for options in ({"do_sample": True}, {"repetition_penalty": 1.1}):
        expected = plain(model, max_new_tokens=30, **options)
        result, _ = ours(model, oracle(expected), max_new_tokens=30, **options)
        same(result, expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.filterwarnings("ignore::draftsmith.integrations.transformers.DraftingNotice")
def test_a_copy_of_a_model_is_run_itself(duplicate: Callable[[Any], Any], tokenizer: Any) -> None:
    model = make_llama()
    expected = plain(model, max_new_tokens=12)
    drafter = DraftModel(make_llama(), tokenizer=tokenizer)
    accelerate(model, drafter, tokenizer=tokenizer, budget=4)
    for _ in range(2):  # before and after a call
        double = duplicate(model)
        same(double.generate(PROMPT, max_new_tokens=12), expected)
        assert double.generate.stats.accepted > 0
        with torch.no_grad():
            double.lm_head.weight.copy_(double.lm_head.weight.roll(1, 0))
        changed = double.generate(PROMPT, max_new_tokens=12)
        assert changed.tolist() != expected.tolist()
        same(model.generate(PROMPT, max_new_tokens=12), expected)
        restore(double)
        same(changed, double.generate(PROMPT, max_new_tokens=12))


def test_a_misspelt_option_is_answered_by_generate_alone() -> None:
    model = make_llama()
    with accelerate(model, "copyspec(gamma=1)", budget=4) as handle:
        with pytest.raises(ValueError, match="do_sampl"):  # warnings are errors here
            model.generate(PROMPT, max_new_tokens=3, do_sampl=True)
        assert handle.stats is None


@pytest.mark.parametrize("what", ["a call", "a first call", "accelerate"])
def test_e4_a_model_waits_for_no_other_models_drafter(what: str) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def load_slowly() -> None:
        begun.set()
        go_on.wait(60)

    slow = binding(load_slowly)
    ours, theirs = make_llama(), make_llama()
    if what != "accelerate":
        accelerate(ours, "copyspec(gamma=1)", budget=4)
    if what == "a call":
        ours.generate(PROMPT, max_new_tokens=1)
    thread = threading.Thread(target=accelerate, args=(theirs, slow))
    asked = partial(ours.generate, PROMPT, max_new_tokens=5)
    call = threading.Thread(target=partial(accelerate, ours) if what == "accelerate" else asked)
    thread.start()
    try:
        assert begun.wait(60)
        call.start()
        call.join(30)
        waits = call.is_alive()
    finally:
        go_on.set()
        thread.join()
        call.join()
    assert not waits


# What `generate` computes otherwise than the model alone


def decoder(name: str) -> Any:
    """A decoder that takes positions from slots, padding included."""
    sizes = {"d_model": 32, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64}
    for part in ("decoder", "encoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 4}
    if name == "roformer":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
        sizes |= {"num_hidden_layers": 2}
    options = IDS | sizes | {"is_decoder": True, "max_position_embeddings": 128}
    config = CONFIG_MAPPING[name](**options)
    config.is_encoder_decoder = False
    torch.manual_seed(0)
    return peaked(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("name", ["bart", "roformer"])
def test_padding_that_shifts_positions(name: str) -> None:
    options = {"max_new_tokens": 20}
    check_calls(
        decoder(name), (batch() | options, "depends on the padding before it"), (options, None)
    )


@pytest.mark.parametrize("name", ["opt", "bloom", "falcon_h1"])
def test_padding_that_shifts_nothing_is_accelerated(name: str) -> None:
    model = architectures.build(name)
    if transformers.__version__.startswith("4.") and name == "falcon_h1":
        pytest.skip("transformers 4 keeps its state in a layout that cannot be put back")
    ids = torch.tensor([architectures.prompt(20), [0] * 6 + architectures.prompt(14)])
    check_calls(
        model,
        ({"input_ids": ids, "attention_mask": ids.ne(0).long(), "max_new_tokens": 8}, None),
    )


@pytest.mark.filterwarnings("ignore:.*Use .cache. instead:FutureWarning")
@pytest.mark.filterwarnings("ignore::draftsmith.integrations.transformers.NotAcceleratedWarning")
@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params"])
def test_n1_a_users_own_cache_keeps_its_meaning(name: str, llama: Any) -> None:
    """Two turns that share a cache, by the name of this version or of another one."""

    def talk() -> Any:
        own, ids = DynamicCache(), PROMPT
        try:
            for _ in range(2):
                ids = llama.generate(ids, max_new_tokens=6, do_sample=False, **{name: own})
        except ValueError as error:  # a name that this version does not know
            return str(error)
        return ids.tolist(), own.get_seq_length()

    expected = talk()
    with accelerate(llama) as handle:
        assert talk() == expected
        assert handle.stats is None


@pytest.mark.filterwarnings("ignore:.*Use .cache. instead:FutureWarning")
def test_the_cache_of_a_result_cannot_be_continued(llama: Any) -> None:
    """It is None, so the next turn alone would forget the chat."""
    turn = torch.tensor([[7, 8, 9]])
    asked = {"past_key_values": None, "max_new_tokens": 6}
    with accelerate(llama):
        result = llama.generate(PROMPT, return_dict_in_generate=True, max_new_tokens=6)
        mask = torch.ones((1, result.sequences.shape[1] + 3), dtype=torch.long)
        with pytest.raises(OptionError, match="pass all ids of the chat"):
            llama.generate(turn, attention_mask=mask, **asked)
        with pytest.raises(OptionError, match="cache is None"):
            llama.generate(turn, attention_mask=mask, cache=None)
        whole = llama.generate(turn, attention_mask=mask[:, :3], **asked)
    same(whole, llama.generate(turn, max_new_tokens=6))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_batch_has_the_angles_of_its_longest_row(kind: str) -> None:
    if kind == "dynamic":
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
        model = architectures.build("llama", max_position_embeddings=50, rope_scaling=rope)
    else:
        factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
        model = architectures.build(
            "phi3", original_max_position_embeddings=50, rope_scaling={"type": kind} | factors
        )
    ids = torch.tensor([architectures.prompt(40), [0] * 17 + architectures.prompt(23)])
    batch = {"input_ids": ids, "attention_mask": ids.ne(0).long(), "max_new_tokens": 30}
    alone = {name: batch[name][1:] for name in ("input_ids", "attention_mask")}
    check_calls(
        peaked(model),
        (batch, "longest row"),
        (batch | alone, "longest row"),
        ({"input_ids": ids[:1], "max_new_tokens": 30}, None),
        (batch | {"max_new_tokens": 9}, None),  # it does not get there
    )


def test_queries_that_are_scaled_by_their_place_in_a_padded_row(llama: Any) -> None:
    """Inkling's floor may be longer than the passes that are compared, so it is known by name."""
    model = copy.deepcopy(llama)
    model.config.log_scaling_n_floor = 128
    one = {"input_ids": batch()["input_ids"][:1], "max_new_tokens": 8}
    check_calls(model, (batch() | {"max_new_tokens": 8}, "log_scaling_n_floor"), (one, None))


STEERING = torch.randn(64, generator=torch.Generator().manual_seed(3))


def test_hooks_that_are_added_later_see_the_passes_of_generate(llama: Any) -> None:
    """One that reads the place in a pass, near or far, would read another one in ours."""
    model, prompt = copy.deepcopy(llama), torch.tensor([architectures.prompt(300)])
    widths = list[int]()

    def steer(place: Any, _module: Any, _inputs: Any, hidden: Any) -> Any:
        widths.append(hidden.shape[1])
        hidden = hidden.clone()
        hidden[:, place] += STEERING
        return hidden

    with accelerate(model, "copyspec(gamma=1)", budget=4) as handle:
        before = model.generate(prompt, max_new_tokens=20)
        for place in (-1, slice(-30, None), slice(None)):
            hook = model.model.norm.register_forward_hook(partial(steer, place))
            expected = handle.original(prompt, max_new_tokens=20)
            assert expected.tolist() != before.tolist()
            seen = [*widths]
            widths.clear()
            with QUIET():
                same(model.generate(prompt, max_new_tokens=20), expected)
            assert "hooks were added" in str(handle.last_notice)
            assert widths == seen
            widths.clear()
            hook.remove()
        same(model.generate(prompt, max_new_tokens=20), before)
        assert handle.stats is not None


@pytest.mark.parametrize("how", ["class", "forward", "block", "everywhere"])
def test_what_is_exchanged_later_is_measured(how: str, llama: Any) -> None:
    """A class, a method or a block that reads the place in a pass; and one that does not."""
    model = copy.deepcopy(llama)
    norm, place = model.model.norm, slice(None) if how == "everywhere" else slice(-1, None)
    kind = type(norm)

    class Steered(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Any) -> Any:
            x = kind.forward(self, x).clone()
            x[:, place] += STEERING
            return x

    with accelerate(model, "copyspec(gamma=1)", budget=4) as handle:
        before = model.generate(PROMPT, max_new_tokens=20)
        if how == "forward":
            norm.forward = partial(Steered.forward, norm)
        elif how == "block":
            model.model.norm = copy.deepcopy(norm)
            model.model.norm.__class__ = Steered
        else:
            norm.__class__ = Steered
        expected = handle.original(PROMPT, max_new_tokens=20)
        assert expected.tolist() != before.tolist()
        with QUIET():
            same(model.generate(PROMPT, max_new_tokens=20), expected)
        assert (handle.stats is None) == (how != "everywhere")


@pytest.mark.parametrize("prepares", [False, True])
def test_angles_that_change_within_an_answer(prepares: bool) -> None:
    """longrope in a class that keeps the keys of the prompt, which have the other angles.

    Also if it prepares its inputs itself, as Phi-4's multimodal one does.
    """
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0 + n for n in range(8)]}
    rope = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32}
    settings = {"max_position_embeddings": 128, "rope_scaling": rope | factors}
    model = peaked(architectures.build("llama", **settings))
    if prepares:

        class Own(type(model)):  # type: ignore[misc]
            def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
                return super().prepare_inputs_for_generation(*args, **kwargs)

        model.__class__ = Own
    calls = [
        ({"input_ids": torch.tensor([architectures.prompt(length)]), "max_new_tokens": new}, reason)
        for length, new, reason in (
            (26, 20, "change within the answer"), (20, 6, None), (40, 20, None)
        )
    ]  # fmt: skip
    check_calls(model, *calls)


@pytest.mark.parametrize("by", [0, 5])
@pytest.mark.parametrize(
    "method", ["prepare_inputs_for_generation", "_update_model_kwargs_for_generation"]
)
def test_a_class_that_prepares_its_passes_is_measured(method: str, by: int) -> None:
    """Remote code may prepare its inputs in its own way; `by` 0 makes no difference."""
    model = peaked(architectures.build("gpt2", vocab_size=300))

    def shifted(self: Any, *args: Any, **options: Any) -> Any:
        made = getattr(super(own, self), method)(*args, **options)
        for name in ("position_ids", "cache_position"):
            if made.get(name) is not None:
                made[name] = made[name] + by
        return made

    own: Any = type("Own", (type(model),), {method: shifted})
    model.__class__ = own
    unread = transformers.__version__.startswith("4.") and method.startswith("_update")
    changes = by and not unread  # transformers 4 has these positions from the mask
    check_calls(model, ({"max_new_tokens": 20}, "another method" if changes else None))


def test_a_pickled_method_is_the_copys_own() -> None:
    llama = make_llama()
    expected = plain(llama, max_new_tokens=8)
    with accelerate(llama):
        bound = pickle.loads(pickle.dumps(llama.generate))
        both = pickle.loads(pickle.dumps({"f": llama.generate, "m": llama}))
    for generate in (bound, both["f"], both["m"].generate):
        same(generate(PROMPT, max_new_tokens=8, do_sample=False), expected)
    both["m"].generate.restore()
    same(both["m"].generate(PROMPT, max_new_tokens=8, do_sample=False), expected)


def test_a_streamer_comes_before_or_behind_the_criteria_as_in_generate(llama: Any) -> None:
    def order(model: Any) -> list[str]:
        calls = list[str]()

        class Streamer:
            def put(self, _tokens: Any) -> None:
                calls.append("put")

            def end(self) -> None:
                calls.append("end")

        def judge(ids: Any, _scores: Any, **_: Any) -> Any:
            calls.append("judge")
            return torch.zeros(len(ids), dtype=torch.bool)

        criteria = StoppingCriteriaList([judge])
        given = {"streamer": Streamer(), "stopping_criteria": criteria}
        model.generate(PROMPT, max_new_tokens=6, do_sample=False, **given)
        return calls

    expected = order(llama)
    with accelerate(llama):
        assert order(llama) == expected


def test_a_criterion_that_generates_runs_plainly(llama: Any) -> None:
    def judge(ids: Any, _scores: Any, **_: Any) -> Any:
        verdict = llama.generate(ids, max_new_tokens=2, do_sample=False)
        return torch.full((1,), int(verdict[0, -1]) % 7 == 0)

    options = {"max_new_tokens": 20, "stopping_criteria": StoppingCriteriaList([judge])}
    expected = plain(llama, **options)
    with accelerate(llama, "copyspec(gamma=1)", budget=4) as handle:
        with pytest.warns(NotAcceleratedWarning, match="a callback of a running call"):
            same(llama.generate(PROMPT, **options), expected)
        assert handle.stats is not None


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_soft_prompts_are_not_dropped(kind: str) -> None:
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=6)
    model = peft.get_peft_model(make_llama(), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "prompt_encoder" in name:
                parameter.normal_(0, 0.7)
    options = {"input_ids": PROMPT, "max_new_tokens": 20}
    architectures.skip_lost_prefix(model)
    expected = model.generate(**options)
    assert expected.tolist() != model.get_base_model().generate(**options).tolist()
    check_calls(model, (options, "soft prompts"))
    with accelerate(model, "copyspec(gamma=1)", budget=4), model.disable_adapter(), QUIET():
        without = model.generate(**options)
    with model.disable_adapter():
        same(without, model.generate(**options))


@pytest.mark.parametrize("min_p", [0.2, 1.0])
def test_drafters_are_told_what_tokens_are_drawn_from(min_p: float) -> None:
    """A draft model draws from what the processors leave of its own distribution."""
    told = []
    drafter = Scripted(lambda ctx: told.append(ctx.sampling) or Draft())  # type: ignore[func-returns-value]
    options: dict[str, Any] = {"top_k": 7, "top_p": 0.9, "temperature": 0.5, "min_p": min_p}
    model = copy.deepcopy(tiny.model())
    with accelerate(model, drafter, budget=2):
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=True, **options)
    assert {name: getattr(told[0], name) for name in options} == pytest.approx(options)
