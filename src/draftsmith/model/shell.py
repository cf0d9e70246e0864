"""A user's model with another attention implementation, made without touching that model.

transformers asks `config._attn_implementation` in every attention module, and whoever sets it there
sets it for all threads. So a pass of ours runs in *shells*: second objects over the attributes of
the modules and configurations (the very same `__dict__`, hence the same weights, hooks and flags,
now and later) that hide a few of them behind slots: the setting, and what lies below.

Being there, they also take what a small model's pass spends in Python: children are found in slots,
and an RMS norm that is written out in eight operations runs as torch's, if not a bit changes.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from transformers import PretrainedConfig

_SETTING = "_attn_implementation_internal"
"""Where a configuration keeps its attention; the property around it checks names and recurses."""

_DICTS = (dict, OrderedDict)
"""Of children: a list of blocks that lost one has them in the second."""

_REPLACED_CALLS = ("forward", "_compiled_call_impl")
"""Attributes that, on an instance, run something which knows only the original."""


class OtherAttention:
    """Calls a model as if its attention setting were `name`, from any thread.

    Where there can be no shells, the setting itself is switched for the length of a call, and
    `exclusive` says why.
    """

    def __init__(self, model: Module, name: str) -> None:
        self._model = model
        self._name = name
        self._shells: _Shells | None = None

    @property
    def exclusive(self) -> str | None:
        """Why others must not call the model during our passes; None: they may."""
        return self._fitting().refusal

    def __call__(self, **options: Any) -> Any:
        """The model's output."""
        shells = self._fitting()
        if shells.refusal is None:
            return shells.root(**options)
        with self.switched():
            return self._model(**options)

    def _fitting(self) -> _Shells:
        """The shells of the model as it is now: adapters may have come or gone."""
        shells = self._shells
        if shells is None or not shells.current():
            shells = self._shells = _Shells(self._model, self._name)
        return shells

    @contextmanager
    def switched(self) -> Iterator[None]:
        """Set the model's own attention to `name`, one thread at a time; the user's comes back."""
        configs = self._fitting().configs
        with _locks.setdefault(self._model, threading.RLock()):
            saved = [config[_SETTING] for config in configs]
            try:
                for config in configs:
                    config[_SETTING] = self._name
                yield
            finally:
                for config, own in zip(configs, saved, strict=True):
                    config[_SETTING] = own

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_shells": None}  # a copy's are made over the copied model


_locks: WeakKeyDictionary[Module, threading.RLock] = WeakKeyDictionary()
"""By model: however often it was loaded, it is one, and two passes would restore each other's."""


class _Shells:
    """The shells of one model, and what they were made from."""

    def __init__(self, model: Module, name: str) -> None:
        parts, refers = _parts_below(model)
        tried = {n: epsilon for n, part in parts.items() if (epsilon := _rms_epsilon(part))}
        wanted = _above_settings(parts, refers) | tried.keys()
        self.configs = [vars(part) for part in parts.values() if _has_setting(part)]
        self.refusal: str | None = None
        """Why there can be no shells."""
        for part in map(parts.get, wanted):
            if any(vars(part).get(call) is not None for call in _REPLACED_CALLS):
                kind = type(part).__name__
                self.refusal = f"{kind} was compiled, or its forward was replaced"
        self._watched: list[tuple[dict[str, Any], str, Any, Any]] = []
        """Attributes, the name of one, its value, and what that held if it is a container."""
        self._norms: dict[Any, Any] = {}
        """Classes of norms that were tried, and what they ran then."""
        if self.refusal is not None:
            return
        self._norms = {type(parts[n]): type(parts[n]).forward for n in tried}
        classes: dict[Any, type] = {}
        hidden = {
            number: tuple(own for own, below in refers[number].items() if below & wanted)
            for number in wanted
        }
        # In a slot a child is found sooner than by `__getattr__`.
        near = {
            number: {
                own: child
                for own, child in vars(parts[number]).get("_modules", {}).items()
                if own.isidentifier() and not hasattr(type(parts[number]), own)
            }
            for number in wanted
        }
        shells = {
            n: _unfilled(parts[n], tried.get(n), name, (*hidden[n], *near[n]), classes)
            for n in wanted
        }
        for number, shell in shells.items():
            attributes = vars(parts[number])
            for own in hidden[number]:
                object.__setattr__(shell, own, _below(attributes[own], shells))
            for own, child in near[number].items():
                object.__setattr__(shell, own, shells.get(id(child), child))
            for own in {*hidden[number], "_modules", *_REPLACED_CALLS}:
                value = attributes.get(own)
                held = value.copy() if isinstance(value, dict | list) else None
                self._watched.append((attributes, own, value, held))
        self.root: Any = shells.get(id(model), model)

    def current(self) -> bool:
        """Whether the model still consists of the parts that the shells stand for."""
        for attributes, name, value, held in self._watched:
            if attributes.get(name) is not value or (held is not None and value != held):
                return False
        return all(kind.forward is tried for kind, tried in self._norms.items())


class _Shell:
    """What all shells are: made of an object, not by their class, which stands for another."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Nothing: what the bases do for a new class was done for the original's."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        """An ordinary object of the original's class, as slices of a ModuleList are."""
        return cls.__bases__[1](*arguments, **options)


class _ModuleShell(_Shell):
    """Finds the children that its slot names; equals the module it stands for, as dicts ask."""

    __slots__ = ()
    shell_of: Module
    _modules: dict[str, Module]

    def __getattr__(self, name: str) -> Any:
        if name in self._modules:
            return self._modules[name]
        return super().__getattr__(name)  # type: ignore[misc]

    def __eq__(self, other: object) -> bool:
        return self.shell_of is getattr(other, "shell_of", other)

    def __hash__(self) -> int:
        return hash(self.shell_of)


class _ListShell(_ModuleShell):
    """Of a list of blocks."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        """As the list does; but a slice of all is no copy, which takes as long as some norms."""
        places = range(len(self._modules))
        whole = isinstance(index, slice) and places[index] == places
        return self if whole else super().__getitem__(index)  # type: ignore[misc]


class _NormShell(_ModuleShell):
    """Of a norm that `_rms_epsilon` found to be one, in the type in which it was tried."""

    __slots__ = ()
    epsilon_name: str
    tried_dtype: torch.dtype

    def forward(self, x: Tensor | None = None, /, **named: Tensor) -> Tensor:
        """x / √(mean x² + ε), times the weight."""
        if x is None:  # whoever calls it by a name means the original's
            return super().forward(**named)  # type: ignore[misc, no-any-return]
        weight: Any = self._parameters["weight"]
        as_tried = self.tried_dtype == x.dtype == weight.dtype and x.device.type == "cpu"
        if named or not as_tried or torch.is_autocast_enabled("cpu"):
            return super().forward(x, **named)  # type: ignore[misc, no-any-return]
        epsilon = getattr(self, self.epsilon_name)
        return weight * torch.rms_norm(x, weight.shape, None, epsilon)  # type: ignore[no-any-return]


class _ConfigShell(_Shell):
    """Of a configuration: its attention is asked for in every layer, its property takes a while."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name == "_attn_implementation":
            return object.__getattribute__(self, _SETTING)
        return super().__getattribute__(name)


def _rms_epsilon(part: Any) -> str | None:
    """What a norm calls the number under its root, if it gives, whatever its weight, the very bits
    of torch's RMS norm on a CPU."""
    own = vars(part)
    name = next((name for name in ("variance_epsilon", "eps") if name in own), None)
    match own.get("_parameters"):
        case {"weight": Tensor(ndim=1, device=torch.device(type="cpu")) as weight, **others}:
            other = others or any(own.get(call) is not None for call in _REPLACED_CALLS)
        case _:
            return None
    # A second argument may be a gate.
    if name is None or other or len(inspect.signature(type(part).forward).parameters) != 2:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((5, len(weight)), generator=generator, device="cpu")
    # Squares that vanish beside the number, and large ones; the last row is a weight.
    x = (x * x.new_tensor([[1e-4], [1], [30], [3e3], [1]])).to(weight.dtype)
    norm: Any = object.__new__(type(part))
    quick: Any = object.__new__(type("Quick", (_NormShell, type(part)), {}))
    vars(norm).update(own, _parameters={"weight": x[4]})
    vars(quick).update(vars(norm), epsilon_name=name, tried_dtype=weight.dtype)
    try:
        with torch.inference_mode():  # a single row may take another kernel
            x = x.clone()
            same = [torch.equal(norm.forward(r), quick.forward(r)) for r in (x, x[None, :1])]
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    return name if all(same) else None


def _unfilled(
    part: Any, epsilon: str | None, name: str, hidden: tuple[str, ...], classes: dict[Any, type]
) -> Any:
    """A shell over `part`, with slots for the attributes that it hides; `classes` are kept."""
    base, own = type(part), {"shell_of": part}
    kind: type[_Shell] = _ListShell if isinstance(part, ModuleList) else _ModuleShell
    if _has_setting(part):
        kind, own = _ConfigShell, {_SETTING: name}
    elif epsilon is not None:
        kind = _NormShell
        own |= {"epsilon_name": epsilon, "tried_dtype": part.weight.dtype}
    if (base, kind, hidden) not in classes:
        body = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        slots = {"__slots__": (*own, *hidden)}
        classes[base, kind, hidden] = type(base.__name__, (kind, base), body | slots)
    shell: Any = object.__new__(classes[base, kind, hidden])
    object.__setattr__(shell, "__dict__", vars(part))
    for slot, value in own.items():
        object.__setattr__(shell, slot, value)
    return shell


def _parts_below(model: Module) -> tuple[dict[int, Any], dict[int, dict[str, set[int]]]]:
    """All modules and configurations by their id, and whom each refers to by which attribute."""
    parts: dict[int, Any] = {id(model): model}
    refers: dict[int, dict[str, set[int]]] = {}
    waiting: list[Any] = [model]
    while waiting:
        part = waiting.pop()
        own = refers[id(part)] = {}
        for name, value in vars(part).items():
            for found in _parts_in(value):
                own.setdefault(name, set()).add(id(found))
                if id(found) not in parts:
                    parts[id(found)] = found
                    waiting.append(found)
    return parts, refers


def _parts_in(value: Any) -> Iterator[Any]:
    """The modules and configurations that an attribute's value names."""
    if isinstance(value, Module | PretrainedConfig):
        yield value
    elif type(value) in (*_DICTS, list, tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _parts_in(item)


def _below(value: Any, shells: dict[int, Any]) -> Any:
    """The same value with shells in the place of those parts that have one."""
    if type(value) in _DICTS:
        return {key: _below(item, shells) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_below(item, shells) for item in value)
    return shells.get(id(value), value)


def _above_settings(parts: dict[int, Any], refers: dict[int, dict[str, set[int]]]) -> set[int]:
    """Ids of the configurations, and of whatever leads to one."""
    below = {number: set().union(*names.values()) for number, names in refers.items()}
    found: set[int] = set()
    above = {number for number, part in parts.items() if _has_setting(part)}
    while above:
        found |= above
        above = {number for number in below.keys() - found if below[number] & above}
    return found


def _has_setting(part: Any) -> bool:
    return isinstance(part, PretrainedConfig) and _SETTING in vars(part)
