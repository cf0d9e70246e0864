"""Passes with our attention, beside which the model stays the user's."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from architectures import TREES, build, prompt
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.target import Needs
from draftsmith.engine.engine import Engine
from draftsmith.errors import UnsupportedError
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.registered import NAME, configurations, our_attention, own_name
from draftsmith.model.runner import Runner
from replica import fresh
from tiers import slow_after

IDS = torch.tensor([prompt(9)])


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model(input_ids=IDS).logits
    return out


def ours(loaded: LoadedModel) -> Tensor:
    """(V,) logits after `IDS`, by passes of our own over a prompt and a draft."""
    runner, ids = Runner(loaded), IDS[0].tolist()
    row = runner.open(ids[:4])
    runner.forward([row], [Draft.chain(ids[4:7], "test")])
    runner.commit([row], [range(3)], [ids[4:]])
    return runner.forward([row], [EMPTY])[0].logits[0].clone()


def check(loaded: LoadedModel) -> Tensor:
    found = ours(loaded)
    torch.testing.assert_close(found, fresh(loaded.model, IDS[0].tolist()), rtol=0, atol=1e-5)
    return found


@pytest.mark.parametrize("own", ["eager", "sdpa"])
@pytest.mark.parametrize("name", TREES)
def test_whoever_calls_a_model_during_our_passes_gets_its_own_attention(
    name: str, own: str
) -> None:
    """As they would from another thread: their keys are none of ours."""
    try:
        model = build(name, own)
    except ValueError as error:
        pytest.skip(str(error))
    expected = logits(model)
    with our_attention(configurations(model)):
        assert model.config._attn_implementation == NAME
        assert own_name(model.config) == own
        assert torch.equal(logits(model), expected)
        with our_attention(configurations(model)):
            pass
        assert model.config._attn_implementation == NAME
        twin = copy.deepcopy(model)
    assert model.config._attn_implementation == own
    torch.testing.assert_close(logits(twin), expected, rtol=0, atol=1e-5)
    with pytest.raises(ZeroDivisionError), our_attention(configurations(model)):
        _ = 1 / 0
    assert model.config._attn_implementation == own


def test_the_user_may_choose_another_attention_between_our_passes() -> None:
    model = build("llama", "sdpa")
    loaded = load(model)
    check(loaded)
    model.set_attn_implementation("eager")
    check(loaded)
    assert model.config._attn_implementation == "eager"


@contextmanager
def beside(*targets: Callable[[], None]) -> Iterator[None]:
    """Run functions in threads that are switched often, and wait for them at the end."""
    threads, before = (
        [threading.Thread(target=target) for target in targets],
        sys.getswitchinterval(),
    )
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)


@pytest.mark.parametrize("name", slow_after(1, ["llama", "gpt2", "gemma2"]))
def test_plain_forwards_in_other_threads_stay_plain(name: str) -> None:
    model = build(name, "eager")
    config, expected = model.config, logits(model)
    engine = Engine.from_pretrained(model, drafter="prompt_lookup")
    assert engine.model.capabilities.attention == NAME
    stop, wrong, calls = threading.Event(), [], [0]

    def generate() -> list[int]:
        found: list[int] = engine.generate(prompt(20, seed=1), max_new_tokens=60).tokens
        return found

    def plain() -> None:
        while not stop.is_set():
            calls[0] += 1
            if not torch.equal(logits(model), expected):
                wrong.append("a forward")
            if own_name(config) != "eager":
                wrong.append("the setting")

    with beside(plain, plain):
        try:
            answers = [generate() for _ in range(3)]
        finally:
            stop.set()
    assert calls[0] > 10
    assert not wrong
    assert model.config is config
    assert config._attn_implementation == "eager"
    assert answers == [generate()] * 3


class Ended(str):
    """The name of a model's attention, which was ours when it was first asked for."""

    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


@pytest.mark.skipif(version("transformers") >= "5", reason="it reads the name once")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_a_pass_that_ends_while_another_thread_looks_up_its_attention(name: str) -> None:
    """transformers 4 asks whether it is eager, and then for the function."""
    model = build(name, "eager")
    expected = logits(model)
    vars(model.config)["_attn_implementation_internal"] = Ended("eager")
    assert torch.equal(logits(model), expected)


def test_runners_in_several_threads_record_their_own() -> None:
    """One loaded model, and what each pass looks at is its own."""
    model = load(build("llama"))
    needs = Needs(hidden_layers=(1,), attention_heads=((0, 1), (1, 2)))

    def tapped(seed: int) -> tuple[Tensor, Tensor]:
        runner = Runner(model)
        row = runner.open(prompt(12, seed), needs)
        runner.prefill(row)
        runner.forward([row], [Draft.chain([5, 6, 7], "test")])
        runner.commit([row], [[0, 1]], [[5, 6, 9]])
        taps = runner.taps(row)
        assert taps.hidden is not None
        assert taps.attention is not None
        return taps.hidden.clone(), taps.attention(torch.arange(len(taps.hidden)))

    expected = [tapped(seed) for seed in range(3)]
    wrong: list[int] = []

    def repeat(seed: int) -> None:
        for _ in range(15):
            if not all(map(torch.equal, tapped(seed), expected[seed])):
                wrong.append(seed)

    with beside(*(partial(repeat, seed) for seed in range(3))):
        pass
    assert not wrong


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_engine_goes_on_when_a_block_is_removed(name: str) -> None:
    model = build(name)
    engine = Engine.from_pretrained(model, drafter="prompt_lookup")
    ids = prompt(30)
    before = engine.generate(ids, max_new_tokens=20).tokens
    del engine.model.blocks[0]
    after = engine.generate(ids, max_new_tokens=20).tokens
    plain = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=20, use_cache=False)
    assert after == plain[0, len(ids) :].tolist() != before


def test_a_removed_block_is_refused_where_windows_go_by_place() -> None:
    model = load(build("gemma3_text"))
    runner = Runner(model)
    row = runner.open(prompt(30))
    del model.model.model.layers[0]
    with pytest.raises(UnsupportedError, match="1 now, 2 when the model was loaded"):
        runner.prefill(row)


def test_an_attention_that_leaves_our_function_is_refused() -> None:
    """Whatever a module attends to then, it is not what its row has."""
    loaded = load(build("llama"))
    own = loaded.model.model.layers[1].self_attn
    own.config = type("Config", (), {"_attn_implementation": "sdpa"})()
    with pytest.raises(UnsupportedError, match="never calls an attention function"):
        ours(loaded)


@pytest.mark.filterwarnings("ignore")  # peft asks transformers for a name it is retiring
def test_adapters_may_come_change_and_go() -> None:
    adapted = peft.get_peft_model(build("llama"), lora())
    adapted.add_adapter("second", lora())
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter))
    loaded = load(adapted.eval())
    seen = [check(loaded)]
    for change in (
        lambda: adapted.set_adapter("second"),
        lambda: adapted.base_model.disable_adapter_layers(),
        lambda: adapted.base_model.enable_adapter_layers(),
        lambda: adapted.add_weighted_adapter(["default", "second"], [1.0, 1.0], "both", "linear"),
        lambda: adapted.set_adapter("both"),
        lambda: adapted.merge_adapter(),
        lambda: adapted.unmerge_adapter(),
        lambda: adapted.merge_and_unload(),
    ):
        change()
        seen.append(check(loaded))
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, task_type="CAUSAL_LM")
