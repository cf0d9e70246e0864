"""Request: turns prompts and options into sequences, for all interfaces."""

from __future__ import annotations

import copy
import gc
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import FunctionType, ModuleType
from typing import Any, Literal, SupportsFloat, SupportsIndex, TypedDict

import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.core.drafter import Drafter
from draftsmith.core.sampling import Distribution, Gumbel, Processor, SamplingParams, TorchSampler
from draftsmith.core.sequence import end_rule
from draftsmith.engine.drafting import Drafting
from draftsmith.engine.sequence import TextSequence
from draftsmith.errors import OptionError, PromptError, UnknownName
from draftsmith.model import generation_config
from draftsmith.model.load import check_mode
from draftsmith.model.loaded import LoadedModel
from draftsmith.text import tokenizer as text
from draftsmith.text.grammar import Compiled, Grammar, GrammarState
from draftsmith.text.thoughts import ThinkingState, Thoughts
from draftsmith.text.vocab import Vocabulary
from draftsmith.values import hint, is_number, shown

DRAFT_SEED = 0x9E3779B97F4A7C15
"""Separates a drafter's draws from the target's, also from those of seed + 1."""


class Options(TypedDict, total=False):
    """Options of a call: drafting, and the fields of `SamplingParams`.

    The default of an absent option, or None, is the engine's or the model's generation_config's.
    """

    drafter: str | Drafter | None
    budget: SupportsIndex | Literal["auto", "drafter"] | None
    prediction: str | abc.Sequence[SupportsIndex] | Tensor | NDArray[Any] | None
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
    stop: str | abc.Sequence[str] | None
    stop_token_ids: SupportsIndex | abc.Sequence[SupportsIndex] | Tensor | NDArray[Any] | None
    seed: SupportsIndex | None
    processors: Processor | abc.Sequence[Processor] | None
    logprobs: bool | None


_SAMPLING = {field.name for field in fields(SamplingParams)}
INSTEAD_OF_PROMPT = dict.fromkeys(
    ("input_ids", "inputs", "messages", "prompts", "text"), "pass it first, without a name"
)
"""Names of the prompt in other libraries."""
_INSTEAD = {
    "best_of": "use n",
    "do_sample": "temperature above 0 samples, temperature=0 is greedy",
    "eos_token_id": "use stop_token_ids",
    "guided_json": "use grammar=Grammar.json_schema(…)",
    "guided_regex": "use grammar=Grammar.regex(…)",
    "history": "set or edit `chat.messages`",
    "logits_processor": "use processors",
    "messages": "they are the prompt; a chat's are in `chat.messages`",
    "max_length": "use max_new_tokens, which does not count the prompt",
    "n": "a stream or a chat gives one answer; use generate() for n answers",
    "num_beams": "beam search is not speculative; use the model's own generate()",
    "num_return_sequences": "use n",
    "progress": "only generate() has it",
    "prompt_lookup_num_tokens": "use drafter=\"prompt_lookup\"",
    "response_format": "use grammar=Grammar.json_schema(…)",
    "stop_strings": "use stop",
    "system_prompt": "pass it to chat() first, or as the first message",
    "stopping_criteria": "use stop or stop_token_ids, or accelerate(model)",
    "streamer": "use stream()",
} | dict.fromkeys(
    ("answers", "answers_file", "cost", "device", "device_map", "dtype", "exact", "max_batch",
     "memory", "prefixes", "prepack", "revision", "store", "tokenizer", "torch_dtype",
     "trust_remote_code"),
    "pass it to Engine(…), for all its answers",
)  # fmt: skip
"""Option names of transformers and of servers → what to use here."""


@dataclass(frozen=True)
class Request:
    """The checked options of one call; creates the sequences for its prompts."""

    drafting: Drafting
    sampling: SamplingParams
    prediction: tuple[int, ...]
    template: Mapping[str, Any]
    settings: Mapping[str, Any]
    """Values of the model's generation_config that apply to every answer."""
    began: float
    """Time of the call, or of the request's arrival."""
    salt: str
    """Only requests with the same salt share cached prefixes and earlier answers."""
    grammar: Compiled | None = None
    thoughts: Thoughts | None = None

    @classmethod
    def of(cls, drafting: Drafting, options: Mapping[str, Any], began: float) -> Request:
        """Check the options of a call; raise OptionError, also for a model in training mode.

        A grammar is compiled here, unless it is cached.
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
        ids = text.predicted(model.tokenizer, prediction, model.vocab_size)
        settings = generation_config.given(model.generation_config)
        params = sampling(model, given)
        compiled = None if grammar is None else model.grammars.compile(grammar, end_ids(model))
        return cls(drafting, params, ids, template, settings, began, salt or "", compiled, thoughts)

    def encode(self, prompt: Any) -> list[int]:
        """Return the ids of a prompt that fits the model; raise PromptError for other prompts."""
        answered = self.sampling.max_new_tokens > 0
        return encode(self.drafting.model, prompt, self.template, answered)

    def sequences(
        self, prompts: abc.Sequence[Any], n: int = 1, *, streaming: bool = False
    ) -> list[TextSequence]:
        """Create `n` sequences per prompt, with the seeds seed, seed+1, … and copied processors."""
        encoded = []
        for index, prompt in enumerate(prompts):
            try:
                encoded.append(self._for_prompt(prompt))
            except PromptError as error:
                if len(prompts) == 1:
                    raise
                raise PromptError(f"prompt {index} of {len(prompts)}: {error}") from error
        if len(encoded) * n == 1:
            request, ids, preceding = encoded[0]
            return [request.sequence(ids, preceding, streaming=streaming)]
        return [
            request._for_answer(number).sequence(ids, preceding, streaming=streaming)
            for request, ids, preceding in encoded
            for number in range(n)
        ]

    def _for_prompt(self, prompt: Any) -> tuple[Request, list[int], tuple[int, ...]]:
        """Return this request for one prompt, and the prompt's ids for `sequence`."""
        request, ids, is_text = self, self.encode(prompt), isinstance(prompt, str)
        continued = not is_text and text.continues(prompt, self.template)
        if continued and self.thoughts is not None:
            request = replace(self, thoughts=self.thoughts.after(prompt[-1]["content"]))
        # The answer to messages begins a new text; ids are taken for a whole prompt. A grammar
        # counts the space before the first word, too.
        if is_text or continued or (self.grammar is not None and self.thoughts is None):
            return request, ids, text.last_written(self.drafting.model.tokenizer, ids)
        return request, ids, ()

    def _for_answer(self, number: int) -> Request:
        """Return this request with the seed and processors of one of the answers to a prompt."""
        seed = None if self.sampling.seed is None else self.sampling.seed + number
        processors = own(self.sampling.processors)
        return replace(self, sampling=replace(self.sampling, seed=seed, processors=processors))

    def sequence(
        self, ids: abc.Sequence[int], preceding: tuple[int, ...] = (), *, streaming: bool = False
    ) -> TextSequence:
        """Create a sequence with its text; `preceding`: ids decoded before the answer's text."""
        model, drafter, params = self.drafting.model, self.drafting.drafter, self.sampling
        settings = self.settings
        if params.min_new_tokens:  # takes precedence in `generate`, too
            settings = {**settings, "min_length": None}
        strings, stop_ids = text.split_stops(model.tokenizer, params.stop)
        stream = None
        if streaming or strings:
            stream = text.TextStream(model.tokenizer, strings, preceding=preceding)
        ends = [*end_ids(model), *params.stop_token_ids]
        first, further = generation_config.config_processors(settings, len(ids), ends, model.device)
        thinking, grammar = self._thinking(ids), None
        if self.grammar is not None:
            grammar = GrammarState(self.grammar, len(ids), thinking)
        # After all changes to the scores.
        last = [state for state in (grammar, thinking) if state is not None]
        distribution = Distribution.of(
            replace(params, processors=(*further, *params.processors, *last)),
            len(ids),
            ends,
            generation_config.banned(settings, model.vocab_size),
            first,
        )
        room, limit = model.context_length, params.max_new_tokens
        why = self.drafting.needs.why
        sequence = TextSequence(
            self.drafting,
            ids,
            distribution=distribution,
            sampler=(
                Gumbel(params.seed)
                if drafter.shares_noise
                else TorchSampler.seeded(params.seed, model.device)
            ),
            limit=limit if room is None else min(limit, room - len(ids)),
            # The text comes first: the token that ends an answer may complete a stop string.
            stop_rules=[*([stream] if stream is not None else []), end_rule([*ends, *stop_ids])],
            sampling=params,
            prediction=self.prediction,
            draft_seed=None if params.seed is None else (params.seed ^ DRAFT_SEED) % 2**63,
            device=model.device,
            stream=stream,
            remarks=notices(model, settings) + ((why,) if why else ()),
            began=self.began,
            salt=self.salt,
            preceding=preceding,
        )
        if params.logprobs:
            sequence.logprobs = []
        sequence.context.grammar = grammar
        if self.drafting.answers is not None:
            sequence.context.earlier = self.drafting.answers.of(self.salt)
        if sequence.limit <= 0:
            sequence.finish_reason = "length"
        return sequence

    def _thinking(self, ids: abc.Sequence[int]) -> ThinkingState | None:
        """Return the progress of the reasoning after `ids`, if anything depends on it."""
        if self.thoughts is None or (self.grammar is None and self.thoughts.limit is None):
            return None
        model = self.drafting.model
        known = None if self.grammar is None else Vocabulary.of(model.tokenizer, model.vocab_size)
        return ThinkingState(self.thoughts, model.tokenizer, ids, known)


def encode(
    model: LoadedModel,
    prompt: Any,
    template: Mapping[str, Any] | None = None,
    answered: bool = True,
) -> list[int]:
    """Return the ids of a prompt that fits the model; raise PromptError for other prompts.

    `answered`: whether the context must have room for a token of the answer.
    """
    ids = text.encode_prompt(model.tokenizer, prompt, template or {})
    size = model.vocab_size  # read once: the property takes longer than comparing an id
    wrong = next((i for i in ids if not 0 <= i < size), None)
    if wrong is not None:
        raise PromptError(f"token ids of this model are from 0 to {size - 1}, got {wrong}")
    if not ids:
        raise PromptError("the prompt is empty: it has no tokens")
    if model.context_length is not None and len(ids) + answered > model.context_length:
        raise PromptError(
            f"the prompt has {len(ids)} tokens, but this model's context is "
            f"{model.context_length} tokens including the answer; shorten the prompt"
        )
    return ids


def sampling(model: LoadedModel, options: Mapping[str, Any]) -> SamplingParams:
    """Create SamplingParams, with the model's generation_config for options that are not given."""
    for name in options:
        if name not in _SAMPLING:
            known = Options.__annotations__
            raise UnknownName("option", name, known, hint(name, [*known], _INSTEAD))
    merged = generation_config.sampling_defaults(generation_config.given(model.generation_config))
    merged |= {name: value for name, value in options.items() if value is not None}
    # A single value needs no sequence: stop="\n", processors=my_processor, stop_token_ids=2.
    for name in ("stop", "processors"):
        value = merged.get(name, ())
        many = isinstance(value, abc.Sequence) and not isinstance(value, str)
        merged[name] = tuple(value) if many else (value,)
    if is_number(merged.get("stop_token_ids"), int):
        merged["stop_token_ids"] = (merged["stop_token_ids"],)
    params = SamplingParams(**merged)
    vocab = model.vocab_size
    for name in ("logit_bias", "stop_token_ids"):
        wrong = next((i for i in getattr(params, name) if not 0 <= i < vocab), None)
        if wrong is not None:
            raise OptionError(f"{name} must be token ids from 0 to {vocab - 1}, got {wrong}")
    return params


def end_ids(model: LoadedModel) -> list[int]:
    """Return the model's end-of-sequence ids."""
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = getattr(model.tokenizer, "eos_token_id", None)
    if found is None:
        return []
    return [int(found)] if isinstance(found, int) else [int(i) for i in found]


def notices(model: LoadedModel, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return why a model cannot be accelerated fully, or which of its settings are not applied."""
    return model.reasons + generation_config.not_applied(settings)


def own(processors: tuple[Processor, ...]) -> tuple[Processor, ...]:
    """Copy processors for one sequence, because stateful ones must not be shared.

    Models inside them are shared: they have no state, and copies would be large. Raises OptionError
    for a processor that cannot be copied.
    """
    try:
        return copy.deepcopy(processors, {id(held): held for held in weights(processors)})
    except Exception as error:
        raise OptionError(
            f"several answers in one call need copies of the processors, which failed ({error}); "
            "request one answer per call"
        ) from error


def weights(root: object) -> list[torch.nn.Module | torch.nn.Parameter]:
    """Return every module and parameter that `deepcopy` of an object would reach."""
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
