"""transformers' own generation as arms: same weights, dtype, threads, prompts, distribution.

Peers run as fast as they can: only tokens and their times are recorded, and options that are not
given have transformers' defaults. docs/measuring.md lists which of them keep the target's output.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from time import perf_counter
from typing import Any

import torch

from draftsmith.engine.drafting import BudgetSpec
from draftsmith.engine.request import end_ids
from draftsmith.errors import OptionError, UnknownName
from draftsmith.lab.bench.answer import Answer, Ask
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel, last_part

PREFIX = "hf:"
"""Prefix of the specs of transformers' own generation."""


Options = Callable[[LoadedModel], dict[str, Any]]
"""Options of `generate` for a model."""


@dataclass(frozen=True)
class Way:
    """A way of generating."""

    drafter: str
    """Its name with all its options."""
    options: Options


def generate() -> Options:
    """`model.generate` as it is."""
    return lambda _: {}


def static() -> Options:
    """With a static cache, for which transformers compiles passes on a GPU."""
    return lambda _: {"cache_implementation": "static"}


def prompt_lookup(tokens: int = 10, ngram: int = 2) -> Options:
    """With the ten tokens that its author recommends."""
    _check_counts(tokens=tokens, ngram=ngram)
    return lambda _: {"prompt_lookup_num_tokens": tokens, "max_matching_ngram_size": ngram}


def assisted(
    model: str | None = None, tokens: int | None = None, threshold: float | None = None
) -> Options:
    """Assisted generation; None leaves the choice to transformers."""
    if model is None:
        raise OptionError(f"give the assistant, e.g. {PREFIX}assisted(model=FOLDER)")
    _check_counts(tokens=tokens)

    def options(target: LoadedModel) -> dict[str, Any]:
        packed = target.prepacked is not None
        assistant = load(model, dtype=target.dtype, device=target.device, prepack=packed)
        config = assistant.model.generation_config
        if tokens is not None:
            config.num_assistant_tokens = tokens
        if threshold is not None:
            config.assistant_confidence_threshold = threshold
        found = {"assistant_model": assistant.model}
        # The same test as in transformers, which raises an error for a missing or superfluous
        # tokenizer.
        if assistant.config.vocab_size != target.config.vocab_size:
            found |= {"tokenizer": target.tokenizer, "assistant_tokenizer": assistant.tokenizer}
        return found

    return options


PEERS: dict[str, Callable[..., Options]] = {
    one.__name__: one for one in (generate, static, prompt_lookup, assisted)
}


def parse(text: str, known: Iterable[str]) -> tuple[str, Way]:
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
    every = signature(PEERS[name]).parameters
    for part in filter(None, rest[:-1].split(",")):
        key, given, value = (piece.strip() for piece in part.partition("="))
        if not given:
            raise OptionError(f"arm {text!r}: name the options, e.g. hf:prompt_lookup(tokens=10)")
        if key not in every:
            raise UnknownName(f"option of {PREFIX}{name}", key, [*every])
        if key in options:
            raise OptionError(f"arm {text!r}: {key} is given twice")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    try:
        how = PEERS[name](**options)
    except OptionError as error:
        raise OptionError(f"{text}: {error}") from error
    full = {key: _short(options.get(key, option.default)) for key, option in every.items()}
    whole = ", ".join(f"{key}={value!r}" for key, value in full.items() if value is not None)
    listed = ",".join(f"{key}={_short(value)}" for key, value in options.items())
    way = Way(f"transformers.{name}({whole})", how)
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

    def __init__(self, model: LoadedModel, name: str, way: Way) -> None:
        self.model, self.name, self.drafter = model, name, way.drafter
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
