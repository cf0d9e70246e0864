"""Live runs: arms, rows, interruption and resumption, agreement with replay."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

import architectures
import tiny
from command import call as run_command
from draftsmith.core.cost import RecordedCost
from draftsmith.core.sampling import SamplingParams
from draftsmith.errors import LoadError, OptionError, UnknownName, UnsupportedError, WriteError
from draftsmith.lab.bench import generations, suites
from draftsmith.lab.bench.answer import Answer, Ask
from draftsmith.lab.bench.arms import Arm, Ours, build, parse_arm
from draftsmith.lab.bench.cost import Slope
from draftsmith.lab.bench.estimate import automatic
from draftsmith.lab.bench.generations import Generation, ResultFile, differences
from draftsmith.lab.bench.records import Record, conversation
from draftsmith.lab.bench.replay import replay
from draftsmith.lab.bench.run import RunPlan, measure
from draftsmith.lab.bench.settings import settings
from draftsmith.model.agreement import first_difference, top_two_gap
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel

TIMES = {"seconds", "first_token_seconds", "peak_bytes", "phases", "began", "load"}
ARMS = ("none", "hf:generate", "hf:static", "hf:prompt_lookup(tokens=6)", "copyspec(gamma=2)@4")
PLAIN = ("none", "hf:generate", "hf:static")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(tiny.model(), tokenizer=tiny.tokenizer())


def records(count: int = 3) -> list[Record]:
    texts = ["the quick brown fox", "hello world, hello", "def foo(x): return x"]
    asked = [f"{texts[i % 3]} {i} {texts[i % 3]}" for i in range(count)]
    return [Record(f"t/{i}", "t", prompt=prompt) for i, prompt in enumerate(asked)]


def plan_of(model: LoadedModel, *arms: str, **options: Any) -> RunPlan:
    specs = [parse_arm(arm) for arm in arms or ARMS]
    given = {"records": records(), "max_new_tokens": 24, "sampling": SamplingParams(seed=0)}
    return RunPlan(model, **({"arms": build(model, specs)} | given | options))


def go(plan: RunPlan, path: Path | None = None) -> list[Generation]:
    file = ResultFile(path, settings(plan))
    measure(plan, file)
    return file.rows


def timeless(row: Generation) -> dict[str, Any]:
    return {k: v for k, v in row.as_dict().items() if k not in TIMES}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole") / "results.jsonl"


@pytest.fixture(scope="module")
def rows(model: LoadedModel, path: Path) -> list[Generation]:
    """Two answers to every prompt by every arm, also in the file."""
    return go(plan_of(model, records=records()[1:], runs=2), path)


def test_every_prompt_by_every_arm(rows: list[Generation]) -> None:
    assert len(rows) == 2 * len(ARMS) * 2
    assert len({row.key for row in rows}) == len(rows)
    for row in rows:
        assert len(row.output_ids) == 24
        assert row.finish_reason == "length"
        assert 0 < row.first_token_seconds < row.seconds
        assert row.text == tiny.tokenizer().decode(row.output_ids, skip_special_tokens=True)
        assert row.accepted == 24 - row.passes
        assert row.settings["threads"] == torch.get_num_threads()
        assert datetime.fromisoformat(row.began or "") <= datetime.now(UTC)
        assert row.load is None or row.load >= 0
        assert row.peak_bytes is None or row.peak_bytes > 1 << 20
    for row in rows:
        plain = next(r for r in rows if (r.run, r.id, r.arm) == (row.run, row.id, "none"))
        assert row.output_ids == plain.output_ids
        assert row.compared == (row.arm != "none")
        assert row.divergence is None
    assert all(r.passes == 24 for r in rows if r.arm in PLAIN)
    assert any(r.passes < 24 for r in rows if r.arm.startswith("hf:prompt"))
    for row in (row for row in rows if row.stats is not None):
        assert row.stats.passes == row.passes  # type: ignore[union-attr]
        times = dict(row.phases or {})
        total = times.pop("total")
        assert sum(times.values()) == pytest.approx(total, rel=1e-6)
        assert total <= row.seconds


def test_arms_take_turns(rows: list[Generation]) -> None:
    places = [(row.run, int(row.id.partition("/")[2])) for row in rows]
    assert places == sorted(places)
    assert [r.arm for r in rows[:5]] == list(ARMS)
    assert [r.arm for r in rows[5:10]] == [*ARMS[1:], ARMS[0]]


def test_a_row_can_be_read_again_and_replayed(rows: list[Generation], path: Path) -> None:
    assert [timeless(row) for row in generations.read(path).entries] == [
        timeless(row) for row in rows
    ]
    again = suites.read(path).records
    assert [list(r.output_ids or ()) for r in again] == [row.output_ids for row in rows]
    assert str(Path.home()) not in path.read_text()


@pytest.mark.slow
def test_with_a_recorded_cost_the_same_passes_are_made_again(model: LoadedModel) -> None:
    specs = [
        parse_arm(arm)
        for arm in ("copyspec", "auto(logits=False)", "prompt_lookup(tokens=4)+auto(logits=False)")
    ]
    counts, asked = [], records(4)
    for slope in (0.02, 0.02, 0.9):
        budget = automatic(Slope(slope))
        arms = build(model, specs, RecordedCost(dict(budget.curve)))
        rows = go(plan_of(model, records=asked, max_new_tokens=60, arms=arms))
        counts.append([(row.arm, row.passes, row.drafted, row.accepted) for row in rows])
        for row, arm in ((row, arm) for row in rows for arm in arms if row.arm == arm.name):
            assert isinstance(arm, Ours)
            given = row.prompt_ids, row.output_ids, arm.engine.drafter, model.vocab_size
            again = replay(*given, budget, row.max_new_tokens).stats
            assert (again.passes, again.drafted) == (row.passes, row.drafted), row.arm
    assert counts[0] == counts[1] != counts[2]


def test_other_settings_are_refused(model: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    go(plan_of(model, "none"), path)
    with pytest.raises(OptionError, match=r"max_new_tokens: 24 there, 25 now"):
        go(plan_of(model, "none", max_new_tokens=25), path)
    with pytest.raises(OptionError, match=r"arms: none there, none, copyspec now"):
        go(plan_of(model, "none", "copyspec"), path)
    with pytest.raises(OptionError, match="prompts: 3"):
        go(plan_of(model, "none", records=records(2)), path)
    assert differences({"commit": "a", "x": 1}, {"commit": "b", "x": 1}) == []


def test_other_filters_are_refused(model: LoadedModel, tmp_path: Path) -> None:
    plan, path = plan_of(model, "none"), tmp_path / "r.jsonl"
    go(replace(plan, sampling=SamplingParams(temperature=1.0)), path)
    other = SamplingParams(temperature=1.0, top_k=1, repetition_penalty=1.5)
    with pytest.raises(OptionError, match="top_k: None there, 1 now; repetition_penalty: None"):
        go(replace(plan, sampling=other), path)


def test_records_that_could_not_be_told_apart_are_refused(model: LoadedModel) -> None:
    """One would be compared with the other's answer, and left out where a run goes on."""
    asked = [Record("1", suite, prompt=f"the quick {suite}") for suite in ("a", "b")]
    with pytest.raises(OptionError, match="two records have the id '1'"):
        plan_of(model, "none", records=asked)


def test_turns_are_asked_with_the_plain_answers(model: LoadedModel) -> None:
    asked = conversation(["the quick", "again"], id="c", suite="c")
    rows = go(plan_of(model, records=asked, runs=2, max_new_tokens=8))
    firsts = {row.text for row in rows if row.turn == 1}
    assert len(firsts) == 1
    expected = [
        {"role": "user", "content": "the quick"},
        {"role": "assistant", "content": firsts.pop()},
        {"role": "user", "content": "again"},
    ]
    text = tiny.tokenizer().apply_chat_template(
        expected, tokenize=False, add_generation_prompt=True
    )
    prompt = tiny.tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert [r.prompt_ids for r in rows if r.turn == 2] == [prompt] * 2 * len(ARMS)


def test_the_context_and_the_record_limit_the_answer(model: LoadedModel) -> None:
    long = Record("long", "t", prompt_ids=tuple(range(3, 203)) + tuple(range(3, 303)))
    over = Record("over", "t", prompt_ids=(5,) * 600)
    none = replace(records(1)[0], id="none", max_new_tokens=0)
    plan = plan_of(model, "none", "hf:generate", "copyspec", records=[long, over])
    file = ResultFile(None, settings(plan))
    wrong = measure(plan, file)
    assert {row.max_new_tokens for row in file.rows} == {12}
    assert {len(row.output_ids) for row in file.rows} == {12}
    assert wrong == ["over: the prompt has 600 tokens, but this model's context is 512 tokens "
                     "including the answer; shorten the prompt"]  # fmt: skip
    with pytest.raises(LoadError, match="no prompt could be used; the first: over"):
        go(plan_of(model, "none", records=[over]))
    with pytest.raises(LoadError, match="no token to generate"):
        go(plan_of(model, "none", records=[none], max_new_tokens=None))
    for given, own, length in ((None, 5, 5), (7, 5, 7)):
        asked = [replace(record, max_new_tokens=own) for record in records(1)]
        (row,) = go(plan_of(model, "none", records=asked, max_new_tokens=given))
        assert len(row.output_ids) == length


@pytest.mark.slow
def test_seeds_mean_the_same_for_guessing_arms(model: LoadedModel) -> None:
    arms = "none", "hf:generate", "copyspec(gamma=2)@4"
    how = {"records": records(2), "sampling": SamplingParams(temperature=0.8, seed=3), "runs": 2}
    rows = go(plan_of(model, *arms, **how, max_new_tokens=16))
    assert all(r.divergence is None and r.compared for r in rows if r.arm.startswith("copyspec"))
    assert not any(r.compared for r in rows if r.arm.startswith("hf:"))
    first, second = ([r.output_ids for r in rows if r.run == run] for run in (0, 1))
    assert first != second
    before = torch.get_rng_state()
    again = go(plan_of(model, *arms, **how, max_new_tokens=16))
    assert [r.output_ids for r in again] == [r.output_ids for r in rows]
    assert torch.equal(before, torch.get_rng_state())


class Wrong:
    """An arm whose answers leave plain decoding's at token 3."""

    name, drafter, budget, seeded = "wrong", "wrong", None, True

    def __init__(self, arm: Arm) -> None:
        self.arm = arm

    def answer(self, ask: Ask) -> Answer:
        good = self.arm.answer(ask)
        return replace(good, tokens=[*good.tokens[:3], good.tokens[3] ^ 1, *good.tokens[4:]])


def test_where_an_answer_leaves_plain_decoding(model: LoadedModel) -> None:
    plan = plan_of(model, "none")
    rows = go(replace(plan, arms=[*plan.arms, Wrong(plan.arms[0])]))
    plain, wrong = rows[:2]
    assert (wrong.compared, wrong.divergence) == (True, 3)
    ids = torch.tensor([plain.prompt_ids + plain.output_ids[:3]])
    best = tiny.model()(ids).logits[0, -1].detach().topk(2).values
    assert wrong.gap == pytest.approx(float(best[0] - best[1]), abs=1e-5)
    assert top_two_gap(model, ids[0].tolist()) == pytest.approx(wrong.gap)
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 2, 3]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_assisted_generation(model: LoadedModel, tmp_path: Path, same: bool) -> None:
    """With an assistant of the same tokenizer, or of another one."""
    folder, vocabulary = tmp_path / "assistant", tiny.tokenizer(*() if same else (280,))
    config = type(tiny.model().config)(**tiny.model().config.to_dict())
    config.vocab_size = len(vocabulary) if not same else config.vocab_size
    torch.manual_seed(0)
    type(tiny.model())(config).save_pretrained(folder)
    vocabulary.save_pretrained(folder)
    plan = plan_of(model, "none", f"hf:assisted(model={folder},tokens=4)", records=records(1))
    options = vars(plan.arms[1])["options"]
    assert ({"tokenizer", "assistant_tokenizer"} <= options.keys()) is not same
    rows = go(plan)
    assert {r.arm for r in rows} == {"none", "hf:assisted(model=assistant,tokens=4)"}
    assert all(r.divergence is None for r in rows)
    assert str(tmp_path) not in json.dumps([r.as_dict() for r in rows])
    options["no_such_option"] = 1
    with pytest.raises(UnsupportedError, match=r"hf:assisted.* cannot answer .*no_such_option"):
        go(plan)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("copyspek", UnknownName, r"unknown arm 'copyspek'. Did you mean 'copyspec'"),
        ("hf:prompt_lokup", UnknownName, r"Did you mean 'hf:prompt_lookup'"),
        ("generate", UnknownName, r"Did you mean 'hf:generate'"),
        ("hf:prompt_lookup(token=3)", UnknownName, r"unknown option of hf:prompt_lookup 'token'"),
        ("hf:prompt_lookup(tokens=0)", OptionError, "tokens must be a number of at least 1"),
        ("hf:prompt_lookup(tokens", OptionError, "cannot be read"),
        ("hf:prompt_lookup(10)", OptionError, "name the options"),
        ("hf:prompt_lookup(tokens=5,tokens=9)", OptionError, "tokens is given twice"),
        ("hf:assisted", OptionError, "give the assistant"),
        ("copyspec(gama=3)", UnknownName, "unknown option of copyspec 'gama'"),
        ("copyspec+longest_match(mni=2)", UnknownName, "unknown option of longest_match 'mni'"),
        ("copyspec+atuo", UnknownName, "unknown arm 'atuo'. Did you mean 'auto'"),
        ("copyspec@x", OptionError, "budget must be .*, got 'x'"),
    ],
)
def test_unknown_arms(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_arm(text)


def test_arms_by_name(model: LoadedModel) -> None:
    spec = parse_arm(" copyspec( gamma = 3 ) @ 8 ")
    assert (spec.name, spec.budget) == ("copyspec(gamma=3)@8", 8)
    spec = parse_arm("draft_model(model='a small@model')@8")
    assert (str(spec.drafter).split(",")[0], spec.budget) == (
        "draft_model(model='a small@model'", 8,
    )  # fmt: skip
    assert parse_arm("draft_model(model=me@host)").budget == "auto"
    assert parse_arm("auto").budget == "auto"
    assert parse_arm("auto", "drafter").budget == "drafter"
    assert parse_arm("hf:assisted(model=/some/where/small)").name == "hf:assisted(model=small)"
    with pytest.raises(OptionError, match="the arm none was given twice"):
        plan_of(model, "none", "none")


def test_the_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny.save(folder)
    prompts, out = tmp_path / "p.jsonl", tmp_path / "r.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": r.prompt}) + "\n" for r in records()))
    base = ["bench", "run", str(prompts), "-m", str(folder), "--max-new-tokens", "12"]
    arms = ["-a", "none", "-a", "copyspec@drafter"]
    done = run_command(*base, *arms, "-o", str(out), "--json")
    assert done.exit_code == 0, done.output
    (section,) = json.loads(done.stdout)["sections"]
    assert [row["arm"] for row in section["rows"]] == ["none", "copyspec@drafter"]
    assert section["rows"][1]["identical"] == 3
    assert len(generations.read(out).entries) == 6
    again = run_command(*base, *arms, "-o", str(out))
    assert (again.exit_code, "exists; resume it with --resume" in again.stderr) == (2, True)
    plain, other = tmp_path / "plain.jsonl", tmp_path / "dictated.jsonl"
    assert run_command(*base, "-a", "none", "-o", str(plain)).exit_code == 0
    words = ["-a", "none", "-a", "hf:prompt_lookup", "--dictate", "--dtype", "bfloat16"]
    dictated = run_command("bench", "run", str(plain), *base[3:5], *words, "-o", str(other))
    assert (dictated.exit_code, "dictated answers" in dictated.output) == (0, True)
    said, given = ([row.output_ids for row in generations.read(p).entries] for p in (plain, other))
    assert given == [answer for answer in said for _ in range(2)]
    cost = run_command(*base, *arms, "-o", str(out), "--resume", "--cost", "0.5")
    assert (cost.exit_code, "cost: None there, 1.0, 1.5, 2.0" in cost.stderr) == (2, True)
    with prompts.open("ab") as file:
        file.write(b'{"prompt": "\xe9"}\n')
    wrong = run_command(*base, *arms, "-o", str(tmp_path / "w"))
    assert (wrong.exit_code, "out with --on-error skip" in wrong.stderr) == (2, True)
    left = run_command(*base, *arms, "-o", str(out), "--resume", "--runs", "2",
                                    "--on-error", "skip")  # fmt: skip
    assert (left.exit_code, "line 4: not UTF-8" in left.stderr) == (0, True)
    assert len(generations.read(out).entries) == 12
    bad = run_command(*base, "-a", "copyspek", "-o", str(tmp_path / "x"))
    assert (bad.exit_code, "Did you mean 'copyspec'" in bad.stderr) == (2, True)


def test_a_run_that_a_full_disk_stopped_goes_on(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plan = tmp_path / "r.jsonl", plan_of(model, "none", "copyspec@4")
    whole = go(plan, tmp_path / "whole.jsonl")
    real, count = os.fsync, iter(range(100))

    def full_after_three(number: int) -> None:
        if next(count) >= 3:
            raise OSError(28, "No space left on device")
        real(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_after_three)
        with pytest.raises(
            WriteError, match=r"r\.jsonl cannot be written: No space left on device"
        ):
            go(plan, path)
    assert {p.name for p in tmp_path.iterdir()} == {"r.jsonl", "whole.jsonl"}
    kept = generations.read(path).entries
    assert len(kept) == 3
    path.write_text(path.read_text() + json.dumps(kept[0].as_dict())[:50])  # torn
    for _ in range(2):  # the second time nothing is left to do
        assert [timeless(row) for row in go(plan, path)] == [timeless(row) for row in whole]
    assert len(generations.read(path).entries) == len(whole)


def test_runs_on_layers_laid_out_otherwise_are_not_put_together(tmp_path: Path) -> None:
    tiny.save(tmp_path)
    plain, packed = (
        settings(RunPlan(load(tmp_path, prepack=laid_out), [], [], SamplingParams()))
        for laid_out in (False, True)
    )
    (said,) = differences(plain, packed)
    assert said.startswith("linear layers: as loaded there, ")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_arm_gives_the_dictated_answer(model: LoadedModel, temperature: float) -> None:
    """The ids of a recorded generation, or its text and an ending; nothing a model would say."""
    answers = [(5, 6, 7, 5, 6, 7, 5, 6, 7), "hello world, hello world", (9,)]
    asked = [
        replace(one, **{"output" if isinstance(answer, str) else "output_ids": answer})
        for one, answer in zip(records(), answers, strict=True)
    ]
    sampling = SamplingParams(seed=0, temperature=temperature)
    plan = plan_of(model, records=asked, sampling=sampling, dictate=True)
    rows = go(plan)
    tokenizer = model.tokenizer
    wanted = [[*answers[0]], [*tokenizer(answers[1])["input_ids"], tokenizer.eos_token_id], [9]]
    for row in rows:
        assert row.output_ids == wanted[int(row.id[-1])]
        assert "dictated" in row.settings
    drafted = {row.arm: row for row in rows if row.id == "t/0"}
    assert drafted["copyspec(gamma=2)@4"].passes < drafted["none"].passes == 9


def test_transformers_prompt_lookup_is_not_told_what_will_be_dictated(model: LoadedModel) -> None:
    """It asks logits processors for the candidates that they would forbid."""
    prompt = (5, 6, 7, 8, 9, 10, 20, 5)
    asked = Record("t/0", "t", prompt_ids=prompt, output_ids=(6, 30, 31))
    widths: list[int] = []
    watch = model.model.register_forward_pre_hook(
        lambda _model, _args, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    arms = build(model, [parse_arm("hf:prompt_lookup(tokens=6)")])
    try:
        (row,) = go(plan_of(model, arms=arms, records=[asked], dictate=True, warmup=0))
    finally:
        watch.remove()
    assert row.output_ids == [6, 30, 31]
    assert widths[0] > len(prompt)  # 6 was drafted behind 5, and what followed it
    assert row.passes == 2


def test_a_dictated_answer_must_be_there_and_be_the_models(model: LoadedModel) -> None:
    bare, *others = records()
    asked = [bare, *(replace(one, output_ids=(1, 10**6)) for one in others)]
    file = ResultFile(None, {})
    with pytest.raises(LoadError, match="has no answer that could be dictated"):
        measure(plan_of(model, records=asked, dictate=True), file)
    asked[1] = replace(asked[1], output_ids=(1, 2))
    wrong = measure(plan_of(model, records=asked, dictate=True, warmup=0), file)
    assert wrong[0].startswith("t/0: the record has no answer")
    assert wrong[1].startswith("t/2: token id 1000000 of the answer is not in")
    assert {row.id for row in file.rows} == {"t/1"}
    asked = [replace(bare, output_ids=(5, model.tokenizer.eos_token_id, 6))]
    with pytest.raises(LoadError, match="end token before its end"):
        go(plan_of(model, "none", records=asked, dictate=True))


def test_models_that_are_not_told_positions_are_not_dictated_to() -> None:
    model = load(architectures.build("mamba"))
    asked = replace(records()[0], prompt_ids=(7, 8, 9), output_ids=(5, 6))
    plan = plan_of(model, "none", records=[asked], dictate=True)
    assert [row.output_ids for row in go(plan)] == [[5, 6]]
    with pytest.raises(UnsupportedError, match="passes no position_ids to this model"):
        go(plan_of(model, "hf:generate", records=[asked], dictate=True))


def test_a_prompt_that_cannot_be_used_does_not_replace_the_warm_up(model: LoadedModel) -> None:
    class Counted(Ours):
        calls = 0

        def answer(self, ask: Ask) -> Answer:
            type(self).calls += 1
            return super().answer(ask)

    arm = Counted(model, parse_arm("none"))
    over = Record("over", "t", prompt_ids=(5,) * 600)
    go(plan_of(model, arms=[arm], records=[over, *records(2)]))
    assert Counted.calls == 2 + 1


def test_draws_are_compared_with_those_of_plain_decoding_only(model: LoadedModel) -> None:
    given = {"sampling": SamplingParams(seed=0, temperature=1.0)}
    rows = go(plan_of(model, "hf:prompt_lookup", "copyspec", **given))
    assert not any(row.compared for row in rows)
    rows = go(plan_of(model, "none", "hf:prompt_lookup", "copyspec", **given))
    assert {row.arm for row in rows if row.compared} == {"copyspec"}


def test_seeds_of_all_runs_are_checked_before_the_first(model: LoadedModel) -> None:
    with pytest.raises(OptionError, match="seed must be"):
        plan_of(model, "none", sampling=SamplingParams(seed=2**64 - 1), runs=2)
