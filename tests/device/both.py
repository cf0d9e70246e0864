"""One question to two engines, of which one is on the pretended device."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pretended
import torch
from accelerate import dispatch_model
from torch import Tensor

from architectures import prompt
from draftsmith import accelerate
from draftsmith.engine.engine import Engine
from draftsmith.engine.result import GenerationResult

REAL = os.environ.get("DRAFTSMITH_TEST_DEVICE", "")
"""A real device that is asked instead of the simulated one."""
IDS = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8] * 3
MANY = [prompt(9, 1), prompt(30, 2), prompt(17, 3), prompt(9, 1)]
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {
    "temperature": 0.9, "top_k": 1 if REAL else 30, "top_p": 0.95, "min_p": 0.01, "seed": 3,
    "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "logit_bias": {5: -1.0},
}  # fmt: skip
CUT: dict[str, Any] = {
    name: SAMPLED[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed")
}
"""Samples that are drawn on the device after all nodes."""
DRAFTERS = [
    "none",
    "copyspec(gamma=2)",
    "prompt_lookup",
    "longest_match",
    "auto",
    "pld_plus",
    "pld_plus(average=3, threshold=-0.9)",
    "pld_plus(rank=attention, heads=((0, 1), (1, 2)))",
    "spectra(N=3, W=4, G=4)",
    "spectra(pool=False)",
    "lookahead(N=3, W=4, G=4)",
    "copyspec(gamma=6)+auto",
    "retrieval(corpus=CORPUS)",
    "spectra(N=3, W=4, G=4, corpus=CORPUS)",
    "sdsat(k=3)",
    "sdsat(k=3, tree=6)",
    "sdsat(k=2, passes=1)",
    "draft_model(model=FOLDER, tokens=3)",
    "draft_model(model=FOLDER, tokens=3, reproducible=True)",
]
SMALL, BYTES = 300, 259
"""Vocabularies of draft models: with words of its own, and of single bytes, as slrs wants it."""


Answer = GenerationResult | Sequence[Any]


def flat(answer: Answer) -> list[GenerationResult]:
    """The results of any call of `generate`."""
    if isinstance(answer, GenerationResult):
        return [answer]
    return [result for part in answer for result in flat(part)]


def same(expected: Answer, got: Answer) -> list[GenerationResult]:
    """Assert equal tokens, finish reasons and pass counts, and that no drafter failed."""
    one, other = flat(expected), flat(got)
    for result in (*one, *other):
        assert not result.stats.drafter_failures, result.notices
    told = [[(r.tokens, r.finish_reason, r.stats.passes) for r in side] for side in (one, other)]
    assert told[0] == told[1]
    return other


@dataclass(frozen=True)
class Both:
    """The same model on the CPU and on a device."""

    cpu: Engine
    device: Engine
    _known: dict[str, Answer] = field(default_factory=dict)

    def generate(self, prompt: Any, **options: Any) -> list[GenerationResult]:
        """Ask both, assert that they agree, return what the device's answered."""
        return same(self.expected(prompt, options), self.device.generate(prompt, **options))

    def expected(self, prompt: Any, options: dict[str, Any]) -> Answer:
        """The CPU's answer, asked for once where the options are plain values."""
        if not all(isinstance(v, str | int | float | list | dict) for v in options.values()):
            return self.cpu.generate(prompt, **options)
        key = repr((prompt, sorted(options.items())))
        if key not in self._known:
            self._known[key] = self.cpu.generate(prompt, **options)
        return self._known[key]


def named(drafter: str, folder: Path) -> str:
    """One of DRAFTERS with the paths of a folder."""
    corpus = repr(str(folder / "corpus"))
    return drafter.replace("CORPUS", corpus).replace("FOLDER", repr(str(folder)))


def on(device: str, model: Any) -> Any:
    return copy.deepcopy(model).to(device)


def mapped(model: Any, first: str, second: str) -> Any:
    """A copy whose later layers, norm and head are on another device, by accelerate's hooks."""
    model = copy.deepcopy(model)
    count, named = model.config.num_hidden_layers, list(model.named_modules())
    (blocks, *_) = (n for n, m in named if isinstance(m, torch.nn.ModuleList) and len(m) == count)
    places: dict[str, str] = {}
    for name, _ in (*model.named_parameters(), *model.named_buffers()):
        owner = name.rpartition(".")[0]
        if owner.startswith(blocks):
            layer = int(owner.removeprefix(f"{blocks}.").split(".")[0])
            places[f"{blocks}.{layer}"] = first if layer < count // 2 else second
        else:
            early = any(part in owner for part in ("embed", "wte", "wpe", "rotary"))
            places[owner] = first if early else second
    head = model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight
    places[next(name for name, module in named if module is head)] = first if tied else second
    return dispatch_model(model, device_map=places, main_device=first)


def same_accelerated(
    plain: Any, model: Any, ids: Tensor, sampling: Sequence[dict[str, Any]]
) -> None:
    """Assert that an accelerated model answers as a plain one does, without a notice."""
    for options in sampling:
        asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, **options}
        torch.manual_seed(0)
        expected = plain.generate(ids, **asked)
        torch.manual_seed(0)
        with accelerate(model) as handle:
            fast = model.generate(ids, **asked)
        assert handle.last_notice is None
        assert torch.equal(expected, fast)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    """What `torch.set_default_device` does, for a while."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def strictly() -> Iterator[None]:
    """On the simulated device: like MPS, beside a default device that is another than the model's.

    What is made without naming a device lies on the default one.
    """
    if REAL:
        yield
    else:
        with pretended.like_mps(), default_device("pretend:1"):
            yield
