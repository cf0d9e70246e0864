"""Finds the model's choices after frequent tokens, with which `auto` begins every answer.

After Stewart et al. 2024, "The N-Grammys", arXiv 2411.03786: n-grams of the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from draftsmith.core.draft import ROOT, Draft
from draftsmith.drafters.logit_rows import ROWS, TOP, best
from draftsmith.errors import OptionError, UnsupportedError
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner
from draftsmith.text.tokenizer import encode

BEFORE = "\n"
"""ours: the text before each token.

Without one, a token is at the first position, which collects the attention of all others and is
untypical. A sentence, the beginning of a chat, and the mean of five such texts are no better than a
line break (docs/algorithms/auto.md).
"""
CHUNK = 128
"""Tokens per pass."""


def check(model: LoadedModel) -> None:
    """Raise OptionError for a model without a name, UnsupportedError for one without trees.

    UnsupportedError also for a vocabulary that is too small.
    """
    if not model.facts.name:
        raise OptionError("bigrams are stored by name, but a model made in memory has no name")
    if model.capabilities.shape != "tree":
        why = "; ".join(model.capabilities.reasons)
        raise UnsupportedError(f"this model cannot verify trees, which bigrams need: {why}")
    if model.vocab_size < TOP:
        raise UnsupportedError(f"bigrams need a vocabulary of {TOP} tokens, got {model.vocab_size}")


def size(model: LoadedModel) -> int:
    """Number of tokens to test."""
    return min(ROWS, model.vocab_size)


@torch.inference_mode()
def bigrams(model: LoadedModel, advance: Callable[[int], None] = lambda _: None) -> Any:
    """Return rows, (n,) ROW, of the lowest ids, in most vocabularies the most frequent tokens."""
    runner, before = Runner(model), encode(model.tokenizer, BEFORE, special=True)
    # Tokenizers like T5's drop line breaks, but some token must come first.
    before = before or [getattr(model.tokenizer, "eos_token_id", None) or 0]
    rows, end = [], size(model)
    for start in range(0, end, CHUNK):
        tokens = tuple(range(start, min(start + CHUNK, end)))
        row = runner.open(before)
        try:
            draft = Draft(tokens, (ROOT,) * len(tokens), ("auto",) * len(tokens))
            [output] = runner.forward([row], [draft])
            rows.append(best(tokens, output.logits[1:]))
        finally:
            runner.close(row)
        advance(len(tokens))
    found = np.concatenate(rows)
    return found[found["after"] > 0]
