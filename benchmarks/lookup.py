"""The fastest setting of transformers' prompt lookup on this machine."""

from __future__ import annotations

from pathlib import Path

from benchmarks.shared import draftsmith
from draftsmith.drafters.registry import parse
from draftsmith.lab.bench.cost import CostTable
from draftsmith.lab.bench.encoding import Encoding
from draftsmith.lab.bench.estimate import predict
from draftsmith.lab.bench.suites import read
from draftsmith.lab.bench.sweep import Replayer, sweep

GRID = [(tokens, ngram) for tokens in (3, 4, 5, 7, 10, 15, 20) for ngram in (1, 2, 3, 4)]
"""Settings to try: tokens of a draft, and the longest n-gram to look up."""


def fastest(answers: Path, cost: CostTable) -> str:
    """Return the setting that is fastest under `cost`, replayed on plain answers."""
    drafters = [parse(f"prompt_lookup(tokens={tokens}, max={ngram})") for tokens, ngram in GRID]
    done = sweep(read(answers).records, drafters, Replayer(Encoding())).done
    found = {}
    for drafter, setting in zip(drafters, GRID, strict=True):
        name = str(drafter)
        one = predict([each.replay for each in done if each.drafter == name], cost, None, name)
        # By passes alone, because the time of drafting depends on the implementation.
        found[setting] = one.tokens_per_pass / one.pass_cost
    return "tokens={},ngram={}".format(*max(found, key=lambda setting: found[setting]))


def measured_cost(model: str, dtype: str, threads: int, file: Path, quick: bool) -> CostTable:
    """Return the cost of passes, measured by `draftsmith bench cost` unless the file exists."""
    if not file.is_file():
        words = ["bench", "cost", model, "--dtype", dtype, "--threads", threads, "--batches", "1"]
        how = ["--contexts", "64", "--repeats", "1"] if quick else ["--contexts", "128,512,1024"]
        draftsmith(*words, *how, "-o", file)
    return CostTable.load(file)
