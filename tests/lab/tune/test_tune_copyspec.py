"""Choosing γ: the fastest in a replay; and the similarity is appendix A's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tiny
from architectures import build, prompt
from command import call as run_command
from draftsmith.engine.engine import Engine
from draftsmith.errors import LoadError, UnsupportedError
from draftsmith.lab.bench.cost import Slope
from draftsmith.lab.bench.records import Record, conversation
from draftsmith.lab.lines import Finished
from draftsmith.lab.tune import copyspec as tuning
from draftsmith.lab.tune.copyspec import GAMMAS, answers, best, measured, similarity

LIMIT = 60


def asked(engine: Engine, records: list[Record]) -> list[tuning.Text]:
    return answers(engine, records, LIMIT, Finished(), lambda _: None)[0]


def test_the_best_gamma_has_the_highest_predicted_speed() -> None:
    # Its answers end in loops.
    engine = Engine.from_pretrained(build("gpt2"), tokenizer=tiny.tokenizer(), drafter="none")
    prompts = [prompt(12, seed=n) * 2 for n in (1, 2)]
    texts = asked(engine, [Record(str(i), "s", prompt_ids=tuple(p)) for i, p in enumerate(prompts)])
    plain = engine.generate(prompts, max_new_tokens=LIMIT)
    assert [answer for _, answer in texts] == [one.tokens for one in plain]
    found = [measured(engine, texts, LIMIT, Slope(0.5), gamma) for gamma in (1, 3, 10)]
    assert all(one.stats.accepted for one in found)
    fastest = max(one.estimate.speedup for one in found)
    assert best(found).estimate.speedup == pytest.approx(fastest, abs=1e-3)


def test_later_turns_are_asked_with_the_models_own_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer(), drafter="none")
    turns = conversation(["the quick", "again"], id="c", suite="s")
    over = Record("over", "s", prompt_ids=(5,) * 600)
    heard: list[int] = []
    path = tmp_path / "begun.jsonl"
    texts, wrong = answers(engine, [*turns, over], 8, Finished(path), heard.append)
    first, second = texts
    text = tiny.tokenizer().decode(first[1], skip_special_tokens=True)
    chat = [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": text},
            {"role": "user", "content": "again"}]  # fmt: skip
    assert second[0] == engine.prepare({}).encode(chat)
    assert heard == [1, 1, 1]
    assert wrong[0].startswith("over: the prompt has 600 tokens")
    monkeypatch.setattr(Engine, "generate", pytest.fail)  # they are known already
    assert answers(engine, turns, 8, Finished(path), heard.append)[0] == texts
    with pytest.raises(LoadError, match="no prompt could be used; the first: over"):
        asked(engine, [over])
    with pytest.raises(UnsupportedError, match="one token per pass"):
        asked(Engine.from_pretrained(build("mamba"), drafter="none"), turns)


def test_other_weights_of_the_same_name_answer_anew(tmp_path: Path) -> None:
    model, path = tiny.model(), tmp_path / "begun.jsonl"
    record = Record("a", "s", prompt_ids=(3, 4, 5))
    found = []
    for _ in range(2):
        engine = Engine.from_pretrained(model, tokenizer=tiny.tokenizer(), drafter="none")
        found.append(answers(engine, [record], 8, Finished(path), lambda _: None)[0])
        with torch.no_grad():
            model.get_input_embeddings().weight.copy_(torch.randn(model.config.vocab_size, 64))
    assert found[0] != found[1]


def test_the_similarity_is_that_of_the_average_and_the_next_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    E = torch.randn((40, 8), generator=torch.Generator().manual_seed(1))  # noqa: N806
    texts = [([3, 1, 4, 1, 5], [9, 2, 6]), ([5, 3, 5], [8, 9]), ([1], [2])]
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "EPOCHS", 0)
        for gamma in (1, 3):
            cosines = []
            for before, answer in texts:
                ids = [*before, *answer]
                for t in range(max(gamma, len(before)), len(ids)):
                    average = E[ids[t - gamma : t]].mean(0)
                    cosines.append(torch.cosine_similarity(average, E[ids[t]], dim=0))
            mean = float(torch.stack(cosines).mean())
            assert similarity(E, texts, gamma) == pytest.approx(mean, abs=1e-6)
    # What always follows comes nearer, and the model's own embeddings stay as they are.
    before, loop = E.clone(), [([7, 8, 9] * 40, [7, 8, 9] * 40)]
    monkeypatch.setattr(tuning, "EPOCHS", 20)
    tuned = similarity(E, loop, 1)
    monkeypatch.setattr(tuning, "EPOCHS", 0)
    assert tuned > similarity(E, loop, 1)
    assert torch.equal(E, before)
    assert similarity(E, [([1], [2])], 3) != similarity(
        E, [([1], [2])], 3
    )  # no place: not a number


def test_the_command(tmp_path: Path, kept: Path) -> None:
    folder, file = tmp_path / "tiny", tmp_path / "prompts.jsonl"
    tiny.save(folder)
    asks = ["the quick brown fox jumps over the quick brown", "hello " * 600]
    file.write_text("".join(json.dumps({"prompt": ask}) + "\n" for ask in asks), encoding="utf-8")
    command = ["tune", "copyspec", str(folder), str(file), "--max-new-tokens", "16"]
    ran = run_command(*command, "--cost", "0.02")
    assert ran.exit_code == 0, ran.output
    assert "← fastest" in ran.stdout
    assert "left out: prompts/1" in ran.stderr
    assert list((kept / "pld_plus").iterdir()) == []
    ran = run_command(*command, "--json")
    rows = json.loads(ran.stdout)["rows"]
    assert [row["gamma"] for row in rows] == [*GAMMAS]
    assert rows[0]["attempts"] >= rows[-1]["attempts"]
