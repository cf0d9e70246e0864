"""Real tokenizers beside each other: the tables of docs/vocabularies.md.

    python -m benchmarks.vocabularies ../shared/data

The folder holds `tokenizers/` and `prompts/spec_bench.jsonl`, which asks for summaries of articles
of CNN/DailyMail, the texts of the paper's appendix F. The last line is what the largest pair takes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import permutations
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from draftsmith.bench.suites import read
from draftsmith.text.comparison import PIECE, count
from draftsmith.text.vocab import Vocabulary, intersect

NAMES = ("gpt2", "qwen2", "llama2", "llama3", "mistral-v1", "phi-2", "falcon", "t5-small")
LARGEST = ("qwen2", "llama3")

BEGINS = {"llama2": "<s>", "mistral-v1": "<s>", "llama3": "<|begin_of_text|>"}
"""What these models' own tokenizers put before a text; the files here do not."""
ENDS = {"t5-small": "</s>"}

PAPER = {"gpt2": "yes", "qwen2": "yes", "llama2": "no (vicuna)"}
"""Table 11: is the tokenizer injective?"""

ASKED = "Summarize:"


class Named:
    """A tokenizer and its table."""

    def __init__(self, name: str, data: Path) -> None:
        self.name = name
        self.tokenizer = Tokenizer.from_file(str(data / "tokenizers" / name / "tokenizer.json"))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self.tokenizer)

    def returns(self, text: str) -> bool:
        """Whether the library's own encoding and decoding give a text back."""
        return self._decoded(self._ids(text)) == text

    def returns_shown(self, text: str) -> bool:
        """The same with the special tokens that are added, and shown where they are decoded."""
        added = [BEGINS.get(self.name), ENDS.get(self.name)]
        first, last = ([] if t is None else [self.tokenizer.token_to_id(t)] for t in added)
        return self._decoded([*first, *self._ids(text), *last]) == text

    def returns_inside(self, text: str) -> bool:
        """Whether our encoding of the middle of a text gives it back."""
        return self.vocabulary.bytes_of(self.vocabulary.encode(text)) == text.encode()

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _decoded(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def articles(data: Path) -> list[str]:
    """The articles of Spec-Bench's summaries."""
    records = read(data / "prompts" / "spec_bench.jsonl").records
    asked = [str(r.messages[0]["content"]) for r in records if r.category == "summarization"]
    return [text.removeprefix(ASKED).lstrip() for text in asked]


def injectivity(every: Sequence[Named], texts: Sequence[str]) -> Iterator[str]:
    """Table 11 for our tokenizers, in Markdown."""
    prefixes = [text[:PIECE] for text in texts]
    yield (
        f"| tokenizer | tokens | special | the paper | prefixes of {len(prefixes)} articles | with "
        "added tokens shown | whole articles | middle of a text |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for one in every:
        counts = (
            sum(map(one.returns, prefixes)),
            sum(map(one.returns_shown, prefixes)),
            sum(map(one.returns, texts)),
            sum(map(one.returns_inside, texts)),
        )
        v = one.vocabulary
        cells = (f"{count(v):,}", len(v.special), PAPER.get(one.name, ""), *counts)
        yield f"| {one.name} | {' | '.join(map(str, cells))} |"


def overlaps(every: Sequence[Named]) -> Iterator[str]:
    """|T ∩ D| of all pairs, and its share of T below, in Markdown: a row for each target."""
    yield f"| T ↓ D → | {' | '.join(one.name for one in every)} |"
    yield "|---" * (len(every) + 1) + "|"
    shared = {
        (t.name, d.name): intersect(t.vocabulary, d.vocabulary).size
        for t, d in permutations(every, 2)
    }
    for t in every:
        cells = [
            f"{shared[t.name, d.name]:,} ({shared[t.name, d.name] / count(t.vocabulary):.2f})"
            if d is not t
            else ""
            for d in every
        ]
        yield f"| {t.name} | {' | '.join(cells)} |"


def seconds(data: Path, clock: Callable[[], float] = time.perf_counter) -> float:
    """Tables and intersection of the largest pair, nothing prepared but the two tokenizers."""
    target, drafter = (Named(name, data) for name in LARGEST)
    start = clock()
    intersect(target.vocabulary, drafter.vocabulary)
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", default=Path("../shared/data"))
    data: Path = parser.parse_args().data
    if not (data / "tokenizers").is_dir():
        parser.error(f"no tokenizers in {data}; give the folder with tokenizers/ and prompts/")
    every = [Named(name, data) for name in NAMES]
    print(*injectivity(every, articles(data)), sep="\n")
    print()
    print(*overlaps(every), sep="\n")
    for name, clock in (("elapsed", time.perf_counter), ("of the processor", time.process_time)):
        times = sorted(seconds(data, clock) for _ in range(5))
        took = f"{median(times):.2f} s [{times[0]:.2f}, {times[-1]:.2f}]"
        print(f"\n{' × '.join(LARGEST)}: {took} {name}")


if __name__ == "__main__":
    main()
