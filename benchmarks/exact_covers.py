"""Appendix C of the paper on heterogeneous vocabularies: in how many ways tokens write a token.

    python -m benchmarks.exact_covers ../shared/data/tokenizers/qwen2/tokenizer.json

Over the 150,000 shortest tokens (in bytes), by themselves; and what the exact covers would cost:
the drafter passes per token.
"""

from __future__ import annotations

import argparse
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from draftsmith.text.vocab import Vocabulary

PAPER = {
    "length": (6.21, 2.87, 1, 4, 6, 8, 17),
    "covers": (144.31, 880.98, 1, 7, 15, 56, 65536),
}
"""Table 5: mean, standard deviation, minimum, quartiles, maximum."""

SHORTEST = 150_000


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


def shortest(vocabulary: Vocabulary, n: int = SHORTEST) -> list[bytes]:
    """The n shortest byte strings of a vocabulary; among equals the lowest ids."""
    return sorted(vocabulary.ids, key=lambda data: (len(data), vocabulary.ids[data]))[:n]


def count(tokens: Sequence[bytes]) -> list[Covers]:
    """The exact covers of each of the tokens by all of them."""
    known, longest = set(tokens), max(map(len, tokens))
    return [covers(data, known, longest) for data in tokens]


def summary(values: Sequence[int]) -> tuple[float, ...]:
    """What table 5 tells of a column."""
    v = np.array(values, dtype=float)
    return (v.mean(), v.std(ddof=1), v.min(), *np.percentile(v, [25, 50, 75]), v.max())


def means(vocabulary: Vocabulary, n: int = SHORTEST) -> tuple[NDArray[np.float64], int, int]:
    """(3,) least, expected and greatest mean count over which of the longest tokens are chosen.

    Also how many have the greatest length, and how many of them there is room for. A token of that
    length covers no other but itself, so the choice changes nothing else.
    """
    every = shortest(vocabulary, len(vocabulary.ids))
    longest = len(every[n - 1])
    below = [data for data in every if len(data) < longest]
    equal = [data for data in every if len(data) == longest]
    room = n - len(below)
    rest = sum(found.count for found in count(below))
    known = set(below)
    # Each of them is one cover of itself, whatever the others are.
    counts = np.sort([covers(data, known).count + 1 for data in equal])
    totals = [counts[:room].sum(), room * counts.mean(), counts[len(equal) - room :].sum()]
    return (rest + np.array(totals)) / n, len(equal), room


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path("../shared/data/tokenizers/qwen2/tokenizer.json")
    parser.add_argument("tokenizer", type=Path, nargs="?", default=default)
    path: Path = parser.parse_args().tokenizer
    if not path.is_file():
        parser.error(f"there is no {path}; give the tokenizer.json of Qwen2")
    vocabulary = Vocabulary.of(Tokenizer.from_file(str(path)))
    tokens = shortest(vocabulary)
    found = count(tokens)
    hello = covers(b"hello", set(tokens))
    print(f"'hello': {hello.count} covers, {hello.forwards} drafter passes\n")
    heads = ("mean", "deviation", "minimum", "25 %", "median", "75 %", "maximum")
    print(f"{'':22}" + "".join(f"{head:>11}" for head in heads))
    columns = {
        "length": [len(data) for data in tokens],
        "covers": [one.count for one in found],
        "drafter passes": [one.forwards for one in found],
    }
    for name, values in columns.items():
        line(name, summary(values))
        if name in PAPER:
            line("  the paper", PAPER[name])
    (least, expected, greatest), equal, room = means(vocabulary)
    print(
        f"\n{equal} tokens have the greatest length, and {room} of them are among the "
        f"{len(tokens):,}: by their choice the mean of the covers is {least:.2f} to {greatest:.2f} "
        f"({expected:.2f} on average)"
    )


def line(name: str, values: Sequence[float]) -> None:
    print(f"{name:22}" + "".join(f"{value:11,.2f}" for value in values))


if __name__ == "__main__":
    main()
