"""What is asked in a live run, what comes back, and who answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.core.sampling import SamplingParams
from draftsmith.core.stats import Stats


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt in tokens, and how it is to be answered."""

    ids: Sequence[int]
    limit: int
    """Most new tokens."""
    sampling: SamplingParams
    """Temperature, seed and filters; the same for every arm."""
    dictated: Sequence[int] = ()
    """The answer that is to be given; empty: the model's own."""

    @property
    def processors(self) -> tuple[Dictated, ...]:
        """What makes an arm give the dictated answer."""
        return (Dictated(len(self.ids), self.dictated),) if self.dictated else ()


class Dictated:
    """A logits processor that leaves a prompt no other answer than `answer`."""

    def __init__(self, prompt: int, answer: Sequence[int]) -> None:
        """`prompt`: its tokens."""
        self.prompt, self.answer = prompt, answer

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(1, T) ids and (1, V) scores → (1, V), all but one of them -inf."""
        only = torch.full_like(scores, -torch.inf)
        only[:, self.token(input_ids.shape[1])] = 0.0
        return only

    def token(self, length: int) -> int:
        """What comes behind so many tokens, the prompt's among them."""
        # Behind the answer's end, where drafts may reach, anything will do.
        return self.answer[min(length - self.prompt, len(self.answer) - 1)]


@dataclass(frozen=True, slots=True)
class Answer:
    """One generation by one arm."""

    tokens: list[int]
    seconds: float
    """From the call to the last token."""
    first_token_seconds: float
    passes: int
    finish_reason: str
    stats: Stats | None = None
    """The loop's own record; peers have none."""
