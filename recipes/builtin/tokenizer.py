"""Train the byte-level BPE vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import common
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

# Like GPT-2's, but digits are separate (numbers are copied and changed digit by digit), and runs of
# spaces at the start of a line are one piece of their own.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


SAMPLED = (
    ("edits", 4, ("message", "after")),  # neighbouring commits are nearly the same file
    ("code", 2, ("text",)),
    ("docs", 1, ("text",)),
    ("instruct", 1, ("prompt", "completion")),
)
"""Folders, the step between rows that are read, and their fields."""
MOST = 30_000_000  # most characters of a folder


def text_sample(corpora: Path) -> Iterator[str]:
    """Yield texts from every folder, each up to the same number of characters."""
    for folder, every, keys in SAMPLED:
        taken = 0
        for row in islice(common.read_rows(corpora, folder), 0, None, every):
            text = "\n".join(row[key] for key in keys)
            taken += len(text)
            yield text
            if taken > MOST:
                break


def train_tokenizer(corpora: Path, size: int) -> Tokenizer:
    """Train a byte-level BPE of exactly `size` ids, including 256 byte tokens and the specials."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=common.SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(text_sample(corpora), trainer)
    first = (common.TEXT_END, common.SPECIALS.index(common.TEXT_END))
    # The end marker also begins a text: heads without a match attend to it (`substitute.py`).
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{common.TEXT_END} $A", special_tokens=[first]
    )
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"vocabulary has {tokenizer.get_vocab_size()} ids, wanted {size}")
    return tokenizer
