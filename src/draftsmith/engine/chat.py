"""A conversation that keeps its KV cache and its drafter's state from turn to turn."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from time import perf_counter
from typing import Any, Unpack
from weakref import ref

from draftsmith.core.drafter import sync
from draftsmith.core.session import Session
from draftsmith.drafters.answer_cache import AnswerCache
from draftsmith.engine.jobs import Job, Piece, Stream
from draftsmith.engine.request import Options, Request
from draftsmith.engine.result import GenerationResult
from draftsmith.engine.scheduler import Scheduler
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
        scheduler: Scheduler,
        prepare: Callable[[Mapping[str, Any], float], Request],
        system: str | None,
        options: Mapping[str, Any],
    ) -> None:
        self.options: dict[str, Any] = dict(options)
        """Those of every turn; may be edited between turns."""
        self.messages: list[dict[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._scheduler, self._prepare = scheduler, prepare
        self._answers = AnswerCache(REMEMBERED, scheduler.model.facts)
        self._open: Callable[[], Stream | None] = lambda: None
        """The last turn's stream while somebody has it; a turn knows its chat, so only weakly."""
        self._last: Job | None = None
        """The last turn's, whose drafter state the next one takes."""

    def __repr__(self) -> str:
        held = len(self.messages)
        return f"Chat({held} message{'s' * (held != 1)}, {last_part(self._scheduler.model.name)!r})"

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
        job = request.job(request.encode(history), streaming=True)
        if job.session.context.earlier is None:
            job.session.context.earlier = self._answers.of(job.salt)
        stream = Stream(job, self._turn(job, history))
        self._open = ref(stream)
        return stream

    def reset(self) -> None:
        """Forget the conversation but for the system message."""
        self._close()
        self.messages = [m for m in self.messages if m["role"] == "system"]
        last, self._last = self._last, None
        if last is not None:
            self._forget(last)
        self._answers.forget()

    def _close(self) -> None:
        """End the turn before; raises OptionError where its reader has yet to come to its end."""
        stream = self._open()
        if stream is not None:
            stream.close()
            if not stream.closed:
                raise OptionError("another thread reads this chat's answer: let it end first")

    def _left(self, job: Job) -> bool:
        """Whether a turn's drafter state is ours, after a wait for who computes it in his pass.

        From within that pass it is not: the pass then closes it. A turn that is closed does not
        ask: a collection of garbage may close it while its thread has what that pass waits for.
        """
        job.keeps_drafter = self._scheduler.leave(job)
        return job.keeps_drafter

    def _forget(self, job: Job) -> None:
        """Close a turn's drafter state."""
        if self._left(job):
            job.session.close_drafter()

    def _resume(self, session: Session) -> None:
        """Give a new turn's session the drafter's state of the last turn."""
        job, self._last = self._last, None
        if job is None or not self._left(job):
            return
        last = job.session
        if last.state is None:
            return
        before, now = last.context, session.context
        same = before.prediction == now.prediction and before.earlier is now.earlier
        if last.drafter == session.drafter and same:
            session.state, last.state = last.state, None
            sync(session.state, last.ids, session.ids)
        else:
            last.close_drafter()

    def _turn(self, job: Job, history: list[dict[str, Any]]) -> Generator[Piece]:
        session, healthy = job.session, False
        job.rewinds = job.keeps_drafter = True
        try:
            self._resume(session)
            yield from self._scheduler.here.drive([job])
            healthy = session.error is None
        except GeneratorExit:
            healthy = True
            raise
        finally:
            if healthy:
                self._last = job
            else:
                self._forget(job)
            if session.generated or healthy:
                answer = {"role": "assistant", "content": job.result().text}
                self.messages = [*history, answer]
