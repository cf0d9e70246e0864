"""transformers' own generation as arms: same weights, dtype, threads, prompts and law.

They run at their own best: nothing is asked of them but the tokens and the moment of each, and
settings that are not given are transformers' defaults. Which of them keep the target's output is
told in docs/measuring.md.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from draftsmith.bench.arms import Answer, Ask, Spec
from draftsmith.engine.request import BudgetSpec, end_ids
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel


class Clock:
    """A streamer in transformers' sense: notes when tokens come, once per target pass."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.passes = -1  # The prompt is put first.

    def put(self, _tokens: Any) -> None:
        self.passes += 1
        if self.passes == 1:
            self.first = perf_counter()

    def end(self) -> None:
        """Nothing is held back here."""


class Peer:
    """`model.generate` with one of its own ways of drafting, or none."""

    budget: BudgetSpec | None = None
    seeded = False

    def __init__(self, model: LoadedModel, spec: Spec) -> None:
        assert spec.peer is not None
        self.model, self.name = model, spec.name
        given = dict(spec.options or {})
        self.options = _READERS[spec.peer](model, given)
        self.drafter = _described(spec.peer, given)
        ends = end_ids(model)
        pad = getattr(model.tokenizer, "pad_token_id", None)
        if pad is None and ends:
            pad = ends[0]  # Never used by one row; without it transformers logs a warning.
        self.fixed = {"pad_token_id": pad, "eos_token_id": ends or None}
        self.ends = frozenset(ends)

    def answer(self, ask: Ask) -> Answer:
        law = _law(ask)
        seeded = law["do_sample"] and ask.sampling.seed is not None
        with torch.random.fork_rng(enabled=seeded):
            if seeded:
                torch.manual_seed(ask.sampling.seed)
            return self._timed(ask, law)

    def _timed(self, ask: Ask, law: dict[str, Any]) -> Answer:
        clock = Clock()
        begin = perf_counter()
        prompt = torch.tensor([list(ask.ids)], device=self.model.device)
        out = self.model.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=ask.limit,
            streamer=clock,
            **law,
            **self.options,
            **self.fixed,
        )
        tokens = out[0, len(ask.ids) :].tolist()
        seconds = perf_counter() - begin
        first = seconds if clock.first is None else clock.first - begin
        reason = "stop" if tokens and tokens[-1] in self.ends else "length"
        return Answer(tokens, seconds, first, clock.passes, reason)


def _law(ask: Ask) -> dict[str, Any]:
    """The same law in transformers' words; what is off is off, whatever its defaults."""
    params = ask.sampling
    law: dict[str, Any] = {"do_sample": params.temperature > 0}
    if params.temperature > 0:
        law |= {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        if params.min_p:
            law["min_p"] = params.min_p
    if params.repetition_penalty != 1.0:
        law["repetition_penalty"] = params.repetition_penalty
    if params.min_new_tokens:
        law["min_new_tokens"] = params.min_new_tokens
    return law


def _generate(model: LoadedModel, given: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG001
    return {}


def _prompt_lookup(model: LoadedModel, given: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG001
    options = {"prompt_lookup_num_tokens": given.get("tokens", 10)}
    if given.get("ngram") is not None:
        options["max_matching_ngram_size"] = given["ngram"]
    return options


def _assisted(model: LoadedModel, given: dict[str, Any]) -> dict[str, Any]:
    assistant = load(given["model"], dtype=model.dtype, device=model.device)
    config = assistant.model.generation_config
    if given.get("tokens") is not None:
        config.num_assistant_tokens = given["tokens"]
    if given.get("threshold") is not None:
        config.assistant_confidence_threshold = given["threshold"]
    options = {"assistant_model": assistant.model}
    # The test that transformers itself makes: given or missing tokenizers are an error otherwise.
    if assistant.config.vocab_size != model.config.vocab_size:
        options |= {"tokenizer": model.tokenizer, "assistant_tokenizer": assistant.tokenizer}
    return options


_READERS = {"generate": _generate, "prompt_lookup": _prompt_lookup, "assisted": _assisted}


def _described(peer: str, given: dict[str, Any]) -> str:
    """The peer with all its settings, defaults included; folders by their name."""
    if peer == "prompt_lookup":
        given = {"tokens": 10, "ngram": 2} | given
    elif peer == "assisted":
        given = given | {"model": str(given["model"]).rstrip("/").rsplit("/", 1)[-1]}
    return f"transformers.{peer}({', '.join(f'{k}={v!r}' for k, v in given.items())})"
