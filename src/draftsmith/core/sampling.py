"""The target's distribution for one node, and draws from it.

Scores have the shape (1, V), as transformers' processors want them: both kinds mix in one list.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from draftsmith.errors import OptionError
from draftsmith.values import number, shown, switch, token_ids

Processor = Callable[[Tensor, Tensor], Tensor]
"""(ids (1, T), scores (1, V)) → scores (1, V): any transformers `LogitsProcessor` is one."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop; greedy unless `temperature` is above 0."""

    temperature: float = 0.0
    """0 takes the best token."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most probable tokens that together reach this probability."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as probable as the best one."""
    repetition_penalty: float = 1.0
    """Divides (or multiplies, if negative) the score of every token already seen (CTRL paper)."""
    presence_penalty: float = 0.0
    """Subtracted once from tokens already generated (prompt not counted)."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence among the generated tokens."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id → number added to its score; -inf forbids it."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    min_new_tokens: int = 0
    """End-of-sequence tokens are forbidden before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; the text is cut before them."""
    stop_token_ids: tuple[int, ...] = ()
    """Further ids that end the answer, besides the model's own."""
    seed: int | None = None
    """Makes sampling repeatable."""
    processors: tuple[Processor, ...] = ()
    """Further processors, applied before temperature and truncation."""
    logprobs: bool = False
    """Record the log-probability of every emitted token."""

    def __post_init__(self) -> None:
        for name, (kind, bounds) in _NUMBERS.items():
            value = getattr(self, name)
            if name != "seed" or value is not None:
                self._set(name, number(name, value, kind, **bounds))
        if 0 < self.temperature < 1e-30:  # scores divided by less would overflow
            raise OptionError(
                f"temperature must be 0 (greedy) or at least 1e-30, got {self.temperature}"
            )
        if not isinstance(self.stop, tuple | list) or not all(map(_is_text, self.stop)):
            raise OptionError(f"stop must be non-empty strings, got {shown(self.stop)}")
        self._set("stop_token_ids", tuple(token_ids("stop_token_ids", self.stop_token_ids)))
        self._set("logit_bias", _checked_bias(self.logit_bias))
        for processor in self.processors:
            if not callable(processor):
                raise OptionError(
                    "processors must be functions of ids and scores, such as transformers' "
                    f"logits processors, got {shown(processor)}"
                )
        self._set("logprobs", switch("logprobs", self.logprobs))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


_NUMBERS: dict[str, tuple[type, dict[str, Any]]] = {
    "temperature": (float, {"least": 0, "note": "(0 is greedy)"}),
    "top_k": (int, {"least": 0, "note": "(0 keeps all)"}),
    "top_p": (float, {"above": 0, "most": 1}),
    "min_p": (float, {"least": 0, "below": 1}),
    "repetition_penalty": (float, {"above": 0}),
    "presence_penalty": (float, {}),
    "frequency_penalty": (float, {}),
    "max_new_tokens": (int, {"least": 0}),
    "min_new_tokens": (int, {"least": 0}),
    "seed": (int, {"least": -(2**63), "most": 2**64 - 1, "note": "or None"}),
}
"""Option → what it is and its bounds, as `number` takes them."""


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _checked_bias(given: object) -> dict[int, float]:
    """Return token ids → numbers that are finite or -inf."""
    if not isinstance(given, Mapping):
        raise OptionError(f"logit_bias must map token ids to numbers, got {shown(given)}")
    ids = token_ids("logit_bias", list(given), what="a mapping from token ids")
    return {
        i: -math.inf if bias == -math.inf else number(f"logit_bias[{i}]", bias, float)
        for i, bias in zip(ids, given.values(), strict=True)
    }


def repetition_penalty(ids: Tensor, scores: Tensor, penalty: float) -> Tensor:
    """Keskar et al. 2019, over prompt and output alike, as transformers does."""
    seen = scores.gather(1, ids)
    return scores.scatter(1, ids, torch.where(seen < 0, seen * penalty, seen / penalty))


def output_penalties(
    ids: Tensor, scores: Tensor, presence: float, frequency: float, prompt_length: int
) -> Tensor:
    """OpenAI's presence and frequency penalties, over the generated tokens only."""
    output = ids[:, prompt_length:]
    ones = torch.ones_like(output, dtype=scores.dtype)
    counts = torch.zeros_like(scores).scatter_add_(1, output, ones)
    return scores - presence * (counts > 0) - frequency * counts


def logit_bias(_ids: Tensor, scores: Tensor, bias: Mapping[int, float]) -> Tensor:
    """Add a constant to the scores of some ids."""
    index = torch.tensor([list(bias)], device=scores.device)
    return scores.scatter_add(1, index, scores.new_tensor([list(bias.values())]))


def forbid_end(ids: Tensor, scores: Tensor, end_ids: Sequence[int], until: int) -> Tensor:
    """No end-of-sequence before the sequence is `until` tokens long, prompt included."""
    if ids.shape[1] >= until:
        return scores
    # A config may name an id that this model's logits do not have.
    return without(scores, [i for i in end_ids if i < scores.shape[1]])


def temperature(_ids: Tensor, scores: Tensor, value: float) -> Tensor:
    """Divide the scores by the temperature."""
    return scores / value


def top_k(_ids: Tensor, scores: Tensor, k: int) -> Tensor:
    """Keep the k best scores (and what ties with the k-th)."""
    kth = scores.topk(min(k, scores.shape[-1]))[0][..., -1, None]
    return scores.masked_fill(scores < kth, -math.inf)


def top_p(_ids: Tensor, scores: Tensor, p: float) -> Tensor:
    """Keep the smallest set of best tokens whose probability reaches p; always one."""
    ordered, index = scores.sort(descending=False)
    drop = ordered.softmax(-1).cumsum(-1) <= 1 - p
    drop[..., -1] = False
    return scores.masked_fill(drop.scatter(1, index, drop), -math.inf)


def min_p(_ids: Tensor, scores: Tensor, p: float) -> Tensor:
    """Keep tokens at least `p` times as probable as the best."""
    probs = scores.softmax(-1)
    return scores.masked_fill(probs < p * probs.amax(-1, keepdim=True), -math.inf)


def without(scores: Tensor, ids: Sequence[int]) -> Tensor:
    """(N, V) the scores with some ids at -inf; a copy if there are any."""
    return (
        scores.index_fill(-1, torch.tensor(ids, device=scores.device), -math.inf) if ids else scores
    )


def argmax(scores: Tensor) -> Tensor:
    """(N, V) → (N,) the first of the best ids of each row."""
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    # On a CPU torch's takes as long as a layer of a small model, above all in bfloat16.
    exact = scores.dtype in (torch.float32, torch.float64)
    return torch.from_numpy((scores if exact else scores.float()).numpy().argmax(-1))


class Distribution:
    """The target's distribution at one node: processors in order, then arg-max or a draw.

    Half-precision logits are raised to float32 first, as transformers does; float64 is kept for
    the exact tests.
    """

    def __init__(
        self,
        processors: Sequence[Processor],
        *,
        greedy: bool,
        lazy: bool | None = None,
        needs_ids: bool = True,
        banned: Sequence[int] = (),
    ) -> None:
        self.processors = tuple(processors)
        self.greedy = greedy
        self.banned = list(banned)
        """Ids that are never emitted, whatever comes before: no reason to be lazy."""
        self.lazy = bool(self.processors) if lazy is None else lazy
        """Whether rows must be scored one by one, in order, with their own prefix."""
        self.needs_ids = needs_ids and bool(self.processors)
        """Whether some processor reads the prefix."""

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt_length: int,
        end_ids: Sequence[int],
        banned: Sequence[int] = (),
        first: Sequence[Processor] = (),
    ) -> Distribution:
        """The distribution that transformers' `generate` would use for the same options.

        `first` come before the penalties, `params.processors` after them.
        """
        p = params
        reading: list[Processor] = [*first]  # these see the prefix
        if p.logit_bias:
            reading.append(partial(logit_bias, bias=p.logit_bias))
        if p.repetition_penalty != 1:
            reading.append(partial(repetition_penalty, penalty=p.repetition_penalty))
        if p.presence_penalty or p.frequency_penalty:
            reading.append(
                partial(
                    output_penalties,
                    presence=p.presence_penalty,
                    frequency=p.frequency_penalty,
                    prompt_length=prompt_length,
                )
            )
        if p.min_new_tokens and end_ids:
            until = prompt_length + p.min_new_tokens
            reading.append(partial(forbid_end, end_ids=end_ids, until=until))
        reading.extend(p.processors)
        cutting: list[Processor] = []
        if p.temperature not in (0, 1):
            cutting.append(partial(temperature, value=p.temperature))
        if p.temperature and p.top_k:
            cutting.append(partial(top_k, k=p.top_k))
        if p.temperature and p.top_p < 1:
            cutting.append(partial(top_p, p=p.top_p))
        if p.temperature and p.min_p:
            cutting.append(partial(min_p, p=p.min_p))
        chosen = [*reading, *cutting]
        return cls(
            chosen,
            greedy=p.temperature == 0,
            lazy=bool(chosen) or p.logprobs,
            needs_ids=bool(reading),
            banned=banned,
        )

    def watched(self, watcher: Processor) -> Distribution:
        """The same with a processor that looks on before all others; it must change nothing."""
        return Distribution(
            (watcher, *self.processors),
            greedy=self.greedy,
            lazy=True,
            needs_ids=self.needs_ids,
            banned=self.banned,
        )

    def scores(self, ids: Tensor | None, logits: Tensor) -> Tensor:
        """(V,) raw logits of one node → (1, V) processed scores; `ids` (1, T) is its prefix."""
        # A copy: processors may write in place, and the raw row is also shown to drafters.
        exact = logits.dtype == torch.float64
        # Where the ids are, as `generate` has it: a device map may leave logits on another device.
        device = logits.device if ids is None else ids.device
        scores = logits[None].to(device, torch.float64 if exact else torch.float32, copy=True)
        scores = without(scores, self.banned)
        for process in self.processors:
            scores = process(ids, scores)  # type: ignore[arg-type]
        return scores

    def best(self, logits: Tensor) -> Tensor:
        """(N, V) raw logits → (N,) the greedy choice of each row, where there are no processors."""
        return argmax(without(logits, self.banned))

    def probs(self, scores: Tensor) -> Tensor:
        """(1, V) scores → (V,) probabilities."""
        return scores.softmax(-1)[0]


class Sampler(Protocol):
    """Where randomness comes from; the exact tests enumerate it instead."""

    def draw(self, p: Tensor) -> int:
        """An index distributed as `p` (V,)."""

    def accept(self, ratio: float) -> bool:
        """True with probability min(1, ratio)."""


class TorchSampler:
    """Sampler from a torch generator; without one, torch's global generator."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    @classmethod
    def seeded(cls, seed: int | None, device: Any = "cpu") -> TorchSampler:
        """Own generator on `device`; a fresh unpredictable seed when `seed` is None."""
        generator = torch.Generator(device)
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        return cls(generator)

    def draw(self, p: Tensor) -> int:
        if self.generator is not None:  # a drafter may live on another device than the target
            p = p.to(self.generator.device)
        # Shaped like transformers' call, so that the same seed gives the same token.
        return int(torch.multinomial(p[None], 1, generator=self.generator))

    def accept(self, ratio: float) -> bool:
        device = self.generator.device if self.generator is not None else "cpu"
        # Strictly below: a ratio of 0 must never accept, and u is in [0, 1).
        return float(torch.rand((), generator=self.generator, device=device)) < ratio


class Gumbel:
    """Sampler whose n-th draw depends on a seed, n and the distribution alone.

    A draw from p is the arg-max over x of log p(x) + g(x), g being Gumbel noise keyed by (seed, n,
    x). Whoever knows the seed can foresee it: a drafter that draws from q with the same noise finds
    the same token with probability Σ_x 1/Σ_y max(p(y)/p(x), q(y)/q(x)) ≥ (1−TV)/(1+TV).
    """

    def __init__(self, seed: int | None = None) -> None:
        """A fresh unpredictable seed when `seed` is None."""
        self.seed = secrets.randbits(63) if seed is None else seed % 2**64
        self.draws = 0
        """Draws so far: n of the next one."""
        self._accepts = 0

    def noise(self, n: int, size: int) -> Tensor:
        """(size,) float64 noise of the n-th draw, counted from 0."""
        exponential = -np.log1p(-self._uniform(n, size))
        return torch.from_numpy(-np.log(exponential.clip(np.finfo(np.float64).tiny)))

    def _uniform(self, stream: int, size: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        key = np.array([self.seed, stream % 2**64], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key)).random(size)

    def draw(self, p: Tensor) -> int:
        noise = self.noise(self.draws, len(p))
        self.draws += 1
        return int((p.log() + noise.to(p)).argmax())

    def accept(self, ratio: float) -> bool:
        self._accepts += 1  # streams that no draw uses
        return float(self._uniform(-self._accepts, 1)[0]) < ratio
