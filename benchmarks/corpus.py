"""What a corpus costs: building its suffix array, opening it, looking things up.

    python -m benchmarks.corpus --tokens 20000000 --build      time and peak memory of the sorting
    python -m benchmarks.corpus --tokens 100000000             look-ups in an index of that size

The texts are synthetic: documents made of phrases from a fixed store, so that matches of all
lengths occur, and of single ids whose frequencies fall like those of words.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from draftsmith.corpus.datastore import Datastore
from draftsmith.corpus.index import write_index

VOCABULARY = 150_000
DOCUMENT = 500
PHRASES, LONGEST = 200_000, 40


def documents(tokens: int, seed: int = 0) -> Iterator[np.ndarray[Any, Any]]:
    """Documents of DOCUMENT ids, `tokens` in all with their separators."""
    rng = np.random.default_rng(seed)
    store = words(rng, PHRASES * LONGEST // 2)
    left = tokens
    while left > 1:
        size = min(DOCUMENT, left - 1)
        parts: list[np.ndarray[Any, Any]] = []
        have = 0
        while have < size:
            length = int(rng.integers(2, LONGEST))
            # Half of a document was seen elsewhere; some phrases far more often than others.
            start = int(len(store) * rng.random() ** 4)
            seen = rng.random() < 0.5
            part = store[start : start + length] if seen else words(rng, length)
            parts.append(part)
            have += len(part)
        yield np.concatenate(parts)[:size]
        left -= size + 1


def words(rng: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
    """Ids with falling frequencies."""
    return (VOCABULARY * rng.random(count) ** 6).astype(np.int64)


def queries(store: Datastore, count: int, seed: int = 1) -> Iterator[list[int]]:
    """Ends of texts: half of them somewhere in the corpus, half made up."""
    rng, made = random.Random(seed), np.random.default_rng(seed)
    texts = np.memmap(store.folder / "tokens.bin", ">u4", "r")
    for number in range(count):
        at = rng.randrange(len(texts) - 64)
        ids = texts[at : at + 64].tolist() if number % 2 else words(made, 64).tolist()
        yield [i for i in ids if i < VOCABULARY]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="What a corpus costs.")
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--build", action="store_true", help="only build, and measure that")
    parser.add_argument("--folder", type=Path, help="keep the corpus here, or use the one there")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="corpus-"))
    try:
        if not (folder / "corpus.json").exists():
            build(folder, options.tokens)
        if not options.build:
            look_up(folder, options.queries)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)


def build(folder: Path, tokens: int) -> None:
    """Make documents up and index them."""
    made = 0.0

    def timed() -> Iterator[np.ndarray[Any, Any]]:
        nonlocal made
        begun = perf_counter()
        for document in documents(tokens):
            made += perf_counter() - begun
            yield document
            begun = perf_counter()

    begun = perf_counter()
    write_index(folder, timed(), vocabulary="synthetic", examples=0, model="synthetic")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"indexed {tokens:,} tokens in {perf_counter() - begun - made:.1f} s (and made them up in "
        f"{made:.1f} s); peak memory {peak:.2f} GB, mapped files included"
    )


def look_up(folder: Path, count: int) -> None:
    """Open the corpus and time its look-ups, each a draft of 64 nodes."""
    begun = perf_counter()
    store = Datastore.open(folder)
    print(f"opened and verified {len(store):,} tokens in {perf_counter() - begun:.2f} s")
    asked = list(queries(store, count))
    for name, ask in (
        ("find", store.find),
        ("draft", lambda ids: (trie := store.follow(ids)) and trie.draft(64, "retrieval")),
        ("branches", lambda ids: (trie := store.follow(ids)) and trie.branches(15)),
    ):
        times = []
        for ids in asked:
            begun = perf_counter()
            ask(ids)
            times.append(perf_counter() - begun)
        times.sort()
        print(
            f"{name}: median {1e6 * median(times):.0f} µs, "
            f"p99 {1e6 * times[int(0.99 * len(times))]:.0f} µs, of {count} look-ups"
        )
    lengths = [match.length if (match := store.find(ids)) else 0 for ids in asked]
    print(
        f"matches: mean length {sum(lengths) / count:.1f}, none for {lengths.count(0) / count:.0%}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
