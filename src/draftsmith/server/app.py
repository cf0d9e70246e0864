"""The endpoints of the server, its middleware, and its error handlers."""

# No `from __future__ import annotations`: FastAPI could not resolve local names such as `Caller`.
import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import draftsmith
from draftsmith.errors import DraftsmithError, LoadError, first_line
from draftsmith.server import messages, page, reference, responses
from draftsmith.server.api import Api, Arrival, log
from draftsmith.server.chats import Chat
from draftsmith.server.ignored import HEADER, Ignored
from draftsmith.server.refusals import Refusal, hint
from draftsmith.server.schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    CountRequest,
    DetokenizeRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from draftsmith.text.tokenizer import NO_TOKENIZER, OPENING, decode, encode, render_chat

F = TypeVar("F", bound=Callable[..., Any])


class BodyLimit:
    """Middleware that refuses a body as soon as it is too long or too slow; notes its `Arrival`."""

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self._app, self._most, self._seconds = app, most, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the bytes while the body is read. FastAPI's own limit returns no JSON error."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        left, state = self._most, scope.setdefault("state", {})
        end = time.perf_counter() + self._seconds

        async def counted() -> Message:
            nonlocal left
            waiting = None if "arrival" in state else end - time.perf_counter()
            try:
                async with asyncio.timeout(waiting):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"no whole body came in {self._seconds:g} s") from None
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, f"the body is longer than {self._most:,} bytes")
            if message["type"] == "http.request" and not message.get("more_body", False):
                state["arrival"] = Arrival(time.perf_counter(), self._most - left)
            return message

        return await self._app(scope, counted, send)


def application(api: Api) -> FastAPI:
    """Return the ASGI application. Its shutdown ends all answers and leaves the engine open."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        api.open()
        yield
        api.close()

    settings = api.settings
    app = FastAPI(
        title="draftsmith",
        version=draftsmith.__version__,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages load scripts from other servers
        redoc_url=None,
    )
    app.add_middleware(BodyLimit, most=settings.max_body, seconds=settings.timeout)
    if settings.cors:
        origins = list(settings.cors)
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER],
        )
    bearer = HTTPBearer(auto_error=False)

    def salt(
        given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)],
        x_api_key: Annotated[str | None, Header()] = None,  # header of Anthropic's clients
    ) -> str:
        return api.keys.salt(x_api_key if given is None else given.credentials)

    Caller = Annotated[str, Depends(salt)]  # noqa: N806
    guarded = [] if settings.public else [Depends(salt)]
    _tell_errors(app)

    def checked(body: Body, strict: bool = not settings.tolerant) -> Ignored:
        """Check the model and the fields of a request. `strict`: refuse unknown fields."""
        api.check_model(body.model)
        return Ignored(body, strict)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request, caller: Caller) -> Response:
        """Answer a chat, whole or as server-sent events."""
        ignored = checked(body).limited(body, settings.max_output)
        return ignored.named(await api.chat(body, caller, request, ignored))

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request, caller: Caller) -> Response:
        """Continue one or more texts or lists of token ids."""
        ignored = checked(body).limited(body, settings.max_output)
        return ignored.named(await api.complete(body, caller, request))

    # Agents send many fields that have no meaning in the next interfaces: none is refused there.

    @app.post("/v1/responses")
    async def respond(body: ResponsesRequest, request: Request, caller: Caller) -> Response:
        """Answer a conversation, given as a list of items. Nothing is stored."""
        ignored = checked(body, strict=False).limited(body, settings.max_output)
        return ignored.named(await responses.respond(api, body, caller, request, ignored))

    @app.post("/v1/messages")
    async def message(body: MessagesRequest, request: Request, caller: Caller) -> Response:
        """Answer a chat in Anthropic's format."""
        ignored = checked(body, strict=False).limited(body, settings.max_output)
        return ignored.named(await messages.respond(api, body, caller, request, ignored))

    # Not `async`, so that FastAPI runs it in another thread: long texts take a while.
    @app.post("/v1/messages/count_tokens", dependencies=[Depends(salt)])
    def count_tokens(body: CountRequest, response: Response) -> dict[str, int]:
        """Count the prompt tokens of a chat in Anthropic's format."""
        ignored = checked(body, strict=False)
        counted = messages.count(api, body, ignored)
        ignored.named(response)
        return counted

    def get(path: str, **more: Any) -> Callable[[F], F]:
        """Register a function for GET and HEAD."""

        def register(function: F) -> F:
            app.head(path, **more | {"include_in_schema": False})(function)
            return app.get(path, **more)(function)

        return register

    born = int(time.time())
    model = {"id": api.name, "object": "model", "created": born, "owned_by": "draftsmith",
             "max_model_len": api.engine.model.context_length}  # fmt: skip

    @get("/v1/models", dependencies=guarded)
    async def models() -> dict[str, Any]:
        """List the served model."""
        return {"object": "list", "data": [model]}

    @get("/v1/models/{name:path}", dependencies=guarded)
    async def one_model(name: str) -> dict[str, Any]:
        """Return the model of this name."""
        api.check_model(name)
        return model

    chats = bool(getattr(api.tokenizer, "chat_template", None))
    index = page.page(api.name, chats, bool(api.keys))

    @get("/", dependencies=guarded, include_in_schema=False)
    async def front() -> Response:
        return HTMLResponse(index, headers=page.HEADERS)

    @get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(reference.page(app.openapi(), api.name), headers=page.HEADERS)

    @get("/health", dependencies=guarded)
    async def health() -> dict[str, str]:
        """Report whether the server accepts requests."""
        api.worker.check(answers=0)
        return {"status": "ok"}

    @get("/metrics", dependencies=[Depends(salt)])
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(api.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/tokenize", dependencies=[Depends(salt)])
    def tokenize(body: TokenizeRequest, response: Response) -> dict[str, Any]:
        """Convert a prompt, or messages formatted by the chat template, to token ids."""
        ignored = checked(body)
        if body.messages is not None:
            opening = {name: getattr(body, name) for name in OPENING}
            if not any(value is not None for value in opening.values()):
                opening["add_generation_prompt"] = True
            asked = ChatRequest(messages=body.messages, **opening)
            chat = Chat.of(asked, api.tokenizer, settings.tool_format, ignored)
            ids = render_chat(api.tokenizer, chat.messages, chat.template)
        else:
            ids = encode(api.tokenizer, body.prompt or "", special=body.add_special_tokens)
        ignored.named(response)
        return {"tokens": ids, "count": len(ids), "max_model_len": api.engine.model.context_length}

    @app.post("/detokenize", dependencies=[Depends(salt)])
    def detokenize(body: DetokenizeRequest, response: Response) -> dict[str, Any]:
        """Convert token ids to text, special tokens included."""
        checked(body).named(response)
        size = api.engine.model.vocab_size
        if wrong := [i for i in body.tokens if not 0 <= i < size]:
            raise Refusal(f"token id {wrong[0]} is outside 0…{size - 1}", param="tokens")
        if api.tokenizer is None:
            raise LoadError(NO_TOKENIZER.format(what="tokens cannot be turned into text"))
        return {"prompt": decode(api.tokenizer, body.tokens, special=True)}

    return app


def _tell_errors(app: FastAPI) -> None:
    """Make the application return every error in OpenAI's or Anthropic's form."""

    async def refused(request: Request, error: Exception) -> Response:
        path = request.url.path[:200]
        match error:
            case RecursionError() | HTTPException(__cause__=RecursionError()):
                refusal = Refusal("the body is nested too deeply")
            case RequestValidationError():
                refusal = Refusal.of_validation(error.errors())
            case HTTPException(__cause__=ValueError() as cause):
                refusal = Refusal(f"the body is not JSON: {first_line(cause)}")
            case HTTPException():
                message = str(error.detail)
                if error.status_code == 404 and message == "Not Found":
                    paths = [getattr(route, "path", "") for route in app.routes]
                    message = f"there is no {path}{hint(path, paths)}"
                refusal = Refusal(message, status=error.status_code, headers=error.headers)
            case _:
                refusal = Refusal.of(error)
        if isinstance(error, DraftsmithError) and refusal is not error and refusal.status >= 500:
            log.error("failed", exc_info=error)  # uvicorn logs those that are not ours
        fields = {"path": path, "status": refusal.status, "code": refusal.code}
        log.info("refused", extra={"fields": fields})
        body = refusal.anthropic if "/v1/messages" in request.url.path else refusal.body
        return JSONResponse(body, refusal.status, refusal.headers)

    errors = DraftsmithError, RecursionError, RequestValidationError, HTTPException, Exception
    for kind in errors:
        app.add_exception_handler(kind, refused)
