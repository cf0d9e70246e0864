"""After every step the cache equals a fresh prefill of the committed ids, whoever drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from architectures import build
from draftsmith.core.budget import FixedBudget
from draftsmith.core.drafter import Drafter
from draftsmith.core.loop import start, step
from draftsmith.core.sampling import Distribution, TorchSampler
from draftsmith.core.sequence import Sequence
from draftsmith.core.target import ModelFacts
from draftsmith.drafters.registry import parse
from draftsmith.model.adaptive import AdaptiveTokens
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner
from draftsmith.model.taps import needs_of
from installed import bare_names
from replica import contents
from scripted import random_trees

SDSAT = ("sdsat(k=4)", "sdsat(k=2, passes=1)", "sdsat(k=3, tree=8)", "copyspec+sdsat(k=3)")
WINDOW = 8
PROMPTS = ([5, 6, 7, 8] * 3, [9], [20, 21, 22, 20, 21, 22, 20])


def fresh_cache(loaded: LoadedModel, ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values per layer of `ids`, computed in one pass by a runner of its own."""
    runner: Any = Runner(loaded)
    row = runner.open([*ids, 3])
    runner.prefill(row)
    assert row.cached == len(ids)
    return contents(runner, row)


def drafters(folder: Path) -> list[Drafter]:
    AdaptiveTokens(tokens=(2,), L=3, objective="improved").save(folder)
    taught = ModelFacts(layers=0, heads=0, name=str(folder))
    return [
        *map(parse, bare_names()),
        *(parse(spec).bind(taught) for spec in SDSAT),
        random_trees(1, nodes=7, near=[8, 5, 6, 7] * 20),
        random_trees(2, nodes=5, probes=3, near=[8, 5, 6, 7] * 20),
    ]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3_text", "bloom"])
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_cache_equals_a_fresh_prefill(architecture: str, greedy: bool, tmp_path: Path) -> None:
    check_cache(architecture, greedy, tmp_path, rewinds=True)


@pytest.mark.parametrize("architecture", ["mistral", "gemma3_text"])
def test_what_is_kept_equals_a_fresh_prefill(architecture: str, tmp_path: Path) -> None:
    assert check_cache(architecture, True, tmp_path, rewinds=False) > 0


def check_cache(architecture: str, greedy: bool, folder: Path, rewinds: bool) -> int:
    """Decode with every drafter; returns how many positions were dropped meanwhile."""
    dropped = 0
    loaded = load(build(architecture))
    most = 3 if loaded.capabilities.packed else 1
    for drafter in drafters(folder):
        runner: Any = Runner(loaded, rewinds=rewinds)
        sequences = [
            Sequence(
                prompt,
                drafter=drafter,
                budget=FixedBudget(9),
                distribution=Distribution((), greedy=greedy),
                sampler=TorchSampler.seeded(4),
                vocab_size=loaded.vocab_size,
                limit=14,
                needs=needs_of(drafter, loaded),
            )
            for prompt in PROMPTS[:most]
        ]
        for sequence in sequences:
            start(sequence, runner)
        while active := [sequence for sequence in sequences if not sequence.finished]:
            step(active, runner)
            for sequence in active:
                row: Any = sequence.row
                assert [*row.ids, *row.pending] == sequence.ids
                assert len(row.pending) == 1
                ours = contents(runner, row)
                for mine, theirs in zip(ours, fresh_cache(loaded, row.ids), strict=True):
                    kept = mine[0].shape[1]
                    assert kept == row.cached or (not rewinds and kept >= WINDOW - 1)
                    dropped += row.cached - kept
                    for a, b in zip(mine, theirs, strict=True):
                        torch.testing.assert_close(a, b[:, -kept:], atol=1e-5, rtol=0)
    return dropped
