"""transformers' own generation as arms: same weights, dtype, threads, prompts, distribution.

Peers run as fast as they can: only tokens and their times are recorded, and options that are not
given have transformers' defaults. docs/measuring.md lists which of them keep the target's output.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any

import torch

from draftsmith.engine.request import BudgetSpec, end_ids
from draftsmith.errors import OptionError, UnknownName
from draftsmith.lab.bench.answer import Answer, Ask
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel, last_part

PREFIX = "hf:"
"""Prefix of the specs of transformers' own generation."""


@dataclass(frozen=True)
class Generate:
    """`model.generate` as it is."""

    def __str__(self) -> str:
        given = {f.name: _short(getattr(self, f.name)) for f in fields(self)}
        listed = ", ".join(f"{k}={v!r}" for k, v in given.items() if v is not None)
        name = next(name for name, kind in PEERS.items() if kind is type(self))
        return f"transformers.{name}({listed})"

    def options(self, model: LoadedModel) -> dict[str, Any]:  # noqa: ARG002
        """Return the options of `generate`."""
        return {}


@dataclass(frozen=True)
class Static(Generate):
    """`model.generate` with a static cache, for which transformers compiles passes on a GPU."""

    def options(self, model: LoadedModel) -> dict[str, Any]:  # noqa: ARG002
        return {"cache_implementation": "static"}


@dataclass(frozen=True)
class PromptLookup(Generate):
    """transformers' prompt lookup, with the ten tokens that its author recommends."""

    tokens: int = 10
    ngram: int = 2

    def __post_init__(self) -> None:
        _check_counts(tokens=self.tokens, ngram=self.ngram)

    def options(self, model: LoadedModel) -> dict[str, Any]:  # noqa: ARG002
        return {"prompt_lookup_num_tokens": self.tokens, "max_matching_ngram_size": self.ngram}


@dataclass(frozen=True)
class Assisted(Generate):
    """transformers' assisted generation; None leaves the choice to transformers."""

    model: str | None = None
    tokens: int | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.model is None:
            raise OptionError(f"give the assistant, e.g. {PREFIX}assisted(model=FOLDER)")
        _check_counts(tokens=self.tokens)

    def options(self, model: LoadedModel) -> dict[str, Any]:
        assistant = load(
            self.model, dtype=model.dtype, device=model.device, prepack=model.prepacked is not None
        )
        config = assistant.model.generation_config
        if self.tokens is not None:
            config.num_assistant_tokens = self.tokens
        if self.threshold is not None:
            config.assistant_confidence_threshold = self.threshold
        options = {"assistant_model": assistant.model}
        # The same test as in transformers, which raises an error for a missing or superfluous
        # tokenizer.
        if assistant.config.vocab_size != model.config.vocab_size:
            options |= {"tokenizer": model.tokenizer, "assistant_tokenizer": assistant.tokenizer}
        return options


PEERS: dict[str, type[Generate]] = {
    "generate": Generate,
    "static": Static,
    "prompt_lookup": PromptLookup,
    "assisted": Assisted,
}


def parse(text: str, known: Iterable[str]) -> tuple[str, Generate]:
    """Parse `hf:name(key=value)`; returns its name in tables and how it generates.

    Values may be bare words and paths. Raises UnknownName with a suggestion from the `known` arms
    or the options, or OptionError.
    """
    name, opened, rest = text.removeprefix(PREFIX).partition("(")
    if opened and not rest.endswith(")"):
        raise OptionError(f"arm {text!r} cannot be read; write it like hf:prompt_lookup(tokens=10)")
    if name not in PEERS:
        raise UnknownName("arm", PREFIX + name, known)
    options: dict[str, Any] = {}
    for part in filter(None, rest[:-1].split(",")):
        key, given, value = (piece.strip() for piece in part.partition("="))
        if not given:
            raise OptionError(f"arm {text!r}: name the options, e.g. hf:prompt_lookup(tokens=10)")
        if key not in (names := [f.name for f in fields(PEERS[name])]):
            raise UnknownName(f"option of {PREFIX}{name}", key, names)
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    try:
        way = PEERS[name](**options)
    except OptionError as error:
        raise OptionError(f"{text}: {error}") from error
    listed = ",".join(f"{key}={_short(value)}" for key, value in options.items())
    return PREFIX + name + (f"({listed})" if listed else ""), way


def _check_counts(**counts: Any) -> None:
    for name, count in counts.items():
        if count is not None and (type(count) is not int or count < 1):
            raise OptionError(f"{name} must be a number of at least 1, got {count!r}")


def _short(value: Any) -> Any:
    """Replace a folder by its name."""
    return last_part(value) if isinstance(value, str) else value


class Clock:
    """A streamer for `generate` that records the times of tokens, once per target pass."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.passes = -1  # the prompt is put first

    def put(self, _tokens: Any) -> None:
        self.passes += 1
        if self.passes == 1:
            self.first = perf_counter()

    def end(self) -> None:
        """Do nothing: no tokens are buffered."""


class Peer:
    """`model.generate` with one of its own ways of drafting, or none."""

    budget: BudgetSpec | None = None
    seeded = False

    def __init__(self, model: LoadedModel, name: str, way: Generate) -> None:
        self.model, self.name, self.drafter = model, name, str(way)
        self.options = way.options(model)
        ends = end_ids(model)
        pad = getattr(model.tokenizer, "pad_token_id", None)
        if pad is None and ends:
            pad = ends[0]  # never used for one row, but without it transformers logs a warning
        self.fixed = {"pad_token_id": pad, "eos_token_id": ends or None}
        self.ends = frozenset(ends)

    def answer(self, ask: Ask) -> Answer:
        seed, clock = ask.sampling.seed, Clock()
        forced = ask.dictated.in_logits(self.model.model) if ask.dictated else nullcontext()
        devices = () if self.model.device.type == "cpu" else (self.model.device,)
        with torch.random.fork_rng(devices, enabled=seed is not None), forced:
            if seed is not None:
                torch.manual_seed(seed)
            begin = perf_counter()
            prompt = torch.tensor([list(ask.ids)], device=self.model.device)
            out = self.model.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=ask.limit,
                streamer=clock,
                **_sampling(ask),
                **self.options,
                **self.fixed,
            )
            tokens = out[0, len(ask.ids) :].tolist()
            seconds = perf_counter() - begin
        first = seconds if clock.first is None else clock.first - begin
        reason = "stop" if tokens and tokens[-1] in self.ends else "length"
        return Answer(tokens, seconds, first, clock.passes, reason)


def _sampling(ask: Ask) -> dict[str, Any]:
    """Return transformers' sampling options. What is off is off, whatever its defaults."""
    sampled = ask.sampling.temperature > 0
    names = ["repetition_penalty", "min_new_tokens"]
    names += ["temperature", "top_p", "min_p"] if sampled else []
    given = {name: value for name in names if (value := getattr(ask.sampling, name))}
    if sampled:
        given["top_k"] = ask.sampling.top_k  # also 0, because transformers' default is 50
    return given | {"do_sample": sampled}
