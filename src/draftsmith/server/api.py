"""From a request's body to a call of the worker, and from its chunks to a response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError

from draftsmith.engine.call import Call as EngineCall
from draftsmith.engine.engine import Engine
from draftsmith.engine.sequence import TextSequence, partial_results, raise_failures
from draftsmith.errors import OptionError, PromptError
from draftsmith.model.openmp import end_team
from draftsmith.server.alternatives import Alternatives, speller
from draftsmith.server.answers import Answer, Choice, Event
from draftsmith.server.calls.formats import markers_of
from draftsmith.server.chats import Chat, grammar_of
from draftsmith.server.echo import Echo, echo_of
from draftsmith.server.ignored import Ignored
from draftsmith.server.keys import Keys
from draftsmith.server.metrics import Metrics
from draftsmith.server.refusals import Refusal
from draftsmith.server.schema import ChatRequest, CompletionRequest, Sampling, text_of
from draftsmith.server.settings import Settings
from draftsmith.server.worker import Call, Worker
from draftsmith.text.grammar import Grammar

_INFILLING = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
"""Tokens before what precedes a gap, before what follows it, and before what fills it."""

_TEXTS = ["this and no more", "or that"]
"""What a grammar may ask for: it leaves a choice, then it forces tokens."""

CLIENT_GONE = 499
"""Status of an answer without a client."""

LONG = 100_000
"""Bytes of a request from which its preparation may take a noticeable time."""

log = logging.getLogger(__name__)


class Arrival(NamedTuple):
    """A request that has arrived with its body."""

    began: float
    """When it had, by `time.perf_counter`."""
    bytes: int
    """Of its body."""


class Api:
    """One engine and all that serves it."""

    def __init__(self, engine: Engine, settings: Settings, keys: Keys, name: str) -> None:
        """`name`: what clients call the model."""
        self.engine, self.settings, self.keys, self.name = engine, settings, keys, name
        self.tokenizer = engine.model.tokenizer
        self.spell = speller(engine.model)
        self.markers = {} if self.tokenizer is None else markers_of(self.tokenizer)
        """Tags of tool calls that no text shows, by token."""
        self.metrics = Metrics(name)
        capacity = engine.max_batch + settings.queue
        self.worker = Worker(engine, capacity, self.metrics.observe)
        self.metrics.watch(self.worker)
        self._preparing = ThreadPoolExecutor(capacity, "draftsmith-prompts")
        """A thread for each request, so that none waits for another's prompt or drafter."""
        self._long = asyncio.Lock()
        """Long prompts take turns, so that they take one core at most."""
        self._compiling = ThreadPoolExecutor(4, "draftsmith-grammars")
        """So that one which takes long holds up no other."""

    def warm_up(self) -> None:
        """Compile and load what answers need, by two short ones of which nothing is kept.

        Else the first client waits for it. Raises what the model does.
        """
        log.info("warming up")
        began, sequences = perf_counter(), [self._short()]
        schema = Grammar.json_schema({"enum": _TEXTS})
        try:
            sequences.append(self._short(grammar=schema, prediction=_TEXTS[0]))
        except OptionError as error:  # the model follows no grammar; requests for one say so, too
            log.info("no grammar can be followed", extra={"fields": {"why": str(error)}})
        with (
            partial_results(sequences),
            EngineCall(self.engine.resources, sequences, len(sequences)) as call,
        ):
            call.run()
            raise_failures(sequences)
        log.info("warm", extra={"fields": {"seconds": round(perf_counter() - began, 3)}})

    def _short(self, **options: Any) -> TextSequence:
        """An answer that is too short to be kept, and that is not remembered."""
        options |= {"max_new_tokens": 8, "min_new_tokens": 8, "budget": "drafter"}
        sequence = self.engine.prepare(options).sequence([0, 1, 0, 1])
        sequence.context.earlier = None
        return sequence

    def close(self) -> None:
        """End the threads that prepare requests."""
        self._preparing.shutdown(wait=False, cancel_futures=True)
        self._compiling.shutdown(wait=False, cancel_futures=True)

    def check_model(self, model: str | None) -> None:
        """Raise Refusal for a model that is not served here."""
        if model not in (None, self.name):
            raise Refusal(
                404,
                f"the model {model!r:.200} does not exist; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    # --- what is asked ----------------------------------------------------------------------------

    async def chat(
        self, body: ChatRequest, salt: str, request: Request, ignored: Ignored
    ) -> Response:
        """Answer a chat."""
        call, answer = await self.begin_chat(body, salt, request, ignored)
        return await self._reply(body, call, answer, request)

    async def begin_chat(
        self, body: ChatRequest, salt: str, request: Request, ignored: Ignored
    ) -> tuple[Call, Answer]:
        """A chat's answers in line, and how they are written down."""
        chat = Chat.of(body, self.tokenizer, self.settings.tool_format, ignored)
        if body.top_logprobs is not None and not body.logprobs:
            raise Refusal(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        top = (body.top_logprobs or 0) if body.logprobs else None
        more = chat.options | predicted(body)
        call = await self._begin(body, [chat.messages], salt, more, chat.grammar, top, request)
        try:
            reader = partial(chat.reader, self.tokenizer, self.markers, call.prompt)
            most = None if body.parallel_tool_calls else 1
            choices = [Choice(reader=reader(), most_calls=most) for _ in range(body.n)]
        except BaseException:
            call.close()
            raise
        thinks = chat.thoughts is not None
        return call, self._answer(body, choices, logprobs=body.logprobs, thinks=thinks)

    async def complete(self, body: CompletionRequest, salt: str, request: Request) -> Response:
        """Continue one or more texts."""
        prompts: list[Any] = [body.prompt]
        if isinstance(body.prompt, list) and body.prompt and not isinstance(body.prompt[0], int):
            prompts = body.prompt
        self.worker.check(len(prompts) * body.n)  # before anything is made for each
        if body.suffix is not None:
            prompts = self._gaps(prompts, body.suffix)
        grammar = grammar_of(body.response_format)
        self.check_model(body.model)
        echoes: list[Echo | None] = [None] * len(prompts)
        if body.echo and not await unless_gone(request, self._echo(body, prompts, salt, echoes)):
            return Response(status_code=CLIENT_GONE)
        choices = [Choice(echo=echo) for echo in echoes for _ in range(body.n)]
        answer = self._answer(
            body, choices, prompts=len(prompts), chat=False, logprobs=body.logprobs is not None
        )
        more, top = predicted(body), body.logprobs
        call = await self._begin(body, prompts, salt, more, grammar, top, request)
        return await self._reply(body, call, answer, request)

    async def _echo(
        self,
        body: CompletionRequest,
        prompts: Sequence[Any],
        salt: str,
        echoes: list[Echo | None],
    ) -> bool:
        """Put what each prompt's answers begin with into `echoes`; say that it is done."""
        if body.suffix is not None:
            raise Refusal(400, "echo cannot be used with a suffix", param="echo")
        prepare = partial(echo_of, self.engine, top=body.logprobs, salt=salt)
        loop = asyncio.get_running_loop()
        made = await loop.run_in_executor(self._preparing, lambda: [*map(prepare, prompts)])
        sequences = [sequence for _, sequence in made if sequence is not None]
        if sequences:
            call = self.worker.call(len(sequences), self.settings.timeout, counted=False)
            try:
                call.start(sequences, [None] * len(sequences))
                async for _ in call.chunks():
                    pass
            finally:
                call.close()
        echoes[:] = [echo for echo, _ in made]
        return True

    def _gaps(self, prompts: Sequence[Any], suffix: str) -> list[str]:
        """The prompts by which a model fills the gap between two texts."""
        vocabulary = {} if self.tokenizer is None else self.tokenizer.get_vocab()
        marks = next((marks for marks in _INFILLING if vocabulary.keys() >= {*marks}), None)
        if marks is None or not all(isinstance(prompt, str) for prompt in prompts):
            why = "has no tokens that mark a gap" if marks is None else "needs a text before it"
            raise Refusal(400, f"a suffix cannot be used: this model {why}", param="suffix")
        before, after, middle = marks
        return [f"{before}{prompt}{after}{suffix}{middle}" for prompt in prompts]

    def _answer(
        self, body: ChatRequest | CompletionRequest, choices: list[Choice], **more: Any
    ) -> Answer:
        return Answer(
            self.name,
            self.spell,
            choices,
            sources=body.return_sources,
            drafts=body.return_drafts,
            stats=body.return_stats,
            predicted=body.prediction is not None,
            **more,
        )

    # --- from there to the worker and back --------------------------------------------------------

    async def _begin(
        self,
        body: Sampling,
        prompts: Sequence[Any],
        salt: str,
        more: Mapping[str, Any],
        grammar: Grammar | None,
        top: int | None,
        request: Request,
    ) -> Call:
        """Prepare the answers to some prompts and put them in line.

        `more`: further options of the engine. `top`: alternatives for each token's log-probability;
        None: no log-probabilities. `seconds`: that they may take; None: the server's limit.
        """
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise Refusal(400, "stream_options needs stream=true", param="stream_options")
        if body.best_of not in (None, body.n):
            raise Refusal(
                400,
                f"best_of={body.best_of} must be n, which is {body.n}: this server drops no "
                "answer; ask for all of them by n, and choose by their log-probabilities",
                param="best_of",
            )
        chosen = body.drafter not in (None, "none") or body.budget is not None
        if chosen and not self.settings.allow_drafters:
            raise Refusal(400, "this server chooses drafter and budget itself", param="drafter")
        options = body.options(self.settings.max_output) | dict(more) | {"grammar": grammar}
        options["cache_salt"] = salt if body.cache_salt is None else f"given:{body.cache_salt}"
        if self.settings.log_prompts:
            log.info("prompts", extra={"fields": {"prompts": list(prompts)}})
        arrival: Arrival = request.state.arrival
        seconds = self.settings.timeout - (perf_counter() - arrival.began)
        call = self.worker.call(len(prompts) * body.n, seconds, arrival.began)
        try:
            if grammar is not None:
                await self._compiled(grammar)
            prepare = partial(self._prepare, prompts, options, body.n, arrival.began)
            sequences = await call.in_time(self._prepared(prepare, long=arrival.bytes > LONG))
            for sequence in sequences if body.return_drafts else ():
                sequence.drafts = []
            for sequence in sequences:
                assert sequence.stream is not None
                sequence.stream.apart = self.markers
            watching = [
                None if top is None else Alternatives.watch(sequence, top) for sequence in sequences
            ]
            call.start(sequences, watching)
        except BaseException:
            call.close()
            raise
        return call

    async def _compiled(self, grammar: Grammar) -> None:
        """Have a grammar compiled in a thread of its own: it takes its time, but only once."""
        compile_it = partial(self.engine.prepare, {"grammar": grammar})
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.settings.grammar_seconds) as limit:
                await loop.run_in_executor(self._compiling, compile_it)
        except TimeoutError:
            if not limit.expired():  # the compiler has raised this
                raise
            raise Refusal(
                400, "the grammar took too long to compile; simplify it", param="response_format"
            ) from None

    async def _prepared(
        self, prepare: Callable[[], list[TextSequence]], *, long: bool
    ) -> list[TextSequence]:
        """What a thread of the request's own prepares; long prompts one after the other."""
        async with self._long if long else nullcontext():
            return await asyncio.get_running_loop().run_in_executor(self._preparing, prepare)

    def _prepare(
        self, prompts: Sequence[Any], options: Mapping[str, Any], n: int, began: float
    ) -> list[TextSequence]:
        sequences = self.engine.prepare(options, began).sequences(prompts, n, streaming=True)
        end_team()  # the next request is prepared in another thread
        most, longest = (
            self.settings.max_context,
            max(sequence.prompt_length for sequence in sequences),
        )
        if most is not None and longest > most:
            raise PromptError(
                f"the prompt has {longest} tokens, but this server's context is {most}; shorten it"
            )
        return sequences

    async def _reply(
        self, body: Sampling, call: Call, answer: Answer, request: Request
    ) -> Response:
        """The answer as it was asked for: in events, or whole."""
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return self.stream(call, answer, answer.events(call.chunks(), usage))
        return await self.whole(call, answer, answer.whole, request)

    def stream(self, call: Call, answer: Answer, events: AsyncIterator[Event]) -> Response:
        """A response in events, which closes the call whatever becomes of it."""
        closing = partial(self._close, call, answer)
        return Events(events, closing, self.settings)

    async def whole(
        self, call: Call, answer: Answer, body: Callable[[], Any], request: Request
    ) -> Response:
        """A response in one piece; nothing where the client is gone."""

        async def ready() -> bool:
            async for chunk in call.chunks():
                answer.choices[chunk.index].take(chunk)
            return True

        try:
            done = await unless_gone(request, ready())
            return JSONResponse(body()) if done else Response(status_code=CLIENT_GONE)
        finally:
            self._close(call, answer)

    def _close(self, call: Call, answer: Answer) -> None:
        call.close()
        usage, each = answer.usage(), [choice.finish_reason for choice in answer.choices]
        told = {
            "id": answer.id,
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "finish_reasons": [reason or "cancelled" for reason in each],
            "seconds": round(perf_counter() - call.began, 3),
        }
        log.info("answered", extra={"fields": told})


class Events(EventSourceResponse):
    """A stream of events."""

    def __init__(
        self, events: AsyncIterator[Event], closing: Callable[[], None], settings: Settings
    ) -> None:
        """`closing` is called at the end, also where nothing was ever sent."""
        super().__init__(
            events, sep="\n", ping=settings.keep_alive, send_timeout=settings.slow_reader
        )
        self._closing = closing

    async def __call__(self, *connection: Any) -> None:
        """Send them; a reader that is too slow gets no end, which closes its connection."""
        try:
            await super().__call__(*connection)
        except SendTimeoutError:
            log.warning("a reader was too slow")
        finally:
            self._closing()


async def unless_gone(request: Request, work: Coroutine[Any, Any, bool]) -> bool:
    """Whether the work was done before the client went; then it is cancelled. Raises its errors."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done() and tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def predicted(body: ChatRequest | CompletionRequest) -> dict[str, Any]:
    """The engine's option for what the answer is expected to resemble."""
    return {} if body.prediction is None else {"prediction": text_of(body.prediction.content)}
