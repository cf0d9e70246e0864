"""`accelerate(model)`: the user's own `model.generate` runs through our loop, output unchanged.

`generate` is replaced on the instance by an `Accelerated`. transformers still prepares everything
(processors, criteria, lengths, special tokens) and then calls our decoding through its
`custom_generate=` hook (4.57 on). What cannot be accelerated goes to the original `generate`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import time
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerationMode
from transformers.generation.utils import (
    GenerateDecoderOnlyOutput,
    is_deepspeed_zero3_enabled,
    is_fsdp_managed_module,
)

from draftsmith.core.budget import CostCurve, FixedBudget
from draftsmith.core.drafter import Drafter
from draftsmith.core.loop import start, step
from draftsmith.core.sampling import Chance, Dice, Gumbel, Law, Processor, SamplingParams
from draftsmith.core.session import Session
from draftsmith.core.stats import Stats, total
from draftsmith.core.target import NO_NEEDS, Needs, Target
from draftsmith.drafters import registry
from draftsmith.errors import LoadError, OptionError, UnsupportedError
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import REST, Runner
from draftsmith.model.taps import needs_of

_NO_LIMIT = 1 << 30

_NEEDS_PLAIN = ("output_attentions", "output_hidden_states", "token_healing", "is_assistant",
                "return_legacy_cache")  # fmt: skip
"""Config entries that ask for something only one-token passes or the plain cache can give."""

_OUR_CACHE = (None, "dynamic", "dynamic_full")
"""Values of `cache_implementation` that our cache stands in for."""

_ROW_BY_ROW = frozenset((
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor",
    "WatermarkLogitsProcessor", "TemperatureLogitsWarper", "TopPLogitsWarper", "TopKLogitsWarper",
    "MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper",
    "LogitNormalization", "ExponentialDecayLengthPenalty", "MaxLengthCriteria", "MaxTimeCriteria",
    "StopStringCriteria", "EosTokenCriteria",
))  # fmt: skip
"""transformers' processors and criteria that treat each row of a batch on its own, statelessly."""


class NotAcceleratedWarning(UserWarning):
    """A call ran through the original `generate`; the message says why. Once per reason."""


class DraftingNotice(UserWarning):
    """How the drafter drafts for this model: by what calibration, or by what algorithm."""


def accelerate(
    model: Any,
    drafter: str | Drafter = "auto",
    *,
    budget: int | str = "auto",
    tokenizer: Any = None,
) -> Accelerated:
    """Make `model.generate` speculative, with the same output; also a context manager.

    `budget` is the number of guessed tokens a pass may carry, or "auto". A second call replaces
    the first. What cannot be accelerated still runs, with one NotAcceleratedWarning per reason.
    A drafter that uses a calibration or chose its algorithm says so in a DraftingNotice.
    `tokenizer` is the model's own, for drafters that write another vocabulary than its.
    Drafters that guess keep the tokens of a seed for one sequence; `generate` draws the rows of a
    batch jointly and we one by one, so there only the distribution is the same.
    Raises UnknownName or OptionError for options that do not exist, OptionError for a model in
    training mode, LoadError for what is no transformers model, UnsupportedError for a drafter that
    needs what this model cannot record.
    """
    chosen = registry.parse(drafter)
    if budget != "auto" and (type(budget) is not int or budget < 0):
        raise OptionError(f"budget={budget!r} cannot work; give 'auto' or a number of at least 0")
    own = _unwrapped(model)
    if not isinstance(own, GenerationMixin):
        raise LoadError(f"{type(own).__name__} has no generate() of transformers to accelerate")
    restore(own)
    reason, loaded = _why_not(own), None
    if reason is None:
        loaded, reason = _load(own, tokenizer)
    needs = NO_NEEDS
    if loaded is not None:
        chosen = chosen.bind(loaded.facts)
        needs = needs_of(chosen, loaded)
    handle = own.generate = Accelerated(own, loaded, chosen, budget, needs)
    if reason is not None:
        handle.refuse(reason)
    if needs.why:
        warnings.warn(needs.why, DraftingNotice, stacklevel=2)
    return handle


def restore(model: Any) -> None:
    """Give `model` its own `generate` back; does nothing if it is not accelerated."""
    own = _unwrapped(model)
    handle = vars(own).get("generate")
    if not isinstance(handle, Accelerated):
        return
    if handle.previous is None:
        del own.generate
    else:
        own.generate = handle.previous


class Accelerated:
    """What stands in for `model.generate`, and the handle that `accelerate` returns."""

    def __init__(
        self,
        model: Any,
        loaded: LoadedModel | None,
        drafter: Drafter,
        budget: int | str,
        needs: Needs = NO_NEEDS,
    ) -> None:
        # Not its annotations or attributes: they need not be picklable, and the model may be saved.
        functools.update_wrapper(self, model.generate, ("__name__", "__qualname__", "__doc__"), ())
        self.original = model.generate
        self.previous = vars(model).get("generate")
        """What `restore` puts back on the instance; None: nothing, the class has it."""
        self.model = model
        self.drafter = drafter
        self.budget = budget if isinstance(budget, int) else None
        """Guessed tokens a pass may carry; None: as many as pay."""
        self.needs = needs
        """What the drafter asks of this model; `why` in it says where its choices come from."""
        self.model_reason: str | None = None
        """Why no call of this model can be accelerated, if so."""
        self.stats: Stats | None = None
        """Of the last call, summed over its rows; None if it was not accelerated."""
        self.last_notice: str | None = None
        """Why the last call was not accelerated; None if it was."""
        self._loaded = loaded
        self._cost = CostCurve()
        self._told: set[str] = set()

    def __enter__(self) -> Accelerated:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Give the model its own `generate` back, unless another `accelerate` replaced this one."""
        if vars(self.model).get("generate") is self:
            restore(self.model)

    def refuse(self, reason: str) -> None:
        """Run every call of this model plainly, for this reason."""
        self.model_reason = reason
        self._notice(reason, stacklevel=4)

    def _notice(self, reason: str, stacklevel: int = 3) -> None:
        self.last_notice = reason
        if reason not in self._told:
            self._told.add(reason)
            warnings.warn(f"not accelerated: {reason}", NotAcceleratedWarning, stacklevel)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`generate`, with its own arguments and results; `past_key_values` is always None."""
        self.stats = self.last_notice = None
        call = self._by_name(args, kwargs)
        config, reason = self._configure(call)
        if reason is not None:
            self._notice(reason)
        # Without the tokenizer for its stop strings, `generate` has an error message of its own.
        if config is None or (config.stop_strings is not None and call.get("tokenizer") is None):
            return self.original(*args, **kwargs)
        call = _with_stop_strings(call, config.stop_strings, self.model.generation_config)
        decode = functools.partial(self._decode, streamer=call.get("streamer"))
        return self.original(**call, custom_generate=decode)

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        signature = inspect.signature(self.original)
        call = dict(signature.bind(*args, **kwargs).arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                call |= call.pop(parameter.name, {})
        return call

    def _configure(self, call: dict[str, Any]) -> tuple[Any | None, str | None]:
        """The generation config this call amounts to, or the reason to run it plainly."""
        if self.model_reason is not None:
            return None, self.model_reason
        for name in ("custom_generate", "assistant_model", "synced_gpus"):
            if call.get(name):
                return None, f"{name} was given"
        if self.model.training:
            return None, "the model is in training mode; call model.eval()"
        handled = {"tokenizer", "assistant_tokenizer", "trust_remote_code"}
        handled |= set(inspect.signature(self.original).parameters) - {"use_model_defaults"}
        options = {name: value for name, value in call.items() if name not in handled}
        try:
            given = call.get("generation_config")
            # Private, but it is the very function that `generate` itself will use, in any version.
            config, inputs = self.model._prepare_generation_config(given, **options)
            reason = _why_config(config) or _why_inputs(inputs)
        except Exception as error:
            # Whatever is wrong with it, `generate` should be the one to say.
            return None, f"its generation config cannot be read ({error})"
        return (config, None) if reason is None else (None, reason)

    def _decode(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        *,
        streamer: Any = None,
        **inputs: Any,
    ) -> Any:
        """The loop that `generate` calls: same arguments and results as its own `_sample`."""
        mask = inputs.get("attention_mask")
        reason = _why_ragged(input_ids, mask)
        if reason is None and input_ids.shape[0] > 1:
            rules = [*logits_processor, *stopping_criteria]
            reason = _why_batch(rules, stopping_criteria, generation_config, streamer)
        if reason is not None or self._loaded is None:
            self._notice(str(reason))
            return model._sample(
                input_ids, logits_processor, stopping_criteria, generation_config,
                streamer=streamer, **inputs,
            )  # fmt: skip
        record = Record(stopping_criteria, streamer, generation_config)
        target = Runner(self._loaded, rest=REST)
        padding = [0] * len(input_ids) if mask is None else (mask == 0).sum(1).tolist()
        sessions = []
        for index, (row, pads) in enumerate(zip(input_ids, padding, strict=True)):
            law = record.law(_of_row(logits_processor, index), row, self._loaded)
            options = self._options(row.device, index) | record.options(len(row))
            sessions.append(
                PaddedSession(row, pads, law=law, vocab_size=target.vocab_size, **options)
            )
        try:
            _run(sessions, target, self._cost)
        finally:
            self.stats = total([session.stats for session in sessions])
        if streamer is not None:
            streamer.end()
        return record.output(_sequences(input_ids, sessions, generation_config))

    def _options(self, device: torch.device, index: int) -> dict[str, Any]:
        """What a session is told about drafting."""
        fixed, drafter = self.budget, self.drafter
        return {
            "drafter": drafter,
            "needs": self.needs,
            "budget": drafter.auto_budget(self._cost) if fixed is None else FixedBudget(fixed),
            "draft_seed": _draft_seed(device, index) if drafter.sampled else None,
            "device": device,
            "chance": _chance(drafter),
        }


class PaddedSession(Session):
    """A session whose processors and criteria see the left padding, as `generate` shows it."""

    def __init__(self, row: Tensor, pads: int, **options: Any) -> None:
        super().__init__(row[pads:].tolist(), **options)
        self._padding = row[None, :pads]

    def prefix(self) -> Tensor:
        """(1, padding + T) ids so far."""
        ids = super().prefix()
        return torch.cat([self._padding, ids], 1) if self._padding.numel() else ids


class Record:
    """The stop rule that streams, keeps scores and asks the criteria, once per emitted token."""

    def __init__(self, criteria: Any, streamer: Any, config: Any) -> None:
        self.criteria = criteria
        self.streamer = streamer
        self.config = config
        self._wanted = bool(config.return_dict_in_generate)
        self.scores: tuple[Tensor, ...] | None = (
            () if self._wanted and config.output_scores else None
        )
        self.logits: tuple[Tensor, ...] | None = (
            () if self._wanted and config.output_logits else None
        )

    def __call__(self, session: Session, scores: Tensor | None) -> str | None:
        if self.scores is not None and scores is not None:
            self.scores += (scores,)
        if self.streamer is not None:
            self.streamer.put(torch.tensor(session.ids[-1:]))
        return "stop" if bool(self.criteria(session.prefix(), self.scores).all()) else None

    def law(self, processors: Any, ids: Tensor, loaded: LoadedModel) -> Law:
        """The given processors verbatim, after what `generate` does to logits before them."""
        moved = loaded.device != ids.device or loaded.dtype == torch.float64
        chain: list[Processor] = [self._receive] if moved or self.logits is not None else []
        chain += [processors] if len(processors) else []
        lazy = bool(chain) or self.scores is not None
        return Law(chain, greedy=not self.config.do_sample, lazy=lazy)

    def options(self, length: int) -> dict[str, Any]:
        """What a session of a prompt of `length` ids, padding included, is told about decoding."""
        limit = self.criteria.max_length
        return {
            "limit": _NO_LIMIT if limit is None else limit - length,
            "stop_rules": [self],
            "sampling": _sampling(self.config),
        }

    def _receive(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.to(ids.device, torch.float32)
        if self.logits is not None:
            self.logits += (scores,)
        return scores

    def output(self, sequences: Tensor) -> Any:
        """What `generate` returns."""
        if not self._wanted:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences, scores=self.scores, logits=self.logits
        )


def _run(sessions: Sequence[Session], target: Target[Any], cost: CostCurve) -> None:
    begin = time.perf_counter()
    try:
        for session in sessions:
            start(session, target)
        while active := [session for session in sessions if not session.finished]:
            step(active, target, cost)
            for session in active:
                if not session.stats.first_token_seconds:
                    session.stats.first_token_seconds = time.perf_counter() - begin
                if session.finished:
                    _close(session, target)
    finally:
        for session in sessions:
            _close(session, target)


def _close(session: Session, target: Target[Any]) -> None:
    if session.row is not None:
        target.close(session.row)
    if session.state is not None:
        session.state.close()
    session.row = session.state = None


def _of_row(processors: Any, index: int) -> Any:
    """The same processors for one row of a batch."""
    own = copy.copy(processors)
    for place, processor in enumerate(processors):
        # The repetition penalty of transformers 5 knows the left padding of every row.
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor) and len(ignored) > 1:
            own[place] = copy.copy(processor)
            own[place].prompt_ignore_length = ignored[index : index + 1]
    return own


def _chance(drafter: Drafter) -> Chance:
    """torch's global generator, what `generate` draws from; or noise seeded by it."""
    if drafter.shares_noise:
        return Gumbel(int(torch.randint(2**63 - 1, ())))
    return Dice(None)


def _draft_seed(device: torch.device, index: int) -> int:
    """For the drafter of one row: follows torch's seed without drawing from it."""
    source = torch if device.type == "cpu" else torch.get_device_module(device)
    return zlib.crc32(source.get_rng_state().cpu().numpy().tobytes()) + index


def _sequences(input_ids: Tensor, sessions: Sequence[Session], config: Any) -> Tensor:
    """(B, T) prompts and answers; shorter answers are padded on the right."""
    pad = config._pad_token_tensor
    width = max(session.generated for session in sessions)
    new = input_ids.new_full((len(sessions), width), 0 if pad is None else int(pad.flatten()[0]))
    for row, session in zip(new, sessions, strict=True):
        row[: session.generated] = torch.tensor(session.ids[session.prompt_length :])
    return torch.cat([input_ids, new], dim=1)


def _sampling(config: Any) -> SamplingParams:
    """What drafters are told about the law; the law itself is the processors'."""
    if not config.do_sample:
        return SamplingParams()
    return SamplingParams(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=config.top_k or 0,
        top_p=min(config.top_p or 1.0, 1.0),
    )


def _with_stop_strings(call: dict[str, Any], stops: Any, model_config: Any) -> dict[str, Any]:
    """The call with its stop strings as a criterion: the hook loses the tokenizer they need."""
    call = dict(call)
    tokenizer = call.pop("tokenizer", None)
    call.pop("custom_generate", None)
    if stops is None:
        return call
    call.pop("stop_strings", None)
    if (given := call.get("generation_config")) is not None:
        call["generation_config"] = given = copy.deepcopy(given)
        given.stop_strings = None
    if model_config.stop_strings is not None:
        call["stop_strings"] = None
    criteria = list(call.get("stopping_criteria") or ())
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stops))
    call["stopping_criteria"] = StoppingCriteriaList(criteria)
    return call


def _unwrapped(model: Any) -> Any:
    """The transformers model inside a PEFT model, which calls its `generate` anyway."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _load(model: Any, tokenizer: Any) -> tuple[LoadedModel | None, str | None]:
    """The model ready for our loop, or the reason why it is not."""
    try:
        loaded = load(model, tokenizer)
    except (OptionError, LoadError):
        raise
    except UnsupportedError as error:
        return None, str(error)
    except Exception as error:  # A model that breaks the self-test can still generate by itself.
        return None, f"the self-test failed ({type(error).__name__}: {error})"
    if loaded.capabilities.shape == "plain":
        return None, "; ".join(("it decodes one token per pass", *loaded.capabilities.reasons))
    return loaded, None


def _why_not(model: Any) -> str | None:
    """Why no call of this model can be accelerated, as far as its class tells."""
    kind, mixin = type(model), GenerationMixin
    if model.config.is_encoder_decoder:
        return f"{kind.__name__} is an encoder-decoder model"
    generate = vars(model).get("generate")
    if generate is not None:
        return "generate was replaced on this object already"
    if kind.generate is not mixin.generate or kind._sample is not mixin._sample:
        return f"{kind.__name__} has a generate of its own"
    if is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model):
        return "its weights are sharded, so all processes must run the same passes"
    return None


def _why_config(config: Any) -> str | None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"{mode.value.replace('_', ' ')} is neither greedy search nor sampling"
    if config.use_cache is False:
        return "use_cache=False asks for decoding without a cache"
    if config.cache_implementation not in _OUR_CACHE:
        return f"cache_implementation={config.cache_implementation!r} asks for another cache"
    asked = [name for name in _NEEDS_PLAIN if getattr(config, name, None)]
    return f"{', '.join(asked)} can only be had from plain decoding" if asked else None


def _why_inputs(inputs: dict[str, Any]) -> str | None:
    known = ("input_ids", "attention_mask")
    extra = [name for name, value in inputs.items() if value is not None and name not in known]
    return f"{', '.join(sorted(extra))} was given" if extra else None


def _why_ragged(input_ids: Tensor, mask: Tensor | None) -> str | None:
    if input_ids.ndim != 2 or not input_ids.shape[1]:
        return "the prompt is not a row of ids"
    if mask is not None and not bool((mask[:, 1:] >= mask[:, :-1]).all() & mask[:, -1].all()):
        return "the attention mask hides more than padding on the left"
    return None


def _why_batch(rules: Sequence[Any], criteria: Any, config: Any, streamer: Any) -> str | None:
    """Why rows that advance unevenly could not look like `generate`'s, which go in step."""
    if streamer is not None:
        return "a streamer gets the tokens of all rows of a batch at once"
    if config.return_dict_in_generate and (config.output_scores or config.output_logits):
        return "scores of a batch include those of rows that have already finished"
    for rule in rules:
        kind = type(rule)
        if kind.__name__ not in _ROW_BY_ROW or not kind.__module__.startswith("transformers."):
            return f"{kind.__name__} may keep a state for the whole batch"
    kinds = {type(criterion).__name__ for criterion in criteria}
    if "EosTokenCriteria" not in kinds and kinds != {"MaxLengthCriteria"}:
        return "without an end-of-sequence id, a finished row of a batch goes on with the others"
    return None
