"""Api: converts request bodies to jobs of the worker, and the chunks of the jobs to responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError

from draftsmith.engine.call import Call
from draftsmith.engine.engine import Engine
from draftsmith.engine.request import end_ids
from draftsmith.engine.sequence import TextSequence, partial_results, raise_failures
from draftsmith.errors import OptionError, PromptError
from draftsmith.model.openmp import end_team
from draftsmith.server.alternatives import speller
from draftsmith.server.answers import Answer, Choice, Delta, Event, OpenAIAnswer
from draftsmith.server.calls.formats import markers_of
from draftsmith.server.chats import Chat, grammar_of
from draftsmith.server.echo import echo_of
from draftsmith.server.ignored import Ignored
from draftsmith.server.keys import Keys
from draftsmith.server.metrics import Metrics
from draftsmith.server.refusals import Refusal
from draftsmith.server.schema import ChatRequest, CompletionRequest
from draftsmith.server.settings import Settings
from draftsmith.server.worker import Deadline, Job, Worker
from draftsmith.text.grammar import Grammar

_INFILLING = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
"""Fill-in-the-middle tokens by model family: before the prefix, the suffix and the middle."""

_TEXTS = ["this and no more", "or that"]
"""The two answers that the grammar of the warm-up allows: one choice, then forced tokens."""

CLIENT_GONE = 499
"""Status of the response if the client has disconnected (as in nginx)."""

LONG = 100_000
"""Size of a body, in bytes, above which preparing its prompts may take a noticeable time."""

log = logging.getLogger(__name__)

T = TypeVar("T")


class Arrival(NamedTuple):
    """Time and size of a request, recorded when its whole body has arrived."""

    began: float
    """Time of the arrival, by `time.perf_counter`."""
    bytes: int
    """Size of the body."""


def salt_of(body: ChatRequest | CompletionRequest, caller: str) -> str:
    """Return the cache salt of a request; `caller`: that of its API key."""
    return caller if body.cache_salt is None else f"given:{body.cache_salt}"


class Api:
    """One engine, with the settings, worker, metrics and threads of its server."""

    def __init__(self, engine: Engine, settings: Settings, keys: Keys, name: str) -> None:
        """`name`: model name that clients send."""
        self.engine, self.settings, self.keys, self.name = engine, settings, keys, name
        self.tokenizer = engine.model.tokenizer
        self.spell = speller(engine.model)
        self.markers = {} if self.tokenizer is None else markers_of(self.tokenizer)
        """Tags of tool calls and reasoning that are special tokens, by token id."""
        self.metrics = Metrics(name)
        capacity = engine.max_batch + settings.queue
        self.worker = Worker(engine, capacity, settings.timeout, self.metrics.observe)
        self.metrics.watch(self.worker)
        self._capacity = capacity
        self.open()

    def open(self) -> None:
        """Accept requests, also after `close`: an application may be started more than once."""
        self.worker.draining = False
        self._preparing = ThreadPoolExecutor(self._capacity, "draftsmith-prompts")
        """One thread for each request, so that a short prompt never waits for another prompt."""
        self._long = asyncio.Lock()
        """Held while a long prompt is prepared, so that long prompts use at most one core."""
        self._compiling = ThreadPoolExecutor(4, "draftsmith-grammars")
        """Several threads, so that a slow grammar does not delay others."""

    def warm_up(self) -> None:
        """Generate two short answers, so that no client waits for compilation and loading.

        Raises the errors of the model.
        """
        log.info("warming up")
        began, sequences = perf_counter(), [self._short()]
        schema = Grammar.json_schema({"enum": _TEXTS})
        try:
            sequences.append(self._short(grammar=schema, prediction=_TEXTS[0]))
        except OptionError as error:  # requests with a grammar get the same error
            log.info("no grammar can be followed", extra={"fields": {"why": str(error)}})
        with (
            partial_results(sequences),
            Call(self.engine.resources, sequences) as call,
        ):
            call.run()
            raise_failures(sequences)
        log.info("warm", extra={"fields": {"seconds": round(perf_counter() - began, 3)}})

    def _short(self, **options: Any) -> TextSequence:
        """Return a sequence that leaves nothing in the prefix cache or the earlier answers.

        Its 12 tokens are too few for the prefix cache (`prefix_cache.LEAST`).
        """
        options |= {"max_new_tokens": 8, "min_new_tokens": 8, "budget": "drafter"}
        sequence = self.engine.prepare(options).sequence([0, 1, 0, 1])
        sequence.context.earlier = None
        return sequence

    def close(self) -> None:
        """End all answers and the threads that prepare requests; leave the engine open."""
        self.worker.end_all()
        for job in [*self.worker.jobs]:
            job.close()
        self._preparing.shutdown(wait=False, cancel_futures=True)
        self._compiling.shutdown(wait=False, cancel_futures=True)

    def check_model(self, model: str | None) -> None:
        """Raise Refusal for a model that is not served here."""
        if model not in (None, self.name):
            raise Refusal(
                f"the model {model!r:.200} does not exist; this server has {self.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    # --- requests ----------------------------------------------------------------------------

    async def chat(
        self,
        body: ChatRequest,
        caller: str,
        request: Request,
        ignored: Ignored,
        form: Callable[..., Answer] = OpenAIAnswer,
    ) -> Response:
        """Answer a chat. `caller`: cache salt of its API key. `form`: class of the answer."""
        chat = Chat.of(body, self.tokenizer, self.settings.tool_format, ignored)
        if body.top_logprobs is not None and not body.logprobs:
            raise Refusal("top_logprobs needs logprobs=true", param="top_logprobs")

        options = {
            "chat_template_kwargs": chat.template,
            "thoughts": chat.thoughts,
            "grammar": chat.grammar,
        }
        field = "tools" if chat.forced else "response_format"
        job = await self._submit(body, [chat.messages], caller, options, request, field)
        with job.closed_on_error():
            reader = partial(chat.reader, self.tokenizer, self.markers, job.prompt)
            one, thinks = not body.parallel_tool_calls, chat.thoughts is not None
            choices = [Choice(reader=reader(), one_call=one) for _ in range(body.n)]
            answer = form(job, body, self.name, self.spell, choices, thinks=thinks)
        return await self._reply(answer, request)

    async def complete(self, body: CompletionRequest, caller: str, request: Request) -> Response:
        """Continue one or more texts."""
        prompts: list[Any] = [body.prompt]
        if isinstance(body.prompt, list) and body.prompt and not isinstance(body.prompt[0], int):
            prompts = body.prompt
        self.worker.check(len(prompts) * body.n)  # before anything is prepared
        if body.suffix is not None:
            prompts = self._gaps(prompts, body.suffix)
        grammar = grammar_of(body.response_format)
        echoes: Sequence[Delta | None] = [None] * len(prompts)
        if body.echo:
            echoes = await unless_gone(request, self._echoes(body, prompts, caller, request))
        job = await self._submit(body, prompts, caller, {"grammar": grammar}, request)
        with job.closed_on_error():
            choices = [Choice(echo=echo) for echo in echoes for _ in range(body.n)]
            answer = OpenAIAnswer(job, body, self.name, self.spell, choices)
        return await self._reply(answer, request)

    async def _echoes(
        self, body: CompletionRequest, prompts: Sequence[Any], caller: str, request: Request
    ) -> list[Delta]:
        """Return the echo of each prompt."""
        if body.suffix is not None:
            raise Refusal("echo cannot be used with a suffix", param="echo")
        prepare = partial(echo_of, self.engine, top=body.logprobs, salt=salt_of(body, caller))
        loop = asyncio.get_running_loop()
        made = await loop.run_in_executor(self._preparing, lambda: [*map(prepare, prompts)])
        self._check_length([echo.offsets for echo, _ in made])
        sequences = [sequence for _, sequence in made if sequence is not None]
        if sequences:
            arrival: Arrival = request.state.arrival
            job = self.worker.job(len(sequences), arrival.began, counted=False)
            try:
                job.start(sequences)
                async for _ in job.chunks():
                    pass
            finally:
                job.close()
        return [echo for echo, _ in made]

    def _gaps(self, prompts: Sequence[Any], suffix: str) -> list[str]:
        """Return fill-in-the-middle prompts for the text between each prompt and `suffix`."""
        vocabulary = {} if self.tokenizer is None else self.tokenizer.get_vocab()
        marks = next((marks for marks in _INFILLING if vocabulary.keys() >= {*marks}), None)
        if marks is None or not all(isinstance(prompt, str) for prompt in prompts):
            why = "has no tokens that mark a gap" if marks is None else "needs a text before it"
            raise Refusal(f"a suffix cannot be used: this model {why}", param="suffix")
        before, after, middle = marks
        return [f"{before}{prompt}{after}{suffix}{middle}" for prompt in prompts]

    # --- submission and responses ------------------------------------------------------

    async def _submit(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[Any],
        caller: str,
        more: Mapping[str, Any],
        request: Request,
        field: str = "response_format",
    ) -> Job:
        """Prepare the sequences of all prompts, and submit them.

        `more`: further options of the engine, with a grammar or None. `field`: where the request
        has the grammar.
        """
        if body.stream_options is not None and not body.stream:
            raise Refusal("stream_options needs stream=true", param="stream_options")
        if body.best_of not in (None, body.n):
            raise Refusal(
                f"best_of={body.best_of} must be n, which is {body.n}: this server drops no "
                "answer; ask for all of them by n, and choose by their log-probabilities",
                param="best_of",
            )
        chosen = body.drafter not in (None, "none") or body.budget is not None
        if chosen and not self.settings.allow_drafters:
            raise Refusal(
                "this server chooses drafter and budget itself; `serve --allow-drafters` lets "
                "requests choose",
                param="drafter",
            )
        ends = end_ids(self.engine.model)
        options = body.options(self.settings.max_output, ends) | dict(more)
        grammar = options["grammar"]
        options["cache_salt"] = salt_of(body, caller)
        if self.settings.log_prompts:
            log.info("prompts", extra={"fields": {"prompts": list(prompts)}})
        arrival: Arrival = request.state.arrival
        job = self.worker.job(len(prompts) * body.n, arrival.began)
        with job.closed_on_error():
            prepare = partial(self._prepare, body, prompts, options, arrival.began)
            async with job.in_time():
                if grammar is not None:
                    await self._compile(grammar, field)
                async with self._long if arrival.bytes > LONG else nullcontext():
                    loop = asyncio.get_running_loop()
                    sequences = await loop.run_in_executor(self._preparing, prepare)
            job.start(sequences, body.top)
        return job

    async def _compile(self, grammar: Grammar, field: str) -> None:
        """Compile a grammar in another thread; the engine keeps the result."""
        model, loop, begun = self.engine.model, asyncio.get_running_loop(), asyncio.Event()

        def compiled() -> None:
            loop.call_soon_threadsafe(begun.set)
            model.grammars.compile(grammar, end_ids(model))

        done = loop.run_in_executor(self._compiling, compiled)
        try:
            await begun.wait()  # for the grammars of other requests
            message = "the grammar took too long to compile; simplify it"
            when = loop.time() + self.settings.grammar_seconds
            async with Deadline(when, message, param=field):
                await done
        except OptionError as error:
            raise Refusal(f"{field}: {error}", param=field) from None
        finally:
            done.cancel()

    def _prepare(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[Any],
        options: Mapping[str, Any],
        began: float,
    ) -> list[TextSequence]:
        sequences = self.engine.prepare(options, began).sequences(prompts, body.n, streaming=True)
        end_team()  # the next request is prepared in another thread
        self._check_length([sequence.context.ids for sequence in sequences])
        for sequence in sequences:
            assert sequence.stream is not None
            sequence.stream.apart = self.markers
            sequence.drafts = [] if body.return_drafts else None
        return sequences

    def _check_length(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raise PromptError for a prompt that is longer than this server's context."""
        most, longest = self.settings.max_context, max(map(len, prompts))
        if most is not None and longest > most:
            raise PromptError(
                f"the prompt has {longest} tokens, but this server's context is {most}; shorten it"
            )

    async def _reply(self, answer: Answer, request: Request) -> Response:
        """Return the response, streamed or whole as the request asks.

        The job is closed when the response ends, also after an error.
        """
        chunks, closing = answer.job.chunks(), partial(self._close, answer)
        if answer.body.stream:
            return Events(answer.events(chunks), closing, self.settings)

        async def whole() -> Any:
            async for chunk in chunks:
                answer.choices[chunk.index].take(chunk)
            return answer.whole()

        try:
            return JSONResponse(await unless_gone(request, whole()))
        finally:
            closing()

    def _close(self, answer: Answer) -> None:
        answer.job.close()
        usage, each = answer.usage(), [choice.finish_reason for choice in answer.choices]
        cut_off = sum(len(choice.sources) for choice in answer.choices if choice.result is None)
        fields = {
            "id": answer.id,
            "prompt_tokens": usage["prompt_tokens"] or len(answer.job.prompt),
            "completion_tokens": usage["completion_tokens"] + cut_off,
            "finish_reasons": [reason or "cancelled" for reason in each],
            "seconds": round(perf_counter() - answer.job.began, 3),
        }
        log.info("answered", extra={"fields": fields})


class Events(EventSourceResponse):
    """A streamed response that calls a function when it has ended."""

    def __init__(
        self, events: AsyncIterator[Event], closing: Callable[[], None], settings: Settings
    ) -> None:
        """`closing` is called at the end, even if nothing was sent."""
        super().__init__(
            events,
            sep="\n",
            ping=settings.keep_alive,
            send_timeout=settings.slow_reader,
            # Otherwise sse-starlette would end the stream as soon as uvicorn gets a signal.
            shutdown_grace_period=settings.timeout,
        )
        self._closing = closing

    async def __call__(self, *connection: Any) -> None:
        """Send the events; stop if the client reads too slowly, which closes its connection."""
        try:
            await super().__call__(*connection)
        except SendTimeoutError:
            log.warning("a reader was too slow")
        finally:
            self._closing()


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await and return `work`; cancel it and raise Refusal if the client disconnects."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise Refusal("the client has disconnected", status=CLIENT_GONE)
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
