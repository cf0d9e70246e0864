"""The calibration of PLD+: what it counts equals what decoding does, and it can be interrupted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import tiny
from architectures import build, prompt
from command import call as run_command
from draftsmith.drafters import calibration
from draftsmith.engine.engine import Engine
from draftsmith.errors import DrafterError, OptionError, UnsupportedError
from draftsmith.lab.lines import Finished
from draftsmith.lab.tune import pld_plus as tuning
from draftsmith.lab.tune.pld_plus import (
    LENGTHS,
    CalibrationPlan,
    answer_and_peaks,
    best_layer,
    calibrate,
    likely_source,
    passes_by_attention,
    passes_by_layer,
    ranked,
    shortest_good,
)

pytestmark = pytest.mark.usefixtures("kept")
PROMPTS = [prompt(12, seed=n) * 2 for n in (1, 2)]
LIMIT = 40


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine.from_pretrained(build("gpt2"), drafter="none")  # its answers end in loops
    monkeypatch.setattr(engine.model.model.config, "_name_or_path", "some/gpt")
    return engine


def test_a_token_comes_from_where_the_common_past_is_longest() -> None:
    ids = [5, 1, 9, 4, 1, 9, 4, 1, 9]
    assert likely_source(ids, 6) == 5  # "4 1 9": preceded by 4 there, by 5 at position 2
    assert likely_source([1, 2, 1, 2, 7, 2], 5) == 3  # none has a common past: the latest
    assert likely_source([1, 2, 3], 3) is None
    assert likely_source([1, 2, 3, 4], 3) is None


def test_choices() -> None:
    assert ranked(Counter({(1, 0): 2, (0, 1): 2, (0, 0): 5, (2, 2): 0})) == [
        ((0, 0), 5),
        ((0, 1), 2),
        ((1, 0), 2),
    ]
    assert best_layer({1: 2.0, 2: 3.0, 3: 1.0}) == 2
    assert best_layer(dict.fromkeys(range(1, 33), 1.0)) == 9  # the paper's, where all are equal
    assert shortest_good({10: 2.9, 20: 2.985, 30: 3.0}) == 20


@pytest.mark.parametrize("compute", [answer_and_peaks, passes_by_attention])
def test_a_failure_while_heads_are_watched_ends_the_calibration(
    engine: Engine, compute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise MemoryError("no room")

    monkeypatch.setattr(tuning, "likely_source", fail)
    monkeypatch.setattr(tuning, "agreement", fail)
    plan, rest = CalibrationPlan(engine, PROMPTS, max_new_tokens=4), ([5] * 4, ((0, 0),))
    with pytest.raises(DrafterError, match="no room"):
        compute(plan, PROMPTS[0], *rest if compute is passes_by_attention else ())


def actual_passes(engine: Engine, ids: list[int], spec: str, K: int) -> int:  # noqa: N803
    result = engine.generate(ids, drafter=spec, budget=K, temperature=0.0, max_new_tokens=LIMIT)
    return int(result.stats.passes)


@pytest.mark.slow
def test_counted_passes_are_those_of_decoding(engine: Engine) -> None:
    plan = CalibrationPlan(engine, PROMPTS, max_new_tokens=LIMIT)
    accepted = 0
    for ids in PROMPTS:
        answer = answer_and_peaks(plan, ids)["answer"]
        assert answer == engine.generate(ids, temperature=0.0, max_new_tokens=LIMIT).tokens
        by_layer = passes_by_layer(plan, ids, answer)
        heads = ((0, 1), (1, 3))
        by_heads = passes_by_attention(plan, ids, answer, heads)
        for K in (10, 50):  # noqa: N806
            at = LENGTHS.index(K)
            for layer in (1, 2):
                spec = f"pld_plus(layer={layer}, K={K})"
                assert by_layer[layer - 1][at] == actual_passes(engine, ids, spec, K)
            spec = f"pld_plus(rank=attention, heads={heads}, K={K})"
            assert by_heads[at] == actual_passes(engine, ids, spec, K)
            accepted += len(answer) - by_heads[at]
    assert accepted > 0


def test_a_calibration_that_was_interrupted_goes_on(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = CalibrationPlan(engine, PROMPTS, max_new_tokens=20)
    whole = calibrate(plan, Finished(), lambda _: None)
    path = tmp_path / "notes.jsonl"
    done = 0

    def stop_after_three(count: int) -> None:
        nonlocal done
        done += count
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(plan, Finished(path), stop_after_three)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"key": "torn')
    monkeypatch.setattr(tuning, "answer_and_peaks", pytest.fail)  # it is known already
    finished = Finished(path)
    assert calibrate(plan, finished, lambda _: None) == whole
    finished.forget()
    assert not path.exists()
    assert whole.prompts == 2
    assert set(whole.accepted) >= {"layer", "hidden"}


def test_models_that_cannot_be_calibrated(engine: Engine) -> None:
    with pytest.raises(OptionError, match="no prompts"):
        CalibrationPlan(engine, [])
    with pytest.raises(OptionError, match="made in memory has none"):
        CalibrationPlan(Engine.from_pretrained(build("llama")), PROMPTS)
    with pytest.raises(UnsupportedError, match="one token per pass"):
        CalibrationPlan(Engine.from_pretrained(build("mamba")), PROMPTS)


def test_a_model_whose_attention_is_not_ours_gets_layer_and_k(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine.from_pretrained(build("falcon"))
    monkeypatch.setattr(engine.model.model.config, "_name_or_path", "some/falcon")
    plan = CalibrationPlan(engine, PROMPTS[:1], max_new_tokens=10)
    found = calibrate(plan, Finished(), lambda _: None)
    assert plan.size == 2
    assert found.heads == ()
    assert set(found.K) == {"hidden"}
    found.save()
    with pytest.raises(OptionError, match="there is no calibration of heads"):
        engine.generate(PROMPTS[0], drafter="pld_plus(rank=attention)")


def test_the_command_saves_what_pld_plus_then_uses(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tiny"
    tiny.save(folder)
    file = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "the quick brown fox jumps over the quick brown"},
        {"messages": [{"role": "user", "content": "hello world hello"}]},
        {"prompt": "hello " * 600},  # does not fit
    ]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    command = ["tune", "pld-plus", str(folder), str(file), "--max-new-tokens", "16"]
    ran = run_command(*command)
    assert ran.exit_code == 0, ran.output
    assert "left out" in ran.stderr
    assert "layer" in ran.stdout
    found = list((kept / "pld_plus").iterdir())
    assert [path.suffix for path in found] == [".json"]
    assert json.loads(found[0].read_text(encoding="utf-8"))["prompts"] == 2
    ran = run_command(*command, "--json")
    assert json.loads(ran.stdout)["layers"] == 2
    engine = Engine.from_pretrained(folder, drafter="pld_plus")
    known = calibration.load(engine.model.facts)
    assert known is not None
    result = engine.generate("the fox", max_new_tokens=3)
    assert any("from its calibration on 2 prompts" in notice for notice in result.notices)
    monkeypatch.setattr(CalibrationPlan, "attends", False)
    ran = run_command(*command)
    assert "attention cannot be recorded" in " ".join(ran.stderr.split())
    assert "heads" not in ran.stdout
