"""The runner against the bare model: logits of every node, contents of the cache, on every step."""

from __future__ import annotations

import contextlib
import random

import pytest

from architectures import ALL, CHAINS, CONTEXT, RECURRENT, TREES, prompt
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.errors import DrafterError, OptionError, PromptError
from draftsmith.model.runner import Runner
from replica import (
    accept,
    check_cache,
    check_logits,
    check_step,
    loaded,
    random_draft,
)


@pytest.mark.parametrize("name", ALL)
def test_ragged_rows_that_join_and_leave(name: str) -> None:
    model = loaded(name)
    runner, rng = Runner(model), random.Random(name)
    ids = {i: prompt(n, seed=i) for i, n in enumerate((5, 14, 9))}
    rows = {}
    for step in range(6):
        if step in (0, 1, 2):
            rows[step] = runner.open(ids[step])
            runner.prefill(rows[step])
        if step == 4:
            runner.close(rows.pop(0))
        here = list(rows)
        rng.shuffle(here)
        shapes = {i: runner.shape if runner.room(rows[i]) else "plain" for i in here}
        drafts = {i: random_draft(rng, shape) for i, shape in shapes.items()}
        check_step(runner, rng, rows, ids, drafts)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "bloom", "lfm2", "mamba2", "mamba"])
def test_extend_keeps_the_common_prefix(name: str) -> None:
    model = loaded(name)
    runner, ids = Runner(model), prompt(20)
    row = runner.open(ids)
    runner.prefill(row)
    runner.forward([row], [EMPTY])
    runner.commit([row], [[]], [[7]])
    for new in (
        [*ids, 7, 8, 9],  # a continuation
        [*ids[:10], 50, 51],  # another branch
        ids[:6],  # a shorter one, all of it cached
        prompt(8, seed=9),  # nothing in common
    ):
        cached = row.cached
        kept = runner.extend(row, new)
        assert kept == row.cached <= len(new) - 1
        if model.capabilities.cache in ("packed", "own"):
            assert row.ids == new[:kept]
            assert kept in (len(new) - 1, 10, 0, cached)
        runner.prefill(row)
        check_logits(model.model, new, EMPTY, runner.forward([row], [EMPTY])[0].logits)
        runner.commit([row], [[]], [[5]])
        check_cache(runner, row, [*new, 5])


@pytest.mark.parametrize("name", ALL)
def test_chunks_of_a_prompt_ride_beside_a_row_that_decodes(name: str) -> None:
    model = loaded(name)
    runner, rng = Runner(model), random.Random(name)
    ids, long = {0: prompt(9)}, prompt(23, seed=3)
    rows = {0: runner.open(ids[0])}
    runner.prefill(rows[0])
    newcomer = runner.open(long)
    assert runner.splits(newcomer) is (runner.shape != "plain")
    while runner.splits(newcomer) and len(newcomer.pending) > 6:
        draft = random_draft(rng, runner.shape if runner.room(rows[0]) else "plain")
        take = [5, len(rows[0].pending)]
        chunk, output = runner.forward([newcomer, rows[0]], [EMPTY, draft], take)
        assert chunk.logits.shape == (0, model.vocab_size)
        check_logits(model.model, ids[0], draft, output.logits)
        path, new = accept(rng, draft)
        runner.commit([newcomer, rows[0]], [(), path], [(), new])
        ids[0] = ids[0] + new
        check_cache(runner, newcomer, long)
        check_cache(runner, rows[0], ids[0])
    check_logits(model.model, long, EMPTY, runner.forward([newcomer], [EMPTY])[0].logits)


@pytest.mark.parametrize("name", ["llama", "bloom", "lfm2", "mamba2", "mamba"])
def test_a_pass_that_is_not_committed_leaves_no_trace(name: str) -> None:
    model, ids = loaded(name), prompt(12)
    runner = Runner(model)
    row = runner.open(ids)
    runner.prefill(row)
    plain = runner.shape == "plain"
    for tokens in ([5, 6, 7], [], []):
        runner.forward([row], [EMPTY if plain else Draft.chain(tokens, "test")])
    draft = EMPTY if plain else Draft.chain([9, 8], "test")
    check_logits(model.model, ids, draft, runner.forward([row], [draft])[0].logits)
    runner.commit([row], [[] if plain else [0]], [[9] if plain else [9, 4]])
    check_cache(runner, row, [*ids, 9] if plain else [*ids, 9, 4])


@pytest.mark.parametrize("name", ["lfm2", "mamba2"])
def test_replayed_tokens_are_absorbed(name: str) -> None:
    model = loaded(name)
    if model.capabilities.shape != "chain":
        pytest.skip("; ".join(model.capabilities.reasons))
    runner, ids = Runner(model), prompt(10)
    row = runner.open(ids)
    runner.prefill(row)
    seen = []
    for _ in range(12):
        seen.append(room := runner.room(row))
        draft = Draft.chain([3, 4, 5], "test") if room else EMPTY
        output = runner.forward([row], [draft])[0]
        path, new = ([0, 1], [3, 4, 6]) if room else ([], [6])
        check_logits(model.model, ids, draft, output.logits)
        runner.commit([row], [path], [new])
        ids = ids + new
        check_cache(runner, row, ids)
    assert 0 in seen
    assert seen[seen.index(0) + 1] > 0


def test_room_ends_with_the_context() -> None:
    runner = Runner(loaded("gpt2"))
    ids = prompt(CONTEXT - 4)
    row = runner.open(ids)
    assert runner.room(row) == 4
    runner.prefill(row)
    draft = Draft.chain([5, 6, 7, 8], "test")
    output = runner.forward([row], [draft])[0]
    check_logits(runner.loaded.model, ids, draft, output.logits)
    runner.commit([row], [[0, 1, 2, 3]], [[5, 6, 7, 8, 9]])
    assert runner.room(row) == 0


def test_probes_with_positions_of_their_own() -> None:
    """A probe may sit further away than its depth (SDSAT's adaptive tokens)."""
    model, ids = loaded("llama"), prompt(10)
    runner = Runner(model)
    row = runner.open(ids)
    runner.prefill(row)
    moved = Draft((5, 6), (-1, -1), ("test",) * 2, probes=1, depths=(1, 3))
    plain = Draft((5, 6), (-1, -1), ("test",) * 2, probes=1)
    far = runner.forward([row], [moved])[0].logits
    near = runner.forward([row], [plain])[0].logits
    check_logits(model.model, ids, plain, near)
    assert (far[:2] - near[:2]).abs().max() < 1e-5
    assert (far[2] - near[2]).abs().max() > 1e-3


def test_what_a_row_cannot_compute_is_refused() -> None:
    tree, chain = Draft((5, 6), (-1, -1), ("test",) * 2), Draft.chain([5], "test")
    refused: list[tuple[str, Draft, int, type[Exception], str]] = [
        ("bloom", tree, 5, DrafterError, "first_branch"),
        ("mamba", chain, 5, DrafterError, "plainly"),
        ("llama", chain, 2, OptionError, "take=2, but all 5 pending tokens"),
        ("mamba", EMPTY, 2, OptionError, "take=2, but all 5 pending tokens"),
    ]
    for name, draft, take, error, words in refused:
        runner = Runner(loaded(name))
        with pytest.raises(error, match=words):
            runner.forward([runner.open(prompt(5))], [draft], [take])
    with pytest.raises(PromptError, match="at least one"):
        runner.open([])
    with pytest.raises(PromptError, match="close"):
        runner.extend(runner.open([5]), [])


def test_what_every_architecture_can_do() -> None:
    """The table of the documentation: a change here is a change of what we promise."""
    for name in (*TREES, *CHAINS):
        found = loaded(name).capabilities
        expected = ("tree", "packed") if name in TREES else ("chain", "own")
        assert (found.shape, found.cache) == expected, name
        assert name in TREES or found.reasons
    for name in RECURRENT:
        assert loaded(name).capabilities.shape in ("chain", "plain")
    assert loaded("mamba").capabilities.shape == "plain"


@pytest.mark.parametrize("name", ["llama", "bloom", "lfm2", "mamba"])
@pytest.mark.parametrize("during", ["prefill", "plain", "draft"])
def test_an_interrupted_pass_leaves_no_trace(name: str, during: str) -> None:
    model, ids = loaded(name), prompt(12)
    runner = Runner(model)
    row = runner.open(ids)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if during != "prefill":
        runner.prefill(row)
        runner.commit([row], [[]], [[int(runner.forward([row], [EMPTY])[0].logits[0].argmax())]])
        ids = row.ids + row.pending
    draft = Draft.chain([5, 6], "test") if during == "draft" and runner.room(row) else EMPTY
    handle = model.model.get_output_embeddings().register_forward_pre_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        runner.prefill(row)
        runner.forward([row], [draft])
        pytest.fail("the hook did not interrupt")
    handle.remove()
    runner.prefill(row)
    check_logits(model.model, ids, draft, runner.forward([row], [draft])[0].logits)
    check_cache(runner, row, ids)
