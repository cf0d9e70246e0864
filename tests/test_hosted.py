"""Our drafters under another engine's loop: the same drafts, whatever it does with its requests."""

from __future__ import annotations

from dataclasses import asdict, replace
from random import Random
from typing import Any

import pytest
from tests.other_engine import BEYOND, VOCAB, Engine, Record, record, replayed

from draftsmith.core.cost import RecordedCost
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context
from draftsmith.core.stats import Stats
from draftsmith.core.target import ModelFacts
from draftsmith.drafters.answer_cache import AnswerCache
from draftsmith.drafters.registry import parse
from draftsmith.errors import UnsupportedError
from draftsmith.integrations.hosted import Asked, Host, Row
from draftsmith.testing import Scripted
from scripted import altered

FACTS = ModelFacts(layers=2, heads=2, vocab_size=VOCAB, shape="chain")
LENGTH, K = 10_000, 6
DRAFTERS = ["copyspec", "prompt_lookup", "longest_match", "auto", "copyspec+auto",
            "spectra(pool=False)"]  # fmt: skip


def host(drafter: Any, tokens: int = K, length: int = LENGTH, **options: Any) -> Host:
    return Host(parse(drafter), FACTS, tokens, length, **options)


def rows(engine: Engine) -> list[Row]:
    batch = engine.input_batch
    return [
        Row(
            name, engine.requests[name], batch.token_ids_cpu[i, : batch.num_tokens_no_spec[i]],
            len(engine.sampled[i]), engine.scheduled.get(name, ()),
        )
        for i, name in enumerate(batch.req_ids) if engine.sampled[i]
    ]  # fmt: skip


def asked(row: Row) -> Asked:
    one: Any = row.record
    extra = one.sampling_params.extra_args
    return Asked(len(one.prompt), BEYOND, extra.get("prediction", ()), extra.get("salt", ""))


def draft(own: Host, engine: Engine) -> None:
    own.keep(engine.requests)
    asking = rows(engine)
    made = dict(zip([row.name for row in asking], own.draft(asking, asked), strict=True))
    engine.take([made.get(name, []) for name in engine.input_batch.req_ids])


def run(own: Host, engine: Engine) -> None:
    while engine.open:
        engine.step(engine.open)
        draft(own, engine)


def ours(one: Record, drafter: str, **context: Any) -> Stats:
    return replayed(one.prompt, one.answer, drafter, VOCAB, K, **context)


def counts(stats: Stats) -> dict[str, Any]:
    return asdict(stats) | {"seconds": 0, "prompt_tokens": 0}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_are_those_of_our_own_loop(drafter: str) -> None:
    one = record(0)
    found = host(drafter)
    run(found, Engine({"a": one}))
    assert counts(found.stats) == counts(ours(one, drafter))
    assert found.stats.accepted > 5


def test_answers_are_remembered_by_salt() -> None:
    one, memory, alone = record(4), AnswerCache(1_000_000, FACTS), AnswerCache(1_000_000, FACTS)
    found = host("auto", answers=memory)
    for name, salt in [("first", ""), ("again", ""), ("other", "x")]:
        mine = replace(one, output=[], draft=[])
        mine.sampling_params.extra_args = {"salt": salt}
        before = found.stats.accepted
        run(found, Engine({name: mine}))
        found.keep({})
        assert found.stats.accepted - before == ours(one, "auto", earlier=alone.of(salt)).accepted
    assert memory.count == 3
    assert found.stats.by_source["auto.earlier"].accepted > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("seed", range(3))
def test_any_order_gives_the_drafts_of_the_ids(drafter: str, seed: int) -> None:
    """Reordered, paused, preempted, chunked, aborted: the answer stands, and so do the states."""
    random, found = Random(seed), host(drafter)
    engine = Engine({f"r{i}": record(10 * seed + i) for i in range(6)})
    started: set[str] = set()
    while engine.open:
        names = random.sample(engine.open, random.randint(1, len(engine.open)))
        reading = [name for name in names if name not in started and random.random() < 0.5]
        engine.step(names, reading)
        started |= {*names} - {*reading}
        if random.random() < 0.1:  # a step in which the host did not ask
            continue
        draft(found, engine)
        for name in names:
            one = engine.requests[name]
            if random.random() < 0.1:  # preempted, or cut by the scheduler
                one.draft = one.draft[: random.randint(0, len(one.draft))]
            if random.random() < 0.05:  # what the host makes up where drafts do not fit
                one.draft = [0] * K
        if random.random() < 0.02 and len(engine.open) > 1:
            del engine.requests[random.choice(engine.open)]
        known = {name: hosted.sequence.ids for name, hosted in found._hosted.items()}
        for name in set(names) & known.keys() & engine.requests.keys():
            assert known[name] == engine.requests[name].ids
    for one in engine.requests.values():
        assert one.output == one.answer
    found.keep({})
    assert not found._hosted


def test_drafts_depend_on_ids_alone() -> None:
    """Two ranks that see the same rows draft the same, whoever else was served meanwhile."""
    one, other = host("copyspec"), host("copyspec")
    run(other, Engine({"z": record(77)}))
    first, second = Engine({"a": record(5)}), Engine({"a": record(5)})
    while first.open:
        first.step(["a"])
        second.step(["a"])
        draft(one, first)
        draft(other, second)
        assert first.requests["a"].draft == second.requests["a"].draft


def test_a_name_given_again_and_an_answer_taken_back_are_noticed() -> None:
    found, engine = host("longest_match"), Engine({"a": record(6)})
    for again in (False, True):
        for _ in range(4):
            engine.step(["a"])
            draft(found, engine)
        if again:  # another request by this name
            aborted = found._hosted["a"].sequence
            engine.requests["a"] = record(7)
        else:
            one = engine.requests["a"]
            one.output, one.draft = one.output[:1], []
    run(found, engine)
    assert found._hosted["a"].sequence is not aborted
    assert aborted.state is None  # closed
    one = engine.requests["a"]
    assert one.output == one.answer
    assert found._hosted["a"].sequence.ids == one.ids


def test_drafts_end_with_the_text_and_the_answer() -> None:
    one = record(9, prompt=40, answer=60)
    engine, found = Engine({"a": one}), host("copyspec", length=70)
    while len(one.ids) < 69:
        engine.step(["a"])
        draft(found, engine)
        assert len(one.ids) + len(one.draft) + 1 <= 70 or not one.draft
    limited, engine = host("copyspec"), Engine({"a": record(9)})
    one = engine.requests["a"]
    while len(one.output) < 20:
        engine.step(["a"])
        made = limited.draft(rows(engine), lambda row: replace(asked(row), limit=20))
        engine.take(made)
        assert len(one.output) + len(one.draft) + 1 <= 20 or not one.draft


def test_a_drafter_that_fails_is_put_aside_and_told_once() -> None:
    told: list[str] = []

    def propose(ctx: Context) -> Draft:
        raise RuntimeError(f"no more at {len(ctx.ids)}")

    found = host(Scripted(propose), warn=told.append)
    engine = Engine({"a": record(1), "b": record(2)})
    run(found, engine)
    assert len(told) == 2
    assert "continues without drafts: no more at" in told[0]
    assert found.stats.drafted == 0
    assert all(one.output == one.answer for one in engine.requests.values())


def test_a_drafter_that_cannot_rewind_is_put_aside() -> None:
    def truncate(length: int) -> None:
        raise KeyError(f"cannot rewind to {length}")

    stiff = altered(lambda _: Draft.chain([1, 2], "stiff"), truncate=truncate)
    told: list[str] = []
    found, engine = host(stiff, warn=told.append), Engine({"a": record(6)})
    for _ in range(4):
        engine.step(["a"])
        draft(found, engine)
    one = engine.requests["a"]
    one.output, one.draft = one.output[:1], []
    run(found, engine)
    assert [message for message in told if "cannot rewind to" in message] == told != []
    assert one.output == one.answer
    assert found._hosted["a"].sequence.ids == one.ids


def test_drafts_that_never_pay_become_rare() -> None:
    dear = RecordedCost({0: 1.0, 1: 50.0, 2: 100.0, 4: 200.0})
    found = host("copyspec", cost=dear)
    run(found, Engine({"a": record(1, answer=400)}))
    cheap = host("copyspec", cost=RecordedCost({0: 1.0, 8: 1.01}))
    run(cheap, Engine({"a": record(1, answer=400)}))
    assert cheap.stats.accepted > 20
    assert found.stats.attempts < cheap.stats.attempts / 2  # it asks again now and then


@pytest.mark.parametrize(
    ("drafter", "why"),
    [
        ("pld_plus", "hidden states"),
        ("pld_plus(rank=attention)", "attention weights"),
        ("spectra", r"probe tokens.*spectra\(pool=False\)"),
        ("lookahead", "probe tokens"),
        ("copyspec+spectra", "probe tokens"),
    ],
)
def test_what_needs_more_than_ids_is_refused(drafter: str, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        host(drafter)
