"""One question to two engines, of which one is on the pretended device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.engine.engine import Engine
from draftsmith.engine.result import GenerationResult

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

    def generate(self, prompt: Any, **options: Any) -> list[GenerationResult]:
        """Ask both, assert that they agree, return what the device's answered."""
        return same(self.cpu.generate(prompt, **options), self.device.generate(prompt, **options))
