"""What a model says after its frequent tokens, for `auto` to begin every answer with.

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
"""ours: the text before each token. Behind nothing at all a model is in no state that it knows: its
first position collects the attention of all others. A sentence, the beginning of a chat, and the
mean of five such do no better than a line break (docs/algorithms/auto.md)."""
CHUNK = 128
"""Tokens of a pass."""


def check(model: LoadedModel) -> None:
    """Raise OptionError for a model without a name, UnsupportedError for one that cannot look at
    several tokens at one place, or has hardly any."""
    if not model.facts.name:
        raise OptionError("a model made in memory has no name to remember bigrams by")
    if model.capabilities.shape != "tree":
        why = "; ".join(model.capabilities.reasons)
        raise UnsupportedError(f"this model cannot verify trees, which bigrams take: {why}")
    if model.vocab_size < TOP:
        raise UnsupportedError(f"a row has {TOP} tokens, this model {model.vocab_size}")


def size(model: LoadedModel) -> int:
    """Tokens that are asked about."""
    return min(ROWS, model.vocab_size)


@torch.inference_mode()
def bigrams(model: LoadedModel, advance: Callable[[int], None] = lambda _: None) -> Any:
    """Return rows, (n,) ROW, of the lowest ids, in most vocabularies the most frequent tokens."""
    runner, before = Runner(model), encode(model.tokenizer, BEFORE, special=True)
    # Tokenizers of T5's kind drop line breaks; some token has to come first.
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
