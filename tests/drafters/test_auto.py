"""`auto`: its contexts, its trees, its prior; that compiled and plain are one."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from auto_steps import context, step, steps, told, verified
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from draftsmith import compiled
from draftsmith.core.budget import CostCurve, RecordedCost
from draftsmith.core.stats import PREDICTION
from draftsmith.core.target import ModelFacts
from draftsmith.drafters.auto import NODE_COST, Affordable, Auto, Mixture
from draftsmith.drafters.mixture import prior
from draftsmith.drafters.mixture.belief import FAR, HEAVY
from draftsmith.drafters.mixture.contexts import (
    COUNT,
    END,
    FIRST,
    FOLLOWER,
    FOLLOWERS,
    HEAD,
    LISTED,
    NEXT,
    NODE,
    NODES,
    ORDER,
    PLACE,
    SPANS,
    TOKEN,
    TOTAL,
    Bank,
)  # fmt: skip
from draftsmith.errors import LoadError

STEPS = Path(__file__).with_name("auto_steps.py")
BYTES_PER_TOKEN = 600
"""Of context, at most."""


def state(ids: list[int], prediction: tuple[int, ...] = (), **options: Any) -> tuple[Mixture, Any]:
    ctx = context(ids, prediction)
    return Mixture(prior.prior(1), **options), ctx


def elsewhere(*arguments: str, **variables: str) -> list[Any]:
    """The same steps in a process of their own."""
    done = subprocess.run(
        [sys.executable, str(STEPS), *arguments],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | variables,
    )
    found: list[Any] = json.loads(done.stdout)
    return found


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for (tokens, parents, chances), other in zip(ours, theirs, strict=True):
        assert [list(tokens), list(parents)] == other[:2]
        assert list(chances) == pytest.approx(other[2], abs=1e-9)


def test_compiled_and_plain_grow_the_same_trees() -> None:
    assert_same(steps(400), elsewhere("400", "plain"))


@pytest.mark.slow
def test_compiled_and_plain_grow_the_same_ten_thousand_trees() -> None:
    assert_same(steps(10_000), elsewhere("10000", "plain"))


@pytest.mark.parametrize("seed", ["1", "2"])
def test_every_process_grows_the_same_trees(seed: str) -> None:
    assert elsewhere("200", PYTHONHASHSEED=seed) == json.loads(json.dumps(steps(200)))


@pytest.mark.slow
def test_two_processes_may_compile_at_once_and_none_needs_a_cache(tmp_path: Path) -> None:
    places = [str(tmp_path), str(tmp_path), "/dev/null/nowhere"]
    running = [
        subprocess.Popen(
            [sys.executable, str(STEPS), "50"],
            stdout=subprocess.PIPE,
            env=os.environ | {"NUMBA_CACHE_DIR": place},
        )
        for place in places
    ]
    found = [json.loads(process.communicate()[0]) for process in running]
    assert found[0] == found[1] == found[2]
    assert list(tmp_path.rglob("*.nbi"))


def test_a_disk_that_is_full_when_the_cache_is_written_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    caching = pytest.importorskip("numba.core.caching")
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(caching.Cache, "save_overload", full)
    assert compiled.compiled(twice)(21) == 42


@pytest.mark.parametrize("ending", [".nbi", ".nbc"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_cached_file_that_was_cut_off_fails_nothing_and_is_made_anew(
    ending: str, share: float, tmp_path: Path
) -> None:
    pytest.importorskip("numba")
    source = tmp_path / "doubling.py"
    source.write_text(
        "from draftsmith import compiled\n"
        "def double(number: int) -> int:\n    return 2 * number\n"
        "print(compiled.compiled(double)(21))\n"
    )

    def run() -> str:
        place = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, str(source)]
        return subprocess.run(command, env=place, check=True, capture_output=True, text=True).stdout

    run()
    (file,) = tmp_path.rglob(f"*{ending}")
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    assert run() == "42\n"
    run()
    assert file.stat().st_size == len(whole)


def twice(number: int) -> int:
    return 2 * number


def test_what_compiling_took_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    before, call = compiled.compiling(), compiled.compiled(twice)
    assert call(21) == 42
    first = compiled.compiling()
    assert (first > before) == compiled.COMPILED
    call(21)
    assert compiled.compiling() == first
    call(2.5)
    assert (compiled.compiling() > first) == compiled.COMPILED


# --- contexts ------------------------------------------------------------------------------------


def counts(bank: Bank) -> dict[Any, Any]:
    """All that a bank knows, by contexts as they read."""
    found: dict[Any, Any] = {}
    ids = list(bank.ids)
    for at in range(0, int(bank.marks[NODES]) * NODE, NODE):
        order, end = int(bank.nodes[at + ORDER]), int(bank.nodes[at + END])
        followers, entry = [], int(bank.nodes[at + HEAD])
        while entry >= 0:
            f = bank.followers[entry * FOLLOWER : (entry + 1) * FOLLOWER]
            followers.append((int(f[TOKEN]), int(f[COUNT]), int(f[PLACE])))
            entry = int(f[NEXT])
        key = (order, *map(int, ids[end - SPANS[order] : end]))
        assert key not in found
        found[key] = int(bank.nodes[at + TOTAL]), end, followers
    listed = bank.marks[FIRST : FIRST + 2 * int(bank.marks[LISTED])]
    found["frequent"] = list(map(int, listed))
    return found


@given(st.lists(st.integers(0, 4), min_size=1, max_size=150), st.integers(1, 4))
@settings(max_examples=60)
def test_contexts_hold_what_followed_them(ids: list[int], spread: int) -> None:
    """Counted again by hand."""
    ids = [token * spread for token in ids]
    mixture, ctx = state(ids)
    mixture.draft(ctx)
    found = counts(mixture.own)
    for order, length in ((1, 1), (2, 2), (3, 8), (4, 32)):
        expected: dict[Any, dict[int, tuple[int, int]]] = {}
        for place in range(length, len(ids)):
            after = expected.setdefault((order, *ids[place - length : place]), {})
            times = after.pop(ids[place], (0, 0))[0]
            after[ids[place]] = times + 1, place  # the newest last
        seen = {key: found[key] for key in found if key[0] == order}
        assert {key: total for key, (total, _, _) in seen.items()} == {
            key: sum(times for times, _ in after.values()) for key, after in expected.items()
        }
        for key, (_, _, followers) in seen.items():
            newest = [(token, *known) for token, known in reversed(expected[key].items())]
            assert followers == newest
    for token in set(ids):
        last = max(place for place, one in enumerate(ids) if one == token)
        assert found[0, token] == (ids.count(token), last + 1, [])


@pytest.mark.parametrize("seed", range(5))
def test_a_rewound_state_knows_what_a_fresh_one_does(seed: int) -> None:
    """Contexts are a fresh start's; what was learnt stays."""
    source = random.Random(seed)
    text = [source.choice((source.randrange(5), source.randrange(200))) for _ in range(400)]
    prediction = tuple(text[50:90])
    mixture, ctx = state(text[:120], prediction)
    for _ in range(20):
        step(mixture, ctx, text[len(ctx.ids) :])
    mixture.draft(ctx)
    learnt = list(mixture.belief.weights), list(mixture.belief.cells)
    kept = source.randrange(1, len(ctx.ids))
    mixture.truncate(kept)
    ctx.ids = [*ctx.ids[:kept], 7, 7, 8]
    rewound = mixture.draft(ctx)
    fresh, other = state(list(ctx.ids), prediction)
    other.prompt_length = ctx.prompt_length
    fresh.belief, fresh.tokens, fresh.cost = mixture.belief, mixture.tokens, mixture.cost
    expected = fresh.draft(other)
    assert counts(mixture.own) == counts(fresh.own)
    assert (rewound.tokens, rewound.chances) == (expected.tokens, expected.chances)
    assert learnt == (list(mixture.belief.weights), list(mixture.belief.cells))


def test_what_is_rewound_and_said_again_is_learnt_from() -> None:
    mixture, ctx = state([1, 2, 3, 4, 1, 2])
    step(mixture, ctx, [3, 4, 9, 9])
    mixture.draft(ctx)
    before = list(mixture.belief.weights)
    mixture.truncate(len(ctx.ids))  # nothing
    assert mixture.length == len(ctx.ids)
    step(mixture, ctx, [5, 6])
    mixture.draft(ctx)
    assert list(mixture.belief.weights) != before


LONG = 100_000
TEXTS = {
    "equal": [7] * LONG,
    "period two": [7, 8] * (LONG // 2),
    "different": list(range(LONG)),
    "wide": [token * 26 % 262_144 for token in range(LONG)],
}


@pytest.mark.parametrize("name", TEXTS)
def test_long_texts_take_bounded_memory(name: str) -> None:
    mixture, ctx = state(TEXTS[name])
    draft = step(mixture, ctx, [7] * 64)
    step(mixture, ctx, [7] * 64)
    used = sum(np.asarray(array).nbytes for array in mixture.own)
    assert used <= BYTES_PER_TOKEN * LONG
    assert int(mixture.own.marks[FOLLOWERS]) <= 4 * len(ctx.ids)
    if name == "equal":
        assert draft.tokens[:10] == (7,) * 10
    if name == "period two":
        assert draft.tokens[:6] == (7, 8) * 3


def test_no_result_depends_on_how_contexts_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all hashes were the same: then only the comparison with the text tells them apart."""
    expected = steps(40)
    from draftsmith.drafters.mixture import contexts

    monkeypatch.setattr(contexts, "randbelow", lambda _: 0)
    assert_same(expected, json.loads(json.dumps(steps(40))))


# --- trees ---------------------------------------------------------------------------------------


def test_a_repeated_text_is_drafted_on() -> None:
    text = list(range(100, 160))
    mixture, ctx = state([*text, 1, 2, *text[:40]])
    draft = mixture.draft(ctx)
    chain = draft.first_branch()
    assert chain.tokens[:10] == tuple(text[40:50])
    assert chain.origins is not None
    assert chain.origins[:10] == tuple(range(40, 50))
    assert draft.reaches() == sorted(draft.reaches(), reverse=True)
    assert set(draft.source) == {"auto"}


PARTING = [
    token
    for place, way in enumerate((50, 60, 60, 50, 60, 50, 50, 60))
    for token in (1, 2, 3, way, 100 + place)
] + [1, 2, 3]
"""After 1, 2, 3 comes 50 or 60."""


def test_two_ways_on_are_two_branches() -> None:
    mixture, ctx = state(PARTING)
    draft = mixture.draft(ctx)
    first = [t for t, parent in zip(draft.tokens, draft.parents, strict=True) if parent == -1]
    assert {50, 60} <= {*first}


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(0, 40),
)
@settings(max_examples=100)
def test_origins_carry_the_tokens_they_claim(
    ids: list[int], prediction: list[int], cut: int
) -> None:
    mixture, ctx = state(ids, tuple(prediction))
    cut = min(cut, len(ids))
    for now in (ids, ids[:cut] + ids[::-1]):
        ctx.ids = now
        draft = mixture.draft(ctx)
        draft.check(ctx.vocab_size, ctx.budget, len(now))
        for token, origin in zip(draft.tokens, draft.origins or (), strict=True):
            assert origin == -1 or now[origin] == token
        mixture.truncate(cut)


def test_earlier_answers_are_drafted_from() -> None:
    """They have no place in the context, and are found by contexts of all lengths."""
    text = random.Random(5).sample(range(5000), k=300)
    memory = Mixture(prior.prior(1))
    memory.draft(context(text))
    ctx = context(text[100:140])
    mixture = Mixture(prior.prior(2), earlier=memory.own)
    draft = mixture.draft(ctx)
    assert draft.first_branch().tokens[:10] == tuple(text[140:150])
    assert {*(draft.origins or ())} == {-1}
    assert not {*Mixture(prior.prior(2)).draft(ctx).tokens} & {*text[140:150]}


def test_a_prediction_is_what_the_answer_is_expected_to_be() -> None:
    prediction = tuple(range(200, 230))
    mixture, ctx = state([1, 2, 3, 4, 5], prediction)
    draft = mixture.draft(ctx)
    assert draft.first_branch().tokens[:5] == prediction[:5]
    assert {*(draft.origins or ())} == {-1}
    assert draft.first_branch().source[:5] == (PREDICTION,) * 5
    mixture, ctx = state([9, *prediction, 1, 2, 3], prediction)
    draft = mixture.draft(ctx).first_branch()
    assert draft.tokens[:5] == prediction[:5]
    assert draft.origins is not None
    assert draft.origins[:5] == (1, 2, 3, 4, 5)
    assert draft.source[:5] == (PREDICTION,) * 5
    # Left, and found again.
    step(mixture, ctx, [77, 78, prediction[10], prediction[11], prediction[12], 79])
    ctx.ids = [*ctx.ids, 78, prediction[10], prediction[11]]
    assert mixture.draft(ctx).first_branch().tokens[0] == prediction[12]


def test_for_a_model_that_verifies_chains_it_drafts_the_best_one() -> None:
    bound = Auto().bind(ModelFacts(layers=1, heads=1, shape="chain"))
    ctx = context(PARTING)
    chain = bound.open(ctx).draft(ctx)
    assert chain.is_chain
    tree = Auto().open(ctx).draft(ctx)
    assert not tree.is_chain
    best = tree.first_branch().tokens
    assert len(best) <= len(chain)
    assert chain.tokens[: len(best)] == best
    assert str(bound) == "auto(logits=True, grammar=True, tuned=True)"


@pytest.mark.parametrize("most", [0, 1, 3, 64, 200])
@pytest.mark.parametrize("depth", [1, 2, 64])
def test_drafts_stay_within_what_is_allowed(most: int, depth: int) -> None:
    mixture, ctx = state([1, 2, 3, 4, 5, 6, 7, 8] * 20)
    ctx.budget, ctx.depth = most, depth
    draft = mixture.draft(ctx)
    assert len(draft) <= most
    assert draft.depth <= depth
    assert bool(draft) == bool(most)


def test_dear_nodes_are_not_drafted_and_cheap_ones_are() -> None:
    ids = random.Random(1).choices(range(30), k=400)
    sizes = []
    for slope in (0.002, 0.02, 0.2, 2.0):
        mixture, ctx = state(ids)
        ctx.cost = RecordedCost({0: 1.0, 64: 1 + 64 * slope})
        sizes.append(len(mixture.draft(ctx)))
    assert sizes[0] > sizes[1] > sizes[2] >= sizes[3] == 0


def test_more_rows_in_the_pass_make_a_node_dearer() -> None:
    curve = {0: 1.0, 8: 1.1, 64: 4.0}
    sizes = []
    for rows in (1, 8):
        mixture, ctx = state(random.Random(1).choices(range(30), k=400))
        cost = RecordedCost(curve)
        ctx.cost = cost
        if rows > 1:
            ctx.cost = CostCurve().at(rows)
            for width, seconds in curve.items():
                ctx.cost.record(width, seconds)
        sizes.append(len(mixture.draft(ctx)))
    assert sizes[1] < sizes[0]


# --- learning ------------------------------------------------------------------------------------


def test_a_stream_that_turns_around_cannot_drive_anything_out_of_bounds() -> None:
    """First every guess is right, then each is wrong, and so on."""
    mixture, ctx = state([1, 2, 3] * 30)
    source = random.Random(0)
    for round_ in range(400):
        draft = mixture.draft(ctx)
        best = draft.first_branch().tokens
        right = (round_ // 20) % 2 == 0
        truth = [*best, source.randrange(50)] if right else [999 + round_]
        verdict = verified(draft, truth)
        ctx.ids = [*ctx.ids, *verdict.tokens]
        mixture.observe(ctx, told(draft, verdict))
    weights, cells = np.asarray(mixture.belief.weights), np.asarray(mixture.belief.cells)
    assert np.isfinite(cells).all()
    assert np.abs(weights).max() <= HEAVY
    assert FAR >= 20


def test_it_learns_what_holds() -> None:
    """In a text where copies always hold it says so more surely in the end."""
    text = random.Random(3).choices(range(1000), k=150)
    mixture, ctx = state(text)
    chances = []
    for _ in range(30):
        at = len(ctx.ids) % len(text)
        draft = step(mixture, ctx, [*text, *text][at : at + 70])
        if draft.chances:
            chances.append(draft.chances[0])
    assert chances[-1] > chances[0]
    assert chances[-1] > 0.97


def test_the_mean_cost_of_a_pass_follows_what_was_drafted() -> None:
    mixture, ctx = state([1, 2, 3] * 30)
    step(mixture, ctx, [1, 2, 3] * 30)
    assert mixture.tokens > 1.6
    assert 1 < mixture.cost <= 1 + 64 * NODE_COST


# --- prior ---------------------------------------------------------------------------------------


def damaged(tmp_path: Path, change: Any) -> Path:
    tensors = load_file(prior.FILE)
    change(tensors)
    file = tmp_path / "prior.safetensors"
    save_file(tensors, file)
    return file


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e6])
@pytest.mark.parametrize("name", ["1.weights", "2.weights", "2.chance"])
def test_a_prior_with_impossible_values_is_refused(tmp_path: Path, name: str, value: float) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][3] = value

    with pytest.raises(LoadError, match="no prior of auto"):
        prior.load(damaged(tmp_path, change))


@pytest.mark.parametrize("name", ["1.weights", "2.cases"])
def test_a_prior_with_a_part_missing_or_too_long_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LoadError, match="no prior of auto"):
        prior.load(damaged(tmp_path, lambda tensors: tensors.pop(name)))
    with pytest.raises(LoadError, match="shape"):
        prior.load(damaged(tmp_path, lambda t: t.update({name: np.zeros(3, np.float32)})))


@pytest.mark.parametrize("content", [b"", b"x" * 100, prior.FILE.read_bytes()[:-7]])
def test_a_file_that_is_no_prior_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "prior.safetensors"
    file.write_bytes(content)
    with pytest.raises(LoadError, match="install draftsmith again"):
        prior.load(file)
    with pytest.raises(LoadError):
        prior.load(tmp_path / "none.safetensors")


def test_a_prior_is_the_same_when_read_again(tmp_path: Path) -> None:
    file = tmp_path / "prior.safetensors"
    prior.save(file, prior.load(prior.FILE))
    assert file.read_bytes() == prior.FILE.read_bytes()


@pytest.mark.parametrize("cached", [99, 9_999])
def test_without_numba_it_matches_longest_where_trees_are_too_dear(cached: int) -> None:
    config = Auto()
    for seconds, source in ((0.00001, "auto"), (0.01, "longest_match")):
        cost = CostCurve().at(1, cached)
        ctx = context([1, 2, 3, 4, 5] * 20)
        ctx.cost = cost
        for _ in range(3):
            cost.record(0, 0.01)
            cost.record_draft(config, ctx.budget, seconds)
        frugal = Affordable(config, Mixture(prior.prior(1)))
        for _ in range(3):
            draft = frugal.draft(ctx)
            assert {*draft.source} == {source}
            verdict = verified(draft, [1, 2, 3, 4, 5] * 20)
            ctx.ids = [*ctx.ids, *verdict.tokens]
            frugal.observe(ctx, told(draft, verdict))
        frugal.truncate(3)
        ctx.ids = ctx.ids[:3]
        assert frugal.draft(ctx).size <= 64


def test_states_learn_apart() -> None:
    one, other = prior.prior(1), prior.prior(1)
    one.weights[0] = 5.0
    assert other.weights[0] != 5.0


def test_without_a_place_for_the_cache_code_is_compiled_anyway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def njit(**options: Any) -> Any:
        asked.append(options)
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(compiled.numba, "njit", njit)

    def one() -> int:
        return 1

    assert compiled.compiled(one)() == 1
    assert [bool(options.get("cache")) for options in asked] == [True, False]
