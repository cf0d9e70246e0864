"""What sharing passes costs: paired runs, medians, intervals, bytes.

    python -m benchmarks.batch_cost           # everything, about six minutes on two quiet cores
    python -m benchmarks.batch_cost --quick -o /tmp/try
    python -m benchmarks.batch_cost --models edit-7m --dtypes float32 --runs 10

The arms of a pair are whole passes with their commits, after equally many cached tokens, with the
same kernels. A newcomer's prompt goes through the scheduler, beside seven rows that decode. Prints
and writes one line per promise; the exit code is 1 if the upper end of an interval breaks one. The
same command goes on after an interruption; another folder begins anew.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from benchmarks.paired import Ratio, in_turn, ratio
from benchmarks.shared import setup, table
from draftsmith import Engine
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.engine.jobs import Job
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner
from draftsmith.storage import Finished, write_text

WIDE = 32
"""Tokens that the one row drafts."""
SPARE = 64
"""Slots a row that memory may have beside a tenth more than its tokens need."""
USUAL = 30
"""Steps of the rows that decode before each newcomer."""

Measure = Callable[[], Ratio]
MINUTES = 1.5
"""Of all promises of a model and type, the mean of the two models on two quiet cores."""
KEY = ("model", "dtype", "what", "context", "runs", "threads", "prepack")
HEADS = ("", "", "95 % interval", "at most", "first / second", "")


def ids(count: int, seed: int) -> list[int]:
    """Ids that every vocabulary has."""
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(10, 200, (count,), generator=generator).tolist()
    return found


def steps(model: LoadedModel, contexts: Sequence[int], drafted: int = 0) -> Callable[[], Runner]:
    """A step of rows with so many cached tokens each; the middle one may draft, in vain."""
    runner = Runner(model)
    rows = [runner.open(ids(context + 1, seed)) for seed, context in enumerate(contexts)]
    for row in rows:
        runner.prefill(row)
    drafts = [EMPTY] * len(rows)
    if drafted:
        drafts[len(rows) // 2] = Draft.chain([11 + i for i in range(drafted)], "bench")

    def step() -> Runner:
        runner.forward(rows, drafts)
        runner.commit(rows, [()] * len(rows), [[12]] * len(rows))
        return runner

    return step


def newcomers(model: LoadedModel, context: int, prompt: int, runs: int) -> Ratio:
    """Slow steps of seven rows while a newcomer's prompt is read, over their usual ones before.

    By newcomer the 95th percentile over the median.
    """
    engine = Engine(model, drafter="none", prefixes=0)
    scheduler = engine.scheduler

    def job(length: int, limit: int, seed: int) -> Job:
        given = {"max_new_tokens": limit, "min_new_tokens": limit, "temperature": 0}
        made = engine.prepare(given).job(ids(length, seed))
        scheduler.add(made)
        return made

    def timed() -> float:
        begin = perf_counter()
        scheduler.step()
        return perf_counter() - begin

    neighbours = [job(context, (1 + runs) * (USUAL + prompt // 8), seed) for seed in range(7)]
    while not all(one.session.generated for one in neighbours):
        scheduler.step()
    slow, usual = [], []
    for run in range(runs):
        usual.append(median(timed() for _ in range(USUAL)))
        late, found = job(prompt, 2, 100 + run), []
        while not late.session.generated:
            found.append(timed())
        slow.append(sorted(found)[int(0.95 * len(found))])
        scheduler.abort([late])
    if any(one.over for one in neighbours):
        sys.exit("a neighbour's answer ended before the last newcomer's prompt was read")
    scheduler.abort(neighbours)
    return ratio(slow, usual)


def memory(model: LoadedModel, contexts: Sequence[int], passes: int = 64) -> Ratio:
    """Bytes held for keys and values over those of the tokens, at the worst of so many passes.

    `SPARE` slots a row are taken off first.
    """
    step, worst = steps(model, contexts), []
    for count in range(1, passes + 1):
        runner = step()
        kept = runner._memory  # type: ignore[attr-defined]
        row = min(kept._rows, key=lambda row: row.cached)
        token = sum(t.nbytes for both in kept.contents(row) for t in both) / row.cached
        held = kept.held() - SPARE * len(contexts) * token
        worst.append((held, token * (sum(contexts) + count * len(contexts))))
    held, needed = max(worst, key=lambda one: one[0] / one[1])
    return Ratio(*[held / needed] * 3, held / 2**20, needed / 2**20, passes)


def promises(
    model: LoadedModel, args: argparse.Namespace
) -> Iterator[tuple[str, float | None, Measure]]:
    """What is compared, the most that the ratio may be, and how it is found."""
    context = args.context

    def pair(drafted: int, first: Sequence[int], second: Sequence[int]) -> Measure:
        return lambda: ratio(
            *in_turn([steps(model, first, drafted), steps(model, second)], args.runs, warmup=2)
        )

    for rows in (8, 32):
        what = f"{rows} plain rows of equal length / one row"
        yield what, None, pair(0, [context] * rows, [context])
    ragged = [context * n // 4 for n in range(1, 9)]
    what = f"8 plain rows of {ragged[0]} to {ragged[-1]} tokens / 8 of equal length"
    yield what, None, pair(0, ragged, [context * 9 // 8] * 8)
    most = 2.5 if model.dtype == torch.float32 else None
    what = f"one of 8 drafts {WIDE} / 8 plain rows"
    yield what, most, pair(WIDE, [context] * 8, [context] * 8)
    what = f"a newcomer's prompt of {args.newcomer:,} tokens: neighbours' slow steps / usual ones"
    count = max(1, args.runs // 6)
    yield what, 2.5, lambda: newcomers(model, context, args.newcomer, count)
    uneven = [max(1, args.newcomer >> n) for n in range(8)]
    what = f"bytes of 8 rows of {uneven[-1]} to {uneven[0]:,} tokens / their tokens'"
    yield what, 1.1, lambda: memory(model, uneven)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, print and write all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/load"))
    parser.add_argument("--models", nargs="+", default=["edit-7m", "smollm2"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--newcomer", type=int, default=2000, help="tokens of its prompt")
    parser.add_argument("--runs", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="float32, 6 runs after 64 tokens")
    parser.add_argument(
        "--prepack", action="store_true", help="lay linear layers out, as engines do"
    )
    args = parser.parse_args(argv)
    if args.quick:
        args.dtypes, args.runs, args.context = ["float32"], 6, 64
    torch.set_num_threads(args.threads)
    done = Finished(args.output / "batch_cost.jsonl")
    laid = "laid out once" if args.prepack else "as loaded"
    said = [f"{setup()}. {args.runs} paired runs, linear layers {laid}.\n"]
    print(
        said[0],
        f"\nAbout {MINUTES * len(args.models) * len(args.dtypes) * args.runs / 48:.0f} minutes.",
    )
    broken = False
    for name in args.models:
        for dtype in args.dtypes:
            model = load(name, dtype=dtype, prepack=args.prepack)
            if not model.capabilities.packed:
                sys.exit(f"{name} in {dtype} does not pack: {model.capabilities.reasons}")
            print(f"{name}, {dtype}", flush=True)
            lines = []
            for what, most, measure in promises(model, args):
                key = vars(args) | {"model": name, "dtype": dtype, "what": what}
                key = {name: key[name] for name in KEY}
                if key not in done:
                    done.add(key, key | {"found": asdict(measure())})
                found = Ratio(**done[key]["found"])
                fits = most is None or found.high <= most
                broken |= not fits
                unit, scale = ("MiB", 1.0) if what.startswith("bytes") else ("ms", 1e3)
                both = f"{scale * found.a_seconds:.1f} / {scale * found.b_seconds:.1f} {unit}"
                verdict = "" if most is None else "kept" if fits else "**broken**"
                value, _, interval = str(found).partition(" ")
                limit = "" if most is None else f"{most:g}"
                lines.append((what, value, interval, limit, both, verdict))
                print(f"  {verdict or 'reported':10} {what:72} {found}  {both}", flush=True)
            said.append(f"## {name}, {dtype}, {args.context} cached tokens a row\n")
            said.append(table(HEADS, lines))
    write_text(args.output / "batch_cost.md", "\n".join(said))
    sys.exit(broken)


if __name__ == "__main__":
    main()
