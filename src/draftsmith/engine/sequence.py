"""A sequence as the engine runs it: with its text, and with what its caller receives."""

from __future__ import annotations

import threading
from collections import abc, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any

import torch

from draftsmith.core.sampling import Distribution, Sampler, SamplingParams
from draftsmith.core.sequence import Sequence, StopRule
from draftsmith.core.stats import total
from draftsmith.engine.drafting import Drafting
from draftsmith.engine.result import GenerationResult
from draftsmith.errors import DraftsmithError, GenerationInterrupted
from draftsmith.text.tokenizer import TextStream, decode, token_texts


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a streamed answer: the text that one token released."""

    text: str
    """The text; empty if the token released none."""
    token: int
    """Id of the token."""
    source: str
    """Source of the token: a drafter's name, or `target`."""
    seconds: float
    """Seconds since the call."""
    start: int = 0
    """Position in the answer's text, in characters, where the token's own text begins."""


class TextSequence(Sequence):
    """A sequence with its text, and with everything needed to run it and to create its result."""

    def __init__(
        self,
        drafting: Drafting,
        ids: abc.Sequence[int],
        *,
        distribution: Distribution,
        sampler: Sampler,
        limit: int,
        stop_rules: abc.Sequence[StopRule],
        sampling: SamplingParams,
        draft_seed: int | None,
        device: torch.device,
        began: float,
        prediction: abc.Sequence[int] = (),
        padding: abc.Sequence[int] = (),
        stream: TextStream | None = None,
        remarks: tuple[str, ...] = (),
        salt: str = "",
        preceding: tuple[int, ...] = (),
    ) -> None:
        """`began`: time of the call, or of the request's arrival.

        `stream` decodes text while tokens arrive, for streaming and stop strings. `remarks` are
        notices that report no failure. Only requests with the same `salt` share cached prefixes.
        `preceding`: tokens decoded before the answer, so that leading spaces survive.
        """
        super().__init__(
            ids,
            drafter=drafting.drafter,
            needs=drafting.needs,
            budget=drafting.new_budget(),
            stalls=drafting.stalls,
            vocab_size=drafting.model.vocab_size,
            distribution=distribution,
            sampler=sampler,
            limit=limit,
            stop_rules=stop_rules,
            sampling=sampling,
            draft_seed=draft_seed,
            device=device,
            prediction=prediction,
            padding=padding,
        )
        self.model, self.stream, self.remarks = drafting.model, stream, remarks
        self.began, self.salt, self.preceding = began, salt, preceding
        self.of_chat = False
        """Whether the next turn of a chat takes its drafter's state and a part of its row."""
        self.pieces: deque[Piece] = deque()
        """Pieces that the caller has not consumed."""
        self.released: list[str] = []
        """Text of the answer, token by token."""
        self.booked: tuple[int, str] = (0, "")
        """Number of tokens that have become pieces, and the text that is held back after them.

        Assigned at once, because another thread may call `result` during a pass.
        """
        self.since = 0
        """Number of passes of the scheduler when the row was opened."""
        self.key: Any = None
        """Conditions under which its row is computed; None: the row cannot be shared."""
        self.marked = False
        """Whether `PrefixCache.mark` has handled the end of the prompt."""
        self.memory_need: Any = None
        """Maximum memory it can use (`memory.MemoryNeed`); None: not computed yet."""
        self.admitted_at: float | None = None
        """Time at which its row was opened."""
        self.thread: threading.Thread | None = None
        """Thread that last ran a pass for it."""
        self.stepped_at = -inf
        """Time at which its call last ended a pass."""

    def book(self) -> None:
        """Create pieces for the tokens since the last call."""
        now = perf_counter() - self.began
        if len(self.sources) < self.generated:  # a pass was interrupted
            return
        new, texts, held = range(self.booked[0], self.generated), list[str](), ""
        if not new:
            return
        self.stats.wall_seconds = now
        if not new.start:
            self.stats.first_token_seconds = now
        if self.stream is not None:
            texts, held = self.stream.take(), self.stream.held()
            if self.finished and texts:
                texts[-1] += held
                held = ""
                if self.stream.silent:  # the last token has no text: it starts at the end
                    self.stream.starts[-1] = sum(map(len, (*self.released, *texts)))
        self.released += texts
        self.booked = new.stop, held
        # A failed sequence may have emitted a token without text.
        for text, at in zip(texts, new, strict=False):
            token = self.ids[self.prompt_length + at]
            start = 0 if self.stream is None else self.stream.starts[at]
            self.pieces.append(Piece(text, token, self.sources[at], now, start))

    def result(self) -> GenerationResult:
        """Return what was generated so far, without the tokens of a running pass."""
        booked, held = self.booked
        reason = self.finish_reason  # read first: a token is emitted before its finish reason
        if self.generated > booked:
            reason = None
        tokens = self.ids[self.prompt_length : self.prompt_length + booked]
        if self.stream is not None:
            text = "".join(self.released[:booked]) + held
        elif self.model.tokenizer is not None:
            text = decode(self.model.tokenizer, tokens, preceding=self.preceding)
            if "\ufffd" in text:  # a stream may show more: whole characters before invalid bytes
                text = "".join(token_texts(self.model.tokenizer, tokens, preceding=self.preceding))
        else:
            text = ""
        return GenerationResult(
            tokens=tokens,
            text=text,
            finish_reason=reason or "cancelled",
            stats=self.stats if self.finished else total([self.stats]),
            sources=self.sources[:booked],
            origins=self.origins[:booked],
            logprobs=None if self.logprobs is None else self.logprobs[:booked],
            prompt_tokens=self.ids[: self.prompt_length],
            notices=(*self.remarks, *self.failures.values()),
            exact=self.model.exact is not None,
            preceding=self.preceding,
            tokenizer=self.model.tokenizer,
        )


@contextmanager
def partial_results(sequences: abc.Sequence[TextSequence]) -> Iterator[None]:
    """Convert an error into GenerationInterrupted with the results of all sequences so far.

    A KeyboardInterrupt is raised unchanged, with the attribute `partial`. An error before the first
    token is raised unchanged.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.partial = [sequence.result() for sequence in sequences]  # type: ignore[attr-defined]
        raise
    except Exception as error:
        done = sum(sequence.generated for sequence in sequences)
        if not done:
            raise
        # The original error of the drafter or processor remains visible as the cause.
        kind = "" if isinstance(error, DraftsmithError) else f"{type(error).__name__}: "
        raise GenerationInterrupted(
            f"generation failed after {done} tokens ({kind}{error}); "
            f"the results so far are in this error's .partial",
            [sequence.result() for sequence in sequences],
        ) from error


def raise_failures(sequences: abc.Sequence[TextSequence]) -> None:
    """Raise the error of the first failed sequence.

    A StopIteration becomes a RuntimeError, as in generators: it would end the loop over a stream.
    """
    for sequence in sequences:
        if isinstance(error := sequence.error, StopIteration):
            raise RuntimeError("a callback raised StopIteration") from error
        if error is not None:
            raise error
