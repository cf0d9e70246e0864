"""The vLLM plugin without vLLM: a stand-in calls it as vLLM 0.32 does (test_vllm_live.py)."""

from __future__ import annotations

import ast
import importlib
import json
import logging
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests import tiny
from tests.other_engine import VOCAB, Engine, Record, record

from draftsmith.errors import OptionError, UnknownName, UnsupportedError
from draftsmith.integrations import vllm as plugin
from draftsmith.integrations.vllm import Options, Proposer, check

pytestmark = pytest.mark.usefixtures("vllm")


class Runner(Engine):
    """As much of vLLM's model runner as is known here."""

    method = "custom_class"
    drafter: Any = None

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,  # noqa: ARG002  for the plugin alone
        sampled_token_ids: Any,
        slot_mappings: Any = None,
    ) -> Any:
        if self.method == "ngram":
            return self.drafter.propose(2, sampled_token_ids)
        elif self.method == "custom_class":  # noqa: RET505  the shape of vLLM's
            return self.drafter.propose(
                sampled_token_ids,
                self.input_batch.num_tokens_no_spec,
                self.input_batch.token_ids_cpu,
                slot_mappings=slot_mappings,
            )
        return None

    def run(self, steps: int = 1 << 30) -> None:
        while self.open and steps:
            steps -= 1
            self.step(self.open)
            output = SimpleNamespace(scheduled_spec_decode_tokens=self.scheduled)
            self.take(self.propose_draft_token_ids(output, self.sampled))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the parts of vLLM that the plugin imports."""
    names = ("logger", "platforms", "v1", "v1.sample", "v1.worker",
             "v1.sample.rejection_sampler", "v1.worker.gpu_model_runner")  # fmt: skip
    parts = {name: ModuleType(f"vllm.{name}") for name in names}
    root: Any = ModuleType("vllm")
    root.__version__ = "0.0"
    fake: Any = SimpleNamespace(**{name.split(".")[-1]: part for name, part in parts.items()})
    fake.logger.init_logger = logging.getLogger
    fake.platforms.current_platform = SimpleNamespace(is_cpu=lambda: True)
    fake.rejection_sampler.expand_batch_to_tokens = lambda given, _ends, _n: given[[0, 1, 1]]
    fake.gpu_model_runner.GPUModelRunner = Runner
    monkeypatch.setitem(sys.modules, "vllm", root)
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, f"vllm.{name}", part)
    monkeypatch.setattr(Runner, "propose_draft_token_ids", Runner.propose_draft_token_ids)
    plugin.attach.cache_clear()
    yield fake
    plugin.attach.cache_clear()


def config(tokens: int = 6, rank: int = 0, **options: Any) -> Any:
    hf = SimpleNamespace(num_hidden_layers=2, num_attention_heads=2)
    model = SimpleNamespace(
        hf_text_config=hf, model="m", tokenizer="m", skip_tokenizer_init=True, max_model_len=10_000,
        get_vocab_size=lambda: VOCAB,
    )  # fmt: skip
    return SimpleNamespace(
        additional_config={"draftsmith": options}, model_config=model,
        scheduler_config=SimpleNamespace(async_scheduling=False),
        speculative_config=SimpleNamespace(num_speculative_tokens=tokens),
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=2),
    )  # fmt: skip


def run(requests: dict[str, Record], found: Proposer) -> Proposer:
    """Answer requests with the drafts of a proposer."""
    runner = Runner(requests)
    runner.drafter = found
    found.load_model()
    runner.run()
    for one in requests.values():
        assert one.output == one.answer
    return found


def serve(requests: dict[str, Record], **options: Any) -> Proposer:
    return run(requests, Proposer(config(**options)))


def test_drafts_are_counted_by_source(caplog: pytest.LogCaptureFixture) -> None:
    found = serve({"a": record(1), "b": record(2)}, drafter="copyspec")
    assert found.host.stats.accepted > 40
    assert found.drafts == found.host.stats.passes
    assert "µs per request and step" in found.summary()
    before = [counter.labels("copyspec")._value.get() for counter in plugin.counters()]
    found = serve({"a": record(1)}, drafter="copyspec")
    after = [counter.labels("copyspec")._value.get() for counter in plugin.counters()]
    source = found.host.stats.by_source["copyspec"]
    told = [now - was for now, was in zip(after, before, strict=True)]
    assert told == [source.drafted, source.accepted]
    serve({"a": record(1)}, rank=3, drafter="copyspec")
    again = [counter.labels("copyspec")._value.get() for counter in plugin.counters()]
    assert again == after, "other ranks count nothing"
    with caplog.at_level(logging.INFO):
        found._summarized -= 2 * plugin.SUMMARY_SECONDS
        found._notify()
        found._notify()
    assert [line for line in caplog.messages if "tokens per pass" in line] == [found.summary()]


def test_a_prediction_comes_with_the_request() -> None:
    one = record(3)
    one.sampling_params.extra_args["prediction"] = [*one.answer, VOCAB + 5]
    found = serve({"a": one}, drafter="auto")
    assert found.host.stats.by_source["prediction"].accepted > 30


def test_a_prediction_in_words_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "read_tokenizer", lambda *_: tiny.tokenizer())
    asked = config(drafter="auto")
    asked.model_config.skip_tokenizer_init = False
    asked.model_config.get_vocab_size = lambda: len(tiny.tokenizer())
    words = "the quick brown fox jumps over the lazy dog"
    one = record(3)
    one.answer = tiny.tokenizer().encode(words)
    one.sampling_params.extra_args["prediction"] = words
    assert run({"a": one}, Proposer(asked)).host.stats.by_source["prediction"].accepted


@pytest.mark.parametrize("wrong", ["words", [[1]], [float("inf")]])
def test_a_wrong_prediction_is_reported_and_left_out(
    wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one = record(3)
    one.sampling_params.extra_args["prediction"] = wrong
    serve({"a": one})
    assert "request a continues without its prediction" in caplog.text


def test_answers_are_remembered() -> None:
    found = Proposer(config(answers=1_000_000))
    for name in ("first", "again"):
        run({name: record(4)}, found)
    assert found.host.stats.by_source["auto.earlier"].accepted > 0


def test_one_who_samples_where_that_is_broken_stops_drafting(
    vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    vllm.rejection_sampler.expand_batch_to_tokens = lambda *_: torch.zeros(3)
    cold, warm = record(1), record(2, temperature=0.7)
    found = serve({"cold": cold}, drafter="copyspec")
    assert "vllm#55005" in caplog.text
    assert found.host.stats.accepted > 10
    found = serve({"cold": record(1), "warm": warm}, drafter="copyspec")
    assert found.host.stats.drafted == 0
    assert found.skipped
    assert "steps without drafts because of vllm#55005" in found.summary()
    right: Any = lambda given, _ends, _n: given[[0, 1, 1]]  # noqa: E731
    vllm.rejection_sampler.expand_batch_to_tokens = right
    assert serve({"warm": record(2, temperature=0.7)}, drafter="copyspec").host.stats.accepted > 10


def test_other_proposers_run_as_they_did() -> None:
    plugin.attach()
    runner = Runner({})
    runner.method = "ngram"
    runner.drafter = SimpleNamespace(propose=lambda k, ids: (k, ids))
    assert runner.propose_draft_token_ids(None, [[5]]) == (2, [[5]])


def test_what_cannot_be_hosted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="the rows have no request ids"):
        Proposer(config()).propose([[1]], None, None)
    asked = config()
    asked.scheduler_config.async_scheduling = True
    with pytest.raises(UnsupportedError, match="--no-async-scheduling"):
        Proposer(asked)
    asked = config()
    asked.model_config.skip_tokenizer_init, asked.model_config.tokenizer = False, str(tmp_path)
    with pytest.raises(UnsupportedError, match="skip_tokenizer_init=True"):
        Proposer(asked)


# --- options ------------------------------------------------------------------------------------


def options(**given: Any) -> Options:
    return Options.of(SimpleNamespace(additional_config={"draftsmith": given}))


def test_options_are_checked() -> None:
    assert Options.of(SimpleNamespace(additional_config={})) == Options()
    with pytest.raises(UnknownName, match="Did you mean 'drafter'"):
        options(drafer="auto")
    for wrong in ({"drafter": 5}, {"answers": -1}, {"answers": "64 MB"}):
        with pytest.raises(OptionError, match=r"(drafter|answers) must be .* got"):
            options(**wrong)
    with pytest.raises(OptionError, match="must be a mapping of options"):
        Options.of(SimpleNamespace(additional_config={"draftsmith": "auto"}))


def test_the_cost_is_seconds_by_tokens() -> None:
    curve = options(cost={"0": 0.01, "8": 0.012}).curve()
    assert curve is not None
    assert curve.relative(8) == pytest.approx(1.2)
    assert options().curve() is None
    for other in (
        {"8": 1.0}, {"x": 1.0, "0": 1.0}, [1.0], {"0": "a"}, {"0": None}, {"0": 10**400},
    ):  # fmt: skip
        with pytest.raises(OptionError, match='"0" included'):
            options(cost=other).curve()
    wrong = [("0", 0), ("4", -0.01), ("0", float("inf")), ("4", float("nan")), ("-4", 0.02)]
    for tokens, spent in wrong:
        cost = {"0": 0.01, "4": 0.02} | {tokens: spent}
        with pytest.raises(OptionError, match=f"got {float(spent)} for {tokens} draft tokens"):
            options(cost=cost).curve()


# --- signatures ---------------------------------------------------------------------------------

HEAD = "def propose_draft_token_ids(self, scheduler_output, sampled_token_ids):\n"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def propose_draft_token_ids(self, sampled):\n    pass",
         r"propose_draft_token_ids\(self, sampled\)"),
        (HEAD + "    if method == 'ngram':\n        d.propose(sampled_token_ids)",
         "no method 'custom_class'"),
        (HEAD + "    if method == 'custom_class':\n        d.propose(k, sampled_token_ids)",
         r"it calls propose\(k, sampled_token_ids\), expected propose\(self, sampled_token_ids"),
        (HEAD + "    if m == 'custom_class':\n        d.propose(sampled_token_ids, batch=b)",
         r"it calls propose\(sampled_token_ids, batch=…\)"),
    ],
)  # fmt: skip
def test_another_vllm_is_refused_with_both_signatures(source: str, why: str) -> None:
    known = "    if method == 'custom_class':\n        return cast(Any, self.drafter).propose("
    arguments = "sampled_token_ids, b.num_tokens_no_spec, b.token_ids_cpu"
    for more in ("", ", slot_mappings=s"):
        check(f"{HEAD}{known}{arguments}{more})", "9.9")
    with pytest.raises(UnsupportedError, match=why):
        check(source, "9.9")


def test_the_page_says_what_is_there() -> None:
    page = (Path(__file__).parents[1] / "docs" / "vllm.md").read_text(encoding="utf-8")
    shown = re.findall(r"```python\n(.*?)```", page, re.S)[0]
    call = next(node for node in ast.walk(ast.parse(shown)) if isinstance(node, ast.Call))
    given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    module, _, name = given["speculative_config"]["model"].rpartition(".")
    assert getattr(importlib.import_module(module), name) is Proposer
    assert Options.of(SimpleNamespace(**given)).drafter == "auto"
    typed = re.findall(r"'(\{.*?\})'", page, re.S)
    assert [json.loads(text) for text in typed] == [*given.values()]
    table = page.split("## Options")[1].split("A wrong option")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.M)) == {f.name for f in fields(Options)}
