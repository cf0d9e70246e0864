"""The forward and backward dictionaries of SPECTRA-CORE (`docs/algorithms/spectra.md`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain


class Ngrams:
    """The two dictionaries of algorithm 1, filled from the pool.

    All entries are in one list per token: the tokens after it when it was the first of its chain.
    S_bwd[c_0 … c_j] is the latest token j+1 in the list of c_0 that follows c_1 … c_j. S_fwd[c_0]
    is the list of c_0 with all beginnings, plus what follows c_0 in the current pool.
    """

    def __init__(self, per_key: int, memory: int, sub_ngrams: bool) -> None:
        self.per_key = per_key
        self.memory = memory
        self.sub_ngrams = sub_ngrams
        self._followers: dict[int, list[tuple[int, ...]]] = {}
        """Key of S_fwd → the N−1 tokens after it, the latest last."""
        self._changed: dict[int, bool] = {}

    def begin(self, pool: Iterable[Sequence[int]]) -> None:
        """Register the chains of N−1 tokens of a new pool; each will get another token."""
        if self.sub_ngrams:
            for token in chain(*pool):
                self._key(token)

    def record(self, *chains: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Add chains of N tokens (lines 36 to 41); without sub-n-grams, only as a whole.

        Returns the chains without their first tokens, which are the new pool.
        """
        followed = [tokens[1:] for tokens in chains]
        for tokens, later in zip(chains, followed, strict=True):
            entries = self._key(tokens[0])
            entries.append(later)
            if len(entries) > 4 * self.per_key:
                entries[:] = reversed(_latest(entries)[: 2 * self.per_key])
            if self.sub_ngrams:
                self._key(tokens[-2])  # tokens between were second to last in an earlier pass
        if len(self._followers) > self.memory:
            for token in list(self._followers)[: -((self.memory + 1) // 2)]:
                del self._followers[token]
                self._changed[token] = False
        return followed

    def _key(self, token: int) -> list[tuple[int, ...]]:
        entries = self._followers.get(token)
        if entries is None:
            entries = self._followers[token] = []
            self._changed[token] = True
        return entries

    def forward(self, token: int, pool: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Look up S_fwd: return at most `per_key` continuations of `token`, the latest first.

        Beginnings of other continuations are left out, because a tree contains them anyway.
        """
        entries = self._followers.get(token, ())
        if not self.sub_ngrams:
            return _latest(entries)[: self.per_key]
        followed = [
            tokens[j + 1 :]
            for tokens in pool
            if token in tokens
            for j in range(len(tokens) - 1)
            if tokens[j] == token
        ]
        found = _latest([*entries, *followed])
        begun = {tokens[:k] for tokens in found for k in range(1, len(tokens))}
        return [tokens for tokens in found if tokens not in begun][: self.per_key]

    def backward(self, past: Sequence[int], n: int) -> list[int]:
        """Return up to `n` tokens after `past`, each by its longest key (lines 8 to 14)."""
        text = tuple(past)
        while len(text) < len(past) + n:
            for start in range(max(0, len(text) - n + 1), len(text)):
                token = self._next(text[start], text[start + 1 :])
                if token is not None:
                    text += (token,)
                    break
            else:
                break
        return list(text[len(past) :])

    def _next(self, first: int, more: tuple[int, ...]) -> int | None:
        """Look up S_bwd[first, *more]; None if there is no such key."""
        size = len(more)
        for tokens in reversed(self._followers.get(first, ())):
            if tokens[:size] == more and (self.sub_ngrams or size == len(tokens) - 1):
                return tokens[size]
        return None

    def changed_keys(self) -> dict[int, bool]:
        """Return the keys of S_fwd added (True) or removed (False) since the last call."""
        changed, self._changed = self._changed, {}
        return changed


def _latest(entries: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return all distinct entries, the latest first."""
    return list(dict.fromkeys(reversed(entries)))
