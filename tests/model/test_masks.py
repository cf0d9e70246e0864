"""Masks small enough to write down."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from architectures import build
from draftsmith.core.draft import Draft
from draftsmith.model.masks import Span, visible
from draftsmith.model.windows import Window, first_visible, layer_windows, windows_by_layer

TREE = Draft((5, 6, 7), (-1, 0, -1), ("test",) * 3)
FULL = {"full_attention": None}


def drawn(mask: torch.Tensor) -> list[str]:
    return ["".join(".x"[int(v)] for v in row) for row in mask]


def seen(span: Span, window: Window = None) -> torch.Tensor:
    first = first_visible(window, span.cached)
    return visible(span, first, window)


def test_a_tree_behind_two_pending_tokens() -> None:
    mask = seen(Span(3, 2, TREE))
    assert mask.shape == (1, 1, 5, 8)
    assert drawn(mask[0, 0]) == [
        "xxxx....",
        "xxxxx...",
        "xxxxxx..",
        "xxxxxxx.",
        "xxxxx..x",
    ]


def test_a_window_is_measured_in_positions() -> None:
    # Root at position 4; the last node sits in slot 7, but at position 5. Two slots are not read.
    mask = seen(Span(4, 1, TREE), 3)
    assert drawn(mask[0, 0]) == ["xxx...", ".xxx..", "..xxx.", ".xx..x"]


def test_a_chain_longer_than_its_window() -> None:
    queries, keys = torch.arange(4, 11), torch.arange(11)
    want = (keys <= queries[:, None]) & (queries[:, None] - keys < 3)
    assert torch.equal(seen(Span(4, 7), 3)[0, 0], want[:, 2:])
    assert not want[:, :2].any()


def test_layer_types_of_real_configs() -> None:
    def types(name: str, **overrides: object) -> dict[str, Window]:
        return layer_windows(build(name, **overrides).config)

    assert types("llama") == FULL
    assert types("mistral") == {"sliding_attention": 8}
    assert types("gemma3_text") == {"full_attention": None, "sliding_attention": 8}
    assert types("qwen2", sliding_window=8) == FULL
    assert windows_by_layer(build("mistral").config) == (8,)
    assert windows_by_layer(build("gemma3_text").config) == (8, None)


def test_a_type_that_we_do_not_know_beside_a_window_sees_everything() -> None:
    config = SimpleNamespace(
        sliding_window=8, layer_types=["sliding_attention", "indexed_attention"]
    )
    assert layer_windows(config) == {"sliding_attention": 8, "indexed_attention": None}
    assert windows_by_layer(config) == (8, None)
    config.layer_types = ["indexed_attention"]
    assert layer_windows(config) == FULL
