"""Registers our attention with transformers under one name.

During one of our passes, the model's configurations contain that name. Other threads may call the
model at the same time. Their keys do not come from our cache, so they get the function and the mask
that the configuration names otherwise.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import transformers
from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftsmith.model.attention import packed_attention

NAME = "draftsmith"
"""Name of our attention in configurations during our passes."""

_SETTING = "_attn_implementation_internal"
"""Attribute with the name. The public property would check it and change sub-configurations."""


@dataclass(slots=True)
class _Borrowed:
    """A configuration that names our attention, and the name that it has otherwise."""

    config: PretrainedConfig
    own: str | None
    passes: int = 0


_borrowed: dict[int, _Borrowed] = {}
"""By the id of the configuration, which the entry keeps alive."""
_lock = threading.Lock()


def configurations(model: Module) -> list[PretrainedConfig]:
    """Return all configurations from which the modules of a model may read their attention."""
    found: dict[int, PretrainedConfig] = {}
    waiting = [value for module in model.modules() for value in vars(module).values()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PretrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += vars(config).values()
    return [config for config in found.values() if _SETTING in vars(config)]


@contextmanager
def our_attention(configs: Sequence[PretrainedConfig]) -> Iterator[None]:
    """Make modules with these configurations call our function while the context is open."""
    taken: list[_Borrowed] = []
    try:
        with _lock:
            for config in configs:
                own = vars(config)[_SETTING]
                one = _borrowed.setdefault(id(config), _Borrowed(config, own))
                if own != NAME:
                    one.own, vars(config)[_SETTING] = own, NAME
                one.passes += 1
                taken.append(one)
        yield
    finally:
        with _lock:
            for one in taken:
                one.passes -= 1
                if not one.passes:
                    if vars(one.config)[_SETTING] == NAME:
                        vars(one.config)[_SETTING] = one.own
                    del _borrowed[id(one.config)]


def own_name(config: Any) -> str | None:
    """Return the name outside of our passes; "eager" for a copy made during one."""
    one = _borrowed.get(id(config))
    name: str | None = vars(config).get(_SETTING) if one is None else one.own
    return "eager" if name == NAME else name


def foreign_attention(config: Any) -> str | None:
    """Return the name of the configuration's attention if a user registered it, or its mask."""
    name = own_name(config)
    if "/" in str(name):  # a kernel of the hub, which computes the same as transformers
        return None
    for function in (ALL_ATTENTION_FUNCTIONS.get(name), ALL_MASK_ATTENTION_FUNCTIONS.get(name)):
        # A decorated function has the module of the one that it wraps as `__module__`.
        home = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
        if function is not None and not home.startswith(("transformers.", "draftsmith.")):
            return name
    return None


def _attention(module: Module, query: Tensor, key: Tensor, *args: Any, **options: Any) -> Any:
    """Call our function for keys of our caches, else the one the user's configuration names."""
    function = packed_attention if hasattr(key, "packed") else _own_function(module)
    return function(module, query, key, *args, **options)


def _own_function(module: Module) -> Callable[..., Any]:
    """Return the attention function that transformers would call for a module."""
    name = own_name(module.config)
    if name in ALL_ATTENTION_FUNCTIONS:
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
        return function
    return _eager_function(module)


def _eager_function(module: Module) -> Callable[..., Any]:
    """Return the eager attention function of a module's model, which is in its file."""
    for kind in type(module).__mro__:
        eager = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
        if eager is not None:
            return eager  # type: ignore[no-any-return]
    return sdpa_attention_forward  # type: ignore[no-any-return]


def _mask(*args: Any, config: Any, **options: Any) -> Any:
    """Return the mask for `_own_function`; our passes do not use it."""
    name = own_name(config)
    known = name in ALL_MASK_ATTENTION_FUNCTIONS
    function = ALL_MASK_ATTENTION_FUNCTIONS[name] if known else sdpa_mask
    return function(*args, config=config, **options)


def _eager(module: Module, *args: Any, **options: Any) -> Any:
    return _eager_function(module)(module, *args, **options)


AttentionInterface.register(NAME, _attention)
if transformers.__version__ < "5":
    # There, models read the name twice: "is it eager?", then which function has it. A pass of ours
    # that ends between the two, in another thread, would leave them without one.
    AttentionInterface.register("eager", _eager)
AttentionMaskInterface.register(NAME, _mask)
