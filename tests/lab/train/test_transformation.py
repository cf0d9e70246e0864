"""The data transformation, exactly: windows, labels, halves, infilling, held-out text."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from draftsmith.errors import OptionError
from draftsmith.lab.train.batches import Batches, windows
from draftsmith.lab.train.held_out import HeldOut
from draftsmith.lab.train.infill import Markers, infilled
from draftsmith.lab.train.recipe import Recipe
from draftsmith.text.tokenizer import encode
from draftsmith.text.vocab import Vocabulary

A = 999
MARKERS = Markers(prefix=-1, suffix=-2, middle=-3)


def lengths(depths: np.ndarray) -> list[int]:
    """Of the windows; checks that each counts 1, 2, … and that none touch."""
    found = []
    for position, depth in enumerate(depths):
        if depth:
            assert depth == (depths[position - 1] + 1 if depth > 1 else 1)
            if depth == 1:
                assert position
                assert depths[position - 1] == 0, "two windows touch, or one begins the sequence"
                found.append(0)
            found[-1] += 1
    return found


@given(st.integers(1, 9), st.floats(0, 0.99), st.integers(0, 10**6))
def test_windows_are_apart_and_no_longer_than_wanted(L: int, share: float, seed: int) -> None:  # noqa: N803
    length = 60
    expected = share * length / (L + 1)
    found = lengths(windows(length, L, expected, np.random.default_rng(seed)))
    assert all(1 <= size <= L for size in found)
    assert len(found) in (int(expected), int(expected) + 1)


@pytest.mark.parametrize("L", [1, 5])
@pytest.mark.parametrize("share_of", ["replaced", "windows"])
def test_shares_and_uniform_lengths(L: int, share_of: str) -> None:  # noqa: N803
    recipe = Recipe(L=L, share_of=share_of, length=200)  # a tenth: the default, and the paper's
    rng = np.random.default_rng(1)
    rows = [windows(200, L, recipe.windows, rng) for _ in range(2000)]
    sizes = Counter(size for row in rows for size in lengths(row))
    count, positions = sizes.total(), 200 * len(rows)
    counted = count if share_of == "windows" else sum(size * n for size, n in sizes.items())
    assert counted / positions == pytest.approx(0.1, rel=0.01)
    for size in range(1, L + 1):  # five standard deviations
        assert sizes[size] / count == pytest.approx(1 / L, abs=5 * (1 / L / count) ** 0.5)


def test_all_arrangements_are_equally_likely() -> None:
    rng = np.random.default_rng(0)
    seen = Counter(tuple(windows(5, 1, 2, rng)) for _ in range(6000))
    # Two windows of one position among 1…4 that do not touch: (1,3), (1,4), (2,4).
    assert len(seen) == 3
    assert all(n / 6000 == pytest.approx(1 / 3, abs=0.03) for n in seen.values())


def batches(**settings: object) -> Batches:
    recipe = Recipe(**{"length": 50, "rows": 6, "L": 3, "seed": 5} | settings)  # type: ignore[arg-type]
    stream = np.arange(50 * 10 + 1, dtype=np.int32)
    views = np.lib.stride_tricks.sliding_window_view(stream, 51)[::50]
    return Batches(views, recipe)


def test_labels_stay_and_both_halves_are_the_same_text() -> None:
    batch = batches().step(3)
    mixed = batch.mixed([A])
    assert mixed.shape == batch.plain.shape == batch.labels.shape == (6, 50)
    assert torch.equal(batch.labels, batch.plain + 1), "the true next token, at every position"
    assert torch.equal(mixed == A, batch.replaced)
    assert torch.equal(mixed[~batch.replaced], batch.plain[~batch.replaced])
    assert batch.replaced.any(dim=1).all()


def test_diverse_tokens_go_by_depth() -> None:
    batch = batches(diverse=True).step(0)
    mixed = batch.mixed([900, 901, 902])
    for depth in (1, 2, 3):
        assert (mixed[batch.depths == depth] == 899 + depth).all()
    assert {1, 2, 3} <= set(batch.depths.unique().tolist())


def test_a_step_depends_on_seed_and_number_alone() -> None:
    one, again, other = batches().step(7), batches().step(7), batches(seed=6).step(7)
    assert torch.equal(one.ids, again.ids)
    assert torch.equal(one.depths, again.depths)
    assert not torch.equal(one.ids, other.ids)
    assert not torch.equal(batches().step(8).depths, one.depths)
    plain = batches(objective="plain").step(7)
    assert torch.equal(plain.ids, one.ids)
    assert not plain.replaced.any()


def test_every_sequence_comes_once_before_any_comes_twice() -> None:
    made = batches(rows=5)
    firsts = [int(row[0]) for step in range(4) for row in made.step(step).ids]
    assert sorted(firsts[:10]) == sorted(firsts[10:]) == list(range(0, 500, 50))
    assert firsts[:10] != firsts[10:]


TEXT = "abcdefghijklmnopqrst"


def test_infilling_orders_and_shares() -> None:
    rng = np.random.default_rng(3)
    seen: Counter[str] = Counter()
    cuts: Counter[int] = Counter()
    for _ in range(8000):
        pieces: list[str] = []

        def encode(text: str, pieces: list[str] = pieces) -> list[int]:
            pieces.append(text)
            return [len(pieces)]

        ids = infilled(TEXT, 0.5, MARKERS, encode, encode, rng)
        if len(pieces) == 3:
            assert ids == [-1, 1, -2, 2, -3, 3]
            (prefix, suffix, middle), order = pieces, "PSM"
            cuts[len(prefix)] += 1
        elif len(pieces) == 2:  # prefix and middle are one piece
            assert ids == [-1, -2, 1, -3, 2]
            (suffix, middle), prefix, order = pieces, "", "SPM"
        else:
            assert ids == [1]
            (middle,), prefix, suffix, order = pieces, "", "", "plain"
        assert prefix + middle + suffix == TEXT
        seen[order] += 1
    for order, share in (("plain", 0.5), ("PSM", 0.25), ("SPM", 0.25)):
        assert seen[order] / 8000 == pytest.approx(share, abs=0.02)
    assert max(cuts) == len(TEXT), "a cut may fall behind the last character"


def test_cuts_add_no_spaces_where_a_tokenizer_begins_texts_with_one() -> None:
    tokenizer, rng = tiny.sentencepiece(), np.random.default_rng(3)
    table, text = Vocabulary.of(tokenizer), "once upon a time"
    write = partial(encode, tokenizer)
    wanted = table.bytes_of(write(text))
    for _ in range(50):
        ids = infilled(text, 1.0, MARKERS, write, table.encode, rng)
        at = sorted([*map(ids.index, (-1, -2, -3)), len(ids)])
        parts = {ids[a]: ids[a + 1 : b] for a, b in pairwise(at)}
        whole = parts[-1] + parts[-3] + parts[-2]
        assert table.bytes_of(whole).lstrip() == wanted.lstrip()


WORDS = " ".join(f"word{i}" for i in range(100))


def test_held_out_text_is_cut_out_and_no_other() -> None:
    held_out = HeldOut([WORDS])
    before, after = "x " * 200, "y " * 200
    copied = " ".join(WORDS.split()[20:60])
    assert held_out.remove(before + copied + "\n" + after) == [before, "\n" + after]
    assert held_out.remove(WORDS) == []
    mostly = "new " + WORDS
    assert held_out.remove(mostly) == []
    short = " ".join(WORDS.split()[:29]) + " and then something else\n"
    assert held_out.remove(short) == [short]
    assert HeldOut([]).remove(WORDS) == [WORDS]
    # Scripts without spaces between words, and other words beside them.
    chinese = "".join(chr(0x4E00 + n) for n in range(400))
    assert HeldOut([chinese]).remove("new words " * 200 + chinese) == ["new words " * 200]
    assert HeldOut([chinese]).remove(chinese[::-1]) == [chinese[::-1]]
    # A short text is one run.
    assert HeldOut(["a b c"]).remove(" a  b c ") == []
    assert HeldOut(["a b c"]).remove("a b d") == ["a b d"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"L": 0}, "L must be an integer >= 1, got 0"),
        ({"objective": "improve"}, "'improved'"),
        ({"share": 1.5}, "share must be a number >= 0 and <= 1, got 1.5"),
        ({"clip": 0.0}, "clip must be a number > 0, got"),
        ({"share": 0.5, "share_of": "windows", "L": 9}, "do not fit"),
        ({"diverse": True, "L": 1}, "diverse"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        Recipe(**settings)  # type: ignore[arg-type]


def test_the_learning_rate_rises_then_falls() -> None:
    recipe = Recipe(steps=2000)
    rates = [recipe.rate(step) for step in range(2000)]
    assert rates[0] == pytest.approx(5e-5 / 400)
    assert rates[399] == pytest.approx(5e-5)
    assert max(rates) == pytest.approx(5e-5)
    assert rates[-1] == pytest.approx(1e-5)
    assert rates[400 + 400] == pytest.approx(4.41e-5, rel=0.01)
    assert rates[400 + 800] == pytest.approx(3e-5, rel=0.01)
    assert all(a >= b for a, b in pairwise(rates[400:]))
