"""SPECTRA: its dictionaries by hand, its rules one by one, and that it changes no answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from random import Random

import drafted
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tiny
from draftsmith.core.draft import ROOT, Draft
from draftsmith.core.drafter import Context, Outcome
from draftsmith.core.readout import highest
from draftsmith.core.target import Highest, RowOutput
from draftsmith.core.tree import Continuation
from draftsmith.core.verify import Verification
from draftsmith.drafters.registry import parse
from draftsmith.drafters.spectra import Predictor, _Pool
from draftsmith.drafters.spectra_ngrams import Ngrams
from draftsmith.engine.engine import Engine
from draftsmith.errors import LoadError, OptionError
from draftsmith.lab.corpus.index import write_index
from draftsmith.testing import ToyTarget, check_drafter, decode, plain

V = 40
context = partial(drafted.context, vocab_size=V, budget=1000, depth=1000)


def opened(spec: str) -> _Pool:
    state = parse(spec).open(context([1]))
    assert isinstance(state, _Pool)
    return state


def logits_for(draft: Draft, predicted: Sequence[int], length: int) -> Tensor:
    """(1+n+m, V) logits whose chains of `length` probes predict the tokens given."""
    logits = torch.zeros((1 + len(draft), V))
    for k, token in enumerate(predicted):
        logits[1 + draft.size + (k + 1) * length - 1, token] = 5.0
    return logits


def passed(state: _Pool, ctx: Context, logits: Tensor, draft: Draft, token: int = 0) -> None:
    """One pass that accepted nothing and emitted `token`."""
    ctx.ids.append(token)  # type: ignore[attr-defined]
    state.observe(ctx, Outcome(draft, Verification((), (token,), (None,)), RowOutput(logits)))


SPECS = [
    "spectra(N=2, W=1, G=1)",
    "spectra(N=3, W=2, G=40, tau=0)",
    "spectra(N=3, W=2, tau=1, positions=staggered)",
    "spectra(N=4, W=3, forward=False)",
    "spectra(N=3, W=6, G=2, backward=False, sub_ngrams=False)",
    "spectra(N=3, W=2, backward_first=False, memory=3)",
    "spectra(N=3, W=2, pool=False, memory=3)",
    "lookahead(N=2, W=3, positions=own)",
]


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_contract(spec: str) -> None:
    check_drafter(parse(spec))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("spectra(N=1)", "N must be an integer >= 2, got 1"),
        ("spectra(W=0)", "W must be"),
        ("spectra(tau=1.5)", "tau must be a number >= 0 and <= 1, got 1.5"),
        ("spectra(positions=other)", "'own' or 'staggered'"),
        ("spectra(forward=False, backward=False)", "leave no guesses"),
        ("lookahead(G=0)", "lookahead: G must be"),
    ],
)
def test_options_that_cannot_work(spec: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        parse(spec)


def test_two_passes_by_hand() -> None:
    state = opened("spectra(N=3, W=2, tau=1)")
    ctx = context([9])
    state.draft(ctx)
    state.chains = [(1, 2), (3, 4)]
    draft = state.draft(ctx)
    assert draft == Draft((1, 2, 3, 4), (ROOT, 0, ROOT, 2), ("spectra.pool",) * 4, probes=4)
    passed(state, ctx, logits_for(draft, [5, 6], 2), draft)
    assert state.chains == [(2, 5), (4, 6)]
    draft = state.draft(ctx)
    passed(state, ctx, logits_for(draft, [2, 5], 2), draft, token=2)
    assert state.chains == [(5, 2), (6, 5)]
    ctx.ids = [9, 1, 2]
    assert state.guesses(ctx.ids) == [
        Continuation([5, 2, 5], "spectra.backward"),  # (1,2)→5, (2,5)→2, then only (2)→5
        Continuation((5, 2), "spectra.forward"),
    ]
    draft = state.draft(ctx)
    assert draft.tokens[: draft.size] == (5, 2, 5)
    assert set(draft.source[: draft.size]) == {"spectra.backward"}, "shared nodes are one"


def written_out(
    windows: list[tuple[int, ...]], passes: Sequence[Sequence[int]], sub_ngrams: bool
) -> tuple[dict[int, list[tuple[int, ...]]], dict[tuple[int, ...], int]]:
    """S_fwd and S_bwd by the letter of lines 26 to 43, with one predicted token per chain."""
    forward: dict[int, list[tuple[int, ...]]] = {}
    backward: dict[tuple[int, ...], int] = {}
    for predicted in passes:
        for i, token in enumerate(predicted):
            chain = (*windows[i], token)
            for j in range(len(chain) - 1) if sub_ngrams else (0,):
                forward.setdefault(chain[j], []).append(chain[j + 1 :])
            for j in range(len(chain) - 1) if sub_ngrams else (len(chain) - 2,):
                backward[chain[: j + 1]] = chain[j + 1]
            windows[i] = chain[1:]
    return forward, backward


@given(
    st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=2, max_size=2),
    st.lists(st.tuples(*[st.integers(0, 4)] * 2), max_size=20),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_dictionaries_are_those_of_the_algorithm(
    windows: list[tuple[int, ...]], passes: list[tuple[int, ...]], sub_ngrams: bool
) -> None:
    ngrams, pool = Ngrams(1000, 100, sub_ngrams), list(windows)
    ngrams.begin(pool)
    for predicted in passes:
        grown = [(*window, token) for window, token in zip(pool, predicted, strict=True)]
        ngrams.record(*grown)
        pool = [chain[1:] for chain in grown]
    forward, backward = written_out(list(windows), passes, sub_ngrams)
    if passes:
        assert {key for key, known in ngrams.changed_keys().items() if known} == forward.keys()
    for token in range(5):
        found = ngrams.forward(token, pool if passes else ())
        # What stood side by side from the start is there, too, and not only once it grew.
        begun = {w[a + 1 : b] for w in windows for a in range(3) for b in range(4) if w[a] == token}
        known = set(forward.get(token, ()))
        assert known <= {one[:k] for one in found for k in range(1, len(one) + 1)}
        assert set(found) <= begun | known
        assert len(found) == len(set(found))
        assert not any(a != b and b[: len(a)] == a for a in found for b in found)
    for size in (1, 2, 3):
        for key in product(range(5), repeat=size):
            assert ngrams._next(key[0], key[1:]) == backward.get(key)


def test_the_backward_guess_takes_the_longest_key_and_stops_at_a_miss() -> None:
    ngrams = Ngrams(15, 100, True)
    ngrams.record((1, 2, 3))
    ngrams.record((7, 2, 4))
    assert ngrams.backward([1, 2], 3) == [3]
    assert ngrams.backward([7, 2], 3) == [4]
    assert ngrams.backward([8, 2], 3) == []  # no key (2,): both chains had 2 in the middle
    ngrams.record((2, 9, 2))
    assert ngrams.backward([8, 2], 3) == [9, 2, 9]
    assert ngrams.backward([1, 2], 3) == [3], "a longer key goes before a newer one"
    ngrams.record((1, 2, 5))
    assert ngrams.backward([1, 2], 3) == [5], "the last write wins"


@given(st.lists(st.integers(0, 9), max_size=90))
def test_a_key_has_the_latest_different_continuations(lasts: list[int]) -> None:
    ngrams = Ngrams(per_key=3, memory=4, sub_ngrams=False)
    for last in lasts:
        ngrams.record((0, last))
    latest = list(dict.fromkeys(reversed(lasts)))[:3]
    assert ngrams.forward(0, ()) == [(last,) for last in latest]
    assert len(ngrams._followers.get(0, [])) <= 12


@given(st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), max_size=60))
@settings(max_examples=50, deadline=None)
def test_memory_stays_bounded_and_changes_add_up(chains: list[list[int]]) -> None:
    ngrams, keys = Ngrams(3, 4, True), set()
    for chain in chains:
        ngrams.record(tuple(chain))
        for key, known in ngrams.changed_keys().items():
            keys.add(key) if known else keys.discard(key)
        assert keys == set(ngrams._followers)
        assert len(keys) <= 4
        assert all(len(ngrams.forward(key, ())) <= 3 for key in keys)


@given(st.integers(1, 400), st.integers(1, 12), st.integers(0, 2**31), st.booleans())
@settings(max_examples=100, deadline=None)
def test_predictions_equal_a_full_sort(vocab: int, chains: int, seed: int, read: bool) -> None:
    """Also where the highest logits were read, as on accelerators."""
    rng = Random(seed)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((chains, vocab), generator=generator)
    rows[:, rng.sample(range(vocab), vocab // 3)] = -torch.inf
    keys = set(rng.sample(range(vocab), rng.randint(0, vocab)))
    fresh = [rng.random() < 0.7 for _ in range(chains)]
    best = Highest(*(one.numpy() for one in highest(rows))) if read else None
    predictor = Predictor(vocab)
    predictor.update(dict.fromkeys(range(vocab), True))
    predictor.update({token: token in keys for token in range(vocab)})
    predicted = predictor(RowOutput(rows, highest=best), slice(None), fresh)
    for row, choosy, got in zip(rows, fresh, predicted, strict=True):
        order = row.argsort(descending=True).tolist()
        unseen = [t for t in order if t not in keys and row[t] > -torch.inf]
        assert row[got] == row[unseen[0] if choosy and unseen else order[0]]


@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
def test_tau_divides_the_predictions(tau: float) -> None:
    """With r ≤ τ the most probable token, though it is a key; with r > τ the best that is none."""
    state = opened(f"spectra(N=2, W=600, tau={tau})")
    ctx = context([3])
    for _ in range(2):  # the first pass makes 3 a key
        draft = state.draft(ctx)
        assert state.chains == [(3,)] * 600
        logits = logits_for(draft, [3] * 600, 1)
        logits[:, 4] = 4.0
        passed(state, ctx, logits, draft)
    assert {token for chain in state.chains for token in chain} <= {3, 4}
    assert state.chains.count((3,)) / 600 == pytest.approx(tau, abs=0.06)


def test_chains_start_from_the_prompt_and_draws_are_the_drafters_own() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (opened(f"spectra(seed={seed})") for seed in (0, 0, 1))
    ctx = context([11, 12, 13])
    sampler = ctx.sampler
    ctx.sampler = None  # type: ignore[assignment]
    for state in (one, same, other):
        state.draft(ctx)
    ctx.sampler = sampler
    assert one.chains == same.chains != other.chains
    assert {token for chain in one.chains for token in chain} == {11, 12, 13}
    assert torch.equal(torch.get_rng_state(), before)


def recorded(spec: str, chains: Sequence[tuple[int, ...]]) -> _Pool:
    state = opened(spec)
    state.ngrams.record(*chains)
    state.chains, state._grew = [chain[1:] for chain in chains], True
    return state


def by_source(state: _Pool, ids: list[int]) -> list[tuple[str, int]]:
    """The drafted guesses: of each node its source, without the drafter's name, and its token."""
    draft = state.draft(context(ids))
    sources = [source.removeprefix("spectra.") for source in draft.source[: draft.size]]
    return list(zip(sources, draft.tokens[: draft.size], strict=True))


def test_backward_first_decides_who_falls_to_the_cap() -> None:
    chains = [(2, 5, 6), (2, 7, 8), (1, 2, 9), (0, 1, 4)]
    guesses = [("backward", 9), ("forward", 7), ("forward", 8), ("forward", 5), ("forward", 6)]
    first = "spectra(N=3, W=4, G={})"
    assert by_source(recorded(first.format(3), chains), [1, 2]) == guesses
    assert by_source(recorded(first.format(2), chains), [1, 2]) == guesses[:3]
    chains[2] = (1, 2, 3)
    last = "spectra(N=3, W=4, G={}, backward_first=False)"
    everything = recorded(last.format(4), chains)
    everything.chains = []
    everything.ngrams.record((2, 9, 9))
    assert everything.guesses([1, 2])[-1] == Continuation([3], "spectra.backward")
    assert everything.guesses([1, 2])[0] == Continuation((9, 9), "spectra.forward")


def test_beginnings_of_other_guesses_use_up_nothing() -> None:
    """G and W are spent on guesses of which none is the beginning of another."""
    chains = [(2, first, 6, 7, 8) for first in range(10, 30)] + [(1, 2, 29, 6, 7)]
    state = recorded("spectra(W=15, G=15)", chains)
    draft = state.draft(context([1, 2]))
    firsts = [t for t, parent in zip(draft.tokens, draft.parents, strict=True) if parent == ROOT]
    assert firsts[:15] == list(range(29, 14, -1))
    assert draft.size == 15 * 4, "fifteen guesses of four tokens, the backward one among them"


def test_ablations_leave_one_source_out() -> None:
    chains = [(2, 5, 6), (1, 2, 9)]
    for spec, names in (
        ("spectra(N=3)", {"spectra.forward", "spectra.backward"}),
        ("spectra(N=3, forward=False)", {"spectra.backward"}),
        ("spectra(N=3, backward=False)", {"spectra.forward"}),
    ):
        assert {guess.source for guess in recorded(spec, chains).guesses([1, 2])} == names
    whole = recorded("spectra(N=3, sub_ngrams=False, backward=False)", chains)
    assert whole.guesses([2]) == [Continuation((5, 6), "spectra.forward")]
    assert whole.guesses([5]) == []


def test_a_small_budget_shrinks_the_pool_to_its_half() -> None:
    """Ten guesses of one node, chains of two probes: guesses may leave more, never take more."""
    state = opened("spectra(N=3, W=12, backward=False)")
    state.ngrams.record(*[(0, token) for token in range(1, 11)])
    ctx = context([0])
    for budget, size, probes in (
        (1, 1, 0),
        (3, 3, 0),
        (4, 2, 2),
        (9, 5, 4),
        (16, 8, 8),
        (30, 10, 20),
        (99, 10, 24),
    ):
        ctx.budget = budget
        draft = state.draft(ctx)
        assert (draft.size, draft.probes) == (size, probes), budget
    ctx.ids = [39]  # nothing to guess: the pool takes it all
    ctx.budget = 6
    assert (state.draft(ctx).size, state.draft(ctx).probes) == (0, 6)


def test_chains_take_turns_where_not_all_fit() -> None:
    state = opened("spectra(N=3, W=5, tau=1)")
    ctx = context([1, 2, 3], budget=4)
    seen = []
    for _ in range(5):
        draft = state.draft(ctx)
        seen.append(tuple(state._running))
        passed(state, ctx, logits_for(draft, [7, 7], 2), draft, token=39)
    assert seen == [(0, 1), (2, 3), (4, 0), (1, 2), (3, 4)]


def test_positions() -> None:
    own, staggered = (opened(f"spectra(N=3, W=3, positions={p})") for p in ("own", "staggered"))
    ctx = context([4])
    assert own.draft(ctx).node_depths() == (1, 2) * 3
    assert staggered.draft(ctx).node_depths() == (1, 2, 2, 3, 3, 4)
    ctx.depth = 3
    assert staggered.draft(ctx).node_depths() == (1, 2, 2, 3)
    ctx.depth = 1
    assert own.draft(ctx) == staggered.draft(ctx) == Draft()


def test_a_corpus_fills_the_rest_of_the_guesses(tmp_path: Path) -> None:
    write_index(
        tmp_path, [[1, 2, 3], [1, 2, 4, 5], [1, 2, 3, 6]], vocabulary="v", examples=3, model="toy"
    )
    spec = f"spectra(N=3, W=2, G=2, corpus={str(tmp_path)!r})"
    drafter = parse(spec)
    check_drafter(drafter, length=12)
    assert drafter.preferred_width() == 2 * 2 + 2 * 10
    state = drafter.open(context([1]))
    assert isinstance(state, _Pool)
    assert state.guesses([1, 2])[0] == Continuation([3, 6], "spectra.retrieval")
    assert len(state.guesses([1, 2])) == 2
    state.ngrams.record((1, 2, 9))
    state.ngrams.record((2, 8, 9))
    state.ngrams.record((2, 7, 9))
    sources = [guess.source for guess in state.guesses([1, 2])]
    assert sources == ["spectra.backward", "spectra.forward", "spectra.forward"]
    with pytest.raises(LoadError):
        parse(f"spectra(corpus={str(tmp_path / 'none')!r})")


def test_a_deterministic_text_is_soon_guessed() -> None:
    """A target that counts in a circle: the pool learns the circle, and guesses whole chains."""
    circle = ToyTarget(12, lambda key: torch.eye(12)[(key[-1] + 1) % 12], order=1)
    done = decode(circle, parse("spectra(N=4, W=3, tau=1)"), [0, 1, 2], 60, budget=40)
    assert done.ids[3:] == plain(circle, [0, 1, 2], 60)
    assert done.stats.tokens_per_pass > 2.5
    assert all(".pool" not in source for source in (*done.sources, *done.stats.by_source))
    right = {name for name, found in done.stats.by_source.items() if found.accepted}
    assert right == {"spectra.backward"}, "shared nodes belong to the first"


def test_dictionaries_live_on_in_a_chat() -> None:
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer(), budget="drafter")
    chat = engine.chat(drafter="spectra", max_new_tokens=12)
    chat.send("hello world")
    state = chat._last and chat._last.state
    assert isinstance(state, _Pool)
    learnt = {key for key, entries in state.ngrams._followers.items() if entries}
    assert len(learnt) > 20
    chat.send("this is a test")
    assert chat._last.state is state
    assert all(state.ngrams._followers.get(key) for key in learnt)


def test_a_rewind_keeps_the_dictionaries_and_restarts_chains_whose_prompt_went() -> None:
    state = opened("spectra(N=3, W=2, tau=1)")
    ctx = context([5, 6, 7])
    draft = state.draft(ctx)
    passed(state, ctx, logits_for(draft, [8, 9], 2), draft)
    chains, known = list(state.chains), dict(state.ngrams._followers)
    state.truncate(3)
    assert state.chains == chains
    state.truncate(1)
    ctx.ids, ctx.prompt_length = [5, 20, 21], 3
    state.draft(ctx)
    assert {token for chain in state.chains for token in chain} <= {5, 20, 21}
    assert known.items() <= state.ngrams._followers.items()
