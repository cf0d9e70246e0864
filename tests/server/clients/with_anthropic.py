"""Anthropic's library."""

import json
import sys

import anthropic

address, key, model, text, tokens, tool = sys.argv[1:]
client = anthropic.Anthropic(base_url=address.removesuffix("/v1"), api_key=key, max_retries=0)
messages = [{"role": "user", "content": text}]
ask = {"model": model, "max_tokens": int(tokens), "messages": messages}
told = {}

whole = client.messages.create(**ask)
(block,) = whole.content
told["text: message"] = block.text
told["used: message"] = whole.usage.output_tokens
assert (whole.stop_reason, whole.role) == ("end_turn", "assistant")
told["text: stream"] = ""
for event in client.messages.create(**ask, stream=True):
    if event.type == "content_block_delta":
        told["text: stream"] += event.delta.text
with client.messages.stream(**ask) as helper:
    told["text: stream helper"] = "".join(helper.text_stream)
    told["used: stream helper"] = helper.get_final_message().usage.output_tokens
counted = client.messages.count_tokens(model=model, messages=messages).input_tokens
usage = whole.usage
assert counted == usage.input_tokens + usage.cache_read_input_tokens

function = json.loads(tool)
described = {"name": function["name"], "description": function["description"],
             "input_schema": function["parameters"]}  # fmt: skip
tools = {"tools": [described], "tool_choice": {"type": "any"}}
called = client.messages.create(**ask, **tools)
(call,) = called.content
told["call: message"] = [call.name, call.input]
assert called.stop_reason == "tool_use"
with client.messages.stream(**ask, **tools) as helper:
    (call,) = helper.get_final_message().content
told["call: stream helper"] = [call.name, call.input]
result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
made = call.model_dump(include={"type", "id", "name", "input"})
answered = {"role": "user", "content": [result]}
history = [*messages, {"role": "assistant", "content": [made]}, answered]
again = client.messages.create(**ask | {"messages": history})
told["after the call: message"] = "".join(block.text for block in again.content)

told["anthropic errors"] = []
for wrong in ({"model": "other"}, {"extra_body": {"temperature": 9}}):
    try:
        client.messages.create(**ask | wrong)
    except anthropic.APIStatusError as error:
        told["anthropic errors"].append([type(error).__name__, error.body["error"]["type"]])
try:
    client.with_options(api_key="wrong").messages.create(**ask)
except anthropic.APIStatusError as error:
    told["anthropic errors"].append([type(error).__name__, error.body["error"]["type"]])
print(json.dumps(told))
