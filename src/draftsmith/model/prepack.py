"""A CPU model's linear layers with their weights laid out once, as oneDNN computes with them.

Two thirds of a pass over a few tokens is matrix products at half the memory's bandwidth, because
every call lays the weight out anew. torch has the two halves as operations of their own: laying
out, and multiplying with what was laid out. They are private, so they are held against the layer
they replace, in every shape, and a layer is left alone where anything is amiss.

Shapes: `O` output and `I` input features, `M` rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from draftsmith.errors import UnsupportedError, first_line

_ROWS = 16
"""Rows that the layout is made for; it suits every width from 1 to 32."""
_TRIED_ROWS = (1, 2, _ROWS)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WAITING = "_draftsmith_product_{}_{}"
"""Attribute of an input at which a product of a group waits for the layer it belongs to."""
_NUMBERS = count()
"""Of the products: no two ever take each other's parts."""
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Neighbours that read the same tensor in transformers' models: one wide product is cheaper."""
_GIVEN_UP = (
    "the plain weights of this layer were given up when it was laid out for the CPU, so it takes "
    "no others: load the model with prepack=False"
)
_PART = 4096
"""Rows of a weight that are raised to float64 at a time."""


class PackedLinear(nn.Module):
    """`y = x Wᵀ + b` with a W that is laid out; does what the layer it was made of did."""

    def __init__(self, product: _Product, place: int) -> None:
        """`place`: which of the product's layers this one is."""
        super().__init__()
        self.in_features, self.out_features = product.features, product.sizes[place]
        self.weight, self.bias = product.parameter(place), product.biases[place]
        self._product, self._place, self._own = product, place, product.names[place]
        product.tables[place] = self._parameters

    def forward(self, x: Tensor) -> Tensor:
        """(…, I) → (…, O)."""
        product = self._product
        waiting = vars(x).pop(self._own, None)
        if waiting is not None:  # so nobody wrote to x since its neighbour read it
            found: Tensor = waiting
            return found
        if x.dtype != product.dtype or torch.is_autocast_enabled("cpu"):
            return linear(x, self.dense(), self.bias)
        return product(x) if len(product.sizes) == 1 else product.share(x, self._own)

    def dense(self) -> Tensor:
        """(O, I) the plain weight."""
        return self._product.dense(self._place)

    def __setattr__(self, name: str, value: Any) -> None:
        made = "_product" in vars(self)
        if made and name == "weight" and not self._product.keeps:
            raise UnsupportedError(_GIVEN_UP)
        if made and name == "bias" and (value is None) != (self.bias is None):
            raise UnsupportedError(
                "a layer that is laid out for the CPU keeps its bias, or goes without one: give it "
                "its own linear layer back first (restore, or prepack=False)"
            )
        super().__setattr__(name, value)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        # What stands for a weight that was given up would be written to, unheeded.
        if not self._product.keeps and f"{prefix}weight" in state_dict:
            error_msgs.append(f"{prefix}weight: {_GIVEN_UP}")
            return
        super()._load_from_state_dict(
            state_dict, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"product": self._product, "place": self._place, "training": self.training}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["product"], state["place"])  # type: ignore[misc]
        self.train(state["training"])

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.dense()


class _Product:
    """One product with the weights of all layers that read the same input, below one another."""

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], keep: bool
    ) -> None:
        """`keep`: the plain weights stay in memory beside what is laid out."""
        self.biases = list(biases)
        number = next(_NUMBERS)
        self.names = [_WAITING.format(number, place) for place in range(len(weights))]
        """Attributes of an input at which the layers' parts wait, each to be taken once."""
        self.tables: list[dict[str, Any]] = [{} for _ in weights]
        """The layers' own parameters, which others may have assigned."""
        self._kept = list(weights) if keep else []
        self._lay_out(weights)

    def _lay_out(self, weights: Sequence[Tensor]) -> None:
        self.sizes = [weight.shape[0] for weight in weights]
        self.features, self.dtype = weights[0].shape[1], weights[0].dtype
        self._packed, self._bias = _lay_out(_together(weights)), _bias(self.biases)
        kinds: Any = ("weight", self._kept), ("bias", self.biases)
        self._watched: list[tuple[int, str, Tensor]] = [
            (place, name, one)
            for name, some in kinds
            for place, one in enumerate(some)
            if one is not None
        ]
        self._states = [_state(tensor) for *_, tensor in self._watched]

    def __call__(self, x: Tensor) -> Tensor:
        """(…, I) → (…, ΣO)."""
        if self._watched and self._changed():
            self._take()
            self._lay_out(self._kept or [self.dense(place) for place in range(len(self.sizes))])
        return _multiply(x, self._packed, self._bias)

    def _changed(self) -> bool:
        """Whether what the layers have was assigned, trained or merged since it was laid out."""
        tables = self.tables
        for (place, name, tensor), state in zip(self._watched, self._states, strict=True):
            if tables[place].get(name, tensor) is not tensor or _state(tensor) != state:
                return True
        return False

    def _take(self) -> None:
        """Go on with what the layers have by now."""
        for place, name, tensor in self._watched:
            mine: list[Any] = self._kept if name == "weight" else self.biases
            mine[place] = self.tables[place].get(name, tensor)

    def share(self, x: Tensor, name: str) -> Tensor:
        """One layer's part (…, O); the others' wait at `x`."""
        waiting = vars(x)
        waiting |= zip(self.names, self(x).split_with_sizes(self.sizes, -1), strict=True)
        part: Tensor = waiting.pop(name)
        return part

    @property
    def keeps(self) -> bool:
        """Whether the plain weights are there."""
        return bool(self._kept)

    def parameter(self, place: int) -> nn.Parameter:
        """What stands for a layer's weight in the model."""
        if self._kept:
            kept = self._kept[place]
            # A copy's may be an embedding's, too: those stay one.
            return kept if isinstance(kept, nn.Parameter) else nn.Parameter(kept, False)
        if len(self.sizes) == 1:
            return nn.Parameter(self._packed, requires_grad=False)
        shape = self.sizes[place], self.features
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device="meta"), False)

    def dense(self, place: int) -> Tensor:
        """(O, I) one layer's plain weight."""
        if self._kept:
            kept: Tensor = self.tables[place].get("weight", self._kept[place])
            return kept
        return torch.split(self._packed.to_dense(), self.sizes)[place]

    def __getstate__(self) -> dict[str, Any]:
        """The plain weights: what is laid out can neither be copied nor pickled."""
        self._take()
        weights = [self.dense(place) for place in range(len(self.sizes))]
        return {"weights": weights, "biases": self.biases, "keep": self.keeps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Prepacked:
    """What `prepack` did to a model."""

    replaced: tuple[tuple[nn.Module, str, nn.Linear | None], ...] = ()
    """(parent, name, the layer as it was, None where it was not kept)."""
    left_alone: Counter[str] = field(default_factory=Counter)
    """Reason → how many linear layers it holds for."""

    def undo(self) -> None:
        """Put the layers back that were kept, with what was assigned since."""
        for parent, name, layer in self.replaced:
            packed = getattr(parent, name, None)
            if layer is not None and isinstance(packed, PackedLinear):
                layer.weight = packed.weight
                layer.bias = packed.bias  # type: ignore[assignment]
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
    for parent, names in list(_groups(model, left)):
        layers = [getattr(parent, name) for name in names]
        weights, biases = [one.weight for one in layers], [one.bias for one in layers]
        shape = sum(map(len, weights)), *weights[0].shape[1:], weights[0].dtype, biases[0] is None
        if shape not in verdicts:
            verdicts[shape] = _disagreement(_together(weights), _bias(biases))
        reason = verdicts[shape]
        if reason is not None:
            left[reason] += len(names)
            continue
        kept = keep or any(uses[id(weight)] > 1 for weight in weights)
        product = _Product(weights, biases, kept)
        for place, (name, layer) in enumerate(zip(names, layers, strict=True)):
            setattr(parent, name, PackedLinear(product, place))
            replaced.append((parent, name, layer if keep else None))
    return Prepacked(tuple(replaced), left)


def _groups(model: nn.Module, left: Counter[str]) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Linear layers that can be replaced, by the module they are in; `left`: why others cannot."""
    for parent in model.modules():
        alone: dict[str, nn.Linear] = {}
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                reason = _unlike(child)
                if reason is None:
                    alone[name] = child
                else:
                    left[reason] += 1
        for names in _SAME_INPUT:
            kinds = {_kind(alone[name]) if name in alone else None for name in names}
            if len(kinds) == 1 and None not in kinds:
                yield parent, names
                for name in names:
                    del alone[name]
        yield from ((parent, (name,)) for name in alone)


def _kind(layer: nn.Linear) -> tuple[int, torch.dtype, bool]:
    """What layers of one product have in common."""
    return layer.in_features, layer.weight.dtype, layer.bias is None


def _unlike(layer: nn.Linear) -> str | None:
    """Why a layer is not the plain one that can be replaced."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return f"{type(layer).__name__} computes in a way of its own"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "hooks watch them"
    weight = layer.weight
    if type(weight) is not nn.Parameter or weight.device.type != "cpu":
        return f"their weights are on {weight.device} as {type(weight).__name__}"
    if any(tensor.is_inference() for tensor in layer.parameters()):
        return "their weights were made in inference mode"
    if weight.dtype not in _DTYPES:
        return f"{str(weight.dtype).removeprefix('torch.')} has no such layout"
    return None


def _disagreement(weight: Tensor, bias: Tensor | None) -> str | None:
    """Why the packed operation cannot stand for these layers; None if it only rounds differently.

    Sums of I products in float32 may be off by some √I of its eps times Σ|x||w|, and the result is
    rounded to the layer's own type.
    """
    features, generator = weight.shape[1], torch.Generator().manual_seed(0)
    x = torch.randn((_ROWS, features), generator=generator, device="cpu").to(weight.dtype)
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


def _together(tensors: Sequence[Tensor]) -> Tensor:
    """Weights or biases of one product, below one another."""
    return tensors[0].detach() if len(tensors) == 1 else torch.cat([t.detach() for t in tensors])


def _bias(biases: Sequence[Tensor | None]) -> Tensor | None:
    """All layers of a product have one, or none has."""
    found = [bias for bias in biases if bias is not None]
    return _together(found) if found else None


def _state(tensor: Tensor) -> tuple[int, int]:
    """What changes when somebody writes to a tensor, but through `.data`."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _lay_out(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return out
