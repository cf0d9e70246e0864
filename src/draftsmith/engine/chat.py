"""A conversation that keeps its KV cache and its drafter's state from turn to turn."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, Unpack

from draftsmith.core.drafter import Drafter, DrafterState, sync
from draftsmith.core.target import Row
from draftsmith.engine.jobs import Job, Piece, Stream, run
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
        self._state: DrafterState | None = None
        self._open: Stream | None = None
        self._forget()

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
        self._open = Stream(job, self._turn(job, history, request))
        return self._open

    def reset(self) -> None:
        """Forget the conversation but for the system message."""
        if self._open is not None:
            self._open.close()
        self.messages = [m for m in self.messages if m["role"] == "system"]
        if self._row is not None:
            self._runner.close(self._row)
        self._forget()

    def _forget(self) -> None:
        self._drop_state()
        self._row: Row | None = None
        self._made_by: tuple[Drafter, tuple[int, ...]] | None = None
        self._ids: list[int] = []

    def _drop_state(self) -> None:
        if self._state is not None:
            self._state.close()
        self._state = None

    def _resume(self, job: Job, request: Request) -> None:
        """Give the new turn's session the cache and the state of the last turn."""
        ids, made_by = job.session.ids, (request.drafting.drafter, request.prediction)
        if self._row is not None:
            self._runner.extend(self._row, ids, job.session.needs)
        if self._state is not None and self._made_by == made_by:
            sync(self._state, self._ids, ids)
        else:
            self._drop_state()
        self._made_by = made_by
        job.session.row, job.session.state = self._row, self._state

    def _turn(
        self, job: Job, history: list[dict[str, Any]], request: Request
    ) -> Generator[list[Piece]]:
        session, healthy = job.session, False
        try:
            self._resume(job, request)
            yield from run([job], self._runner, request.drafting.cost, keep=True)
            healthy = True
        except GeneratorExit:
            healthy = True
            raise
        finally:
            if healthy:
                self._row, self._state, self._ids = session.row, session.state, session.ids
            else:
                # A failure inside a pass leaves the cache half-written: the next turn starts over.
                self._runner = Runner(self._model, rest=REST)
                self._forget()
            if session.generated or healthy:
                answer = {"role": "assistant", "content": job.result().text}
                self.messages = [*history, answer]
