"""Requests and answers of a live run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftsmith.core.sampling import SamplingParams, only
from draftsmith.core.stats import Stats
from draftsmith.errors import UnsupportedError
from draftsmith.model.forward import unwrapped


class Dictated:
    """Logits processor that forces `answer` after a prompt of `prompt` tokens."""

    def __init__(self, prompt: int, answer: Sequence[int]) -> None:
        self.prompt, self.answer = prompt, answer

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(1, T) ids and (1, V) scores → (1, V), all but one of them -inf."""
        return self._only(input_ids.shape[1], scores)

    def _only(self, length: int, scores: Tensor) -> Tensor:
        # Any token is fine inside the prompt, and after the answer's end, which drafts may reach.
        token = self.answer[min(max(0, length - self.prompt), len(self.answer) - 1)]
        return only(scores, token)

    @contextmanager
    def in_logits(self, model: Any) -> Iterator[None]:
        """Force the answer in the model's own logits while the context is open.

        For transformers' prompt lookup, which also calls logits processors to filter its
        candidates.
        """

        def say(_model: Any, _args: Any, given: dict[str, Any], output: Any) -> None:
            if "position_ids" not in given:
                raise UnsupportedError(
                    "generate passes no position_ids to this model, so answers cannot be dictated"
                )
            logits = output.logits  # of the last positions
            for row, at in enumerate(given["position_ids"][0, -logits.shape[1] :].tolist()):
                logits[:, row] = self._only(at + 1, logits[:, row])

        hook = unwrapped(model).register_forward_hook(say, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt in tokens, with the options of its answer."""

    ids: Sequence[int]
    limit: int
    """Most new tokens."""
    sampling: SamplingParams
    """Temperature, seed and filters; the same for every arm."""
    dictated: Dictated | None = None
    """The answer to force; None: the model's own."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One generation by one arm."""

    tokens: list[int]
    seconds: float
    """Seconds from the call to the last token."""
    first_token_seconds: float
    passes: int
    finish_reason: str
    stats: Stats | None = None
    """Statistics of our loop; None for peers."""
