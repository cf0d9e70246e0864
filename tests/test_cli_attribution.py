"""What `run --attribute`, `--attribute-html` and `--json` show of copies."""

from __future__ import annotations

import json
import re
from functools import partial, partialmethod
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from command import call as run_command
from draftsmith.cli import run as cli_run
from draftsmith.cli.attribution_page import Answer, page
from draftsmith.cli.loading import load_engine
from draftsmith.cli.options import ModelOptions
from draftsmith.engine.attribution import Copy, Span
from draftsmith.engine.engine import Engine

PROMPT = "hello world, <b>the quick & brown fox</b> jumps over the lazy dog"


def parrot(ids: torch.Tensor, scores: torch.Tensor, prompt: str = PROMPT) -> torch.Tensor:
    """A distribution that repeats the prompt, with a stranger now and then."""
    length = ids.shape[1]
    seen = ids[0].tolist()
    said = length - len(tiny.tokenizer()(prompt)["input_ids"])
    token = 40 if said % 9 == 8 else seen[said]
    scores[:, token] = 1000.0
    return scores


@pytest.fixture(scope="module")
def engine(model: str) -> Engine:
    return load_engine(ModelOptions(model=model, budget="8"), {})


@pytest.fixture
def ask(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`draftsmith run` with a model whose answers are copies."""
    monkeypatch.setattr(cli_run, "load_engine", lambda *_: engine)
    monkeypatch.setattr(Engine, "stream", partialmethod(Engine.stream, processors=parrot))
    return partial(run_command, "run", PROMPT, "--raw", "--max-new-tokens", "24")


def test_plain_markers(ask: Any) -> None:
    plain, marked = ask(), ask("--attribute")
    assert marked.exit_code == 0, marked.output
    found = re.findall(r"⟦(.*?)⟧\[(\d+):(\d+)\]", marked.stdout, re.DOTALL)
    assert found
    ids = tiny.tokenizer()(PROMPT)["input_ids"]
    whole = PROMPT + plain.stdout
    for text, start, end in found:
        before, past = (tiny.tokenizer().decode(ids[: int(at)]) for at in (start, end))
        assert whole.startswith(before + text)
        assert text == past[len(before) :] or int(end) > len(ids)
    assert re.sub(r"⟦|⟧\[\d+:\d+\]", "", marked.stdout) == plain.stdout
    copied = sum(int(end) - int(start) for _, start, end in found)
    assert f"copied: {copied} of 24 tokens in {len(found)} spans" in marked.stderr
    assert f"the answer goes on from {len(ids)}" in marked.stderr
    assert "cut after 24 tokens" in marked.stderr


@pytest.mark.usefixtures("ask")
def test_markers_change_no_white_space(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = "all:\r\n\tcc -o app\x0c\n\tstrip app\n"
    repeated = partialmethod(Engine.stream, processors=partial(parrot, prompt=prompt))
    monkeypatch.setattr(Engine, "stream", repeated)
    run = partial(run_command, "run", prompt, "--raw", "--max-new-tokens", "24")
    plain, marked = run().stdout, run("--attribute").stdout
    assert "\r\n\tcc" in plain
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORCE_COLOR", "1")
        assert run().stdout == plain, "a file gets what the model wrote"
    assert "⟦" in marked
    assert re.sub(r"⟦|⟧\[\d+:\d+\]", "", marked) == plain


def test_colours_in_a_terminal(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    def terminal() -> Console:
        return Console(force_terminal=True, color_system="standard", highlight=False, width=2000)

    monkeypatch.setattr(cli_run, "stdout", terminal)
    shown = ask("--attribute").stdout
    assert "⟦" not in shown
    assert "\x1b[4;32m" in shown  # underlined and green
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert re.sub(r"\[\d+:\d+\]", "", plain) == ask().stdout


def test_json_lists_copies(ask: Any) -> None:
    answer = json.loads(ask("--json").stdout)["answers"][0]
    ids = [*tiny.tokenizer()(PROMPT)["input_ids"], *answer["tokens"]]
    assert answer["copies"]
    for copy in answer["copies"]:
        assert ids[slice(*copy["output"])] == ids[slice(*copy["source"])]
        assert copy["text"] in answer["text"]


def test_bad_options_are_told_at_once(ask: Any, tmp_path: Path) -> None:
    for args, wanted in (
        (["--attribute", "--show-drafts"], "both colour the answer"),
        (["--attribute-html", str(tmp_path / "no" / "page.html")], "No such file or directory"),
        (["--attribute-html", "~nobody-of-this-name/page.html"], "No such file or directory"),
        (["--attribute-html", str(tmp_path)], "it is a folder; give the path of a file"),
    ):
        result = ask(*args)
        assert result.exit_code == 2
        assert wanted in result.stderr
        assert result.stdout == ""


# --- the page ----------------------------------------------------------------------------------


def panes(text: str) -> list[str]:
    """The texts of a page's panes."""
    inside = re.findall(r'<div class="text"[^>]*>(.*?)</div>', text, re.DOTALL)
    return [unescape(re.sub(r"</?span[^>]*>", "", pane)) for pane in inside]


def test_the_page_shows_answer_and_prompt_untouched(ask: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    result = ask("--attribute-html", str(path))
    assert result.exit_code == 0, result.output
    assert result.stdout == ask().stdout  # the answer still comes as it is made
    assert f"wrote {path}" in result.stderr
    text = path.read_text(encoding="utf-8")
    assert panes(text) == [result.stdout.removesuffix("\n"), PROMPT]
    assert "<b>" not in text
    assert "http" not in text


def test_the_page_ties_copies_to_their_sources() -> None:
    answer = Answer(
        ["<s>", "a", "<i>", "b", "&", "c"],
        ["x", "<i>", "b", "a", "\x1b", "b", "a"],
        [Copy(Span(7, 9), Span(2, 4)), Copy(Span(11, 13), Span(8, 10))],
    )
    text = page([answer], "org/<model>", "auto")
    spans = re.findall(r"<span ([^>]*)>", text)
    parts = [dict(re.findall(r'([\w-]+)="([^"]*)"', span)) for span in spans]
    assert "org/&lt;model&gt;" in text
    assert panes(text) == ["x<i>ba␛ba", "<s>a<i>b&c"]
    copies = [(a["data-copy"], a.get("title")) for a in parts if "data-copy" in a]
    assert copies == [
        ("0", "copied from the prompt, tokens 2–3"),
        ("0", "copied from the prompt, tokens 2–3"),
        ("1", "copied from the answer, tokens 8–9"),
    ]
    # One part is both: made by the first copy, copied by the second.
    assert [(a.get("data-copy"), a["data-source"]) for a in parts if "data-source" in a] == [
        ("0", "1"),
        (None, "1"),
        (None, "0"),
    ]
    assert "4 of 7 tokens copied, in 2 spans" in text


def test_several_answers_share_a_page(ask: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    ask("--attribute-html", str(path), "-n", "2", "--json")
    text = path.read_text(encoding="utf-8")
    assert "Answer 2 of 2" in text
    assert len(panes(text)) == 4
