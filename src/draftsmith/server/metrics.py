"""Metrics for Prometheus, with vLLM's names where vLLM has the same metric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from draftsmith.server.worker import Chunk, Worker

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2.5, 5, 10, 20, 40, 80, 160,
            320)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_SUMS = (
    ("prompt_tokens", "vllm:prompt_tokens", "Prompt tokens of answers that ended."),
    ("prompt_tokens", "vllm:prefix_cache_queries", "Prompt tokens looked up."),
    ("reused_tokens", "vllm:prefix_cache_hits", "Prompt tokens that were computed before."),
    ("attempts", "vllm:spec_decode_num_drafts", "Passes that carried a draft."),
    ("drafted", "vllm:spec_decode_num_draft_tokens", "Drafted tokens."),
    ("accepted", "vllm:spec_decode_num_accepted_tokens", "Accepted tokens."),
    ("passes", "draftsmith:passes", "Passes of the model, by answer."),
    ("failed_passes", "draftsmith:failed_passes",
     "Passes that failed and were repeated with less, by answer."),
    ("drafter_failures", "draftsmith:drafter_failures", "Failures of drafters."),
)  # fmt: skip
"""Fields of an answer's statistics → the metrics that add them up."""


class Metrics:
    """The metrics of one server, in a separate registry."""

    def __init__(self, model: str) -> None:
        self._registry, self._model = CollectorRegistry(), model

        def histogram(name: str, about: str, buckets: tuple[float, ...] = _SECONDS) -> Any:
            made = Histogram(name, about, ["model_name"], registry=self._registry, buckets=buckets)
            return made.labels(model)

        def counter(name: str, about: str, *labels: str) -> Any:
            made = Counter(name, about, ["model_name", *labels], registry=self._registry)
            return made if labels else made.labels(model)

        self.first = histogram("vllm:time_to_first_token_seconds", "Request to first token.")
        self.each = histogram(
            "vllm:request_time_per_output_token_seconds", "Per token after the first, by request."
        )
        self.whole = histogram("vllm:e2e_request_latency_seconds", "Request to last token.")
        self.queue = histogram("vllm:request_queue_time_seconds", "Request to its row.")
        self.prefill = histogram("vllm:request_prefill_time_seconds", "Row to first token.")
        self.decode = histogram("vllm:request_decode_time_seconds", "First to last token.")
        self.prompt_size = histogram("vllm:request_prompt_tokens", "Of a prompt.", _TOKENS)
        self.answer_size = histogram("vllm:request_generation_tokens", "Of an answer.", _TOKENS)
        self.generated = counter("vllm:generation_tokens", "Tokens given.")
        self.sums = [(field, counter(name, about)) for field, name, about in _SUMS]
        self.depth = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted, by place.", "position"
        )
        self.ended = counter("vllm:request_success", "Answers that ended.", "finished_reason")
        self.source_drafted = counter(
            "draftsmith:draft_tokens_by_source", "Drafted tokens, by drafter.", "source"
        )
        self.source_accepted = counter(
            "draftsmith:accepted_tokens_by_source", "Accepted tokens, by drafter.", "source"
        )

    def watch(self, worker: Worker) -> None:
        """Add gauges for the load of a worker."""
        resources = worker.engine.resources
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "vllm:num_requests_running": ("Answers with a row.", lambda: worker.running),
            "vllm:num_requests_waiting": (
                "Waiting answers.", lambda: max(0, worker.open - worker.running)
            ),
            "vllm:kv_cache_usage_perc": ("Share of the memory.", lambda: resources.reserved),
            "draftsmith:kept_prefixes": ("Rows kept.", lambda: len(resources.prefixes)),
        }  # fmt: skip
        for name, (about, read) in gauges.items():
            made = Gauge(name, about, ["model_name"], registry=self._registry)
            made.labels(self._model).set_function(read)

    def observe(self, chunk: Chunk) -> None:
        """Record a chunk; the last chunk also records the result of its whole answer."""
        self.generated.inc(len(chunk.pieces))
        if chunk.result is None:
            return
        stats, new = chunk.result.stats, len(chunk.result.tokens)
        reason = chunk.result.finish_reason
        self.ended.labels(self._model, "abort" if reason == "cancelled" else reason).inc()
        self.whole.observe(chunk.seconds)
        self.queue.observe(chunk.queued)
        self.prompt_size.observe(stats.prompt_tokens)
        self.answer_size.observe(new)
        if new:
            first = stats.first_token_seconds
            self.first.observe(first)
            self.prefill.observe(max(0.0, first - chunk.queued))
            self.decode.observe(chunk.seconds - first)
            if new > 1:
                self.each.observe((chunk.seconds - first) / (new - 1))
        for field, total in self.sums:
            total.inc(getattr(stats, field))
        for place, accepted in enumerate(stats.accepted_by_depth):
            self.depth.labels(self._model, str(place)).inc(accepted)
        for source, entry in stats.by_source.items():
            self.source_drafted.labels(self._model, source).inc(entry.drafted)
            self.source_accepted.labels(self._model, source).inc(entry.accepted)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
