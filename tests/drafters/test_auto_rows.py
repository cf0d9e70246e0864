"""What the target's logits said, as one more input of `auto`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from auto_steps import opened, step, verified
from torch import Tensor

from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Outcome
from draftsmith.core.target import RowOutput
from draftsmith.drafters.auto import Auto, AutoState
from draftsmith.drafters.logit_rows import ROW, ROWS, TOP, WHOLE, best
from draftsmith.drafters.mixer import PROB_STEPS, ROOT_KEY, Mixer, longer_key, with_head
from draftsmith.drafters.mixer_prior import head_prior, prior

V = 700


def logits_of(node: int, token: int) -> Tensor:
    """(V,) after which `token` comes; the runner-ups are the next ids."""
    logits = torch.zeros(V)
    for i in range(TOP):
        logits[(token + i) % V] = 9.0 - 2 * i
    logits[(token + 300 + node) % V] = 0.5
    return logits


def one_pass(state: AutoState, ctx: Context, truth: list[int]) -> None:
    """One pass of a target that goes on with `truth`, as its logits say."""

    def logits(draft: Draft) -> Tensor:
        depths = (0, *draft.node_depths())
        return torch.stack(
            [logits_of(n, [*truth, *truth[-1:] * d][d]) for n, d in enumerate(depths)]
        )

    step(state, ctx, truth, logits)


@pytest.mark.parametrize(("vocab", "dtype"), [(TOP, torch.bfloat16), (1024, torch.float32)])
def test_rows_are_the_best_tokens(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(3)])
    logits = (0.5 * logits).to(dtype)
    rows = best([4, 5, 6], logits)
    assert rows["after"].tolist() == [5, 6, 7]
    wanted = logits.float().topk(TOP)
    chosen = logits.float().gather(1, torch.tensor(rows["tokens"]).long())
    assert torch.equal(chosen, wanted.values)
    chances = wanted.values.softmax(-1)
    assert torch.allclose(torch.tensor(rows["probs"]) / WHOLE, chances, atol=2 / WHOLE)
    assert [round(step * WHOLE) for step in (0.9, 0.6, 0.3, 0.1, 0.03, 0.01)] == [*PROB_STEPS]


def test_rows_that_are_not_finite_are_left_out() -> None:
    for bad in (torch.nan, torch.inf):
        logits = torch.rand(2, V)
        logits[0, 3] = bad
        assert best([8, 9], logits)["after"].tolist() == [0, 10]
    assert best([8], torch.full((1, V), -torch.inf))["after"].tolist() == [0]


def test_what_was_never_in_the_text_is_drafted_where_the_logits_named_it() -> None:
    state, ctx = opened([1, 2, 3, 4, 5], vocab_size=V)
    one_pass(state, ctx, [600, 7, 8, 9])  # after 5 comes 600, perhaps 601
    assert 601 not in state.draft(ctx).tokens
    ctx.ids = [*ctx.ids, 5]
    state.take(ctx)
    draft = state.draft(ctx)
    assert {600, 601} <= set(draft.tokens)
    assert draft.origins[draft.tokens.index(601)] == -1
    draft.check(V, 64, len(ctx.ids))


class TwoRows:
    """A head with a row at the root and one after 600, of different certainty."""

    base = 0
    rows = np.zeros(0, ROW)

    def joined(self, mixer: Mixer) -> Mixer:
        return with_head(mixer, head_prior(mixer.indexes))

    def begin(self, length: int) -> None:
        self.base, self.rows = length, np.zeros(2, ROW)
        self.rows["after"] = ROOT_KEY, longer_key(ROOT_KEY, 600)
        self.rows["tokens"] = [range(10, 10 + TOP), range(20, 20 + TOP)]
        self.rows["probs"] = WHOLE // 1000
        self.rows["probs"][:, 0] = 0.95 * WHOLE, 0.05 * WHOLE

    def learn(self, ids: object) -> None:
        pass

    def worth(self, *_: object) -> list[int]:
        return []


def test_a_draft_depends_on_no_earlier_lookup_of_a_heads_rows() -> None:
    """Tokens of the target's rows get the cell of those that the head does not name here."""
    ctx = opened([1, 2, 3, 4, 5], vocab_size=V)[1]
    head: Any = TwoRows()
    state = AutoState(Auto(), prior(1), head=head)
    one_pass(state, ctx, [600, 7, 8, 9])
    ctx.ids = [*ctx.ids, 5]
    state.take(ctx)
    first, again = state.draft(ctx), state.draft(ctx)
    assert {10, 600, 601} <= set(first.tokens)
    assert first == again
    assert first.chances == again.chances


def test_tokens_of_one_place_are_told_apart() -> None:
    state, ctx = opened([1, 2, 3, 4, 5], vocab_size=V)
    one_pass(state, ctx, [600, 7, 8, 9])
    ctx.vocab_size = 2 * ROWS + V
    ctx.ids = [*ctx.ids, 5 + ROWS]
    assert 601 not in state.draft(ctx).tokens


def test_bytes_are_said_with_the_rows_and_an_ended_answer_holds_no_logits() -> None:
    state, ctx = opened([1, 2, 3], vocab_size=V)
    one_pass(state, ctx, [600, 7, 8, 9])
    state.draft(ctx)
    room = (*state.search, state.rows)
    held = state.text.nbytes + state.mixer.nbytes + sum(array.nbytes for array in room)
    assert ROWS * ROW.itemsize <= held <= Auto().bytes_for(0)
    one_pass(state, ctx, [600, 7, 8, 9])
    assert state.passed is not None
    state.end(ctx)
    assert state.passed is None
    state.draft(ctx)


def test_passes_that_were_not_drafted_for_are_learnt_from_later() -> None:
    """Nobody asks in a pause: the next draft knows all of it, as if there had been none."""
    text = [random.Random(3).randrange(20) for _ in range(300)]
    state, ctx = opened(text[:200], vocab_size=V)
    before = state.mixer.copy()
    for _ in range(16):
        ctx.ids = text[: len(ctx.ids) + 1]
        state.observe(
            ctx, Outcome(EMPTY, verified(EMPTY, ctx.ids[-1:]), RowOutput(torch.rand(1, V)))
        )
    assert not len(state.rows), "what logits say is not looked for in a pause"
    assert state.emitted == 200
    state.draft(ctx)
    assert not np.array_equal(state.mixer.weights, before.weights)
    fresh, other = opened(text[:200], vocab_size=V)
    other.ids = ctx.ids
    fresh.take(other)
    fresh.emitted = 200
    fresh.draft(other)
    assert np.array_equal(fresh.mixer.cells, state.mixer.cells)
