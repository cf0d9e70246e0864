"""OpenAI's library.

Every script here is told where to ask and what, and prints what it got as JSON: what it should be,
a colon, and how it was asked for.
"""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel


class Animal(BaseModel):
    kind: Literal["fox", "dog"]
    tame: bool


address, key, model, text, tokens, tool = sys.argv[1:]
client = openai.OpenAI(base_url=address, api_key=key)
messages = [{"role": "user", "content": text}]
chat = {"model": model, "messages": messages, "max_tokens": int(tokens)}
told = {"models": [one.id for one in client.models.list()]}

whole = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2)
told["text: chat"] = whole.choices[0].message.content
told["used: chat"] = whole.usage.completion_tokens
told["used: logprobs"] = len(whole.choices[0].logprobs.content)
told["text: stream"], options = "", {"stream": True, "stream_options": {"include_usage": True}}
for chunk in client.chat.completions.create(**chat, **options):
    told["text: stream"] += "".join(choice.delta.content or "" for choice in chunk.choices)
told["used: stream"] = chunk.usage.completion_tokens
with client.chat.completions.stream(**chat) as helper:
    told["text: stream helper"] = helper.get_final_completion().choices[0].message.content
foreseen = {"prediction": {"type": "content", "content": told["text: chat"]}}
predicted = client.chat.completions.create(**chat, **foreseen)
told["text: predicted"] = predicted.choices[0].message.content
details = predicted.usage.completion_tokens_details
rejected = details.rejected_prediction_tokens
assert 0 <= details.accepted_prediction_tokens <= predicted.usage.completion_tokens - rejected
told["used: predicted"] = predicted.usage.completion_tokens - rejected

parsed = client.chat.completions.parse(**chat, response_format=Animal)
told["animal: chat"] = parsed.choices[0].message.parsed.model_dump()
with client.chat.completions.stream(**chat, response_format=Animal) as helper:
    parsed = helper.get_final_completion()
told["animal: stream"] = parsed.choices[0].message.parsed.model_dump()

function = json.loads(tool)
tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
(call,) = client.chat.completions.create(**chat, **tools).choices[0].message.tool_calls
told["call: chat"] = [call.function.name, json.loads(call.function.arguments)]
with client.chat.completions.stream(**chat, **tools) as helper:
    (call,) = helper.get_final_completion().choices[0].message.tool_calls
told["call: stream"] = [call.function.name, json.loads(call.function.arguments)]
made = call.model_dump(include={"id": True, "type": True, "function": {"name", "arguments"}})
answered = {"role": "tool", "tool_call_id": call.id, "content": "5"}
messages = [*messages, {"role": "assistant", "tool_calls": [made]}, answered]
again = client.chat.completions.create(**chat | {"messages": messages})
told["after the call: chat"] = again.choices[0].message.content

response = {"model": model, "input": text, "max_output_tokens": int(tokens)}
whole = client.responses.create(**response)
told["text: responses"] = whole.output_text
told["used: responses"] = whole.usage.output_tokens
told["text: responses stream"] = ""
for event in client.responses.create(**response, stream=True):
    if event.type == "response.output_text.delta":
        told["text: responses stream"] += event.delta
assert event.type == "response.completed"
with client.responses.stream(**response) as helper:
    told["text: responses stream helper"] = helper.get_final_response().output_text
parsed = client.responses.parse(**response, text_format=Animal)
told["animal: responses"] = parsed.output_parsed.model_dump()
tools = {"tools": [{"type": "function", "strict": True} | function], "tool_choice": "required"}
(call,) = client.responses.create(**response, **tools).output
told["call: responses"] = [call.name, json.loads(call.arguments)]
with client.responses.stream(**response, **tools) as helper:
    (call,) = helper.get_final_response().output
told["call: responses stream"] = [call.name, json.loads(call.arguments)]
output = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
made = call.model_dump(include={"type", "call_id", "name", "arguments"})
history = [{"role": "user", "content": text}, made, output]
told["after the call: responses"] = client.responses.create(
    **response | {"input": history}
).output_text

continued = client.completions.create(model=model, prompt=text, max_tokens=int(tokens), logprobs=1)
told["continued"] = continued.choices[0].text

told["errors"] = []
for wrong in ({"model": "other"}, {"temperature": 9}):
    try:
        client.chat.completions.create(**chat | wrong)
    except openai.APIStatusError as error:
        told["errors"].append([type(error).__name__, error.code, error.param])
try:
    client.with_options(api_key="wrong").models.list()
except openai.APIStatusError as error:
    told["errors"].append([type(error).__name__, error.code, error.param])
print(json.dumps(told))
