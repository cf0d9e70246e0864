"""Half precision beside float32: how many answers differ for its rounding, and how many for ours.

SPECTRA's appendix F: a pass over several positions rounds differently from one over a single
position, so in bfloat16 near ties can fall either way. Plain decoding in bfloat16 differs from
float32 for the same reason; the two counts belong side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.bench.arms import Ours, Spec
from draftsmith.bench.generations import first_difference
from draftsmith.bench.run import Plan, asks
from draftsmith.drafters.registry import parse
from draftsmith.errors import LoadError


@dataclass(frozen=True, slots=True)
class Difference:
    """How often one way of decoding gave another answer than another way."""

    of: str
    than: str
    prompts: int
    differing: int
    median_first: int | None
    """The median first token that differs, among the answers that do."""

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def half(
    full: Plan, low: Plan, drafter: Spec, advance: Callable[[int], None] = lambda _: None
) -> list[Difference]:
    """Answer the prompts of `full` plainly and with `drafter`, in float32 and in half precision.

    `full` and `low` differ in their model's dtype only. Raises LoadError if no prompt fits.
    """
    ways = {}
    for plan in (full, low):
        dtype = str(plan.model.dtype).removeprefix("torch.")
        ways[f"plain, {dtype}"] = Ours(plan.model, Spec("plain", parse("none")))
        ways[f"{drafter.name}, {dtype}"] = Ours(plan.model, drafter)
    answers: dict[str, list[list[int]]] = {label: [] for label in ways}
    for _, ask in asks(full):
        greedy = replace(ask, sampling=replace(ask.sampling, temperature=0.0))
        for label, arm in ways.items():
            answers[label].append(arm.answer(greedy).tokens)
        advance(1)
    exact, ours_exact, plain, ours = ways
    if not answers[exact]:
        raise LoadError("no prompt fits this model")
    pairs = [(plain, exact), (ours, plain), (ours, exact), (ours_exact, exact)]
    return [difference(a, b, answers[a], answers[b]) for a, b in pairs]


def difference(
    of: str, than: str, a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]
) -> Difference:
    """Count the answers in `a` that are not those in `b`."""
    found = [at for x, y in zip(a, b, strict=True) if (at := first_difference(x, y)) is not None]
    middle = sorted(found)[len(found) // 2] if found else None
    return Difference(of, than, len(a), len(found), middle)
