"""Formats of published benchmarks and API logs: one JSON object → records.

A format is recognized by its keys. If a benchmark only has a question, the instruction is the one
of its recorded answers, or ours if none is public in a usable form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from draftsmith.lab.bench.records import TOOLS, Record, Wrong, conversation, own_line
from draftsmith.storage import parse_json

Item = Mapping[str, Any]

SELF_CORRECTION = (
    "Solve the problem below with a Python program in a ```python code block. The program takes no "
    "input and prints the answer. Give only the code.\n\n{question}",
    "Go over your code again and look for mistakes that would make the answer wrong. If there are "
    "none, leave it as it is.",
    "Give the program that you now consider correct; keep the first version if that one is.",
)
"""CopySpec's three turns on GSM8K (section 6.2): write, review, give the final program."""

CODE = (
    "Please provide a self-contained Python script that solves the following problem in a markdown "
    "code block:\n```\n{problem}\n```\n"
)
"""EvalPlus's instruction, which the recorded HumanEval answers used."""

QUOTE = (
    "Answer the question in one or two sentences, in the words of the sources.\n\n{sources}\n\n"
    "Question: {question}"
)


def parse(item: Any, suite: str, number: int) -> list[Record]:
    """Return one object's records; `suite` and `number` replace a missing name. Raises Wrong."""
    if not isinstance(item, dict):
        raise Wrong(f"expected a JSON object, found {type(item).__name__}")
    for keys, reader in _FORMATS:
        if keys <= item.keys():
            try:
                return reader(item, suite, number)
            except (TypeError, ValueError, AttributeError, LookupError) as error:
                raise Wrong(f"its values do not fit its keys ({error})") from error
    found = ", ".join(map(repr, list(item)[:6])) or "none"
    raise Wrong(f"neither 'messages' nor 'prompt' nor a known benchmark's keys; found {found}")


def _questions(item: Item, suite: str, number: int) -> list[Record]:  # noqa: ARG001
    turns = item["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise Wrong("'turns' is not a list of texts")
    identity = f"{suite}/{item['question_id']}"
    return conversation(turns, id=identity, suite=suite, category=str(item["category"]))


def _humaneval(item: Item, suite: str, number: int) -> list[Record]:  # noqa: ARG001
    identity = str(item["task_id"]).lower()
    question = CODE.format(problem=item["prompt"].strip())
    return conversation([question], id=identity, suite=suite, category="code")


def _mbpp(item: Item, suite: str, number: int) -> list[Record]:  # noqa: ARG001
    problem = f'"""\n{item["prompt"]}\n{item["test"][0]}\n"""'
    question = CODE.format(problem=problem)
    return conversation([question], id=f"{suite}/{item['task_id']}", suite=suite, category="code")


def _gsm8k(item: Item, suite: str, number: int) -> list[Record]:
    first, *rest = SELF_CORRECTION
    turns = [first.format(question=item["question"]), *rest]
    right = str(item["answer"])
    identity = f"{suite}/{number}"
    return conversation(turns, id=identity, suite=suite, category="math", reference=right)


def _quotesum(item: Item, suite: str, number: int) -> list[Record]:  # noqa: ARG001
    titled = [(item.get(f"title{i}"), item.get(f"source{i}")) for i in range(1, 9)]
    sources = "\n\n".join(
        f"[{i}] {title}\n{source}" for i, (title, source) in enumerate(titled, 1) if source
    )
    question = QUOTE.format(sources=sources, question=item["question"])
    named = {"id": f"{suite}/{item['unique_id']}", "suite": suite, "category": "attribution"}
    return conversation([question], **named, reference=str(item["summary"]))


def _api_log(item: Item, suite: str, number: int) -> list[Record]:
    """A call of OpenAI's chat or text completions: one record per choice.

    `request` and `response` are objects or their JSON texts, possibly inside `body`. The response
    of a stream may be the list of its chunks.
    """
    request, response = _body(item["request"], "request"), _body(item["response"], "response")
    answers = _answers(response)
    prompt = request.get("prompt")
    # A list of numbers is one prompt; any other list contains prompts.
    several = isinstance(prompt, list) and not all(type(part) is int for part in prompt)
    prompts = prompt if several else [prompt]
    if len(answers) % max(1, len(prompts)):
        raise Wrong(f"there are {len(answers)} choices for {len(prompts)} prompts")
    limits = ("max_completion_tokens", "max_tokens")
    known = {
        "category": item.get("category"),
        "messages": request.get("messages"),
        "tools": request.get("tools"),
        "max_new_tokens": next((request[name] for name in limits if request.get(name)), None),
    }
    name = str(item.get("id") or item.get("custom_id") or f"{suite}/{number}")
    records = []
    for index, answer in enumerate(answers):
        asked = prompts[index * len(prompts) // len(answers)]
        if request.get("echo") and isinstance(asked, str):
            answer = answer.removeprefix(asked)
        kind = "prompt_ids" if isinstance(asked, list) else "prompt"
        identity = name if len(answers) == 1 else f"{name}/{index}"
        line = known | {kind: asked, "output": answer, "id": identity}
        records += own_line(
            {key: value for key, value in line.items() if value is not None}, suite, number
        )
    return records


def _body(value: Any, name: str) -> Any:
    """Return a request or a response from any of the forms in which logs keep it."""
    value = parse_json(value) if isinstance(value, str) else value
    if isinstance(value, dict) and isinstance(value.get("body"), dict | str | list):
        return _body(value["body"], name)
    if not isinstance(value, dict) and not (name == "response" and isinstance(value, list)):
        raise Wrong(f"{name!r} is not an object")
    return value


def _answers(response: Any) -> list[str]:
    """Return the texts of a response's choices, by their index."""
    texts: dict[int, str] = {}
    for part in response if isinstance(response, list) else [response]:
        if not isinstance(part.get("choices"), list):
            raise Wrong("the response has no 'choices'")
        for place, choice in enumerate(part["choices"]):
            said = choice.get("message") or choice.get("delta") or choice
            if said.get("tool_calls") or said.get("function_call"):
                raise Wrong(TOOLS)
            if said.get("reasoning_content") or said.get("reasoning"):
                raise Wrong("it has thoughts, and a record cannot have them")
            text = said.get("text") if said is choice else said.get("content")
            index = choice.get("index", place)
            if isinstance(text, str):
                texts[index] = texts.get(index, "") + text
            elif not isinstance(response, list):
                raise Wrong("a choice of the response has no text")
    if not texts:
        raise Wrong("the response has no choices with text")
    return [texts[index] for index in sorted(texts)]


_OWN = [{"messages"}, *({"prompt", known} for known in ("output", "completion", "output_ids"))]
"""Keys of our own format, which no published benchmark uses."""

_FORMATS: list[tuple[set[str], Callable[[Item, str, int], list[Record]]]] = [
    *((keys, own_line) for keys in _OWN),
    ({"request", "response"}, _api_log),
    ({"question_id", "category", "turns"}, _questions),
    ({"task_id", "prompt", "entry_point"}, _humaneval),
    ({"task_id", "prompt", "test", "code"}, _mbpp),
    ({"unique_id", "question", "summary", "source1"}, _quotesum),
    ({"question", "answer"}, _gsm8k),
    ({"prompt"}, own_line),
    ({"prompt_ids"}, own_line),
]
