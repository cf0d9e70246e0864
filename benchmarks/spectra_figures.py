"""SPECTRA's figures 3 and 6 and its table 2, counted with a model that runs here.

    python benchmarks/spectra_figures.py -o spectra.html
    python benchmarks/spectra_figures.py MODEL --prompts prompts.jsonl -o spectra.html

Table 2: tokens per pass of the ablations, and of our own choices. Figure 3: accepted share of the
guessed nodes by source, with the cap on guesses lifted. Figure 6: accepted tokens against passes,
summed over all prompts. Greedy, fixed budgets that hold the whole pool and all guesses: every
count is exact and repeatable. Prompts are `draftsmith bench`'s files; without one, story openings.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from draftsmith import builtin
from draftsmith.bench import suites
from draftsmith.bench.charts import Bar, Frame, bars, ticks
from draftsmith.bench.run import encoded
from draftsmith.bench.style import CSS
from draftsmith.core.budget import FixedBudget
from draftsmith.core.drafter import Drafter
from draftsmith.core.loop import start, step
from draftsmith.core.result import Stats, total
from draftsmith.core.sampling import Dice, Law
from draftsmith.core.session import EndTokens, Session
from draftsmith.drafters.registry import parse
from draftsmith.drafters.spectra import Spectra
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner
from draftsmith.text import tokenizer as text

ARMS = {
    "SPECTRA-CORE": "spectra",
    "without forward": "spectra(forward=False)",
    "without backward": "spectra(backward=False)",
    "without sub-n-grams": "spectra(sub_ngrams=False)",
    "backward guess last": "spectra(backward_first=False)",
    "staggered positions": "spectra(positions=staggered)",
    "tau = 1": "spectra(tau=1)",
    "tau = 1, staggered": "spectra(tau=1, positions=staggered)",
    "Lookahead-like": "lookahead",
    "Lookahead-like, own": "lookahead(positions=own)",
    "prompt lookup": "prompt_lookup",
    "copyspec": "copyspec",
}
"""Rows of table 2 and our own choices, by what one types."""

OPENINGS = (
    "Once upon a time, there was a little girl named Lily.",
    "One day, a boy named Tom went to the park with his dog.",
    "The big red ball rolled down the hill and",
    "Sara and Ben were playing in the garden when they saw a",
    "There was a small bird who could not fly.",
    "Mom said it was time for bed, but Max did not want to sleep.",
    "In the forest there lived a bear and a rabbit who were friends.",
    "Grandma baked a cake for the birthday party and",
)

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>SPECTRA</title>
<style>{css}</style></head><body><main><h1>SPECTRA on {model}</h1>
<div class="card"><h3>Tokens per pass (table 2)</h3>{table}</div>
<div class="card"><h3>Accepted share by source, no cap on guesses (figure 3)</h3>{sources}</div>
<div class="card"><h3>Accepted tokens against passes (figure 6)</h3>{passes}</div>
</main></body></html>
"""


def decode(
    model: LoadedModel, ids: Sequence[int], drafter: Drafter, tokens: int, ends: Sequence[int]
) -> tuple[list[int], Stats, list[int]]:
    """The greedy answer, its stats, and how many tokens were accepted in each pass."""
    session = Session(
        ids,
        drafter=drafter,
        budget=FixedBudget(drafter.preferred_width()),
        law=Law((), greedy=True),
        chance=Dice.seeded(0),
        vocab_size=model.vocab_size,
        limit=min(tokens, (model.context_length or 1 << 30) - len(ids)),
        stop_rules=[EndTokens(ends)],
    )
    runner = Runner(model)
    start(session, runner)
    accepted = []
    while not session.finished:
        accepted.append(len(step([session], runner)[0].tokens) - 1)
    return session.ids[session.prompt_length :], session.stats, accepted


def cumulated(passes: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    """Accepted tokens of all prompts together after each pass."""
    points, sum_ = [(0.0, 0.0)], 0
    for number in range(max(map(len, passes))):
        sum_ += sum(each[number] for each in passes if number < len(each))
        points.append((number + 1.0, float(sum_)))
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(builtin.path()))
    parser.add_argument("--prompts", action="append", default=[])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--first", type=int, default=None, help="only so many prompts")
    parser.add_argument("--arm", action="append", default=[], help="one more drafter to count")
    parser.add_argument("-o", "--output", type=Path, default=None)
    args = parser.parse_args()
    model = load(args.model, dtype="float32")
    if args.prompts:
        records = [record for name in args.prompts for record in suites.read(name).records]
        prompts = [encoded(model, record) for record in records]
    else:
        prompts = [text.encode_prompt(model.tokenizer, opening, {}) for opening in OPENINGS]
    prompts = prompts[: args.first]
    end = getattr(model.generation_config, "eos_token_id", None)
    ends = end if isinstance(end, list) else [] if end is None else [end]

    arms = {name: parse(spec) for name, spec in ARMS.items()}
    arms |= {spec: parse(spec) for spec in args.arm}
    answers = [decode(model, ids, parse("none"), args.tokens, ends)[0] for ids in prompts]
    print(f"{len(prompts)} prompts, {sum(map(len, answers))} tokens, torch {torch.__version__}")
    rates: dict[str, float] = {}
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, drafter in arms.items():
        runs = [decode(model, ids, drafter, args.tokens, ends) for ids in prompts]
        assert [run[0] for run in runs] == answers, f"{name} changed an answer"
        stats = total([run[1] for run in runs])
        rates[name] = stats.tokens_per_pass
        curves[name] = cumulated([run[2] for run in runs])
        print(f"{name:24} {stats.tokens_per_pass:6.3f} tokens a pass, "
              f"{stats.drafted / stats.passes:6.1f} guessed nodes, "
              f"{stats.probes / stats.passes:5.1f} probes", flush=True)  # fmt: skip

    lifted = replace(Spectra(), G=Spectra().W + 1)  # W forward guesses at most, and one backward
    stats = total([decode(model, ids, lifted, args.tokens, ends)[1] for ids in prompts])
    shares = {
        name: (entry.accepted, entry.drafted) for name, entry in sorted(stats.by_source.items())
    }
    for name, (accepted, drafted) in shares.items():
        print(f"{name:24} {accepted:6} of {drafted:7} nodes accepted, {accepted / drafted:.1%}")
    if args.output is not None:
        args.output.write_text(draw(Path(args.model).name, rates, shares, curves), "utf-8")


def draw(
    model: str,
    rates: dict[str, float],
    shares: dict[str, tuple[int, int]],
    curves: dict[str, list[tuple[float, float]]],
) -> str:
    """The page with the three figures."""
    colour = {name: f"a{i % 10}" for i, name in enumerate(rates)}
    table = [Bar(name, f"{v:.2f}", [(v, colour[name], f"{v:.3f}")]) for name, v in rates.items()]
    sources = []
    for i, (name, (accepted, drafted)) in enumerate(shares.items(), start=1):
        said = f"{accepted / drafted:.1%} of {drafted:,}"
        sources.append(Bar(name, said, [(accepted / drafted, f"a{i}", said)]))
    ends = [points[-1] for points in curves.values()]
    frame = Frame("passes", "accepted tokens", ticks(max(x for x, _ in ends)),
                  ticks(max(y for _, y in ends)))  # fmt: skip
    for name, points in curves.items():
        frame.path(points, colour[name])
    return PAGE.format(
        css=CSS,
        model=model,
        table=bars(table, "tokens per pass"),
        sources=bars(sources, "accepted share of guessed nodes by source"),
        passes=frame.draw("accepted tokens of all prompts against passes"),
    )


if __name__ == "__main__":
    main()
