"""LangChain's ChatOpenAI, by chats and by responses."""

import json
import sys
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Animal(BaseModel):
    kind: Literal["fox", "dog"]
    tame: bool


address, key, model, text, tokens, tool = sys.argv[1:]
told = {}
for way in ("chat", "responses"):
    chat = ChatOpenAI(
        base_url=address, api_key=key, model=model, max_tokens=int(tokens), stream_usage=True,
        use_responses_api=way == "responses",
    )  # fmt: skip
    whole = chat.invoke(text)
    told[f"text: {way}"] = whole.text
    told[f"used: {way}"] = whole.usage_metadata["output_tokens"]
    chunks = list(chat.stream(text))
    told[f"text: {way} stream"] = "".join(chunk.text for chunk in chunks)
    used = [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata]
    told[f"used: {way} stream"] = sum(used)
    told[f"animal: {way}"] = chat.with_structured_output(Animal).invoke(text).model_dump()
    tools = chat.bind_tools([json.loads(tool)], tool_choice="required")
    (call,) = tools.invoke(text).tool_calls
    told[f"call: {way}"] = [call["name"], call["args"]]
    first, *more = tools.stream(text)
    for chunk in more:
        first += chunk
    (call,) = first.tool_calls
    told[f"call: {way} stream"] = [call["name"], call["args"]]
print(json.dumps(told))
