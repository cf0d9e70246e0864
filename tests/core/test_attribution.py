"""Which parts of an answer are said to be copied, and from where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context
from draftsmith.engine.attribution import Copy, Span, find_copies
from draftsmith.engine.engine import Engine
from draftsmith.engine.result import GenerationResult
from draftsmith.errors import OptionError
from draftsmith.testing import Scripted, ToyTarget, decode, plain

PROMPT = [10, 11, 12, 13, 14, 15]


def copies(output: list[int], origins: list[int | None], min_length: int = 2) -> list[Copy]:
    return find_copies(PROMPT, output, origins, min_length)


@pytest.mark.parametrize(
    ("output", "origins", "found"),
    [
        ([90, 11, 12, 13, 91], [None, 1, 2, 3, None], [(7, 10, 1, 4)]),
        ([10, 11, 14, 15], [0, 1, 4, 5], [(6, 8, 0, 2), (8, 10, 4, 6)]),
        # The match it was found by, the target's own token after it, but nothing that differs.
        ([90, 11, 12, 13, 14, 91], [None, None, 2, 3, None, None], [(7, 11, 1, 5)]),
        ([10, 11, 12, 13], [0, 1, None, 3], [(6, 10, 0, 4)]),
        ([15, 10, 11], [None, 0, 1], [(7, 9, 0, 2)]),
        # A loop points to the round before.
        ([80, 81] * 3, [None, None, 6, 7, 6, 7], [(8, 10, 6, 8), (10, 12, 6, 8)]),
        ([80, 81] * 3, [None, None, 6, 7, 8, 9], [(8, 12, 6, 10)]),
    ],
    ids=["one", "a jump", "neighbours", "bonus", "before the text", "one round", "rounds"],
)
def test_copies_are_found(
    output: list[int], origins: list[int | None], found: list[tuple[int, int, int, int]]
) -> None:
    expected = [Copy(Span(a, b), Span(c, d)) for a, b, c, d in found]
    assert copies(output, origins) == expected


def test_short_copies_do_not_count() -> None:
    output, origins = [90, 11, 12, 13, 91, 15], [None, 1, 2, 3, None, 5]
    for least, found in ((1, [Span(7, 10), Span(11, 12)]), (3, [Span(7, 10)]), (4, [])):
        assert [copy.output for copy in copies(output, origins, least)] == found
    with pytest.raises(OptionError, match="min_length must be an integer >= 1, got 0"):
        copies(output, origins, 0)


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=15),
    st.lists(st.integers(0, 2), max_size=15),
    st.integers(1, 4),
    st.data(),
)
@settings(deadline=None)
def test_copies_equal_their_sources(
    prompt: list[int], output: list[int], least: int, data: st.DataObject
) -> None:
    ids = prompt + output
    origins: list[int | None] = []
    for position in range(len(prompt), len(ids)):
        places = [p for p in range(position) if ids[p] == ids[position]]
        origins.append(data.draw(st.sampled_from([None, *places])))
    found = find_copies(prompt, output, origins, least)
    done = len(prompt)
    for copy in found:
        assert ids[slice(*copy.output)] == ids[slice(*copy.source)]
        assert copy.source.start < copy.output.start
        assert done <= copy.output.start <= copy.output.end - least
        done = copy.output.end
    if least == 1:
        covered = {p for copy in found for p in range(*copy.output)}
        assert {len(prompt) + i for i, o in enumerate(origins) if o is not None} <= covered


# ------------------------------------------------------------------------------ in the loop


def test_invented_and_rejected_nodes_are_not_traced() -> None:
    target = ToyTarget(11, order=2)
    answer = plain(target, [2, 3], 6)
    wrong = (answer[2] + 1) % 11
    prompt = [answer[0], wrong, 2, 3]

    def propose(ctx: Context) -> Draft:
        if len(ctx.ids) > len(prompt):
            return EMPTY
        tokens = (wrong, *answer[:2], wrong)
        return Draft(tokens, (-1, -1, 1, 2), ("scripted",) * 4, origins=(1, 0, -1, 1))

    sequence = decode(target, Scripted(propose), prompt, 6)
    assert sequence.stats.accepted == 2
    assert sequence.origins == [0, *[None] * 5]


# ------------------------------------------------------------------------------ in the engine


def parrot(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A distribution that says what followed the last id when it came first, now and then a 3."""
    seen = ids[0].tolist()
    wanted = 3 if len(seen) % 7 == 0 else seen[seen.index(seen[-1]) + 1 :][:1] or seen[:1]
    scores[:, wanted] = 1000.0
    return scores


LONG: dict[str, Any] = {"max_new_tokens": 60, "processors": parrot}


def check(result: GenerationResult) -> None:
    """Copies equal their sources, and each of their tokens is attributed to its copy's source."""
    ids, copies = result.prompt_tokens + result.tokens, result.copies()
    assert copies
    expected: list[Span | None] = [None] * len(ids)
    for copy in copies:
        assert ids[slice(*copy.output)] == ids[slice(*copy.source)]
        for position in range(*copy.output):
            expected[position] = copy.source
    assert result.attribution == expected[len(result.prompt_tokens) :]
    assert len(result.origins) == len(result.tokens)


def test_answers_alone_in_batches_streams_and_chats_are_attributed() -> None:
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer(), budget=8)
    prompts = ["hello world, hello world", "the quick brown fox", "foo(x): return x + 1"]
    alone = [engine.generate(prompt, **LONG) for prompt in prompts]
    check(alone[0])
    assert alone[0].copies(1000) == []
    assert engine.generate("hello world", drafter="none", **LONG).copies(1) == []
    assert [r.origins for r in engine.generate(prompts, **LONG)] == [r.origins for r in alone]
    with engine.stream(prompts[0], **LONG) as stream:
        for _ in range(30):
            next(stream)
    cut = stream.result
    assert cut.origins == alone[0].origins[: len(cut.tokens)]
    chat = engine.chat(**LONG)
    chat.send("hello world")
    check(chat.send("hello world"))  # copies from the first turn, too
