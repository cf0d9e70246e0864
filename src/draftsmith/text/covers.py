"""In how many ways tokens can write a string: what the paper counts for SLRS.

Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", section 3.4 and appendix C.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Covers:
    """The exact covers of a string, seen as a tree whose paths are the sequences of tokens."""

    count: int
    """Sequences of tokens that write the string: the leaves."""
    inner: int
    """Nodes between the root and the leaves: beginnings of such sequences."""

    @property
    def forwards(self) -> int:
        """Drafter passes that give all the covers' probabilities: one per inner node, and the root.

        One even where there is no cover: nobody knows before the first pass is read.
        """
        return self.inner + 1


def covers(data: bytes, tokens: Container[bytes], longest: int | None = None) -> Covers:
    """Count the ways to write `data` as a concatenation of `tokens`, of at most `longest` bytes.

    Of n bytes there are at most 2^(n-1) (lemma 3.1).
    """
    n = len(data)
    edges = [
        (i, j)
        for i in range(n)
        for j in range(i + 1, n + 1 if longest is None else min(n, i + longest) + 1)
        if data[i:j] in tokens
    ]
    reaching = [1] + [0] * n  # sequences that write data[:i]
    for i, j in edges:
        reaching[j] += reaching[i]
    leaving = [False] * n + [True]  # whether some sequence writes data[i:]
    for i, j in reversed(edges):
        leaving[i] = leaving[i] or leaving[j]
    inner = sum(reaching[i] for i in range(1, n) if leaving[i])
    return Covers(reaching[n], inner)
