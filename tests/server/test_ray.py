"""Replicas by Ray Serve, in an environment of its own (tests/environments.py)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import pytest
from serving import said, until
from tests.environments import ROOT, run_tests
from tests.ray_llm_session import start_serve

from draftsmith import Engine
from draftsmith.errors import OptionError, UnknownName

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, of all kinds
PAGE = ROOT / "docs" / "scaling.md"
TOKENS = 48
GIVEN = {"model": "edit-1m", "dtype": "float32", "drafter": "auto", "memory": 500_000_000}


@pytest.mark.slow
def test_what_to_install_is_reported_where_ray_is_missing() -> None:
    code = (
        "import sys\n"
        "sys.modules['ray'] = None\n"
        "from draftsmith.errors import OptionError\n"
        "try:\n"
        "    import draftsmith.integrations.ray\n"
        "except OptionError as error:\n"
        '    assert "need ray, which is not installed: pip install" in str(error)\n'
        "else:\n"
        "    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.external
@pytest.mark.skipif(find_spec("ray") is not None, reason="the others run in this process")
def test_all_that_is_below_where_ray_is(tmp_path: Path) -> None:
    run_tests("ray", __file__, tmp_path)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of Ray Serve on a small cluster of this machine."""
    ray = pytest.importorskip("ray", reason="they run where Ray is, in a process of their own")
    folder = tempfile.mkdtemp(prefix="ray-")  # short: the paths of its sockets are limited
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # On a busy machine a new worker takes longer than the minute that Ray gives it, all the
        # more as Ray lets other programs go first.
        variables.setenv("RAY_worker_register_timeout_seconds", "1200")
        variables.setenv("RAY_worker_niceness", "0")
        for check in ("READY", "HEALTH"):  # it replaces a proxy that takes longer
            variables.setenv(f"RAY_SERVE_PROXY_{check}_CHECK_TIMEOUT_S", "300")
        for who in ("REPLICA", "HANDLE"):  # autoscaling decides by what they tell
            variables.setenv(f"RAY_SERVE_{who}_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "0.5")
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=100_000_000,
            log_to_driver=False,
            _temp_dir=folder,
        )
        from ray import serve

        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        try:
            start_serve(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def build(deployment: dict[str, Any] | None = None, **more: Any) -> Any:
    from draftsmith.integrations.ray import Options, build_app

    # On a busy machine a health check takes longer than the half minute that Ray gives it.
    patient = {"health_check_timeout_s": 1200} | (deployment or {})
    return build_app(Options(deployment=patient, **GIVEN | more))


@pytest.fixture
def run(cluster: str) -> Iterator[Any]:
    """What serves an application, at the address that it returns, until the test ends."""
    from ray import serve

    def start(app: Any) -> str:
        serve.run(app, name="draftsmith")
        return cluster

    yield start
    serve.delete("draftsmith")


def running() -> int:
    """Replicas that take requests."""
    from ray import serve

    app = serve.status().applications.get("draftsmith")
    found = app and app.deployments.get("draftsmith")
    return found.replica_states.get("RUNNING", 0) if found else 0


def wait_for(replicas: int, gone: int | None = None) -> None:
    """Wait until so many replicas take requests, and the process `gone` is none of theirs."""
    # Asking the controller all the time would keep it from starting replicas.
    until(
        lambda: running() == replicas and (gone is None or gone not in processes()),
        seconds=1200,
        every=0.5,
    )


def processes() -> list[int]:
    """The replicas' process ids."""
    import ray

    named = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in named if actor["name"].startswith("SERVE_REPLICA::")]
    actors = [ray.get_actor(name, namespace="serve") for name in names]
    asked = [actor.__ray_call__.remote(lambda _: os.getpid()) for actor in actors]
    found: list[int] = ray.get(asked)
    return found


CHATS = [f"m{n}.py: rename x to y{n}\n<|file|>x = {n}\nprint(x + {n})\n" for n in range(20)]


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """The answers to `CHATS`, one by one."""
    engine = Engine.from_pretrained("edit-1m", dtype="float32", drafter="none")
    chats = [[{"role": "user", "content": chat}] for chat in CHATS]
    answers = [engine.generate(chat, max_new_tokens=TOKENS).text for chat in chats]
    assert len(set(answers)) == len(CHATS), "answers must tell who they belong to"
    return answers


def ask(address: str, number: int) -> str | None:
    """What is answered in a stream; None where it is said that there is no answer."""
    body = {
        "messages": [{"role": "user", "content": CHATS[number % len(CHATS)]}],
        "max_tokens": TOKENS,
        "stream": True,
    }
    chat = address + "/v1/chat/completions"
    try:
        with httpx2.stream("POST", chat, json=body, timeout=300) as response:
            if response.status_code >= 500:
                return None
            assert response.status_code == 200
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    except httpx2.TransportError:  # it broke off
        return None
    assert lines[-1] == "data: [DONE]", "an answer must not look whole when it is not"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return None if "error" in events[-1] else said(events)


def check(answers: Sequence[str | None], alone: Sequence[str]) -> int:
    """How many were lost; every other one must be the answer to its own chat."""
    for number, answer in enumerate(answers):
        assert answer in (None, alone[number % len(CHATS)])
    return list(answers).count(None)


@pytest.mark.external
def test_a_killed_replica_mixes_nothing_and_comes_back(run: Any, alone: list[str]) -> None:
    address, count, answered = run(build(replicas=2)), 200, threading.Semaphore(0)

    def one(number: int) -> str | None:
        answer = ask(address, number)
        answered.release()
        return answer

    victim = processes()[0]
    with ThreadPoolExecutor(16) as threads:
        asked = [threads.submit(one, number) for number in range(count)]
        for _ in range(count // 4):
            answered.acquire()
        os.kill(victim, signal.SIGKILL)
        answers = [future.result() for future in asked]
    assert check(answers, alone) < count // 4
    wait_for(2, gone=victim)
    assert check([ask(address, number) for number in range(20)], alone) == 0


@pytest.mark.external
def test_replicas_come_and_go_under_load_and_lose_nothing(run: Any, alone: list[str]) -> None:
    scaling = {
        "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2,
        "upscale_delay_s": 0.5, "downscale_delay_s": 1, "look_back_period_s": 2,
    }  # fmt: skip
    address = run(build(deployment={"autoscaling_config": scaling}))
    assert running() == 1
    few, none, answers = threading.Event(), threading.Event(), list[tuple[int, str | None]]()

    def client(first: int, stop: threading.Event) -> None:
        number = first
        while not stop.is_set():
            answers.append((number, ask(address, number)))
            number += 1

    with ThreadPoolExecutor(5) as threads:
        try:
            clients = [threads.submit(client, n, none if n == 0 else few) for n in range(5)]
            wait_for(2)
            few.set()
            wait_for(1)
        finally:
            few.set()
            none.set()
        for done in clients:
            done.result()
    assert len(answers) > len(clients)
    for number, answer in answers:
        assert answer == alone[number % len(CHATS)]


@pytest.mark.external
def test_every_endpoint_is_there_with_keys_and_errors_keep_their_shape(run: Any) -> None:
    given = {"runtime_env": {"env_vars": {"DRAFTSMITH_API_KEYS": "secret"}}, "num_cpus": 1}
    server = {"max_output": 7, "name": "tiny"}
    address = run(build(deployment={"ray_actor_options": given}, server=server))
    chat = {"messages": [{"role": "user", "content": CHATS[0]}]}
    with httpx2.Client(base_url=address, timeout=300) as client:
        assert client.get("/v1/models").status_code == 401
        client.headers["Authorization"] = "Bearer secret"
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert "draftsmith" in client.get("/").text
        assert "vllm:num_requests_running" in client.get("/metrics").text
        made = client.post("/v1/chat/completions", json=chat).json()
        assert made["usage"]["completion_tokens"] <= 7
        wrong = client.post("/v1/chat/completions", json=chat | {"temperature": 9})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "temperature"


@pytest.mark.external
def test_the_pages_examples_serve(cluster: str, tmp_path: Path) -> None:
    import ray
    from ray import serve

    text = PAGE.read_text(encoding="utf-8").replace("smollm2", "edit-1m")  # four replicas
    (file,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    python, _ = re.findall(r"```python\n(.*?)```", text, re.S)  # test_vllm_live.py runs the other
    models = cluster + "/v1/models"
    try:
        exec(python, {})
        assert running() == 2
        assert httpx2.get(models).json()["data"][0]["id"] == "edit-1m"
        serve.delete("draftsmith")
        (tmp_path / "replicas.yaml").write_text(file, encoding="utf-8")
        command = Path(sys.executable).with_name("serve")
        at = ray.get_runtime_context().gcs_address
        subprocess.run(
            [command, "run", "replicas.yaml", "--address", at, "--non-blocking"],
            cwd=tmp_path,
            check=True,
        )
        wait_for(2)
        assert httpx2.get(models).json()["data"][0]["id"] == "edit-1m"
    finally:
        serve.delete("draftsmith")


@pytest.mark.external
def test_a_replica_without_gpus_runs_on_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="they run where Ray is, in a process of their own")
    from draftsmith.integrations.ray import Options, Replica

    # As on a machine with an accelerator.
    monkeypatch.setattr("draftsmith.model.devices.usual", lambda: pytest.fail("not on its cores"))
    replica = Replica(Options(**GIVEN))
    replica._api.close()


@pytest.mark.external
def test_wrong_options_are_told_before_anything_starts() -> None:
    pytest.importorskip("ray", reason="they run where Ray is, in a process of their own")
    with pytest.raises(UnknownName, match="auto"):
        build(drafter="aut")
    with pytest.raises(OptionError, match=r"serve\.start"):
        build(server={"port": 9000})
    with pytest.raises(ValueError, match="max_outputs"):
        build(server={"max_outputs": 9})
    with pytest.raises(ValueError, match="replica"):
        build(replica=2)
    for name in ("replicas", "cores", "max_batch", "memory"):
        with pytest.raises(ValueError, match=f"{name}\\s"):
            build(**{name: 0})


@pytest.mark.external
def test_further_options_are_added_to_ours() -> None:
    pytest.importorskip("ray", reason="they run where Ray is, in a process of their own")
    from ray.serve.config import AutoscalingConfig

    more = {
        "ray_actor_options": {"runtime_env": {"env_vars": {"A": "b"}}},
        "autoscaling_config": AutoscalingConfig(max_replicas=3),
    }
    made = build(more, cores=2, max_batch=5)._bound_deployment
    assert made.ray_actor_options["num_cpus"] == 2
    assert made.ray_actor_options["runtime_env"]["env_vars"] == {"A": "b"}
    scaling = made._deployment_config.autoscaling_config
    assert (scaling.max_replicas, scaling.target_ongoing_requests) == (3, 5)
