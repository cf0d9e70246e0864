"""What is remembered of earlier answers: bounded, apart by salt, deletable, and safe on disk."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafted import context
from safetensors.numpy import load_file
from safetensors.numpy import save as serialize

from draftsmith.core.drafter import Context
from draftsmith.core.target import ModelFacts
from draftsmith.drafters import answer_cache as module
from draftsmith.drafters.answer_cache import (
    FORMAT,
    VERSION,
    AnswerCache,
    Answers,
    checksum,
    merged,
)
from draftsmith.drafters.auto import Auto, AutoState
from draftsmith.drafters.mixer import MAX_COUNT, MAX_WEIGHT, MIN_PROB, Mixer
from draftsmith.drafters.mixer_prior import FILE, prior
from draftsmith.errors import LoadError, OptionError, WriteError
from draftsmith.lab.bench.replay import replay

V = 5000
FACTS = ModelFacts(layers=2, heads=2, vocab_size=V, vocabulary=lambda: "words")
PLANTED = list(range(4000, 4040))
LEAD = [7, 8, 9]


def memory(
    most: int = 2_000_000, path: Path | None = None, facts: ModelFacts = FACTS
) -> AnswerCache:
    return AnswerCache(most, facts, path)


def answer(number: int, length: int = 60) -> list[int]:
    """A text of its own, between words that all have."""
    words = random.Random(number)
    return [t for _ in range(length // 3) for t in (words.randrange(100, 3900), 11, 12)]


def join(answers: Answers, prompt: list[int], told: list[int]) -> None:
    answers.add([*prompt, *told], len(prompt), answers.mixer, answers.mixer)


def opened(ids: list[int], answers: Answers | None) -> tuple[AutoState, Context]:
    ctx = context(ids, V, budget=16, earlier=answers)
    state = Auto().open(ctx)
    assert isinstance(state, AutoState)
    return state, ctx


def drafted(ids: list[int], answers: Answers | None) -> set[int]:
    state, ctx = opened(ids, answers)
    return set(state.draft(ctx).tokens)


def held(memory: AnswerCache) -> bytes:
    """All that its arrays hold."""
    arrays = [one.ids for one in memory._list]
    for answers in memory._open.values():
        arrays += [*answers.index, *answers.young]
    return b"|".join(array.tobytes() for array in arrays)


def learn(answers: Answers, shift: float) -> tuple[Mixer, Mixer]:
    """A mixer that a request began with, and one that it may have come to."""
    learned = answers.mixer.copy()
    learned.cells["prob"] = (learned.cells["prob"] + abs(shift)).clip(max=0.9)
    learned.weights[:] += shift
    return answers.mixer, learned


def same(one: Mixer, other: Mixer) -> bool:
    return all(map(np.array_equal, one, other))


# ----------------------------------------------------------------------------------- drafts


def test_what_the_context_holds_too_is_a_copy_of_the_context() -> None:
    shared = memory().of("")
    join(shared, LEAD, PLANTED)
    state, ctx = opened([1, 2, 3, *PLANTED, 5, *PLANTED[:10]], shared)
    draft = state.draft(ctx)
    assert draft.tokens[:2] == tuple(PLANTED[10:12])
    assert draft.source[:2] == ("auto", "auto")
    assert draft.origins is not None
    assert draft.origins[:2] == (13, 14)


def test_the_end_of_the_prompt_leads_to_the_answer() -> None:
    shared = memory().of("")
    join(shared, [*range(200, 300), *LEAD], PLANTED)
    assert PLANTED[0] in drafted([1, 2, *LEAD], shared)
    assert 250 not in drafted([1, 2, 248, 249], shared), "the prompt itself is nobody's answer"


def test_a_replay_joins_what_it_is_given() -> None:
    shared, told = memory().of(""), answer(1)
    passes = [replay(LEAD, told, Auto(), V, earlier=shared).stats.passes for _ in range(2)]
    assert passes[0] == replay(LEAD, told, Auto(), V, earlier=memory().of("")).stats.passes
    assert passes[1] < passes[0]
    assert shared.cache.count == 2


# ----------------------------------------------------------------------------------- tenants


# ----------------------------------------------------------------------------------- the bound


@pytest.mark.parametrize("salts", [1, 5])
def test_bytes_stay_within_the_bound_and_the_oldest_answers_go_first(salts: int) -> None:
    requests, most = 150, 1_000_000
    both, aged = memory(most), 0
    for number in range(requests):
        before = both.count
        join(both.of(f"salt {number % salts}"), LEAD, answer(number, 90))
        aged += both.count <= before
        assert both.nbytes <= most
        whole = sum(answers.nbytes for answers in both._kept.values())
        assert both.nbytes == whole + sum(150 + one.ids.nbytes for one in both._list)
        newest = [one.ids[-3] for one in both._list]
        expected = range(number + 1 - both.count, number + 1)
        assert newest == [answer(n, 90)[-3] for n in expected], "those that ended last, in order"
    assert aged > 1
    assert both.count > 2
    for number in range(requests - both.count, requests):
        told = answer(number, 90)
        assert told[9] in drafted([5, *told[:9]], both.of(f"salt {number % salts}"))


def test_an_answer_longer_than_the_bound_is_remembered_by_its_end() -> None:
    small = memory(1_000_000)
    shared = small.of("")
    join(shared, LEAD, answer(1, 30_000))
    assert 0 < small.nbytes <= 1_000_000
    assert small.count == 1
    told = answer(1, 30_000)
    assert told[-1] in drafted([5, *told[-8:-1]], shared)


def test_what_nobody_answered_is_not_kept() -> None:
    both = memory()
    for number in range(50):
        both.of(str(number)).add(LEAD, 3, prior(2), prior(2))
    assert (both.count, both.nbytes, len(both._open)) == (0, 0, 0)


# ----------------------------------------------------------------------------------- learning


def test_requests_at_the_same_time_all_count() -> None:
    shared = memory().of("")
    start, one = learn(shared, 0.01)
    _, other = learn(shared, -0.03)
    alone = merged(start, start, one)
    assert same(alone, one), "one request after the other keeps everything exactly"
    assert alone.cells is not one.cells, "the request may go on learning"
    either = merged(alone, start, other)
    again = merged(merged(start, start, other), start, one)
    assert np.allclose(either.weights, start.weights - 0.02)
    for name in ("prob", "count", "logit"):
        assert np.allclose(either.cells[name], again.cells[name])


@pytest.mark.parametrize("change", [100.0, -100.0])
def test_what_is_learned_at_once_stays_within_bounds_and_can_be_read_again(
    change: float, tmp_path: Path
) -> None:
    path = tmp_path / "answers.safetensors"
    both = memory(path=path)
    shared = both.of("")
    for _ in range(3):  # batches, each of requests at the same time
        start, learned = learn(shared, change / 10)
        learned.cells["count"] = (learned.cells["count"] + change).clip(0, MAX_COUNT)
        for _ in range(4):
            shared.add([*LEAD, 4], 3, start, learned)
    cells = shared.mixer.cells
    assert 0 <= cells["count"].min() <= cells["count"].max() <= MAX_COUNT
    assert np.abs(shared.mixer.weights).max() == MAX_WEIGHT
    assert MIN_PROB <= cells["prob"].min() <= cells["prob"].max() <= 1 - MIN_PROB
    assert np.allclose(cells["logit"], np.log(cells["prob"] / (1 - cells["prob"])))
    both.save()
    assert memory(path=path).count == 12


# ---------------------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_while_an_answer_is_indexed_leaves_a_bank_that_fits(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, real = memory(20_000_000).of(""), module.index_ids

    def stop(*arguments: Any) -> None:
        if late:
            real(*arguments)
        raise KeyboardInterrupt

    join(shared, LEAD, answer(1))
    monkeypatch.setattr(module, "index_ids", stop)
    with pytest.raises(KeyboardInterrupt):
        join(shared, LEAD, answer(2, 3000))
    monkeypatch.setattr(module, "index_ids", real)
    index, totals = shared.index, shared.index.totals[0]
    assert totals["contexts"] <= len(index.contexts)
    assert 2 * totals["contexts"] <= len(index.slots)
    assert totals["length"] <= len(index.ids)
    join(shared, LEAD, PLANTED)
    assert PLANTED[10] in drafted([1, *PLANTED[:10]], shared)


def test_an_answer_that_ends_in_the_midst_of_the_memorys_work_is_left_out() -> None:
    """As a collection of garbage may end an abandoned one."""
    both = memory()
    with both.lock:
        join(both.of(""), LEAD, PLANTED)
    assert both.count == 0


# ----------------------------------------------------------------------------------- deleting


def test_an_older_save_brings_nothing_back_and_nobody_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "answers.safetensors"
    both, real = memory(path=path), module.write_chunks
    join(both.of("a"), LEAD, PLANTED)
    forgetting = threading.Thread(target=both.forget)
    free = []

    def ask() -> None:
        if both.lock.acquire(blocking=False):
            free.append(True)
            both.lock.release()

    def slow(*arguments: Any) -> None:
        if not forgetting.ident:
            forgetting.start()
            forgetting.join(0.5)  # it would end if it did not wait for this
            assert both.count == 0, "in memory it is deleted at once"
        other = threading.Thread(target=ask)
        other.start()
        other.join()
        real(*arguments)

    monkeypatch.setattr(module, "write_chunks", slow)
    both.save()
    forgetting.join()
    assert free == [True, True]
    assert memory(path=path).count == 0


def test_deleting_leaves_no_token_and_no_weight(tmp_path: Path) -> None:
    path = tmp_path / "answers.safetensors"
    both = memory(path=path)
    mine, theirs = both.of("mine"), both.of("theirs")
    trace = np.array(PLANTED[5:9], np.int32).tobytes()
    kept = np.array(answer(1)[5:9], np.int32).tobytes()
    start, learned = learn(mine, 0.5)
    mine.add([*LEAD, *PLANTED], 3, start, learned)
    join(theirs, LEAD, answer(1))
    both.save()
    state, ctx = opened([1, *PLANTED[:10]], mine)
    state.draft(ctx)
    assert b"theirs" not in path.read_bytes(), "salts may be secrets"
    for place in (held(both), path.read_bytes()):
        assert trace in place
        assert kept in place
    both.forget("mine")
    for place in (held(both), path.read_bytes()):
        assert trace not in place
        assert kept in place
    assert trace not in mine.index.ids.tobytes()
    assert same(mine.mixer, prior(2))
    assert not set(state.draft(ctx).tokens) & set(PLANTED[10:]), "open requests are cut off, too"
    assert same(state.mixer, prior(2))
    ctx.ids.extend(PLANTED)
    state.end(ctx)
    assert trace not in held(both), "and join nothing any more"
    assert both.count == 1
    assert both.nbytes == theirs.nbytes + 150 + both._list[0].ids.nbytes
    assert drafted([1, *PLANTED[:10]], both.of("mine")) & set(PLANTED[10:]) == set()
    both.forget()
    assert (both.count, both.nbytes) == (0, 0)
    assert kept not in held(both) + path.read_bytes()


def test_deleting_while_young_banks_fill_keeps_the_order() -> None:
    both, told = memory(1_000_000), list[int]()
    while both._young is None or both.count < both._young + 6:
        told.append(answer(len(told))[-3])
        join(both.of(str(len(told) % 2)), LEAD, answer(len(told) - 1))
    left = sum(one.salt == both.of("0").salt for one in both._list[: both._young])
    both.forget("1")
    assert both._young == left
    told, count = told[1::2], 0
    while both.count > count:
        count = both.count
        join(both.of("0"), LEAD, answer(1000 + count))
        told.append(answer(1000 + count)[-3])
    assert [one.ids[-3] for one in both._list] == told[-both.count :]


# ----------------------------------------------------------------------------------- the file


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "answers.safetensors"
    both = memory(path=path)
    for number in range(6):
        join(both.of(str(number % 2)), LEAD, answer(number))
    start, learned = learn(both.of("1"), 0.25)
    both.of("1").add([*LEAD, *PLANTED], 3, start, learned)
    both.save()
    return path


def test_a_file_brings_everything_back(saved: Path) -> None:
    again = memory(path=saved)
    assert again.count == 7
    shared = again.of("1")
    assert PLANTED[10] in drafted([1, *PLANTED[:10]], shared)
    assert PLANTED[10] not in drafted([1, *PLANTED[:10]], again.of("0"))
    assert np.allclose(shared.mixer.weights, prior(2).weights + 0.25)
    assert np.allclose(again.of("0").mixer.weights, prior(2).weights)
    before = saved.read_bytes()
    again.save()
    assert memory(path=saved).count == 7
    assert len(saved.read_bytes()) == len(before)
    assert [one.name for one in saved.parent.iterdir()] == [saved.name], "nothing lies beside it"


def test_a_damaged_file_is_refused_wherever_it_is_damaged(saved: Path) -> None:
    whole = saved.read_bytes()
    for place in {*range(0, len(whole), 2999), *range(8, 600, 37), len(whole) - 1}:
        saved.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(LoadError, match=r"answers\.safetensors"):
            memory(path=saved)
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:length])
        with pytest.raises(LoadError, match=r"answers\.safetensors"):
            memory(path=saved)
        assert len(saved.read_bytes()) == length, "it is left as it was"
    saved.write_bytes(whole)
    assert memory(path=saved).count == 7


def test_a_file_of_another_kind_or_model_is_refused(saved: Path, tmp_path: Path) -> None:
    other = ModelFacts(layers=2, heads=2, vocab_size=V, vocabulary=lambda: "other words")
    wider = ModelFacts(layers=2, heads=2, vocab_size=V + 1, vocabulary=lambda: "words")
    for facts in (other, wider):
        with pytest.raises(LoadError, match="another vocabulary"):
            memory(path=saved, facts=facts)
    foreign = tmp_path / "prior.safetensors"
    foreign.write_bytes(FILE.read_bytes())
    with pytest.raises(LoadError, match="another format"):
        memory(path=foreign)
    with pytest.raises(WriteError, match="folder"):
        memory(path=tmp_path)


def test_a_file_larger_than_the_bound_is_refused(saved: Path) -> None:
    with saved.open("ab") as file:
        file.truncate(1_000_001)
    with pytest.raises(LoadError, match="more than answers=1,000,000"):
        memory(1_000_000, saved)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("ids", lambda ids: ids + V, "token ids"),
        ("ids", lambda ids: ids - V, "token ids"),
        ("ids", lambda ids: ids[1:], "lengths"),
        ("ids", lambda ids: ids.astype(np.float32) * np.float32(np.nan), "types"),
        ("ids", lambda ids: ids.reshape(-1, 1), "types"),
        ("answers", lambda rows: rows.astype(np.float64), "types"),
        ("answers", lambda rows: rows[0], "types"),
        ("answers", lambda rows: rows * [1, 1, 1000], "lengths"),
        ("answers", lambda rows: rows * [1, -1, 1], "lengths"),
        ("answers", lambda rows: rows * [3, 1, 1], "index"),
        ("0.weights", lambda weights: weights * np.float32(np.nan), "weights"),
        ("0.weights", lambda weights: weights + 100, "weights"),
        ("1.chance", lambda chance: chance[1:], "shape"),
        ("salts", '["a", "a"]', "salts"),
        ("salts", "[1, 2]", "salts"),
        ("salts", '{"a": 1, "b": 2}', "salts"),
    ],
)
def test_a_file_that_says_impossible_things_is_refused(
    saved: Path, name: str, change: Any, said: str
) -> None:
    tensors = load_file(saved)
    salts = json.dumps([*memory(path=saved)._kept])
    if name == "salts":
        salts = change
    else:
        tensors[name] = change(tensors[name])
    header = {"format": FORMAT, "version": VERSION, "vocab_size": str(V), "vocabulary": "words"}
    header["salts"] = salts
    header["sum"] = checksum(header, tensors)
    saved.write_bytes(serialize(tensors, header))
    with pytest.raises(LoadError, match=said):
        memory(path=saved)


def test_a_memory_without_a_file_says_so() -> None:
    with pytest.raises(OptionError, match="answers_file"):
        memory().save()
