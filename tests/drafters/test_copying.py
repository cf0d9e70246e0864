"""What the copying drafters copy."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from drafted import context
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core.drafter import Drafter
from draftsmith.core.stats import PREDICTION
from draftsmith.drafters.copyspec import CopySpec
from draftsmith.drafters.ngrams import NgramIndex, find
from draftsmith.drafters.registry import parse
from draftsmith.errors import OptionError
from work import lines, peak_bytes


def drafted(spec: str | Drafter, ids: list[int], **options: object) -> tuple[int, ...]:
    ctx = context(ids, **options)
    return parse(spec).open(ctx).draft(ctx).tokens


@given(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.lists(st.integers(0, 2)))
def test_a_part_is_found_where_it_first_begins(part: list[int], whole: list[int]) -> None:
    wide = [256**one for one in part], [256**one for one in whole]
    starts = [i for i in range(len(whole)) if whole[i : i + len(part)] == part]
    assert find(part, whole) == find(*wide) == (starts[0] if starts else None)


TWICE = [1, 2, 3, 10, 11, 1, 2, 3, 20, 21, 1, 2, 3]
LONG = list(range(100, 140))


@pytest.mark.parametrize(
    ("spec", "ids", "copied"),
    [
        # The first occurrence, or the last one.
        ("copyspec(block=2)", TWICE, (10, 11)),
        ("copyspec(block=2, match=last)", TWICE, (20, 21)),
        ("copyspec(gamma=4)", TWICE, ()),
        ("copyspec(block=0)", TWICE, ()),
        # CopySpec ignores matches that overlap the query.
        ("copyspec", [7] * 5, ()),
        ("copyspec", [7] * 6, (7, 7, 7)),
        ("copyspec(overlap=True)", [7] * 4, (7,)),
        # Prompt lookup tries long n-grams first.
        ("prompt_lookup(tokens=2)", [5, 9, 1, 2, 3, 4, 9, 2, 3], (4, 9)),
        ("prompt_lookup(max=1, tokens=2)", [5, 9, 1, 2, 3, 4, 9, 2, 3], (4, 9)),
        ("prompt_lookup(max=1, tokens=1, match=last)", [3, 1, 3, 2, 3], (2,)),
        ("prompt_lookup", [1, 2, 3], ()),
        # The longest match is preferred; longer ones give longer drafts.
        ("longest_match(max=5)", [1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 1, 2, 3, 4], (50, 9, 2, 3, 4)),
        ("longest_match", [*LONG, 1, 2, 3, 104], tuple(LONG[5:10])),
        ("longest_match", [*LONG, *LONG[:20]], (*LONG[20:], *LONG[:34])),
    ],
)
def test_copies(spec: str, ids: list[int], copied: tuple[int, ...]) -> None:
    assert drafted(spec, ids) == copied


def test_a_block_of_none_is_still_looked_up() -> None:
    assert parse("copyspec(block=0)").preferred_width() == 1


def test_an_option_that_is_on_or_off_is_typed_in_any_case_and_takes_nothing_else() -> None:
    for value in ("false", "False", "FALSE", "'false'"):
        assert parse(f"copyspec(overlap={value})") == CopySpec(overlap=False)
    assert parse("copyspec(overlap=true)") == CopySpec(overlap=True)
    for spec in ("auto(logits=off)", "spectra(forward=no)", "copyspec(overlap=1)"):
        with pytest.raises(OptionError, match=r"(logits|forward|overlap) must be True or False"):
            parse(spec)
    with pytest.raises(OptionError, match="overlap must be True or False, got 'false'"):
        CopySpec(overlap="false")  # type: ignore[arg-type]


def test_longest_match_goes_on_into_its_own_copy() -> None:
    ctx = context([9, 8] + [1, 2, 3] * 8)
    draft = parse("longest_match").open(ctx).draft(ctx)
    assert len(draft) > 10
    assert draft.tokens == tuple([1, 2, 3] * 30)[: len(draft)]
    assert draft.origins is not None
    assert draft.origins[:7] == (23, 24, 25, 23, 24, 25, 23), "the last round, again and again"
    ctx = context([9, 8] + [7] * 6)
    assert (parse("longest_match").open(ctx).draft(ctx).origins or ())[:3] == (7, 7, 7)


@pytest.mark.parametrize("spec", ["copyspec", "prompt_lookup", "longest_match"])
def test_a_copy_of_the_prediction_has_no_place_in_the_context(spec: str) -> None:
    ctx = context([50, 51, 52, 3, 4, 5], prediction=(3, 4, 5, 6, 7, 8))
    draft = parse(spec).open(ctx).draft(ctx)
    assert draft.tokens[:2] == (6, 7)
    assert all(token >= 0 for token in draft.tokens), "the seam must never be drafted"
    assert draft.origins is None
    assert {*draft.source} == {PREDICTION}


@pytest.mark.parametrize("spec", ["copyspec", "copyspec(match=last)", "prompt_lookup"])
def test_the_end_of_a_prediction_hides_no_other_occurrence(spec: str) -> None:
    ctx = context([3, 4, 5, 7, 8, 50, 3, 4, 5], prediction=(1, 2, 3, 4, 5))
    draft = parse(spec).open(ctx).draft(ctx)
    assert draft.tokens[:2] == (7, 8)
    assert draft.origins is not None


@pytest.mark.parametrize("spec", ["copyspec", "prompt_lookup", "longest_match"])
def test_a_prediction_that_the_prompt_holds_is_copied_from_there(spec: str) -> None:
    """As when a file is edited: it is the prediction and stands in the prompt."""
    ids, prediction = [50, 3, 4, 5, 6, 7, 8, 51, 3, 4, 5], (3, 4, 5, 6, 7, 8)
    ctx = context(ids, prediction=prediction)
    state = parse(spec).open(ctx)
    draft = state.draft(ctx)
    assert draft.tokens[:2] == (6, 7)
    assert draft.origins is not None
    assert draft.origins[:2] == (4, 5)
    # It remains the prediction, as far as that goes.
    within = [PREDICTION if 1 <= at < 7 else parse(spec).name for at in draft.origins]
    assert draft.source == tuple(within)
    state.truncate(5)  # the prompt that comes instead does not hold it any more
    ctx.ids = [50, 3, 4, 5, 6, 9, 9, 9, 7, 8]
    state.draft(ctx)
    ctx.ids = [*ctx.ids, 3, 4, 5]
    draft = state.draft(ctx)
    assert draft.tokens[0] == 6
    assert all(ctx.ids[o] == t for o, t in zip(draft.origins or (), draft.tokens, strict=False))


@st.composite
def histories(draw: st.DrawFn) -> list[int]:
    return draw(st.lists(st.integers(0, 3), min_size=1, max_size=60))


@given(histories(), st.integers(1, 4), st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_index_equals_a_search(ids: list[int], n: int, cut: int) -> None:
    """Growing, then rewinding, then growing again finds what a plain search finds."""
    seen = list(ids)
    index = NgramIndex(n, seen)
    index.extend()
    cut = min(cut, len(seen))
    index.truncate(cut)
    del seen[cut:]
    seen.extend(reversed(ids))
    index.extend()
    query = seen[-n:]
    starts = [i for i in range(len(seen) - n) if seen[i : i + n] == query]
    if len(seen) < n:
        assert index.recent(len(seen)) == []
        return
    latest = len(seen) - n - 1
    assert index.oldest(latest, most=2) == starts[:2]
    assert index.recent(latest, most=100) == starts[::-1]


COPIERS = [
    "copyspec(gamma=1, overlap=True)",
    "copyspec(match=last)",
    "prompt_lookup",
    "longest_match",
    "auto",
]


@given(
    histories(),
    st.lists(st.integers(0, 3), max_size=12),
    st.sampled_from(COPIERS),
    st.integers(0, 40),
)
@settings(max_examples=250, deadline=None)
def test_origins_carry_the_tokens_they_claim(
    ids: list[int], prediction: list[int], spec: str, cut: int
) -> None:
    """From a fresh state, and from one that was rewound."""
    ctx = context(ids, prediction=tuple(prediction), budget=16)
    state = parse(spec).open(ctx)
    cut = min(cut, len(ids))
    for now in (ids, ids[:cut] + ids[::-1]):
        ctx.ids = now
        draft = state.draft(ctx)
        draft.check(ctx.vocab_size, ctx.budget, len(now))
        if draft.origins is not None:
            for token, origin in zip(draft.tokens, draft.origins, strict=True):
                assert now[origin] == token or (origin == -1 and spec == "auto")
        elif draft.tokens:
            assert prediction, "a copy of the context must say where it comes from"
        state.truncate(cut)


@pytest.mark.parametrize("spec", ["copyspec(match=last)", "prompt_lookup", "longest_match"])
def test_a_constant_context_stays_fast(spec: str) -> None:
    """The worst case for chains of equal n-grams: 30,000 of them are no more work than 1,000.

    Counted are lines run, bytes allocated and tokens compared.
    """
    compared = 0

    class Token(int):
        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int.__eq__(self, other)  # type: ignore[arg-type]

    def work(length: int) -> list[int]:
        nonlocal compared
        ids: list[int] = [Token(7) for _ in range(length)]
        ctx = context(ids)
        state = parse(spec).open(ctx)
        state.draft(ctx)
        rounds = []
        for count in [lines] * 9 + [peak_bytes] * 9:
            ids.append(Token(7))
            compared = 0
            rounds.append((count(lambda: state.draft(ctx)), compared))
        # Lists grow by a share of their length, once in a while: the least is what every step pays.
        return [
            min(found for found, _ in rounds[:9]),
            min(found for found, _ in rounds[9:]),
            min(found for _, found in rounds),
        ]

    few, many = work(1_000), work(30_000)
    assert many[0] <= 1.1 * few[0]
    assert many[1] <= few[1] + 2_000
    assert many[2] <= few[2] + 10


@pytest.mark.slow
def test_copied_share_of_the_paper(shared_data: Path) -> None:
    """Table 1 of the paper, by replaying the recorded 72B answers."""
    from draftsmith.lab.bench.encoding import Encoding
    from draftsmith.lab.bench.replay_sums import ReplaySum, summarize
    from draftsmith.lab.bench.suites import read
    from draftsmith.lab.bench.sweep import Replayer, sweep

    def replayed(name: str) -> dict[object, ReplaySum]:
        records = read(shared_data / "recorded" / f"{name}.qwen2.5-72b.jsonl").records
        replayer = Replayer(Encoding((shared_data / "tokenizers",)))
        done = sweep(records, [parse("copyspec(gamma=3, block=10)")], replayer).done
        return {(row.category, row.turn): row for row in summarize(done)}

    redundant = replayed("mt_redundant")
    assert 0.31 <= redundant[None, None].stats.accepted_share <= 0.335
    assert redundant[None, 2].stats.tokens_per_pass == pytest.approx(2.0, abs=0.05)
    bench = replayed("mt_bench")
    assert 0.19 <= bench[None, None].stats.accepted_share <= 0.215


@pytest.mark.parametrize(
    "spec",
    ["copyspec(gamma=10)", "copyspec(gamma=200)", "prompt_lookup", "prompt_lookup(max=10)",
     "longest_match", "longest_match(min=200)", "spectra(pool=False)"],
)  # fmt: skip
def test_a_state_takes_no_more_memory_than_is_counted(spec: str) -> None:
    drafter, numbers = parse(spec), random.Random(0)
    ids = [numbers.randrange(1000, 50_000) for _ in range(4000)]
    opened = []

    def draft() -> None:
        ctx = context(ids)
        opened.append(drafter.open(ctx))
        opened[0].draft(ctx)

    assert 0.1 * drafter.bytes_for(4000) < peak_bytes(draft) <= drafter.bytes_for(4000)


def test_an_index_forgets_rewound_text() -> None:
    ids = [*range(100)]
    index = NgramIndex(3, ids)
    for turn in range(5):
        index.extend()
        index.truncate(20)
        del ids[20:]
        ids += range(1000 * turn, 1000 * turn + 80)
    assert len(index._places) == 18
