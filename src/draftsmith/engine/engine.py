"""Engine: generate, stream and chat with one model; the loop does the work."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, SupportsIndex, TypedDict, Unpack
from weakref import finalize

import torch

from draftsmith.core.cost import CostCurve
from draftsmith.core.drafter import Drafter
from draftsmith.drafters.answer_cache import AnswerCache
from draftsmith.drafters.registry import parse
from draftsmith.engine import request
from draftsmith.engine.call import Call, Stream
from draftsmith.engine.chat import Chat
from draftsmith.engine.jobs import partial_results, raise_failures
from draftsmith.engine.memory import usual_limit
from draftsmith.engine.request import BudgetSpec, Drafting, Options, Request
from draftsmith.engine.resources import Resources
from draftsmith.engine.thread import EngineThread, Handle
from draftsmith.errors import OptionError
from draftsmith.model import generation_config
from draftsmith.model.exact.find import exactly
from draftsmith.model.load import LOADING_HINTS, load
from draftsmith.model.loaded import LoadedModel, last_part
from draftsmith.text.tokenizer import as_batch
from draftsmith.values import known_options, number, shown, switch

_CALLED = 4
"""Drafters of calls that stay bound for the next call, beside the engine's own."""


class EngineOptions(TypedDict, total=False):
    """The keyword options of `Engine`."""

    drafter: str | Drafter
    budget: SupportsIndex | str
    max_batch: SupportsIndex
    memory: SupportsIndex | None
    prefixes: SupportsIndex
    answers: SupportsIndex
    answers_file: str | Path | None
    cost: CostCurve | None
    dtype: str | torch.dtype | None
    device: str | torch.device | None
    device_map: Any
    revision: str | None
    trust_remote_code: bool
    prepack: bool
    exact: bool


_INSTEAD = (
    LOADING_HINTS
    | {
        "assistant_model": "use drafter=\"draft_model(model='…')\"",
        "gpu_memory_utilization": "use memory, in bytes",
        "max_batch_size": "use max_batch",
        "max_model_len": "the context is the model's; max_new_tokens of a call limits its answer",
        "max_num_seqs": "use max_batch",
        "prompt_lookup_num_tokens": 'use drafter="prompt_lookup"',
        "speculative_config": 'use drafter, e.g. drafter="prompt_lookup"',
        "tensor_parallel_size": "use device_map",
    }
    | dict.fromkeys(Options.__annotations__, "give it to generate(), stream() or chat()")
)
"""Names from elsewhere, and what does the same here."""


class Engine:
    """A loaded model with its drafter; every method may be called again and again.

    `with Engine(…) as engine` closes it at the end.
    """

    @known_options("Engine", _INSTEAD)
    def __init__(
        self,
        model: str | Path | LoadedModel | Any,
        tokenizer: Any = None,
        *,
        drafter: str | Drafter = "auto",
        budget: SupportsIndex | str = "auto",
        max_batch: SupportsIndex = 16,
        memory: SupportsIndex | None = None,
        prefixes: SupportsIndex = 8,
        answers: SupportsIndex = 0,
        answers_file: str | Path | None = None,
        cost: CostCurve | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        device_map: Any = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        prepack: bool = True,
        exact: bool = False,
    ) -> None:
        """`model`: a hub id, a folder, a GGUF file, the name of a built-in model, a transformers
        model, or what `load` returned.

        `tokenizer`: the model's own by default; a transformers model needs it for texts.
        `max_batch`: most sequences in a pass. `memory`: most bytes that requests and kept sequences
        may hold; by default three quarters of what is free now. `prefixes`: finished sequences that
        are kept in memory for prompts that begin like them. `answers`: bytes that earlier answers
        may take, which `auto` then drafts from, too; `answers_file`: where `close` keeps them, and
        whence they come back. `cost`: what passes cost, where that is not to be learnt from this
        engine's own ones. `prepack` lays the linear layers of a model that is loaded here out for
        this CPU, once; `model.prepacked` tells which. `exact`: every token is computed alike in any
        pass, so that answers are those of plain decoding to the bit, in half precision, too
        (docs/exact.md). `dtype`, `device`, `device_map`, `revision` and `trust_remote_code` are
        those of `load`, for a model that is loaded here.

        Raises OptionError for values that cannot work, LoadError for a model, or a file of answers,
        that cannot be read, UnsupportedError with the reason where a model cannot be used, or not
        be `exact` on this processor.
        """
        chosen, self.budget = parse(drafter), request.checked_budget(budget)
        max_batch = number("max_batch", max_batch, int, least=1)
        prefixes = number("prefixes", prefixes, int, least=0)
        answers = number("answers", answers, int, least=0, note="(bytes)")
        prepack, exact = switch("prepack", prepack), switch("exact", exact)
        trust_remote_code = switch("trust_remote_code", trust_remote_code)
        if memory is not None:
            memory = number("memory", memory, int, least=1, note="(bytes)")
        if cost is not None and not isinstance(cost, CostCurve):
            raise OptionError(f"cost must be a CostCurve, got {shown(cost)}")
        if answers_file is not None and not isinstance(answers_file, str | Path):
            raise OptionError(f"answers_file must be a path, got {shown(answers_file)}")
        if answers_file is not None and not answers:
            raise OptionError("answers_file needs answers=, the bytes that answers may take")
        places = dtype, device, device_map
        if isinstance(model, LoadedModel):
            if tokenizer is not None or any(one is not None for one in (*places, revision)):
                raise OptionError(
                    "tokenizer, dtype, device, device_map and revision are options of load(), "
                    "which has returned this model already"
                )
        else:
            if exact and device is None and device_map is None and isinstance(model, str | Path):
                places = dtype, "cpu", None  # the only device whose passes can be exact
            model = load(model, tokenizer, *places, trust_remote_code, revision, prepack)
        if exact and model.exact is None:
            model = exactly(model)
        self.model: LoadedModel = model
        self.cost = cost or CostCurve()
        path = None if answers_file is None else Path(answers_file)
        self.answers = AnswerCache(answers, model.facts, path) if answers else None
        """What is remembered of earlier answers; None: nothing."""
        own = self._bound(chosen)
        self.drafter = own.drafter
        self._own = {chosen: own, self.drafter: own}
        self._called: OrderedDict[Drafter, Drafting] = OrderedDict()
        """Drafters of calls, the latest last."""
        self._lock = threading.Lock()
        """For `_called` and `_binding`."""
        self._binding: dict[Drafter, threading.RLock] = {}
        """Drafters that are being bound, which may load a model: others that ask for one of them
        wait for it, and nobody else does."""
        most = usual_limit(model.device) if memory is None else memory
        self.max_batch = max_batch
        self.resources = Resources(model, self.cost, most, prefixes)
        self.thread = EngineThread(self.resources, max_batch)
        finalize(self, self.thread.close)  # also when the interpreter ends

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | LoadedModel | Any,
        tokenizer: Any = None,
        **options: Unpack[EngineOptions],
    ) -> Engine:
        """`Engine(model, tokenizer, …)`, by the name that it has in transformers."""
        return cls(model, tokenizer, **options)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        model = self.model
        return (
            f"Engine({last_part(model.name)!r}, drafter={self.drafter}, "
            f"budget={self.budget!r}, {model.dtype_name} on {model.device})"
        )

    @property
    def notices(self) -> tuple[str, ...]:
        """Why this model cannot be accelerated fully, or not be followed to the letter."""
        settings = generation_config.given(self.model.generation_config)
        return request.notices(self.model, settings)

    @known_options("generate", request.INSTEAD_OF_PROMPT, Options.__annotations__)
    def generate(self, prompt: Any, *, n: SupportsIndex = 1, **options: Unpack[Options]) -> Any:
        """Answer a prompt, or a list of prompts in one ragged batch.

        A prompt is a text (continued as it is), token ids (a list, a tensor, an array, or what a
        tokenizer returns), or messages (the model's chat template is applied). Options: `drafter`
        and `budget` for this call; `prediction`, a text or ids that the answer is expected to
        resemble; `grammar`, a `Grammar` that it must follow; `thoughts`, the `Thoughts` before the
        answer; `chat_template_kwargs`; `cache_salt`, a word without which nobody else's cached
        prefixes and earlier answers serve; and the fields of `SamplingParams`, of which those not
        given come from the model's generation_config.
        Returns a `GenerationResult`; a list of them for a list of prompts; with n > 1 a list of n
        per prompt, sampled with seeds seed, seed+1, … Raises PromptError or OptionError before
        anything runs, GenerationInterrupted (with what was generated) after.
        """
        began = perf_counter()
        n = number("n", n, int, least=1)
        prompts, batched = as_batch(prompt)
        jobs = self.prepare(options, began).jobs(prompts, n)
        with partial_results(jobs), Call(self.resources, jobs, self.max_batch) as call:
            call.run()
            raise_failures(jobs)
        results = [job.result() for job in jobs]
        if n > 1:
            grouped = [results[i : i + n] for i in range(0, len(results), n)]
            return grouped if batched else grouped[0]
        return results if batched else results[0]

    @known_options("stream", request.INSTEAD_OF_PROMPT, Options.__annotations__)
    def stream(self, prompt: Any, **options: Unpack[Options]) -> Stream:
        """Answer one prompt piece by piece; options as for `generate`. Close it to cancel."""
        (job,) = self.prepare(options).jobs([prompt], streaming=True)
        return Stream(job, Call(self.resources, [job], self.max_batch))

    def submit(self, prompt: Any, **options: Unpack[Options]) -> Handle:
        """Answer one prompt in the engine's own thread, which shares passes between all that are
        submitted; options as for `generate`.

        The handle waits for the answer, iterates over it, in asyncio, too, or cancels it. Iterating
        needs a tokenizer, as streaming does.
        """
        streaming = self.model.tokenizer is not None
        (job,) = self.prepare(options).jobs([prompt], streaming=streaming)
        return Handle(self.thread, job, self)

    def chat(self, system: str | None = None, **options: Unpack[Options]) -> Chat:
        """A conversation that keeps cache and drafter state from turn to turn."""
        if system is not None and not isinstance(system, str):
            raise OptionError(f"system must be a text, got {shown(system)}")
        self.prepare(options)  # so that a bad option is told now, not at the first message
        return Chat(self.resources, self.prepare, system, options)

    def close(self) -> None:
        """End what was submitted, and save what is remembered of answers, where a file was named.

        Raises WriteError.
        """
        self.thread.close()
        if self.answers is not None and self.answers.path is not None:
            self.answers.save()

    def prepare(self, options: Mapping[str, Any], began: float | None = None) -> Request:
        """One call's choices, checked before anything runs.

        `began`: when the call was made, by `time.perf_counter`; None: now.
        """
        began, given = perf_counter() if began is None else began, dict(options)
        drafting = self.drafting(given.pop("drafter", None), given.pop("budget", None))
        return Request.of(drafting, given, began)

    def drafting(
        self, drafter: str | Drafter | None = None, budget: BudgetSpec | None = None
    ) -> Drafting:
        """How a call drafts; a configuration is bound once, since it may load a model."""
        if drafter is None or (config := parse(drafter)) in self._own:
            made = self._own[self.drafter]
        else:
            made = self._recent(config) or self._new(config)
        return made if budget is None else replace(made, budget=request.checked_budget(budget))

    def _recent(self, config: Drafter) -> Drafting | None:
        """What one of the last few calls has bound; it then counts as the latest."""
        with self._lock:
            if (made := self._called.get(config)) is not None:
                self._called.move_to_end(config)
            return made

    def _new(self, config: Drafter) -> Drafting:
        """Bind a call's drafter, unless another thread has just done so; forget the oldest one."""
        with self._lock:
            mine = self._binding.setdefault(config, threading.RLock())
        with mine:
            try:
                made = self._recent(config) or self._bound(config)
                with self._lock:
                    self._called[config] = made
                    if len(self._called) > _CALLED:
                        self._called.popitem(last=False)
            finally:
                with self._lock:
                    self._binding.pop(config, None)
        return made

    def _bound(self, config: Drafter) -> Drafting:
        made = Drafting.of(self.model, config, self.budget, self.cost)
        return replace(made, answers=self.answers)
