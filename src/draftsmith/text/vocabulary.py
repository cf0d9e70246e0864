"""Whether two tokenizers mean the same text by the same ids."""

from __future__ import annotations

import hashlib
from typing import Any


def fingerprint(tokenizer: Any) -> str:
    """SHA-256, in hex, over all pairs of id and token; of a tokenizer of either library.

    Models of one family often differ in how far their logits are padded, and then still agree here.
    """
    pairs = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    text = "".join(f"{number}\t{token}\0" for number, token in pairs)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
