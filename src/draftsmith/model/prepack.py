"""A CPU model's linear layers with their weights laid out once, as oneDNN computes with them.

Two thirds of a pass over a few tokens is matrix products at half the memory's bandwidth, because
every call lays the weight out anew. torch has the two halves as operations of their own: laying
out, and multiplying with what was laid out. They are private, so they are held against the layer
they replace, in every shape, and a layer is left alone where anything is amiss.

Shapes: `O` output and `I` input features, `M` rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from draftsmith.errors import first_line

_ROWS = 16
"""Rows that the layout is made for; it suits every width from 1 to 32."""
_TRIED_ROWS = (1, 2, _ROWS)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PART = 4096
"""Rows of a weight that are raised to float64 at a time."""


class PackedLinear(nn.Module):
    """`y = x Wᵀ + b` with a W that is laid out; does what the layer it was made of did."""

    def __init__(self, layer: nn.Linear, packed: Tensor, keep: bool) -> None:
        """`keep`: the plain weight stays in memory beside the packed one."""
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = layer.weight if keep else nn.Parameter(packed, requires_grad=False)
        self.bias = layer.bias
        self._packed = packed
        self._state = _state(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(…, I) → (…, O)."""
        if _state(self.weight) != self._state:  # somebody trained or merged
            self._packed, self._state = _lay_out(self.weight), _state(self.weight)
        if x.dtype != self._packed.dtype or torch.is_autocast_enabled("cpu"):
            return linear(x, self.dense(), self.bias)
        return _multiply(x, self._packed, self.bias)

    def dense(self) -> Tensor:
        """(O, I) the plain weight."""
        weight: Tensor = self.weight
        return weight.to_dense() if weight.is_mkldnn else weight

    def __getstate__(self) -> dict[str, Any]:
        """The plain weight: what is laid out can neither be copied nor pickled."""
        keep = not self.weight.is_mkldnn
        return {"weight": self.dense(), "bias": self.bias, "training": self.training, "keep": keep}

    def __setstate__(self, state: dict[str, Any]) -> None:
        weight = state["weight"]
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        if not isinstance(weight, nn.Parameter):  # else it may be an embedding's, too
            weight = nn.Parameter(weight, requires_grad=False)
        layer.weight, layer.bias = weight, state["bias"]
        self.__init__(layer, _lay_out(weight), state["keep"])  # type: ignore[misc]
        self.train(state["training"])

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.dense()


@dataclass(frozen=True, slots=True)
class Prepacked:
    """What `prepack` did to a model."""

    replaced: tuple[tuple[nn.Module, str, nn.Linear | None], ...] = ()
    """(parent, name, the layer as it was, None where it was not kept)."""
    left_alone: Counter[str] = field(default_factory=Counter)
    """Reason → how many linear layers it holds for."""

    def undo(self) -> None:
        """Put the layers back that were kept."""
        for parent, name, layer in self.replaced:
            if layer is not None and isinstance(getattr(parent, name, None), PackedLinear):
                setattr(parent, name, layer)

    def explain(self) -> str:
        """The same in a sentence for a person."""
        done = len(self.replaced)
        said = f"{done} of {done + self.left_alone.total()} linear layers are laid out for oneDNN"
        why = "; ".join(f"{count} are not: {reason}" for reason, count in self.left_alone.items())
        return f"{said}. {why}" if why else said


def prepack(model: nn.Module, keep: bool) -> Prepacked:
    """Replace a model's linear layers by packed ones, where these prove to compute the same.

    With `keep` the plain weights stay, and `Prepacked.undo` puts the layers back. Without it they
    are given up, so that the model needs no more memory than before; but for weights that other
    modules have, too, as embeddings do.
    """
    verdicts: dict[tuple[Any, ...], str | None] = {}
    replaced: list[tuple[nn.Module, str, nn.Linear | None]] = []
    left: Counter[str] = Counter()
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    for parent, name, layer in list(_linear_layers(model)):
        shape = (*layer.weight.shape, layer.weight.dtype, layer.bias is None)
        reason = _unlike(layer)
        if reason is None:
            if shape not in verdicts:
                verdicts[shape] = _disagreement(layer)
            reason = verdicts[shape]
        if reason is not None:
            left[reason] += 1
            continue
        kept = keep or uses[id(layer.weight)] > 1
        setattr(parent, name, PackedLinear(layer, _lay_out(layer.weight), kept))
        replaced.append((parent, name, layer if keep else None))
    return Prepacked(tuple(replaced), left)


def _linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                yield parent, name, child


def _unlike(layer: nn.Linear) -> str | None:
    """Why a layer is not the plain one that can be replaced."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return f"{type(layer).__name__} computes in a way of its own"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "hooks watch them"
    weight = layer.weight
    if type(weight) is not nn.Parameter or weight.device.type != "cpu":
        return f"their weights are on {weight.device} as {type(weight).__name__}"
    if weight.is_inference():
        return "their weights were made in inference mode"
    if weight.dtype not in _DTYPES:
        return f"{str(weight.dtype).removeprefix('torch.')} has no such layout"
    return None


def _disagreement(layer: nn.Linear) -> str | None:
    """Why the packed operation cannot stand for this layer; None if it only rounds differently.

    Sums of I products in float32 may be off by some √I of its eps times Σ|x||w|, and the result is
    rounded to the layer's own type.
    """
    weight, bias = layer.weight.detach(), layer.bias
    features, generator = weight.shape[1], torch.Generator().manual_seed(0)
    x = torch.randn((_ROWS, features), generator=generator).to(weight.dtype)
    try:
        packed = _lay_out(weight)
        with torch.no_grad():
            tried = {rows: _multiply(x[:rows], packed, bias).double() for rows in _TRIED_ROWS}
            exact, summed = _exactly(x, weight)
            exact += 0 if bias is None else bias.double()
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"this torch refuses ({first_line(error)})"
    summing = 4 * torch.finfo(torch.float32).eps * features**0.5 * summed
    allowed = summing + torch.finfo(weight.dtype).eps * exact.abs()
    for rows, found in tried.items():
        off = (found - exact[:rows]).abs()
        if not bool((off <= allowed[:rows]).all()):
            return f"results would be off by up to {off.max():.2g}"
    return None


def _exactly(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(M, O) x Wᵀ and Σ|x||w| in float64, of which a large weight would not fit at once."""
    wide, exact, summed = x.double(), [], []
    for rows in torch.split(weight, _PART):
        part = rows.double()
        exact.append(linear(wide, part))
        summed.append(linear(wide.abs(), part.abs()))
    return torch.cat(exact, -1), torch.cat(summed, -1)


def _state(weight: Tensor) -> tuple[int, int] | None:
    """What changes when somebody writes to a kept weight, but through `.data`."""
    return None if weight.is_mkldnn else (weight.data_ptr(), weight._version)


def _lay_out(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
