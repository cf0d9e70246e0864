"""The real vLLM with our drafters: greedy answers stay what they are, in whatever circumstances.

vLLM is in an environment of its own (tests/environments.py); DRAFTSMITH_VLLM_PYTHON may name the
Python of another one, where draftsmith need not be installed.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.turns import Guard
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from tests import tiny
from tests.environments import beside, environment
from tests.other_engine import replayed
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.core.stats import total
from draftsmith.model.load import folder_of, read_tokenizer

pytestmark = pytest.mark.external

ROOT = Path(__file__).parents[1]
NEAR = 1e-4
"""Log-probabilities closer than that may fall either way from one shape of a pass to another."""
TOKENS, K = 48, 6


@pytest.fixture(scope="session")
def python() -> str:
    named = os.environ.get("DRAFTSMITH_VLLM_PYTHON")
    return named or str(environment("vllm") / "bin" / "python")


@pytest.fixture(scope="session")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """For processes of vLLM: with draftsmith, and on one core."""
    return beside(tmp_path_factory.mktemp("installed")) | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama whose text goes in circles and leaves them; of a head size that vLLM knows."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny.tokenizer()), hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                scale = 0.05 if "layers" in name else 0.35
                parameter.copy_(scale * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@cache
def random_prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for n in range(24):
        ids = torch.randint(3, vocab, (10 + 2 * n,), generator=generator).tolist()
        prompts.append([*ids, *ids[: 5 + n]])
    return prompts


@cache
def texts(folder: str) -> list[list[int]]:
    """Requests to copy and change a list."""
    tokenizer = read_tokenizer(folder, {})
    things = ["apples", "bread", "cheese", "dates", "eggs", "flour", "grapes", "honey", "jam",
              "kale"]  # fmt: skip
    made = []
    for n in range(8):
        listed = "\n".join(f"- {1 + (n * i) % 9} {things[(n + i) % 10]}" for i in range(1, 7))
        asked = f"Write this shopping list again, with {n + 2} pears added at its end:\n{listed}"
        message = [{"role": "user", "content": asked}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        made.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return made


class Jobs:
    """A process that runs jobs in forks of itself (tests/vllm_jobs.py)."""

    def __init__(self, python: str, variables: dict[str, str], folder: Path) -> None:
        self._result, self._log = folder / "result", folder / "log"
        self._process = subprocess.Popen(
            [python, "-W", "ignore", str(ROOT / "tests" / "vllm_jobs.py")],
            env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        files = {"result": str(self._result), "log": str(self._log)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job | files), file=self._process.stdin, flush=True)
        status = self._process.stdout.readline()
        log = self._log.read_text(encoding="utf-8") if self._log.exists() else ""
        assert status == "0\n", log[-8000:]
        found: dict[str, Any] = json.loads(self._result.read_text(encoding="utf-8"))
        return found | {"log": log}

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()


@pytest.fixture(scope="session")
def jobs(
    python: str, variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Jobs]:
    made = Jobs(python, variables, tmp_path_factory.mktemp("jobs"))
    yield made
    made.close()


class Vllm:
    """A model and its prompts. Each job over them is run once."""

    def __init__(self, jobs: Jobs, model: str, prompts: Any) -> None:
        self.jobs, self.model, self.prompts = jobs, model, prompts
        self.done: dict[str, Any] = {}
        self.plain = self.run(None, logprobs=2)

    def run(self, drafter: str | None, options: Any = (), llm: Any = (), **job: Any) -> Any:
        parallel = "tensor_parallel_size" in dict(llm)
        settings = {
            "model": self.model, "dtype": "float32", "enforce_eager": True, "seed": 0,
            "max_model_len": 512, "max_num_seqs": 16, "disable_log_stats": False,
        }  # fmt: skip
        if drafter is not None:
            settings |= speculation(drafter, **dict(options))
        whole = {
            "llm": settings | dict(llm), "prompts": self.prompts, "max_tokens": TOKENS,
            **({} if parallel else {"one_process": True}), **job,
        }  # fmt: skip
        whole["environment"] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if parallel else "0"}
        asked = json.dumps(whole)
        if asked not in self.done:
            self.done[asked] = self.jobs.run(whole)
        return self.done[asked]

    def same(self, answers: Any, left_out: Any = ()) -> int:
        """Assert that answers are those without drafts; how many part at a near-tie."""
        near = 0
        for n, (found, wanted) in enumerate(zip(answers, self.plain["answers"][0], strict=True)):
            if n in left_out:
                continue
            assert len(found) == len(wanted)
            parts = next(
                (i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b), None
            )
            if parts is not None:
                assert self.plain["gaps"][n][parts] <= NEAR, f"prompt {n} parts at token {parts}"
                near += 1
        return near


def speculation(drafter: str, **options: Any) -> dict[str, Any]:
    return {
        "speculative_config": {
            "method": "custom_class", "model": "draftsmith.integrations.vllm.Proposer",
            "num_speculative_tokens": K,
        },
        "additional_config": {"draftsmith": {"drafter": drafter, **options}},
    }  # fmt: skip


@pytest.fixture(scope="session")
def on_small(jobs: Jobs, small: str) -> Vllm:
    return Vllm(jobs, small, random_prompts(len(tiny.tokenizer())))


@pytest.fixture(scope="session")
def on_smollm2(jobs: Jobs, smollm2: str) -> Vllm:
    folder = folder_of(smollm2)
    return Vllm(jobs, folder, texts(folder))


@pytest.mark.parametrize("drafter", ["copyspec", "spectra(pool=False)", "auto"])
def test_answers_are_the_same_and_drafts_those_of_our_own_loop(
    on_small: Vllm, drafter: str
) -> None:
    found = on_small.run(drafter)
    assert on_small.same(found["answers"][0]) <= 2
    ours = [
        replayed(prompt, answer, drafter, len(tiny.tokenizer()), K, TOKENS)
        for prompt, answer in zip(on_small.prompts, found["answers"][0], strict=True)
    ]
    stats = found["stats"]
    assert stats["accepted"] > 100
    for count in ("passes", "tokens", "drafted", "accepted", "accepted_by_depth"):
        assert stats[count] == getattr(total(ours), count), count
    # vLLM counts what it has scheduled, and its own first pass of each request has no draft.
    metrics = found["metrics"]
    assert metrics["vllm:spec_decode_num_draft_tokens"] == stats["drafted"]
    assert metrics["vllm:spec_decode_num_accepted_tokens"] == stats["accepted"]
    assert metrics["vllm:generation_tokens"] == stats["tokens"]


def test_preempted_and_chunked_requests(on_small: Vllm) -> None:
    narrow = {"block_size": 32, "num_gpu_blocks_override": 17, "max_num_batched_tokens": 128}
    found = on_small.run("auto", llm=narrow)
    assert found["metrics"]["vllm:num_preemptions"] > 0
    assert found["stats"]["accepted"] > 100
    assert on_small.same(found["answers"][0]) <= 2


def test_aborted_requests_harm_nobody(on_small: Vllm) -> None:
    aborted = [*range(0, len(on_small.prompts), 5)]
    found = on_small.run("auto", {"answers": 1_000_000}, abort_at=9, abort=aborted, rounds=1)
    assert any(found["answers"][0][n] is None for n in aborted)
    assert on_small.same(found["answers"][0], aborted) <= 2


def test_earlier_answers_and_cached_prefixes_serve_later_requests(on_small: Vllm) -> None:
    found = on_small.run("auto", {"answers": 1_000_000}, {"block_size": 32}, rounds=2)
    assert found["metrics"]["vllm:prefix_cache_hits"] > 0
    assert found["stats"]["by_source"]["auto.earlier"]["accepted"] > 500
    for answers in found["answers"]:
        assert on_small.same(answers) <= 2


def test_two_ranks_draft_alike(on_small: Vllm) -> None:
    found = on_small.run("auto", llm={"tensor_parallel_size": 2})
    assert on_small.same(found["answers"][0]) <= 2
    alone = on_small.run("auto")["metrics"]
    assert found["metrics"]["vllm:spec_decode_num_accepted_tokens"] == pytest.approx(
        alone["vllm:spec_decode_num_accepted_tokens"], rel=0.02
    )


def test_sampled_requests_are_not_spoilt_by_drafts(on_small: Vllm) -> None:
    plain = on_small.run(None, temperature=1.0)
    found = on_small.run("auto", temperature=1.0)
    if found["samples_wrongly"]:
        assert "vllm#55005" in found["log"]
        assert found["skipped"] > 0
        assert found["answers"] == plain["answers"]  # no draft was made


def test_predictions_come_by_extra_args(on_small: Vllm) -> None:
    extras = [{"prediction": answer} for answer in on_small.plain["answers"][0]]
    found = on_small.run("auto", extras=extras)
    assert on_small.same(found["answers"][0]) <= 2
    assert found["stats"]["by_source"]["prediction"]["accepted"] > 700


def test_a_real_model_answers_the_same(on_smollm2: Vllm) -> None:
    found = on_smollm2.run("auto")
    assert on_smollm2.same(found["answers"][0]) <= 2
    assert found["stats"]["accepted"] > 150


def test_a_small_model_drafts_in_its_own_tokens(on_smollm2: Vllm) -> None:
    found = on_smollm2.run("draft_model(model=edit-1m, algorithm=slem)", max_tokens=8)
    for answer, wanted in zip(found["answers"][0], on_smollm2.plain["answers"][0], strict=True):
        assert answer == wanted[:8]
    assert found["stats"]["drafted"] > 0


def test_vllm_serve_as_a_user_starts_it(
    on_smollm2: Vllm, python: str, variables: dict[str, str], tmp_path: Path
) -> None:
    port, made = free_port(), speculation("auto")
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", on_smollm2.model,
        "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
        "--speculative-config", json.dumps(made["speculative_config"]),
        "--additional-config", json.dumps(made["additional_config"]),
    ]  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    env = variables | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, process_group=0)
        guard = Guard(server.pid)
        try:
            while server.poll() is None and not _answers(address + "/health"):
                time.sleep(0.5)
            assert server.poll() is None, (tmp_path / "log").read_text()[-6000:]
            body = {
                "model": on_smollm2.model, "prompt": on_smollm2.prompts[0], "temperature": 0,
                "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True,
                "vllm_xargs": {"prediction": "- 2 pears\n"},
            }  # fmt: skip
            request = urllib.request.Request(
                address + "/v1/completions", json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(request) as response:
                choice = json.load(response)["choices"][0]
            with urllib.request.urlopen(address + "/metrics") as response:
                metrics = response.read().decode()
        finally:
            server.terminate()
            server.wait()
            guard.close()
    assert choice["token_ids"] == on_smollm2.plain["answers"][0][0]
    assert 'draftsmith:accepted_tokens_by_source_total{source="auto"}' in metrics
    assert "vllm:spec_decode_num_accepted_tokens_total" in metrics


def test_ray_serve_llm_as_the_page_starts_it(
    on_small: Vllm, variables: dict[str, str], tmp_path: Path
) -> None:
    """With the vLLM that Ray wants, which is an older one than the other tests'."""
    python = environment("ray") / "bin" / "python"
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    asked = range(0, len(on_small.prompts), 4)  # one after the other
    job = {
        "example": re.findall(r"```python\n(.*?)```", page, re.S)[-1],
        "model": on_small.model, "prompts": [on_small.prompts[n] for n in asked],
        "port": free_port(),
        "engine": {"dtype": "float32", "enforce_eager": True, "max_model_len": 512},
        "body": {
            "model": "qwen", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True,
            "return_token_ids": True,
        },
    }  # fmt: skip
    done = subprocess.run(
        [python, "-W", "ignore", str(ROOT / "tests" / "ray_llm_session.py")],
        input=json.dumps(job), capture_output=True, text=True,
        env=variables | {
            "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # else other programs go first
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-2000:]
    answers = [None] * len(on_small.prompts)
    answers[:: asked.step] = json.loads(done.stdout.splitlines()[-1])
    assert on_small.same(answers, [n for n in range(len(answers)) if n not in asked]) <= 2
    counted = CollectorRegistry()
    MultiProcessCollector(counted, str(tmp_path))
    source = {"source": "auto"}
    accepted = counted.get_sample_value("draftsmith:accepted_tokens_by_source_total", source)
    assert accepted is not None
    assert accepted > 50


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False
