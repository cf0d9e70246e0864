"""How well copies are attributed: QuoteSum's quotes against ours, beside PLD+'s table 10.

    python -m benchmarks.quotesum ../shared/data
    python -m benchmarks.quotesum ../shared/data --model Qwen/Qwen2.5-0.5B-Instruct -d pld_plus

The folder holds `prompts/quotesum_dev.jsonl` (see docs/measuring.md). Every answer is the one that
people wrote: its quotes stand in brackets, which are taken away and must be found again. Its tokens
are forced, so no model has to write it; drafting, verification and attribution are the engine's
own. Drafters that look at token ids need no model, and PLD+ gets the states of the one given.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.shared import started
from draftsmith.bench.formats import QUOTE
from draftsmith.bench.replay import ReplayBudget, ReplayTarget
from draftsmith.core.loop import step
from draftsmith.drafters.registry import parse
from draftsmith.engine.attribution import find_copies, runs
from draftsmith.engine.engine import Engine
from draftsmith.storage import Finished

LENGTHS = (2, 5, 8)
"""Shortest copies that count, as in the paper."""

THEIRS = {
    "GPT-4": {2: (0.96, 0.87, 0.90)},
    "Yi-6b (Phukan et al. 2024)": {2: (0.94, 0.99, 0.96)},
    "PLD+(h)": {2: (0.96, 0.96, 0.96), 5: (0.98, 0.85, 0.90), 8: (0.99, 0.70, 0.79)},
}
"""PLD+, table 10: token precision, recall and F1 on QuoteSum's test set."""

Origins = Sequence[int | None]
Encode = Callable[[str], tuple[list[int], list[tuple[int, int]]]]
"""A text → its ids, and which characters each of them stands for."""


@dataclass(frozen=True, slots=True)
class Item:
    """A question with its sources, and an answer of which we know what is quoted."""

    prompt: list[int]
    answer: list[int]
    quoted: list[bool]
    """For each token of the answer."""


@dataclass(frozen=True, slots=True)
class Score:
    """Counts of tokens."""

    both: int
    found: int
    quoted: int

    @property
    def precision(self) -> float:
        return self.both / self.found if self.found else 0.0

    @property
    def recall(self) -> float:
        return self.both / self.quoted if self.quoted else 0.0

    @property
    def f1(self) -> float:
        return 2 * self.both / (self.found + self.quoted) if self.found + self.quoted else 0.0


def unquote(summary: str) -> tuple[str, list[tuple[int, int]]]:
    """`A [ 2 b c ] d` → `A b c d`, and where the quotes are in it."""
    text, quotes, at = "", [], 0
    for match in re.finditer(r"\[\s*\d+\s+(.*?)\s*\]", summary, re.DOTALL):
        text += summary[at : match.start()]
        quotes.append((len(text), len(text) + len(match[1])))
        text += match[1]
        at = match.end()
    return text + summary[at:], quotes


def items(path: Path, encode: Encode, limit: int | None) -> Iterator[Item]:
    """The dev set in ids."""
    for line in path.read_text(encoding="utf-8").splitlines()[:limit]:
        record = json.loads(line)
        numbers = [i for i in range(1, 9) if record[f"source{i}"]]
        sources = "\n\n".join(
            f"[{i}] {record[f'title{i}']}\n{record[f'source{i}']}" for i in numbers
        )
        text, quotes = unquote(record["summary"])
        answer, places = encode(text)
        quoted = [any(a < end and b > begin for begin, end in quotes) for a, b in places]
        question = QUOTE.format(sources=sources, question=record["question"])
        yield Item(encode(f"{question}\nAnswer: ")[0], answer, quoted)


def replayed(item: Item, drafter: str, vocab_size: int) -> Origins:
    """Where each token of the answer is said to be copied from, without a model."""
    made = parse(drafter)
    target, budget = ReplayTarget(item.answer, vocab_size), ReplayBudget().for_drafter(made)
    length = len(item.answer)
    session = started(target, item.prompt, made, length, vocab_size, length, budget=budget)
    while not session.finished:
        step([session], target)
    return [session.origins.get(len(item.prompt) + i) for i in range(len(item.answer))]


def forced(item: Item, drafter: str, engine: Engine) -> Origins:
    """The same with a model that runs, but has its words put into its mouth."""

    def force(ids: Tensor, scores: Tensor) -> Tensor:
        scores.fill_(-torch.inf)
        scores[:, item.answer[ids.shape[1] - len(item.prompt)]] = 0.0
        return scores

    result = engine.generate(
        item.prompt,
        drafter=drafter,
        budget="drafter",
        temperature=0.0,
        max_new_tokens=len(item.answer),
        processors=force,
    )
    if result.tokens != item.answer:
        raise AssertionError("the model did not say what it was forced to say")
    return result.origins


def score(item: Item, origins: Origins, length: int, bare: bool) -> Score:
    """Tokens in our copies against tokens in quotes; `bare`: only what drafts had copied."""
    first = len(item.prompt)
    if bare:
        copies = runs(origins, first, length)
    else:
        copies = find_copies(item.prompt, item.answer, origins, length)
    found = {position - first for copy in copies for position in range(*copy.output)}
    quoted = {i for i, inside in enumerate(item.quoted) if inside}
    return Score(len(found & quoted), len(found), len(quoted))


def total(scores: Iterable[Score]) -> Score:
    """All tokens counted together."""
    parts = [(s.both, s.found, s.quoted) for s in scores]
    return Score(*map(sum, zip(*parts, strict=True)))


def show(name: str, data: Sequence[Item], origins: Sequence[Origins], bare: bool) -> None:
    for length in LENGTHS:
        scores = [score(*pair, length, bare) for pair in zip(data, origins, strict=True)]
        line(name, length, averages(scores), figures(total(scores)))


def figures(score: Score) -> tuple[float, float, float]:
    return score.precision, score.recall, score.f1


def averages(scores: Sequence[Score]) -> tuple[float, float, float]:
    """Means over answers; where nothing was found there is no precision to average."""
    return (
        mean([s.precision for s in scores if s.found] or [0.0]),
        mean([s.recall for s in scores if s.quoted] or [0.0]),
        mean(s.f1 for s in scores),
    )


def line(name: str, length: int, *groups: Sequence[float]) -> None:
    shown = "".join("  " + "".join(f"{value:>7.3f}" for value in values) for values in groups)
    print(f"{name:42} {length:>6}{shown}")


def of_file(path: Path) -> tuple[Encode, int]:
    """A bare tokenizer.json, and how many ids it has."""
    tokenizer = Tokenizer.from_file(str(path))

    def encode(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        made = tokenizer.encode(text, add_special_tokens=False)
        return made.ids, made.offsets

    return encode, tokenizer.get_vocab_size()


def of_model(engine: Engine) -> Encode:
    """A model's own tokenizer."""

    def encode(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        made = engine.model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return made["input_ids"], made["offset_mapping"]

    return encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", default=Path("../shared/data"))
    parser.add_argument("-d", "--drafter", action="append", help="default: those that look at ids")
    parser.add_argument("--model", help="hub id or folder; for drafters that look at its states")
    parser.add_argument("--tokenizer", default="llama2", help="without --model: see tokenizers/")
    parser.add_argument("--limit", type=int, help="answers to take")
    parser.add_argument("--resume", type=Path, help="remember answers here, and go on from them")
    parser.add_argument("--bare", action="store_true", help="count drafted tokens only")
    options = parser.parse_args()
    path = options.data / "prompts" / "quotesum_dev.jsonl"
    if not path.is_file():
        parser.error(f"{path} does not exist; give the folder with prompts/quotesum_dev.jsonl")
    engine = Engine.from_pretrained(options.model) if options.model else None
    if engine is None:
        file = options.data / "tokenizers" / options.tokenizer / "tokenizer.json"
        encode, vocab_size = of_file(file)
    else:
        encode = of_model(engine)
    data = list(items(path, encode, options.limit))
    tokens, quoted = sum(len(i.answer) for i in data), sum(sum(i.quoted) for i in data)
    print(f"{len(data)} answers of the dev set, {tokens} tokens, {quoted} of them quoted")
    print(f"{'':42} {'':>6}  {'mean over answers':>21}  {'over all tokens':>21}")
    print(f"{'':42} {'length':>6}" + 2 * f"  {'P':>7}{'R':>7}{'F1':>7}")
    for name, rows in THEIRS.items():
        for length, values in rows.items():
            line(f"theirs, test set: {name}", length, values)
    all_found = [Score(sum(item.quoted), len(item.answer), sum(item.quoted)) for item in data]
    line("every token called a copy", 1, averages(all_found), figures(total(all_found)))
    finished = Finished(options.resume)
    for drafter in options.drafter or ["copyspec", "prompt_lookup", "longest_match"]:
        if engine is None:
            origins = [replayed(item, drafter, vocab_size) for item in data]
        else:
            origins = [
                finished.recall(
                    [options.model, drafter, item.prompt, item.answer],
                    partial(forced, item, drafter, engine),
                )
                for item in data
            ]
        show(drafter, data, origins, options.bare)


if __name__ == "__main__":
    main()
