"""Between text and ids."""

from __future__ import annotations

import copy
from collections import abc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import tiny
from draftsmith.text import spelling
from draftsmith.text.tokenizer import (
    UNFINISHED,
    StreamDecoder,
    decode,
    last_written,
    opening,
    split_stops,
    token_texts,
)
from draftsmith.text.vocab import Vocabulary


def test_what_a_tokenizer_puts_first() -> None:
    assert opening(tiny.sentencepiece()) == (1,)
    assert opening(tiny.tokenizer()) == ()


class Counting:
    """A tokenizer that counts what it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids: abc.Sequence[int], **options: Any) -> str:
        self.decoded += len(ids)
        text: str = self.tokenizer.decode(ids, **options)
        return text

    def get_added_vocab(self) -> dict[str, int]:
        added: dict[str, int] = self.tokenizer.get_added_vocab()
        return added


def plain(*data: int) -> list[int]:
    """The ids of bytes in the tiny tokenizer."""
    ids = Vocabulary.of(tiny.tokenizer()).ids
    return [ids[bytes([byte])] for byte in data]


def fallback(*data: int) -> list[int]:
    """The ids of bytes in the other one."""
    ids: list[int] = tiny.sentencepiece().convert_tokens_to_ids([f"<0x{i:02X}>" for i in data])
    return ids


LETTER, SPACE, WORD = tiny.sentencepiece().convert_tokens_to_ids(["a", "▁", "▁time"])


BYTES = (0x61, 0x20, 0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0xA6, 0x8A, 0xFF, 0x80)


@given(st.lists(st.integers(0, 5 + len(BYTES)), max_size=40))
@settings(max_examples=100)
def test_pieces_of_any_bytes_join_to_the_whole_text(chosen: list[int]) -> None:
    tokenizer, known = tiny.tokenizer(), [0, 1, 2, 300, 301, 302, *plain(*BYTES)]
    ids = [known[i] for i in chosen]
    assert "".join(texts := token_texts(tokenizer, ids)) == decode(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(token_texts(tokenizer, ids, special=True)) == tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


@given(
    st.lists(
        st.sampled_from(
            [[2], [SPACE], [LETTER], [WORD], fallback(*"日".encode()), fallback(*"🦊".encode())]
        )
    )
)
@settings(max_examples=100)
def test_pieces_of_byte_tokens_join_to_the_whole_text(parts: list[list[int]]) -> None:
    """Whole characters of one to four bytes, control tokens and spaces between them."""
    tokenizer, ids = tiny.sentencepiece(), [i for part in parts for i in part]
    assert "".join(token_texts(tokenizer, ids)) == decode(tokenizer, ids)


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (tiny.tokenizer, plain(0xFF)),
        (tiny.tokenizer, plain(0xE6, 0x97)),
        (tiny.tokenizer, [0]),
        (tiny.sentencepiece, fallback(0xFF)),
        (tiny.sentencepiece, fallback(0x97, 0xA5, 0xE6)),
        (tiny.sentencepiece, [2]),
    ],
    ids=["bad bytes", "cut characters", "control", "bad fallback", "shifted", "fallback control"],
)
@pytest.mark.parametrize("first", [[], [LETTER]], ids=["at once", "after text"])
def test_what_becomes_no_character_is_streamed_in_linear_time(
    make: Any, pattern: list[int], first: list[int]
) -> None:
    tokenizer = make()
    costs = []
    for length in (500, 1000):
        counting = Counting(tokenizer)
        decoder = StreamDecoder(counting)
        ids = [*first, *(pattern * length)[:length]]
        pieces = []
        for token in ids:
            pieces.append(decoder.push(token))
            assert len(decoder.unfinished) <= UNFINISHED
        costs.append(counting.decoded)
        text = "".join(pieces) + decoder.unfinished
        assert set(text) <= {*decode(tokenizer, ids), "\ufffd"}
    assert costs[1] < 2.1 * costs[0]
    assert costs[1] < 60 * 1000


@pytest.mark.parametrize("before", [[], [SPACE], [LETTER]], ids=["at once", "space", "text"])
def test_byte_tokens_of_an_unfinished_character_leave_whole_ones(before: list[int]) -> None:
    tokenizer = tiny.sentencepiece()
    text, fox = decode(tokenizer, before), fallback(*"🦊".encode())
    assert "".join(token_texts(tokenizer, [*before, *fox, *fox[:2]])) == f"{text}🦊\ufffd\ufffd"
    texts = token_texts(tokenizer, [*before, *fox, *fallback(0xFF), *fox, WORD])
    assert "".join(texts) == f"{text}🦊\ufffd🦊 time"


def test_text_behind_bytes_that_are_none_comes_at_once() -> None:
    ids = [LETTER, *fallback(0xFF) * 9, WORD, WORD]
    texts = token_texts(tiny.sentencepiece(), ids)
    assert texts[-2:] == ["\ufffd" * UNFINISHED + " time", " time"]
    texts = token_texts(tiny.tokenizer(), plain(0xFF) * 9 + plain(*"🦊".encode()))
    assert texts[-1] == "🦊"
    assert "".join(texts) == "\ufffd" * 9 + "🦊"


def test_characters_that_tokens_cut_are_whole() -> None:
    """Each token ends a character and begins the next one, for longer than text is held back."""
    letters = {byte: letter for letter, byte in spelling._ALPHABET.items()}
    start, end = "🦊".encode()[:2], "🦊".encode()[2:]
    names = ["".join(letters[byte] for byte in data) for data in (start, end + start, end)]
    made = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token=names[0]))
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    assert token_texts(tokenizer, [0, *[1] * 9, 2])[-1] == "🦊" * 10
    assert any(token_texts(tokenizer, [0, *[1] * 30])[:-1])


@pytest.mark.parametrize("form", ["bytes", "fallback"])
def test_s6_a_token_begins_where_all_before_it_has_ended(form: str) -> None:
    tokenizer = tiny.tokenizer() if form == "bytes" else tiny.sentencepiece()
    made = plain if form == "bytes" else fallback
    letter = tokenizer.convert_tokens_to_ids("a")
    bad, euro, fox = made(0xFF), made(*"€".encode()), made(*"🦊".encode())
    for ids, starts in (
        ([*bad, letter, letter], [0, 1, 2]),
        ([*bad, *bad, *bad, *bad, *bad, letter], [0, 1, 2, 3, 4, 5]),
        ([*euro, letter], [0, 0, 0, 1]),
        ([*fox, *euro, *bad, letter], [0, 0, 0, 0, 1, 1, 1, 2]),
        ([*bad, *euro, letter], [0, 1, 1, 1, 2 if form == "bytes" else 4]),
        ([*euro[:2], *bad, letter], [0, 0, 1]),
        ([*euro[:1], *fox, letter], [0, 1, 1, 1, 1, 2]),
    ):
        decoder, found = StreamDecoder(tokenizer), []
        for token in ids:
            decoder.push(token)
            found.append(decoder.start)
        assert found[: len(starts)] == starts, ids


def test_stop_strings_cost_nothing_for_other_added_tokens() -> None:
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{i}|>" for i in range(500)]})
    counting = Counting(tokenizer)
    strings, ids = split_stops(counting, ["a", "<|7|>", "\n"])
    assert (strings, ids) == (["a", "\n"], tokenizer.convert_tokens_to_ids(["<|7|>"]))
    assert counting.decoded < 5


# --- what goes on a text ----------------------------------------------------------------------


def check_cuts(tokenizer: Any, text: str) -> None:
    """Wherever no character is cut, what is decoded behind a text's beginning is its rest."""
    ids = tokenizer(text)["input_ids"]
    whole = decode(tokenizer, ids)
    for cut in range(len(ids) + 1):
        before, rest = ids[:cut], ids[cut:]
        behind = last_written(tokenizer, before)
        if "\ufffd" in decode(tokenizer, before) + decode(tokenizer, rest):
            continue
        told = decode(tokenizer, rest, preceding=behind)
        assert decode(tokenizer, before) + told == whole
        assert "".join(token_texts(tokenizer, rest, preceding=behind)) == told


@given(st.text("onceat ▁🦊日\n", max_size=20))
@settings(max_examples=100)
def test_a_text_and_what_goes_on_it_join(text: str) -> None:
    check_cuts(tiny.sentencepiece(), "once" + text)
    check_cuts(tiny.tokenizer(), "once" + text)
    if text.isascii():  # T5's decoder knows no bytes
        check_cuts(tiny.sentencepiece(fallback=False), "once" + text)


def test_what_stands_before_is_found() -> None:
    tokenizer = tiny.sentencepiece()
    ids = dict(tokenizer.get_vocab())
    word, space, bos = ids["▁once"], ids["▁"], ids["<s>"]
    partial = [ids[f"<0x{byte:02X}>"] for byte in "🦊".encode()[:3]]
    assert last_written(tokenizer, [bos, word, space, *partial, bos, bos]) == (word,)
    assert last_written(tokenizer, [word, *partial * 6]) == (word,)
    for nothing in ([], [bos], [bos, space], partial):
        assert last_written(tokenizer, nothing) == ()


STORY = "Once upon a time, \n\n  a 🦊 saw 日本 and ▁.\tThe end"


SLOW = ["mistral-v1", "qwen2", "llama3", "phi-2", "falcon"]


@pytest.mark.parametrize(
    "name", ["llama2", "gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_real_tokenizers_keep_the_space(shared_data: Path, name: str) -> None:
    path = shared_data / "tokenizers" / name / "tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    check_cuts(tokenizer, STORY)
    ids = tokenizer("Once upon a time")["input_ids"]
    behind = last_written(tokenizer, ids[:-2])
    assert decode(tokenizer, ids[-2:], preceding=behind) == " a time"
