"""Replaying: exact against live decoding, the figures of an independent replay, and the command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from test_benchmarks import there

import command
import tiny
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.core.target import Needs
from draftsmith.drafters.cascade import Cascade
from draftsmith.drafters.registry import parse
from draftsmith.engine.engine import Engine
from draftsmith.engine.request import end_ids
from draftsmith.errors import LoadError, OptionError, PromptError, UnsupportedError, WriteError
from draftsmith.lab.bench import sweep as sweeping
from draftsmith.lab.bench.encoding import Encoding
from draftsmith.lab.bench.encoding import _load as loaded
from draftsmith.lab.bench.records import Record
from draftsmith.lab.bench.replay import ReplayBudget, replay
from draftsmith.lab.bench.replay_sums import summarize
from draftsmith.lab.bench.suites import read, sample
from draftsmith.lab.bench.sweep import Replayer, sweep
from draftsmith.lab.bench.templates import TEMPLATES
from draftsmith.lab.corpus.index import write_index
from draftsmith.lab.lines import Finished
from draftsmith.text.vocab import fingerprint
from tiers import slow_after

call = partial(command.call, "bench")
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer(), drafter="none")


@pytest.mark.parametrize("budget", slow_after(1, ["drafter", 5]))
@pytest.mark.parametrize(
    "spec",
    ["none", "copyspec", "copyspec(gamma=1)", "prompt_lookup", "longest_match",
     "copyspec+prompt_lookup", "auto(logits=False)"],
)  # fmt: skip
def test_a_replay_equals_the_live_run(engine: Engine, spec: str, budget: str | int) -> None:
    """The same passes, drafts and acceptances, ended by length or by the end token."""
    rule = ReplayBudget(None if budget == "drafter" else int(budget))
    for text in ("the quick brown fox", "def foo(x): return x + 1 def foo(x)", "lazy lazy lazy"):
        prompt = tiny.tokenizer()(text)["input_ids"]
        live = engine.generate(
            prompt, drafter=spec, budget=budget, max_new_tokens=60, temperature=0
        )
        again = replay(prompt, live.tokens, parse(spec), 400, rule, limit=60).stats
        for name in (
            "passes", "tokens", "attempts", "drafted", "accepted", "drafted_by_depth",
            "accepted_by_depth", "by_source",
        ):  # fmt: skip
            assert getattr(again, name) == getattr(live.stats, name), name


def test_a_text_that_was_cut_at_its_limit_is_replayed_with_its_end() -> None:
    """Tokenized anew it may have more tokens than the limit, and it has an end in any case."""
    replayed = replay([5, 6, 7], [5, 6, 7, 5, 6], parse("copyspec(gamma=1)"), 400, limit=4)
    assert replayed.stats.tokens == 5


def test_widths_are_counted_by_context() -> None:
    done = replay([1, 2, 3, 4, 1, 2, 3], [4, 1, 9], parse("copyspec(gamma=3, block=2)"), 10)
    assert done.stats.passes == 1  # 4 and 1 are copied; 9 comes with the same pass
    assert dict(done.passes) == {(64, 3): 1}
    long = replay(range(300), range(3), parse("none"), 1000)
    assert dict(long.passes) == {(320, 1): 3}
    stats = replay([*range(20), *range(3)], [3, 4, 99], parse("copyspec(block=4)"), 100).stats
    assert stats.acceptance_by_depth == [1.0, 1.0, 0.0, 0.0]


def test_a_budget_replaces_the_drafters_own_width() -> None:
    ids = [*range(50), *range(4)]
    own = replay(ids, range(4, 40), parse("copyspec"), 100)
    narrow = replay(ids, range(4, 40), parse("copyspec"), 100, ReplayBudget(2))
    assert max(width for _, width in own.passes) == 11
    assert max(width for _, width in narrow.passes) == 3
    assert narrow.stats.passes == 12
    # Where every further position costs a whole pass, the automatic budget only tries now and then.
    costly = ReplayBudget(curve=tuple((w, 1.0 + w) for w in (0, 1, 2, 4, 8, 16, 32, 64)))
    tried = replay(ids, range(4, 40), parse("copyspec"), 100, costly).stats
    assert tried.attempts <= tried.passes / 3


def test_drafters_that_look_at_the_model_are_refused() -> None:
    class Peeking(Drafter):
        name = "peeking"
        needs = Needs(hidden_layers=(3,), logits=True)

        def open(self, ctx: Context) -> DrafterState:
            raise NotImplementedError

    with pytest.raises(UnsupportedError, match="hidden states and logits"):
        replay([1], [2], Peeking(), 10)
    with pytest.raises(UnsupportedError, match="hidden states"):
        replay([1], [2], parse("pld_plus"), 10)
    with pytest.raises(UnsupportedError, match="the model's attention rows, but"):
        replay([1], [2], parse("pld_plus(rank=attention)"), 10)
    with pytest.raises(UnsupportedError, match="hidden states and logits"):
        replay([1], [2], parse("copyspec+pld_plus+spectra"), 10)


def chat_ids(name: str, shared_data: Path, chat: list[dict[str, str]], output: str) -> Any:
    record = Record("x", "x", messages=tuple(chat), output=output, tokenizer=name)
    return Encoding((shared_data / "tokenizers",))(record)


def test_templates_write_what_the_models_read(shared_data: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}, *CHAT]
    qwen = chat_ids("qwen2", shared_data, chat, "ok")
    decode = loaded("qwen2", (shared_data / "tokenizers",), None).decode
    assert decode(list(qwen.prompt)) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert qwen.answer == (562, 151645)
    vicuna = TEMPLATES["llama2"].render(chat)
    assert vicuna[0].endswith("questions. USER: Hi ASSISTANT: Yo</s>USER: Hello ASSISTANT:")  # type: ignore[union-attr]
    assert chat_ids("llama2", shared_data, chat, "ok").answer == (3431, 2)
    assert TEMPLATES["llama3"].render(CHAT) == [
        128000, 128006, "user", 128007, "\n\nHello", 128009, 128006, "assistant", 128007, "\n\n",
    ]  # fmt: skip
    asked = Record("x", "x", messages=tuple(CHAT), output="ok")
    llama = Encoding((shared_data / "tokenizers",), "llama2", "llama3")(asked)
    assert llama.prompt[:2] == (128000, 128006)
    assert (llama.answer, llama.vocab_size) == ((3431, 128009), 128256)
    own = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert TEMPLATES["qwen2"].render(own)[0].startswith("<|im_start|>system\nBe brief.")  # type: ignore[union-attr]
    assert TEMPLATES["llama2"].render(own)[0].startswith("Be brief. USER: Hello")  # type: ignore[union-attr]
    with pytest.raises(PromptError, match="no role 'tool'"):
        TEMPLATES["llama2"].render([{"role": "tool", "content": "x"}])


def test_a_models_own_folder_is_read_like_the_engine_does(tmp_path: Path, engine: Engine) -> None:
    tiny.tokenizer().save_pretrained(tmp_path)
    record = Record("x", "x", messages=tuple(CHAT), output="a test")
    encoded = Encoding((), str(tmp_path))(record)
    assert list(encoded.prompt) == engine.prepare({}).encode(CHAT)
    assert encoded.answer[-1] == end_ids(engine.model)[0]


REFERENCE = {
    ("mt_redundant", None, 2): (2.39, 2.35),
    ("spec_bench", "summarization", None): (2.67, 2.65),
    ("spec_bench", "rag", None): (1.66, 1.65),
    ("spec_bench", "math_reasoning", None): (1.70, 1.72),
    ("spec_bench", "qa", None): (1.43, 1.43),
    ("spec_bench", "translation", None): (1.11, 1.11),
    ("humaneval", None, None): (2.47, 2.46),
    ("gsm8k_json", None, None): (1.73, 1.74),
    ("commit_edits", None, None): (6.6, 6.0),
}
"""Tokens per pass of an independent replay: the original prompt lookup, transformers' variant."""


@pytest.mark.slow
def test_figures_of_an_independent_replay(shared_data: Path) -> None:
    records = [
        record
        for path in sorted((shared_data / "recorded").glob("*.jsonl*"))
        for record in read(path).records
    ]
    drafters = [parse("prompt_lookup(max=3)"), parse("prompt_lookup(max=2)")]
    # The reference sampled 60 records and cut answers at 2,048 tokens.
    replayer = Replayer(Encoding((shared_data / "tokenizers",)), max_tokens=2048)
    rows = summarize(sweep(sample(records, 60), drafters, replayer).done)
    found = {(r.suite, r.category, r.turn, r.drafter): r.stats.tokens_per_pass for r in rows}
    for place, figures in REFERENCE.items():
        for drafter, figure in zip(drafters, figures, strict=True):
            assert found[*place, str(drafter)] == pytest.approx(figure, rel=0.02), place


# --- the command -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of 24 two-turn chats beside the tokenizer that its records name."""
    here = tmp_path_factory.mktemp("data")
    tiny.tokenizer().save_pretrained(here / "tokenizers" / "tiny")
    lines = []
    for i in range(24):
        chat = [
            {"role": "user", "content": f"say the quick brown fox {i}"},
            {"role": "assistant", "content": f"the quick brown fox jumps {i}"},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": f"the quick brown fox jumps {i}"},
        ]
        category = "even" if i % 2 == 0 else "odd"
        lines.append({"id": f"c{i}", "category": category, "messages": chat, "tokenizer": "tiny"})
    (here / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return here


def rows(*args: object) -> list[dict[str, Any]]:
    result = call("replay", *args, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["rows"]
    return found


def counts(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what differs from run to run."""
    return [{k: v for k, v in row.items() if k != "drafter_us_per_pass"} for row in found]


def test_json_rows(folder: Path) -> None:
    found = rows(folder / "log.jsonl", "-d", "copyspec", "-d", "none")
    places = {(r["category"], r["turn"]) for r in found}
    assert places == {(c, t) for c in (None, "even", "odd") for t in (None, 1, 2)}
    by_place = {(r["category"], r["turn"], r["drafter"]): r for r in found}
    copy = str(parse("copyspec"))
    assert by_place[None, None, copy]["records"] == 48
    assert by_place["odd", 2, copy]["records"] == 12
    assert by_place[None, None, "none()"]["tokens_per_pass"] == 1
    assert by_place[None, 2, copy]["copied_share"] > by_place[None, 1, copy]["copied_share"]


def test_a_killed_process_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise BrokenProcessPool

    monkeypatch.setattr(Replayer, "__call__", killed)
    threads = lambda count, *_: ThreadPoolExecutor(count)  # noqa: E731
    monkeypatch.setattr(sweeping, "ProcessPoolExecutor", threads)
    result = call("replay", folder / "log.jsonl", "--processes", 2)
    assert result.exit_code == 1
    assert "give fewer --processes" in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="asks for processes as POSIX does")
def test_workers_end_with_the_process_that_started_them() -> None:
    code = """if __name__ == "__main__":
        import multiprocessing, os
        from concurrent.futures import ProcessPoolExecutor
        from draftsmith.lab.bench import sweep
        pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), sweep._begin_worker
        )
        print(pool.submit(os.getpid).result(), flush=True)
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE)
    worker = int(done.stdout)
    while there(worker):  # the test's own limit ends it
        time.sleep(0.01)


@pytest.mark.slow
def test_several_processes_give_the_same_rows(folder: Path) -> None:
    log = folder / "log.jsonl"
    assert counts(rows(log, "--processes", 2)) == counts(rows(log))


def test_an_interrupted_run_goes_on(folder: Path, tmp_path: Path) -> None:
    log, journal = folder / "log.jsonl", tmp_path / "done.jsonl"
    whole = counts(rows(log, "-d", "auto", "--resume", journal))
    lines = journal.read_text().splitlines(keepends=True)
    assert len(lines) == 48
    journal.write_text("".join(lines[:20]) + lines[20][:40])  # killed while writing
    assert counts(rows(log, "-d", "auto", "--resume", journal)) == whole
    assert len(journal.read_text().splitlines()) == 48
    # Other settings are other replays.
    cut = counts(rows(log, "-d", "auto", "--resume", journal, "--max-tokens", 3))
    assert max(row["tokens"] / row["records"] for row in cut) == 3


def test_a_journal_is_of_one_version_tokenizer_and_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Record("x", "x", prompt="the quick", output="the quick brown fox", tokenizer="tiny")
    notes, folder = Finished(), tmp_path / "corpus"

    def again(spec: str) -> bool:
        """Whether anything had to be replayed."""
        loaded.cache_clear()  # as in a new process
        before = len(notes._known)
        sweep([record], [parse(spec)], Replayer(Encoding((tmp_path,))), 1, notes)
        return len(notes._known) > before

    tiny.tokenizer().save_pretrained(tmp_path / "tiny")
    assert [again("copyspec"), again("copyspec")] == [True, False]
    tiny.tokenizer(300).save_pretrained(tmp_path / "tiny")
    assert [again("copyspec"), again("copyspec")] == [True, False]
    monkeypatch.setattr("draftsmith.lab.bench.sweep.__version__", "99")
    assert [again("copyspec"), again("copyspec")] == [True, False]
    for documents in ([[1, 2, 3]], [[1, 2, 4]]):
        vocabulary = fingerprint(tiny.tokenizer(300))
        write_index(folder, documents, vocabulary=vocabulary, examples=1, model="toy")
        for spec in (f"retrieval(corpus='{folder}')", f"copyspec+retrieval(corpus='{folder}')"):
            assert [again(spec), again(spec)] == [True, False]


def test_a_corpus_must_have_the_vocabulary_of_the_records(tmp_path: Path) -> None:
    tiny.tokenizer().save_pretrained(tmp_path / "tiny")
    write_index(tmp_path / "c", [[1, 2, 3, 250]], vocabulary="other", examples=1, model="toy")
    drafter = parse(f"copyspec+retrieval(corpus='{tmp_path / 'c'}')")
    texts = Record("x", "x", prompt="the quick", output="the quick brown", tokenizer="tiny")
    ids = Record("y", "x", prompt_ids=(1, 2), output_ids=(3, 4, 5))
    with pytest.raises(OptionError, match="another vocabulary: that of toy"):
        sweep([texts], [drafter], Replayer(Encoding((tmp_path,))))
    (done,) = sweep([ids], [drafter], Replayer(Encoding())).done  # nothing is known of its ids
    assert done.replay.stats.tokens == 3


@pytest.mark.parametrize("name", ["bind", "needs_of"])
def test_a_drafter_of_ones_own_that_asks_a_model_is_refused(name: str) -> None:
    def ask(_self: Drafter, _model: Any) -> Any:
        raise AssertionError

    own = type("Own", (type(parse("copyspec")),), {name: ask})
    record = Record("y", "x", prompt_ids=(1, 2), output_ids=(3, 4, 5))
    with pytest.raises(UnsupportedError, match=f"its {name} asks a model"):
        sweep([record], [Cascade((parse("copyspec"), own()))], Replayer(Encoding()))


def test_a_drafter_of_ones_own_may_name_a_file_corpus_and_fail() -> None:
    @dataclass(frozen=True, repr=False)
    class Notes(Drafter):
        corpus: str
        name: ClassVar[str] = "notes"

        def open(self, ctx: Context) -> Any:  # noqa: ARG002
            raise LoadError(f"there is no file {self.corpus}")

    record = Record("y", "x", prompt_ids=(1, 2), output_ids=(3, 4, 5))
    with pytest.raises(LoadError, match="there is no file"):
        sweep([record], [Notes("notes.txt")], Replayer(Encoding()))


def test_a_foreign_file_is_not_appended_to(folder: Path) -> None:
    log = folder / "log.jsonl"
    before = log.read_text()
    fails("no results that this version can resume", "replay", log, "--resume", log)
    assert log.read_text() == before
    with pytest.raises(WriteError, match="cannot be written"):
        Finished(log / "x")


def test_the_table_has_turns_by_number_and_names_what_it_left_out(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "tokenizers", tmp_path / "tokenizers")
    log, lines = tmp_path / "log.jsonl", (folder / "log.jsonl").read_text()
    twice = [json.dumps({"id": f"r/{t}", "turn": t, "prompt_ids": [5, 6, 7], "output_ids": [5, 6]})
             for t in (10, 2)]  # fmt: skip
    log.write_text("\n".join([*twice, lines.rstrip(), "{", '{"prompt": "x"}']))
    result = call("replay", log, "-d", "copyspec", "--on-error", "skip")
    assert result.exit_code == 0, result.output
    places = [result.stdout.index(f"turn {turn} ") for turn in (1, 2, 10)]
    assert places == sorted(places)
    assert "accepted, by position" in result.stdout
    assert "line 27: not JSON" in result.stderr
    assert "1 record has no output" in result.stderr


def fails(reason: str, *args: object) -> None:
    assert reason in command.fails(2, "bench", *args)


def test_clear_errors(folder: Path, tmp_path: Path) -> None:
    log = folder / "log.jsonl"
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    fails("it is empty", "replay", empty)
    fails("No such file", "replay", tmp_path / "no.jsonl")
    fails("FILES is missing", "replay")
    fails("unknown drafter", "replay", log, "-d", "copyspek")
    fails('Choose from: "skip", "fail"', "replay", log, "--on-error", "ignore")
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"prompt": "x"}\n')
    fails("have no outputs", "replay", asked)
    asked.write_text('{"prompt": "x", "output": "y"}\n')
    fails("does not name its model's tokenizer", "replay", asked)
    fails("no tokenizer 'gpt9'", "replay", asked, "-t", "gpt9")
    asked.write_text('{"prompt": "x", "output": ""}\n')
    fails("unknown template", "replay", asked, "-t", folder / "tokenizers/tiny",
          "--template", "qwen3")  # fmt: skip


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[" * 100_000, "line 1: not usable JSON (nested too deeply)"),
        ('{"messages": ' + "[" * 100_000, "line 1: not usable JSON (nested too deeply)"),
        (r'{"prompt": "a\ud800b", "output": "c"}', r"line 1: not usable text (\ud800 is half"),
        (r'{"id": "\udfff", "prompt": "a", "output": "c"}', r"line 1: not usable text (\udfff"),
    ],
)
def test_hostile_lines_are_named(folder: Path, tmp_path: Path, line: str, reason: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(line + "\n")
    fails(reason, "replay", log, "-t", folder / "tokenizers/tiny")
    fails(reason, "run", log, "-m", "no/such/model", "-o", tmp_path / "r.jsonl")
    array = tmp_path / "log.json"
    array.write_text(f"[{line}]")
    fails(reason.removeprefix("line 1: "), "replay", array, "-t", folder / "tokenizers/tiny")


def test_a_tokenizer_that_does_not_match(folder: Path, tmp_path: Path) -> None:
    fails("was made with the tokenizer tiny, not other", "replay", folder / "log.jsonl",
          "-t", "other")  # fmt: skip
    big = Record("x", "x", prompt_ids=(1,), output_ids=(9999,))
    with pytest.raises(OptionError, match="token id 9999"):
        Encoding((), str(folder / "tokenizers" / "tiny"))(big)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "tokenizers" / "tiny" / "tokenizer.json", bare)
    chat = Record("x", "x", messages=tuple(CHAT), output="y")
    with pytest.raises(OptionError, match="has no chat template"):
        Encoding((), str(bare))(chat)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match="cannot be read as a tokenizer"):
        Encoding((), str(broken))(chat)


@pytest.mark.parametrize("name", ["smollm2", "edit-7m", "file"])
def test_g3_every_name_of_a_model_works(name: str, tiny_smollm2: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"id": "x", "messages": CHAT, "output": "hello world " * 9}) + "\n")
    given = tiny_smollm2 if name == "file" else name
    result = call("replay", log, "-t", given, "-d", "copyspec(gamma=1)", "--json")
    assert result.exit_code == 0, result.output


def test_g3_a_name_that_is_none_lists_what_is_there(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"id": "x", "messages": CHAT, "output": "hello"}) + "\n")
    shutil.copytree(folder / "tokenizers", tmp_path / "tokenizers")
    result = call("replay", log, "-t", "tinny")
    assert result.exit_code == 2, result.output
    assert "there is no tokenizer 'tinny' in" in result.stderr
    assert "(there: tiny)" in result.stderr


@pytest.mark.slow
def test_a_tokenizer_that_changes_the_text(shared_data: Path) -> None:
    records = read(shared_data / "recorded" / "humaneval.qwen2.5-coder-32b.jsonl").records[:30]
    Encoding((shared_data / "tokenizers",)).check(records)
    nameless = [Record(r.id, r.suite, prompt="x", output=r.output) for r in records]
    with pytest.raises(OptionError, match="t5-small changes texts"):
        Encoding((shared_data / "tokenizers",), "t5-small").check(nameless)
    Encoding((shared_data / "tokenizers",), "llama2").check(nameless)  # of another kind
