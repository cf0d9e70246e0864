"""The notebook runs from top to bottom, and results show themselves in it."""

from __future__ import annotations

import ast
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import tiny
from draftsmith.engine.engine import Engine

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tour.ipynb"


def run(cell: str, names: dict[str, Any]) -> Any:
    """Run one cell; return the value of its last expression, as a notebook does."""
    body = ast.parse(cell).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if last else None


@pytest.mark.slow
def test_every_cell_runs(smollm2: str) -> None:  # noqa: ARG001
    shown, names = list[Any](), dict[str, Any]()
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            shown.append(run("".join(cell["source"]), names))
    pages = [one._repr_html_() for one in shown if one is not None]
    assert len(pages) == 2
    assert "prediction" in pages[0]
    assert "guessed by" not in pages[1]


@pytest.mark.parametrize("tokenizer", [True, False])
def test_a_result_shows_its_text_and_who_guessed_it(tokenizer: bool) -> None:
    given = tiny.tokenizer() if tokenizer else None
    engine = Engine.from_pretrained(tiny.model(), tokenizer=given, drafter="copyspec(gamma=1)")
    ids = tiny.tokenizer().encode("the quick brown fox <b>the quick brown fox")
    result = engine.generate(ids, max_new_tokens=12)
    page = result._repr_html_()
    shown = unescape(re.sub(r"<[^>]+>", "", page))
    assert shown.startswith(result.text)
    assert f"12 tokens in {result.stats.passes} passes" in shown
    guessed = [source for source in result.sources if source != "target"]
    assert page.count("<span ") == (len(guessed) if tokenizer else 0) + len({*guessed})


def test_a_result_shows_no_text_after_a_stop_string() -> None:
    tokenizer = tiny.tokenizer()
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tokenizer)
    whole = engine.generate("the quick", max_new_tokens=12)
    stop = whole.text[4:6]
    result = engine.generate("the quick", max_new_tokens=12, stop=stop)
    assert result.text == whole.text[: whole.text.index(stop)]
    assert "".join(result.token_texts()) == result.text
    shown = unescape(re.sub(r"<[^>]+>", "", result._repr_html_()))
    assert shown.startswith(result.text)
    assert stop not in shown.split(f"{len(result.tokens)} tokens in")[0][len(result.text) :]


def test_progress_shows_a_bar_of_answers(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer())
    plain = engine.generate(["the", "a fox"], max_new_tokens=4)
    assert capsys.readouterr().err == ""
    found = engine.generate(["the", "a fox"], max_new_tokens=4, progress=True)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert "2/2" in capsys.readouterr().err
