"""Calls the model's `forward`. No other module does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationMixin

from draftsmith.errors import UnsupportedError
from draftsmith.model.devices import send
from draftsmith.model.pass_cache import PassCache
from draftsmith.model.registered import configurations, our_attention
from draftsmith.model.rope import forget, growing

_CACHE_NAMES = ("cache", "cache_params", "past_key_values")
"""Names of a model's cache in arguments and outputs. "cache" is used from transformers 5.24 on."""


class Recorder(Protocol):
    """Records a pass; see `taps.PassTaps`."""

    def recording(self) -> AbstractContextManager[None]:
        """Record as long as the context is open."""


class Forward:
    """Calls a model with the arguments that its class and transformers' version accept.

    `packs`: passes may be packed, which requires our attention. Otherwise the model uses its own.
    """

    def __init__(self, model: Any, packs: bool = False) -> None:
        known = dict(inspect.signature(unwrapped(model).forward).parameters)
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            # An adapter with virtual tokens before ours must compute the positions itself.
            known = {n: p for n, p in known.items() if n not in ("position_ids", "cache_position")}
        self._model = model
        # Compiled blocks call no hooks, so recorded passes run the model uncompiled.
        self._recorded = _uncompiled(model)
        self._configs = configurations(model) if packs else []
        self._positions = "position_ids" in known
        self._cache_position = "cache_position" in known
        self._keep = next((n for n in ("logits_to_keep", "num_logits_to_keep") if n in known), None)
        self.picks = "Tensor" in str(known[self._keep].annotation) if self._keep else False
        """Whether the model can return the logits of any list of positions."""
        text = getattr(model.config, "get_text_config", lambda: model.config)()
        self._drops = bool(getattr(text, "num_kv_shared_layers", 0))
        """Whether it may drop positions that a number leaves out before its last layers, for which
        our masks have other sizes (Gemma 4)."""
        self._routers = "output_router_logits" in known and bool(
            getattr(text, "output_router_logits", False)
        )
        """Whether it would compute a loss of its routers, for which our masks have other sizes."""
        self._cache = cache_name(unwrapped(model).forward)
        self.device = input_device(model)
        self._head_device = torch.device("cpu")
        """Indices there suit a head on any device, but the host waits while they are copied."""
        head = getattr(model.get_output_embeddings(), "weight", None)
        if isinstance(head, Tensor) and not head.is_meta:
            self._head_device = head.device
        self._hooked = any(hasattr(one, "_hf_hook") for one in (model, unwrapped(model)))
        self._growing = growing(self._recorded)

    def __call__(
        self,
        tokens: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        mask: Tensor | dict[str, Tensor] | None,
        cache: Any,
        last: int | Sequence[int] | Tensor,
        taps: Recorder | None = None,
    ) -> Any:
        """Return the output for tokens (B, Q), with logits of at least the `last` positions.

        `last` is a number of positions, or a result of `logits_of`. Without a `mask` the model
        makes a causal one. `cache=None` lets the model make its own cache, False asks for none.
        `taps` records what drafters need.
        """
        if self._growing:
            forget(self._growing, 1 + max(map(max, positions)))
        both = send([tokens, positions], self.device)
        return self.compute(both[0], both[1], mask, cache, last, taps)

    def compute(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | dict[str, Tensor] | None,
        cache: Any,
        last: int | Sequence[int] | Tensor,
        taps: Recorder | None = None,
    ) -> Any:
        """Return the output for tokens and positions (B, Q) on the model's device.

        Copies nothing from the host. The caller must know that rotary angles do not grow.
        """
        options: dict[str, Any] = {"input_ids": tokens, "use_cache": cache is not False}
        if cache is not None and cache is not False:
            options[self._cache] = cache
        if mask is not None:
            options["attention_mask"] = mask
        if self._positions:
            options["position_ids"] = positions
        if self._cache_position and len(tokens) == 1:
            # Transformers 4 scales some layers by it, and its default counts slots, not positions.
            options["cache_position"] = positions[0]
        if self._keep is not None:
            options[self._keep] = last
        if self._routers:
            options["output_router_logits"] = False
        if taps is None:
            return self._run(self._model, cache, options)
        with taps.recording():
            return self._run(self._recorded, cache, options)

    def _run(self, model: Any, cache: Any, options: dict[str, Any]) -> Any:
        """Return the output; in a packed pass, check that every layer called our attention.

        Raises UnsupportedError if a layer does not.
        """
        if not isinstance(cache, PassCache):
            return model(**options)
        with our_attention(self._configs):
            output = model(**options)
        if cache.attended:
            return output
        self._configs = configurations(self._model)  # the user may have replaced blocks
        cache.restart()
        with our_attention(self._configs):
            output = model(**options)
        if not cache.attended:
            raise UnsupportedError(
                f"{type(unwrapped(model)).__name__} changes keys after they were cached, or never "
                "calls an attention function"
            )
        return output

    def logits_of(self, positions: Sequence[int], width: int) -> int | Sequence[int] | Tensor:
        """Return the argument that asks for the logits of ascending `positions` of `width`.

        A number n asks for at least the last n positions; any other value asks for exactly these.
        """
        last = width - positions[0]
        if (len(positions) == last and (last == width or not self._drops)) or not self.picks:
            return last
        # Hooks of a device map would move a tensor to the first device instead of the head's, and a
        # compiler would recompile for every list.
        return list(positions) if self._hooked else send(positions, self._head_device)

    def prepared_cache(self, tokens: Sequence[int]) -> Any:
        """Return the empty cache with which the model's `generate` would start these tokens.

        Raises UnsupportedError if it would start without one.
        """
        ids = torch.tensor([list(tokens)], device=self.device)
        inputs = self._model.prepare_inputs_for_generation(
            ids,
            attention_mask=torch.ones_like(ids),
            cache_position=torch.arange(ids.shape[1], device=self.device),
            use_cache=True,
        )
        cache = cache_of(inputs)
        if cache is None:
            raise UnsupportedError("it neither returns a cache nor prepares one")
        return cache


def cache_name(forward: Callable[..., Any]) -> str:
    """Return the name of the cache argument of a model's `forward`, from its signature.

    A `forward` without such a name takes the cache as transformers' own methods do.
    """
    both = (forward, GenerationMixin.prepare_inputs_for_generation)
    signatures = [inspect.signature(function).parameters for function in both]
    return next(name for known in signatures for name in _CACHE_NAMES if name in known)


def cache_of(output: Mapping[str, Any]) -> Any:
    """Return the cache in a model's output or prepared inputs; None if there is none.

    Only names that are present are read: in some versions, reading an old name warns.
    """
    return next((value for name, value in output.items() if name in _CACHE_NAMES), None)


def _uncompiled(model: Any) -> Any:
    """Return what torch.compile wrapped, or the model itself."""
    return getattr(model, "_orig_mod", model)


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside a PEFT or compiled one, or the model itself."""
    model = _uncompiled(model)
    return _uncompiled(model.get_base_model() if hasattr(model, "get_base_model") else model)


def is_compiled(model: Any) -> bool:
    """Whether the model or a part of it is compiled."""
    for module in model.modules():
        replaced = vars(module).get("forward")
        if hasattr(module, "_orig_mod") or hasattr(replaced, "_torchdynamo_orig_callable"):
            return True
        if getattr(module, "_compiled_call_impl", None) is not None:
            return True
    return False


def input_device(model: Any) -> torch.device:
    """Return the device for input ids, also of a model with offloaded weights."""
    embeddings = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device
    if device.type != "meta":
        return device
    hook = getattr(embeddings, "_hf_hook", None)
    for one in (hook, *getattr(hook, "hooks", ())):
        if getattr(one, "execution_device", None) is not None:
            return torch.device(one.execution_device)
    return torch.device(model.device)
