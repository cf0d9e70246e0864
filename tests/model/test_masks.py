"""Masks small enough to write down."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from architectures import build
from draftsmith.core.draft import Draft
from draftsmith.model.masks import Span, visible
from draftsmith.model.windows import Window, layer_windows, windows_by_layer

TREE = Draft((5, 6, 7), (-1, 0, -1), ("test",) * 3)
FULL = {"full_attention": None}


def drawn(mask: torch.Tensor) -> list[str]:
    return ["".join(".x"[int(v)] for v in row) for row in mask]


def seen(span: Span, window: Window | None = None) -> torch.Tensor:
    first = 0 if window is None else window.first(span.cached)
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


def test_a_chain_is_causal() -> None:
    chain = Draft.chain([5, 6], "test")
    assert drawn(seen(Span(2, 1, chain))[0, 0]) == ["xxx..", "xxxx.", "xxxxx"]


def test_a_window_is_measured_in_positions() -> None:
    # Root at position 4; the last node sits in slot 7, but at position 5. Two slots are not read.
    mask = seen(Span(4, 1, TREE), Window(3, chunked=False))
    assert drawn(mask[0, 0]) == ["xxx...", ".xxx..", "..xxx.", ".xx..x"]


def test_a_chunk_begins_at_its_multiple() -> None:
    chunk = Window(4, chunked=True)
    # Positions 0 1 | 2 (root) 3 4 3: position 4 opens a chunk of its own.
    mask = seen(Span(2, 1, TREE), chunk)
    assert drawn(mask[0, 0]) == ["xxx...", "xxxx..", "....x.", "xxx..x"]
    mask = seen(Span(7, 1, TREE), chunk)
    assert drawn(mask[0, 0]) == ["xxxx...", "....x..", "....xx.", "......x"]


def test_a_node_sees_itself_and_its_ancestors() -> None:
    draft = Draft((1, 2, 3, 4, 5), (-1, 0, 0, 2, 1), ("test",) * 5)
    found = seen(Span(0, 1, draft))[0, 0, 1:, 1:]
    ancestors = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4]]
    assert [row.nonzero().flatten().tolist() for row in found] == ancestors


def test_a_chain_longer_than_its_window() -> None:
    window = Window(3, chunked=False)
    queries, keys = torch.arange(4, 11), torch.arange(11)
    want = (keys <= queries[:, None]) & (queries[:, None] - keys < 3)
    assert torch.equal(seen(Span(4, 7), window)[0, 0], want[:, 2:])
    assert not want[:, :2].any()


def test_layer_types_of_real_configs() -> None:
    def types(name: str, **overrides: object) -> dict[str, Window | None]:
        return layer_windows(build(name, **overrides).config)

    window = Window(8, chunked=False)
    assert types("llama") == FULL
    assert types("mistral") == {"sliding_attention": window}
    assert types("gemma3_text") == {"full_attention": None, "sliding_attention": window}
    assert types("qwen2", sliding_window=8) == FULL
    assert types("llama4_text") == {
        "full_attention": None,
        "chunked_attention": Window(8, chunked=True),
    }
    assert windows_by_layer(build("mistral").config) == (window,)
    assert windows_by_layer(build("gemma3_text").config) == (window, None)


def test_a_type_that_we_do_not_know_beside_a_window_sees_everything() -> None:
    config = SimpleNamespace(
        sliding_window=8, layer_types=["sliding_attention", "indexed_attention"]
    )
    window = Window(8, chunked=False)
    assert layer_windows(config) == {"sliding_attention": window, "indexed_attention": None}
    assert windows_by_layer(config) == (window, None)
    config.layer_types = ["indexed_attention"]
    assert layer_windows(config) == FULL
