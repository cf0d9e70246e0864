"""Passes with another attention than the model's own, beside which the model stays the user's."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor

from architectures import ALL, build, prompt
from draftsmith.core.draft import Draft
from draftsmith.core.target import Needs
from draftsmith.engine.engine import Engine
from draftsmith.errors import UnsupportedError
from draftsmith.model.attention import NAME
from draftsmith.model.load import load
from draftsmith.model.runner import Runner
from draftsmith.model.shell import OtherAttention

IDS = torch.tensor([prompt(9)])


def logits(call: Any) -> Tensor:
    with torch.inference_mode():
        out: Tensor = call(input_ids=IDS).logits
    return out


def by_switching(model: Any, name: str) -> Tensor:
    with OtherAttention(model, name).switched():
        return logits(model)


def outcome(run: Callable[[], Tensor]) -> Tensor | str:
    """The logits, or the complaint of a model that does not know this attention."""
    try:
        return run()
    except (ValueError, AttributeError, RuntimeError) as error:
        return str(error)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("attention", [NAME, "sdpa", "eager"])
def test_shells_compute_what_switching_does(name: str, attention: str) -> None:
    model = build(name)
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    other = OtherAttention(model, attention)
    assert other.exclusive is None
    got = outcome(lambda: logits(other))
    expected = outcome(lambda: by_switching(model, attention))
    assert got == expected if isinstance(got, str) else torch.equal(got, expected)
    after = {path: dict(vars(module)) for path, module in model.named_modules()}
    assert before.keys() == after.keys()
    for path, attributes in before.items():
        changed = {key for key in after[path] if after[path][key] is not attributes.get(key)}
        assert changed <= {"max_seq_len_cached"}, path  # the model's own doing


@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_switching_restores_the_users_setting(own: str) -> None:
    model = build("llama", own)
    ours, eager = OtherAttention(model, NAME), OtherAttention(model, "eager")
    with ours.switched():
        assert model.config._attn_implementation == NAME
        with eager.switched():
            assert model.model.layers[0].self_attn.config._attn_implementation == "eager"
        assert model.config._attn_implementation == NAME
    assert model.config._attn_implementation == own
    with pytest.raises(ZeroDivisionError), ours.switched():
        _ = 1 / 0
    assert model.config._attn_implementation == own


def test_a_whole_model_agrees_with_sdpa() -> None:
    model = build("llama", "sdpa")
    torch.testing.assert_close(
        logits(OtherAttention(model, NAME)), logits(model), rtol=0, atol=1e-6
    )


def test_those_who_switch_wait_for_each_other() -> None:
    """Loaded twice, it is still one model: overlapping passes must not leave our setting behind."""
    model = build("llama")
    before = model.config._attn_implementation
    first, second = OtherAttention(model, NAME), OtherAttention(model, NAME)
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with second.switched():
            entered.set()
            leave.wait(3000)

    thread = threading.Thread(target=other)
    with first.switched():
        thread.start()
        assert not entered.wait(0.2), "the second pass began inside the first"
    assert entered.wait(3000)
    leave.set()
    thread.join()
    assert model.config._attn_implementation == before


@contextmanager
def hasty_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_plain_forwards_in_other_threads_stay_plain(name: str) -> None:
    """As does the model: nothing of ours is ever seen on it."""
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
            if config._attn_implementation != "eager":
                wrong.append("the setting")

    threads = [threading.Thread(target=plain) for _ in range(2)]
    with hasty_threads():
        for thread in threads:
            thread.start()
        try:
            answers = [generate() for _ in range(3)]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert calls[0] > 10
    assert not wrong
    assert model.config is config
    assert answers == [generate()] * 3


def test_runners_in_several_threads_record_their_own() -> None:
    """One loaded model, one set of shells, and what each pass looks at is its own."""
    model = load(build("llama"))
    needs = Needs(hidden_layer=1, attention_heads=((0, 1), (1, 2)))

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

    threads = [threading.Thread(target=repeat, args=(seed,)) for seed in range(3)]
    with hasty_threads():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


# What the user does to the model after it was loaded


def edit_a_weight(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)


def edit_a_norm(model: Any) -> None:
    norm = model.model.layers[0].input_layernorm
    norm.variance_epsilon = 0.1
    norm.register_forward_hook(lambda _module, _inputs, output: output * 2)


def replace_what_a_norm_does(model: Any) -> None:
    model.model.norm.forward = lambda x: 2 * x


def exchange_a_norm(model: Any) -> None:
    model.model.layers[0].input_layernorm = torch.nn.LayerNorm(64)


def replace_a_weight(model: Any) -> None:
    own = model.model.layers[0].self_attn.q_proj
    own.weight = torch.nn.Parameter(own.weight.detach() * 2)


def load_other_weights(model: Any) -> None:
    other = {name: value * 1.5 for name, value in model.state_dict().items()}
    model.load_state_dict(other, assign=True)


def add_a_hook(model: Any) -> None:
    model.model.layers[0].self_attn.register_forward_hook(
        lambda _module, _inputs, output: (output[0] * 2, *output[1:])
    )


def hook_that_knows_its_module(model: Any) -> None:
    factors = dict.fromkeys(model.modules(), 2.0)
    model.model.layers[1].mlp.register_forward_hook(
        lambda module, _inputs, output: output * factors[module]
    )


def exchange_a_block(model: Any) -> None:
    model.model.layers[1] = build("llama", intermediate_size=48).model.layers[1]


def exchange_an_inner_module(model: Any) -> None:
    model.model.layers[1].self_attn.o_proj = torch.nn.Linear(64, 64)


def drop_a_block(model: Any) -> None:
    del model.model.layers[1]


def change_the_configuration(model: Any) -> None:
    model.config.num_hidden_layers = 1


@pytest.mark.parametrize(
    "change",
    [
        edit_a_weight, replace_a_weight, load_other_weights, torch.nn.Module.double, add_a_hook,
        hook_that_knows_its_module, edit_a_norm, replace_what_a_norm_does, exchange_a_norm,
        torch.nn.Module.bfloat16, exchange_a_block, exchange_an_inner_module, drop_a_block,
        change_the_configuration,
    ],
)  # fmt: skip
def test_a_change_of_the_model_is_a_change_of_its_shells(change: Callable[[Any], None]) -> None:
    model = build("llama")
    other = OtherAttention(model, NAME)
    before = logits(other)
    torch.manual_seed(3)
    change(model)
    after = logits(other)
    assert other.exclusive is None
    assert not torch.equal(after, before)
    assert torch.equal(after, by_switching(model, NAME))


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
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
    model = load(build("gemma2"))
    runner = Runner(model)
    row = runner.open(prompt(30))
    del model.model.model.layers[0]
    with pytest.raises(UnsupportedError, match="1 now, 2 when the model was loaded"):
        runner.prefill(row)


def test_a_norm_whose_class_is_patched_runs_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    other = OtherAttention(model, NAME)
    before, kind = logits(other), type(model.model.norm)
    written = kind.forward
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", lambda self, x: written(self, x).flip(-1))
        after = logits(other)
        assert not torch.equal(after, before)
        assert torch.equal(after, by_switching(model, NAME))
    assert torch.equal(logits(other), before)


# What shells do in fewer calls


def with_norm(norm: torch.nn.Module, dtype: torch.dtype) -> Any:
    model = build("llama")
    model.model.norm = norm
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.rand_like(parameter) + 0.5)
    return model.to(dtype)


class WeightInside(torch.nn.Module):
    """Multiplies by the weight before it rounds to the type: other bits in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * normed).to(x.dtype)


class Gated(torch.nn.Module):
    """A norm like Llama's, but for who gives it a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = x if gate is None else x * gate
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Particular(Gated):
    """Fails in its own way where the batch is not what it knows."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if x.ndim == 2:
            raise AttributeError("no batch")
        return super().forward(x)


class MovedWeight(WeightInside):
    """Gemma's."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + self.weight.float())).to(x.dtype)


@pytest.fixture
def quick_calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Types in which torch's norm was called."""
    calls: list[torch.dtype] = []

    def counting(honest: Any) -> Any:
        def counted(x: Tensor, *rest: Any) -> Tensor:
            calls.append(x.dtype)
            return honest(x, *rest)  # type: ignore[no-any-return]

        return counted

    monkeypatch.setattr(torch, "rms_norm", counting(torch.rms_norm))
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_that_is_written_out_runs_as_torchs(
    dtype: torch.dtype, quick_calls: list[torch.dtype]
) -> None:
    model = with_norm(build("llama").model.norm, dtype)
    x = torch.randn((3, 5, 64)).to(dtype) * torch.logspace(-6, 4, 5, dtype=dtype)[:, None]
    other = OtherAttention(model, NAME)
    norm = other._fitting().root.model.norm
    quick_calls.clear()
    with torch.inference_mode():
        assert torch.equal(norm(x), model.model.norm(x))
        assert quick_calls == [dtype]
        assert torch.equal(norm(hidden_states=x), model.model.norm(x))
        with pytest.raises(TypeError, match="unexpected keyword argument 'x'"):
            norm(x=x)
        # Not where it was not tried: other types, and what autocast makes of them.
        wide = x.double()
        assert torch.equal(norm(wide), model.model.norm(wide))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(norm(x), model.model.norm(x))
    assert quick_calls == [dtype]


def test_a_norm_without_a_number_under_its_root_runs_as_torchs() -> None:
    model = with_norm(torch.nn.RMSNorm(64), torch.float32)
    norm = OtherAttention(model, NAME)._fitting().root.model.norm
    with torch.inference_mode():
        x = torch.randn(1, 5, 64)
        assert torch.equal(norm(x), model.model.norm(x))


@pytest.mark.parametrize(
    "kind", [WeightInside, MovedWeight, Gated, Particular, lambda: torch.nn.LayerNorm(64)]
)
def test_a_norm_of_other_bits_is_left_alone(
    kind: Callable[[], torch.nn.Module], quick_calls: list[torch.dtype]
) -> None:
    model = with_norm(kind(), torch.bfloat16)
    if kind is WeightInside:
        torch.nn.init.ones_(model.model.norm.weight)  # with which one cannot tell
    x = torch.randn((1, 5, 64), dtype=torch.bfloat16)
    other = OtherAttention(model, NAME)
    norm = other._fitting().root.model.norm
    quick_calls.clear()
    with torch.inference_mode():
        assert torch.equal(norm(x), model.model.norm(x))
    assert not quick_calls


def test_a_list_of_blocks_is_sliced_as_a_list() -> None:
    model = build("llama")
    own, shell = model.model.layers, OtherAttention(model, NAME)._fitting().root.model.layers
    assert shell[:2] is shell[:] is shell[0:9] is shell
    for part in (slice(1), slice(1, None), slice(None, None, -1), slice(0, 0)):
        assert list(shell[part]) == list(own[part])
    assert shell[-1] == own[-1]
    assert shell[0].self_attn.config._attn_implementation == NAME
    with pytest.raises(IndexError):
        shell[2]


@pytest.mark.filterwarnings("ignore")  # peft asks transformers for a name it is retiring
def test_adapters_may_come_change_and_go() -> None:
    adapted = peft.get_peft_model(build("llama"), lora())
    adapted.add_adapter("second", lora())
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter))
    other = OtherAttention(adapted, NAME)
    seen = [logits(other)]
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
        assert torch.equal(logits(other), by_switching(adapted, NAME))
        seen.append(logits(other))
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, task_type="CAUSAL_LM")


def test_modules_and_settings_kept_under_other_names_are_found() -> None:
    """In lists, in dicts, in plain attributes, and in a circle."""
    model = build("llama", "eager")
    inner = model.model
    held = list(inner.layers)
    vars(inner)["kept"] = {"blocks": held, "more": (held[0].self_attn, model.config)}
    vars(held[0].self_attn)["home"] = [inner]

    def forward(self: Any, hidden: Tensor, **options: Any) -> Tensor:
        mine, config = self.kept["more"]
        assert mine.home[0] is self
        assert config is self.config
        assert mine.config is self.kept["blocks"][1].self_attn.config
        found.append(config._attn_implementation)
        for block in self.kept["blocks"]:
            hidden = block(hidden, **options)
        return hidden

    found: list[str] = []
    body = {"forward": lambda self, input_ids: forward(self, self.embed_tokens(input_ids), **rope)}
    rope: dict[str, Any] = {
        "position_embeddings": inner.rotary_emb(torch.zeros(1, 9, 64), torch.arange(9)[None]),
        "attention_mask": torch.ones(9, 9, dtype=torch.bool).tril()[None, None],
    }
    inner.__class__ = type("Kept", (type(inner),), body)
    model.__class__ = type(
        "Keeping", (type(model),), {"forward": lambda self, input_ids: self.model(input_ids)}
    )
    other = OtherAttention(model, NAME)
    with torch.inference_mode():
        other(input_ids=IDS)
    assert found == [NAME]
    assert model.config._attn_implementation == "eager"


def test_no_weight_is_copied() -> None:
    model = build("llama")
    other = OtherAttention(model, NAME)
    shells = dict(other._fitting().root.named_modules())
    for path, module in model.named_modules():
        assert shells[path]._parameters is module._parameters
        assert shells[path]._buffers is module._buffers


def test_a_copy_has_shells_of_its_own() -> None:
    model = build("llama")
    other = OtherAttention(model, NAME)
    vars(model)["other"] = other
    twin_model = copy.deepcopy(model)
    twin = twin_model.other
    edit_a_weight(twin_model)
    assert torch.equal(logits(twin), by_switching(twin_model, NAME))
    assert torch.equal(logits(other), by_switching(model, NAME))
    assert not torch.equal(logits(twin), logits(other))


# Models that can have no shells


def with_accelerate(model: Any) -> None:
    add_hook_to_module(model.model.layers[0], ModelHook())


def compiled_in_place(model: Any) -> None:
    """What `module.compile()` does, without the seconds that a compiler takes."""
    model.model._compiled_call_impl = model.model._call_impl


@pytest.mark.parametrize("change", [with_accelerate, compiled_in_place])
@pytest.mark.parametrize("late", [False, True])
def test_where_shells_cannot_be_the_setting_is_switched(
    change: Callable[[Any], None], late: bool
) -> None:
    model = build("llama", "eager")
    if not late:
        change(model)
    other = OtherAttention(model, NAME)
    if late:
        change(model)
    settings: list[str] = []
    model.model.layers[1].register_forward_pre_hook(
        lambda *_: settings.append(model.config._attn_implementation)
    )
    got = logits(other)
    assert other.exclusive is not None
    assert settings == [NAME]
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(got, logits(model), rtol=0, atol=1e-6)


def test_the_capabilities_tell_that_others_must_wait() -> None:
    model = build("llama")
    with_accelerate(model)
    loaded = load(model)
    assert loaded.capabilities.attention == NAME
    (reason,) = loaded.capabilities.reasons
    assert reason.startswith("forwards of the model in other threads during ours: LlamaDecoder")
