"""Chat: the messages, template variables, grammar, reasoning and tools of a chat request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from draftsmith.server.calls.as_channels import FINAL
from draftsmith.server.calls.declared import declared, declares
from draftsmith.server.calls.formats import FORMATS, family_of, shows_tools
from draftsmith.server.ignored import Ignored
from draftsmith.server.reader import Reader
from draftsmith.server.refusals import Refusal
from draftsmith.server.schema import ChatRequest, Message, ResponseFormat
from draftsmith.server.tools import USUAL, calling, described, forced_call, with_calls
from draftsmith.text.grammar import Grammar
from draftsmith.text.thoughts import Thoughts
from draftsmith.text.tokenizer import OPENING, continues, decode, reserved, sample
from draftsmith.values import shown


@dataclass(slots=True)
class Chat:
    """A chat as the engine's input, with the format of its answer."""

    messages: list[dict[str, Any]]
    template: dict[str, Any]
    """Variables of the chat template."""
    grammar: Grammar | None = None
    thoughts: Thoughts | None = None
    """Tags of the reasoning; None: the answer has no reasoning."""
    family: str | None = None
    """Format of the tool calls, a key of `FORMATS`; None: calls are not parsed."""
    tools: Mapping[str, Any] = field(default_factory=dict)
    """Names of the functions → schemas of their parameters."""
    forced: bool = False
    """Whether the answer is one call in JSON."""
    goes_on: bool = False
    """Whether the last message is continued."""
    own: bool = False
    """Whether transformers parses the answer, because the tokenizer declares its own format."""

    @classmethod
    def of(cls, body: ChatRequest, tokenizer: Any, family: str | None, ignored: Ignored) -> Chat:
        """Create a chat from a request. `family`: the operator's choice of the format.

        Raise Refusal or OptionError for invalid combinations.
        """
        template = variables(body, tokenizer, ignored)
        messages = accepted([one.plain() for one in body.messages], tokenizer, template, ignored)
        if body.messages[-1].role == "assistant" and not template.keys() & {*OPENING}:
            raise Refusal(
                f"the last message is the assistant's: send {OPENING[0]}=true to continue it, or "
                f"{OPENING[1]}=true to let the model begin another one",
                param="messages",
            )
        chat = cls(messages, template, grammar_of(body.response_format))
        chat.goes_on = continues(messages, template)  # raises OptionError for contradictions
        chat._think(body, tokenizer)
        chat._show_tools(body, tokenizer, family, ignored)
        chat.messages = with_calls(tokenizer, chat.messages, chat.template)
        return chat

    def reader(self, tokenizer: Any, markers: Mapping[int, str], prompt: Sequence[int]) -> Reader:
        """Return the reader for an answer; `prompt` may contain the beginning of the answer."""
        if self.own:
            text = decode(tokenizer, prompt, special=True)
            tools = self.template.get("tools", [])
            own = partial(declared, tokenizer=tokenizer, prompt=text, tools=tools)
            return Reader(None, self.tools, markers, forced=self.forced, own=own)
        thoughts, family, written = self.thoughts, self.family, ""
        if family is not None and FORMATS[family].thinks:
            written = FINAL if self.goes_on else ""
        elif thoughts is not None:
            opened = thoughts.opened(tokenizer, prompt)
            written = thoughts.begin if opened else ""
            thoughts = None if opened is False else thoughts
        return Reader(family, self.tools, markers, thoughts, written, forced=self.forced)

    def _think(self, body: ChatRequest, tokenizer: Any) -> None:
        """Set the tags and the limit of the reasoning."""
        found, limit = Thoughts.of(tokenizer), body.thinking_token_budget
        if found is None:
            if limit is not None:
                raise Refusal(
                    "thinking_token_budget needs a model with thoughts in its chat template; "
                    "leave it out",
                    param="thinking_token_budget",
                )
            return
        made = replace(found, limit=limit).after(
            self.messages[-1]["content"] if self.goes_on else ""
        )
        if made.begun is None or found.begin:  # harmony's answers are after any reasoning
            self.thoughts = made

    def _show_tools(
        self, body: ChatRequest, tokenizer: Any, family: str | None, ignored: Ignored
    ) -> None:
        """Add the tools to the template or the prompt, and a grammar if a call is forced."""
        tools = [] if body.tool_choice == "none" else body.tools or []
        if not tools and body.tool_choice not in (None, "none", "auto"):
            raise Refusal(
                "tool_choice cannot be forced without functions to call", param="tool_choice"
            )
        given, taught = [tool.plain() for tool in tools], family_of(tokenizer)
        family = family or taught
        self.own = family is None and declares(tokenizer)
        if not given:
            pass
        elif shows_tools(tokenizer) and (family or self.own):
            if not sample(tokenizer, _HELLO, self.template | {"tools": given}):
                # Some templates read fields that may be missing.
                empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
                given = [tool | {"function": empty | tool["function"]} for tool in given]
            self.template["tools"] = given
        else:
            ignored.add(
                "tools were described in a prompt: the chat template has no format for them"
            )
            self.messages = described(tokenizer, self.messages, given, family or USUAL)
        if taught is not None and FORMATS[taught].thinks:
            self.family = taught
        if not tools:
            return
        self.family = None if self.own else family or USUAL
        self.tools = {tool.name: tool.function.get("parameters") for tool in tools}
        forced = forced_call(tools, body)
        if forced is not None:
            self.grammar, self.forced = forced, True
        elif self.grammar is not None:
            raise Refusal(
                "a response_format would forbid every call: leave it out, or use a tool_choice "
                "that forbids calls or forces one",
                param="response_format",
            )


def translated(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    function_of: Callable[[Mapping[str, Any], str, Ignored], dict[str, Any] | None],
    fields: dict[str, Any],
    ignored: Ignored,
) -> ChatRequest:
    """Return a chat that is translated from another interface; raise Refusal.

    `function_of`: (tool, its place, warnings) → function, or None for a tool that is ignored.
    """
    asked = fields | {"messages": messages}
    functions = list[dict[str, Any]]()
    for number, tool in enumerate(tools or ()):
        function = function_of(tool, f"tools[{number}]", ignored)
        if function is None:
            ignored.add(f"tools[{number}] of the type {tool.get('type')!r:.100} was ignored")
        else:
            functions.append({"type": "function", "function": function})
    if functions:
        asked["tools"] = functions
    return ChatRequest.of(asked)


_HELLO = [{"role": "user", "content": "hello"}]
"""A chat that shows whether a template takes some variables."""


def variables(body: ChatRequest, tokenizer: Any, ignored: Ignored) -> dict[str, Any]:
    """Return the variables of the chat template.

    Raise Refusal for names that are no variables, for tools and documents, and for contradictions.
    """
    given = dict(body.chat_template_kwargs or {})
    ours = {"tools", "documents", "chat_template", *reserved(tokenizer)}
    if wrong := sorted(ours & given.keys()):
        raise Refusal(
            f"chat_template_kwargs must not set {wrong[0]!r}", param="chat_template_kwargs"
        )
    for name in OPENING:
        value = getattr(body, name)
        if value is not None and given.setdefault(name, value) is not value:
            raise Refusal(
                f"{name} is {value}, but chat_template_kwargs has {given[name]!r:.50}; "
                "send one of them", param=name
            )  # fmt: skip
    known, effort = str(getattr(tokenizer, "chat_template", None) or ""), body.reasoning_effort
    if effort is not None and "reasoning_effort" in known and "reasoning_effort" not in given:
        if sample(tokenizer, _HELLO, given | {"reasoning_effort": effort}):
            given["reasoning_effort"] = effort
        else:
            ignored.add(f"reasoning_effort={effort!r:.50} was ignored: the template refuses it")
    if effort is not None:
        for name in ("enable_thinking", "thinking"):
            if name in known:
                given.setdefault(name, effort != "none")
    return given


def grammar_of(given: ResponseFormat | None) -> Grammar | None:
    """Return the grammar for a `response_format`; raise Refusal for an invalid one."""
    kind = "text" if given is None else given.type
    if given is None or kind == "text":
        return None
    wrapped = given if given.json_schema is None else given.json_schema
    if kind == "json_object" and wrapped.schema_ is None:
        return Grammar.json_object()
    if kind in ("json_schema", "json_object") and wrapped.schema_ is not None:
        return Grammar.json_schema(wrapped.schema_)
    if kind == "regex" and given.pattern is not None:
        return Grammar.regex(given.pattern)
    raise Refusal(
        "response_format must be one of {'type': 'text'}, {'type': 'json_object'}, {'type': "
        "'json_schema', 'json_schema': {'schema': …}} and {'type': 'regex', 'pattern': …}, got "
        f"{shown(given.sent())}",
        param="response_format",
    )


_LATER = ("user", "assistant", "system", "user", "system", "assistant", "user")
"""Roles of a chat with system messages after others."""


def accepted(
    messages: Sequence[dict[str, Any]],
    tokenizer: Any,
    template: Mapping[str, Any],
    ignored: Ignored,
) -> list[dict[str, Any]]:
    """Return the messages with their roles in an order in which the chat template shows them all.

    Some templates show a system message at the beginning only, or none; they drop or refuse others.
    Some refuse two messages of the user in a row, or one after a result. There, a system message
    becomes the user's, and such messages are joined. `template`: its variables.
    """

    def shows(chat: Sequence[dict[str, Any]]) -> bool:
        text = sample(tokenizer, with_calls(tokenizer, chat, template), template)
        texts = [one["content"].strip() for one in chat if one["role"] in ("system", "user")]
        return bool(text) and all(one in text for one in texts)

    @cache
    def takes(*roles: str) -> bool:
        return shows([{"role": role, "content": f"hello {n}."} for n, role in enumerate(roles)])

    if shows(messages) or not takes("user"):
        return [*messages]
    made = list[dict[str, Any]]()
    for message in messages:
        last, role = made[-1]["role"] if made else None, message["role"]
        if role == "system" != last and not takes(*(_LATER if made else ("system", "user"))):
            role = "user"
            ignored.add(
                "the chat template shows no system message "
                f"{'after others' if made else 'at all'}; it is shown as the user's"
            )
        if role == "user" and last == "tool":
            joins = not shows([*calling(1), {"role": "user", "content": "hello 1."}])
        else:
            both = (role, role, "user") if role == "system" else (role, role)
            joins = role == last and role in ("system", "user") and not takes(*both)
        if joins:
            texts = filter(None, (made[-1]["content"], message["content"]))
            made[-1] = {**made[-1], "content": "\n\n".join(texts)}
        else:
            made.append({**message, "role": role})
    return made
