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
from draftsmith.drafters.corpus import files
from draftsmith.drafters.corpus.datastore import Datastore
from draftsmith.drafters.corpus.files import ID, SEPARATOR, Header
from draftsmith.errors import LoadError, OptionError
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
    (tmp_path / "2.jsonl.gz").write_bytes(gzip.compress(line))
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


def test_no_piece_is_too_short_to_rank(plan: CorpusPlan) -> None:
    pieces = pieces_of(replace(plan, piece=LEAST_PIECE))
    assert pieces.lengths.min() >= 2
    assert pieces.lengths.max() <= LEAST_PIECE


def test_only_neighbours_are_joined(plan: CorpusPlan) -> None:
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


def test_without_ranking_everything_is_kept(plan: CorpusPlan, tmp_path: Path) -> None:
    whole = CorpusPlan(texts=plan.texts, piece=16, keep=None)
    header = make(whole, tmp_path / "c", None)
    pieces = pieces_of(plan)
    assert kept_documents(tmp_path / "c") == [
        d.tolist() for d in pieces.joined(np.arange(len(pieces)))
    ]
    assert header.perplexity == {}
    assert header.examples == len(pieces)
    with pytest.raises(OptionError, match="ranking pieces needs a model"):
        make(plan, tmp_path / "other", None)


# --- the same bytes -------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for the end of the process."""


def kill_at(patch: pytest.MonkeyPatch, moment: int) -> None:
    """End the build when something is seen on disk for the `moment`-th time, before it is."""
    count = iter(range(1, 10_000))

    def fsync(_number: int) -> None:
        if next(count) == moment:
            raise Killed

    patch.setattr(os, "fsync", fsync)


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


def test_a_torn_journal_is_mended(
    plan: CorpusPlan, model: LoadedModel, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """Cut anywhere, or with the zeros that a power failure may leave."""
    first = tmp_path / "first"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "write_index", _killed)
        with pytest.raises(Killed):
            make(plan, first, model)
    journal = first / files.BUILDING / "scores.jsonl"
    whole = journal.read_bytes()
    first_line = whole.index(b"\n") + 1
    for cut, tail in (
        (0, b""), (40, b""), (40, b"\0" * 64), (len(whole) - 1, b""), (first_line, b"\0" * 64),
        (first_line, b'{"pass": 99, "log_p": [1.0]}\n'), (len(whole), b"\0" * 64),
    ):  # fmt: skip
        journal.write_bytes(whole[:cut] + tail)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(building, "write_index", _killed)
            with pytest.raises(Killed):
                make(plan, first, model)
        assert journal.read_bytes() == whole
    make(plan, first, model)
    assert content(first) == expected


def _killed(*_args: Any, **_options: Any) -> Any:
    raise Killed


def test_finished_passes_are_not_repeated(
    plan: CorpusPlan, model: LoadedModel, tmp_path: Path
) -> None:
    done: list[int] = []
    real = building.log_likelihoods

    def counted(*args: Any) -> list[float]:
        if len(done) == 2:
            raise Killed
        done.append(1)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "log_likelihoods", counted)
        with pytest.raises(Killed):
            make(plan, tmp_path / "c", model)
        patch.setattr(building, "log_likelihoods", lambda *args: done.append(1) or real(*args))
        make(plan, tmp_path / "c", model)
    assert len(done) == len(passes(model, pieces_of(plan).lengths))


def test_killed_while_tidying_up(
    plan: CorpusPlan, model: LoadedModel, expected: dict[str, bytes], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building.shutil, "rmtree", _killed)
        with pytest.raises(Killed):
            make(plan, tmp_path / "c", model)
    assert (tmp_path / "c" / files.BUILDING).exists()
    Datastore.open(tmp_path / "c")
    make(plan, tmp_path / "c", model)
    assert content(tmp_path / "c") == expected


# --- what is refused ------------------------------------------------------------------------------


def test_another_build_in_the_same_folder_is_refused(
    plan: CorpusPlan, model: LoadedModel, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "write_index", _killed)
        with pytest.raises(Killed):
            make(plan, tmp_path / "c", model)
    texts = some_texts(tmp_path / "others", 7)
    with pytest.raises(OptionError, match="the beginning of another build"):
        make(CorpusPlan(texts=texts, piece=16, keep=9), tmp_path / "c", model)
    other = load(tiny.model(layers=1), tokenizer=tiny.tokenizer())
    with pytest.raises(OptionError, match="the beginning of another build"):
        make(plan, tmp_path / "c", other)


def test_a_finished_corpus_is_left_alone(
    plan: CorpusPlan, model: LoadedModel, tmp_path: Path
) -> None:
    first = make(plan, tmp_path / "c", model)
    assert make(plan, tmp_path / "c", model) == first
    with pytest.raises(OptionError, match="already holds a corpus of tiny"):
        make(CorpusPlan(texts=plan.texts, piece=16, keep=8), tmp_path / "c", model)


def test_folders_with_something_else_are_left_alone(
    plan: CorpusPlan, model: LoadedModel, tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").write_text("\\end")
    with pytest.raises(OptionError, match=r"already holds something else \(e.g. thesis.tex"):
        make(plan, tmp_path, model)
    with pytest.raises(OptionError, match="is a file; give a folder"):
        make(plan, tmp_path / "thesis.tex", model)


def test_numbers_that_cannot_work_are_refused(plan: CorpusPlan, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="piece must be an integer >= 4, got 3"):
        CorpusPlan(texts=[], piece=3)
    with pytest.raises(OptionError, match="keep must be an integer >= 1, got 0"):
        CorpusPlan(texts=[], keep=0)
    small = load(tiny.model(context=8), tokenizer=tiny.tokenizer())
    with pytest.raises(OptionError, match="the context of LlamaForCausalLM is 8; give --piece"):
        make(plan, tmp_path / "c", small)


def test_no_text_is_refused(model: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" ")
    with pytest.raises(OptionError, match="there is no text"):
        make(CorpusPlan(texts=[tmp_path / "a.txt"]), tmp_path / "c", model)


def test_a_missing_sorter_is_named_at_once(
    plan: CorpusPlan, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    with pytest.raises(OptionError, match=r"pip install 'draftsmith\[corpus\]'"):
        make(plan, tmp_path / "c", model)
    assert not (tmp_path / "c").exists()
