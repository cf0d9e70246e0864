"""The fastest setting of transformers' prompt lookup on this machine."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.shared import SOURCE, contents
from draftsmith.drafters.registry import parse
from draftsmith.lab.bench.cost import CostTable, Grid, measure_cost
from draftsmith.lab.bench.encoding import Encoding
from draftsmith.lab.bench.estimate import predict
from draftsmith.lab.bench.machine import linear_layers, machine
from draftsmith.lab.bench.suites import read
from draftsmith.lab.bench.sweep import Replayer, sweep
from draftsmith.lab.fingerprint import fingerprint
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.measure import versions
from draftsmith.storage import digest

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


def measured_cost(model: LoadedModel, folder: Path, quick: bool) -> CostTable:
    """Return the cost of passes, measured unless the folder has one of the same circumstances."""
    known = [fingerprint(model), model.dtype_name, linear_layers(model), torch.get_num_threads(),
             machine(), versions(), contents(SOURCE), quick]  # fmt: skip
    file = folder / f"cost.{digest(known)}.json"
    if not file.is_file():
        contexts, repeats = ((64,), 1) if quick else ((128, 512, 1024), 9)
        grid = Grid(contexts=contexts, repeats=repeats)
        measure_cost(model, grid).save(file)
    return CostTable.load(file)
