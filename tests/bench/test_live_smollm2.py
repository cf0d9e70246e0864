"""The script that measures a real model, on a tiny one: what it runs, shows and publishes."""

from __future__ import annotations

import gzip
import json
import lzma
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import live_smollm2

import tiny
from draftsmith.bench import generations

TURNS = ["the quick brown fox jumps over the quick brown", "once more"]


def jsonl(*items: Any) -> bytes:
    return "".join(json.dumps(item) + "\n" for item in items).encode()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder like the public one, with a question or two in every file."""
    asked = [
        {"question_id": n, "category": category, "turns": TURNS[:count]}
        for n, (category, count) in enumerate([("coding", 2), ("rag", 1)])
    ]
    folder = tmp_path / "data"
    for name in ("prompts", "recorded"):
        (folder / name).mkdir(parents=True)
    (folder / "prompts" / "spec_bench.jsonl").write_bytes(jsonl(*asked))
    (folder / "prompts" / "mt_redundant.jsonl").write_bytes(jsonl(asked[0]))
    task = {"task_id": "HumanEval/0", "prompt": "def foo(x):", "entry_point": "foo"}
    (folder / "prompts" / "humaneval.jsonl.gz").write_bytes(gzip.compress(jsonl(task)))
    edit = {"suite": "commit_edits", "messages": [{"role": "user", "content": TURNS[0]}]}
    (folder / "recorded" / "commit_edits.jsonl.xz").write_bytes(lzma.compress(jsonl(edit)))
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
def test_one_command_measures_and_tells_everything(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    model, out = tmp_path / "model", tmp_path / "out"
    tiny.model().save_pretrained(model)
    tiny.tokenizer().save_pretrained(model)
    words = ["x", str(data), "-o", str(out), "-m", str(model), "--max-new-tokens", "6",
             "--threads", "1", "--dtype", "float32", "--dtype", "bfloat16"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", words)
    live_smollm2.main()
    said = capsys.readouterr().out
    assert re.search(r"7 prompts, five arms, .*: float32 [\d.]+, bfloat16 [\d.]+\n", said)
    rows = generations.read(out / "answers" / "float32.jsonl").entries
    [lookup] = {row.arm for row in rows if row.arm.startswith(live_smollm2.LOOKUP)}
    wanted = {"none", "hf:generate", lookup, "auto(tuned=False)", "auto"}
    assert {row.arm for row in rows} == wanted
    assert len(rows) == 7 * 5
    tables = (out / "tables.md").read_text(encoding="utf-8")
    assert tables in said
    for part in ("all", "mt_bench", "rag", "mt_redundant, turn 2"):
        assert tables.count(f"\n| {part} | ") == 2  # in either dtype
    assert {"copyspec", "prompt_lookup", "longest_match", "auto"} == {*live_smollm2.id_drafters()}
    assert tables.count("| `copyspec` |") == (tables.count("tokens=") - 2) / 6 == 1
    # What is published has neither prompts nor answers in it.
    first, *lines = (out / "float32.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(first)["settings"]["dtype"] == "float32"
    assert len(lines) == len(rows)
    for line in map(json.loads, lines):
        assert line["tokens"] == 6
        assert not {"text", "prompt_ids", "output_ids", "reference"} & line.keys()
    assert (out / "bfloat16.svg").read_text().startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    # The same command again has nothing left to do.
    before = (out / "answers" / "float32.jsonl").read_bytes()
    live_smollm2.main()
    assert (out / "answers" / "float32.jsonl").read_bytes() == before
