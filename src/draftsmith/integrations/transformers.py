"""`accelerate(model)`: the user's own `model.generate` runs through our loop, output unchanged.

`generate` is replaced on the instance by an `Accelerated`. transformers still prepares everything
(processors, criteria, lengths, special tokens) and then calls our decoding through its
`custom_generate=` hook (4.57 on). Calls that cannot be accelerated go to the original `generate`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
import zlib
from collections import abc
from collections.abc import Hashable
from contextlib import AbstractContextManager
from threading import RLock
from time import perf_counter
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationMixin, StoppingCriteriaList, StopStringCriteria
from transformers.generation import utils as generation_utils
from transformers.generation.utils import GenerateDecoderOnlyOutput

from draftsmith.core.drafter import Drafter
from draftsmith.core.sampling import (
    Distribution,
    Gumbel,
    Processor,
    Sampler,
    SamplingParams,
    TorchSampler,
)
from draftsmith.core.sequence import Sequence
from draftsmith.core.stats import Stats, total
from draftsmith.drafters import registry
from draftsmith.engine.call import Call
from draftsmith.engine.drafting import BudgetSpec, Drafting, checked_budget
from draftsmith.engine.resources import Resources
from draftsmith.engine.sequence import TextSequence
from draftsmith.errors import LoadError, OptionError, UnsupportedError
from draftsmith.integrations import refusals
from draftsmith.model.changes import hooks, replaced
from draftsmith.model.exact.find import exactly
from draftsmith.model.forward import unwrapped
from draftsmith.model.generation_config import filters
from draftsmith.model.load import LOADING_HINTS, load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.openmp import end_team
from draftsmith.model.prepack import Prepacked
from draftsmith.model.prepack import prepack as lay_out
from draftsmith.model.registered import foreign_attention
from draftsmith.model.runner import new_cost
from draftsmith.values import known_options, switch

_NO_LIMIT = 1 << 30
_PREPARE = ("prepare_inputs_for_generation", "_prepare_position_ids_for_generation",
            "_update_model_kwargs_for_generation", "_prefill")  # fmt: skip
"""Methods with which `generate` feeds a model; older versions have not all of them."""
_CRITERIA_FIRST = hasattr(generation_utils, "StopCheck")
"""Whether this version of transformers calls the stopping criteria before the streamer."""
_MOST_TESTED = 16
"""Most ways to feed the model of which the test's result is kept."""


_INSTEAD = dict.fromkeys(
    (*LOADING_HINTS, "device", "device_map", "dtype", "revision", "trust_remote_code"),
    "set it when you load the model",
) | dict.fromkeys(
    ("do_sample", "max_new_tokens", "temperature", "top_k", "top_p"), "pass it to model.generate()"
)  # fmt: skip
"""Options of other functions, and where to pass them instead."""


class NotAcceleratedWarning(UserWarning):
    """A call ran through the original `generate`. The message has the reason; once per reason."""


class DraftingNotice(UserWarning):
    """Notice about the choice of an algorithm, or about drafting that failed; once per message."""


@known_options("accelerate", _INSTEAD)
def accelerate(
    model: Any,
    drafter: str | Drafter = "auto",
    *,
    budget: BudgetSpec = "auto",
    tokenizer: Any = None,
    prepack: bool = False,
    exact: bool = False,
) -> Accelerated:
    """Make `model.generate` speculative, with the same output; also a context manager.

    `budget` is the number of guessed tokens a pass may carry, "auto", or "drafter" for the
    drafter's own. A second call replaces the first; if it raises, the model may be left without
    both. Calls that cannot be accelerated still run, with one NotAcceleratedWarning per reason. A
    DraftingNotice reports a calibration, the choice of an algorithm, a drafter that fails, and a
    pass with drafts that fails.

    `tokenizer` is the model's own, for drafters that use another vocabulary than its.

    Results have no cache, so a later call needs all ids of the chat. Streamers, criteria and
    processors are called while no other call of the model computes, so they must not wait for one.
    A copy of the model by `copy.copy` still generates with the original.

    `prepack` replaces the model's linear layers, until `restore`, by layers with weights that are
    also laid out for this CPU (`model.prepack`). Do not write to weights through `.data` meanwhile.
    Call `restore` before you add adapters or resize embeddings.

    `exact` computes every token alike in any pass. Answers are then bit-equal to those of
    `drafter="none"` in the same mode, in half precision, too. Calls that cannot be accelerated are
    refused.

    Drafters that guess keep the tokens of a seed for one sequence. In a batch only the distribution
    is the same, because `generate` draws all rows jointly and we draw them one by one.

    Raises UnknownName or OptionError for options that do not exist, OptionError for a model in
    training mode, LoadError for anything but a transformers model, UnsupportedError for a drafter
    that needs what this model cannot record, or for a model that cannot be `exact` here.
    """
    chosen, budget = registry.parse(drafter), checked_budget(budget)
    prepack, exact = switch("prepack", prepack), switch("exact", exact)
    own = unwrapped(model)
    if not isinstance(own, GenerationMixin):
        raise LoadError(
            f"{type(own).__name__} has no generate() of transformers to accelerate; pass a model "
            "that transformers has loaded (Engine also takes names and folders)"
        )
    restore(own)
    reason, loaded = refusals.of_model(own), None
    packed = lay_out(own, keep=True) if prepack and reason is None else Prepacked()
    try:
        if reason is None:
            loaded, reason = _load(own, tokenizer)
        if exact:
            if loaded is None:
                raise UnsupportedError(f"exact=True: {reason}")
            loaded = exactly(loaded)
        handle = Accelerated(own, loaded, chosen, budget, reason, packed)
        why = "" if loaded is None else handle.drafting.needs.why
    except BaseException:
        packed.undo()  # after an error the model has its own layers
        raise
    own.generate = handle
    # The self-test has computed in this thread, and other threads may call the model.
    end_team()
    if reason is not None:
        handle.notice(reason, stacklevel=4)
    if why:
        warnings.warn(why, DraftingNotice, stacklevel=3)
    return handle


def restore(model: Any) -> None:
    """Restore the model's own `generate`; does nothing if it is not accelerated."""
    own = unwrapped(model)
    handle = vars(own).get("generate")
    if not isinstance(handle, Accelerated):
        return
    handle.prepacked.undo()
    if handle.previous is None:
        del own.generate
    else:
        own.generate = handle.previous


class Accelerated(AbstractContextManager["Accelerated"]):
    """Replacement of `model.generate`, and the handle that `accelerate` returns."""

    def __init__(
        self,
        model: Any,
        loaded: LoadedModel | None,
        drafter: Drafter,
        budget: BudgetSpec,
        reason: str | None,
        prepacked: Prepacked,
    ) -> None:
        # Not annotations or attributes: they may not be picklable, and the model may be saved.
        functools.update_wrapper(self, model.generate, ("__name__", "__qualname__", "__doc__"), ())
        self.original = model.generate
        self.previous = vars(model).get("generate")
        """Instance attribute that `restore` puts back; None if the class has the method."""
        self.model = model
        self.drafter = drafter
        self.budget = budget
        self.model_reason = reason
        """Why no call of this model can be accelerated; None if calls can."""
        self.stats: Stats | None = None
        """Statistics of the last call, summed over its rows; None if it was not accelerated."""
        self.last_notice: str | None = None
        """Why the last call was not accelerated; None if it was."""
        self.prepacked = prepacked
        """Layers of the model that `restore` puts back."""
        self._loaded = loaded
        self._warned: set[Hashable] = set()
        self._hooks: tuple[Any, ...] | None = (*hooks(model).values(),)
        """Forward hooks that the self-test has seen; None: a copy, until its first call."""
        self._parts = _parts(model)
        self._passes: dict[Any, str | None] = {}
        """(preparing methods, padded, parts) → why such calls are not accelerated."""
        self._bound: tuple[Drafting, Resources] | None = None
        self._binding = RLock()
        """Held while the drafter is bound, so that two first calls load its model only once."""

    @property
    def drafting(self) -> Drafting:
        """The drafter, bound to this model."""
        return self._bind()[0]

    @property
    def resources(self) -> Resources:
        """Resources of all calls of this model, in all threads. No rows are kept between calls."""
        return self._bind()[1]

    # Not `functools.cached_property`: before Python 3.12 all instances of a class share its lock.
    def _bind(self) -> tuple[Drafting, Resources]:
        with self._binding:
            if self._bound is None:
                assert self._loaded is not None  # such calls do not get here
                cost = new_cost(self._loaded)
                drafting = Drafting.of(self._loaded, self.drafter, self.budget, cost)
                self._bound = drafting, Resources(self._loaded, cost)
            return self._bound

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without what belongs to the model: a copy may change before its use."""
        own = {"_bound", "_passes", "_binding", "_hooks", "_parts"}
        # The method of a model that is copied, too, would be this handle.
        own |= {"original", "__wrapped__"}
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _bound=None, _passes={}, _binding=RLock(), _hooks=None, _parts=())
        method = self.previous or MethodType(type(self.model).generate, self.model)
        self.original = self.__wrapped__ = method

    def __exit__(self, *_exception: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        name, reason = type(self.model).__name__, self.model_reason
        if reason is not None:
            return f"Accelerated({name}, not accelerated: {reason})"
        return f"Accelerated({name}, drafter={self.drafter}, budget={self.budget!r})"

    def restore(self) -> None:
        """Restore the model's own `generate`, unless another `accelerate` replaced this one."""
        if vars(self.model).get("generate") is self:
            restore(self.model)

    def refuse(self, reason: str) -> None:
        """Raise UnsupportedError if the model is `exact` and a call cannot be accelerated."""
        if self._loaded is not None and self._loaded.exact is not None:
            raise UnsupportedError(f"exact=True: this call cannot be accelerated: {reason}")

    def notice(self, reason: str, stacklevel: int = 3) -> None:
        """Warn once that a call is not accelerated, and why; raises if the model is `exact`."""
        self.refuse(reason)
        self.last_notice = reason
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"not accelerated: {reason}", NotAcceleratedWarning, stacklevel)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `generate` with its own arguments. The cache in its result is always None."""
        began = perf_counter()
        self.stats = self.last_notice = None
        call = self._by_name(args, kwargs)
        config, reason = self._configure(call)
        if reason is not None:
            self.refuse(reason)
        # Without the tokenizer for its stop strings, `generate` raises an error of its own.
        if config is None or (config.stop_strings is not None and call.get("tokenizer") is None):
            result = self.original(*args, **kwargs)
            # After the call, because `generate` explains what it refuses itself.
            if reason is not None:
                self.notice(reason)
            return result
        call = _with_stop_strings(call, config.stop_strings, self.model.generation_config)
        decode = functools.partial(self._decode, streamer=call.get("streamer"), began=began)
        return self.original(**call, custom_generate=decode)

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        signature = inspect.signature(self.original)
        call = dict(signature.bind(*args, **kwargs).arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                call |= call.pop(parameter.name, {})
        return call

    def _configure(self, call: dict[str, Any]) -> tuple[Any | None, str | None]:
        """Return the generation config of this call, or the reason to run it plainly."""
        if self.model_reason is not None:
            return None, self.model_reason
        for name in ("custom_generate", "assistant_model", "synced_gpus"):
            if call.get(name):
                return None, f"{name} was given"
        if self.model.training:
            return None, "the model is in training mode; call model.eval()"
        if self._loaded is not None and (moved := self._loaded.moved):
            return None, f"{moved}; call accelerate again"
        if self._bound is not None and self.resources.turns.own:
            return None, "a callback of a running call generates"
        _check_cache(call)
        ids, mask = _ids(call), call.get("attention_mask")
        # `generate` may drop a mask of ones.
        if isinstance(ids, Tensor) and isinstance(mask, Tensor) and ids.shape != mask.shape:
            return None, "the attention mask has not the shape of the ids"
        handled = {"tokenizer", "assistant_tokenizer", "trust_remote_code"}
        handled |= set(inspect.signature(self.original).parameters) - {"use_model_defaults"}
        options = {name: value for name, value in call.items() if name not in handled}
        try:
            given = call.get("generation_config")
            # Private, but `generate` itself uses this function in every version.
            config, inputs = self.model._prepare_generation_config(given, **options)
            reason = refusals.of_call(config, inputs)
        except Exception as error:
            # `generate` reports what is wrong.
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
        began: float,
        streamer: Any = None,
        **inputs: Any,
    ) -> Any:
        """Decode, with the arguments and results of transformers' `_sample`."""
        mask = inputs.get("attention_mask")
        reason = refusals.of_prompts(input_ids, mask)
        if reason is None and input_ids.shape[0] > 1:
            rules = [*logits_processor, *stopping_criteria]
            reason = refusals.of_batch(rules, stopping_criteria, generation_config, streamer)
        if reason is None and self._loaded is not None:
            padded = mask is not None and not bool(mask.all())
            length = None if padded or input_ids.shape[0] > 1 else input_ids.shape[1]
            reason = refusals.of_angles(self._loaded, length, stopping_criteria.max_length)
            reason = reason or self._why_other_passes(self._loaded, padded=padded)
        if reason is not None or self._loaded is None:
            self.notice(str(reason))
            return model._sample(
                input_ids, logits_processor, stopping_criteria, generation_config,
                streamer=streamer, **inputs,
            )  # fmt: skip
        record = Observer(stopping_criteria, streamer, generation_config)
        pads = [0] * len(input_ids) if mask is None else (mask == 0).sum(1).tolist()
        sequences = [
            record.sequence(index, row, hidden, logits_processor, self.drafting, began)
            for index, (row, hidden) in enumerate(zip(input_ids, pads, strict=True))
        ]
        try:
            with Call(self.resources, sequences) as call:
                call.run()
        finally:
            self.stats = total([sequence.stats for sequence in sequences])
        for sequence in sequences:
            if sequence.error is not None:
                raise sequence.error
        if streamer is not None:
            streamer.end()
        for what, said in {k: v for s in sequences for k, v in s.failures.items()}.items():
            if what not in self._warned:
                self._warned.add(what)
                warnings.warn(said, DraftingNotice, stacklevel=3)
        return record.output(_sequences(input_ids, sequences, generation_config))

    def _why_other_passes(self, loaded: LoadedModel, *, padded: bool) -> str | None:
        """Measure once, for each way in which `generate` may feed this model.

        Hooks are not measured: they would see the tokens of the test, and one that reads the place
        in a pass may differ in longer passes only.
        """
        found = (*hooks(self.model).values(),)
        if self._hooks is None:
            self._hooks = found
        if found != self._hooks:  # a hook may be registered for each call
            return "forward hooks were added or removed; call accelerate again"
        if loaded.capabilities.packed and (name := foreign_attention(loaded.config)) is not None:
            return f"attention is {name!r} now; call accelerate again"
        prepare, parts = _preparing(self.model), _parts(self.model)
        if prepare == _preparing(GenerationMixin) and parts == self._parts and not padded:
            return None
        key = prepare, padded, parts
        if key not in self._passes:
            if len(self._passes) > _MOST_TESTED:
                self._passes.clear()
            self._passes[key] = refusals.of_passes(loaded, self.original, padded=padded)
        return self._passes[key]


def _preparing(model: Any) -> tuple[Any, ...]:
    """Return the methods with which `generate` feeds a model; None for those of other versions."""
    methods = (getattr(model, name, None) for name in _PREPARE)
    return tuple(getattr(method, "__func__", method) for method in methods)


def _parts(model: Any) -> tuple[Any, ...]:
    """Return a key that is equal as long as no module, class or `forward` is exchanged."""
    return tuple((id(module), type(module), id(replaced(module))) for module in model.modules())


class Observer:
    """Stop rule that streams, keeps scores and calls the criteria, once per emitted token."""

    def __init__(self, criteria: Any, streamer: Any, config: Any) -> None:
        self.criteria = criteria
        self.streamer = streamer
        self.config = config
        self._wanted = wanted = bool(config.return_dict_in_generate)
        self.scores: tuple[Tensor, ...] | None = () if wanted and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if wanted and config.output_logits else None

    def __call__(self, sequence: Sequence, scores: Tensor | None) -> str | None:
        if self.scores is not None and scores is not None:
            self.scores += (scores,)
        if not _CRITERIA_FIRST:
            self._stream(sequence)
        ended = bool(self.criteria(sequence.prefix(), self.scores).all())
        if _CRITERIA_FIRST:
            self._stream(sequence)
        return "stop" if ended else None

    def _stream(self, sequence: Sequence) -> None:
        if self.streamer is not None:
            self.streamer.put(torch.tensor(sequence.ids[-1:], device="cpu"))

    def sequence(
        self,
        index: int,
        row: Tensor,
        pads: int,
        processors: Any,
        drafting: Drafting,
        began: float,
    ) -> TextSequence:
        """Make the sequence of a row: torch's generator draws, and the criteria end it."""
        limit, drafter = self.criteria.max_length, drafting.drafter
        return TextSequence(
            drafting,
            row[pads:].tolist(),
            padding=row[:pads].tolist(),
            distribution=self._distribution(_of_row(processors, index), row, drafting.model),
            limit=_NO_LIMIT if limit is None else int(limit) - len(row),
            stop_rules=[self],
            sampling=_sampling(self.config),
            sampler=_sampler(drafter),
            draft_seed=_draft_seed(row.device, index) if drafter.sampled else None,
            device=row.device,
            began=began,
        )

    def _distribution(self, processors: Any, ids: Tensor, loaded: LoadedModel) -> Distribution:
        """Use the given processors unchanged, after what `generate` does to logits before them."""
        moved = loaded.device != ids.device or loaded.dtype == torch.float64
        chain: list[Processor] = [self._receive] if moved or self.logits is not None else []
        chain += [processors] if len(processors) else []
        lazy = self.scores is not None
        return Distribution(chain, greedy=not self.config.do_sample, lazy=lazy)

    def _receive(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.to(ids.device, torch.float32)
        if self.logits is not None:
            self.logits += (scores,)
        return scores

    def output(self, sequences: Tensor) -> Any:
        """Return what `generate` returns."""
        if not self._wanted:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences, scores=self.scores, logits=self.logits
        )


def _of_row(processors: Any, index: int) -> Any:
    """Return the processors for one row of a batch."""
    own = copy.copy(processors)
    for place, processor in enumerate(processors):
        # transformers 5's repetition penalty has the left padding of every row.
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor) and len(ignored) > 1:
            own[place] = copy.copy(processor)
            own[place].prompt_ignore_length = ignored[index : index + 1]
    return own


def _sampler(drafter: Drafter) -> Sampler:
    """Return torch's global generator, from which `generate` draws, or noise seeded by it."""
    if drafter.shares_noise:
        return Gumbel(int(torch.randint(2**63 - 1, (), device="cpu")))
    return TorchSampler(None)


def _draft_seed(device: torch.device, index: int) -> int:
    """Derive a drafter's seed for one row from torch's state, without drawing from it."""
    source = torch if device.type == "cpu" else torch.get_device_module(device)
    return zlib.crc32(source.get_rng_state().cpu().numpy().tobytes()) + index


def _sequences(input_ids: Tensor, sequences: abc.Sequence[Sequence], config: Any) -> Tensor:
    """(B, T) prompts and answers. Shorter answers are padded on the right."""
    pad = config._pad_token_tensor
    answers = [torch.tensor(one.ids[one.prompt_length :], device="cpu") for one in sequences]
    fill = 0 if pad is None else int(pad.flatten()[0])
    new = pad_sequence(answers, batch_first=True, padding_value=fill)
    return torch.cat([input_ids, new.to(input_ids.device)], dim=1)


def _sampling(config: Any) -> SamplingParams:
    """Describe the distribution to drafters. The processors compute it."""
    if not config.do_sample:
        return SamplingParams()
    warmth = 1.0 if config.temperature is None else config.temperature
    # transformers allows any temperature above 0, also infinity.
    return SamplingParams(temperature=min(max(warmth, 1e-30), 1e30), **filters(vars(config)))


def _ids(call: dict[str, Any]) -> Any:
    """Return the prompts of a call, which has two names for them."""
    return call.get("input_ids") if call.get("inputs") is None else call["inputs"]


def _check_cache(call: dict[str, Any]) -> None:
    """Raise OptionError for a call that continues a chat with the cache of our result, None."""
    ids, mask = _ids(call), call.get("attention_mask")
    embedded = call.get("inputs_embeds") is not None
    if embedded or not isinstance(ids, Tensor) or not isinstance(mask, Tensor):
        return
    named = [name for name in ("past_key_values", "cache") if call.get(name, ids) is None]
    if named and mask.shape[-1] > ids.shape[-1]:
        raise OptionError(
            f"{named[0]} is None, but the attention mask is longer than the ids: results of an "
            "accelerated model have no cache, so pass all ids of the chat"
        )


def _with_stop_strings(call: dict[str, Any], stops: Any, model_config: Any) -> dict[str, Any]:
    """Replace stop strings by a criterion, because the hook drops the tokenizer they need."""
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


def _load(model: Any, tokenizer: Any) -> tuple[LoadedModel | None, str | None]:
    """Return the model for our loop, or the reason why it cannot run there."""
    try:
        loaded = load(model, tokenizer)
    except (OptionError, LoadError):
        raise
    except UnsupportedError as error:
        return None, str(error)
    # A model that breaks the self-test can still generate by itself.
    except Exception as error:
        return None, f"the self-test failed ({type(error).__name__}: {error})"
    if loaded.capabilities.shape == "plain":
        return None, "; ".join(("it decodes one token per pass", *loaded.capabilities.reasons))
    return loaded, None
