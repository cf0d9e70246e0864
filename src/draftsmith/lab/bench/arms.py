"""Arms by name: the ways of answering a prompt that a live run compares."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from draftsmith.core.cost import CostCurve, RecordedCost
from draftsmith.core.drafter import Drafter
from draftsmith.drafters import registry
from draftsmith.engine.drafting import BudgetSpec, checked_budget
from draftsmith.engine.engine import Engine
from draftsmith.errors import DrafterError, OptionError, UnknownName
from draftsmith.lab.bench import peers
from draftsmith.lab.bench.answer import Answer, Ask
from draftsmith.model.loaded import LoadedModel

_SPACE = re.compile(r"""('[^']*'|"[^"]*")|\s+""")
"""Space between the words of a specification; or a quoted text, as the group."""


@dataclass(frozen=True, slots=True)
class Spec:
    """An arm as it was typed, checked but without a model."""

    name: str
    drafter: Drafter | None = None
    budget: BudgetSpec = "auto"
    peer: peers.Way | None = None


def parse_arm(text: str, budget: BudgetSpec = "auto") -> Spec:
    """Parse `copyspec(gamma=3)`, `auto@8` (with its own budget), or `hf:prompt_lookup(tokens=10)`.

    Raises UnknownName with a suggestion, or OptionError.
    """
    text = text.strip()
    known = [*registry.names(), *(peers.PREFIX + peer for peer in peers.PEERS)]
    if text.startswith(peers.PREFIX):
        name, peer = peers.parse(text, known)
        return Spec(name, peer=peer)
    text = _SPACE.sub(lambda found: found[1] or "", text)
    spec, marked, own = text.rpartition("@")
    if ")" in own or not marked:  # an address within an option
        spec = text
    else:
        try:
            budget = checked_budget(own)
        except OptionError as error:
            raise OptionError(f"arm {text!r}: after @, {error}") from None
    try:
        return Spec(text, registry.parse(spec), budget)
    except UnknownName as error:
        if error.kind != "drafter":  # one of its options is unknown
            raise
        raise UnknownName("arm", error.name, known) from error


SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens",
           "seed")  # fmt: skip
"""Options of a call that fix its distribution and its random numbers."""


class Ours:
    """One of our drafters, on an engine of its own, so that its budget learns alone."""

    def __init__(self, model: LoadedModel, spec: Spec, cost: CostCurve | None = None) -> None:
        assert spec.drafter is not None
        self.name, self.drafter = spec.name, str(spec.drafter)
        self.budget: BudgetSpec | None = spec.budget
        self.engine = Engine(model, drafter=spec.drafter, budget=spec.budget, cost=cost, prefixes=0)
        drafter = self.engine.drafter
        # Whether a seed gives the same tokens as with plain decoding.
        self.seeded = not (drafter.sampled or drafter.shares_noise)

    def answer(self, ask: Ask) -> Answer:
        options = {name: getattr(ask.sampling, name) for name in SAMPLED}
        begin = perf_counter()
        options |= {"max_new_tokens": ask.limit, "processors": ask.dictated}
        result = self.engine.generate(list(ask.ids), **options)
        seconds = perf_counter() - begin
        stats = result.stats
        # Otherwise the plain fallback would be measured as this drafter's.
        if stats.drafter_failures or stats.failed_passes:
            raise DrafterError(result.notices[-1])
        first, passes = stats.first_token_seconds, stats.passes
        return Answer(result.tokens, seconds, first, passes, result.finish_reason, stats)


Arm = Ours | peers.Peer
"""A way of answering: its name in tables, its drafter with all options, its budget."""


def build(model: LoadedModel, specs: Sequence[Spec], cost: RecordedCost | None = None) -> list[Arm]:
    """Make the arms; raises OptionError for two of the same name, or LoadError.

    `cost` replaces what automatic budgets learn from the passes of each arm.
    """
    names = [spec.name for spec in specs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise OptionError(f"the arm {twice} was given twice; give each --arm once")
    return [
        Ours(model, spec, cost) if spec.peer is None else peers.Peer(model, spec.name, spec.peer)
        for spec in specs
    ]
