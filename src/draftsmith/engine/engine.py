"""Engine: generate, stream and chat with one model; the loop does the work."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from draftsmith.core.budget import CostCurve
from draftsmith.core.drafter import Drafter
from draftsmith.drafters.answer_cache import AnswerCache
from draftsmith.drafters.registry import parse
from draftsmith.engine import request
from draftsmith.engine.chat import Chat
from draftsmith.engine.jobs import Stream, partial_results
from draftsmith.engine.memory import usual_limit
from draftsmith.engine.request import BudgetSpec, Drafting, Options, Request
from draftsmith.engine.result import GenerationResult
from draftsmith.engine.scheduler import Scheduler
from draftsmith.errors import OptionError
from draftsmith.model import generation_config
from draftsmith.model.exact.find import exactly
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.text.tokenizer import as_batch

_CALLED = 4
"""Drafters of calls that stay bound for the next call, beside the engine's own."""


class Engine:
    """A loaded model with its drafter; every method may be called again and again."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        drafter: str | Drafter = "auto",
        budget: BudgetSpec = "auto",
        max_batch: int = 16,
        memory: int | None = None,
        prefixes: int = 8,
        answers: int = 0,
        answers_file: str | Path | None = None,
        cost: CostCurve | None = None,
        exact: bool = False,
    ) -> None:
        """`max_batch`: most sequences in a pass. `memory`: most bytes that requests and kept
        sequences may hold; by default three quarters of what is free now.

        `prefixes`: finished sequences that are kept in memory for prompts that begin like them.
        `answers`: bytes that earlier answers may take, which `auto` then drafts from, too;
        `answers_file`: where `close` keeps them, and whence they come back. `cost`: what passes
        cost, where that is not to be learnt from this engine's own ones. `exact`: every token is
        computed alike in any pass, so that answers are those of plain decoding to the bit, in half
        precision, too (docs/exact.md). Raises OptionError for values that cannot work, LoadError
        for a file that does not hold this model's answers, UnsupportedError with the reason where
        a model cannot be `exact` on this processor.
        """
        model = exactly(model) if exact and model.exact is None else model
        self.model = model
        self.budget = request.checked_budget(budget)
        self.cost = cost or CostCurve()
        if answers_file is not None and not answers:
            raise OptionError("answers_file needs answers=, the bytes that answers may take")
        path = None if answers_file is None else Path(answers_file)
        self.answers = AnswerCache(answers, model.facts, path) if answers else None
        """What is remembered of earlier answers; None: nothing."""
        own = self._bound(parse(drafter))
        self.drafter = own.drafter
        self._own = {parse(drafter): own, self.drafter: own}
        self._called: OrderedDict[Drafter, Drafting] = OrderedDict()
        """Drafters of calls, the latest last."""
        self._binding = threading.RLock()
        """Callers of a new drafter wait for the one who binds it, which may load a model."""
        if max_batch < 1:
            raise OptionError(f"max_batch={max_batch!r} cannot work; it must be at least 1")
        for name, value in (("memory", memory), ("prefixes", prefixes)):
            if value is not None and value < 0:
                raise OptionError(f"{name}={value!r} cannot work; it must not be negative")
        most = usual_limit(model.device) if memory is None else memory
        self.scheduler = Scheduler(model, self.cost, max_batch, most, prefixes)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | Any,
        *,
        tokenizer: Any = None,
        drafter: str | Drafter = "auto",
        budget: BudgetSpec | str = "auto",
        max_batch: int = 16,
        memory: int | None = None,
        prefixes: int = 8,
        answers: int = 0,
        answers_file: str | Path | None = None,
        dtype: Any = None,
        device: Any = None,
        device_map: Any = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        prepack: bool = True,
        exact: bool = False,
    ) -> Engine:
        """An engine for a hub id, a folder, a built-in model, or a model that is already loaded.

        `dtype` is the checkpoint's own by default. `prepack` lays the linear layers of a model that
        is loaded here out for this CPU, once; `model.prepacked` tells which. The other options are
        the constructor's. Raises LoadError or UnsupportedError.
        """
        drafter, budget = parse(drafter), request.checked_budget(budget)  # before it is loaded
        loaded = load(
            model, tokenizer, dtype, device, device_map, trust_remote_code, revision, prepack
        )
        return cls(
            loaded,
            drafter=drafter,
            budget=budget,
            max_batch=max_batch,
            memory=memory,
            prefixes=prefixes,
            answers=answers,
            answers_file=answers_file,
            exact=exact,
        )

    @property
    def notices(self) -> tuple[str, ...]:
        """Why this model cannot be accelerated fully, or not be followed to the letter."""
        settings = generation_config.given(self.model.generation_config)
        return request.notices(self.model, settings)

    @overload
    def generate(
        self,
        prompt: str | list[int] | list[dict[str, Any]],
        *,
        n: Literal[1] = 1,
        **options: Unpack[Options],
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]] | list[list[dict[str, Any]]],
        *,
        n: Literal[1] = 1,
        **options: Unpack[Options],
    ) -> list[GenerationResult]: ...

    @overload
    def generate(self, prompt: Any, *, n: int = 1, **options: Unpack[Options]) -> Any: ...

    def generate(self, prompt: Any, *, n: int = 1, **options: Unpack[Options]) -> Any:
        """Answer a prompt, or a list of prompts in one ragged batch.

        A prompt is a text (continued as it is), token ids (a list, a tensor, an array, or what a
        tokenizer returns), or messages (the model's chat template is applied). Options: `drafter`
        and `budget` for this call; `prediction`, a text or ids that the answer is expected to
        resemble; `grammar`, a `Grammar` that it must follow; `chat_template_kwargs`; `cache_salt`,
        a word without which nobody else's cached prefixes and earlier answers serve; and the fields
        of `SamplingParams`, of which those not given come from the model's generation_config.
        Returns a `GenerationResult`; a list of them for a list of prompts; with n > 1 a list of n
        per prompt, sampled with seeds seed, seed+1, … Raises PromptError or OptionError before
        anything runs, GenerationInterrupted (with what was generated) after.
        """
        if n < 1:
            raise OptionError(f"n={n!r} cannot work; it must be at least 1")
        prompts, batched = as_batch(prompt)
        jobs = self.prepare(options).jobs(prompts, n)
        with partial_results(jobs):
            for _ in self.scheduler.here.drive(jobs):
                pass
        results = [job.result() for job in jobs]
        if n > 1:
            grouped = [results[i : i + n] for i in range(0, len(results), n)]
            return grouped if batched else grouped[0]
        return results if batched else results[0]

    def stream(self, prompt: Any, **options: Unpack[Options]) -> Stream:
        """Answer one prompt piece by piece; options as for `generate`. Close it to cancel."""
        (job,) = self.prepare(options).jobs([prompt], streaming=True)
        return Stream(job, self.scheduler.here.drive([job]))

    def chat(self, system: str | None = None, **options: Unpack[Options]) -> Chat:
        """A conversation that keeps cache and drafter state from turn to turn."""
        self.prepare(options)  # so that a bad option is told now, not at the first message
        return Chat(self.scheduler, self.prepare, system, options)

    def close(self) -> None:
        """Save what is remembered of answers, where a file was named; raises WriteError."""
        if self.answers is not None and self.answers.path is not None:
            self.answers.save()

    def prepare(self, options: Mapping[str, Any]) -> Request:
        """One call's choices, checked before anything runs."""
        given = dict(options)
        drafting = self.drafting(given.pop("drafter", None), given.pop("budget", None))
        return Request.of(drafting, given)

    def drafting(
        self, drafter: str | Drafter | None = None, budget: BudgetSpec | None = None
    ) -> Drafting:
        """How a call drafts; a configuration is bound once, since it may load a model."""
        if drafter is None or (config := parse(drafter)) in self._own:
            made = self._own[self.drafter]
        else:
            made = self._called.get(config) or self._new(config)
            with suppress(KeyError):  # it may have been forgotten meanwhile
                self._called.move_to_end(config)
        return made if budget is None else replace(made, budget=request.checked_budget(budget))

    def _new(self, config: Drafter) -> Drafting:
        """Bind a call's drafter, unless another thread has just done so; forget the oldest one."""
        with self._binding:
            made = self._called.get(config) or self._bound(config)
            self._called[config] = made
            if len(self._called) > _CALLED:
                old = self._called.popitem(last=False)[1].drafter
                self.cost.forget((old, *getattr(old, "drafters", ())))
        return made

    def _bound(self, config: Drafter) -> Drafting:
        made = Drafting.of(self.model, config, self.budget, self.cost)
        return replace(made, answers=self.answers)
