"""What is kept of a model for `auto`, and that answers begin with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafted import context

from draftsmith import storage
from draftsmith.drafters import bigrams
from draftsmith.drafters.auto import Auto
from draftsmith.drafters.logit_rows import ROW, ROWS, TOP, WHOLE, WIDTH
from draftsmith.errors import LoadError, WriteError
from draftsmith.integrations.hosted import Host
from draftsmith.testing import ToyTarget

FACTS = replace(ToyTarget(11).facts, name="toy", vocab_size=300)


def rows(tokens: list[int]) -> Any:
    """After token t comes t + 1 at best, then t + 2, and so on."""
    parts = [WHOLE // 2 >> i for i in range(TOP)]
    return np.array([(t + 1, [(t + 1 + i) % 300 for i in range(TOP)], parts) for t in tokens], ROW)


def test_what_is_kept_comes_back_in_its_place(kept: Path) -> None:
    facts = replace(FACTS, vocab_size=2 * ROWS)
    assert bigrams.load(facts) is None
    path = bigrams.path_of(facts)
    assert bigrams.load(facts) is None
    bigrams.save(path, rows([7, ROWS + 7, ROWS + 9]))
    assert [*(kept / "auto").iterdir()] == [path]
    table = bigrams.load(facts)
    assert table is not None
    assert table["after"][[7, 8, 9]].tolist() == [-8, 0, -(ROWS + 10)]
    assert table["tokens"][7, 0] == 8
    # A model made in memory, another one, and one whose vocabulary has grown since have none.
    for other in ({"name": ""}, {"name": "tyo"}, {"vocab_size": 2 * ROWS + 1}):
        assert bigrams.load(replace(facts, **other)) is None


@pytest.mark.usefixtures("homeless")
def test_where_there_is_no_cache_folder_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigrams, "known_about", storage.known_about)
    assert bigrams.load(FACTS) is None
    with pytest.raises(WriteError, match="DRAFTSMITH_CACHE"):
        bigrams.path_of(FACTS)


def test_where_nobody_may_look_nothing_is_known(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bigrams.save(bigrams.path_of(FACTS), rows([7]))

    def forbidden(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", forbidden)
    assert kept.is_dir()
    assert Auto().bind(FACTS) == Auto()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("header", "another format"),
        ([(0, 1, 300)], "token ids"),
        ([(0, 0, 0)], "token ids"),
        ([(0, 3, 4)], "same token twice"),
        ([(1, 1 + TOP, WHOLE + 1)], "probabilities"),
        ([(1, 1 + TOP + 3, WHOLE)], "probabilities"),
        ([(1, WIDTH - 1, -1)], "probabilities"),
        (np.float32, "float32"),
        ("end", "no bigrams"),
        ("size", "more than"),
    ],
)
@pytest.mark.usefixtures("kept")
def test_a_damaged_file_is_refused(change: Any, said: str) -> None:
    array = rows([3, 4]).view(np.int32).reshape(-1, WIDTH)
    for row, column, value in change if isinstance(change, list) else ():
        array[row, column] = value
    if change is np.float32:
        array = array.astype(np.float32)
    header = {"format": "x" if change == "header" else bigrams.FORMAT}
    whole = bigrams.serialize({"rows": array}, header)
    whole = whole[:-9] if change == "end" else whole + b" " * (change == "size") * bigrams.MAX_BYTES
    bigrams.path_of(FACTS).write_bytes(whole)
    with pytest.raises(LoadError, match=f"{said}.*delete it, or run `draftsmith tune auto` again"):
        Auto().bind(FACTS)
    Auto(tuned=False).bind(FACTS)
    Auto(logits=False).bind(FACTS)


@pytest.mark.usefixtures("kept")
def test_an_answer_begins_with_them_and_the_targets_own_rows_take_their_place() -> None:
    bigrams.save(bigrams.path_of(FACTS), rows(list(range(300))))
    bound = Auto().bind(FACTS)
    for tuned, drafted in ((bound, True), (Auto(tuned=False).bind(FACTS), False)):
        ctx = context([1, 2, 3, 4, 100], vocab_size=300)
        state = tuned.open(ctx)
        assert (101 in state.draft(ctx).tokens) == drafted
    ctx = context([1, 2, 3, 4, 100], vocab_size=300)
    state = bound.open(ctx)
    own = (101, [200 + i for i in range(TOP)], [WHOLE // 2 >> i for i in range(TOP)])
    state.new_rows = np.array([own], ROW)
    state.read()
    assert state.rows["after"][[100, 99]].tolist() == [101, -100], "its own, and the model's"
    assert {200, 101} <= {*state.rows["tokens"][100].tolist()}, "its mean with what was there"
    assert bound.bigrams["after"][100] == -101, "of this answer only"
    state.truncate(2)
    ctx.ids = [1, 2, 100]
    state.draft(ctx)
    assert state.rows["after"][100] == -101


@pytest.mark.usefixtures("kept")
def test_another_engine_is_given_none() -> None:
    """Its ranks draft on several machines, and must draft alike."""
    facts = replace(FACTS, shape="chain")
    bigrams.save(bigrams.path_of(facts), rows([3, 4]))
    assert Auto().bind(facts).bigrams is not None  # type: ignore[attr-defined]
    assert Host(Auto(), facts, 4, 100).drafter.bigrams is None  # type: ignore[attr-defined]
