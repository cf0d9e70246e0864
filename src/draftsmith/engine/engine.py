"""Engine: generate, stream and chat with one model."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, SupportsIndex, TypedDict, Unpack, get_args
from weakref import WeakValueDictionary, finalize

import torch
from tqdm import tqdm

from draftsmith.core.cost import CostCurve
from draftsmith.core.drafter import Drafter
from draftsmith.drafters.answer_cache import AnswerCache
from draftsmith.drafters.registry import parse
from draftsmith.engine import request
from draftsmith.engine.call import Call, Stream
from draftsmith.engine.chat import Chat
from draftsmith.engine.drafting import BudgetSpec, Drafting, checked_budget
from draftsmith.engine.memory import usual_limit
from draftsmith.engine.request import Options, Request
from draftsmith.engine.resources import Resources
from draftsmith.engine.sequence import partial_results, raise_failures
from draftsmith.engine.thread import EngineThread, Handle
from draftsmith.errors import OptionError, UnknownName
from draftsmith.model import generation_config
from draftsmith.model.exact.find import exactly
from draftsmith.model.load import LOADING_HINTS, load
from draftsmith.model.loaded import LoadedModel, Store, last_part
from draftsmith.model.probe import with_store
from draftsmith.model.runner import new_cost
from draftsmith.text.tokenizer import as_batch
from draftsmith.values import known_options, number, shown, switch

_CALLED = 4
"""Number of drafters from calls that stay bound for later calls, besides the engine's own."""


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
    store: str | None


_INSTEAD = (
    LOADING_HINTS
    | {
        "assistant_model": "use drafter=\"draft_model(model='…')\"",
        "gpu_memory_utilization": "use memory, in bytes",
        "max_batch_size": "use max_batch",
        "max_model_len": "the model sets the context; limit answers with max_new_tokens of a call",
        "max_num_seqs": "use max_batch",
        "prompt_lookup_num_tokens": 'use drafter="prompt_lookup"',
        "speculative_config": 'use drafter, e.g. drafter="prompt_lookup"',
        "tensor_parallel_size": "use device_map",
    }
    | dict.fromkeys(
        Options.__annotations__.keys() - EngineOptions.__annotations__.keys(),
        "pass it to generate(), stream() or chat()",
    )
)
"""Option names of other libraries → what to use here."""


class Engine:
    """A loaded model with a drafter. All methods can be called any number of times.

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
        store: str | None = None,
    ) -> None:
        """Load a model, or use one that is loaded.

        - `model`: a hub id, a folder, a GGUF file, the name of a built-in model, a transformers
          model, or the result of `load`.
        - `tokenizer`: by default the model's own. A transformers model needs one for texts.
        - `drafter`: a name with options, such as "copyspec(gamma=3)", or a `Drafter`.
        - `budget`: draft nodes per pass: a number, "auto" (as many as pay) or "drafter" (its own).
        - `max_batch`: maximum number of sequences in a pass.
        - `memory`: maximum bytes for running and kept sequences; by default three quarters of the
          memory that is free now.
        - `prefixes`: number of finished sequences to keep for prompts with the same beginning.
        - `answers`: bytes for earlier answers, from which `auto` then drafts, too.
        - `answers_file`: file that earlier answers are loaded from, and that `close` saves them in.
        - `cost`: cost of passes, if it should not be measured by this engine.
        - `prepack`: store the linear layers of a model that is loaded here in this CPU's layout;
          `model.prepacked` lists them.
        - `exact`: compute every token in the same way in any pass, so that answers equal those of
          plain decoding to the bit, in half precision, too (docs/exact.md).
        - `store`: "packed" or "static", where keys and values are kept (docs/gpu.md); None: as the
          model was loaded, or "static" where passes can be CUDA graphs.
        - `dtype`, `device`, `device_map`, `revision` and `trust_remote_code` are options of `load`,
          for a model that is loaded here.

        Raises OptionError for wrong values; LoadError if the model or the file of answers cannot be
        read; UnsupportedError, with the reason, if the model cannot be used, or not with `exact` on
        this processor.
        """
        chosen, self.budget = parse(drafter), checked_budget(budget)
        max_batch = number("max_batch", max_batch, int, least=1)
        prefixes = number("prefixes", prefixes, int, least=0)
        answers = number("answers", answers, int, least=0, note="(bytes)")
        prepack, exact = switch("prepack", prepack), switch("exact", exact)
        if store is not None and store not in get_args(Store):
            raise UnknownName("store", str(store), get_args(Store))
        if exact and store == "static":
            raise OptionError("exact=True has a store of its own; leave store out")
        trust_remote_code = switch("trust_remote_code", trust_remote_code)
        if memory is not None:
            memory = number("memory", memory, int, least=1, note="(bytes)")
        if cost is not None and not isinstance(cost, CostCurve):
            raise OptionError(f"cost must be a CostCurve, got {shown(cost)}")
        if not isinstance(answers_file, str | Path | None) or "\0" in str(answers_file):
            raise OptionError(f"answers_file must be a path, got {shown(answers_file)}")
        if answers_file is not None and not answers:
            raise OptionError(
                f"answers_file={str(answers_file)!r} needs answers=, the most bytes of them"
            )
        places = dtype, device, device_map
        if isinstance(model, LoadedModel):
            if tokenizer is not None or any(one is not None for one in (*places, revision)):
                raise OptionError(
                    "tokenizer, dtype, device, device_map and revision are options of load(), "
                    "which has returned this model already"
                )
            if store is not None and store != model.store:
                model = with_store(model, store)
        else:
            if exact and device is None and device_map is None and isinstance(model, str | Path):
                places = dtype, "cpu", None  # exact passes exist on the CPU only
            model = load(model, tokenizer, *places, trust_remote_code, revision, prepack, store)
        if exact and model.exact is None:
            model = exactly(model)
        self.model: LoadedModel = model
        """The model, its `tokenizer` and its `capabilities`."""
        self.cost = cost or new_cost(model)
        path = None if answers_file is None else Path(answers_file)
        self.answers = AnswerCache(answers, model.facts, path) if answers else None
        """Store of earlier answers; None: they are not stored."""
        default = self._bound(chosen)
        self.drafter = default.drafter
        self._default = {chosen: default, self.drafter: default}
        self._called: OrderedDict[Drafter, Drafting] = OrderedDict()
        """Bound drafters from calls, the most recent last."""
        self._binding: WeakValueDictionary[Drafter, Any] = WeakValueDictionary()
        """Locks of drafters that are being bound, which may load a model: other calls wait."""
        self._lock = threading.Lock()
        """Protects both tables."""
        most = usual_limit(model.device) if memory is None else memory
        self.resources = Resources(model, self.cost, most, prefixes, max_batch)
        self.thread = EngineThread(self.resources)
        finalize(self, self.thread.close)  # also when the interpreter ends

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | LoadedModel | Any,
        tokenizer: Any = None,
        **options: Unpack[EngineOptions],
    ) -> Engine:
        """Create an engine: `Engine(model, tokenizer, …)` under the name used by transformers."""
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
    def max_batch(self) -> int:
        """Maximum number of sequences in a pass."""
        return int(self.resources.max_batch)

    @property
    def notices(self) -> tuple[str, ...]:
        """Reasons why the model cannot be accelerated fully, or its settings cannot be applied."""
        settings = generation_config.given(self.model.generation_config)
        return request.notices(self.model, settings)

    @known_options("generate", request.INSTEAD_OF_PROMPT, Options.__annotations__)
    def generate(
        self,
        prompt: Any,
        *,
        n: SupportsIndex = 1,
        progress: bool = False,
        **options: Unpack[Options],
    ) -> Any:
        """Answer a prompt, or a list of prompts in one batch.

        A prompt is a text (which is continued), token ids (a list, a tensor, an array, or the
        result of a tokenizer), or messages (to which the model's chat template is applied).

        Options: `drafter` and `budget` for this call; `prediction`, a text or ids that the answer
        is expected to resemble; `grammar`, a `Grammar` that the answer must follow; `thoughts`, the
        `Thoughts` before the answer; `chat_template_kwargs`; `cache_salt`, a text: only requests
        with the same one share cached prefixes and earlier answers; and the fields of
        `SamplingParams`, with defaults from the model's generation_config. `progress` shows on
        standard error how many answers have ended.

        Returns a `GenerationResult`, or a list of them for a list of prompts. With n > 1 there are
        n results per prompt, sampled with the seeds seed, seed+1, … Raises PromptError or
        OptionError before anything runs, and GenerationInterrupted, with the results so far, for an
        error during generation.
        """
        began = perf_counter()
        n, progress = number("n", n, int, least=1), switch("progress", progress)
        prompts, batched = as_batch(prompt)
        sequences = self.prepare(options, began).sequences(prompts, n)
        with partial_results(sequences), Call(self.resources, sequences) as call:
            if progress:
                with tqdm(total=len(sequences), unit="answer") as bar:
                    call.run(lambda: bar.update(sum(s.finished for s in sequences) - bar.n))
            else:
                call.run()
            raise_failures(sequences)
        results = [sequence.result() for sequence in sequences]
        if n > 1:
            grouped = [results[i : i + n] for i in range(0, len(results), n)]
            return grouped if batched else grouped[0]
        return results if batched else results[0]

    @known_options("stream", request.INSTEAD_OF_PROMPT, Options.__annotations__)
    def stream(self, prompt: Any, **options: Unpack[Options]) -> Stream:
        """Answer one prompt piece by piece; options as for `generate`. Close it to cancel."""
        (sequence,) = self.prepare(options).sequences([prompt], streaming=True)
        return Stream(sequence, Call(self.resources, [sequence]))

    @known_options("submit", request.INSTEAD_OF_PROMPT, Options.__annotations__)
    def submit(self, prompt: Any, **options: Unpack[Options]) -> Handle:
        """Answer one prompt in the engine's own thread, where all submitted prompts share passes.

        Options as for `generate`. The handle waits for the answer, iterates over it (in asyncio,
        too) or cancels it. Iterating needs a tokenizer, as streaming does.
        """
        streaming = self.model.tokenizer is not None
        (sequence,) = self.prepare(options).sequences([prompt], streaming=streaming)
        return Handle(self.thread, sequence, self)

    def chat(self, system: str | None = None, **options: Unpack[Options]) -> Chat:
        """Start a conversation that keeps cache and drafter state between turns."""
        if system is not None and not isinstance(system, str):
            raise OptionError(f"system must be a text, got {shown(system)}")
        self.prepare(options)  # to report a wrong option now, not with the first message
        return Chat(self.resources, self.prepare, system, options)

    def close(self) -> None:
        """End submitted requests, and save earlier answers if `answers_file` was given.

        Raises WriteError.
        """
        self.thread.close()
        if self.answers is not None and self.answers.path is not None:
            self.answers.save()

    def prepare(self, options: Mapping[str, Any], began: float | None = None) -> Request:
        """Check the options of a call and return its request.

        `began`: time of the call by `time.perf_counter`; None: now.
        """
        began, given = perf_counter() if began is None else began, dict(options)
        drafting = self.drafting(given.pop("drafter", None), given.pop("budget", None))
        return Request.of(drafting, given, began)

    def drafting(
        self, drafter: str | Drafter | None = None, budget: BudgetSpec | None = None
    ) -> Drafting:
        """Return how a call drafts. Each configuration is bound once, since it may load a model."""
        if drafter is None or (config := parse(drafter)) in self._default:
            made = self._default[self.drafter]
        else:
            made = self._of_call(config)
        return made if budget is None else replace(made, budget=checked_budget(budget))

    def _of_call(self, config: Drafter) -> Drafting:
        """Bind a call's drafter, unless a recent call has; forget the least recent one."""
        with self._lock:
            binding = self._binding.setdefault(config, threading.RLock())
        with binding:
            made = self._called.get(config) or self._bound(config)
            with self._lock:
                self._called[config] = made
                self._called.move_to_end(config)
                if len(self._called) > _CALLED:
                    self._called.popitem(last=False)
        return made

    def _bound(self, config: Drafter) -> Drafting:
        return Drafting.of(self.model, config, self.budget, self.cost, self.answers)
