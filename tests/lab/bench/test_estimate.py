"""Cost tables, and what is predicted from them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import command
import tiny
from draftsmith import builtin
from draftsmith.core.stats import Stats
from draftsmith.drafters.registry import parse
from draftsmith.engine.engine import Engine
from draftsmith.errors import LoadError, OptionError, UnsupportedError, WriteError
from draftsmith.lab.bench.cost import (
    CostTable,
    Grid,
    Point,
    Slope,
    _interpolate,
    curve,
    measure_cost,
    parse_cost,
)  # fmt: skip
from draftsmith.lab.bench.encoding import Encoding
from draftsmith.lab.bench.estimate import automatic, estimate, plain_seconds, predict
from draftsmith.lab.bench.records import Record
from draftsmith.lab.bench.replay import Replay, ReplayBudget, replay
from draftsmith.lab.bench.sweep import Replayer, sweep
from draftsmith.model.load import load

call = partial(command.call, "bench")


def table(**milliseconds: float) -> CostTable:
    """A table with points such as p1_c100=2.0 (positions, context)."""
    points = []
    for name, ms in milliseconds.items():
        positions, context = (int(part[1:]) for part in name.split("_"))
        points.append(Point(context, positions, ms, ms, ms))
    return CostTable("m", "cpu", "float32", 1, "here", {}, tuple(points), {100: 50.0})


COST = table(p1_c100=10, p5_c100=14, p1_c300=20, p5_c300=40)


@pytest.mark.parametrize(
    ("positions", "context", "ms"),
    [
        (1, 100, 10), (5, 100, 14), (3, 100, 12), (9, 100, 18), (1, 200, 15), (5, 200, 27),
        (3, 200, 21), (1, 400, 25), (1, 10, 10),
    ],
)  # fmt: skip
def test_interpolation(positions: int, context: int, ms: float) -> None:
    assert COST.seconds(positions, context) == pytest.approx(ms / 1e3)


def test_prompts() -> None:
    assert COST.prefill_seconds(50) == pytest.approx(0.025)
    assert COST.prefill_seconds(200) == pytest.approx(0.1)


def test_tables_are_saved_and_read(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    COST.save(path)
    assert CostTable.load(path) == COST
    before = {n: v for n, v in COST.as_dict().items() if n != "linear_layers"}
    path.write_text(json.dumps(before), encoding="utf-8")  # as older versions wrote it
    assert CostTable.load(path) == COST
    assert parse_cost(str(path)) == COST
    assert parse_cost("0.02") == Slope(0.02)
    assert Slope(0.02, 0.02).seconds(2, 0) == pytest.approx(0.0204)
    wrong = [{"format": 99}, {"points": []}, {"points": [asdict(Point(100, 1, 0, 0, 0))]}]
    for content in ("{}", "[]", "nonsense", *(json.dumps(COST.as_dict() | w) for w in wrong)):
        path.write_text(content)
        with pytest.raises(LoadError, match="not a cost table"):
            CostTable.load(path)
    with pytest.raises(LoadError, match="No such file"):
        parse_cost(str(tmp_path / "no.json"))
    with pytest.raises(OptionError, match=r"such as 0\.02, got -1"):
        parse_cost("-1")
    with pytest.raises(WriteError, match="cannot be written"):
        COST.save(tmp_path / "no" / "cost.json")


def test_the_curve_is_that_of_the_middle_context() -> None:
    points = [Point(c, p, 9 + p + c / 100, 1.0, 1.0) for c in (100, 200, 300) for p in (1, 65)]
    cost = CostTable("m", "cpu", "float32", 1, "", {}, tuple(points), {})
    assert curve(cost)[8] == pytest.approx((9 + 9 + 2) / 1e3)
    assert curve(Slope(0.1))[1] == pytest.approx(1.1)


def replayed(drafting: float) -> Replay:
    """Six tokens in two passes, and seconds of drafting."""
    stats = Stats(prompt_tokens=101, passes=2, tokens=6, drafted=4, accepted=4)
    stats.seconds.draft = drafting
    return Replay(stats, Counter({(64, 1): 1, (64, 5): 1}))


def test_the_estimate_is_the_sum_over_passes() -> None:
    found = predict([replayed(0.001)], COST, "s", "d")
    prompt, plain, passes = 0.0505, 6 * 0.010, 0.010 + 0.014
    assert found.speedup == pytest.approx((prompt + plain) / (prompt + passes + 0.001))
    assert found.pass_cost == pytest.approx(1.2)
    assert found.drafter_share == pytest.approx(0.001 / (prompt + passes + 0.001))
    # A slope without seconds knows nothing that the drafter's time could be compared with.
    slope = predict([replayed(0.001)], Slope(0.1), None, "d")
    assert slope.speedup == pytest.approx(6 / (1 + 1.4))
    for plain in (0.001, 1.0):
        found = predict([replayed(2.4 * plain)], Slope(0.1, plain), None, "d")
        assert found.drafter_share == pytest.approx(0.5)
        assert found.speedup == pytest.approx(6 / 4.8)


def test_plain_decoding_pays_for_every_token_at_its_context() -> None:
    stats = replay(range(250), range(20), parse("none"), 1000)
    assert plain_seconds(stats, COST) == pytest.approx(
        sum(n * COST.seconds(1, at) for (at, _), n in stats.passes.items())
    )
    assert plain_seconds(stats, COST) == pytest.approx(7 * COST.seconds(1, 192) + 13 * 0.021)


def test_plain_decoding_is_predicted_to_be_as_fast_as_itself() -> None:
    records = [
        Record(f"{s}/{i}", s, prompt_ids=tuple(range(90 + i)), output_ids=tuple(range(30)))
        for s in ("a", "b")
        for i in range(3)
    ]
    done = sweep(records, [parse("none"), parse("copyspec")], Replayer(Encoding())).done
    rows = estimate(done, Slope(0.0))
    assert [(r.suite, r.drafter.split("(")[0]) for r in rows] == [
        ("a", "none"), ("a", "copyspec"), ("b", "none"), ("b", "copyspec"), (None, "none"),
        (None, "copyspec"),
    ]  # fmt: skip
    for row in rows:
        assert row.speedup == pytest.approx(row.tokens_per_pass)
    assert rows[0].speedup == 1


def test_the_automatic_budget_follows_the_cost() -> None:
    ids = [*range(60), *range(4)]
    cheap, costly = automatic(Slope(0.01)), automatic(Slope(5.0))
    run = [
        replay(ids, range(4, 60), parse("copyspec"), 100, rule).stats.tokens_per_pass
        for rule in (cheap, costly)
    ]
    assert run[0] > 3 > 2 > run[1]
    assert automatic(COST).curve[0] == (0, COST.seconds(1, 300))


def test_costs_of_a_tiny_model() -> None:
    loaded = load(tiny.model(), tokenizer=tiny.tokenizer())
    heard: list[int] = []
    grid = Grid(positions=(1, 4, 16), contexts=(32, 9999), repeats=2)
    found = measure_cost(loaded, grid, heard.append)
    assert found.contexts == [32, 512 - 16 - 9 - 1]  # the longest that fits, for one too long
    assert len(found.points) == 3 * 2
    assert heard == [1] * 2
    assert all(p.low <= p.ms <= p.high for p in found.points)
    assert found.prefill_ms.keys() == set(found.contexts)
    assert found.dtype == "float32"
    assert found.title.endswith("linear layers: as loaded")
    assert found.versions.keys() >= {"draftsmith", "torch", "transformers"}
    with pytest.raises(UnsupportedError, match="too short"):
        measure_cost(loaded, Grid(positions=(1, 600)))


def test_the_commands(tmp_path: Path) -> None:
    model, cost, log = tmp_path / "model", tmp_path / "cost.json", tmp_path / "log.jsonl"
    tiny.save(model)
    grid = ("--contexts", "64", "--positions", "8,64", "--repeats", "2")
    assert json.loads(call("cost", model, "-o", cost, *grid, "--json").stdout)["points"]
    measured = call("cost", model, "-o", cost, *grid)
    assert measured.exit_code == 0, measured.output
    assert "64 cached" in measured.stdout
    assert "linear layers are laid out" in " ".join(measured.stdout.split())
    assert [p.positions for p in CostTable.load(cost).points] == [1, 8, 64]
    text = "the quick brown fox jumps over the lazy dog"
    log.write_text(json.dumps({"prompt": text, "output": text}) + "\n")
    shown = call("estimate", log, "-t", model, "--cost", cost)
    assert shown.exit_code == 0, shown.output
    assert "speed-up" in shown.stdout
    for budget in ("auto", "drafter", "4"):
        answer = call("estimate", log, "-t", model, "--cost", "0.02", "--budget", budget, "--json")
        assert answer.exit_code == 0, answer.output
        rows = json.loads(answer.stdout)["rows"]
        assert [row["suite"] for row in rows] == ["log"] * 4
        assert rows[0]["drafter"].startswith("prompt_lookup")
    for args, reason in (
        (("cost", model, "--contexts", "x"), "--contexts must be numbers >= 1"),
        (("cost", "no/such/model", "-o", tmp_path), "cannot be written: it is a folder"),
        (("cost", "no/such/model", "-o", tmp_path / "no" / "c"), "No such file or directory"),
        (("estimate", log, "-t", model, "--cost", tmp_path / "no"), "No such file"),
        (("estimate", log, "-t", model, "--cost", "0.1", "--budget", "few"), "got 'few'"),
    ):
        wrong = call(*args)
        assert wrong.exit_code == 2
        assert reason in wrong.stderr


class Clock:
    """Stands still but for passes, which take what a machine of this speed would need."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before each pass of a model."""
        positions = (args[0] if args else kwargs["input_ids"]).shape[1]
        cached = int(kwargs["position_ids"][0, 0])
        self.now += 0.010 + 0.0004 * positions + 2e-6 * cached


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in ("core.loop", "model.measure"):
        monkeypatch.setattr(f"draftsmith.{module}.perf_counter", made)
    return made


@pytest.mark.slow
@pytest.mark.skipif("edit-7m" not in builtin.names(), reason="the built-in model is not installed")
def test_the_estimate_is_close_to_a_live_run(clock: Clock) -> None:
    """Within 3 % of the measured speed-up on two edits, cost and run taken on the same machine."""
    engine = Engine.from_pretrained(str(builtin.path()), prefixes=0)
    engine.model.model.register_forward_pre_hook(clock.advance, with_kwargs=True)
    before, message = builtin.demo()
    call = engine.prepare({})
    seconds = {"none": 0.0, "copyspec": 0.0}
    records = []
    for turn, length in enumerate((1200, 2400)):
        ids = call.encode(builtin.edit_messages(f"a{turn}.py", message, before[:length]))
        for drafter in seconds:
            live = engine.generate(
                ids, drafter=drafter, budget="drafter", max_new_tokens=128, temperature=0
            )
            seconds[drafter] += live.stats.seconds.total
        answer = tuple(live.tokens)
        records.append(Record(f"{turn}", "live", prompt_ids=tuple(ids), output_ids=answer))
    cost = measure_cost(engine.model, Grid((1, 4, 8, 16), (256, 1024), 2))
    done = sweep(records, [parse("copyspec")], Replayer(Encoding(), ReplayBudget())).done
    measured = seconds["none"] / seconds["copyspec"]
    assert measured > 1.5
    assert estimate(done, cost)[0].speedup == pytest.approx(measured, rel=0.03)


def test_noise_makes_no_pass_after_a_long_context_cheap() -> None:
    points = [(128.0, 10.2), (512.0, 10.1), (2048.0, 9.4)]
    assert [_interpolate(points, x) for x in (64, 128, 2048, 30_000)] == [10.2, 10.2, 9.4, 9.4]
    assert _interpolate([(1.0, 1.0), (2.0, 3.0)], 4) == 7
