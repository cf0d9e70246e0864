"""SLEM: the text between two vocabularies, and drafts that are guesses."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import DISTRIBUTIONS, PAIRS, SAMPLED, bound, check, decoded, pair_of, toy_vocabulary
from tokenizers import Tokenizer

import tiny
from draftsmith.core.draft import EMPTY
from draftsmith.core.sampling import SamplingParams, TorchSampler
from draftsmith.drafters.draft_model.slem import Bridge, StringMatch, beyond, longest_overlap
from draftsmith.testing import Scripted, ToyTarget
from draftsmith.text.vocab import Vocabulary

HARD = (
    "plain words, tabs\tand\r\nWindows ends,   repeated  spaces \n\n    indents, "
    "émoji 🦊🦊 and 中文字 text, which ends with a space "
)


@cache
def vocabularies(shared_data: Path) -> dict[str, Vocabulary]:
    folder = shared_data / "tokenizers"
    names = ("gpt2", "qwen2", "llama2", "t5-small")
    return {
        n: Vocabulary.of(Tokenizer.from_file(str(folder / n / "tokenizer.json"))) for n in names
    }


# ------------------------------------------------------------------------------ from ids to ids


def test_what_lies_beyond_a_text() -> None:
    """A token across the end gives its rest; committed text is never written differently."""
    vocabulary = toy_vocabulary([b"h", b"e", b"l", b"o", b"hello", b"lo", b" w", b"w", b" "])
    assert beyond(vocabulary, b"", b"hello w") == [4, 6]
    assert beyond(vocabulary, b"hel", b"lo w") == [5, 6]
    assert beyond(vocabulary, b"hello", b" w") == [6]
    assert beyond(vocabulary, b"hello", b"") == []


def test_longest_overlap() -> None:
    assert longest_overlap([7, 1, 2], [1, 2, 3]) == 2
    assert longest_overlap([1, 2], [5, 1, 2, 3]) == 3
    assert longest_overlap([1, 2], [1, 2, 1, 2, 3]) == 4  # the one that ends last
    assert longest_overlap([1], [2, 3]) == 0


class Lowering(Vocabulary):
    """A tokenizer that rewrites its input: lower case, and runs of spaces become one."""

    def encode(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        plain = b" ".join(part for part in data.lower().split(b" ") if part or data == b" ")
        return [self.ids[plain[i : i + 1]] for i in range(len(plain))]


def test_a_tokenizer_that_rewrites_its_input() -> None:
    """What lies beyond is sought in what it makes of the text; the overlap decides at the worst."""
    vocabulary = Lowering([bytes([b]) for b in b"abc -"])
    assert beyond(vocabulary, b"AB", b"Ca") == [2, 0]
    assert beyond(vocabulary, b"A  B", b"c") == [2]
    # "a " alone is "a", so the space was not yet seen.
    assert beyond(vocabulary, b"a ", b"b") == [3, 1]


@pytest.mark.slow
def test_drafts_written_by_real_tokenizers(shared_data: Path) -> None:
    """Cut anywhere, what an injective target writes beyond the cut is the rest of the text."""
    tables, data = vocabularies(shared_data), HARD.encode()
    for target in (tables["gpt2"], tables["qwen2"], tables["llama2"]):
        for cut in range(0, len(data), 3):
            found = beyond(target, data[:cut], data[cut:])
            assert target.bytes_of(found) == data[cut:]


def test_a_draft_ends_before_what_the_target_cannot_say(shared_data: Path) -> None:
    tables = vocabularies(shared_data)
    for name, drafter in tables.items():
        for target in tables.values():
            bridge = Bridge(pair_of(target, drafter))
            ids = bridge.to_target([], drafter.encode(HARD))
            assert all(0 <= i < target.size for i in ids)
            fox = drafter.encode("a 🦊")
            if name != "t5-small" and target is not tables["t5-small"]:
                assert target.bytes_of(ids) == HARD.encode()
                # The fox comes in pieces, and a piece is held back.
                assert target.bytes_of(bridge.to_target([], fox[:-1])) == b"a "
            stop = min(drafter.special)
            ids = bridge.to_target([], [*drafter.encode("a"), stop, *drafter.encode("b")])
            shared = bridge.to_target([], [stop])
            assert (b"b" in target.bytes_of(ids)) == bool(shared)


def test_text_that_looks_like_a_marker_stays_text(shared_data: Path) -> None:
    tables = vocabularies(shared_data)
    bridge = Bridge(pair_of(tables["qwen2"], tables["gpt2"]))
    text = "say <|im_start|> and <|endoftext|>"
    ids = bridge.to_target([], tables["gpt2"].encode(text))
    assert not any(i in tables["qwen2"].special for i in ids)
    assert tables["qwen2"].bytes_of(ids) == text.encode()
    # The control token that both have goes over as itself, another one as nothing.
    named = {name: i for i, name in tables["qwen2"].special.items()}
    end = next(i for i, name in tables["gpt2"].special.items() if name == "<|endoftext|>")
    assert bridge.to_drafter([named["<|endoftext|>"], named["<|im_start|>"]]) == [end]
    assert bridge.to_target([], [end]) == [named["<|endoftext|>"]]


# ------------------------------------------------------------------------- following the target


def follow(translation: StringMatch, ids: list[int]) -> list[int]:
    """The drafter's ids of a text, then a draft of what was not to come."""
    translation.follow(ids)
    found = list(translation.ids)
    translation.ids += translation.bridge.drafter.encode("the draft")
    return found


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(["the ", "quick", " fo", "x\n", "  ", "🦊", "\t", "</s>", "lazy"])
    ),
    steps=st.lists(st.integers(1, 5), max_size=30),
    back=st.integers(0, 30),
)
def test_the_drafter_reads_what_was_committed(text: list[str], steps: list[int], back: int) -> None:
    """Step by step, whatever was drafted in between, and after the host has rewound."""
    T, D = (Vocabulary.of(tiny.tokenizer(vocab)) for vocab in (400, 300))  # noqa: N806
    translation = StringMatch(Bridge(pair_of(T, D)))
    ids: list[int] = []
    for part in text:
        ids += [2] if part == "</s>" else T.encode(part)
    written = 0
    for step in [*steps, len(ids)]:
        written = min(written + step, len(ids))
        found = follow(translation, ids[:written])
        assert D.bytes_of(found) == T.bytes_of(ids[:written])
        assert found.count(2) == ids[:written].count(2)
    kept = max(0, len(ids) - back)
    translation.truncate(kept)
    other = [*ids[:kept], *T.encode("hello world")]
    assert D.bytes_of(follow(translation, other)) == T.bytes_of(other)


def test_an_accepted_draft_stays_in_the_cache() -> None:
    """The drafter's own tokens of it are kept as far as it was accepted, and no further."""
    T, D = (Vocabulary.of(tiny.tokenizer(vocab)) for vocab in (400, 300))  # noqa: N806
    translation = StringMatch(Bridge(pair_of(T, D)))
    prompt = T.encode("the quick brown ")
    translation.follow(prompt)
    before = list(translation.ids)
    drafted = [D.ids[bytes([b])] for b in b"fox jumps"]  # letter by letter: as it likes
    translation.ids += drafted
    translation.follow([*prompt, *T.encode("fox jum"), *T.encode("bled")])
    kept = len(before) + len("fox jum")
    assert translation.ids[: kept - 3] == [*before, *drafted][: kept - 3]
    assert D.bytes_of(translation.ids) == b"the quick brown fox jumbled"


def test_a_long_prompt_is_not_tokenized_again(monkeypatch: pytest.MonkeyPatch) -> None:
    T, D = (Vocabulary.of(tiny.tokenizer(vocab)) for vocab in (400, 300))  # noqa: N806
    translation = StringMatch(Bridge(pair_of(T, D)))
    ids = T.encode("the lazy dog " * 200)
    read: list[int] = []
    original = Bridge.to_drafter
    monkeypatch.setattr(
        Bridge, "to_drafter", lambda self, ids: (read.append(len(ids)), original(self, ids))[1]
    )
    translation.follow(ids)
    for _ in range(5):
        ids = [*ids, *T.encode("fox")]
        translation.follow(ids)
    assert read[0] > 500
    assert max(read[1:]) <= 25


# ---------------------------------------------------------------------------- the distribution


@pytest.mark.parametrize("name", PAIRS)
def test_output_distribution_is_the_targets(name: str) -> None:
    T, D = PAIRS[name]  # noqa: N806
    for params in (DISTRIBUTIONS["plain"], DISTRIBUTIONS["top_k"]):
        check(bound(T, D, "slem", ends=[0], order=2), params, 3, size=len(T))


@pytest.mark.parametrize("name", PAIRS)
def test_the_same_seed_gives_the_same_answer(name: str) -> None:
    """Guesses take no randomness: sampled answers are those of plain decoding."""
    T, D = PAIRS[name]  # noqa: N806
    target, silent = ToyTarget(len(T), order=2, seed=1), Scripted(lambda _ctx: EMPTY)
    for seed in range(3):
        for params in (SAMPLED, SamplingParams()):
            ours, plain = (
                decoded(target, drafter, [0, 1], 20, TorchSampler.seeded(seed), params).ids
                for drafter in (bound(T, D, "slem", order=2), silent)
            )
            assert ours == plain
