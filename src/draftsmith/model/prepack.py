"""Linear layers of a CPU model with their weights laid out once, as oneDNN reads them.

Two thirds of a pass over a few tokens is matrix products at half the memory's bandwidth, because
every call lays out the weight again. torch has private operations for both halves: layout, and
multiplication with the result. Because they are private, they are compared with the layer they
replace, in every shape. A layer is left unchanged if results differ.

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
from draftsmith.model.changes import writes

_ROWS = 16
"""Rows for which the layout is made; it is good for every width from 1 to 32."""
_TRIED_ROWS = (1, 2, _ROWS)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WAITING = "_draftsmith_product_{}_{}"
"""Attribute of an input that holds a layer's part of a shared product until it is read."""
_NUMBERS = count()
"""Product numbers, which make the attribute names unique."""
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that read the same input in transformers' models: one wide product is faster."""
_KNOWN = ("transformers.",)
"""Packages with blocks that never write to an input between the layers that read it."""
_GIVEN_UP = (
    "the plain weight of this layer was dropped when it was laid out for the CPU, so it cannot be "
    "replaced: load the model with prepack=False"
)
_PART = 4096
"""Rows of a weight that are converted to float64 at a time."""


class PackedLinear(nn.Module):
    """`y = x Wᵀ + b` with W laid out for oneDNN. Replaces an `nn.Linear`."""

    def __init__(self, product: _Product, place: int) -> None:
        """`place`: index of this layer in its product."""
        super().__init__()
        self.in_features, self.out_features = product.features, product.sizes[place]
        self.weight, self.bias = product.parameter(place), product.biases[place]
        self._product, self._place, self._own = product, place, product.names[place]
        product.tables[place] = self._parameters

    def forward(self, x: Tensor) -> Tensor:
        """(…, I) → (…, O)."""
        product = self._product
        waiting = vars(x).pop(self._own, None)
        # Blocks of `_KNOWN` packages write nothing to x between the layers of a product.
        if waiting is not None:
            found: Tensor = waiting
            return found
        # oneDNN's product has no gradient.
        if torch.is_grad_enabled() and any(
            one is not None and one.requires_grad for one in (x, self.weight, self.bias)
        ):
            return linear(x, self.dense(), self.bias)
        if x.dtype != product.dtype or torch.is_autocast_enabled("cpu"):
            return linear(x, self.dense(), self.bias)
        return product(x) if len(product.sizes) == 1 else product.share(x, self._own)

    def dense(self) -> Tensor:
        """Plain weight (O, I)."""
        return self._product.dense(self._place)

    def __setattr__(self, name: str, value: Any) -> None:
        made = "_product" in vars(self)
        if made and name == "weight" and not self._product.keeps:
            raise UnsupportedError(_GIVEN_UP)
        if made and name == "bias" and (value is None) != (self.bias is None):
            raise UnsupportedError(
                "a layer that is laid out for the CPU can neither get a bias nor lose it: load the "
                "model with prepack=False"
            )
        super().__setattr__(name, value)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        # The placeholder of a dropped weight would be overwritten without effect.
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
    """One product of an input with the concatenated weights of all layers that read it."""

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], keep: bool
    ) -> None:
        """`keep`: keep the plain weights in memory, too."""
        self.biases = list(biases)
        number = next(_NUMBERS)
        self.names = [_WAITING.format(number, place) for place in range(len(weights))]
        """Attributes of an input that hold the layers' parts; each part is read once."""
        self.tables: list[dict[str, Any]] = [{} for _ in weights]
        """The layers' own parameter tables, which users may assign to."""
        self._kept = list(weights) if keep else []
        self._lay_out(weights)
        self._watch()

    def _lay_out(self, weights: Sequence[Tensor]) -> None:
        self.sizes = [weight.shape[0] for weight in weights]
        self.features, self.dtype = weights[0].shape[1], weights[0].dtype
        self._packed = _lay_out(_together(weights))

    def _watch(self) -> None:
        """Note the state of the biases, and of the weights that are kept."""
        self._bias = _bias(self.biases)
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
            if self._kept:
                self._lay_out(self._kept)
            self._watch()
        return _multiply(x, self._packed, self._bias)

    def _changed(self) -> bool:
        """Whether a layer's parameters were assigned, trained or merged since the layout."""
        tables = self.tables
        for (place, name, tensor), state in zip(self._watched, self._states, strict=True):
            if tables[place].get(name, tensor) is not tensor or _state(tensor) != state:
                return True
        return False

    def _take(self) -> None:
        """Take over the layers' current parameters."""
        for place, name, tensor in self._watched:
            stored: list[Any] = self._kept if name == "weight" else self.biases
            stored[place] = self.tables[place].get(name, tensor)

    def share(self, x: Tensor, name: str) -> Tensor:
        """Return one layer's part (…, O); keep the others' parts as attributes of `x`."""
        waiting = vars(x)
        waiting |= zip(self.names, self(x).split_with_sizes(self.sizes, -1), strict=True)
        part: Tensor = waiting.pop(name)
        return part

    @property
    def keeps(self) -> bool:
        """Whether the plain weights are in memory."""
        return bool(self._kept)

    def parameter(self, place: int) -> nn.Parameter:
        """Make the parameter that represents a layer's weight in the model."""
        if self._kept:
            kept = self._kept[place]
            # An embedding may share the weight, so the parameter object stays the same.
            return kept if isinstance(kept, nn.Parameter) else nn.Parameter(kept, False)
        if len(self.sizes) == 1:
            return nn.Parameter(self._packed, requires_grad=False)
        shape = self.sizes[place], self.features
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device="meta"), False)

    def dense(self, place: int) -> Tensor:
        """Plain weight (O, I) of one layer."""
        if self._kept:
            kept: Tensor = self.tables[place].get("weight", self._kept[place])
            return kept
        return torch.split(self._packed.to_dense(), self.sizes)[place]

    def __getstate__(self) -> dict[str, Any]:
        """Return the plain weights; the layout can neither be copied nor pickled."""
        self._take()
        weights = [self.dense(place) for place in range(len(self.sizes))]
        return {"weights": weights, "biases": self.biases, "keep": self.keeps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Prepacked:
    """Result of `prepack`."""

    replaced: tuple[tuple[nn.Module, str, nn.Linear | None], ...] = ()
    """(parent, name, original layer), None for a layer that was not kept."""
    left_alone: Counter[str] = field(default_factory=Counter)
    """Reason → number of linear layers that were left unchanged for it."""

    def undo(self) -> None:
        """Restore the kept layers, with parameters that were assigned since."""
        for parent, name, layer in self.replaced:
            packed = getattr(parent, name, None)
            if layer is not None and isinstance(packed, PackedLinear):
                layer.weight = packed.weight
                layer.bias = packed.bias  # type: ignore[assignment]
                setattr(parent, name, layer)

    def refused(self, reason: str) -> Prepacked:
        """Return the result for a model that was loaded again without its replaced layers."""
        return Prepacked((), self.left_alone + Counter({reason: len(self.replaced)}))

    def explain(self) -> str:
        """Return the result as a sentence for a person."""
        done = len(self.replaced)
        text = f"{done} of {done + self.left_alone.total()} linear layers are laid out for oneDNN"
        why = "; ".join(f"{count} are not: {reason}" for reason, count in self.left_alone.items())
        return f"{text}. {why}" if why else text


def prepack(model: nn.Module, keep: bool) -> Prepacked:
    """Replace a model's linear layers by packed ones, if these compute the same.

    With `keep` the plain weights stay in memory, and `Prepacked.undo` restores the layers.
    Otherwise they are dropped, so the model needs no more memory than before. Weights that other
    modules share, such as embeddings, are always kept.
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
    """Yield linear layers that can be replaced, by parent; counts the others' reasons in `left`."""
    adapters = (one for one in model.modules() if hasattr(one, "merged_adapters"))
    merging = {part for adapter in adapters for part in adapter.modules()}
    for parent in model.modules():
        alone: dict[str, nn.Linear] = {}
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                # PEFT merges adapters through `.data`, which no layout notices.
                reason = "adapters may be merged into them" if parent in merging else _unlike(child)
                if reason is None:
                    alone[name] = child
                else:
                    left[reason] += 1
        for names in _SAME_INPUT if type(parent).__module__.startswith(_KNOWN) else ():
            kinds = {_kind(alone[name]) if name in alone else None for name in names}
            if len(kinds) == 1 and None not in kinds:
                yield parent, names
                for name in names:
                    del alone[name]
        yield from ((parent, (name,)) for name in alone)


def _kind(layer: nn.Linear) -> tuple[int, torch.dtype, bool]:
    """Properties of layers that one product can compute."""
    return layer.in_features, layer.weight.dtype, layer.bias is None


def _unlike(layer: nn.Linear) -> str | None:
    """Reason why a layer cannot be replaced; None if it can."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return f"{type(layer).__name__} is not a plain linear layer"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "they have hooks"
    weight = layer.weight
    if type(weight) is not nn.Parameter or weight.device.type != "cpu":
        return f"their weights are on {weight.device} as {type(weight).__name__}"
    if any(tensor.is_inference() for tensor in layer.parameters()):
        return "their weights were made in inference mode"
    if weight.dtype not in _DTYPES:
        return f"{str(weight.dtype).removeprefix('torch.')} has no packed layout"
    return None


def _disagreement(weight: Tensor, bias: Tensor | None) -> str | None:
    """Reason why the packed operation cannot replace these layers; None if it can.

    Sums of I products in float32 may differ by about √I of its eps times Σ|x||w|, and the result is
    rounded to the layer's dtype.
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
        return f"torch cannot pack them ({first_line(error)})"
    summing = 4 * torch.finfo(torch.float32).eps * features**0.5 * summed
    allowed = summing + torch.finfo(weight.dtype).eps * exact.abs()
    for rows, found in tried.items():
        off = (found - exact[:rows]).abs()
        if not bool((off <= allowed[:rows]).all()):
            return f"results would differ by up to {off.max():.2g}"
    return None


def _exactly(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(M, O) x Wᵀ and Σ|x||w| in float64, in parts, because a large weight would not fit."""
    wide, exact, summed = x.double(), [], []
    for rows in torch.split(weight, _PART):
        part = rows.double()
        exact.append(linear(wide, part))
        summed.append(linear(wide.abs(), part.abs()))
    return torch.cat(exact, -1), torch.cat(summed, -1)


def _together(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate weights or biases of one product."""
    return tensors[0].detach() if len(tensors) == 1 else torch.cat([t.detach() for t in tensors])


def _bias(biases: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate biases. Either all layers of a product have one, or none has."""
    found = [bias for bias in biases if bias is not None]
    return _together(found) if found else None


def _state(tensor: Tensor) -> tuple[int, int]:
    """Return a key that changes when a tensor is written to, except through `.data`."""
    return tensor.data_ptr(), writes(tensor)


def _lay_out(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return out
