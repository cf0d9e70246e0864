"""The programs that people have, each in an environment of its own, against the command."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import Served, api_of, listening, loaded, saying
from tests.environments import environment

import tiny
from draftsmith import builtin
from draftsmith.engine.engine import Engine
from draftsmith.model.load import load
from draftsmith.text.grammar import Grammar

pytestmark = pytest.mark.external

NAME, KEY, TOKENS = "editor", "secret", 60
TEXT = (
    "a.py: rename total to amount\n"
    "<|file|>def add(a, b):\n    total = a + b\n    return total\n"
)  # fmt: skip
ANIMAL = {
    "type": "object",
    "properties": {"kind": {"enum": ["fox", "dog"]}, "tame": {"type": "boolean"}},
    "required": ["kind", "tame"],
    "additionalProperties": False,
}
WORD = {
    "type": "object",
    "properties": {"word": {"enum": ["red", "blue"]}},
    "required": ["word"],
    "additionalProperties": False,
}
TOOL = {"name": "look_up", "description": "Looks a word up.", "parameters": WORD}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with a template that knows tools and shows earlier calls."""
    made = tmp_path_factory.mktemp("model") / NAME
    shutil.copytree(builtin.path(), made)
    settings = json.loads((made / "tokenizer_config.json").read_text(encoding="utf-8"))
    shown = "{%- for t in tools or [] -%}<tool_call>{{- t.function.name -}}{%- endfor -%}"
    shown += (
        "{%- for m in messages -%}{%- for c in m.tool_calls or [] -%}"
        "{{- c.function.arguments | tojson -}}{%- endfor -%}{%- endfor -%}"
    )
    settings["chat_template"] = shown + settings["chat_template"]
    (made / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with Served("-m", str(folder), "--name", NAME, DRAFTSMITH_API_KEYS=KEY) as made:
        yield made
        assert made.end(signal.SIGINT) == 0


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    """What the engine says, by what clients call it."""
    engine = Engine.from_pretrained(folder, dtype="float32", drafter="none")

    def answer(prompt: Any, **options: Any) -> Any:
        return engine.generate(prompt, max_new_tokens=TOKENS, **options)

    ask = [{"role": "user", "content": TEXT}]
    text = answer(ask)
    assert text.finish_reason == "stop"
    call = {
        "type": "object",
        "properties": {"name": {"const": TOOL["name"]}, "arguments": WORD},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    tools = {"tools": [{"type": "function", "function": TOOL}]}
    called = answer(ask, grammar=Grammar.json_schema(call), chat_template_kwargs=tools).text
    function = {"name": TOOL["name"], "arguments": json.loads(called)["arguments"]}
    calls = [{"id": "1", "type": "function", "function": function}]
    history = [*ask, {"role": "assistant", "content": "", "tool_calls": calls},
               {"role": "tool", "content": "5", "tool_call_id": "1"}]  # fmt: skip
    return {
        "models": [NAME],
        "text": text.text,
        "used": len(text.tokens),
        "animal": json.loads(answer(ask, grammar=Grammar.json_schema(ANIMAL)).text),
        "call": [TOOL["name"], json.loads(called)["arguments"]],
        "after the call": answer(history).text,
        "continued": answer(TEXT).text,
        "errors": [
            ["NotFoundError", "model_not_found", "model"],
            ["BadRequestError", None, "temperature"],
            ["AuthenticationError", "invalid_api_key", None],
        ],
        "anthropic errors": [
            ["NotFoundError", "not_found_error"],
            ["BadRequestError", "invalid_request_error"],
            ["AuthenticationError", "authentication_error"],
        ],
    }


def run(home: Path, *command: str | Path, **options: Any) -> str:
    """What a program printed that knows nothing of this process's packages."""
    known = {
        "HOME": str(home),
        "LLM_USER_PATH": str(home),
        "LITELLM_LOCAL_MODEL_COST_MAP": "true",  # else it asks the network
        "HF_HUB_OFFLINE": "1",
    }
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | known
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("script", "home"), [
    ("with_openai.py", "openai-2"),
    ("with_openai.py", "openai-3"),
    ("with_langchain.py", "openai-2"),
    ("with_litellm.py", "openai-2"),
    ("with_llm.py", "openai-2"),
    ("with_anthropic.py", "anthropic"),
    ("with_openai.mjs", "node"),
])  # fmt: skip
def test_a_client_gets_what_the_engine_says(
    served: Served, expected: dict[str, Any], tmp_path: Path, script: str, home: str
) -> None:
    where, file = environment(home), Path(__file__).parent / "clients" / script
    start: list[str | Path] = [where / "bin" / "python", "-I", file]
    if home == "node":  # a module given as text finds packages from where it runs
        start = ["node", "--input-type=module", "-e", file.read_text(encoding="utf-8")]
    asked = [served.address + "/v1", KEY, NAME, TEXT, str(TOKENS), json.dumps(TOOL)]
    told = json.loads(run(tmp_path, *start, *asked, cwd=where).splitlines()[-1])
    assert told == {name: expected[name.partition(":")[0]] for name in told}


def test_curl_reads_the_stream(served: Served, expected: dict[str, Any], tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    body = {"messages": [{"role": "user", "content": TEXT}], "stream": True}
    told = run(
        tmp_path, "curl", "-sN", served.address + "/v1/chat/completions", "-d", json.dumps(body),
        "-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {KEY}",
    )  # fmt: skip
    *events, done = [line.removeprefix("data: ") for line in told.split("\n\n") if line]
    assert done == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == expected["text"]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_guidellm_completes_a_benchmark(
    served: Served, folder: Path, tmp_path: Path, path: str
) -> None:
    report, backend = tmp_path / "report.json", f"target={served.address},model={NAME}"
    run(
        tmp_path, environment("guidellm") / "bin" / "guidellm", "run", "--disable-console",
        "--backend", f"kind=openai_http,{backend},api_key={KEY},request_format=/v1/{path}",
        "--tokenizer", f"kind=huggingface_auto,model={folder}",
        "--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=12",
        "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12",
        "--output", f"kind=json,path={report}",
    )  # fmt: skip
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    made = benchmark["metrics"]["request_totals"]
    # It measures until the end of the answer that was reported last, and so leaves out one of
    # another of the four streams that ended a moment later.
    assert made["incomplete"] == made["errored"] == 0
    assert 12 - 3 <= made["successful"] <= 12
    assert {
        one["output_metrics"]["text_tokens"] for one in benchmark["requests"]["successful"]
    } == {12}


LAST = "{# </think> #}{% if tools %}<tool_call>{% endif %}{{ messages[-1].content[-400:] }}<s>"
"""A chat template that shows only what was said last: agents' prompts are long."""


@contextmanager
def answering(*answers: str) -> Iterator[str]:
    """A server whose model says what it is told to, one answer after the other; its address."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = LAST
    made, left = Engine(load(loaded().model, tokenizer)), [*answers]
    answer = lambda: Grammar.lark(f"start: {json.dumps(left.pop(0))}")  # noqa: E731
    with saying(made, answer), listening(api_of(made, max_output=1000)) as address:
        yield address
    assert not left


def called(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{call}</tool_call>"


def test_codex_reads_a_file_and_writes_another(tmp_path: Path) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    (work / "a.txt").write_text("the quick fox\n")
    answers = (
        "<think>I look.</think>I read it." + called("exec_command", cmd="cat a.txt"),
        called("exec_command", cmd="tr a-z A-Z < a.txt > b.txt"),
        "It is done.",
    )
    with answering(*answers) as address:
        ours = f'model_providers.ours={{name="ours",base_url="{address}/v1",wire_api="responses"}}'
        told = run(
            home, environment("codex") / "node_modules" / ".bin" / "codex", "exec", "--json",
            "--skip-git-repo-check", "-s", "danger-full-access", "-m", "tiny",
            "-c", 'model_provider="ours"', "-c", ours, "do it", cwd=work, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    assert (work / "b.txt").read_text() == "THE QUICK FOX\n"
    done = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    items = [event["item"] for event in done if event["type"] == "item.completed"]
    texts = [item["text"] for item in items if item["type"] == "agent_message"]
    assert texts == ["I read it.", "It is done."]
    assert done[-1]["type"] == "turn.completed"


EDIT = """<think>I simplify it.</think>a.py
```python
<<<<<<< SEARCH
    total = a + b
    return total
=======
    return a + b
>>>>>>> REPLACE
```
"""


def test_aider_edits_a_file(tmp_path: Path) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    (work / "a.py").write_text("def add(a, b):\n    total = a + b\n    return total\n")
    with answering(EDIT) as address:
        told = run(
            home, environment("aider") / "bin" / "aider", "--model", "openai/tiny",
            "--openai-api-base", f"{address}/v1", "--openai-api-key", "none", "--no-git",
            "--yes-always", "--edit-format", "diff", "--no-show-model-warnings",
            "--no-check-update", "--analytics-disable", "--map-tokens", "0",
            "--message", "simplify it", "a.py", cwd=work, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    assert (work / "a.py").read_text() == "def add(a, b):\n    return a + b\n"
    assert told.index("THINKING") < told.index("I simplify it.") < told.index("ANSWER")
