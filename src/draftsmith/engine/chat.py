"""Chat: a conversation that keeps its key/value cache and drafter state between turns."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, Unpack
from weakref import ref

from draftsmith.core.drafter import sync
from draftsmith.core.sampling import TorchSampler
from draftsmith.drafters.answer_cache import AnswerCache
from draftsmith.engine.call import Call, Stream
from draftsmith.engine.request import Options, Request
from draftsmith.engine.resources import Resources
from draftsmith.engine.result import GenerationResult
from draftsmith.engine.sequence import TextSequence
from draftsmith.errors import OptionError
from draftsmith.model.loaded import last_part
from draftsmith.text.thoughts import Thoughts
from draftsmith.text.tokenizer import decode

REMEMBERED = 16_000_000
"""Bytes for a conversation's earlier answers, if the engine stores none."""

_BUSY = "another thread is reading this chat's answer; wait until it has ended"
_NOT_REWOUND = "the drafter could not follow an edited conversation; it starts again"


class Chat:
    """A conversation. `messages` is its history and may be edited between turns.

    Every turn renders the whole history with the model's template. Drafter state and cache are kept
    up to the longest common token prefix with the previous turn; other requests may have taken the
    cache. Drafters also use earlier answers, including those that were removed from the history.
    The chat stores them until `reset`, unless the engine does.
    """

    def __init__(
        self,
        resources: Resources,
        prepare: Callable[[Mapping[str, Any], float], Request],
        system: str | None,
        options: Mapping[str, Any],
    ) -> None:
        """`prepare`: `Engine.prepare`."""
        self.options: dict[str, Any] = dict(options)
        """Options of every turn; may be edited between turns."""
        self.messages: list[dict[str, Any]] = []
        """The history; may be edited between turns."""
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._resources, self._prepare = resources, prepare
        self._answers = AnswerCache(REMEMBERED, resources.model.facts)
        self._open: Callable[[], Stream | None] = lambda: None
        """Returns the stream of the last turn if it exists; weak, because it refers to the chat."""
        self._sending = threading.RLock()
        """Held by a thread in `send`."""
        self._last: TextSequence | None = None
        """TextSequence of the last turn; the next turn takes its drafter state."""

    def __repr__(self) -> str:
        count = len(self.messages)
        return (
            f"Chat({count} message{'s' * (count != 1)}, {last_part(self._resources.model.name)!r})"
        )

    def send(self, message: str, **options: Unpack[Options]) -> GenerationResult:
        """Answer a message and add both to the history. Options as for `generate`."""
        with self._alone():
            stream = self.stream(message, **options)
            for _ in stream:
                pass
            return stream.result

    def stream(self, message: str, **options: Unpack[Options]) -> Stream:
        """Answer a message piece by piece; a cancelled answer joins the history up to its end.

        A new turn ends the previous one. A stream that is never read has no further effect.
        """
        request = self._prepare({**self.options, **options}, perf_counter())
        self._close()
        asked = {"role": "user", "content": message}
        (sequence,) = request.sequences([[*self.messages, asked]], streaming=True)
        sequence.of_chat = True
        if sequence.context.earlier is None:
            sequence.context.earlier = self._answers.of(sequence.salt)

        resume, keep = partial(self._resume, sequence), partial(self._keep, sequence, asked)
        stream = Stream(sequence, Call(self._resources, [sequence], resume, keep))
        self._open = ref(stream)
        return stream

    def reset(self) -> None:
        """Delete the conversation except for its system message."""
        self._close()
        given = (m for m in self.messages if isinstance(m, Mapping))
        self.messages = [m for m in given if m.get("role") == "system"]
        last, self._last = self._last, None
        if last is not None:
            self._resources.turns.between(last.close_drafter)
        self._answers.forget()

    def _close(self) -> None:
        """End the previous turn; raise OptionError if another thread is reading it."""
        stream = self._open()
        if stream is None or stream.closed:
            return
        with self._alone():
            if not stream._call.running:
                stream.close()
            if not stream.closed:
                raise OptionError(_BUSY)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no other thread send a message; raise OptionError if one does, or in a callback."""
        self._resources.turns.check()
        if not self._sending.acquire(blocking=False):
            raise OptionError(_BUSY)
        try:
            yield
        finally:
            self._sending.release()

    def _resume(self, sequence: TextSequence) -> None:
        """Pass the drafter state of the last turn to a new one, between passes."""
        turns = self._resources.turns
        with turns.wait(), turns.lock, turns.owner():
            last, self._last = self._last, None
            if last is None or (state := last.state) is None:
                return
            before, now = last.context, sequence.context
            same = before.prediction == now.prediction and before.earlier is now.earlier
            if last.drafter == sequence.drafter and same:
                try:
                    sync(state, last.ids, sequence.ids)
                    sequence.state, last.state = state, None
                except Exception as error:  # of a third-party drafter
                    sequence.note(_NOT_REWOUND, error)
            last.close_drafter()

    def _keep(self, sequence: TextSequence, message: dict[str, Any], interrupted: bool) -> None:
        """Add a turn to the history, and keep its sequence for the next turn."""
        last, self._last = self._last, sequence
        if last is not None:  # an interrupt came before `_resume`
            self._resources.turns.between(last.close_drafter)
        self._resources.turns.between(partial(self._resources.rest, sequence))
        sequence.sampler = TorchSampler()  # the old one may hold the noise of further draws
        if sequence.generated or (sequence.error is None and not interrupted):
            answer = {"role": "assistant", "content": self._said(sequence)}
            self.messages = [*self.messages, message, answer]  # edited while the stream was open

    def _said(self, sequence: TextSequence) -> str:
        """Return the text of an answer without finished thoughts that no template could remove.

        Templates remove them by their tags, which the text lacks if they are special tokens.
        """
        text, tokenizer = sequence.result().text, self._resources.model.tokenizer
        thoughts, answer = Thoughts.of(tokenizer), sequence.ids[sequence.prompt_length :]
        if thoughts is None or thoughts.end in text:
            return text
        if thoughts.end not in decode(tokenizer, answer, special=True):
            return text
        begin = bisect_left(
            range(len(answer)),
            True,
            key=lambda count: thoughts.end in decode(tokenizer, answer[:count], special=True),
        )
        return text.removeprefix(decode(tokenizer, answer[:begin]))
