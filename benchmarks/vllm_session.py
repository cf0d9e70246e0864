"""One vLLM in a process of its own: reads a job in JSON, writes its result as a line.

Run by tests/test_vllm_live.py and by vllm_live.py, in the Python that has vLLM installed.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Answer all prompts together, `rounds` times."""
    from vllm import LLM, SamplingParams

    llm = LLM(**job["llm"])
    engine: Any = llm.llm_engine
    extras = job.get("extras") or [{}] * len(job["prompts"])
    found: dict[str, Any] = {"answers": [], "gaps": [], "steps": 0, "seconds": 0.0}
    drafter = None if "one_process" not in job else timed(_runner(engine), found)
    for turn in range(job.get("rounds", 1)):
        answers: dict[int, Any] = {}
        for number, (prompt, extra) in enumerate(zip(job["prompts"], extras, strict=True)):
            params = SamplingParams(
                max_tokens=job["max_tokens"], ignore_eos=job.get("ignore_eos", True),
                logprobs=job.get("logprobs"), extra_args=extra, detokenize=False,
                temperature=job.get("temperature", 0.0), seed=number,
            )  # fmt: skip
            engine.add_request(f"{turn}-{number}", {"prompt_token_ids": prompt}, params)
        begin = time.perf_counter()
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    answers[int(output.request_id.split("-")[1])] = output.outputs[0]
            found["steps"] += 1
            if found["steps"] == job.get("abort_at"):
                engine.abort_request([f"{turn}-{number}" for number in job["abort"]])
        found["wall"] = time.perf_counter() - begin
        numbers = range(len(job["prompts"]))
        found["answers"].append(
            [list(answers[n].token_ids) if n in answers else None for n in numbers]
        )
        if job.get("logprobs"):
            found["gaps"] = [[_gap(one) for one in answers[n].logprobs] for n in numbers]
    names = ("vllm:num_preemptions", "vllm:prefix_cache_hits", "vllm:spec_decode_num_drafts",
             "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens",
             "vllm:generation_tokens")  # fmt: skip
    found["metrics"] = {
        metric.name: metric.value for metric in llm.get_metrics() if metric.name in names
    }
    if hasattr(drafter, "host"):
        from dataclasses import asdict

        found["stats"] = asdict(drafter.host.stats)
        found["skipped"], found["samples_wrongly"] = drafter.skipped, drafter.samples_wrongly
        found["drafts"], found["summary"] = drafter.drafts, drafter.summary()
    return found


def _runner(engine: Any) -> Any:
    return engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def timed(runner: Any, found: dict[str, Any]) -> Any:
    """Return the drafter of a runner and count its time from now on; None if there is none."""
    drafter = getattr(runner, "drafter", None)
    if drafter is None:
        return None
    propose, found["asked"] = drafter.propose, 0

    def watched(*args: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        drafts = propose(*args, **named)
        found["seconds"] += time.perf_counter() - begin
        found["asked"] += sum(map(bool, next(a for a in args if isinstance(a, list))))
        return drafts

    drafter.propose = watched
    return drafter


def _gap(one: Any) -> float:
    """Distance of the two best log-probabilities."""
    best = sorted((entry.logprob for entry in one.values()), reverse=True)
    return float(best[0] - best[1])


if __name__ == "__main__":
    made = run(json.load(sys.stdin))
    print("\n" + json.dumps(made))
