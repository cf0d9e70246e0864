"""What is kept of a model for `auto`, and that answers begin with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from auto_steps import context

from draftsmith.drafters.auto import Auto
from draftsmith.drafters.mixture import bigrams
from draftsmith.drafters.mixture.compiled import filled
from draftsmith.drafters.mixture.rows import BEST, KEPT, LIKELY, WHOLE, WIDTH
from draftsmith.errors import LoadError
from draftsmith.integrations.hosted import Host
from draftsmith.testing import ToyTarget


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where bigrams are kept."""
    file = tmp_path / "kept" / "bigrams.safetensors"
    monkeypatch.setattr(bigrams, "path_of", lambda _: file)
    return file


def rows(tokens: list[int]) -> list[list[int]]:
    """After token t comes t + 1 at best, then t + 2, and so on."""
    parts = [WHOLE // 2 >> i for i in range(BEST)]
    return [[t + 1, *((t + 1 + i) % 300 for i in range(BEST)), *parts] for t in tokens]


def test_what_is_kept_comes_back_in_its_place(kept: Path) -> None:
    facts = replace(ToyTarget(11).facts, name="toy", vocab_size=2 * KEPT)
    assert bigrams.load(facts) is None
    assert bigrams.save(facts, rows([7, KEPT + 7, KEPT + 9])) == kept
    table = bigrams.load(facts)
    assert table is not None
    found = np.array(table).reshape(KEPT, WIDTH)
    assert {place: int(found[place, 0]) for place in (7, 8, 9)} == {7: -8, 8: 0, 9: -(KEPT + 10)}
    assert found[7, 1] == 8
    assert bigrams.load(replace(facts, name="")) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "x"}, "something else"),
        ({"vocab_size": "400"}, "a vocabulary of 400, not 300"),
        ([(0, 1, 300)], "token ids"),
        ([(0, 0, 0)], "token ids"),
        ([(1, LIKELY, WHOLE + 1)], "probabilities"),
        ([(1, LIKELY + 3, WHOLE)], "probabilities"),
        ([(1, WIDTH - 1, -1)], "probabilities"),
        (np.float32, "float32"),
        (None, "no bigrams"),
    ],
)
def test_a_damaged_file_is_refused(change: Any, said: str, kept: Path) -> None:
    facts = replace(ToyTarget(11).facts, name="toy", vocab_size=300)
    array = np.array(rows([3, 4]), np.int32)
    header = {"format": bigrams.FORMAT, "vocab_size": "300"}
    for row, column, value in change if isinstance(change, list) else ():
        array[row, column] = value
    if isinstance(change, dict):
        header |= change
    elif change is np.float32:
        array = array.astype(np.float32)
    kept.parent.mkdir()
    whole = bigrams.serialize({"rows": array}, header)
    kept.write_bytes(whole if change is not None else whole[:-9])
    with pytest.raises(LoadError, match=f"{said}.*delete it, or run `draftsmith tune auto` again"):
        Auto().bind(facts)
    Auto(tuned=False).bind(facts)
    Auto(logits=False).bind(facts)


@pytest.mark.usefixtures("kept")
def test_an_answer_begins_with_them_and_the_targets_own_rows_take_their_place() -> None:
    facts = replace(ToyTarget(11).facts, name="toy", vocab_size=300)
    bigrams.save(facts, rows(list(range(300))))
    bound = Auto().bind(facts)
    for tuned, drafted in ((bound, True), (Auto(tuned=False).bind(facts), False)):
        ctx = context([1, 2, 3, 4, 100], vocab_size=300)
        state = tuned.open(ctx)
        assert ({101, 102} <= set(state.draft(ctx).tokens)) == drafted
    ctx = context([1, 2, 3, 4, 100], vocab_size=300)
    state = getattr(bound.open(ctx), "state", None) or bound.open(ctx)  # without numba it is inside
    said = [101, *(200 + i for i in range(BEST)), *(WHOLE // 2 >> i for i in range(BEST))]
    state.work = state.work._replace(new=filled(said))
    state.read()
    table = np.array(state.work.rows).reshape(KEPT, WIDTH)
    assert table[100, 0] == 101, "the target's own"
    assert {200, 101} <= set(table[100, 1:LIKELY].tolist()), "its mean with what was there"
    assert table[99, 0] == -100
    assert np.array(bound.bigrams).reshape(KEPT, WIDTH)[100, 0] == -101, "of this answer only"
    state.truncate(2)
    ctx.ids = [1, 2, 100]
    state.draft(ctx)
    assert np.array(state.work.rows).reshape(KEPT, WIDTH)[100, 0] == -101


@pytest.mark.usefixtures("kept")
def test_another_engine_is_given_none() -> None:
    """Its ranks draft on several machines, and must draft alike."""
    facts = replace(ToyTarget(11).facts, name="toy", vocab_size=300, shape="chain")
    bigrams.save(facts, rows([3, 4]))
    assert Auto().bind(facts).bigrams is not None  # type: ignore[attr-defined]
    assert Host(Auto(), facts, 4, 100).drafter.bigrams is None  # type: ignore[attr-defined]
