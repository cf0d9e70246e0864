"""Masks small enough to write down."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from architectures import build
from draftsmith.core.draft import Draft
from draftsmith.model.cache import KVCache
from draftsmith.model.masks import MaskBuilder, Span, visible
from draftsmith.model.windows import View, Views, Window, layer_windows, windows_by_layer

TREE = Draft((5, 6, 7), (-1, 0, -1), ("test",) * 3)
FULL = {"full_attention": None}
CPU = torch.device("cpu")


def drawn(mask: torch.Tensor) -> list[str]:
    return ["".join(".x"[int(v)] for v in row) for row in mask]


def views(spans: list[Span], *windows: Window | None) -> Views:
    width = max(s.width for s in spans)
    return KVCache(windows=windows or (None,)).begin(0, [s.cached for s in spans], width)


def seen(spans: list[Span]) -> torch.Tensor:
    return visible(spans, views(spans)[None])


def test_a_tree_behind_two_pending_tokens() -> None:
    mask = seen([Span(3, 2, TREE)])
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
    assert drawn(seen([Span(2, 1, chain)])[0, 0]) == ["xxx..", "xxxx.", "xxxxx"]


def test_ragged_rows_and_their_padding() -> None:
    mask = seen([Span(3, 1, Draft.chain([5], "test")), Span(1, 1, TREE)])
    assert drawn(mask[0, 0]) == ["xxxx...", "xxxxx..", ".....x.", "......x"]
    assert drawn(mask[1, 0]) == ["xx.....", "xxx....", "xxxx...", "xx..x.."]


def test_a_window_is_measured_in_positions() -> None:
    window = Window(3, chunked=False)
    build_masks = MaskBuilder({"sliding_attention": window}, CPU, additive=None, broadcasts=True)
    # Root at position 4; the last node sits in slot 7, but at position 5. Two slots are not read.
    spans = [Span(4, 1, TREE)]
    mask = build_masks(spans, views(spans, window))
    assert drawn(mask[0, 0]) == ["xxx...", ".xxx..", "..xxx.", ".xx..x"]


def test_ragged_rows_are_read_from_the_one_that_looks_furthest_back() -> None:
    window = Window(3, chunked=False)
    spans = [Span(9, 1, TREE), Span(5, 1)]
    view = views(spans, window)[window]
    assert view == View(3, 10, (3, 3))
    assert drawn(visible(spans, view, window)[:, 0, 0]) == ["....xxx...", "xxx......."]
    # The first row has dropped the positions before its window: its slots are nearer.
    view = View(0, 7, (7, 3))
    assert drawn(visible(spans, view, window)[:, 0, 0]) == ["xxx....", "xxx...."]


def test_a_chunk_begins_at_its_multiple() -> None:
    chunk = Window(4, chunked=True)
    builder = MaskBuilder({"chunked_attention": chunk}, CPU, additive=None, broadcasts=True)
    mask = builder([Span(2, 1, TREE)], views([Span(2, 1, TREE)], chunk))
    # Positions 0 1 | 2 (root) 3 4 3: position 4 opens a chunk of its own.
    assert drawn(mask[0, 0]) == ["xxx...", "xxxx..", "....x.", "xxx..x"]
    mask = builder([Span(7, 1, TREE)], views([Span(7, 1, TREE)], chunk))
    assert drawn(mask[0, 0]) == ["xxxx...", "....x..", "....xx.", "......x"]


def test_one_position_costs_one_element() -> None:
    window = Window(4, chunked=False)
    both = {"full_attention": None, "sliding_attention": window}
    builder = MaskBuilder(both, CPU, additive=None, broadcasts=True)
    for cached in (3, 4, 9):  # the view of the sliding layers is all that the query sees
        masks = builder([Span(cached, 1)], views([Span(cached, 1)], None, window))
        shapes = {kind: tuple(mask.shape) for kind, mask in masks.items()}
        assert shapes == dict.fromkeys(both, (1, 1, 1, 1))
    checked = MaskBuilder(both, CPU, None, broadcasts=False)
    masks = checked([Span(4, 1)], views([Span(4, 1)], None, window))
    assert masks["full_attention"].shape == (1, 1, 1, 5)
    assert drawn(masks["sliding_attention"][0, 0]) == ["xxxx"]


def test_eager_adds_its_mask() -> None:
    builder = MaskBuilder(FULL, CPU, additive=torch.bfloat16, broadcasts=True)
    mask = builder([Span(2, 1, TREE)], views([Span(2, 1, TREE)]))
    assert mask.dtype == torch.bfloat16
    assert drawn(mask[0, 0] == 0) == drawn(seen([Span(2, 1, TREE)])[0, 0])
    assert mask.min() == torch.finfo(torch.bfloat16).min


def test_a_node_sees_itself_and_its_ancestors() -> None:
    draft = Draft((1, 2, 3, 4, 5), (-1, 0, 0, 2, 1), ("test",) * 5)
    found = seen([Span(0, 1, draft)])[0, 0, 1:, 1:]
    ancestors = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4]]
    assert [row.nonzero().flatten().tolist() for row in found] == ancestors


def test_a_chain_longer_than_its_window() -> None:
    window = Window(3, chunked=False)
    queries, keys = torch.arange(4, 11), torch.arange(11)
    want = (keys <= queries[:, None]) & (queries[:, None] - keys < 3)
    view = views([Span(4, 7)], window)[window]
    assert view == View(2, 9, (2,))
    assert torch.equal(visible([Span(4, 7)], view, window)[0, 0], want[:, 2:])
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
