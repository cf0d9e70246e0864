"""Engine: generate, stream and chat with one model; the loop does the work."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from draftsmith.core.budget import Budget, CostCurve, FixedBudget
from draftsmith.core.drafter import Drafter
from draftsmith.core.sampling import Chance, Dice, Gumbel, Law, SamplingParams
from draftsmith.core.session import EndTokens, Session
from draftsmith.drafters.registry import parse
from draftsmith.engine.chat import Chat
from draftsmith.engine.jobs import Job, Stream, partial_results, run
from draftsmith.errors import OptionError, PromptError, UnknownName
from draftsmith.model import generation_config
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import REST, Runner
from draftsmith.model.taps import needs_of
from draftsmith.text import tokenizer as text

BudgetSpec = int | Literal["auto", "drafter"]
"""Draft nodes per step: a number, `auto` (by what pays), or `drafter` (its paper's width)."""

_SAMPLING = {f.name for f in dataclasses.fields(SamplingParams)}
_CALL = {"drafter", "budget", "prediction", "chat_template_kwargs", "n"}
DRAFT_SEED = 0x9E3779B97F4A7C15
"""Keeps a drafter's draws apart from the target's, also from those of seed + 1."""
_INHERITED = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "min_new_tokens": "min_new_tokens",
    "max_new_tokens": "max_new_tokens",
    "stop_strings": "stop",
}
"""Options taken from the model's generation_config where the caller says nothing."""


class Engine:
    """A loaded model with its drafter; every method may be called again and again."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        drafter: str | Drafter = "auto",
        budget: BudgetSpec = "auto",
        max_batch: int = 16,
    ) -> None:
        self.model = model
        self._bound: dict[Drafter, Drafter] = {}
        self.drafter = self.bind(drafter)
        self.budget = checked_budget(budget)
        if max_batch < 1:
            raise OptionError(f"max_batch={max_batch!r} cannot work; it must be at least 1")
        self.max_batch = max_batch
        self.cost = CostCurve()
        self.settings = generation_config.given(model.generation_config)
        """What the model's author asks of every answer."""

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | Any,
        *,
        tokenizer: Any = None,
        drafter: str | Drafter = "auto",
        budget: BudgetSpec = "auto",
        max_batch: int = 16,
        dtype: Any = None,
        device: Any = None,
        device_map: Any = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Engine:
        """An engine for a hub id, a folder, a built-in model, or a model that is already loaded.

        `dtype` is the checkpoint's own by default. Raises LoadError or UnsupportedError.
        """
        drafter = parse(drafter)  # before minutes of loading
        loaded = load(
            model,
            tokenizer=tokenizer,
            dtype=dtype,
            device=device,
            device_map=device_map,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        return cls(loaded, drafter=drafter, budget=budget, max_batch=max_batch)

    @property
    def notices(self) -> tuple[str, ...]:
        """Why this model cannot be accelerated fully, or not be followed to the letter."""
        return self.model.capabilities.reasons + generation_config.not_applied(self.settings)

    def generate(self, prompt: Any, *, n: int = 1, **options: Any) -> Any:
        """Answer a prompt, or a list of prompts in one ragged batch.

        A prompt is a text (continued as it is), token ids, or messages (the model's chat template
        is applied). Options: `drafter` and `budget` for this call; `prediction`, a text or ids that
        the answer is expected to resemble; `chat_template_kwargs`; and the fields of
        `SamplingParams`, of which those not given come from the model's generation_config.
        Returns a `GenerationResult`; a list of them for a list of prompts; with n > 1 a list of n
        per prompt, sampled with seeds seed, seed+1, … Raises PromptError or OptionError before
        anything runs, GenerationInterrupted (with what was generated) after.
        """
        prompts, batched = as_batch(prompt)
        if n < 1:
            raise OptionError(f"n={n!r} cannot work; it must be at least 1")
        call, params = self.prepare(options)
        seeds = [None if params.seed is None else params.seed + i for i in range(n)]
        encoded = [call.encode(p) for p in prompts]
        single = len(encoded) * n == 1
        jobs = [
            call.job(ids, dataclasses.replace(params if single else own(params), seed=seed))
            for ids in encoded
            for seed in seeds
        ]
        with partial_results(jobs):
            for _ in run(
                jobs, Runner(self.model, rest=REST), self.cost, max_batch=self.batch_size()
            ):
                pass
        results = [job.result() for job in jobs]
        if n > 1:
            grouped = [results[i : i + n] for i in range(0, len(results), n)]
            return grouped if batched else grouped[0]
        return results if batched else results[0]

    def stream(self, prompt: text.Prompt, **options: Any) -> Stream:
        """Answer one prompt piece by piece; options as for `generate`. Close it to cancel."""
        if "n" in options:
            raise OptionError("n needs generate(): a stream is one answer")
        call, params = self.prepare(options)
        job = call.job(call.encode(prompt), params, streaming=True)
        return Stream(job, run([job], Runner(self.model, rest=REST), self.cost))

    def chat(self, system: str | None = None, **options: Any) -> Chat:
        """A conversation that keeps cache and drafter state from turn to turn."""
        if "n" in options:
            raise OptionError("n needs generate(): a chat's turn has one answer")
        self.prepare(options)  # so that a bad option is told now, not at the first message
        return Chat(self, system, options)

    def prepare(self, options: Mapping[str, Any]) -> tuple[Call, SamplingParams]:
        """One call's choices, checked before anything runs."""
        given = dict(options)
        call = Call(
            self,
            given.pop("drafter", None),
            given.pop("budget", None),
            given.pop("prediction", None),
            given.pop("chat_template_kwargs", None) or {},
        )
        return call, self.sampling(given)

    def bind(self, drafter: str | Drafter) -> Drafter:
        """The drafter for this model; asked once per configuration, since it may load a model."""
        config = parse(drafter)
        if config not in self._bound:
            bound = config.bind(self.model.facts)
            self._bound[config] = self._bound[bound] = bound
        return self._bound[config]

    def batch_size(self) -> int:
        """Sequences per pass: one where the model cannot run several."""
        return self.max_batch if self.model.capabilities.batch else 1

    def sampling(self, options: Mapping[str, Any]) -> SamplingParams:
        """The options a call will use, with the model's own defaults filled in."""
        for name in options:
            if name not in _SAMPLING:
                raise UnknownName("option", name, _SAMPLING | _CALL)
        merged = self._defaults() | {k: v for k, v in options.items() if v is not None}
        for name in ("stop", "stop_token_ids", "processors"):
            value = merged.get(name, ())
            # One alone may be given bare: stop="\n", processors=my_processor.
            many = isinstance(value, Sequence) and not isinstance(value, str)
            merged[name] = tuple(value) if many else (value,)
        params = SamplingParams(**merged)
        vocab = self.model.vocab_size
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            wrong = next((i for i in ids if not 0 <= i < vocab), None)
            if wrong is not None:
                raise OptionError(f"{name} names token id {wrong}; this model has 0…{vocab - 1}")
        return params

    def _defaults(self) -> dict[str, Any]:
        defaults = {
            ours: self.settings[theirs]
            for theirs, ours in _INHERITED.items()
            if self.settings.get(theirs) is not None
        }
        if not self.settings.get("do_sample"):
            defaults["temperature"] = 0.0
        else:
            defaults.setdefault("temperature", 1.0)
        return defaults

    def end_ids(self) -> list[int]:
        """The model's end-of-sequence ids."""
        config = self.model.generation_config
        found = getattr(config, "eos_token_id", None)
        if found is None:
            found = getattr(self.model.tokenizer, "eos_token_id", None)
        if found is None:
            return []
        return [int(found)] if isinstance(found, int) else [int(i) for i in found]


class Call:
    """One call's choices, and the jobs made from them."""

    def __init__(
        self,
        engine: Engine,
        drafter: str | Drafter | None,
        budget: BudgetSpec | None,
        prediction: str | Sequence[int] | None,
        template: Mapping[str, Any],
    ) -> None:
        self.began = perf_counter()
        self.engine = engine
        self.drafter = engine.drafter if drafter is None else engine.bind(drafter)
        self.budget = engine.budget if budget is None else checked_budget(budget)
        self.template = template
        self.needs = needs_of(self.drafter, engine.model)
        if isinstance(prediction, str):
            prediction = text.encode(engine.model.tokenizer, prediction)
        elif prediction is not None and not all(isinstance(i, int) for i in prediction):
            raise OptionError("prediction must be a text or a list of token ids")
        vocab = engine.model.vocab_size
        self.prediction = tuple(i for i in prediction or () if 0 <= i < vocab)

    def encode(self, prompt: Any) -> list[int]:
        """Ids of a prompt that fits the model; raises PromptError."""
        model = self.engine.model
        ids = text.encode_prompt(model.tokenizer, prompt, self.template)
        wrong = next((i for i in ids if not 0 <= i < model.vocab_size), None)
        if wrong is not None:
            raise PromptError(f"token id {wrong} is outside this model's 0…{model.vocab_size - 1}")
        if not ids:
            raise PromptError("the prompt is empty: it has no tokens")
        if model.context_length is not None and len(ids) >= model.context_length:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, but this model's context is "
                f"{model.context_length}, answer included; shorten the prompt"
            )
        return ids

    def job(self, ids: Sequence[int], params: SamplingParams, *, streaming: bool = False) -> Job:
        """A session ready to start."""
        engine, model = self.engine, self.engine.model
        strings, stop_ids = text.split_stops(model.tokenizer, params.stop)
        stream = None
        if streaming or strings:
            stream = text.TextStream(model.tokenizer, strings)
        ends = [*engine.end_ids(), *params.stop_token_ids]
        inherited = generation_config.config_processors(
            engine.settings, len(ids), ends, model.device
        )
        params = dataclasses.replace(params, processors=(*inherited, *params.processors))
        room, vocab = model.context_length, model.vocab_size
        limit = params.max_new_tokens
        session = Session(
            ids,
            drafter=self.drafter,
            budget=self._budget(),
            law=Law.of(params, len(ids), ends, generation_config.banned(engine.settings, vocab)),
            chance=self._chance(params.seed),
            vocab_size=vocab,
            limit=limit if room is None else min(limit, room - len(ids)),
            # The text goes first: the token that ends an answer may also complete a stop string.
            stop_rules=[
                *([stream] if stream is not None else []),
                EndTokens([*ends, *stop_ids]),
            ],
            sampling=params,
            prediction=self.prediction,
            needs=self.needs,
            draft_seed=None if params.seed is None else (params.seed ^ DRAFT_SEED) % 2**63,
            device=model.device,
        )
        if params.logprobs:
            session.logprobs = []
        if session.limit <= 0:
            session.finish_reason = "length"
        notices = engine.notices + ((self.needs.why,) if self.needs.why else ())
        return Job(session, model.tokenizer, stream, notices, self.began)

    def _chance(self, seed: int | None) -> Chance:
        if self.drafter.shares_noise:
            return Gumbel(seed)
        return Dice.seeded(seed, self.engine.model.device)

    def _budget(self) -> Budget:
        width = self.drafter.preferred_width()
        if width == 0:
            return FixedBudget(0)
        if self.budget == "auto":
            return self.drafter.auto_budget(self.engine.cost)
        return FixedBudget(width if self.budget == "drafter" else self.budget)


def own(params: SamplingParams) -> SamplingParams:
    """The same options with processors of their own: a stateful one must serve one sequence only.

    Raises OptionError for a processor that cannot be copied.
    """
    try:
        return dataclasses.replace(params, processors=copy.deepcopy(params.processors))
    except Exception as error:
        raise OptionError(
            f"processors cannot be copied, which several answers in one call need ({error}); "
            "ask for one answer per call"
        ) from error


def as_batch(prompt: Any) -> tuple[list[Any], bool]:
    """One or many prompts as a list, and whether there were many."""
    single = isinstance(prompt, str) or text.is_ids(prompt) or text.is_messages(prompt)
    if single or not isinstance(prompt, Sequence) or not len(prompt):
        return [prompt], False
    return list(prompt), True


def checked_budget(budget: BudgetSpec) -> BudgetSpec:
    """Raise OptionError unless `budget` is a number, `auto` or `drafter`."""
    if budget in ("auto", "drafter"):
        return budget
    if isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0:
        return budget
    raise OptionError(
        f"budget={budget!r} cannot work; give a number of draft nodes per step, 'auto' or 'drafter'"
    )
