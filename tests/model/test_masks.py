"""Masks small enough to write down."""

from __future__ import annotations

import torch

from architectures import build
from draftsmith.core.draft import Draft
from draftsmith.model.masks import MaskBuilder, Span, Window, layer_windows, visible

TREE = Draft((5, 6, 7), (-1, 0, -1), ("test",) * 3)
FULL = {"full_attention": None}
CPU = torch.device("cpu")


def drawn(mask: torch.Tensor) -> list[str]:
    return ["".join(".x"[int(v)] for v in row) for row in mask]


def test_a_tree_behind_two_pending_tokens() -> None:
    mask = visible([Span(3, 2, TREE)])
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
    assert drawn(visible([Span(2, 1, chain)])[0, 0]) == ["xxx..", "xxxx.", "xxxxx"]


def test_ragged_rows_and_their_padding() -> None:
    mask = visible([Span(3, 1, Draft.chain([5], "test")), Span(1, 1, TREE)])
    assert drawn(mask[0, 0]) == ["xxxx...", "xxxxx..", ".....x.", "......x"]
    assert drawn(mask[1, 0]) == ["xx.....", "xxx....", "xxxx...", "xx..x.."]


def test_a_window_is_measured_in_positions() -> None:
    build_masks = MaskBuilder(
        {"sliding_attention": Window(3, chunked=False)}, CPU, additive=None, broadcasts=True
    )
    # Root at position 4; the last node sits in slot 7, but at position 5.
    mask = build_masks([Span(4, 1, TREE)])
    assert drawn(mask[0, 0]) == ["..xxx...", "...xxx..", "....xxx.", "...xx..x"]


def test_a_chunk_begins_at_its_multiple() -> None:
    chunk = {"chunked_attention": Window(4, chunked=True)}
    mask = MaskBuilder(chunk, CPU, additive=None, broadcasts=True)([Span(2, 1, TREE)])
    # Positions 0 1 | 2 (root) 3 4 3: position 4 opens a chunk of its own.
    assert drawn(mask[0, 0]) == ["xxx...", "xxxx..", "....x.", "xxx..x"]


def test_one_position_costs_one_element() -> None:
    both = {"full_attention": None, "sliding_attention": Window(4, chunked=False)}
    builder = MaskBuilder(both, CPU, additive=None, broadcasts=True)
    masks = builder([Span(3, 1)])
    assert {kind: tuple(m.shape) for kind, m in masks.items()} == dict.fromkeys(both, (1, 1, 1, 1))
    masks = builder([Span(4, 1)])
    assert masks["full_attention"].shape == (1, 1, 1, 1)
    assert drawn(masks["sliding_attention"][0, 0]) == [".xxxx"]
    assert MaskBuilder(FULL, CPU, None, broadcasts=False)([Span(4, 1)]).shape == (1, 1, 1, 5)


def test_eager_adds_its_mask() -> None:
    mask = MaskBuilder(FULL, CPU, additive=torch.bfloat16, broadcasts=True)([Span(2, 1, TREE)])
    assert mask.dtype == torch.bfloat16
    assert drawn(mask[0, 0] == 0) == drawn(visible([Span(2, 1, TREE)])[0, 0])
    assert mask.min() == torch.finfo(torch.bfloat16).min


def test_ancestors_equal_the_drafts_own() -> None:
    draft = Draft((1, 2, 3, 4, 5), (-1, 0, 0, 2, 1), ("test",) * 5)
    assert torch.equal(visible([Span(0, 1, draft)])[0, 0, 1:, 1:], draft.ancestor_mask())


def test_a_chain_longer_than_its_window() -> None:
    window = Window(3, chunked=False)
    queries, keys = torch.arange(4, 11), torch.arange(11)
    want = (keys <= queries[:, None]) & (queries[:, None] - keys < 3)
    assert torch.equal(visible([Span(4, 7)], window)[0, 0], want)


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
