"""Fingerprints and states of models whose weights are no plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architectures import build, prompt
from draftsmith.engine.engine import Engine
from draftsmith.lab.fingerprint import fingerprint


class Int8(Tensor):
    """Like torchao's quantized tensors: made of plain ones; it can be multiplied, nothing else."""

    qdata: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, qdata: Tensor, scale: Tensor) -> Int8:
        made = Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        made.qdata, made.scale = qdata, scale
        return made  # type: ignore[no-any-return]

    def __init__(self, qdata: Tensor, scale: Tensor) -> None:
        pass

    @classmethod
    def of(cls, weight: Tensor) -> Int8:
        scale = weight.abs().amax(-1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["qdata", "scale"], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.qdata.to(x.dtype) * weight.scale, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        del types, kwargs
        if func is torch.ops.aten.detach.default:
            return cls(args[0].qdata, args[0].scale)
        raise NotImplementedError(f"Int8 dispatch: unimplemented operator {func}")


def linears(model: Any) -> list[nn.Linear]:
    """Its linear layers but the head."""
    named = model.named_modules()
    return [m for name, m in named if isinstance(m, nn.Linear) and "head" not in name]


def faked(seed: int = 0, model: Any = None) -> Any:
    """A tiny model whose linear layers hold such tensors."""
    made = build("llama") if model is None else model
    generator = torch.Generator().manual_seed(seed)
    for layer in linears(made):
        weight = torch.randn(layer.weight.shape, generator=generator) * 0.3
        layer.weight = nn.Parameter(Int8.of(weight), requires_grad=False)
    return made


def offloaded(seed: int = 0) -> Any:
    """Its weights lie elsewhere until they are needed."""
    from accelerate import cpu_offload

    model = build("llama", scale=0.08 + 0.01 * seed)
    return cpu_offload(model, execution_device=torch.device("cpu"))


def few_bits(seed: int = 0) -> Any:
    """Linear layers in float8, which few operations take; it cannot compute."""
    model = build("llama", scale=0.08 + 0.01 * seed)
    for layer in linears(model):
        layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    return model


@pytest.mark.parametrize("make", [faked, offloaded, few_bits])
def test_d6_fingerprints_of_weights_that_are_no_plain_tensors(make: Callable[[int], Any]) -> None:
    models = [SimpleNamespace(model=make(seed)) for seed in (0, 0, 1)]
    found = [fingerprint(model) for model in models]  # type: ignore[arg-type]
    assert found[0] == found[1] != found[2]


def test_d6_prefixes_of_other_quantized_weights_do_not_serve() -> None:
    ids, engine = prompt(40), Engine.from_pretrained(faked(0))
    live = engine.model.model

    def replace(model: Any) -> None:
        faked(1, model)

    def overwrite(model: Any) -> None:
        linears(model)[3].weight.qdata.add_(1)  # type: ignore[union-attr, operator]

    other = faked(0)
    for change in (replace, overwrite):
        engine.generate(ids, max_new_tokens=4)
        change(live)
        change(other)
        found = engine.generate([*ids, 5], max_new_tokens=8)
        expected = Engine.from_pretrained(other).generate([*ids, 5], max_new_tokens=8)
        assert found.stats.reused_tokens == 0
        assert found.tokens == expected.tokens
