"""A conversation that keeps its KV cache and its drafter's state from turn to turn."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, Unpack

from draftsmith.core.budget import CostCurve
from draftsmith.core.drafter import sync
from draftsmith.core.session import Session
from draftsmith.engine.jobs import Job, Piece, Stream, release, run
from draftsmith.engine.request import Options, Request
from draftsmith.engine.result import GenerationResult
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import REST, Runner


class Chat:
    """A conversation; `messages` is its history and may be read and edited between turns.

    Every turn renders the whole history with the model's template, and keeps cache and drafter
    state up to the longest common token prefix with what was there before.
    """

    def __init__(
        self,
        model: LoadedModel,
        prepare: Callable[[Mapping[str, Any]], Request],
        system: str | None,
        options: Mapping[str, Any],
    ) -> None:
        self.options: dict[str, Any] = dict(options)
        """Those of every turn; may be edited between turns."""
        self.messages: list[dict[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._model, self._prepare = model, prepare
        self._runner = Runner(model, rest=REST)
        self._open: Stream | None = None
        self._last: Session | None = None
        """The last turn's, whose cache and drafter state the next one takes."""

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
        if self._open is not None:
            self._open.close()
        history = [*self.messages, {"role": "user", "content": message}]
        request = self._prepare({**self.options, **options})
        job = request.job(request.encode(history), streaming=True)
        self._open = Stream(job, self._turn(job, history, request.drafting.cost))
        return self._open

    def reset(self) -> None:
        """Forget the conversation but for the system message."""
        if self._open is not None:
            self._open.close()
        self.messages = [m for m in self.messages if m["role"] == "system"]
        if self._last is not None:
            release(self._last, self._runner)
        self._last = None

    def _resume(self, session: Session) -> None:
        """Give a new turn's session the cache and the state of the last turn."""
        last = self._last
        if last is None or last.row is None or last.state is None:
            return
        session.row, session.state = last.row, last.state
        self._runner.extend(last.row, session.ids, session.needs)
        same_prediction = last.context.prediction == session.context.prediction
        if last.drafter == session.drafter and same_prediction:
            sync(last.state, last.ids, session.ids)
        else:
            last.state.close()
            session.state = None

    def _turn(
        self, job: Job, history: list[dict[str, Any]], cost: CostCurve
    ) -> Generator[list[Piece]]:
        session, healthy = job.session, False
        try:
            self._resume(session)
            yield from run([job], self._runner, cost, keep=True)
            healthy = True
        except GeneratorExit:
            healthy = True
            raise
        finally:
            if healthy:
                self._last = session
            else:
                # A failure inside a pass leaves the cache half-written: the next turn starts over.
                release(session, self._runner)
                self._runner, self._last = Runner(self._model, rest=REST), None
            if session.generated or healthy:
                answer = {"role": "assistant", "content": job.result().text}
                self.messages = [*history, answer]
