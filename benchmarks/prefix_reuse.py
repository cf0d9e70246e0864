"""What kept prefixes save: the second of two prompts that begin alike, and a chat of ten turns.

    python -m benchmarks.prefix_reuse           # two minutes on two quiet cores
    python -m benchmarks.prefix_reuse --quick -o /tmp/try

An engine that keeps rows beside one that keeps none, in turn, plainly and greedily. The exit code
is 1 if a turn computes more tokens of its prompt than the row before it lacks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.batch_cost import ids
from benchmarks.paired import ratio
from benchmarks.shared import setup, table
from draftsmith import Engine, builtin
from draftsmith.core.drafter import common_prefix
from draftsmith.engine.result import GenerationResult
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.storage import Finished, write_text

OWN = 32
"""Tokens of a prompt that no other one has."""
TURNS = (
    "Name three animals that live in the sea.", "Which of them is the largest?",
    "What does it eat?", "How long does it live?", "Does it sleep?",
    "Write one sentence about it for a child.", "Now the same sentence with the word 'deep' in it.",
    "Give the sentence a title.", "Name an animal of the desert.",
    "Which of the two would you rather be?",
)  # fmt: skip
MINUTES = 2
"""On two quiet cores."""
TALKS = 2
"""Repetitions of the chat."""
Facts = dict[str, float]
HEADS = ("", "prompt", "not computed before", "computed", "keeping none", "first token, ms",
         "keeping none", "first token, keeping / none")  # fmt: skip


def facts(result: GenerationResult, needed: int) -> Facts:
    """What the prompt of an answer cost, of which so many tokens were not computed before."""
    prompt, stats = len(result.prompt_tokens), result.stats
    computed, first = prompt - stats.reused_tokens, stats.first_token_seconds
    return {"prompt": prompt, "needed": needed, "computed": computed, "first": first}


def keeping(model: LoadedModel) -> list[Engine]:
    """An engine that keeps rows, and one that keeps none."""
    return [Engine(model, drafter="none", prefixes=most) for most in (8, 0)]


def second(engines: Sequence[Engine], shared: int, run: int) -> list[Facts]:
    """The second of two prompts that share so many tokens, by engine."""
    asked = [ids(shared, run) + ids(OWN, 1000 * run + n) for n in (1, 2)]
    found = [[engine.generate(one, max_new_tokens=2, temperature=0) for one in asked][-1]
             for engine in engines[:: 1 if run % 2 else -1]]  # fmt: skip
    return [facts(result, OWN) for result in found[:: 1 if run % 2 else -1]]


def chat(engines: Sequence[Engine], tokens: int) -> list[list[Facts]]:
    """Every turn of one conversation, by engine."""
    talks = [engine.chat(max_new_tokens=tokens, temperature=0) for engine in engines]
    computed, found = list[int](), []
    for turn in TURNS:
        results = [talk.send(turn) for talk in talks]
        new = results[0].prompt_tokens
        needed = len(new) - min(common_prefix(computed, new), len(new) - 1)
        computed = [*new, *results[0].tokens[:-1]]  # the last one was never computed
        found.append([facts(result, needed) for result in results])
    return found


def line(what: str, runs: Sequence[Sequence[Facts]]) -> list[str]:
    """Of the same prompt, or one like it, several times over."""
    kept, none = zip(*runs, strict=True)
    times = ratio([one["first"] for one in kept], [one["first"] for one in none])
    counts = (kept[0]["prompt"], kept[0]["needed"], max(one["computed"] for one in kept),
              none[0]["computed"])  # fmt: skip
    ms = (f"{1e3 * seconds:.1f}" for seconds in (times.a_seconds, times.b_seconds))
    return [what, *map(str, counts), *ms, str(times)]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, print and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/load"))
    parser.add_argument("-m", "--model", default=builtin.SMOLLM2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shared", type=int, default=2000, help="tokens that two prompts share")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of a chat's answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="2 runs, answers of 8 tokens")
    args = parser.parse_args(argv)
    if args.quick:
        args.runs, args.tokens = 2, 8
    torch.set_num_threads(args.threads)
    print(f"About {MINUTES:.0f} minutes, less with --quick.", flush=True)
    model = load(args.model, dtype=args.dtype, prepack=True)
    keeping(model)[1].generate(ids(args.shared, 99), max_new_tokens=args.tokens)  # warms up
    done, key = Finished(args.output / "prefix_reuse.jsonl"), [args.model, args.dtype, args.threads]
    pairs, talks = [], []
    for run in range(args.runs):
        own = [*key, "pair", args.shared, run]
        pairs.append(done.recall(own, lambda run=run: second(keeping(model), args.shared, run)))
    for run in range(TALKS):
        own = [*key, "chat", args.tokens, run]
        talks.append(done.recall(own, lambda: chat(keeping(model), args.tokens)))
    rows = [line(f"second of two that share {args.shared:,}", pairs)]
    turns = zip(*talks, strict=True)
    rows += [line(f"turn {number}", turn) for number, turn in enumerate(turns, 1)]
    said = f"{setup()}. {args.model}, {args.dtype}.\n\n{table(HEADS, rows)}"
    print(said)
    write_text(args.output / "prefix_reuse.md", said)
    every = [both[0] for one in (pairs, *talks) for both in one]
    sys.exit(any(one["computed"] > one["needed"] for one in every))


if __name__ == "__main__":
    main()
