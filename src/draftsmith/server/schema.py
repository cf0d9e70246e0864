"""Schemas of requests: fields of OpenAI, vLLM and Anthropic, and our own ones in `Sampling`.

Unknown fields are kept in `model_extra`; `ignored.py` refuses them or adds warnings. Fields that
have no meaning for one model on one machine are removed (`IGNORED`, unless a class has them) or not
reported (`WITHOUT_EFFECT`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from draftsmith.server.refusals import Refusal, hint
from draftsmith.text.tokenizer import OPENING

IGNORED = frozenset({
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "verbosity", "reasoning_effort", "modalities",
})  # fmt: skip
"""Fields of OpenAI that clients send and that have no effect here."""

WITHOUT_EFFECT = frozenset({
    "annotations", "cache_control", "caller", "citations", "display", "encrypted_content",
    "generate_summary", "id", "index", "logprobs", "max_output_length", "phase", "server_label",
    "signature", "status", "summary", "syntax", "verbosity",
})  # fmt: skip
"""Fields of parts of a request that clients send and that have no effect here."""

T = TypeVar("T")

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list in which only the first error is reported: a body may have half a million wrong items."""

_NULL = {"max_tokens"}
"""Fields in which null has a meaning: it replaces the default of 16."""

_SAME = {
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "stop", "stop_token_ids", "drafter", "budget",
}  # fmt: skip
"""Fields that are options of the engine with the same name."""


class Section(BaseModel):
    """A part of a request; unknown fields are ignored, with a warning."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def without_null(cls, given: Any) -> Any:
        """Remove null fields, which count as absent."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name in _NULL}

    @classmethod
    def of(cls, given: Any, where: str = "") -> Self:
        """Validate an object that is in a request at `where`; raise Refusal."""
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise Refusal.of_validation(error.errors(), where) from None

    def sent(self) -> dict[str, Any]:
        """Return the object as the client sent it."""
        return self.model_dump(exclude_unset=True, by_alias=True)

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the fields, as clients write them."""
        return [field.alias or name for name, field in cls.model_fields.items()]


class Body(Section):
    """Base of all requests; unknown fields are refused, or ignored with a warning."""

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def readable(cls, data: Any) -> Any:
        """Remove ignored fields; refuse a body with text that is not valid Unicode."""
        if not isinstance(data, dict):
            raise ValueError("the body must be a JSON object, sent as application/json")
        try:
            json.dumps(data, ensure_ascii=False, allow_nan=False, default=Section.sent).encode()
        except UnicodeEncodeError:
            raise ValueError("the body has half of a surrogate pair in it") from None
        except ValueError:
            raise ValueError("the body has a number that is not finite") from None
        return {
            name: value
            for name, value in data.items()
            if name not in IGNORED or name in cls.model_fields
        }


class Part(Section):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    """Text of an earlier answer of the type "refusal"."""


class Function(Section):
    """The name of a function, and the arguments of a call."""

    name: str
    arguments: str = "{}"


class ToolCall(Section):
    """A tool call of an earlier turn."""

    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class Message(Section):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Part] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def says_something(self) -> Message:
        """Refuse a message without content, except the assistant's, which may contain calls."""
        if self.content is None and self.role != "assistant":
            raise ValueError(
                f"a message of the role {self.role!r} needs content; send a text, or '' for none"
                f"{hint('content', self.model_extra or (), 'is it in {!r}?')}"
            )
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message for chat templates, with content as text and arguments as objects."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text_of(self.content)}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": arguments_of(call.function.arguments.strip() or "{}"),
                    },
                }
                for call in self.tool_calls
            ]
        more = {name: getattr(self, name) for name in ("name", "tool_call_id", "reasoning_content")}
        return message | {name: value for name, value in more.items() if value is not None}


def text_of(content: str | list[Part] | None) -> str:
    """Return the text of a message; raise Refusal for images, audio and files."""
    if isinstance(content, list):
        texts = [part.text if part.refusal is None else part.refusal for part in content]
        for part, text in zip(content, texts, strict=True):
            if text is None:
                message = f"this server reads text only, no {part.type!r:.100}"
                if part.type.endswith("text"):
                    near = hint("text", part.model_extra or (), "is it in {!r}?")
                    message = f"a part of the type {part.type!r:.100} needs text{near}"
                raise Refusal(message, param="content")
        return "\n".join(map(str, texts))
    return content or ""


def arguments_of(arguments: str) -> Any:
    """Parse JSON text; return the text itself if it is not valid JSON, or no response may have it.

    Python also reads NaN, and escapes of half a surrogate pair.
    """
    try:
        value = json.loads(arguments)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return value


FUNCTION = ("name", "description", "parameters", "strict")
"""Names of the fields of a function."""


class Tool(Section):
    """A function that the model may call."""

    type: Literal["function"]
    function: dict[str, Any]

    @field_validator("function")
    @classmethod
    def described(cls, function: dict[str, Any]) -> dict[str, Any]:
        """Check the fields that are read here; the chat template gets all of them."""
        if not isinstance(function.get("name"), str):
            raise ValueError("a function needs a name")
        if not isinstance(function.get("description"), str | None):
            raise ValueError("the description of a function must be a text")
        if not isinstance(function.get("parameters"), dict | None):
            raise ValueError("the parameters of a function must be a JSON schema, an object")
        return function

    @property
    def name(self) -> str:
        """Name of the function."""
        return str(self.function["name"])

    def plain(self) -> dict[str, Any]:
        """Return the tool for chat templates."""
        return {"type": "function", "function": self.function}


class NamedFunction(Section):
    name: str


class ToolChoice(Section):
    """The function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class StreamOptions(Section):
    include_usage: bool = False


class JsonSchema(Section):
    """A JSON schema, as the chat interface wraps it."""

    schema_: Any = Field(default=None, alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(JsonSchema):
    """What the answer must look like; /v1/responses has the fields of `json_schema` here."""

    type: str = ""
    json_schema: JsonSchema | None = None
    pattern: str | None = None


class Prediction(Section):
    """A text that the answer is expected to resemble."""

    type: Literal["content"]
    content: str | Items[Part]


class Sampling(Body):
    """Common fields of completions and chats."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    best_of: int | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | Annotated[Items[str], Field(max_length=16)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    # fields of vLLM
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop_token_ids: Items[int] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    # our own fields
    drafter: str | None = None
    budget: int | Literal["auto", "drafter"] | None = None
    return_sources: bool = False
    return_drafts: bool = False
    return_stats: bool = False

    @property
    def longest(self) -> str:
        """Name of the field that limits the tokens of an answer."""
        return "max_tokens"

    def options(self, limit: int, end_ids: Iterable[int]) -> dict[str, Any]:
        """Return the engine's options; `limit`: maximum length if the request sets none.

        `end_ids` are forbidden with `ignore_eos`.
        """
        said = getattr(self, self.longest)
        wanted = limit if said is None else said
        try:
            bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        except ValueError:
            raise Refusal("logit_bias must name token ids", param="logit_bias") from None
        if self.ignore_eos:
            bias |= dict.fromkeys(end_ids, -math.inf)
        return {name: getattr(self, name) for name in _SAME} | {
            "max_new_tokens": wanted,
            "min_new_tokens": self.min_tokens,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "logit_bias": bias or None,
            "prediction": self.prediction and text_of(self.prediction.content),
        }


class ChatRequest(Sampling):
    """POST /v1/chat/completions"""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def longest(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def top(self) -> int | None:
        """Number of alternatives for each token's log-probability; None: none are given."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Sampling):
    """POST /v1/completions"""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    suffix: str | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = 16

    @property
    def top(self) -> int | None:
        """Number of alternatives for each token's log-probability; None: none are given."""
        return self.logprobs


class CustomFormat(Section):
    type: str = "text"
    definition: str | None = None


class CustomTool(Section):
    """A tool of /v1/responses with a text as its only argument."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = None


class TextSettings(Section):
    format: ResponseFormat | None = None


class ReasoningSettings(Section):
    effort: str | None = None


class ResponsesRequest(Body):
    """POST /v1/responses"""

    longest: ClassVar = "max_output_tokens"
    input: str | Annotated[Items[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    text: TextSettings = Field(default_factory=TextSettings)
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningSettings = Field(default_factory=ReasoningSettings)
    thinking_token_budget: int | None = None
    cache_salt: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None


class Block(Section):
    """A part of a message in Anthropic's format, of any type."""

    type: str
    text: str | None = None
    thinking: str = ""
    # calls
    id: str = ""
    name: str | None = None
    input: dict[str, Any] = Field(default_factory=dict)
    # their results
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool = False


class Turn(Section):
    """One message in Anthropic's format."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[dict[str, Any]]


class SchemaTool(Section):
    """A function in Anthropic's format."""

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class Choice(Section):
    """Anthropic's form of `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Section):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None


class OutputSettings(Section):
    format: ResponseFormat | None = None
    effort: str | None = None


class CountRequest(Body):
    """POST /v1/messages/count_tokens: Anthropic's fields."""

    messages: Annotated[Items[Turn], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    system: str | Items[Part] | None = None
    stop_sequences: Items[str] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Choice = Field(default_factory=lambda: Choice(type="auto"))
    thinking: Thinking | None = None
    output_config: OutputSettings = Field(default_factory=OutputSettings)


class MessagesRequest(CountRequest):
    """POST /v1/messages"""

    longest: ClassVar = "max_tokens"
    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool = False


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or messages for the chat template."""

    prompt: str | None = None
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def one(self) -> TokenizeRequest:
        """Require either a prompt or messages."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give a prompt or messages")
        if self.messages is None and self.model_fields_set & {*OPENING}:
            raise ValueError(f"{OPENING[0]} and {OPENING[1]} need messages")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize"""

    tokens: Items[int]
