"""What the tests compare a runner with: the bare model, without any cache of ours."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from architectures import VOCAB, build
from draftsmith.core.draft import ROOT, Draft
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner
from draftsmith.model.windows import first_visible, windows_by_layer

TOLERANCE = 1e-5
"""Absolute, in float32, on logits of a few units."""

_loaded: dict[tuple[str, str | None], LoadedModel] = {}


def loaded(name: str, attention: str | None = None) -> LoadedModel:
    """A tiny model, loaded once per session: nothing may change it."""
    key = name, attention
    if key not in _loaded:
        _loaded[key] = load(build(name, attention))
    return _loaded[key]


def contents(runner: Any, row: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values (K, n, D) of a row, one pair per layer: of its last n positions."""
    if runner.loaded.capabilities.packed:
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for slots in row.state:
            keys, values = slots.parts(slots.dropped, row.cached)
            pairs = ((k[0], v[0]) for k, v in zip(keys, values, strict=True))
            found.update(zip(slots.layers, pairs, strict=True))
        return [found[layer] for layer in sorted(found)]
    both = ((layer.keys[0], layer.values[0]) for layer in row.state.layers)
    # What was not committed is there until the next pass.
    return [(keys[:, : row.cached], values[:, : row.cached]) for keys, values in both]


def fresh(model: Any, ids: Sequence[int]) -> Tensor:
    """(V,) logits after `ids`, computed at once, without any cache of ours."""
    with torch.inference_mode():
        out: Tensor = model(torch.tensor([list(ids)])).logits[0, -1]
    return out


def path_to(draft: Draft, node: int) -> list[int]:
    """Nodes from a child of the root down to `node`."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = draft.parents[node]
    return path[::-1]


def random_draft(rng: random.Random, shape: str, most: int = 7) -> Draft:
    """A random chain, or a random tree with probes, of at most `most` nodes and 2 probes."""
    if shape == "plain":
        return Draft()
    n = rng.randint(0, most)
    if shape == "chain":
        return Draft.chain([rng.randrange(3, VOCAB) for _ in range(n)], "test")
    m = rng.randint(0, 2)
    parents = [rng.randint(-1, i - 1) for i in range(n)]
    parents += [rng.randint(-1, n - 1) for _ in range(m)]
    tokens = [rng.randrange(3, VOCAB) for _ in parents]
    return Draft(tuple(tokens), tuple(parents), ("test",) * (n + m), probes=m)


def check_logits(model: Any, ids: list[int], draft: Draft, logits: Tensor) -> None:
    """Every row of a pass equals the bare model on that row's own path."""
    assert logits.shape[0] == 1 + len(draft)
    for leaf in {*range(-1, len(draft))}.difference(draft.parents):
        path = path_to(draft, leaf)
        line = torch.tensor([ids + [draft.tokens[i] for i in path]])
        with torch.inference_mode():
            expected = model(line).logits[0, len(ids) - 1 :]
        found = logits[[0, *(1 + i for i in path)]]
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def check_cache(runner: Runner, row: Any, ids: list[int]) -> None:
    """Pending and cached ids are `ids`; the cache's contents equal a fresh prefill of them."""
    assert row.ids + row.pending == ids
    assert row.pending
    if runner.loaded.capabilities.cache not in ("packed", "own") or not row.cached:
        return
    other = Runner(runner.loaded)
    new = other.open([*row.ids, 1])
    other.prefill(new)
    if runner.shape == "plain":
        other.forward([new], [Draft()])
    ours, theirs = contents(runner, row), contents(other, new)
    assert len(ours) == len(theirs) > 0
    windows = windows_by_layer(runner.loaded.config)
    for index, (mine, new) in enumerate(zip(ours, theirs, strict=True)):
        kept = mine[0].shape[1]
        if kept < row.cached:
            assert not row.rewinds
            window = windows[index % len(windows)]
            assert window is not None
            assert row.cached - kept <= first_visible(window, row.cached)
        for buffer, new_buffer in zip(mine, new, strict=True):
            assert buffer.shape[1] == kept
            torch.testing.assert_close(buffer, new_buffer[:, -kept:], rtol=0, atol=TOLERANCE)


def accept(rng: random.Random, draft: Draft) -> tuple[list[int], list[int]]:
    """A random accepted path and the tokens a step would emit for it, a bonus token last."""
    node = rng.randint(-1, draft.size - 1)
    path = path_to(draft, node)
    return path, [draft.tokens[i] for i in path] + [rng.randrange(3, VOCAB)]
