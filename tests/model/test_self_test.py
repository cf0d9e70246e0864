"""The self-test: what it costs, and that it finds models which look fine and are not."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    sdpa_mask,
    sliding_window_overlay,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM

import draftsmith
from architectures import ALL, RECURRENT, TREES, VOCAB, build, prompt
from draftsmith import builtin
from draftsmith.engine.engine import Engine
from draftsmith.errors import UnsupportedError
from draftsmith.integrations.transformers import NotAcceleratedWarning
from draftsmith.model.capabilities import Capabilities
from draftsmith.model.forward import cache_name
from draftsmith.model.load import load
from test_lossless import reference

CACHE = cache_name(LlamaAttention.forward)
FOUR = 4
BOUND = 60
"""Passes of a model that is searched itself."""


@contextmanager
def passes(model: Any) -> Iterator[list[int]]:
    """The tokens of every pass of a model, as they are made."""
    found: list[int] = []
    embeddings = model.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda _, args: found.append(args[0].numel()))
    try:
        yield found
    finally:
        hook.remove()


def examined(model: Any, most: int = FOUR) -> Capabilities:
    """Its capabilities, after no more than so many passes."""
    with passes(model) as made:
        found = load(model).capabilities
    assert len(made) <= most, f"{len(made)} passes over {sum(made)} tokens"
    return found


def best(found: Capabilities) -> bool:
    return (found.shape, found.attention, found.packed) == ("tree", "draftsmith", True)


def hooked(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A model whose decoder is given other arguments."""
    model = build("llama")
    hook_decoder(model, change)
    return model


def hook_decoder(model: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    def hook(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | change(kwargs)

    model.model.register_forward_pre_hook(hook, with_kwargs=True)


def without_mask(_: Any) -> dict[str, Any]:
    """Attend causally by slot."""
    return {"attention_mask": None}


def without_cache(_: Any) -> dict[str, Any]:
    return {CACHE: None, "use_cache": False}


def clamped(given: dict[str, Any]) -> dict[str, Any]:
    """Take the first position of a pass for its lowest: wrong for rows side by side."""
    positions = given["position_ids"]
    return {"position_ids": positions.clamp_min(positions[:, :1])}


def disturbed(strength: float) -> Any:
    """A model whose rows are moved by the last row of their pass."""
    model = build("llama")

    def move(_: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        (hidden,) = args
        return (hidden + strength * hidden[:, -1:],)

    model.lm_head.register_forward_pre_hook(move)
    return model


@pytest.mark.parametrize("name", ALL)
def test_four_passes_of_any_architecture(name: str) -> None:
    """What it finds is the table of the documentation, and our promise."""
    torch.manual_seed(5)
    model, before = build(name), torch.get_rng_state()
    with passes(model) as made:
        found = load(model).capabilities
    assert len(made) <= FOUR
    assert sum(made) <= 110
    assert not found.searched
    assert torch.equal(torch.get_rng_state(), before), "the user's random numbers"
    if name in RECURRENT:
        restores = version("transformers") >= "5" and name != "mamba"
        assert found.shape == ("chain" if restores else "plain")
    else:
        expected = ("tree", "packed") if name in TREES else ("chain", "own")
        assert (found.shape, found.cache) == expected
    assert name in TREES or found.reasons


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "gpt_oss", "deepseek_v3", "bloom"])
def test_half_precision_is_judged_by_its_own_noise(name: str, dtype: torch.dtype) -> None:
    found = examined(build(name).to(dtype))
    assert found.shape == ("tree" if name in TREES else "chain")
    if name == "llama":
        assert load(hooked(without_mask).to(dtype)).capabilities.shape == "chain"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", [*builtin.names(), "smollm2"])
def test_four_passes_of_a_real_model(name: str, dtype: str, request: pytest.FixtureRequest) -> None:
    """Some of its positions are so sensitive that a last bit shows; those judge mildly."""
    source = request.getfixturevalue("smollm2") if name == "smollm2" else builtin.path(name)
    model = load(source, dtype=dtype).model
    assert best(examined(model))
    hook_decoder(model, without_mask)
    assert load(model).capabilities.shape == "chain"


# --- models that look fine and are not -----------------------------------------------------------


def louder() -> Any:
    """A model that moves the last token of each pass."""
    model = build("llama")

    def roll(_module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        last = args[0].clone()
        last[:, -1] = last[:, -1].roll(1, -1)
        return (last,)

    model.model.layers[1].register_forward_pre_hook(roll)
    return model


LIARS: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    "no mask": (lambda: hooked(without_mask), "chain", "own", "passes: .*makes its own masks"),
    "clamped positions": (lambda: hooked(clamped), "chain", "own", "shared passes: logits differ"),
    "no cache": (lambda: hooked(without_cache), "plain", "none", "plain decoding with its cache"),
    "rows that influence each other": (
        lambda: disturbed(0.02), "plain", "replay", "rejected drafts would change accepted tokens"
    ),
    "a moved last token": (louder, "plain", "replay", ""),
}  # fmt: skip
"""How the model is made → its shape, its cache, and one of its reasons."""


@pytest.mark.parametrize("liar", LIARS)
def test_models_that_look_fine_and_are_not(liar: str) -> None:
    make, shape, cache, reason = LIARS[liar]
    found = examined(make(), BOUND)
    assert (found.shape, found.cache) == (shape, cache), found.reasons
    assert any(re.search(reason, one) for one in found.reasons), found.reasons
    assert found.explain()[-1] == f"Refused: {found.reasons[-1]}"


def test_a_model_that_looks_ahead_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="later"):
        load(disturbed(2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.02, 0.08, 0.35, 1.0])
@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_a_state_that_is_not_continued_is_seen_for_any_weights(
    name: str, scale: float, dtype: torch.dtype
) -> None:
    """Small weights, or few digits, hide it from the logits."""
    found = load(build(name, scale=scale).to(dtype)).capabilities
    assert (found.shape, found.cache) == ("plain", "replay")
    assert any(reason.startswith("chains: ") for reason in found.reasons)


@pytest.mark.parametrize("scale", [0.08, 0.35, 1.0])
@pytest.mark.parametrize("name", ["nemotron_h", "bamba"])
def test_steps_that_differ_from_wider_passes_get_no_drafts(name: str, scale: float) -> None:
    """nemotron_h limits its time step in wider passes only, which large weights show."""
    engine = Engine.from_pretrained(build(name, scale=scale), drafter="copyspec(gamma=1)")
    if name == "nemotron_h":
        found = engine.model.capabilities
        assert (found.shape, found.cache) == ("plain", "replay")
    ids = [*prompt(12), *prompt(12)]
    answer = engine.generate(ids, max_new_tokens=24, budget=6).tokens
    assert answer == reference(engine.model.model, ids, 24)


# --- models that were changed ---------------------------------------------------------------------


def lora() -> Any:
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(build("llama"), config).eval()


def offloaded() -> Any:
    return accelerate.cpu_offload(build("llama"), torch.device("cpu"))


def compiled() -> Any:
    return torch.compile(build("llama"), backend="eager")


def compiled_in_place() -> Any:
    model = build("llama")
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def with_own_attention(kind: type[nn.Module]) -> Any:
    model = build("llama")
    for index, layer in enumerate(model.model.layers):
        attention = kind(model.config, index)
        attention.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = attention
    return model.eval()


def held(kwargs: dict[str, Any]) -> int:
    """How many tokens the cache given to an attention layer holds."""
    cache = kwargs.get(CACHE)
    return 0 if cache is None else int(cache.get_seq_length())


class Prefilling(LlamaAttention):
    """Believes that passes over several tokens begin a text, or decode one token."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if held(kwargs) and kwargs["hidden_states"].shape[1] > 1:
            kwargs["attention_mask"] = None
        return super().forward(*args, **kwargs)


class Forgetful(LlamaAttention):
    """Sees nothing but the tokens of its pass, if that has one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs["hidden_states"].shape[1] == 1:
            kwargs[CACHE] = None
            kwargs["attention_mask"] = None
        return super().forward(*args, **kwargs)


class BySlot(LlamaAttention):
    """Turns by the place in its pass, not by the position."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cos, sin = kwargs["position_embeddings"]
        if held(kwargs) and cos.shape[1] > 1:
            kwargs["position_embeddings"] = (cos[:, :1].expand_as(cos), sin[:, :1].expand_as(sin))
        return super().forward(*args, **kwargs)


SLOW = [pytest.param(make, marks=pytest.mark.slow) for make in (compiled, compiled_in_place)]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("make", [lora, offloaded, *SLOW])
def test_a_changed_model_that_does_the_same_takes_four_passes(make: Callable[[], Any]) -> None:
    found = examined(make())
    assert best(found)
    assert not found.searched


@pytest.mark.parametrize("kind", [Prefilling, Forgetful, BySlot])
def test_a_subclassed_attention_is_not_judged_by_its_parent(kind: type[nn.Module]) -> None:
    found = examined(with_own_attention(kind), BOUND)
    assert found.shape != "tree"
    assert found.reasons


def nearby(latest: int, first: int, queries: int, keys: int) -> Tensor:
    """Which keys (q, k) are among the latest ones of each query, or the first ones."""
    query, key = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
    return (key <= query) & ((key > query - latest) | (key < first))


def registered_by_a_user() -> Any:
    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **more: Any
    ) -> Any:
        mask = nearby(24, 4, query.shape[2], key.shape[2])[None, None]
        return sdpa_attention_forward(module, query, key, value, mask, **more)

    AttentionInterface.register("nearby", attend)
    AttentionMaskInterface.register("nearby", sdpa_mask)
    return build("llama", attention="nearby")


class Nearby(LlamaAttention):
    """Hides all but the latest 24 keys in the mask that it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        seen = nearby(24, 0, *mask.shape[2:])
        bare = torch.finfo(torch.float32).min
        seen = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, bare)
        return super().forward(*args, **kwargs | {"attention_mask": seen})


def masked_by_a_user() -> Any:
    """Its attention is transformers' own; the mask is the user's."""
    AttentionInterface.register("near", sdpa_attention_forward)

    def mask(*args: Any, **given: Any) -> Any:
        window = and_masks(causal_mask_function, sliding_window_overlay(24))
        more = {"mask_function": window, "allow_is_causal_skip": False}
        return sdpa_mask(*args, **given | more)

    AttentionMaskInterface.register("near", mask)
    return build("llama", attention="near")


def narrowing() -> Any:
    model = with_own_attention(Nearby)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("make", [registered_by_a_user, masked_by_a_user, narrowing])
def test_windows_longer_than_the_texts_of_the_test_are_kept(make: Callable[[], Any]) -> None:
    model, ids = make(), prompt(60)
    wanted = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, 60:]
    whole = build("llama").generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, 60:]
    assert not wanted.equal(whole), "the window matters"
    engine = Engine(load(model), drafter="copyspec(gamma=1)")
    assert engine.generate(ids, max_new_tokens=12).tokens == wanted.tolist()
    assert not engine.model.capabilities.packed
    assert engine.notices


@pytest.mark.parametrize("hidden", [-1e9, -torch.inf])
def test_ids_that_a_model_hides_hide_no_difference(hidden: float) -> None:
    class Head(nn.Module):
        def __init__(self, head: nn.Linear) -> None:
            super().__init__()
            self.weight, self.head = head.weight, head

        def forward(self, x: Tensor) -> Tensor:
            logits = self.head(x)
            logits[..., :8] = hidden
            return logits

    model = build("llama")
    model.lm_head = Head(model.lm_head)
    assert load(model).capabilities.packed
    model.model.layers[0].register_forward_hook(steered)
    assert load(model).capabilities.shape == "plain"


def steered(_module: Any, _args: Any, output: Any) -> Any:
    """Move the last place of a pass, as some steering vectors do."""
    hidden = output[0] if isinstance(output, tuple) else output
    hidden = torch.cat([hidden[:, :-1], hidden[:, -1:] + 1.0], 1)
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


class LastOnly(LlamaForCausalLM):
    """Returns the logits of the last position, whatever it is asked for."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits[:, -1:]
        return output


def test_logits_of_the_last_position_alone_are_refused_as_what_they_are() -> None:
    model = build("llama")
    model.__class__ = LastOnly
    with pytest.raises(UnsupportedError, match="fewer positions than it is asked for"):
        load(model)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_loss_of_routers_costs_no_drafts(name: str) -> None:
    found = examined(build(name, output_router_logits=True), BOUND)
    assert (found.shape, found.packed, found.reasons) == ("tree", True, ())


@pytest.mark.parametrize("in_prefill", [False, True])
def test_a_hook_that_tells_prompts_from_answers_gets_no_drafts(in_prefill: bool) -> None:
    """It looks at how many tokens a pass has: a pass with a draft is neither."""
    vector = torch.randn(64, generator=torch.Generator().manual_seed(4))

    def steer(_module: Any, _args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if (hidden.shape[1] > 1) == in_prefill:
            hidden = hidden + vector
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    model = build("llama")
    model.model.layers[0].register_forward_hook(steer)
    ids = torch.tensor([prompt(9)])
    wanted = model.generate(ids, max_new_tokens=12, do_sample=False)
    found = examined(model, BOUND)
    assert found.shape == "plain"
    assert found.searched
    with pytest.warns(NotAcceleratedWarning), draftsmith.accelerate(model):
        assert model.generate(ids, max_new_tokens=12, do_sample=False).equal(wanted)


@pytest.mark.filterwarnings("ignore:.*quantiz:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_rows_that_share_a_scale_are_found(name: str) -> None:
    """Dynamic quantization has one scale for all rows of a pass."""
    linear = {nn.Linear}
    model = torch.ao.quantization.quantize_dynamic(build(name), linear, dtype=torch.qint8)
    found = examined(model, BOUND)
    assert (found.shape, found.cache) == ("plain", "replay")
    assert "per-tensor dynamic quantization" in found.reasons[0]
    ids = prompt(9)
    wanted = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, 9:]
    engine = draftsmith.Engine(load(model))
    assert engine.generate(ids, max_new_tokens=8).tokens == wanted.tolist()


def test_a_scale_that_later_tokens_move_far_is_no_look_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scales of a real model's passes change its logits by more than the limit."""
    monkeypatch.setattr("draftsmith.model.search.NOT_CAUSAL", 1e-3)
    monkeypatch.setattr("draftsmith.model.probe.NOT_CAUSAL", 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        linear = {nn.Linear}
        model = torch.ao.quantization.quantize_dynamic(build("llama"), linear, dtype=torch.qint8)
        found = examined(model, BOUND)
    assert found.shape == "plain"
    assert "per-tensor dynamic quantization" in found.reasons[0]


@pytest.mark.parametrize("name", ["llama", "bloom", "lfm2", "mamba"])
def test_a_class_that_is_not_of_transformers_is_searched_in_few_passes(name: str) -> None:
    model = build(name)
    model.__class__ = type("Own", (type(model),), {"__module__": "somewhere"})
    with passes(model) as made:
        found = load(model).capabilities
    assert len(made) <= BOUND
    assert sum(made) <= 300
    assert found.searched == "Own is not a class of transformers"
    assert f"The whole model was searched, which takes longer: {found.searched}." in found.explain()
    assert best(found) == (name == "llama")


def test_keys_that_are_values_have_a_small_copy() -> None:
    """Layers of Gemma 4 have numbers of heads of their own then."""
    if "gemma4_text" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no Gemma 4")
    config = CONFIG_MAPPING["gemma4_text"](
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, num_global_key_value_heads=1, attention_k_eq_v=True, head_dim=16,
        global_head_dim=32, num_hidden_layers=12, layer_types=(["sliding_attention"] * 5 +
        ["full_attention"]) * 2, sliding_window=20, num_kv_shared_layers=0,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=VOCAB, pad_token_id=0,
        max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    found = load(AutoModelForCausalLM.from_config(config).eval()).capabilities
    assert found.packed
    assert not found.searched
