"""What the target's logits said, as one more input of `auto`."""

from __future__ import annotations

import random

import pytest
import torch
from auto_steps import context, verified
from torch import Tensor

from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Outcome
from draftsmith.core.target import RowOutput
from draftsmith.drafters.auto import Auto, Mixture
from draftsmith.drafters.mixture.compiled import filled, ints, size_of
from draftsmith.drafters.mixture.prior import prior
from draftsmith.drafters.mixture.rows import BEST, KEPT, STEPS, WHOLE, WIDTH, best

V = 700


def logits_of(node: int, token: int) -> Tensor:
    """(V,) after which `token` comes; the runner-ups are the next ids."""
    logits = torch.zeros(V)
    for i in range(BEST):
        logits[(token + i) % V] = 9.0 - 2 * i
    logits[(token + 300 + node) % V] = 0.5
    return logits


def step(state: Mixture, ctx: object, truth: list[int], logits: Tensor | None = None) -> Draft:
    """One pass of a target that goes on with `truth`; unless given, its logits say so."""
    draft = state.draft(ctx)
    if logits is None:
        depths = (0, *draft.node_depths())
        logits = torch.stack(
            [logits_of(n, truth[min(depth, len(truth) - 1)]) for n, depth in enumerate(depths)]
        )
    verdict = verified(draft, truth)
    ctx.ids = [*ctx.ids, *verdict.tokens]
    state.observe(ctx, Outcome(draft, verdict, RowOutput(logits)))
    return draft


def opened(ids: list[int]) -> tuple[Mixture, object]:
    return Mixture(prior(1)), context(ids, vocab_size=V)


@pytest.mark.parametrize("vocab", [BEST, 100, 512, 700, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_best_tokens(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.stack([torch.randperm(vocab, generator=torch.Generator().manual_seed(i))
                          for i in range(3)]).mul(0.5).to(dtype)  # fmt: skip
    if dtype == torch.bfloat16:
        logits = (logits.argsort(-1).argsort(-1) % 200 * 0.5).to(dtype) if vocab <= 200 else logits
    rows = torch.tensor(best([4, 5, 6], logits)).view(3, WIDTH)
    assert rows[:, 0].tolist() == [5, 6, 7]
    wanted = logits.float().topk(BEST)
    chosen = logits.float().gather(1, rows[:, 1 : 1 + BEST])
    assert torch.equal(chosen, wanted.values)
    chances = wanted.values.softmax(-1)
    assert torch.allclose(rows[:, 1 + BEST :] / WHOLE, chances, atol=2 / WHOLE)
    assert [round(step * WHOLE) for step in (0.9, 0.6, 0.3, 0.1, 0.03, 0.01)] == [*STEPS]


def test_a_row_is_the_mean_of_what_was_said_before_and_now() -> None:
    """The best tokens of it, the most probable first; the plain sum over all tokens agrees."""
    source = random.Random(1)
    state, _ = opened([])
    rows = ints(KEPT * WIDTH)
    for trial in range(300):
        new = []
        for _ in range(2):
            parts = sorted((source.randrange(WHOLE // 4) for _ in range(BEST)), reverse=True)
            new.append([8, *source.sample(range(12), BEST), *parts])
        rows[7 * WIDTH] = 0
        for row in new:
            state.work = state.work._replace(rows=rows, new=filled(row))
            state.read()
        wanted = dict.fromkeys(range(12), 0)
        for row in new:
            for token, part in zip(row[1 : 1 + BEST], row[1 + BEST :], strict=True):
                wanted[token] += part // 2
        found = [int(n) for n in rows[7 * WIDTH : 8 * WIDTH]]
        tokens, parts = found[1 : 1 + BEST], found[1 + BEST :]
        assert found[0] == 8, trial
        assert len({*tokens}) == BEST
        assert parts == sorted(wanted.values(), reverse=True)[:BEST]
        assert parts == [wanted[token] for token in tokens]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_are_left_out(bad: float) -> None:
    logits = torch.rand(2, V)
    logits[0, 3] = bad
    rows = best([8, 9], logits)
    assert rows[0] == []
    assert len(rows[1]) == WIDTH
    assert best([8], torch.full((1, V), -torch.inf)) == [[]]


def test_what_was_never_in_the_text_is_drafted_where_the_logits_named_it() -> None:
    state, ctx = opened([1, 2, 3, 4, 5])
    step(state, ctx, [600, 7, 8, 9])  # after 5 comes 600, perhaps 601
    assert 601 not in state.draft(ctx).tokens
    ctx.ids = [*ctx.ids, 5]
    state.take(ctx)
    draft = state.draft(ctx)
    assert {600, 601} <= set(draft.tokens)
    assert draft.origins[draft.tokens.index(601)] == -1
    draft.check(V, 64, len(ctx.ids))


def test_rejected_nodes_tell_too() -> None:
    state, ctx = opened([1, 2, 3, 1, 2, 3, 1, 2])
    draft = step(state, ctx, [50, 51])
    assert 3 in draft.tokens  # rejected; what the target said behind it was 51
    ctx.ids = [*ctx.ids, 3]
    assert 52 in state.draft(ctx).tokens


def test_what_was_accepted_weighs_more_than_what_was_rejected() -> None:
    """A token that stood in rejected branches, too, is followed first by what its accepted place
    said."""
    state, ctx = opened([1, 2, 3, 1, 2, 3, 1, 2])
    draft = state.draft(ctx)
    assert 2 in draft.tokens
    logits = torch.stack([logits_of(n, 100) for n in range(1 + len(draft))])
    logits[0] = logits_of(0, 200)
    verdict = verified(draft, [200])
    ctx.ids = [*ctx.ids, *verdict.tokens]
    state.observe(ctx, Outcome(draft, verdict, RowOutput(logits)))
    ctx.ids = [*ctx.ids, 2]
    found = state.draft(ctx)
    first = {
        token: chance
        for token, parent, chance in zip(found.tokens, found.parents, found.chances, strict=True)
        if parent == -1
    }
    assert first[200] > first[100]
    assert first[201] > first.get(101, 0.0)


def test_rows_are_remembered_once() -> None:
    """An answer's end reads on after its last draft: the mean must not count a row twice."""
    state, ctx = opened([1, 2, 3, 4, 5])
    step(state, ctx, [600, 7, 8, 9])
    ctx.ids = [*ctx.ids, 5]
    state.draft(ctx)
    before = list(state.work.rows)
    assert any(before)
    for _ in range(2):
        state.read()
        assert list(state.work.rows) == before


def test_without_logits_all_is_as_before() -> None:
    """Rows come and go; ids are judged alike."""
    text = [random.Random(3).randrange(20) for _ in range(300)]
    one, ctx = opened(text[:200])
    other, same = opened(text[:200])
    other.work = other.work._replace(rows=ints(KEPT * WIDTH))
    while len(ctx.ids) < 280:
        empty = torch.empty((0, 0))
        a = step(one, ctx, text[len(ctx.ids) :], empty)
        b = step(other, same, text[len(same.ids) :], empty)
        assert a == b
    assert not len(one.work.rows)


def test_rows_go_with_a_rewind_and_the_rest_is_a_fresh_start() -> None:
    state, ctx = opened([1, 2, 3, 4, 5])
    step(state, ctx, [600, 7, 8, 9])
    state.draft(ctx)
    state.truncate(3)
    ctx.ids = [1, 2, 3, 4, 5]
    rewound = state.draft(ctx)
    fresh, other = opened([1, 2, 3, 4, 5])
    fresh.belief, fresh.tokens, fresh.cost = state.belief, state.tokens, state.cost
    assert rewound == fresh.draft(other)


def test_tokens_of_one_place_are_told_apart() -> None:
    state, ctx = opened([1, 2, 3, 4, 5])
    step(state, ctx, [600, 7, 8, 9])
    ctx.vocab_size = 2 * KEPT + V
    ctx.ids = [*ctx.ids, 5 + KEPT]
    assert 601 not in state.draft(ctx).tokens


def test_memory_does_not_grow_with_the_answer() -> None:
    state, ctx = opened([1, 2, 3])
    source = random.Random(0)
    sizes = set()
    for _ in range(60):
        step(state, ctx, [source.randrange(V) for _ in range(70)])
        state.keep()
        sizes.add(len(state.work.rows))
    assert sizes == {KEPT * WIDTH}


def test_bytes_are_said_with_the_rows_and_an_ended_answer_holds_no_logits() -> None:
    state, ctx = opened([1, 2, 3])
    step(state, ctx, [600, 7, 8, 9])
    state.draft(ctx)
    held = sum(map(size_of, (*state.own, *state.belief, *state.work)))
    assert KEPT * WIDTH <= held <= Auto().bytes_for(0)
    step(state, ctx, [600, 7, 8, 9])
    assert state.said is not None
    state.end(ctx)
    assert state.said is None
    state.draft(ctx)


def test_passes_that_were_not_drafted_for_are_learnt_from_later() -> None:
    """Nobody asks in a pause: the next draft knows all of it, as if there had been none."""
    text = [random.Random(3).randrange(20) for _ in range(300)]
    state, ctx = opened(text[:200])
    before = list(state.belief.weights)
    for _ in range(16):
        ctx.ids = text[: len(ctx.ids) + 1]
        state.observe(
            ctx, Outcome(EMPTY, verified(EMPTY, ctx.ids[-1:]), RowOutput(torch.rand(1, V)))
        )
    assert not len(state.work.rows), "what logits say is not looked for in a pause"
    assert state.told == 200
    state.draft(ctx)
    assert list(state.belief.weights) != before
    fresh, other = opened(text[:200])
    other.ids = ctx.ids
    fresh.take(other)
    fresh.told = 200
    fresh.draft(other)
    assert list(fresh.belief.cells) == list(state.belief.cells)
