"""A conversation that keeps its KV cache and its drafter's state from turn to turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, Unpack
from weakref import ref

from draftsmith.core.drafter import sync
from draftsmith.drafters.answer_cache import AnswerCache
from draftsmith.engine.call import Call, Stream
from draftsmith.engine.request import Options, Request
from draftsmith.engine.resources import Resources
from draftsmith.engine.result import GenerationResult
from draftsmith.engine.sequence import TextSequence
from draftsmith.errors import OptionError
from draftsmith.model.loaded import last_part

REMEMBERED = 16_000_000
"""Bytes of a conversation's answers, where the engine remembers none."""


class Chat:
    """A conversation; `messages` is its history and may be read and edited between turns.

    Every turn renders the whole history with the model's template, and keeps drafter state and
    (unless other requests have pushed it out) cache up to the longest common token prefix with what
    was there before. Its answers are remembered to draft from, also those that leave the history:
    by itself until `reset`, or by the engine where that remembers answers.
    """

    def __init__(
        self,
        resources: Resources,
        prepare: Callable[[Mapping[str, Any], float], Request],
        system: str | None,
        options: Mapping[str, Any],
    ) -> None:
        self.options: dict[str, Any] = dict(options)
        """Those of every turn; may be edited between turns."""
        self.messages: list[dict[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._resources, self._prepare = resources, prepare
        self._answers = AnswerCache(REMEMBERED, resources.model.facts)
        self._open: Callable[[], Stream | None] = lambda: None
        """The last turn's stream while somebody has it; a turn knows its chat, so only weakly."""
        self._last: TextSequence | None = None
        """The last turn's, whose drafter state the next one takes."""

    def __repr__(self) -> str:
        held = len(self.messages)
        return f"Chat({held} message{'s' * (held != 1)}, {last_part(self._resources.model.name)!r})"

    def send(self, message: str, **options: Unpack[Options]) -> GenerationResult:
        """The answer to one message; both join the history. Options as for `generate`."""
        stream = self.stream(message, **options)
        for _ in stream:
            pass
        return stream.result

    def stream(self, message: str, **options: Unpack[Options]) -> Stream:
        """The same, piece by piece; a cancelled answer joins the history as far as it came.

        A new turn ends the one before. A stream that is never read leaves no trace.
        """
        began = perf_counter()
        self._close()
        history = [*self.messages, {"role": "user", "content": message}]
        request = self._prepare({**self.options, **options}, began)
        sequence = request.sequence(request.encode(history), streaming=True)
        sequence.rewinds = sequence.keeps_drafter = True
        if sequence.context.earlier is None:
            sequence.context.earlier = self._answers.of(sequence.salt)

        def begin() -> None:
            self._resume(sequence)

        def end(sound: bool) -> None:
            self._keep(sequence, history, sound and sequence.error is None)

        stream = Stream(sequence, Call(self._resources, [sequence], 1, begin, end))
        self._open = ref(stream)
        return stream

    def reset(self) -> None:
        """Forget the conversation but for the system message."""
        self._close()
        self.messages = [m for m in self.messages if m["role"] == "system"]
        last, self._last = self._last, None
        if last is not None:
            self._resources.turns.between(last.close_drafter)
        self._answers.forget()

    def _close(self) -> None:
        """End the turn before; raises OptionError where its reader has yet to come to its end."""
        stream = self._open()
        if stream is not None:
            stream.close()
            if not stream.closed:
                raise OptionError("another thread reads this chat's answer: let it end first")

    def _resume(self, sequence: TextSequence) -> None:
        """Give a new turn the drafter's state of the last one."""
        last, self._last = self._last, None
        if last is None or (state := last.state) is None:
            return
        old, new = last, sequence
        before, now = old.context, new.context
        same = before.prediction == now.prediction and before.earlier is now.earlier
        if old.drafter == new.drafter and same:
            sync(state, old.ids, new.ids)
            new.state, old.state = state, None
        else:
            old.close_drafter()

    def _keep(self, sequence: TextSequence, history: list[dict[str, Any]], healthy: bool) -> None:
        """Add a turn's answer to the history; keep its drafter's state for the next turn."""
        self._last = sequence
        if sequence.generated or healthy:
            self.messages = [*history, {"role": "assistant", "content": sequence.result().text}]
