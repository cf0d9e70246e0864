"""SPECTRA's figures 3 and 6 and its table 2, counted with a model that runs here.

    python -m benchmarks.spectra_figures -o spectra.png
    python -m benchmarks.spectra_figures MODEL --prompts prompts.jsonl -o spectra.png

Table 2: tokens per pass of the ablations, and of our own choices. Figure 3: tokens accepted from
each source, with the cap on guesses lifted. Figure 6: accepted tokens against passes, summed over
all prompts. Greedy, fixed budgets that hold the whole pool and all guesses: every count is exact
and repeatable. Prompts are `draftsmith bench`'s files; without one, story openings. The picture
needs matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.shared import started
from draftsmith import builtin
from draftsmith.bench import suites
from draftsmith.bench.run import encoded
from draftsmith.core.drafter import Drafter
from draftsmith.core.loop import step
from draftsmith.core.session import EndTokens
from draftsmith.core.stats import Stats, total
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
    "tau = 1, without forward": "spectra(tau=1, positions=staggered, forward=False)",
    "tau = 1, without backward": "spectra(tau=1, positions=staggered, backward=False)",
    "tau = 1, without sub-n-grams": "spectra(tau=1, positions=staggered, sub_ngrams=False)",
    "Lookahead-like": "lookahead",
    "Lookahead-like, own": "lookahead(positions=own)",
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

SHOWN = {
    "SPECTRA-CORE": "tau=0.1",
    "tau = 1, staggered": "tau=1, positions=staggered",
}
"""Settings that figure 3 is drawn for, and how it names them."""

COMPARED = ("SPECTRA-CORE", "without forward", "without backward", "without sub-n-grams",
            "tau = 1, staggered", "Lookahead-like")  # fmt: skip
"""Curves of figure 6."""


def decode(
    model: LoadedModel, ids: Sequence[int], drafter: Drafter, tokens: int, ends: Sequence[int]
) -> tuple[list[int], Stats, list[int]]:
    """The greedy answer, its stats, and how many tokens were accepted in each pass."""
    runner = Runner(model)
    limit = min(tokens, (model.context_length or 1 << 30) - len(ids))
    rules = [EndTokens(ends)]
    width = drafter.preferred_width()
    session = started(runner, ids, drafter, width, model.vocab_size, limit, stop_rules=rules)
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
    parser.add_argument("--corpus", help="for figure 3: a folder made by `draftsmith corpus build`")
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
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, drafter in arms.items():
        runs = [decode(model, ids, drafter, args.tokens, ends) for ids in prompts]
        assert [run[0] for run in runs] == answers, f"{name} changed an answer"
        stats = total([run[1] for run in runs])
        curves[name] = cumulated([run[2] for run in runs])
        print(f"{name:24} {stats.tokens_per_pass:6.3f} tokens a pass, "
              f"{stats.drafted / stats.passes:6.1f} guessed nodes, "
              f"{stats.probes / stats.passes:5.1f} probes", flush=True)  # fmt: skip

    shares: dict[str, dict[str, tuple[int, int]]] = {}
    for name in SHOWN:
        drafter = arms[name]
        assert isinstance(drafter, Spectra)
        # W forward guesses at most, one backward, and as many from a corpus.
        lifted = replace(drafter, G=(drafter.W + 1) * (2 if args.corpus else 1), corpus=args.corpus)
        stats = total([decode(model, ids, lifted, args.tokens, ends)[1] for ids in prompts])
        shares[name] = {
            source.removeprefix("spectra."): (entry.accepted, entry.drafted)
            for source, entry in sorted(stats.by_source.items())
        }
        for source, (accepted, drafted) in shares[name].items():
            print(f"{name}, no cap, {source:8} {accepted:6} of {drafted:7} accepted, "
                  f"{accepted / drafted:.1%}, {accepted / stats.tokens:.1%} of tokens")  # fmt: skip
    if args.output is not None:
        draw(args.output, f"{Path(args.model).name}, {len(prompts)} prompts", shares, curves)


def draw(
    path: Path,
    title: str,
    shares: dict[str, dict[str, tuple[int, int]]],
    curves: dict[str, list[tuple[float, float]]],
) -> None:
    """The picture with both figures."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = picture.subplots(1, 2)
    for i, (name, found) in enumerate(shares.items()):
        places = [k + 0.4 * i for k in range(len(found))]
        rates = [accepted / drafted for accepted, drafted in found.values()]
        drawn = left.bar(places, rates, width=0.38, label=SHOWN[name])
        left.bar_label(drawn, [f"{a:,} of {d:,}" for a, d in found.values()], fontsize=8)
    left.set_xticks([k + 0.2 for k in range(len(found))], list(found))
    left.set_ylabel("accepted share of the guessed nodes")
    left.set_title("Figure 3: by source, no cap on guesses")
    left.legend()
    for name in COMPARED:
        right.plot(*zip(*curves[name], strict=True), label=name, linewidth=1.4)
    right.set_xlabel("passes of each prompt")
    right.set_ylabel("accepted tokens, all prompts")
    right.set_title("Figure 6: accepted tokens against passes")
    right.legend(fontsize=8)
    picture.suptitle(title)
    picture.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
