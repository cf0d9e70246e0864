"""From a prompt and options to a session: the only place that prepares answers for users."""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import FunctionType, ModuleType
from typing import Any, Literal, SupportsFloat, SupportsIndex, TypedDict

import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.core.budget import Budget, FixedBudget
from draftsmith.core.cost import CostCurve
from draftsmith.core.drafter import Drafter
from draftsmith.core.sampling import Distribution, Gumbel, Processor, SamplingParams, TorchSampler
from draftsmith.core.session import EndTokens, Session, Stalls
from draftsmith.core.target import Needs
from draftsmith.drafters.answer_cache import AnswerCache
from draftsmith.engine.jobs import Job
from draftsmith.errors import OptionError, PromptError, UnknownName
from draftsmith.model import generation_config
from draftsmith.model.load import check_mode
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.openmp import end_team
from draftsmith.model.taps import needs_of
from draftsmith.text import tokenizer as text
from draftsmith.text.grammar import Compiled, Grammar
from draftsmith.text.thoughts import ThinkingState, Thoughts
from draftsmith.text.vocab import Vocabulary
from draftsmith.values import is_number, number, shown, token_ids

BudgetSpec = int | Literal["auto", "drafter"]
"""Draft nodes per step: a number, `auto` (by what pays), or `drafter` (its paper's width)."""

DRAFT_SEED = 0x9E3779B97F4A7C15
"""Keeps a drafter's draws apart from the target's, also from those of seed + 1."""


class Options(TypedDict, total=False):
    """What a call may choose: its drafts, and the fields of `SamplingParams`.

    What is not given, or None, is the engine's choice or that of the model's generation_config.
    """

    drafter: str | Drafter | None
    budget: SupportsIndex | Literal["auto", "drafter"] | None
    prediction: str | Sequence[SupportsIndex] | Tensor | NDArray[Any] | None
    grammar: Grammar | None
    thoughts: Thoughts | None
    chat_template_kwargs: Mapping[str, Any] | None
    cache_salt: str | None
    temperature: SupportsFloat | None
    top_k: SupportsIndex | None
    top_p: SupportsFloat | None
    min_p: SupportsFloat | None
    repetition_penalty: SupportsFloat | None
    presence_penalty: SupportsFloat | None
    frequency_penalty: SupportsFloat | None
    logit_bias: Mapping[int, float] | None
    max_new_tokens: SupportsIndex | None
    min_new_tokens: SupportsIndex | None
    stop: str | Sequence[str] | None
    stop_token_ids: SupportsIndex | Sequence[SupportsIndex] | Tensor | NDArray[Any] | None
    seed: SupportsIndex | None
    processors: Processor | Sequence[Processor] | None
    logprobs: bool | None


_SAMPLING = {field.name for field in fields(SamplingParams)}
INSTEAD_OF_PROMPT = dict.fromkeys(
    ("input_ids", "inputs", "messages", "prompts", "text"), "give it first, without a name"
)
"""What a prompt is called elsewhere."""
_INSTEAD = {
    "best_of": "use n",
    "do_sample": "temperature above 0 samples, temperature=0 is greedy",
    "eos_token_id": "use stop_token_ids",
    "guided_json": "use grammar=Grammar.json_schema(…)",
    "guided_regex": "use grammar=Grammar.regex(…)",
    "logits_processor": "use processors",
    "max_length": "use max_new_tokens, which does not count the prompt",
    "n": "a stream or a chat gives one answer; n needs generate()",
    "num_beams": "beam search is not speculative; use the model's own generate()",
    "num_return_sequences": "use n",
    "prompt_lookup_num_tokens": "use drafter=\"prompt_lookup\"",
    "response_format": "use grammar=Grammar.json_schema(…)",
    "stop_strings": "use stop",
    "stopping_criteria": "use stop or stop_token_ids, or accelerate(model)",
    "streamer": "use stream()",
} | dict.fromkeys(
    ("answers", "answers_file", "cost", "device", "device_map", "dtype", "exact", "max_batch",
     "memory", "prefixes", "prepack", "revision", "tokenizer", "torch_dtype", "trust_remote_code"),
    "give it to Engine(…), for all its answers",
)  # fmt: skip
"""Names from transformers and from servers, and what does the same here."""


@dataclass(frozen=True)
class Drafting:
    """Who drafts a model's answers, and how wide; serves any number of sessions."""

    model: LoadedModel
    drafter: Drafter
    """Bound to the model."""
    needs: Needs
    budget: BudgetSpec
    cost: CostCurve
    answers: AnswerCache | None = None
    """Of earlier answers, where they are remembered."""
    stalls: Stalls = field(default_factory=Stalls)
    """When the drafter is asked again that held up a pass."""

    @classmethod
    def of(
        cls, model: LoadedModel, drafter: Drafter, budget: BudgetSpec, cost: CostCurve
    ) -> Drafting:
        """Bind a drafter to a model, which may load another one."""
        bound = drafter.bind(model.facts)
        made = cls(model, bound, needs_of(bound, model), checked_budget(budget), cost)
        end_team()  # models were loaded, and tried; other threads may drive them
        return made

    def session(self, ids: Sequence[int], **options: Any) -> Session:
        """A sequence ready to start; `options` are those of `Session` about what is emitted."""
        return Session(
            ids,
            drafter=self.drafter,
            needs=self.needs,
            budget=self._budget(),
            vocab_size=self.model.vocab_size,
            stalls=self.stalls,
            **options,
        )

    def _budget(self) -> Budget:
        width = self.drafter.preferred_width()
        if width == 0:
            return FixedBudget(0)
        if self.budget == "auto":
            return self.drafter.auto_budget(self.cost)
        return FixedBudget(width if self.budget == "drafter" else self.budget)


@dataclass(frozen=True)
class Request:
    """One call's choices, checked before anything runs; makes the jobs for its prompts."""

    drafting: Drafting
    sampling: SamplingParams
    prediction: tuple[int, ...]
    template: Mapping[str, Any]
    settings: Mapping[str, Any]
    """What the model's generation_config asks of every answer."""
    began: float
    """When the call was made, or the request arrived."""
    salt: str
    """Cached prefixes and answers are shared with requests of the same salt only."""
    grammar: Compiled | None = None
    thoughts: Thoughts | None = None

    @classmethod
    def of(cls, drafting: Drafting, options: Mapping[str, Any], began: float) -> Request:
        """Raises OptionError, also for a model that was put into training mode meanwhile.

        A grammar is compiled here, unless it was before.
        """
        given, model = dict(options), drafting.model
        check_mode(model.model)
        template = given.pop("chat_template_kwargs", None)
        template = {} if template is None else template
        if not isinstance(template, Mapping):
            raise OptionError(
                f"chat_template_kwargs must map names to values, got {shown(template)}"
            )
        prediction = given.pop("prediction", None)
        prediction = () if prediction is None else prediction
        salt = given.pop("cache_salt", None)
        if not isinstance(salt, str | None):
            raise OptionError(f"cache_salt must be a text, got {shown(salt)}")
        grammar, thoughts = given.pop("grammar", None), given.pop("thoughts", None)
        if not isinstance(thoughts, Thoughts | None):
            raise OptionError(f"thoughts must be made by Thoughts.of, got {shown(thoughts)}")
        if isinstance(prediction, str):
            prediction = text.encode(model.tokenizer, prediction)
        else:
            prediction = token_ids("prediction", prediction, what="a text or token ids")
        size = model.vocab_size
        known = tuple(i for i in prediction if 0 <= i < size)
        settings = generation_config.given(model.generation_config)
        params = sampling(model, given)
        compiled = None if grammar is None else model.grammars.compile(grammar, end_ids(model))
        return cls(
            drafting, params, known, template, settings, began, salt or "", compiled, thoughts
        )

    def encode(self, prompt: Any) -> list[int]:
        """Ids of a prompt that fits the model; raises PromptError."""
        return encode(self.drafting.model, prompt, self.template)

    def jobs(self, prompts: Sequence[Any], n: int = 1, *, streaming: bool = False) -> list[Job]:
        """`n` answers to each prompt, with seeds seed, seed+1, … and processors of their own."""
        encoded = []
        for index, prompt in enumerate(prompts):
            try:
                ids = self.encode(prompt)
            except PromptError as error:
                if len(prompts) == 1:
                    raise
                raise PromptError(f"prompt {index} of {len(prompts)}: {error}") from error
            # A text goes on; an answer to messages, and maybe to ids, begins one.
            goes_on = isinstance(prompt, str) or text.continues(prompt, self.template)
            tokenizer = self.drafting.model.tokenizer
            encoded.append((ids, text.last_written(tokenizer, ids) if goes_on else ()))
        if len(encoded) * n == 1:
            return [self.job(*encoded[0], streaming=streaming)]
        return [
            self._own(turn).job(*one, streaming=streaming) for one in encoded for turn in range(n)
        ]

    def _own(self, turn: int) -> Request:
        """The same request with a seed and processors for one of its answers."""
        seed = None if self.sampling.seed is None else self.sampling.seed + turn
        processors = own(self.sampling.processors)
        return replace(self, sampling=replace(self.sampling, seed=seed, processors=processors))

    def job(
        self, ids: Sequence[int], behind: tuple[int, ...] = (), *, streaming: bool = False
    ) -> Job:
        """A session ready to start, with its text, which is decoded `behind` some ids."""
        model, drafter, params = self.drafting.model, self.drafting.drafter, self.sampling
        settings = self.settings
        strings, stop_ids = text.split_stops(model.tokenizer, params.stop)
        stream = None
        if streaming or strings:
            stream = text.TextStream(model.tokenizer, strings, behind=behind)
        ends = [*end_ids(model), *params.stop_token_ids]
        first, further = generation_config.config_processors(settings, len(ids), ends, model.device)
        thinking, grammar = self._thinking(ids), None
        if self.grammar is not None:
            grammar = self.grammar.state(len(ids), thinking)
        # Whatever the others made of the scores.
        last = [state for state in (grammar, thinking) if state is not None]
        distribution = Distribution.of(
            replace(params, processors=(*further, *params.processors, *last)),
            len(ids),
            ends,
            generation_config.banned(settings, model.vocab_size),
            first,
        )
        room, limit = model.context_length, params.max_new_tokens
        session = self.drafting.session(
            ids,
            distribution=distribution,
            sampler=(
                Gumbel(params.seed)
                if drafter.shares_noise
                else TorchSampler.seeded(params.seed, model.device)
            ),
            limit=limit if room is None else min(limit, room - len(ids)),
            # The text goes first: the token that ends an answer may also complete a stop string.
            stop_rules=[*([stream] if stream is not None else []), EndTokens([*ends, *stop_ids])],
            sampling=params,
            prediction=self.prediction,
            draft_seed=None if params.seed is None else (params.seed ^ DRAFT_SEED) % 2**63,
            device=model.device,
        )
        if params.logprobs:
            session.logprobs = []
        session.context.grammar = grammar
        if self.drafting.answers is not None:
            session.context.earlier = self.drafting.answers.of(self.salt)
        if session.limit <= 0:
            session.finish_reason = "length"
        why = self.drafting.needs.why
        told = notices(model, settings) + ((why,) if why else ())
        return Job(session, model.tokenizer, stream, told, self.began, self.salt, behind)

    def _thinking(self, ids: Sequence[int]) -> ThinkingState | None:
        """Where the thoughts of an answer to `ids` stand, if anything depends on that."""
        if self.thoughts is None or (self.grammar is None and self.thoughts.limit is None):
            return None
        model = self.drafting.model
        known = None if self.grammar is None else Vocabulary.of(model.tokenizer, model.vocab_size)
        return ThinkingState(self.thoughts, model.tokenizer, ids, known)


def encode(model: LoadedModel, prompt: Any, template: Mapping[str, Any] | None = None) -> list[int]:
    """Ids of a prompt that fits the model; raises PromptError."""
    ids = text.encode_prompt(model.tokenizer, prompt, template or {})
    size = model.vocab_size  # once: asking the model takes longer than comparing an id
    wrong = next((i for i in ids if not 0 <= i < size), None)
    if wrong is not None:
        raise PromptError(f"token id {wrong} is outside this model's 0…{size - 1}")
    if not ids:
        raise PromptError("the prompt is empty: it has no tokens")
    if model.context_length is not None and len(ids) >= model.context_length:
        raise PromptError(
            f"the prompt has {len(ids)} tokens, but this model's context is "
            f"{model.context_length}, answer included; shorten the prompt"
        )
    return ids


def sampling(model: LoadedModel, options: Mapping[str, Any]) -> SamplingParams:
    """The fields of SamplingParams, those not given from the model's generation_config."""
    for name in options:
        if name not in _SAMPLING:
            raise UnknownName("option", name, Options.__annotations__, _INSTEAD.get(name))
    merged = generation_config.sampling_defaults(generation_config.given(model.generation_config))
    merged |= {name: value for name, value in options.items() if value is not None}
    # One alone may be given bare: stop="\n", processors=my_processor, stop_token_ids=2.
    for name in ("stop", "processors"):
        value = merged.get(name, ())
        many = isinstance(value, Sequence) and not isinstance(value, str)
        merged[name] = tuple(value) if many else (value,)
    if is_number(merged.get("stop_token_ids"), int):
        merged["stop_token_ids"] = (merged["stop_token_ids"],)
    params = SamplingParams(**merged)
    vocab = model.vocab_size
    for name in ("logit_bias", "stop_token_ids"):
        wrong = next((i for i in getattr(params, name) if not 0 <= i < vocab), None)
        if wrong is not None:
            raise OptionError(f"{name} names token id {wrong}; this model has 0…{vocab - 1}")
    return params


def end_ids(model: LoadedModel) -> list[int]:
    """The model's end-of-sequence ids."""
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = getattr(model.tokenizer, "eos_token_id", None)
    if found is None:
        return []
    return [int(found)] if isinstance(found, int) else [int(i) for i in found]


def notices(model: LoadedModel, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Why a model cannot be accelerated fully, or its settings not be followed to the letter."""
    return model.capabilities.reasons + generation_config.not_applied(settings)


def checked_budget(budget: object) -> BudgetSpec:
    """What a budget means, a number also as it is typed; raises OptionError for other words."""
    if isinstance(budget, str):
        if budget == "auto":
            return "auto"
        if budget == "drafter":
            return "drafter"
        if budget.isdecimal():
            return int(budget)
    note = "(draft nodes per pass), 'auto' or 'drafter'"
    return number("budget", budget, int, least=0, note=note)


def own(processors: tuple[Processor, ...]) -> tuple[Processor, ...]:
    """Copies for one sequence: what a stateful processor counts must not be shared.

    Models are: they are no state, and a copy costs their size. Raises OptionError for a processor
    that cannot be copied.
    """
    try:
        return copy.deepcopy(processors, {id(held): held for held in weights(processors)})
    except Exception as error:
        raise OptionError(
            f"processors cannot be copied, which several answers in one call need ({error}); "
            "ask for one answer per call"
        ) from error


def weights(root: object) -> list[torch.nn.Module | torch.nn.Parameter]:
    """Every module and parameter that an object reaches the way `deepcopy` would."""
    found: list[torch.nn.Module | torch.nn.Parameter] = []
    seen, waiting = set[int](), [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | FunctionType | ModuleType):
            continue
        seen.add(id(one))
        if isinstance(one, torch.nn.Module | torch.nn.Parameter):
            found.append(one)
        else:
            waiting += gc.get_referents(one)
    return found
