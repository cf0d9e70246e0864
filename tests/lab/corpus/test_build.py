"""Building a corpus: what is read, what is kept, and that killed builds end with the same bytes."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_perplexity import direct

import tiny
from at_once import twice_at_once
from draftsmith.drafters.corpus import files
from draftsmith.drafters.corpus.datastore import Datastore
from draftsmith.drafters.corpus.files import ID, SEPARATOR, Header
from draftsmith.errors import LoadError, OptionError, WriteError
from draftsmith.lab.corpus import build as building
from draftsmith.lab.corpus.build import build
from draftsmith.lab.corpus.perplexity import passes
from draftsmith.lab.corpus.pieces import Pieces, read_pieces
from draftsmith.lab.corpus.plan import LEAST_PIECE, CorpusPlan
from draftsmith.lab.corpus.texts import documents, find
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.storage import NEW

WORDS = ("the", "quick", "brown", "fox", "jumps", "lazy", "def", "foo", "return", "hello", "test")


def some_texts(folder: Path, count: int = 30) -> list[Path]:
    """Documents of 1 to 60 words in JSON lines, one of them twice, and a plain file."""
    rng = random.Random(5)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 60))) for _ in range(count)]
    lines = [json.dumps({"text": text}) for text in [*texts, texts[3].replace(" ", "\n  ")]]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "b.txt").write_text("hello world, this is a test")
    return [folder]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(tiny.model(), tokenizer=tiny.tokenizer())


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> CorpusPlan:
    return CorpusPlan(texts=some_texts(tmp_path_factory.mktemp("texts")), piece=16, keep=9)


@pytest.fixture(autouse=True)
def _short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are several, between which a build can be killed."""
    monkeypatch.setattr("draftsmith.lab.corpus.perplexity._POSITIONS", 256)


def make(plan: CorpusPlan, folder: Path, model: LoadedModel | None) -> Header:
    return build(plan, folder, tiny.tokenizer(), model, "tiny")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def expected(
    plan: CorpusPlan, model: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """What an undisturbed build leaves."""
    folder = tmp_path_factory.mktemp("whole") / "corpus"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftsmith.lab.corpus.perplexity._POSITIONS", 256)
        make(plan, folder, model)
    return content(folder)


def pieces_of(plan: CorpusPlan) -> Pieces:
    return read_pieces(find(plan.texts), plan.fields, plan.piece, tiny.tokenizer())


# --- reading --------------------------------------------------------------------------------------


def test_texts_come_from_files_of_all_kinds(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "a", "answer": "b", "n": 1}).encode() + b"\n\n"
    (tmp_path / "1.jsonl").write_bytes(line)
    (tmp_path / "2.JSONL.GZ").write_bytes(gzip.compress(line))
    (tmp_path / "3.jsonl.xz").write_bytes(lzma.compress(line))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "4.md").write_text("c")
    (tmp_path / "5.txt.xz").write_bytes(lzma.compress(b"d"))
    (tmp_path / "left.out").write_text("e")
    found = find([tmp_path, tmp_path / "left.out"])
    texts = [text for path in found for text in documents(path, ["prompt", "answer"])]
    assert texts == ["a\nb", "a\nb", "a\nb", "d", "c", "e"]


@pytest.mark.parametrize(
    ("name", "written", "message"),
    [
        ("a.jsonl", b'{"text": 1}', "line 1 has no text in 'text'; give --field .* .here: none."),
        ("a.jsonl", b'\n{"code": "x"}', "line 2 has no text in 'text'; .* .here: code."),
        ("a.jsonl", b"[]", "line 1 is not a JSON object"),
        ("a.jsonl", b"{", "line 1 is not JSON"),
        ("a.txt", b"\xff", "line 1 is not UTF-8"),
        ("a.txt.xz", b"nothing packed", "cannot be read"),
        ("a.txt.gz", b"nothing packed", "cannot be read"),
        ("a.txt.gz", gzip.compress(b"cut" * 99, mtime=0)[:-9], "cannot be read"),
        ("a.pdf", b"", "has no .txt, .md, .jsonl"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, name: str, written: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(written)
    with pytest.raises(LoadError, match=message):
        [list(documents(path, ["text"])) for path in find([tmp_path])]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without pipes")
def test_pipes_are_not_waited_for(plan: CorpusPlan, model: LoadedModel, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    some_texts(texts)
    expected = find([texts])
    os.mkfifo(texts / "never.txt")
    assert find([texts]) == expected
    with pytest.raises(LoadError, match=r"never\.txt is neither a regular file nor a folder"):
        find([texts / "never.txt"])
    header = make(replace(plan, texts=[texts], keep=None), tmp_path / "corpus", None)
    assert header.settings["read"]["skipped as no regular file"] == 1
    left = tmp_path / "left"
    left.mkdir()
    os.mkfifo(left / (files.TOKENS + NEW))
    with pytest.raises(OptionError, match=r"already holds something else \(e.g. tokens.bin.new\)"):
        make(plan, left, model)
    alone = tmp_path / "alone"
    alone.mkdir()
    os.mkfifo(alone / "never.txt")
    with pytest.raises(LoadError, match=r"has no \.txt.*never\.txt is not a regular file"):
        find([alone])


def test_documents_come_once_and_long_ones_are_cut(plan: CorpusPlan) -> None:
    pieces = pieces_of(plan)
    assert pieces.facts == {"documents": 32, "repeated": 1, "too short": 0, "taken": 31}
    assert pieces.lengths.max() <= 16
    texts = [text for path in find(plan.texts) for text in documents(path, plan.fields)]
    del texts[30]  # the repeated one
    encoded = [tiny.tokenizer()(text, add_special_tokens=False)["input_ids"] for text in texts]
    together = [d.tolist() for d in pieces.joined(np.arange(len(pieces)))]
    assert together == encoded
    counts = np.bincount(pieces.owners)[1:]
    assert counts.tolist() == [-(-len(ids) // 16) for ids in encoded]
    for owner in range(1, 32):  # pieces of a document differ by one token at most
        assert np.ptp(pieces.lengths[pieces.owners == owner]) <= 1


def test_only_neighbours_are_joined(plan: CorpusPlan) -> None:
    least = pieces_of(replace(plan, piece=LEAST_PIECE)).lengths
    assert (least.min() >= 2, least.max()) == (True, LEAST_PIECE)  # one token predicts nothing
    pieces = pieces_of(plan)
    number = int(np.flatnonzero(np.bincount(pieces.owners) >= 3)[0])
    one, two, three = np.flatnonzero(pieces.owners == number)[:3]
    apart = [d.tolist() for d in pieces.joined(np.array([one, three]))]
    assert apart == [pieces[one].tolist(), pieces[three].tolist()]
    joined = [d.tolist() for d in pieces.joined(np.array([one, two]))]
    assert joined == [pieces[one].tolist() + pieces[two].tolist()]


# --- ranking --------------------------------------------------------------------------------------


def kept_documents(folder: Path) -> list[list[int]]:
    ids = np.fromfile(folder / files.TOKENS, ID)
    return [
        part[part != SEPARATOR].tolist() for part in np.split(ids, np.flatnonzero(ids == SEPARATOR))
    ][:-1]


def test_the_least_surprising_pieces_are_kept(
    plan: CorpusPlan, model: LoadedModel, tmp_path: Path
) -> None:
    header = make(plan, tmp_path / "c", model)
    pieces = pieces_of(plan)
    ranks = [direct(pieces[i].tolist(), ()) for i in range(len(pieces))]
    best = np.array(sorted(sorted(range(len(pieces)), key=ranks.__getitem__)[:9]))
    assert kept_documents(tmp_path / "c") == [d.tolist() for d in pieces.joined(best)]
    assert header.examples == 9
    assert header.perplexity["lowest"] == pytest.approx(min(ranks), rel=1e-4)
    assert header.perplexity["highest kept"] == pytest.approx(sorted(ranks)[8], rel=1e-4)
    assert header.perplexity["highest"] == pytest.approx(max(ranks), rel=1e-4)
    whole = make(replace(plan, keep=None), tmp_path / "all", None)
    everything = pieces.joined(np.arange(len(pieces)))
    assert kept_documents(tmp_path / "all") == [d.tolist() for d in everything]
    assert (whole.perplexity, whole.examples) == ({}, len(pieces))


# --- the same bytes -------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for the end of the process."""


def kill_at(patch: pytest.MonkeyPatch, moment: int) -> None:
    """End the build before the `moment`-th time that it writes to disk or tidies up."""
    count = iter(range(1, 10_000))

    def step(*_: Any) -> None:
        if next(count) == moment:
            raise Killed

    real = building.shutil.rmtree
    patch.setattr(os, "fsync", step)
    patch.setattr(building.shutil, "rmtree", lambda path, **how: step() or real(path, **how))


def test_killed_anywhere_it_goes_on(
    plan: CorpusPlan, model: LoadedModel, expected: dict[str, bytes], tmp_path: Path
) -> None:
    for moment in range(1, 100):
        folder = tmp_path / str(moment)
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, moment)
            try:
                make(plan, folder, model)
            except Killed:
                pass
            else:
                break
        if not (folder / files.HEADER).exists():
            with pytest.raises(LoadError, match="is not finished"):
                Datastore.open(folder)
        make(plan, folder, model)
        assert content(folder) == expected
    assert moment > 12
    assert content(folder) == expected  # also if it is not disturbed
    assert expected.keys() == {files.HEADER, files.TOKENS, files.SUFFIXES}
    Datastore.open(folder)


def test_a_build_waits_for_another_of_the_same_corpus(
    plan: CorpusPlan, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ends = tmp_path / "corpus", list[Header]()
    reads, _ = twice_at_once(
        monkeypatch, building, "read_pieces", lambda: ends.append(make(plan, folder, model))
    )
    assert reads == 1
    assert ends[0] == ends[1]


def test_a_build_that_was_begun_is_gone_on_with_and_no_other(
    plan: CorpusPlan, model: LoadedModel, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """Finished passes are not repeated, also if the journal's end is not usable.

    Another build in the folder is refused, then and later.
    """
    folder, done, real = tmp_path / "c", list[int](), building.log_likelihoods

    def counted(*args: Any) -> list[float]:
        if len(done) == 2:
            raise Killed
        done.append(1)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "log_likelihoods", counted)
        with pytest.raises(Killed):
            make(plan, folder, model)
    other = load(tiny.model(layers=1), tokenizer=tiny.tokenizer())
    texts = replace(plan, texts=some_texts(tmp_path / "others", 7))
    for given, target in ((texts, model), (plan, other)):
        with pytest.raises(OptionError, match="the beginning of another build"):
            make(given, folder, target)
    with (folder / files.BUILDING / "scores.jsonl").open("ab") as journal:
        journal.write(b'{"pass": 99, "log_p": [1.0]}\n' + b"\0" * 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "log_likelihoods", lambda *args: done.append(1) or real(*args))
        link = tmp_path / "link"
        link.symlink_to(plan.texts[0].parent)  # the same texts under other names
        named = tuple(link / path.relative_to(link.resolve()) for path in plan.texts)
        header = make(replace(plan, texts=named), folder, model)
        assert content(folder) == expected
        assert make(plan, folder, model) == header  # nothing is left to do
    assert len(done) == len(passes(model, pieces_of(plan).lengths))
    with pytest.raises(OptionError, match="already holds another corpus"):
        make(replace(plan, keep=8), folder, model)


def test_a_build_among_its_texts_is_gone_on_with(
    plan: CorpusPlan, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own files are no texts."""
    inside, real = replace(plan, texts=some_texts(tmp_path)), building.write_index

    def dies(*_args: Any, **_options: Any) -> Any:
        raise Killed

    monkeypatch.setattr(building, "write_index", dies)
    with pytest.raises(Killed):
        make(inside, tmp_path / "c", model)
    monkeypatch.setattr(building, "write_index", real)
    monkeypatch.setattr(building, "log_likelihoods", dies)
    assert make(inside, tmp_path / "c", model).examples


def test_a_folder_of_anothers_that_has_the_name_of_a_build(
    plan: CorpusPlan, model: LoadedModel, tmp_path: Path
) -> None:
    plans = tmp_path / files.BUILDING / "plans.txt"
    plans.parent.mkdir()
    plans.write_text("mine")
    with pytest.raises(OptionError, match="already holds something else"):
        make(plan, tmp_path, model)
    assert plans.read_text() == "mine"


def ranked(plan: CorpusPlan, folder: Path, model: LoadedModel) -> Path:
    """The journal of a build that was killed after all passes."""

    def dies(*_args: Any, **_options: Any) -> Any:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "write_index", dies)
        with pytest.raises(Killed):
            make(plan, folder, model)
    return folder / files.BUILDING / "scores.jsonl"


@pytest.mark.parametrize(
    ("place", "log_p"),
    [(1, "[1.0]"), (1, "null"), (1, '["x"]'), (1, "NaN"), (None, "[1.0]")],
    ids=["too few", "no list", "no number", "not finite", "one pass too many"],
)
def test_a_journal_is_read_up_to_a_wrong_line(
    plan: CorpusPlan,
    model: LoadedModel,
    expected: dict[str, bytes],
    tmp_path: Path,
    place: int | None,
    log_p: str,
) -> None:
    journal = ranked(plan, tmp_path, model)
    lines = journal.read_text().splitlines(keepends=True)
    place = len(lines) if place is None else place
    lines[place : place + 1] = [f'{{"pass": {place}, "log_p": {log_p}}}\n']
    journal.write_text("".join(lines))
    make(plan, tmp_path, model)
    assert content(tmp_path) == expected


def test_texts_that_could_not_be_read_may_be_mended(
    plan: CorpusPlan, model: LoadedModel, tmp_path: Path
) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"one two three four\xff")
    given = replace(plan, texts=[text], keep=None)
    with pytest.raises(LoadError, match="not UTF-8"):
        make(given, tmp_path / "c", model)
    text.write_text("one two three four five six")
    assert make(given, tmp_path / "c", model).examples


# --- what is refused ------------------------------------------------------------------------------


def test_what_cannot_work_is_refused_and_left_alone(
    plan: CorpusPlan, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, full, blank = tmp_path / "c", tmp_path / "full", tmp_path / "a.txt"
    full.mkdir()
    (full / "thesis.tex").write_text("\\end")
    blank.write_text(" ")
    small = load(tiny.model(context=8), tokenizer=tiny.tokenizer())
    empty = replace(plan, texts=[blank])
    for folder, given, target, reason in (
        (full, plan, model, r"already holds something else \(e.g. thesis.tex"),
        (full / "thesis.tex", plan, model, "is a file; give a folder"),
        (new, plan, small, "the context of LlamaForCausalLM is 8; give --piece"),
        (new, plan, None, "ranking pieces needs a model"),
        (tmp_path / "e", empty, model, "there is no text"),
    ):
        with pytest.raises(OptionError, match=reason):
            make(given, folder, target)
    with pytest.raises(WriteError, match="cannot be written: Not a directory"):
        make(plan, blank / "below", model)
    for numbers, reason in (
        ({"piece": 3}, "piece must be an integer >= 4, got 3"),
        ({"keep": 0}, "keep must be an integer >= 1, got 0"),
    ):
        with pytest.raises(OptionError, match=reason):
            replace(plan, **numbers)
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    with pytest.raises(OptionError, match=r"pip install 'draftsmith\[corpus\]'"):
        make(plan, tmp_path / "s", model)
    assert not (tmp_path / "s").exists()
    assert [path.name for path in full.iterdir()] == ["thesis.tex"]
