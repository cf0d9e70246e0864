"""The example of Ray Serve LLM in docs/scaling.md, on a CPU: reads a job in JSON, writes answers.

Run by test_vllm_live.py, with the Python that vLLM and Ray are installed for.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from typing import Any


def run(job: dict[str, Any]) -> list[list[int]]:
    """Run the example with another model, and ask what it serves."""
    import ray
    from ray import serve
    from ray.serve import llm

    known = llm.LLMConfig

    def on_a_cpu(engine_kwargs: Any, model_loading_config: Any, **given: Any) -> Any:
        return known(
            engine_kwargs=engine_kwargs | job["engine"],
            model_loading_config=model_loading_config | {"model_source": job["model"]},
            accelerator_config={"kind": "cpu"},
            **given,
        )

    folder = tempfile.mkdtemp(prefix="ray-")  # short: the paths of its sockets are limited
    memory = 100_000_000
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=memory, _temp_dir=folder)
    try:
        start_serve(job["port"])
        llm.LLMConfig = on_a_cpu
        exec(job["example"], {})
        return [ask(job, prompt) for prompt in job["prompts"]]
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def start_serve(port: int) -> None:
    """Start Ray Serve; a busy machine takes longer than the minute that Ray waits for its proxy."""
    from ray import serve
    from ray.exceptions import RayActorError

    with suppress(TimeoutError, RayActorError):  # the controller starts another proxy
        serve.start(proxy_location="HeadOnly", http_options={"port": port})
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)


def ask(job: dict[str, Any], prompt: list[int]) -> list[int]:
    body = {"prompt": prompt} | job["body"]
    request = urllib.request.Request(
        f"http://127.0.0.1:{job['port']}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        ids: list[int] = json.load(response)["choices"][0]["token_ids"]
    return ids


if __name__ == "__main__":
    print("\n" + json.dumps(run(json.load(sys.stdin))))
