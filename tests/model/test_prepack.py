"""Packed linear layers: the same answers and parameters; nothing touched that was not asked for."""

from __future__ import annotations

import copy
import pickle
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from torch import Tensor, nn

from architectures import build
from draftsmith import Engine, accelerate
from draftsmith.errors import OptionError, UnsupportedError
from draftsmith.lab.fingerprint import fingerprint
from draftsmith.model import prepack as module
from draftsmith.model.prepack import PackedLinear, prepack

REFUSED = "torch cannot pack them"


def layer(dtype: torch.dtype, bias: bool = True, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(96, 80, bias=bias)).to(dtype)


def packed_or_skip(model: nn.Module, keep: bool = True) -> Any:
    done = prepack(model, keep)
    if any(reason.startswith(REFUSED) for reason in done.left_alone):
        pytest.skip(f"this processor or build of torch has no such layout: {done.explain()}")
    return done


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (2, 7), (1, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_those_of_the_layer(
    dtype: torch.dtype, rows: tuple[int, ...], bias: bool
) -> None:
    model = layer(dtype, bias)
    x = torch.randn((*rows, 96)).to(dtype)
    model.requires_grad_(False)
    before = model(x)
    packed_or_skip(model)
    after = model(x)
    assert isinstance(model[0], PackedLinear)
    assert after.shape == before.shape
    assert after.dtype == before.dtype
    # Sums of 96 products of about 0.05 in float32, in another order, then rounded to the type.
    tolerance = 4 * 96**1.5 * 0.05 * torch.finfo(torch.float32).eps
    tolerance += torch.finfo(dtype).eps * float(before.abs().max())
    assert (after.float() - before.float()).abs().max() <= tolerance


def test_gradients_are_those_of_the_layer() -> None:
    """Also for an input, through weights that are not trained, and for a bias alone."""
    biased = layer(torch.float32).requires_grad_(False)
    packed_or_skip(biased)
    biased[0].bias.requires_grad_()
    biased(torch.randn((3, 96))).sum().backward()
    assert biased[0].bias.grad.tolist() == [3.0] * 80
    for trained in (True, False):
        model = layer(torch.float32).requires_grad_(trained)
        x = torch.randn((3, 96), requires_grad=True)
        wanted = torch.autograd.grad(
            model(x).square().sum(), [x, *model.parameters()][: 1 + 2 * trained]
        )
        packed_or_skip(model)
        found = torch.autograd.grad(
            model(x).square().sum(), [x, *model.parameters()][: 1 + 2 * trained]
        )
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)


def test_a_weight_shared_with_the_embeddings_stays_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(80, 96), nn.Linear(96, 80, bias=False))
    model[1].weight = model[0].weight
    count = sum(p.numel() for p in model.parameters())
    packed_or_skip(model, keep=False)
    assert isinstance(model[1], PackedLinear)
    assert model[1].weight is model[0].weight
    assert sum(p.numel() for p in model.parameters()) == count
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied[1].weight is copied[0].weight


def test_what_is_no_plain_layer_is_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(Neighbours(), Doubled(8, 8), nn.Linear(8, 8).double())
    model[0].v_proj.register_forward_hook(lambda *_: None)
    before, x = list(model), torch.randn((3, 96))
    expected = model[0](x)
    done = packed_or_skip(model)
    assert list(model) == before
    assert done.explain() == (
        "3 of 6 linear layers are laid out for oneDNN. 1 are not: Doubled is not a plain linear "
        "layer; 1 are not: float64 has no packed layout; 1 are not: they have hooks"
    )
    with torch.no_grad():
        torch.testing.assert_close(model[0](x), expected)


def test_operations_that_differ_or_are_missing_are_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(_: Tensor) -> Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute")

    packed_or_skip(layer(torch.float32))
    honest = module._multiply
    monkeypatch.setattr(module, "_multiply", lambda x, w, b: honest(x, w, b) * 1.001)
    for words in ("results would differ", REFUSED):
        done = prepack(layer(torch.float32), keep=True)
        assert not done.replaced
        assert words in done.explain()
        monkeypatch.setattr(module, "_lay_out", missing)


def test_other_types_and_autocast_fall_back_to_the_plain_product() -> None:
    model = layer(torch.float32)
    x = torch.randn((3, 96))
    with torch.autocast("cpu", torch.bfloat16):
        before = model(x)
    packed_or_skip(model, keep=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), before)


def test_a_model_saved_after_packing_is_the_model(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny.model())
    packed_or_skip(model, keep=False)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for name, value in tiny.model().state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


class Neighbours(nn.Module):
    """Three layers that read the same input, as attention's do."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = nn.Linear(96, 64, bias=bias)
        self.k_proj = nn.Linear(96, 32, bias=bias)
        self.v_proj = nn.Linear(96, 48, bias=bias)
        self.o_proj = nn.Linear(96, 96, bias=bias)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.q_proj(x), self.k_proj(x), self.v_proj(x), self.o_proj(x)]


@pytest.fixture
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of this file share products, as transformers' own do."""
    monkeypatch.setattr(module, "_KNOWN", ("transformers.", __name__))


@pytest.mark.usefixtures("_known")
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_one_input_are_one_product(
    bias: bool, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Neighbours(bias).requires_grad_(False), torch.randn((3, 96))
    expected, state = model(x), copy.deepcopy(model.state_dict())
    packed_or_skip(model, keep)
    products = []
    honest = module._multiply
    monkeypatch.setattr(
        module, "_multiply", lambda x, w, b: products.append(w.shape) or honest(x, w, b)
    )
    for _ in range(2):  # the second time computes again: x may hold other numbers now
        products.clear()
        torch.testing.assert_close(model(x), expected)
        assert products == [(144, 96), (96, 96)]
    assert sum(p.numel() for p in model.parameters()) == sum(v.numel() for v in state.values())
    for name, value in state.items():
        assert torch.equal(model.state_dict()[name], value), name
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        products.clear()
        torch.testing.assert_close(copied(x), expected)
        assert len(products) == 2


@pytest.mark.usefixtures("_known")
def test_an_input_written_to_or_read_by_others_between_calls_is_read_again() -> None:
    model, x = Neighbours().requires_grad_(False), torch.randn((3, 96))
    another = Neighbours().requires_grad_(False)
    another.k_proj.weight.mul_(2)
    packed_or_skip(model)
    expected = another(x)
    packed_or_skip(another)
    model.q_proj(x)
    torch.testing.assert_close(another.k_proj(x), expected[1])
    for inference in (True, False):
        with torch.inference_mode(inference):
            x = x.clone()
            first = model(x)
            x.mul_(2)
            bias = model.q_proj.bias
            torch.testing.assert_close(model.q_proj(x) - bias, 2 * (first[0] - bias))
            model.k_proj(x)
            other = torch.randn((3, 96))
            torch.testing.assert_close(model.v_proj(other), model(other)[2])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("assigned", ["state", "weight"])
def test_a_kept_group_follows_what_is_assigned(assigned: str, bias: bool) -> None:
    model, x = Neighbours(bias).requires_grad_(False), torch.randn((3, 96))
    layer = model.k_proj
    done = packed_or_skip(model)
    model(x)
    state = {name: 2 * value for name, value in model.state_dict().items()}
    if assigned == "weight":
        model.k_proj.weight = nn.Parameter(state["k_proj.weight"], requires_grad=False)
        state = {**model.state_dict()}
        assert torch.equal(model.k_proj.dense(), model.k_proj.weight)
    else:
        model.load_state_dict(state, assign=True)
    plain = Neighbours(bias).requires_grad_(False)
    plain.load_state_dict(state)
    torch.testing.assert_close(copy.deepcopy(model)(x), plain(x))
    torch.testing.assert_close(model(x), plain(x))
    for one in (model, plain):
        one.k_proj.weight.mul_(2)
        if bias:
            one.k_proj.bias.mul_(2)
    torch.testing.assert_close(model(x), plain(x))
    done.undo()
    assert model.k_proj is layer
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("made", [Neighbours, lambda: layer(torch.float32, bias=False)])
def test_weights_that_were_given_up_are_not_replaced_unheeded(made: Any, assign: bool) -> None:
    model = made().requires_grad_(False)
    state = copy.deepcopy(model.state_dict())
    packed_or_skip(model, keep=False)
    with pytest.raises(RuntimeError, match=r"weight: .* load the model with prepack=False"):
        model.load_state_dict(state, assign=assign)
    packed = next(one for one in model.modules() if isinstance(one, PackedLinear))
    with pytest.raises(UnsupportedError, match="prepack=False"):
        packed.weight = nn.Parameter(torch.zeros_like(packed.dense()))
    with pytest.raises(UnsupportedError, match="bias"):
        packed.bias = None if packed.bias is not None else nn.Parameter(torch.zeros(80))


def test_what_is_loaded_beside_weights_that_were_given_up_is_taken() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).requires_grad_(False)
    packed_or_skip(model, keep=False)
    norm, bias = torch.rand(64), torch.rand(64)
    model.load_state_dict({"1.weight": norm, "0.bias": bias}, strict=False)
    assert torch.equal(model[1].weight, norm)
    torch.testing.assert_close(model[0](torch.zeros(1, 64))[0], bias)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.model().save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    return tmp_path


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.Linear | PackedLinear)]


def test_engines_pack_what_they_load(folder: Path) -> None:
    packed_or_skip(layer(torch.float32))
    engine = Engine.from_pretrained(folder)
    plain = Engine.from_pretrained(folder, prepack=False)
    assert all(isinstance(m, PackedLinear) for m in layers_of(engine.model.model))
    assert not any(isinstance(m, PackedLinear) for m in layers_of(plain.model.model))
    assert engine.model.prepacked is not None
    assert engine.model.prepacked.explain() == "15 of 15 linear layers are laid out for oneDNN"
    assert plain.model.prepacked is None
    assert fingerprint(engine.model) == fingerprint(plain.model)
    prompt = "the quick brown fox jumps over"
    assert (
        engine.generate(prompt, max_new_tokens=40).tokens
        == plain.generate(prompt, max_new_tokens=40).tokens
    )


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_reads_weights_itself_is_loaded(tmp_path: Path) -> None:
    build("mamba").save_pretrained(tmp_path)
    engine = Engine.from_pretrained(tmp_path, tokenizer=tiny.tokenizer())
    plain = Engine.from_pretrained(tmp_path, tokenizer=tiny.tokenizer(), prepack=False)
    tokens = [one.generate([5, 6, 7], max_new_tokens=8).tokens for one in (engine, plain)]
    assert tokens[0] == tokens[1]
    assert engine.model.prepacked is not None
    if version("transformers") >= "5":
        reason = "9 are not: the model cannot be computed with such layers"
        assert engine.model.prepacked.explain().endswith(f"laid out for oneDNN. {reason}")


def test_a_live_model_is_packed_only_when_asked_for() -> None:
    packed_or_skip(layer(torch.float32))
    live = copy.deepcopy(tiny.model())
    Engine.from_pretrained(live, tokenizer=tiny.tokenizer())
    before = layers_of(live)
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    expected = live.generate(ids, max_new_tokens=30, do_sample=False)
    with accelerate(live, prepack=True):
        assert all(isinstance(m, PackedLinear) for m in layers_of(live))
        assert torch.equal(live.generate(ids, max_new_tokens=30, do_sample=False), expected)
    assert layers_of(live) == before


@pytest.mark.filterwarnings("ignore")
def test_layers_with_adapters_are_left_alone() -> None:
    """PEFT merges into their weights, and may put other layers in their place."""
    packed_or_skip(layer(torch.float32))
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=64, init_lora_weights=False,
        target_modules=["q_proj", "up_proj"],
    )  # fmt: skip
    live = peft.get_peft_model(copy.deepcopy(tiny.model()), config).eval()
    options = {"input_ids": torch.arange(10, 40)[None], "max_new_tokens": 12, "do_sample": False}
    with accelerate(live, prepack=True) as handle:
        assert "adapters may be merged" in handle.prepacked.explain()
        live.generate(**options)
        live.merge_adapter()
        found = live.generate(**options)
    assert torch.equal(found, live.generate(**options))
    with accelerate(live, prepack=True):
        live.generate(**options)
        plain = live.merge_and_unload()
    assert torch.equal(found, plain.generate(**options))
    assert not any(isinstance(m, PackedLinear) for m in plain.modules())


def test_an_error_leaves_the_model_as_it_was() -> None:
    live = copy.deepcopy(tiny.model())
    before = layers_of(live)
    with pytest.raises(OptionError):
        accelerate(live, "pld_plus(layer=99)", prepack=True)
    assert layers_of(live) == before


class Scaled(nn.Module):
    """A block of one's own that writes to the input of its layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(96, 80), nn.Linear(96, 80)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate_proj(x) + self.up_proj(x.mul_(0.5))


def test_blocks_of_ones_own_may_write_between_their_layers() -> None:
    torch.manual_seed(0)
    model, x = Scaled().requires_grad_(False), torch.randn(3, 96)
    expected = model(x.clone())
    packed_or_skip(model)
    torch.testing.assert_close(model(x.clone()), expected)
