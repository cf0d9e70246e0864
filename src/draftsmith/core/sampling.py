"""The target's distribution at one node, and draws from it.

Scores have shape (1, V), as in transformers, so that our processors and theirs can be mixed. Those
that read no prefix may get scores (N, V) of several nodes, and None for the ids.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
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
"""(ids (1, T), scores (1, V)) → scores (1, V), like a transformers `LogitsProcessor`."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop; greedy unless `temperature` is above 0."""

    temperature: float = 0.0
    """0 takes the most probable token."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most probable tokens that together reach this probability."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as probable as the best one."""
    repetition_penalty: float = 1.0
    """Factor by which scores of tokens in prompt or output are divided (multiplied if negative)."""
    presence_penalty: float = 0.0
    """Subtracted once from the scores of generated tokens (the prompt does not count)."""
    frequency_penalty: float = 0.0
    """Subtracted from the score of a token for each time that it was generated."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id → number that is added to its score; -inf forbids it."""
    max_new_tokens: int = 256
    """Maximum length of the answer, in tokens."""
    min_new_tokens: int = 0
    """Number of tokens before which end-of-sequence tokens are forbidden."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; the text is cut before them."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer, in addition to the model's own."""
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
        if not isinstance(self.stop, tuple | list) or not all(
            isinstance(one, str) and one for one in self.stop
        ):
            raise OptionError(f"stop must be non-empty strings, got {shown(self.stop)}")
        self._set("stop_token_ids", tuple(token_ids("stop_token_ids", self.stop_token_ids)))
        self._set("logit_bias", _checked_bias(self.logit_bias))
        if not isinstance(self.processors, tuple | list):
            raise OptionError(f"processors must be a tuple, got {shown(self.processors)}")
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
    "repetition_penalty": (float, {"least": 1e-30, "most": 1e30}),
    "presence_penalty": (float, {"least": -1e30, "most": 1e30}),
    "frequency_penalty": (float, {"least": -1e30, "most": 1e30}),
    "max_new_tokens": (int, {"least": 0}),
    "min_new_tokens": (int, {"least": 0}),
    "seed": (int, {"least": -(2**63), "most": 2**64 - 1, "note": "or None"}),
}
"""Option → its type and its bounds, as arguments of `number`."""


def _checked_bias(given: object) -> dict[int, float]:
    """Return a mapping from token ids to -inf, or numbers with which no score overflows."""
    if not isinstance(given, Mapping):
        raise OptionError(f"logit_bias must map token ids to numbers, got {shown(given)}")
    ids = token_ids("logit_bias", list(given), what="a mapping from token ids")
    return {
        i: -math.inf
        if bias == -math.inf
        else number(f"logit_bias[{i}]", bias, float, least=-1e30, most=1e30)
        for i, bias in zip(ids, given.values(), strict=True)
    }


def repetition_penalty(ids: Tensor, scores: Tensor, penalty: float) -> Tensor:
    """Apply the penalty of Keskar et al. 2019 to prompt and output tokens, as transformers does."""
    seen = scores.gather(1, ids)
    return scores.scatter(1, ids, torch.where(seen < 0, seen * penalty, seen / penalty))


def output_penalties(
    ids: Tensor, scores: Tensor, presence: float, frequency: float, prompt_length: int
) -> Tensor:
    """Apply OpenAI's presence and frequency penalties, which count the generated tokens only."""
    output = ids[:, prompt_length:]
    ones = torch.ones_like(output, dtype=scores.dtype)
    counts = torch.zeros_like(scores).scatter_add_(1, output, ones)
    return scores - presence * (counts > 0) - frequency * counts


def logit_bias(_ids: Tensor, scores: Tensor, index: Tensor, bias: Tensor) -> Tensor:
    """Add `bias` (1, n) to the scores of the ids `index` (1, n)."""
    return scores.scatter_add(1, index.to(scores.device), bias.to(scores))


def forbid_end(ids: Tensor, scores: Tensor, end_ids: Sequence[int], until: int) -> Tensor:
    """Forbid end-of-sequence tokens until the sequence, prompt included, has `until` tokens."""
    if ids.shape[1] >= until:
        return scores
    # A configuration may contain ids beyond this model's logits.
    return without(scores, [i for i in end_ids if i < scores.shape[1]])


def checked(ids: Tensor, scores: Tensor, process: Processor, drawn: bool) -> Tensor:
    """Apply a processor of the caller; raise OptionError for a result that is not (1, V) scores.

    If tokens are `drawn`, one must be possible. The best token is 0 otherwise, as in transformers.
    """
    size, broken = tuple(scores.shape), math.isnan(scores.amax())  # before it writes in place
    made: object = process(ids, scores)
    if not isinstance(made, Tensor):
        raise OptionError(f"a processor must return a tensor of scores {size}, got {shown(made)}")
    if made.shape != size or not made.is_floating_point():
        got = f"{tuple(made.shape)} of {made.dtype}"
        raise OptionError(f"a processor must return a tensor of scores {size}, got {got}")
    best = float(made.amax())  # NaN if there is one
    if math.isnan(best) and not broken:  # the model's own NaN ends in what transformers does
        raise OptionError("a processor must return scores without NaN")
    if drawn and math.isinf(best):
        why = "forbids every token" if best < 0 else "makes a token certain by an infinite score"
        raise OptionError(f"a processor {why}, so no token can be drawn")
    return made


def temperature(_ids: Tensor, scores: Tensor, value: float) -> Tensor:
    """Divide the scores by the temperature."""
    return scores / value


def top_k(_ids: Tensor, scores: Tensor, k: int) -> Tensor:
    """Keep the k best scores, and those equal to the k-th."""
    kth = scores.topk(min(k, scores.shape[-1]))[0][..., -1, None]
    return scores.masked_fill(scores < kth, -math.inf)


def top_p(_ids: Tensor, scores: Tensor, p: float) -> Tensor:
    """Keep the smallest set of best tokens with a total probability of at least p; never empty."""
    ordered, index = scores.sort(descending=False)
    drop = ordered.softmax(-1).cumsum(-1) <= 1 - p
    drop[..., -1] = False
    return scores.masked_fill(drop.scatter(1, index, drop), -math.inf)


def min_p(_ids: Tensor, scores: Tensor, p: float) -> Tensor:
    """Keep tokens at least `p` times as probable as the best."""
    probs = scores.softmax(-1)
    return scores.masked_fill(probs < p * probs.amax(-1, keepdim=True), -math.inf)


def without(scores: Tensor, ids: Sequence[int]) -> Tensor:
    """Return (N, V) scores with some ids at -inf; a copy if there are any such ids."""
    return (
        scores.index_fill(-1, torch.tensor(ids, device=scores.device), -math.inf) if ids else scores
    )


def only(scores: Tensor, token: int) -> Tensor:
    """Return (N, V) scores that allow a single id."""
    forced = torch.full_like(scores, -math.inf)
    forced[:, token] = 0.0
    return forced


def argmax(scores: Tensor) -> Tensor:
    """Return (N,) the first of the best ids for each row of (N, V) scores."""
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    # On a CPU torch's arg-max takes as long as a layer of a small model, even longer in bfloat16.
    exact = scores.dtype in (torch.float32, torch.float64)
    return torch.from_numpy((scores if exact else scores.float()).numpy().argmax(-1))


class Distribution:
    """The target's distribution at one node: apply the processors in order, then arg-max or draw.

    Half-precision logits are converted to float32 first, as transformers does. float64 is kept,
    for the exact tests.
    """

    def __init__(
        self,
        processors: Sequence[Processor],
        *,
        greedy: bool,
        lazy: bool = False,
        needs_ids: bool = True,
        banned: Sequence[int] = (),
    ) -> None:
        self.processors = tuple(processors)
        self.greedy = greedy
        self.banned = list(banned)
        """Ids that are never emitted; they depend on no prefix, so they do not require `lazy`."""
        self.needs_ids = needs_ids and bool(self.processors)
        """Whether some processor reads the prefix."""
        self.lazy = lazy or self.needs_ids
        """Whether positions must be scored one by one, in order, each with its own prefix."""
        self._index: Tensor | None = None
        """`banned` on the device of the last logits."""

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt_length: int,
        end_ids: Sequence[int],
        banned: Sequence[int] = (),
        first: Sequence[Processor] = (),
    ) -> Distribution:
        """Create the distribution that transformers' `generate` uses for the same options.

        The processors `first` run before the penalties, `params.processors` after them.
        """
        p = params
        reading: list[Processor] = [*first]  # processors that read the prefix
        if p.logit_bias:
            index = torch.tensor([list(p.logit_bias)], device="cpu")
            bias = torch.tensor([list(p.logit_bias.values())], dtype=torch.float64, device="cpu")
            reading.append(partial(logit_bias, index=index, bias=bias))
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
        drawn = p.temperature > 0
        reading.extend(partial(checked, process=one, drawn=drawn) for one in p.processors)
        cutting: list[Processor] = []
        if p.temperature not in (0, 1):
            cutting.append(partial(temperature, value=p.temperature))
        if p.temperature and p.top_k:
            cutting.append(partial(top_k, k=p.top_k))
        if p.temperature and p.top_p < 1:
            cutting.append(partial(top_p, p=p.top_p))
        if p.temperature and p.min_p:
            cutting.append(partial(min_p, p=p.min_p))
        return cls(
            [*reading, *cutting],
            greedy=p.temperature == 0,
            lazy=p.logprobs,
            needs_ids=bool(reading),
            banned=banned,
        )

    def watched(self, watcher: Processor) -> Distribution:
        """Return a copy with one more processor, which runs first and must not change the
        scores."""
        return Distribution(
            (watcher, *self.processors),
            greedy=self.greedy,
            lazy=True,
            needs_ids=self.needs_ids,
            banned=self.banned,
        )

    def scores(self, ids: Tensor | None, logits: Tensor) -> Tensor:
        """Return (1, V) processed scores for a node's (V,) raw logits; `ids` (1, T): its prefix.

        Without `lazy`, logits of N nodes (N, V) may be given together, and give (N, V) scores.
        """
        # A copy, because processors may write in place and drafters receive the raw logits.
        exact = logits.dtype == torch.float64
        # On the device of the ids, as in `generate`: a device map may put logits elsewhere.
        device = logits.device if ids is None else ids.device
        scores = logits.to(device, torch.float64 if exact else torch.float32, copy=True)
        scores = self.allowed(scores.reshape(-1, scores.shape[-1]))
        for process in self.processors:
            scores = process(ids, scores)  # type: ignore[arg-type]
        return scores

    @property
    def picks_best(self) -> bool:
        """Whether the next token is the best of the raw logits that is not banned."""
        return self.greedy and not self.lazy and not self.processors

    def allowed(self, logits: Tensor) -> Tensor:
        """Return (N, V) logits with banned ids at -inf; a copy if there are any."""
        if not self.banned:
            return logits
        if self._index is None or self._index.device != logits.device:
            self._index = torch.tensor(self.banned, device=logits.device)
        return logits.index_fill(-1, self._index, -math.inf)

    def best(self, logits: Tensor) -> Tensor:
        """Return (N,) greedy choices for (N, V) raw logits; valid without processors only."""
        return argmax(self.allowed(logits))

    def probs(self, scores: Tensor) -> Tensor:
        """Return (V,) probabilities for (1, V) scores."""
        return scores.softmax(-1)[0]


GREEDY = Distribution((), greedy=True)
"""The best token of the raw logits."""


class Sampler(Protocol):
    """Source of random numbers; the exact tests enumerate all outcomes instead."""

    def draw(self, p: Tensor) -> int:
        """Return an index distributed as `p` (V,)."""

    def accept(self, ratio: float) -> bool:
        """Return True with probability min(1, ratio)."""

    @property
    def predicts(self) -> bool:
        """Whether it can `predict` draws.

        If it can, the tokens after all nodes of a draft are chosen together, on the device, before
        it is known which nodes are accepted.
        """
        return False

    def predict(self, probs: Tensor, draws: Sequence[int]) -> Tensor:  # noqa: ARG002
        """Return (N,) tokens: what draw number `draws[i]` will return if it is from `probs[i]`.

        `probs` is (N, V), and the next draw has number 0.
        """
        raise TypeError(f"{type(self).__name__} does not predict its draws")

    def skip(self, count: int) -> None:  # noqa: ARG002
        """Leave out the next `count` draws after their tokens were predicted."""
        raise TypeError(f"{type(self).__name__} does not predict its draws")


class TorchSampler(Sampler):
    """Sampler that uses a torch generator, or torch's global generator if there is none.

    A draw from p is the arg-max of p(x)/e(x), with exponential noise e. `torch.multinomial` draws
    one token in the same way, so that drawing the noise first changes no token.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator
        self._noise = deque[Tensor]()
        """Noise (V,) of the next draws, if it was needed to predict them."""

    @classmethod
    def seeded(cls, seed: int | None, device: Any = "cpu") -> TorchSampler:
        """Create a generator on `device`; None takes a new unpredictable seed."""
        generator = torch.Generator(device)
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        return cls(generator)

    def draw(self, p: Tensor) -> int:
        if self.generator is not None:  # the distribution of a drafter may be on another device
            p = p.to(self.generator.device)
        if self._noise and math.isfinite(p.sum()):  # else `multinomial` raises
            return int((p / self._noise.popleft()).argmax())
        # The same shape as in transformers, so that the same seed gives the same token.
        return int(torch.multinomial(p[None], 1, generator=self.generator))

    def accept(self, ratio: float) -> bool:
        device = self.generator.device if self.generator is not None else "cpu"
        # Strictly less: a ratio of 0 must never be accepted, and the number is in [0, 1).
        return (
            float(torch.rand((), generator=self.generator, dtype=torch.float32, device=device))
            < ratio
        )

    @property
    def predicts(self) -> bool:
        """Whether its generator is its own: the global one must not be used more than needed."""
        return self.generator is not None

    def predict(self, probs: Tensor, draws: Sequence[int]) -> Tensor:
        assert self.generator is not None
        probs = probs.to(self.generator.device)
        while len(self._noise) <= max(draws):
            self._noise.append(torch.empty_like(probs[0]).exponential_(generator=self.generator))
        # Not by an index: the host would wait for its copy to the device.
        return (probs / torch.stack([self._noise[n] for n in draws])).argmax(-1)

    def skip(self, count: int) -> None:
        for _ in range(count):
            self._noise.popleft()


class Gumbel(Sampler):
    """Sampler with draws that depend only on a seed, the draw's number n and the distribution.

    A draw from p is the arg-max over x of log p(x) + g(x), where g is Gumbel noise keyed by (seed,
    n, x). A drafter that knows the seed can predict it: if it draws from q with the same noise,
    both tokens are equal with probability Σ_x 1/Σ_y max(p(y)/p(x), q(y)/q(x)) ≥ (1−TV)/(1+TV).
    """

    def __init__(self, seed: int | None = None) -> None:
        """Use `seed`; None takes a new unpredictable seed."""
        self.seed = secrets.randbits(63) if seed is None else seed % 2**64
        self.draws = 0
        """Number of draws so far, which is n of the next one."""
        self._accepts = 0

    def noise(self, n: int, size: int) -> Tensor:
        """Return (size,) float64 noise of the n-th draw, counted from 0."""
        exponential = -np.log1p(-self._uniform(n, size))
        return torch.from_numpy(-np.log(exponential.clip(np.finfo(np.float64).tiny)))

    def _uniform(self, stream: int, size: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        key = np.array([self.seed, stream % 2**64], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key)).random(size)

    def draw(self, p: Tensor) -> int:
        if not math.isfinite(p.sum()):
            raise RuntimeError("the probabilities of the next token are not finite")
        noise = self.noise(self.draws, len(p))
        self.draws += 1
        return int((p.log() + noise.to(p)).argmax())

    def accept(self, ratio: float) -> bool:
        self._accepts += 1
        # Negative stream numbers: no draw uses them.
        return float(self._uniform(-self._accepts, 1)[0]) < ratio
