"""Arms: the ways of answering a prompt that a live run compares."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from draftsmith.core.drafter import Drafter
from draftsmith.core.sampling import SamplingParams
from draftsmith.core.stats import Stats
from draftsmith.drafters import registry
from draftsmith.engine.engine import Engine
from draftsmith.engine.request import BudgetSpec, checked_budget
from draftsmith.errors import OptionError, UnknownName
from draftsmith.model.loaded import LoadedModel

PEER = "hf:"
"""What the specs of transformers' own generation begin with."""

PEERS: dict[str, dict[str, Any]] = {
    "generate": {},
    "prompt_lookup": {"tokens": 10, "ngram": None},
    "assisted": {"model": None, "tokens": None, "threshold": None},
}
"""Peers and their options; None leaves what transformers chooses."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt in tokens, and how it is to be answered."""

    ids: Sequence[int]
    limit: int
    """Most new tokens."""
    sampling: SamplingParams
    """Temperature, seed and filters; the same for every arm."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One generation by one arm."""

    tokens: list[int]
    seconds: float
    """From the call to the last token."""
    first_token_seconds: float
    passes: int
    finish_reason: str
    stats: Stats | None = None
    """The loop's own record; peers have none."""


class Arm(Protocol):
    """A way of answering, with its name in tables."""

    @property
    def name(self) -> str: ...

    @property
    def drafter(self) -> str:
        """The whole configuration, defaults included."""

    @property
    def budget(self) -> BudgetSpec | None: ...

    @property
    def seeded(self) -> bool:
        """Whether a seed gives the same tokens as with plain decoding."""

    def answer(self, ask: Ask) -> Answer:
        """Generate; the clock runs inside."""


@dataclass(frozen=True, slots=True)
class Spec:
    """An arm as it was typed, checked but without a model."""

    name: str
    drafter: Drafter | None = None
    budget: BudgetSpec = "auto"
    peer: str | None = None
    options: Mapping[str, Any] | None = None


def parse_arm(text: str, budget: BudgetSpec = "auto") -> Spec:
    """`copyspec(gamma=3)`, `auto@8` (a budget of its own), or `hf:prompt_lookup(tokens=10)`.

    Raises UnknownName with a suggestion, or OptionError.
    """
    text = text.strip()
    if text.startswith(PEER):
        return _parse_peer(text)
    text = "".join(text.split())
    if text in PEERS and text not in registry.names():
        raise UnknownName("arm", text, [*registry.names(), *(PEER + p for p in PEERS)])
    spec, marked, own = text.partition("@")
    if marked:
        budget = checked_budget(int(own) if own.isdecimal() else own)  # type: ignore[arg-type]
    try:
        drafter = registry.parse(spec)
    except UnknownName as error:
        if error.kind != "drafter":  # One of its options is unknown.
            raise
        known = [*registry.names(), *(PEER + peer for peer in PEERS)]
        raise UnknownName("arm", error.name, known) from error
    return Spec(text, drafter, budget)


def _parse_peer(text: str) -> Spec:
    name, options = _call(text)
    if name not in PEERS:
        known = [*(PEER + peer for peer in PEERS), *registry.names()]
        raise UnknownName("arm", PEER + name, known)
    for option in options:
        if option not in PEERS[name]:
            raise UnknownName(f"option of {PEER}{name}", option, PEERS[name])
    if name == "assisted" and "model" not in options:
        raise OptionError(f"{text}: give the assistant, e.g. {PEER}assisted(model=FOLDER)")
    for number in ("tokens", "ngram"):
        if number in options and (type(options[number]) is not int or options[number] < 1):
            raise OptionError(f"{text}: {number} must be a number of at least 1")
    # A path on this machine says nothing to a reader elsewhere.
    shown = {k: _short(v) if k == "model" else v for k, v in options.items()}
    listed = ",".join(f"{k}={v}" for k, v in shown.items())
    return Spec(PEER + name + (f"({listed})" if listed else ""), peer=name, options=options)


def _call(text: str) -> tuple[str, dict[str, Any]]:
    """`hf:name(key=value)` → name and options; values may be bare words and paths."""
    name, opened, rest = text.removeprefix(PEER).partition("(")
    if not opened:
        return name, {}
    if not rest.endswith(")"):
        raise OptionError(f"arm {text!r} cannot be read; write it like hf:prompt_lookup(tokens=10)")
    options = {}
    for part in filter(None, rest[:-1].split(",")):
        key, given, value = (piece.strip() for piece in part.partition("="))
        if not given:
            raise OptionError(f"arm {text!r}: name the options, e.g. hf:prompt_lookup(tokens=10)")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return name, options


def _short(source: str) -> str:
    return str(source).rstrip("/").rsplit("/", 1)[-1]


class Ours:
    """One of our drafters, on an engine of its own: what its budget learns stays its own."""

    def __init__(self, model: LoadedModel, spec: Spec) -> None:
        assert spec.drafter is not None
        self.name, self.drafter = spec.name, str(spec.drafter)
        self.budget: BudgetSpec | None = spec.budget
        self.engine = Engine(model, drafter=spec.drafter, budget=spec.budget)
        drafter = self.engine.drafter
        self.seeded = not (drafter.sampled or drafter.shares_noise)

    def answer(self, ask: Ask) -> Answer:
        options = sampling_options(ask.sampling)
        begin = perf_counter()
        result = self.engine.generate(list(ask.ids), max_new_tokens=ask.limit, **options)
        seconds = perf_counter() - begin
        stats = result.stats
        return Answer(
            result.tokens,
            seconds,
            stats.first_token_seconds,
            stats.passes,
            result.finish_reason,
            stats,
        )


def sampling_options(params: SamplingParams) -> dict[str, Any]:
    """The options of a call that fix its law and its draws."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens",
             "seed")  # fmt: skip
    return {name: getattr(params, name) for name in names}


def build(model: LoadedModel, specs: Sequence[Spec]) -> list[Arm]:
    """The arms ready to answer; raises OptionError for two of the same name, or LoadError."""
    from draftsmith.bench.peers import Peer

    names = [spec.name for spec in specs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise OptionError(f"the arm {twice} is there twice; give each --arm once")
    return [Ours(model, spec) if spec.peer is None else Peer(model, spec) for spec in specs]
