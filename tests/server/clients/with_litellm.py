"""LiteLLM."""

import json
import sys
from typing import Literal

import litellm
from pydantic import BaseModel


class Animal(BaseModel):
    kind: Literal["fox", "dog"]
    tame: bool


address, key, model, text, tokens, tool = sys.argv[1:]
where = {"model": f"openai/{model}", "api_base": address, "api_key": key}
chat = where | {"messages": [{"role": "user", "content": text}], "max_tokens": int(tokens)}
told = {}

whole = litellm.completion(**chat)
told["text: chat"] = whole.choices[0].message.content
told["used: chat"] = whole.usage.completion_tokens
chunks = litellm.completion(**chat, stream=True)
told["text: stream"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
parsed = litellm.completion(**chat, response_format=Animal).choices[0].message.content
told["animal: chat"] = json.loads(parsed)
tools = {"tools": [{"type": "function", "function": json.loads(tool)}], "tool_choice": "required"}
(call,) = litellm.completion(**chat, **tools).choices[0].message.tool_calls
told["call: chat"] = [call.function.name, json.loads(call.function.arguments)]
chunks = list(litellm.completion(**chat, **tools, stream=True))
(call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
told["call: stream"] = [call.function.name, json.loads(call.function.arguments)]

response = where | {"input": text, "max_output_tokens": int(tokens)}
told["text: responses"] = litellm.responses(**response).output[0].content[0].text
told["text: responses stream"] = ""
for event in litellm.responses(**response, stream=True):
    if event.type == "response.output_text.delta":
        told["text: responses stream"] += event.delta
print(json.dumps(told))
