"""The retrieval drafter: the contract, what it drafts, which corpora and models it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from drafted import context, same_answers

import tiny
from draftsmith.drafters.corpus import files
from draftsmith.drafters.corpus.datastore import shared
from draftsmith.drafters.registry import parse
from draftsmith.drafters.retrieval import Retrieval
from draftsmith.engine.engine import Engine
from draftsmith.errors import LoadError, OptionError
from draftsmith.lab.corpus.index import write_index
from draftsmith.model.load import load
from draftsmith.testing import ToyTarget, check_drafter, contract_prompts, plain

TEXTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [2, 3, 4, 4, 4], [7, 7, 7, 1], [2] * 40]


def corpus(folder: Path, documents: list[list[int]], vocabulary: str = "v") -> Path:
    write_index(folder, documents, vocabulary=vocabulary, examples=len(documents), model="toy")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "longest=3, shortest=1, depth=2", "sample=1"])
def test_contract(tmp_path: Path, options: str) -> None:
    """On texts of its own and on what the toy target itself would say."""
    answers = [
        prompt + plain(ToyTarget(11, order=order), prompt, 40)
        for prompt in contract_prompts(11)
        for order in (1, 2)
    ]
    folder = str(corpus(tmp_path, TEXTS + answers))
    check_drafter(parse(f"retrieval(corpus={folder!r}{', ' * bool(options)}{options})"))


def test_it_drafts_what_followed(tmp_path: Path) -> None:
    drafter = Retrieval(str(corpus(tmp_path, TEXTS)))

    def drafted(ids: list[int], budget: int = 64, depth: int = 64) -> tuple[int, ...]:
        ctx = context(ids, 11, budget=budget, depth=depth)
        draft = drafter.open(ctx).draft(ctx)
        assert set(draft.source) <= {"retrieval"}
        return draft.tokens

    assert drafted([9, 1, 2, 3]) == (4, 5, 6, 7, 8, 9)
    assert set(drafted([9, 2, 3])) == {4, 5, 6, 7, 8, 9}
    assert drafted([9, 2, 3], budget=1) == (4,)
    assert drafted([9, 1, 2, 3], depth=2) == (4, 5)
    assert drafted([3]) == drafted([9, 9]) == drafted([8, 9]) == drafted([1, 2], depth=0) == ()


def test_one_corpus_is_opened_once(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "c", TEXTS)
    one, two = Retrieval(str(folder)), Retrieval(str(folder), longest=4)
    assert one.datastore() is two.datastore()
    assert one == Retrieval(folder)  # type: ignore[arg-type]  # a Path will do, too
    assert parse(str(one)) == one
    corpus(folder, [*TEXTS, [1, 2]])
    assert one.datastore() is shared(str(folder))
    assert one.datastore().header.tokens == sum(len(t) + 1 for t in TEXTS) + 3


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"retrieval needs corpus=…"):
        parse("retrieval")
    with pytest.raises(OptionError, match=r"corpus must be a folder .*, got 5"):
        parse("retrieval(corpus=5)")
    with pytest.raises(LoadError, match="there is no folder"):
        parse(f"retrieval(corpus={str(tmp_path / 'nowhere')!r})")
    folder = str(corpus(tmp_path / "c", TEXTS))
    with pytest.raises(OptionError, match="shortest must be <= longest=4, got 9"):
        Retrieval(folder, longest=4, shortest=9)
    with pytest.raises(OptionError, match="depth must be an integer >= 1, got 0"):
        Retrieval(folder, depth=0)
    path = Path(folder) / files.SUFFIXES
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(LoadError, match="is damaged"):
        Retrieval(folder)


def test_a_corpus_for_another_model_is_refused(tmp_path: Path) -> None:
    loaded = load(tiny.model(), tokenizer=tiny.tokenizer())
    other = Retrieval(str(corpus(tmp_path / "other", TEXTS)))
    with pytest.raises(OptionError, match="built for another vocabulary"):
        Engine(loaded).generate("the", drafter=other)
    assert loaded.vocabulary is not None
    wide = Retrieval(str(corpus(tmp_path / "wide", [[1, loaded.vocab_size]], loaded.vocabulary)))
    with pytest.raises(
        OptionError, match=r"has token ids up to .*, but those of this model are from 0 to"
    ):
        Engine(loaded).generate("the", drafter=wide)


def test_greedy_answers_stay_the_same_and_come_faster(tmp_path: Path) -> None:
    loaded = load(tiny.model(), tokenizer=tiny.tokenizer())
    engine = Engine(loaded, drafter="none", budget="drafter")
    prompts = ["the quick brown", "def foo(x):", "hello world"]
    options = {"temperature": 0.0, "max_new_tokens": 60, "min_new_tokens": 60}
    known = [[*r.prompt_tokens, *r.tokens] for r in engine.generate(prompts[:2], **options)]
    assert loaded.vocabulary is not None
    drafter = Retrieval(str(corpus(tmp_path, known, loaded.vocabulary)))
    found = same_answers(engine, prompts, drafter, **options)
    for result in found[:2]:
        assert result.stats.by_source["retrieval"].accepted > 40
        assert result.stats.tokens_per_pass > 3
