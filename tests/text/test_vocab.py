"""Byte-exact tables: every table is held against its tokenizer."""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

import tiny
from draftsmith.errors import LoadError, UnsupportedError
from draftsmith.text import tokenizer
from draftsmith.text.vocab import Vocabulary, complete, intersect

SHARED = ("gpt2", "qwen2", "llama2", "llama3", "mistral-v1", "phi-2", "falcon", "t5-small")
TEXTS = ["the quick brown fox jumps", "def f(x):\n\treturn x", "日本語 and 🙂", "a  b   c\r\n"] * 9


@cache
def trained(kind: str) -> Tokenizer:
    """A tiny tokenizer of each family."""
    special = ["<unk>", "<s>", "</s>"]
    if kind == "byte-level":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    elif kind in ("llama", "llama-legacy", "gemma"):
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        strip = [] if kind == "gemma" else [decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        if kind == "llama":
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        elif kind == "llama-legacy":
            made.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
        else:
            made.normalizer = normalizers.Replace(" ", "▁")
        trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False)
    elif kind == "unigram":
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        made.decoder = decoders.Metaspace(prepend_scheme="always")
        trainer = trainers.UnigramTrainer(
            vocab_size=80, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    else:
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece(cleanup=True)
        trainer = trainers.WordPieceTrainer(
            vocab_size=90, special_tokens=special, show_progress=False
        )
    made.train_from_iterator(TEXTS, trainer)
    if kind.startswith("llama") or kind == "gemma":
        # The trainer calls them special; SentencePiece's bytes are ordinary tokens.
        made = Tokenizer.from_str(_without_special_bytes(made))
    return made


def _without_special_bytes(made: Tokenizer) -> str:
    state = json.loads(made.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if not t["content"].startswith("<0x")]
    return json.dumps(state)


KINDS = ("byte-level", "llama", "llama-legacy", "gemma", "unigram", "wordpiece")


@cache
def table(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary.of(tokenizer)


def check_table(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Decoding a sequence gives the bytes of its tokens, but for a space at the very beginning."""
    vocabulary = table(tokenizer)
    written = [i for i in ids if vocabulary.tokens[i] is not None]
    data = opening(tokenizer, written[0]) + vocabulary.bytes_of(written[1:]) if written else b""
    text = tokenizer.decode(ids)  # without special tokens
    try:
        assert text == data.decode()
    except UnicodeDecodeError:
        # Byte fallback writes one U+FFFD for each byte of a run that is not all UTF-8.
        assert "\ufffd" in text


def opening(tokenizer: Tokenizer, token: int) -> bytes:
    """What an id writes at the very beginning of a text."""
    data = table(tokenizer).tokens[token] or b""
    try:
        data.decode()
    except UnicodeDecodeError:
        return data
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return text.encode()


def named(name: str, request: pytest.FixtureRequest) -> Tokenizer:
    """A tokenizer of a family, or a real one by its name."""
    return trained(name) if name in KINDS else real(name, request.getfixturevalue("shared_data"))


@pytest.mark.parametrize(
    "name", [*KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in SHARED)]
)
def test_sequences_decode_to_the_bytes_of_their_tokens(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = named(name, request)

    @settings(max_examples=80, deadline=None)
    @given(st.lists(st.integers(0, table(tokenizer).size - 1), max_size=12))
    def check(ids: list[int]) -> None:
        check_table(tokenizer, ids)

    check()


@cache
def real(name: str, data: Path) -> Tokenizer:
    return Tokenizer.from_file(str(data / "tokenizers" / name / "tokenizer.json"))


NASTY = (
    "emoji 🦊👩\u200d👩\u200d👧 and 🇫🇷",
    "中文字符，还有标点。",
    "tabs\tin\t\tlines\t",
    "Windows\r\nline\r\n\r\nends\r\n",
    "many   repeated     spaces      ",
    "<|im_start|>user\nhello<|im_end|>\n<s>[INST] it </s> <|endoftext|>",
    "cut 日🙂".encode()[:-1],
    "naïve e\u0301 \u00a0 ﬁ \ufeff \0 \x7f".encode() + b"\xff\xc0",
)


BYTES = ["byte-level", "llama", "llama-legacy", "gemma", "gpt2", "llama2"]
"""Tokenizers that know all bytes."""
SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("qwen2", "llama3", "mistral-v1", "phi-2")
]


@pytest.mark.parametrize("name", [*BYTES, *SLOW])
def test_encoding_gives_the_bytes_back(name: str, request: pytest.FixtureRequest) -> None:
    vocabulary = table(named(name, request))
    spaces = name in ("llama", "llama-legacy", "gemma", "llama2", "mistral-v1")  # "▁" is one

    def check(data: bytes) -> None:
        if spaces:
            data = data.replace("▁".encode(), b" ")
        ids = vocabulary.encode(data)
        assert vocabulary.bytes_of(ids) == data
        assert not vocabulary.special.keys() & set(ids)

    for text in NASTY:
        check(text.encode() if isinstance(text, str) else text)
    texts = st.one_of(st.text("a \t\r\n<|>s/é日🙂"), st.text())
    strings = st.one_of(st.binary(), texts.map(str.encode))
    settings(max_examples=100, deadline=None)(given(strings)(check))()


def test_the_users_tokenizer_is_not_changed() -> None:
    tokenizer = tiny.tokenizer()
    before = tokenizer.backend_tokenizer.to_str(), tokenizer("a</s>b")["input_ids"]
    Vocabulary.of(tokenizer).encode("a</s>b")
    assert before == (tokenizer.backend_tokenizer.to_str(), tokenizer("a</s>b")["input_ids"])
    assert not tokenizer.backend_tokenizer.encode_special_tokens


def test_a_tokenizer_may_know_more_than_the_model() -> None:
    vocabulary = Vocabulary.of(tiny.tokenizer(), 259)  # special tokens and bytes
    ids = vocabulary.encode("the fox")
    assert max(ids) >= vocabulary.size == 259
    assert vocabulary.bytes_of([*ids, *map(vocabulary.ids.__getitem__, (b"a", b"b"))]) == b"ab"


def test_a_table_is_made_once_and_again_when_tokens_are_added() -> None:
    made = PreTrainedTokenizerFast(tokenizer_object=trained("byte-level"))
    first = Vocabulary.of(made, 400)
    assert Vocabulary.of(made, 400) is first
    made.add_tokens(["<tool>"])
    again = Vocabulary.of(made, 400)
    assert again.tokens[len(made) - 1] == b"<tool>"
    assert first.tokens[len(made) - 1] is None
    made.add_special_tokens({"pad_token": "<tool>"})
    assert Vocabulary.of(made, 400).special[len(made) - 1] == "<tool>"


def test_a_table_goes_with_its_tokenizer() -> None:
    made = PreTrainedTokenizerFast(tokenizer_object=trained("gemma"))
    kept = weakref.ref(Vocabulary.of(made))
    del made
    gc.collect()
    assert kept() is None


def test_the_canonical_id_is_the_one_that_the_tokenizer_writes() -> None:
    vocabulary = Vocabulary.of(trained("llama"))
    byte = trained("llama").token_to_id("<0x61>")
    assert vocabulary.tokens[byte] == b"a"
    assert vocabulary.ids[b"a"] == trained("llama").token_to_id("a") != byte
    assert vocabulary.ids[b"\xff"] == trained("llama").token_to_id("<0xFF>")


@pytest.mark.parametrize(("a", "b"), [*itertools.combinations_with_replacement(KINDS, 2)])
def test_the_maps_undo_each_other(a: str, b: str) -> None:
    target, drafter = Vocabulary.of(trained(a), 400), Vocabulary.of(trained(b), 350)
    shared = intersect(target, drafter)
    alike = {"llama", "llama-legacy"}  # the same table, other rules for cutting a text
    assert shared.same == (a == b or {a, b} == alike)
    assert shared.to_target.shape == (350,)
    assert shared.to_drafter.shape == (400,)
    assert shared.size == int((shared.to_target >= 0).sum()) == int((shared.to_drafter >= 0).sum())
    for d, t in enumerate(shared.to_target.tolist()):
        if t >= 0:
            assert shared.to_drafter[t] == d
            assert target.tokens[t] == drafter.tokens[d]
            assert target.special.get(t) == drafter.special.get(d)
    names = set(target.special.values()) & set(drafter.special.values())
    if not shared.same:
        assert shared.size == len(target.ids.keys() & drafter.ids.keys()) + len(names)


def with_replacement_characters(*strip: decoders.Decoder) -> Tokenizer:
    """Like Gemma's: U+FFFD is a character of some tokens, beside SentencePiece's bytes."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["a", "b", "▁", "\ufffd", "▁\ufffd", "\ufffd\ufffd", "a\ufffd"]
    merges = [("▁", "\ufffd"), ("\ufffd", "\ufffd"), ("a", "\ufffd")]
    vocabulary = {name: i for i, name in enumerate(names)}
    model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return made


@pytest.mark.parametrize("strip", [(), (decoders.Strip(" ", 1, 0),)], ids=["gemma", "llama"])
def test_a_replacement_character_may_be_a_tokens_own(strip: tuple[decoders.Decoder, ...]) -> None:
    tokenizer = with_replacement_characters(*strip)
    vocabulary = table(tokenizer)
    for name, text in (
        ("\ufffd", "\ufffd"),
        ("▁\ufffd", " \ufffd"),
        ("\ufffd\ufffd", "\ufffd\ufffd"),
        ("a\ufffd", "a\ufffd"),
    ):
        token = tokenizer.token_to_id(name)
        assert vocabulary.tokens[token] == text.encode()
        assert vocabulary.encode(text) == [token]
    assert vocabulary.tokens[tokenizer.token_to_id("<0xEF>")] == b"\xef"
    byte_level = Vocabulary.of(trained("byte-level"))
    assert intersect(vocabulary, byte_level).size == 256, "single bytes"
    for ids in itertools.product(range(250, vocabulary.size), repeat=2):
        check_table(tokenizer, list(ids))


def words(decoder: decoders.Decoder | None, *names: str) -> Tokenizer:
    """A tokenizer that knows these words only."""
    numbered = {name: number for number, name in enumerate(names)}
    made = Tokenizer(models.WordLevel(numbered, unk_token=names[0]))
    if decoder is not None:
        made.decoder = decoder
    return made


LONG = "<0xE6>" + 80 * " "


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (None, LoadError, "no tokenizer"),
        (ByT5Tokenizer(), UnsupportedError, "ByT5Tokenizer is a tokenizer in Python"),
        (words(None, "one", "two"), UnsupportedError, "single letter or digit"),
        (words(decoders.CTC(pad_token="b"), "a", "b", "|"), UnsupportedError,
         r"decoder \(CTC\).*the neighbouring tokens"),  # it drops what is repeated
        (words(decoders.Sequence([decoders.Replace(LONG, "\ufffd"), decoders.Fuse()]), "a", LONG),
         UnsupportedError, r"'<0xE6> +\.\.\. +', writes no whole character"),
    ],
    ids=["none", "in Python", "no letters", "neighbours", "less than characters"],
)  # fmt: skip
def test_what_cannot_be_told_is_refused(given: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Vocabulary.of(given)


def test_a_tokenizer_may_have_upper_case_letters_only() -> None:
    bases = words(decoders.Fuse(), "A", "C", "G", "T")
    assert Vocabulary.of(PreTrainedTokenizerFast(tokenizer_object=bases)).tokens[2] == b"G"
    assert tokenizer.opening(PreTrainedTokenizerFast(tokenizer_object=bases)) == ()


@given(st.text())
def test_unfinished_characters_are_held_back(text: str) -> None:
    data = text.encode()
    for end in range(len(data) + 1):
        kept = complete(data[:end])
        assert data.startswith(kept)
        assert text.startswith(kept.decode())
        assert end - len(kept) <= 3
    assert complete(b"a\xff") == b"a\xff"  # which cannot become a character
    assert complete(b"a\xe6\x97") == b"a"
