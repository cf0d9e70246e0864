"""Reading records: the publishers' formats, our own lines, what is wrong with a file, samples."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import LoadError
from draftsmith.lab.bench.records import Record
from draftsmith.lab.bench.suites import evenly, parts, read, sample


def write(path: Path, *items: Any) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path


def one(tmp_path: Path, item: Any) -> Record:
    records = read(write(tmp_path / "log.jsonl", item)).records
    assert len(records) == 1
    return records[0]


def test_a_prompt_and_its_output(tmp_path: Path) -> None:
    record = one(tmp_path, {"prompt": "Once", "output": " upon", "max_new_tokens": 9})
    assert (record.prompt, record.output, record.turn) == ("Once", " upon", 1)
    assert (record.suite, record.id, record.max_new_tokens) == ("log", "log/0", 9)
    assert record.answered


def test_messages_count_turns(tmp_path: Path) -> None:
    chat: list[Any] = [{"role": r, "content": r} for r in ("system", "user", "assistant", "user")]
    chat[1]["content"] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    record = one(tmp_path, {"messages": chat, "output": "x", "suite": "mine", "category": "c"})
    assert (record.turn, record.suite, record.category) == (2, "mine", "c")
    assert record.messages[1]["content"] == "ab"


def test_every_answer_of_a_logged_chat_is_replayed(tmp_path: Path) -> None:
    chat = [{"role": r, "content": f"{r} {i}"} for i in (1, 2) for r in ("user", "assistant")]
    path = write(tmp_path / "log.jsonl", {"id": "a", "messages": chat})
    first, second = read(path).records
    assert (first.id, first.output, len(first.messages)) == ("a/1", "assistant 1", 1)
    assert (second.turn, second.output, len(second.messages)) == (2, "assistant 2", 3)
    assert first.conversation == second.conversation == "a"


@pytest.mark.parametrize(
    "asked", [{"prompt": "p"}, {"messages": [{"role": "user", "content": "p"}]}]
)
def test_an_answer_of_ours_is_one_whatever_else_a_line_holds(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    other = {"question": "q", "answer": "a", "task_id": 1, "entry_point": "e"}
    record = one(tmp_path, asked | {"output": "o"} | other)
    assert (record.output, record.prompt or record.messages[0]["content"]) == ("o", "p")


ASKED = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 7}
SAID = {"index": 0, "message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}


@pytest.mark.parametrize(
    "line",
    [
        {"request": ASKED, "response": {"id": "chatcmpl-1", "choices": [SAID], "usage": {}}},
        {"request": {"body": ASKED}, "response": {"status_code": 200, "body": {"choices": [SAID]}}},
        {"request": json.dumps(ASKED), "response": json.dumps({"choices": [SAID]})},
        {
            "request": ASKED | {"stream": True},
            "response": [
                {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
                {"choices": [{"index": 0, "delta": {"content": "Hel"}}]},
                {"choices": [{"index": 0, "delta": {"content": "lo."}}]},
                {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
                {"choices": [], "usage": {}},
            ],
        },
        {"time": 5, "request": ASKED | {"tools": []}, "response": {"choices": [SAID]}},
    ],
)
def test_a_log_of_an_api_is_read(tmp_path: Path, line: dict[str, Any]) -> None:
    record = one(tmp_path, line)
    assert [dict(m) for m in record.messages] == ASKED["messages"]
    assert (record.output, record.max_new_tokens, record.turn) == ("Hello.", 7, 1)
    assert (record.id, record.suite, record.answered) == ("log/0", "log", True)


def test_every_choice_of_a_logged_call_is_a_record(tmp_path: Path) -> None:
    choices = [{"index": i, "text": f"t{i}"} for i in (3, 2, 1, 0)]
    line = {"id": "a", "request": {"prompt": ["p", "q"], "n": 2}, "response": {"choices": choices}}
    path = write(tmp_path / "log.jsonl", line)
    found = [(r.id, r.prompt, r.output) for r in read(path).records]
    assert found == [("a/0", "p", "t0"), ("a/1", "p", "t1"), ("a/2", "q", "t2"), ("a/3", "q", "t3")]
    ids = one(tmp_path, {"request": {"prompt": [5, 6]}, "response": {"choices": [{"text": "x"}]}})
    assert (ids.prompt_ids, ids.prompt, ids.output) == ((5, 6), None, "x")
    asked, choices = {"prompt": "ask", "echo": True}, [{"text": "ask and say"}]
    echoed = one(tmp_path, {"request": asked, "response": {"choices": choices}})
    assert echoed.output == " and say"


@pytest.mark.parametrize(
    ("request_", "response", "reason"),
    [
        (ASKED, {"error": {"message": "overloaded"}}, "the response has no 'choices'"),
        (ASKED, {"choices": []}, "no choices with text"),
        (ASKED, {"choices": [{"message": {"content": None}}]}, "a choice of the response has no t"),
        (ASKED, {"choices": [{"message": {"tool_calls": [{"id": "1"}]}}]}, "has tool calls"),
        (ASKED | {"tools": [{"type": "function"}]}, {"choices": [SAID]}, "has tool calls"),
        (ASKED, None, "'response' is not an object"),
        ("x", {"choices": [SAID]}, "not JSON"),
        ({}, {"choices": [SAID]}, "there is no prompt"),
        ({"prompt": ["a", "b"]}, {"choices": [{"text": "x"}]}, "1 choices for 2 prompts"),
        (ASKED, {"choices": [{"message": {"content": "x", "reasoning_content": "y"}}]}, "thoughts"),
    ],
)
def test_what_is_wrong_in_a_logged_call_is_named(
    tmp_path: Path, request_: Any, response: Any, reason: str
) -> None:
    path = write(tmp_path / "log.jsonl", {"request": request_, "response": response})
    with pytest.raises(LoadError, match=reason):
        read(path)


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ([1], "expected a JSON object, found list"),
        ({"text": "x"}, "found 'text'"),
        ({"prompt": ""}, "there is no prompt"),
        ({"prompt": 3}, "'prompt' is not text"),
        ({"prompt": "x", "turn": "2"}, "'turn' is not a number"),
        ({"prompt": "x", "max_new_tokens": -5}, "'max_new_tokens' is -5"),
        ({"prompt": "x", "output": "y", "tools": [{"type": "function"}]}, "has tool calls"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
            "has tool calls",
        ),
        ({"messages": []}, "not a list of messages"),
        ({"messages": ["hi"]}, "no 'role'"),
        ({"messages": [{"role": "user", "content": None}]}, "'content' is not text"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "there is no prompt"),
        ({"prompt_ids": [1, -1]}, "not a list of token ids"),
        ({"question_id": 1, "category": "x", "turns": "hi"}, "not a list of texts"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, item: Any, reason: str) -> None:
    path = write(tmp_path / "log.jsonl", {"prompt": "x", "output": "y"}, item)
    with pytest.raises(LoadError, match="line 2") as error:
        read(path, "fail")
    assert reason in str(error.value)
    assert "--on-error skip" in str(error.value)
    with pytest.raises(LoadError, match=r"; correct it$"):
        read(path)  # by a command without that option
    reading = read(path, "skip")
    assert len(reading.records) == 1
    assert len(reading.wrong) == 1
    assert reason in reading.wrong[0]


def test_conversations(tmp_path: Path) -> None:
    """Turns that a run wrote are one; records that are named by their lines are none."""
    path, asked = tmp_path / "log.jsonl", [{"role": r, "content": r} for r in ("user", "assistant")]
    for lines, names in (
        ([{"id": f"a/{i}", "turn": i, "prompt_ids": [1], "output_ids": [2]} for i in (1, 2)],
         ["a", "a"]),
        ([{"messages": [*asked, asked[0]], "output": "x"}] * 3, ["log/0", "log/1", "log/2"]),
        ([{"prompt": "x", "output": "y", "id": f"a/{i}"} for i in (1, 2)], ["a/1", "a/2"]),
        ([{"prompt": "x", "output": "y", "id": None}] * 2, ["log/0", "log/1"]),
    ):  # fmt: skip
        assert [record.conversation for record in read(write(path, *lines)).records] == names


def test_wrong_lines_are_skipped_if_asked(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("\n\n")
    with pytest.raises(LoadError, match=r"no records \(it is empty\)"):
        read(path)
    with pytest.raises(LoadError, match=r"no records \(2 wrong lines\)"):
        read(write(path, 1, 2), "skip")
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": "\xe9"}\n{"prompt": "c"}\n')
    found = read(path, "skip")
    assert [record.prompt for record in found.records] == ["a", "c"]
    assert found.wrong == [f"{path}, line 3: not UTF-8 (byte 0xe9)"]  # a blank line counts


def test_a_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="No such file"):
        read(tmp_path / "no.jsonl")
    for name in ("torn.jsonl.gz", "torn.jsonl.xz", "torn.json"):
        (tmp_path / name).write_text('{"prompt": ')
        with pytest.raises(LoadError, match=name):
            read(tmp_path / name)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(LoadError, match=r"latin\.jsonl, line 1: not UTF-8 \(byte 0xe9\)"):
        read(tmp_path / "latin.jsonl")


@pytest.mark.parametrize(("ending", "module"), [(".gz", gzip), (".xz", lzma)])
def test_compressed_files(tmp_path: Path, ending: str, module: Any) -> None:
    path = tmp_path / f"mine.jsonl{ending}"
    with module.open(path, "wt", encoding="utf-8") as file:
        file.write('{"prompt": "é", "output": "y"}\n')
    record = read(path).records[0]
    assert (record.prompt, record.suite) == ("é", "mine")


def test_a_sample_is_spread_and_keeps_conversations_whole() -> None:
    assert evenly(80, 60)[:5] == [0, 1, 2, 4, 5]
    assert evenly(3, 5) == [0, 1, 2]
    assert evenly(10, 1) == [0]
    records = [
        Record(f"s/{i}/{turn}", "s", turn=turn, prompt="x") for i in range(10) for turn in (1, 2)
    ]
    assert [r.id for r in sample(records, 2)] == ["s/0/1", "s/0/2", "s/5/1", "s/5/2"]
    by_turn = sorted(records, key=lambda record: record.turn)
    assert [r.id for r in sample(by_turn, 2)] == ["s/0/1", "s/5/1", "s/0/2", "s/5/2"]
    assert sample(records, None) == records
    spec = [
        Record(f"spec_bench/{c}{i}", "spec_bench", c, prompt="x")
        for c in ("writing", "math", "rag")
        for i in range(4)
    ]  # by task
    assert [r.category for r in sample(spec, 2)] == ["writing", "math", "rag", "rag"]
    assert parts(spec[::4] + records[:2]) == [
        "spec_bench, mt_bench", "spec_bench, mt_bench", "spec_bench, rag", "s, turn 1", "s, turn 2",
    ]  # fmt: skip


COUNTS = {
    "mt_bench.jsonl": (160, 2), "mt_redundant.jsonl": (160, 2), "spec_bench.jsonl": (560, 2),
    "humaneval.jsonl.gz": (164, 1), "mbpp_test.jsonl": (500, 1), "gsm8k_test.jsonl": (3957, 3),
    "quotesum_dev.jsonl": (265, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_the_publishers_files(shared_data: Path, name: str) -> None:
    records = read(shared_data / "prompts" / name).records
    assert (len(records), max(r.turn for r in records)) == COUNTS[name]
    assert len({r.id for r in records}) == len(records)
    assert {r.suite for r in records} == {name.partition(".")[0]}
    assert all(r.messages and not r.answered for r in records)
    later = [r for r in records if r.turn > 1]
    assert all(r.messages[1]["content"] is None for r in later)
