"""Our attention under the one name by which transformers' modules find it.

During a pass of ours the model's configurations name it. Keys that come from a cache of ours tell
that pass from other calls of the model meanwhile, by other threads: these get the function and the
mask that the configuration names otherwise.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftsmith.model.attention import packed_attention

NAME = "draftsmith"
"""What configurations name while one of our passes runs."""

_SETTING = "_attn_implementation_internal"
"""Where a configuration keeps its attention; the property around it checks names and recurses."""


@dataclass(slots=True)
class _Borrowed:
    """A configuration that names our attention, and what it names otherwise."""

    config: PretrainedConfig
    own: str | None
    passes: int = 0


_borrowed: dict[int, _Borrowed] = {}
"""By the id of the configuration, which is kept as long as its entry."""
_lock = threading.Lock()


def configurations(model: Module) -> list[PretrainedConfig]:
    """All that the modules of a model may ask for their attention."""
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
    """Let modules with these configurations find our function."""
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
    """What a configuration names, but for our passes; "eager" for a copy made during one."""
    one = _borrowed.get(id(config))
    name: str | None = vars(config).get(_SETTING) if one is None else one.own
    return "eager" if name == NAME else name


def _attention(module: Module, query: Tensor, key: Tensor, *args: Any, **options: Any) -> Any:
    """Ours for keys of our caches, for others what the user's configuration names."""
    function = packed_attention if hasattr(key, "packed") else _own_function(module)
    return function(module, query, key, *args, **options)


def _own_function(module: Module) -> Callable[..., Any]:
    """The attention function that transformers would call for a module."""
    name = own_name(module.config)
    if name in ALL_ATTENTION_FUNCTIONS:
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
        return function
    for kind in type(module).__mro__:
        eager = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
        if eager is not None:
            return eager  # type: ignore[no-any-return]
    return sdpa_attention_forward  # type: ignore[no-any-return]


def _mask(*args: Any, config: Any, **options: Any) -> Any:
    """The mask that goes with `_own_function`; our passes bring theirs."""
    name = own_name(config)
    known = name in ALL_MASK_ATTENTION_FUNCTIONS
    function = ALL_MASK_ATTENTION_FUNCTIONS[name] if known else sdpa_mask
    return function(*args, config=config, **options)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
