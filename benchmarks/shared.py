"""What the benchmarks share: options, results on disk, one interval, one table, the texts."""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import random
import re
import shlex
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from math import isnan, nan
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import draftsmith
from draftsmith import builtin
from draftsmith.core.cost import LADDER, RecordedCost
from draftsmith.core.sampling import SamplingParams
from draftsmith.lab.bench.arms import build, parse_arm
from draftsmith.lab.bench.generations import Generation, ResultFile
from draftsmith.lab.bench.machine import machine
from draftsmith.lab.bench.records import Record
from draftsmith.lab.bench.report import table as table  # the one table writer
from draftsmith.lab.bench.run import RunPlan, in_turn, measure
from draftsmith.lab.bench.settings import settings
from draftsmith.lab.bench.suites import read, sample
from draftsmith.lab.bench.summary import Interval, interval, paces, speed_ratio
from draftsmith.lab.lines import Finished
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.measure import memory_bytes, versions
from draftsmith.storage import write_text
from draftsmith.text.tokenizer import encode, render_chat

COMMAND = (sys.executable, "-c", "from draftsmith.cli import main; main()")
"""Starts `draftsmith` with the Python that runs the benchmark."""
SOURCE = Path(draftsmith.__file__).parent
"""The code that is measured."""
HELD_OUT = ("pallets+flask", "TheAlgorithms+Python")
"""Repositories that the built-in models were not trained on."""
LIVE = ("prompts/spec_bench.jsonl", "prompts/mt_redundant.jsonl", "prompts/humaneval.jsonl.gz",
        "recorded/commit_edits.jsonl.xz")  # fmt: skip
"""Files of prompts for a general model."""
ROOM = 64
"""Tokens by which an answer may be longer than the real new file."""
RECORDED = RecordedCost({width: 1 + 0.013 * width for width in (0, *LADDER)})
"""Cost of passes where trees must be repeatable: a node costs 0.013 passes."""
RESAMPLES = 1000
"""Draws of pairs for an interval."""
QUICK = "small sizes, only to see that it works"


# ------------------------------------------------------------------------------ the command line


class Options(argparse.ArgumentParser):
    """The options of one benchmark; all have --quick, --threads and --output."""

    def __init__(self, name: str, doc: str | None, data: str | None = None) -> None:
        """`data`: `needed` or `optional` if there is an argument for the folder of texts."""
        title = (doc or "").partition("\n")[0]
        super().__init__(prog=f"python -m benchmarks.{name}", description=title)
        self.name = name
        self._sizes: dict[str, tuple[Any, Any]] = {}
        if data is not None:
            self.add_data(data)
        self.add_argument("--quick", action="store_true", help=QUICK)
        self.add_argument("--threads", type=int, default=2)
        results = Path(__file__).with_name("results")
        self.add_argument("-o", "--output", type=Path, default=results, help="folder for results")

    def add_data(self, kind: str) -> None:
        """Add the argument for the folder of texts, `needed` or `optional`."""
        many, otherwise = (None, "") if kind == "needed" else ("?", "; without it, built-in texts")
        about = f"folder with prompts/, recorded/, corpora/, tokenizers/{otherwise}"
        self.add_argument("data", type=Path, nargs=many, help=about)

    def add_size(self, flag: str, full: Any, quick: Any, about: str, **more: Any) -> None:
        """Add a number (or several, with `nargs`) that is smaller with --quick."""
        text = f"{about} (default {full}, with --quick {quick})"
        action = self.add_argument(flag, type=more.pop("type", int), help=text, **more)
        self._sizes[action.dest] = full, quick

    def command(self, words: Sequence[str] | None = None) -> str:
        """Return the command as typed, without the folders of the machine that runs it."""
        data = str(getattr(self.parse_args(words), "data", None))
        given = sys.argv[1:] if words is None else words
        typed = ["DATA" if word == data else re.sub(r"(^|=)/.*/", r"\1", word) for word in given]
        return shlex.join(["python", "-m", f"benchmarks.{self.name}", *typed])

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Fill in the sizes that were not given."""
        found, rest = super().parse_known_args(args, namespace)
        for name, (full, quick) in self._sizes.items():
            if getattr(found, name) is None:
                setattr(found, name, quick if found.quick else full)
        return found, rest


Blocks = Generator[str, None, bool | None]
"""Yields blocks of Markdown as they are known; returns whether a promise was broken."""


def run(
    options: Options,
    benchmark: Callable[[argparse.Namespace], Blocks],
    words: Sequence[str] | None = None,
) -> bool:
    """Print what a benchmark yields and write it to NAME.md; return whether a promise was broken.

    The benchmark finds `args.results`, which is stored in NAME.jsonl, so that the same command
    resumes after an interruption. Results of other code are measured again. It may change
    `args.name`.
    """
    args = options.parse_args(words)
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    known = {"threads": args.threads, "machine": machine(), "code": contents(SOURCE), **versions()}
    args.name = options.name
    args.output.mkdir(parents=True, exist_ok=True)
    args.results = Results(args.output / f"{options.name}.jsonl", **known)
    blocks, found = [origin(options.command(words))], benchmark(args)
    print(blocks[0], flush=True)
    while True:
        try:
            blocks.append(next(found))
        except StopIteration as ended:
            return bool(ended.value)
        print(f"\n{blocks[-1]}", flush=True)
        page = "\n\n".join([f"# {args.name}", *blocks]) + "\n"
        write_text(args.output / f"{args.name}.md", page)


def origin(command: str) -> str:
    """Return the lines above all figures: command, machine, versions, date."""
    memory = memory_bytes(torch.device("cpu"))
    where = [machine(), f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"]
    where += [f"{memory / 2**30:.0f} GiB"] if memory else []
    known = ", ".join(f"{name} {number}" for name, number in versions().items())
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    lines = {"Command": f"`{command}`", "Machine": ", ".join(where), "Versions": known,
             "Date": f"{when} UTC"}  # fmt: skip
    return "\n".join(f"- {name}: {value}" for name, value in lines.items())


# --------------------------------------------------------------------- results, intervals, times


def contents(folder: Path) -> str:
    """Return a fingerprint of the Python files in a folder."""
    found = hashlib.sha256()
    for path in sorted(filter(Path.is_file, folder.rglob("*.py"))):
        found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


class Results(Finished):
    """Results by their inputs and the settings of the run, each on disk as soon as it is known."""

    def __init__(self, path: Path, **settings: Any) -> None:
        """`settings`: what all results of this run depend on."""
        super().__init__(path)
        self._settings = settings

    def get(self, key: object) -> Any:
        return super().get([key, self._settings])

    def add(self, key: object, result: object) -> None:
        super().add([key, self._settings], result)


class Answers(NamedTuple):
    """The rows of `draftsmith bench run`, and their file."""

    path: Path
    rows: list[Generation]


def plain_answers(args: argparse.Namespace, model: LoadedModel) -> list[Generation]:
    """Return the model's plain greedy answers to `live`."""
    how = {"max_new_tokens": args.max_new_tokens}
    asked, arms = live(args.data, args.limit), build(model, [parse_arm("none")])
    plan = RunPlan(model, arms, asked, SamplingParams(), **how)
    return answers(args.output, f"{args.name}.plain", plan).rows


def answers(folder: Path, name: str, plan: RunPlan) -> Answers:
    """Answer every prompt by every arm, except those in `folder`/answers/NAME.jsonl.

    Raises OptionError if other code gave those.
    """
    path = folder / "answers" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = ResultFile(path, settings(plan, code=contents(SOURCE)))
    for left_out in measure(plan, file, lambda _: print(".", end="", flush=True)):
        print(f"\n{left_out}")
    print()
    return Answers(path, file.rows)


def over(rows: Sequence[Generation], arm: str, other: str) -> str:
    """Return an arm's tokens per second over another one's, with its interval over prompts."""
    a, b = (paces(row for row in rows if row.arm == name) for name in (arm, other))
    return interval([(a[key], b[key]) for key in a if key in b], speed_ratio).shown("×")


def seconds(rows: Iterable[Generation]) -> list[float]:
    """Return the median seconds of each prompt over its runs, in the order of the ids."""
    return [time for _, (_, time) in sorted(paces(rows).items())]


def ratio(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Return the median of a/b, pair by pair, with its 95 % bootstrap interval over pairs.

    A single pair has no interval.
    """
    found, rng = [x / y for x, y in zip(a, b, strict=True)], random.Random(0)
    if len(found) == 1:
        return Interval(found[0], nan, nan)
    medians = sorted(median(rng.choices(found, k=len(found))) for _ in range(RESAMPLES))
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
    return Interval(median(found), low, high)


def ends(found: Interval) -> tuple[float, float]:
    """Return both ends of an interval; the ratio twice if it has none."""
    return (found.value, found.value) if isnan(found.low) else (found.low, found.high)


def shown(a: Sequence[float], b: Sequence[float]) -> str:
    """Format the ratio with its interval."""
    return ratio(a, b).shown("", 3)


Promise = tuple[str, float | None, Callable[[], Sequence[Sequence[float]]]]
"""Label, largest allowed ratio, and a function that returns the seconds of both arms."""


def promised(promises: Iterable[Promise]) -> tuple[str, bool]:
    """Return a table of ratios, and whether the upper end of an interval breaks a promise.

    Without an interval, the ratio itself must not break it.
    """
    rows, broken = [], False
    for what, most, measured in promises:
        a, b = measured()
        found = ratio(a, b)
        fits = most is None or ends(found)[1] <= most
        broken |= not fits
        verdict = "" if most is None else "kept" if fits else "**broken**"
        both = f"{1e3 * median(a):.1f} / {1e3 * median(b):.1f}"
        rows.append((what, found.shown("", 3), f"{most or ''}", both, verdict))
    return table(("", "first / second", "at most", "ms", ""), rows), broken


def timed(arms: Sequence[Callable[[], object]], runs: int, warmup: int = 1) -> list[list[float]]:
    """Return the seconds of every run of every arm; the arms alternate."""
    for arm in [*arms] * warmup:
        arm()
    seconds: list[list[float]] = [[] for _ in arms]
    for number in range(runs):
        for place in in_turn(range(len(arms)), number):
            begin = perf_counter()
            arms[place]()
            seconds[place].append(perf_counter() - begin)
    return seconds


# ------------------------------------------------------------------------------------- the texts


def live(data: Path, limit: int) -> list[Record]:
    """Return prompts of ten kinds for a general model: `limit` conversations of each."""
    return sample([record for name in LIVE for record in read(data / name).records], limit)


def recorded(data: Path, suite: str) -> list[Record]:
    """Return the recorded answers of a suite, such as `mt_bench`."""
    files = sorted((data / "recorded").glob(f"{suite}.*jsonl*"))
    return [record for file in files for record in read(file).records]


def held_out(data: Path, tokenizer: Any, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield held-out edits with prompt and answer of at most `tokens` tokens, lowest hash first.

    Rows of the corpus with their `repository`, `messages`, `prompt` in ids, and `limit` of tokens.
    """
    rows = []
    for repository in HELD_OUT:
        with lzma.open(data / "corpora" / "edits" / f"{repository}.jsonl.xz", "rt") as lines:
            rows += [{"repository": repository.replace("+", "/"), **json.loads(li)} for li in lines]
    for row in sorted(rows, key=lambda row: (row["commit"], row["path"])):
        messages = builtin.edit_messages(row["path"], row["message"], row["before"])
        prompt = render_chat(tokenizer, messages)
        limit = len(encode(tokenizer, row["after"])) + ROOM
        if len(prompt) + limit <= tokens:
            yield {**row, "messages": messages, "prompt": prompt, "limit": limit}


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Return random token ids below 200, which every vocabulary has."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(10, 200, (count,), generator=generator).tolist()
    return ids


def random_llama() -> Any:
    """Return a random Llama of 100M parameters in bfloat16, with grouped heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=640, intermediate_size=1792, num_hidden_layers=14,
        num_attention_heads=10, num_key_value_heads=5, max_position_embeddings=4096,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()
