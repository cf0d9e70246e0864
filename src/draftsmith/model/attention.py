"""Our attention function: several rows per pass, any mask, grouped heads without copies.

Shapes: `B` rows, `H` query heads, `K` key heads, `G = H / K`, `Q` queries, `S` keys, `D` width.

Under a mask, sdpa copies every key and value `G` times for grouped-query attention. The queries of
a group share their keys, so we pass them as `G·Q` queries of one head. The result is the same, and
nothing is copied (twice as fast at 4096 cached positions, 16/2 heads and 8 queries).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention, softmax
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftsmith.errors import UnsupportedError
from draftsmith.model.masks import EVERYTHING
from draftsmith.model.seen import Seen

MOST_GROUPED = 160
"""Most queries for which grouping is faster: for more, repeated masks cost more than keys."""

BLOCK = 128
"""Most queries per block of a longer span on a CPU. A block skips the keys after its last query."""

MOST_IN_BLOCKS = 1024
"""Most queries of a span that is computed in blocks; a longer one would need too large a mask."""

_MOST_MASKED = 1 << 25
"""Most entries of a mask repeated for each query of a group, which is kept for all layers."""

_ALIGNMENT = 8
"""Lines of a mask begin at multiples of it, for CUDA's memory-efficient kernel."""

_UNKNOWN = {"position_bias", "head_mask", "cache", "cu_seq_lens_q", "block_mask"}
"""Arguments that change the result and that only transformers' own functions implement."""


Form = tuple[float | None, float | None, Tensor | None]
"""(scaling, softcap, sinks): factor and bound of the scores, attention sinks (H,)."""

Look = Callable[..., None]
"""Callback `(seen, span=…)`: the inputs of one attention, and the index of its span."""


@dataclass(slots=True)
class Packed:
    """Inputs of one layer's attention in a packed pass, by span, in the order of the queries."""

    widths: Sequence[int]
    """Queries of each span."""
    masks: Sequence[Tensor | None]
    """A mask (R, 1, q, S) per span of R rows, where the last q keys are those of the queries.

    No query sees a key after its own. None means that a query sees all other keys. In passes of
    fixed shape, keys may be in any order; such spans are narrower than a `BLOCK`.
    """
    keys: Sequence[Tensor]
    """(R, K, S, D) per span: the cached keys of its rows, then those of this pass; or all slots.

    The queries of a span of R merged rows are those of its rows, in equal numbers.
    """
    values: Sequence[Tensor]
    attend: Callable[[Tensor, Form], Tensor] | None = None
    """Replacement for our attention: query (1, H, Q, D) → (1, Q, H, D).

    Queries after those of the spans may follow; their output is not used.
    """
    attended: bool = False
    """Whether the layer called our attention."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,  # noqa: ARG001  in `packed`
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention (1, Q, H, D) of query (1, H, Q, D) over the keys in `key.packed`.

    `attention_mask` is `masks.EVERYTHING`, because each span has its own mask. `softcap` bounds the
    scores (Gemma 2), `s_aux` (H,) are attention sinks (gpt-oss).

    Raises UnsupportedError for arguments that only transformers' own functions implement.
    """
    packed: Packed = key.packed  # type: ignore[attr-defined]
    packed.attended = True
    unknown = _UNKNOWN & kwargs.keys()
    if (
        dropout
        or attention_mask is None
        or attention_mask.shape[-2:] != (1, 1)
        or _altered(attention_mask)
        or query.shape[1] % key.shape[1]
        or (unknown and any(kwargs[name] is not None for name in unknown))
    ):
        raise UnsupportedError(
            f"{type(module).__name__} makes its own masks, or calls attention with arguments that "
            "only transformers' own functions implement"
        )
    # torch.compile cannot trace a context variable, and compiled passes are never recorded.
    watched = None if torch.compiler.is_compiling() else _watched.get()
    look = watched.get(module) if watched else None
    return _attend_packed(module, query, packed, (scaling, softcap, s_aux), look), None


def _altered(mask: Tensor) -> bool:
    """Whether the model made a mask of its own from ours, as far as the address shows."""
    if torch.compiler.is_compiling() or not mask.is_cpu:
        return False
    return mask.data_ptr() != EVERYTHING.data_ptr()


def _attend_packed(
    module: torch.nn.Module, query: Tensor, packed: Packed, form: Form, look: Look | None
) -> Tensor:
    """Attention (1, Q, H, D) of adjacent spans, each over the keys of its own row."""
    scaling, softcap, sinks = form
    if packed.attend is not None:
        if look is not None:
            asked = query.narrow(2, 0, sum(packed.widths)).split_with_sizes(packed.widths, 2)
            looked = zip(asked, packed.keys, packed.masks, strict=True)
            for place, parts in enumerate(looked):
                look(Seen(*parts, scaling, softcap, sinks), span=place)
        return packed.attend(query, form)
    if len(packed.widths) == 1:
        key, value, mask = packed.keys[0], packed.values[0], packed.masks[0]
        rows = len(key)
        if rows == 1:
            return _attend(module, query, key, value, mask, form, look)
        queries = query[0].reshape(query.shape[1], rows, -1, query.shape[3]).transpose(0, 1)
        return _attend(module, queries, key, value, mask, form, look).flatten(0, 1)[None]
    heads, kv_heads = query.shape[1], packed.keys[0].shape[1]
    # (Q, K, G, D), so that a single query of a span needs no further transposition.
    grouped = query[0].transpose(0, 1).reshape(-1, kv_heads, heads // kv_heads, query.shape[3])
    simple = softcap is None and sinks is None and look is None
    outs = []
    spans = zip(
        grouped.split_with_sizes(packed.widths),
        packed.keys,
        packed.values,
        packed.masks,
        strict=True,
    )
    for span, (own, key, value, mask) in enumerate(spans):
        single = len(own) == len(key) and mask is None  # one row, or several merged ones
        if simple and single:
            outs.append(scaled_dot_product_attention(own, key, value, scale=scaling))
            continue
        queries = own.reshape(len(own), heads, 1, -1)
        if not single:
            queries = queries.transpose(0, 2)
        seen = None if look is None else partial(look, span=span)
        out = _attend(module, queries, key, value, mask, form, seen)
        outs.append(out.reshape(len(own), *grouped.shape[1:3], -1))
    return torch.cat(outs).flatten(1, 2)[None]


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    form: Form,
    look: Look | None,
) -> Tensor:
    """Attention (B, Q, H, D) of one span, by the fastest way."""
    (scaling, softcap, sinks), totals = form, None
    queries = query.shape[2]
    repeats = query.shape[1] > key.shape[1] and queries > MOST_GROUPED
    if softcap is not None or sinks is not None:
        out = _explicit(query, key, value, mask, scaling, softcap, sinks)
    elif mask is not None and _pays_in_blocks(query, key):
        out = _in_blocks(query, key, value, mask, scaling)
    elif mask is None and 1 < queries < key.shape[2]:
        out = _after_others(query, key, value, scaling)
    elif queries > 1 and (mask is None or repeats):
        out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)
    else:
        out, totals = _grouped(query, key, value, mask, scaling, totals=look is not None)
    if look is not None:
        look(Seen(query, key, mask, scaling, softcap, sinks, totals))
    return out


def _after_others(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Causal attention (1, Q, H, D) of a part of a prompt after cached keys.

    On a GPU, torch's fused kernels need no mask for it.
    """
    groups, causal = (
        query.shape[1] // key.shape[1],
        causal_lower_right(query.shape[2], key.shape[2]),
    )
    key, value = (t if groups == 1 else t.repeat_interleave(groups, dim=1) for t in (key, value))
    out = scaled_dot_product_attention(query, key, value, attn_mask=causal, scale=scaling)
    return out.transpose(1, 2).contiguous()


def _pays_in_blocks(query: Tensor, key: Tensor) -> bool:
    """Whether this many queries on a CPU are faster in blocks."""
    _, heads, queries, _ = query.shape
    masked = heads // key.shape[1] * queries * key.shape[2]
    fits = BLOCK < queries <= MOST_IN_BLOCKS and masked <= _MOST_MASKED
    return fits and query.device.type == "cpu"


def _in_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Attention (1, Q, H, D) of a span in blocks of grouped queries.

    Each block reads the keys up to its last query, which skips half of a chunk's own keys. The
    kernel is also faster with many queries per head.
    """
    _, heads, _, width = query.shape
    groups, outs, begin = heads // key.shape[1], list[Tensor](), 0
    for block in _repeated(mask, groups, query.dtype, BLOCK):
        end, keys = begin + block.shape[2] // groups, block.shape[3]
        own = query[:, :, begin:end].reshape(1, key.shape[1], -1, width)
        seen = key[:, :, :keys], value[:, :, :keys]
        out = scaled_dot_product_attention(own, *seen, attn_mask=block, scale=scaling)
        outs.append(out.reshape(1, heads, end - begin, -1).transpose(1, 2))
        begin = end
    return torch.cat(outs, dim=1)


def _grouped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    totals: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention (B, Q, H, D) with the queries of a group as queries of one head.

    With `totals`, also (B, H, Q) logarithms of the sums of exponents, or None where no kernel
    returns them.
    """
    batch, heads, queries, width = query.shape
    groups = heads // key.shape[1]
    query = query.reshape(batch, key.shape[1], groups * queries, width)
    times = groups if queries > 1 else 1
    if mask is not None:
        (mask,) = _repeated(mask, times, query.dtype, queries)
    sums: Tensor | None = None
    if totals and _tells_totals(query, value):
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask, scale=scaling
        )
        sums = sums.reshape(batch, heads, queries)
    else:
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    if queries == 1:  # the same result in fewer operations
        return out.reshape(batch, 1, heads, -1), sums
    return out.reshape(batch, heads, queries, -1).transpose(1, 2).contiguous(), sums


def _repeated(mask: Tensor, groups: int, dtype: torch.dtype, most: int) -> Sequence[Tensor]:
    """Return what is added to the scores of grouped queries, in blocks of q ≤ `most` queries.

    Each block is (B or 1, 1, G·q, S'), where S' counts the keys up to its last query. The result is
    kept for all layers; given a bool mask, sdpa would convert it again in every layer. On other
    devices than CPUs, the lines of a mask begin at multiples of `_ALIGNMENT` entries in memory;
    CUDA's kernel would pad other masks in every layer.
    """
    queries, keys = mask.shape[2:]
    room = keys if mask.device.type == "cpu" else -(-keys // _ALIGNMENT) * _ALIGNMENT
    form = groups, dtype, -(-queries // most)
    kept = _REPEATED.get(mask)
    if kept is None or kept[0] != form:
        added = mask.new_zeros((*mask.shape[:3], room), dtype=dtype)
        added[..., :keys].masked_fill_(~mask, float("-inf"))
        parts, end, blocks = added.tensor_split(form[2], dim=2), keys - queries, list[Tensor]()
        for part in parts:
            end += part.shape[2]
            stored = part if end == keys else part[..., :end]
            blocks.append(stored.repeat(1, 1, groups, 1)[..., :end])
        kept = _REPEATED[mask] = form, blocks
    return kept[1]


_REPEATED: MutableMapping[Tensor, tuple[tuple[int, torch.dtype, int], Sequence[Tensor]]] = (
    WeakTensorKeyDictionary()
)
"""Results of `_repeated`, by the mask that all layers of a pass share."""


def _tells_totals(query: Tensor, value: Tensor) -> bool:
    """Whether sdpa would use the kernel that also returns the logarithms of the sums of exponents.

    Without them, one attention weight costs the scores of all keys again.
    """
    same_width = query.shape[3] == value.shape[3]
    # In spite of its name, this switch also disables the CPU kernel.
    on: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    return query.device.type == "cpu" and same_width and on


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention without a fused kernel, for capped scores and sinks."""
    batch, heads, queries, width = query.shape
    groups = heads // key.shape[1]
    grouped = query.reshape(batch, key.shape[1], groups * queries, width)
    scale = width**-0.5 if scaling is None else scaling
    scores = (grouped @ key.transpose(2, 3)).view(batch, heads, queries, -1) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None and queries > 1:
        mask = torch.ones_like(scores[:1, :1], dtype=torch.bool).tril_(key.shape[2] - queries)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(batch, heads, queries, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    out = weights.reshape(batch, key.shape[1], groups * queries, -1) @ value
    return out.view(batch, heads, queries, -1).transpose(1, 2).contiguous()


_watched: ContextVar[Mapping[torch.nn.Module, Look]] = ContextVar("watched", default={})  # noqa: B039  never written to
"""Callback of each attention module that is recorded in this thread's pass."""


@contextmanager
def watch(modules: Mapping[torch.nn.Module, int], look: Callable[..., None]) -> Iterator[None]:
    """Call `look(layer, seen, span=…)` for each attention of these modules during one pass."""
    token = _watched.set({module: partial(look, layer) for module, layer in modules.items()})
    try:
        yield
    finally:
        _watched.reset(token)
