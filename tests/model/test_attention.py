"""Attention of long spans, and what it tells whoever watches. Short ones: test_runner.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.errors import UnsupportedError
from draftsmith.model.attention import Packed, packed_attention, watch
from draftsmith.model.masks import EVERYTHING
from draftsmith.model.seen import Seen, attention_at

MODULE = torch.nn.Identity()


def rounding(dtype: torch.dtype, width: int) -> float:
    """By how much scores of `width` products, and the logarithm of a sum of them, may be off.

    Products are summed in float32, in any order; the scores here reach about 4. Kernels for half
    precision compute exponents no better than its type could store them.
    """
    sums = 4 * width**0.5 * torch.finfo(torch.float32).eps
    return sums if dtype == torch.float32 else sums + torch.finfo(dtype).eps / 2


def tensors(heads: int, groups: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(heads + queries)
    kv = heads // groups
    query = torch.randn(1, queries, heads, 16, generator=generator).transpose(1, 2)
    # Views into larger buffers, as a cache gives them; values narrower than keys, as in DeepSeek.
    key = torch.randn(3, kv, keys + 9, 16, generator=generator)[:1, :, :keys]
    value = torch.randn(3, kv, keys + 9, 8, generator=generator)[:1, :, :keys]
    return query, key, value


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Our attention of one row (1, …)."""
    module = options.pop("module", MODULE)
    carrier = torch.empty_like(key)
    carrier.packed = Packed([query.shape[2]], [mask], [key], [value])  # type: ignore[attr-defined]
    out, weights = packed_attention(module, query, carrier, carrier, EVERYTHING, **options)
    assert weights is None
    return out


def written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = query @ key.transpose(2, 3) / 4
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("queries", "keys"), [(129, 129), (300, 300), (300, 777)])
@pytest.mark.parametrize("window", [None, 40])
def test_a_long_span_attends_in_blocks(
    groups: int, queries: int, keys: int, window: int | None
) -> None:
    """Beside a short one; whoever watches changes nothing."""
    query, key, value = tensors(4, groups, queries + 3, keys + 2)
    key, value = (torch.cat([one, one.flip(1)]) for one in (key, value))
    masks = [_ordered(queries, keys, window), _ordered(3, keys + 2, window)]
    packed = [
        Packed([queries, 3], masks, [key[:1, :, :keys], key[1:]], [value[:1, :, :keys], value[1:]]),
        Packed([queries], masks[:1], [key[:1, :, :keys]], [value[:1, :, :keys]]),
    ]
    seen = list[Seen]()
    for both, asked in zip(packed, (query, query[:, :, :queries]), strict=True):
        carrier = torch.empty(1, 4 // groups, asked.shape[2], 16)
        carrier.packed = both  # type: ignore[attr-defined]
        module = torch.nn.Identity()
        seen.clear()
        given = module, asked[:1], carrier, carrier, EVERYTHING
        out, _ = packed_attention(*given, scaling=0.25)
        with watch({module: 0}, lambda _, one, span=0: seen.append(one)):  # noqa: ARG005
            watched, _ = packed_attention(*given, scaling=0.25)
        assert torch.equal(out, watched)
        assert [one.query.shape[2] for one in seen] == [*both.widths]
        parts = asked[:1].split_with_sizes(list(both.widths), 2)
        spans = zip(parts, both.keys, both.values, both.masks, strict=True)
        torch.testing.assert_close(out, torch.cat([written_out(*span) for span in spans], 1))


def _ordered(queries: int, keys: int, window: int | None) -> Tensor:
    """A random mask in which nobody looks behind itself."""
    mask = torch.rand(1, 1, queries, keys) < 0.5
    mask |= torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).triu(keys - queries)
    mask &= torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return mask if window is None else mask.triu(keys - queries - window)


@pytest.mark.parametrize(("queries", "masked"), [(1, False), (1, True), (5, True)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whoever_watches_changes_nothing_and_gets_the_totals(
    queries: int, masked: bool, groups: int, dtype: torch.dtype
) -> None:
    """The kernel asked for its totals is the one that sdpa takes."""
    query, key, _ = (t.to(dtype) for t in tensors(4, groups, queries, 11))
    visible = torch.ones(1, 1, queries, 11, dtype=torch.bool).tril_(11 - queries)
    mask = visible if masked else None
    seen: list[Seen] = []
    module = torch.nn.Identity()
    plain = attend(query, key, key, mask, module=module)
    with torch.inference_mode(), watch({module: 0}, lambda _, one: seen.append(one)):
        watched = attend(query, key, key, mask, module=module)
    assert torch.equal(plain, watched)
    totals = seen[0].totals
    assert totals is not None
    full = key.repeat_interleave(groups, dim=1).float()
    scores = (query.float() @ full.mT / 4).masked_fill(~visible, -torch.inf)
    torch.testing.assert_close(totals, scores.logsumexp(-1), rtol=0, atol=rounding(dtype, 16))
    weights = attention_at(
        {0: seen[0]}, [(0, 3), (0, 1)], queries - 1, torch.tensor([4, 0]), 11, 11
    )
    expected = scores.softmax(-1)[0, [3, 1], -1][:, [4, 0]]
    # A weight is the exponent of a score less the total: what both are off by, relatively.
    torch.testing.assert_close(weights, expected, rtol=2 * rounding(dtype, 16), atol=0)


@pytest.mark.parametrize("options", [{"position_bias": torch.zeros(1)}, {"dropout": 0.1}])
def test_what_only_transformers_functions_know_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="Identity makes its own masks"):
        attend(*tensors(4, 2, 1, 6), **options)
