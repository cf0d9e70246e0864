"""What becomes of a request's prediction: who guessed from it, and how much of it was said."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith import Engine, GenerationResult
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context
from draftsmith.core.stats import PREDICTION, SourceStats, Stats
from draftsmith.core.verify import Verification
from draftsmith.testing import Scripted

IDS = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8]


def in_order(ctx: Context) -> Draft:
    """The next four tokens of the prediction, token by token, whatever was said before."""
    done = len(ctx.ids) - ctx.prompt_length
    return Draft.chain(ctx.prediction[done : done + min(4, ctx.depth)], PREDICTION)


@pytest.fixture(scope="module")
def answer(engine: Engine) -> list[int]:
    """Twenty tokens, of which the eleventh was never said before."""
    for prompt in range(20, 60):
        tokens = engine.generate([prompt], max_new_tokens=20, drafter="none").tokens
        if len(tokens) == 20 and tokens[10] not in tokens[:10]:
            return [prompt, *tokens]
    raise AssertionError("no such answer")


def ask(engine: Engine, answer: list[int], **options: Any) -> GenerationResult:
    prompt, *tokens = answer
    tokens[7] += 1  # what the prediction has wrong
    return engine.generate(
        [prompt], prediction=tokens, drafter=Scripted(in_order), budget=4, **options
    )


def test_accepted_and_rejected_by_hand(engine: Engine, answer: list[int]) -> None:
    got = ask(engine, answer, max_new_tokens=20)
    assert got.tokens == answer[1:]
    # Passes draft 0-3 | 5, 6, wrong, 8 | 8-11 | 13-16 | 18, and say 4, 7, 12, 17, 19 beside.
    assert got.stats.passes == 5
    assert got.accepted_prediction_tokens == 4 + 2 + 4 + 4 + 1
    assert got.rejected_prediction_tokens == 2
    assert len(got.tokens) == got.accepted_prediction_tokens + got.stats.passes


def test_a_token_behind_the_end_is_neither(engine: Engine, answer: list[int]) -> None:
    got = ask(engine, answer, max_new_tokens=20, stop_token_ids=answer[1 + 10])
    assert got.tokens == answer[1 : 1 + 11]
    # 0-3 | 5, 6, wrong, 8 | 8, 9, 10, which ends it, and 11.
    assert got.accepted_prediction_tokens == 4 + 2 + 3
    assert got.rejected_prediction_tokens == 2
    assert got.stats.by_source[PREDICTION] == SourceStats(3, 12, 9, 1)


def test_only_what_hangs_below_the_last_token_is_unread() -> None:
    """Two branches: the right one ends the answer at its second node."""
    draft = Draft((1, 2, 3, 4, 5, 6), (-1, 0, 1, 2, 0, -1), (PREDICTION,) * 4 + ("auto",) * 2)
    stats = Stats()
    stats.record(draft, Verification((0,), (1, 2), (0, 1)))
    assert stats.by_source == {PREDICTION: SourceStats(1, 4, 2, 2), "auto": SourceStats(1, 2, 0, 0)}
    assert stats.by_source["auto"].rejected == 2
    # Where the target went past all guesses, every other one is rejected.
    stats.record(draft, Verification((0,), (1, 9), (0, None)))
    assert stats.by_source[PREDICTION] == SourceStats(2, 8, 3, 2)
    assert stats.by_source[PREDICTION].rejected == 3


@pytest.mark.parametrize("drafter", ["auto", "longest_match", "prompt_lookup"])
def test_drafters_say_what_they_copied_from_it(engine: Engine, drafter: str) -> None:
    plain = engine.generate(IDS, max_new_tokens=40, drafter="none")
    assert plain.accepted_prediction_tokens == plain.rejected_prediction_tokens == 0
    known = [*plain.tokens[:9], 99_999, -1, *plain.tokens[9:]]  # but for two, which no text has
    got = engine.generate(IDS, max_new_tokens=40, drafter=drafter, prediction=known, budget=8)
    assert got.tokens == plain.tokens
    entry = got.stats.by_source[PREDICTION]
    assert entry.drafted
    assert got.accepted_prediction_tokens == got.sources.count(PREDICTION)
    assert entry.drafted == entry.accepted + entry.unread + got.rejected_prediction_tokens
    assert got.accepted_prediction_tokens > 20
    without = engine.generate(IDS, max_new_tokens=40, drafter=drafter, budget=8)
    assert PREDICTION not in without.stats.by_source
