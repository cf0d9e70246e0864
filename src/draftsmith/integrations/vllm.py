"""Our drafters inside vLLM, as its `custom_class` proposer (docs/vllm.md).

    LLM(..., speculative_config={"method": "custom_class", "num_speculative_tokens": 8,
                                 "model": "draftsmith.integrations.vllm.Proposer"},
        additional_config={"draftsmith": {"drafter": "auto"}})

vLLM gives its proposer rows of token ids without the requests they belong to. So `attach` wraps the
one method that calls it, after checking its source. Any other vLLM is refused.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from math import inf
from time import perf_counter
from typing import Any

import torch

from draftsmith.core.cost import RecordedCost
from draftsmith.core.stats import SourceStats
from draftsmith.core.target import ModelFacts
from draftsmith.drafters import registry
from draftsmith.drafters.answer_cache import AnswerCache
from draftsmith.errors import LoadError, OptionError, UnknownName, UnsupportedError, first_line
from draftsmith.integrations.hosted import Asked, Host, Row
from draftsmith.model.load import read_tokenizer
from draftsmith.text.tokenizer import predicted
from draftsmith.text.vocab import fingerprint
from draftsmith.values import number

SUMMARY_SECONDS = 10.0
"""Seconds between two lines in the log, as in vLLM."""

CALLED = "propose_draft_token_ids(self, scheduler_output, sampled_token_ids, …)"
"""The method that `attach` wraps."""


@dataclass(frozen=True)
class Options:
    """Options in `additional_config={"draftsmith": {…}}`."""

    drafter: str = "auto"
    """Drafter as a string, e.g. `copyspec(gamma=3)`."""
    answers: int = 0
    """Bytes for earlier answers, from which `auto` then also drafts; 0: none."""
    cost: Mapping[str, float] | None = None
    """Draft tokens → seconds of a pass of one request, including "0". Bounds drafts to what pays.

    None: as long as the drafter chooses. Costs are never learned, so that all ranks draft alike.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.drafter, str):
            raise OptionError(f"drafter must be a name such as 'auto', got {self.drafter!r}")
        answers = number("answers", self.answers, int, least=0, note="(bytes)")
        object.__setattr__(self, "answers", answers)

    @classmethod
    def of(cls, config: Any) -> Options:
        """Read the options of a `VllmConfig`; raises OptionError."""
        extra = config.additional_config
        given = extra.get("draftsmith", {}) if isinstance(extra, Mapping) else {}
        if not isinstance(given, Mapping):
            raise OptionError(
                "additional_config['draftsmith'] must be a mapping of options such as "
                f'{{"drafter": "auto"}}, got {given!r}'
            )
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise UnknownName("option of additional_config['draftsmith']", name, known)
        return cls(**given)

    def curve(self) -> RecordedCost | None:
        """Return the cost of passes; raises OptionError."""
        if self.cost is None:
            return None
        try:
            seconds = {int(tokens): float(spent) for tokens, spent in self.cost.items()}
            seconds = {0: seconds.pop(0), **seconds}
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise OptionError(
                'cost must map draft tokens to seconds, "0" included, such as '
                f'{{"0": 0.020, "4": 0.021, "8": 0.024}}, got {self.cost!r}'
            ) from error
        for tokens, spent in seconds.items():
            if tokens < 0 or not 0 < spent < inf:
                raise OptionError(
                    "cost must map numbers of draft tokens to positive, finite seconds, got "
                    f"{spent} for {tokens} draft tokens in {self.cost!r}"
                )
        return RecordedCost(seconds)


class Proposer:
    """The class named by `speculative_config["model"]`; vLLM makes one in each drafting process."""

    def __init__(self, vllm_config: Any) -> None:
        """Raises UnsupportedError for a vLLM, a setting or a drafter that is not supported."""
        from vllm.logger import init_logger

        self.log = init_logger("vllm.draftsmith")
        if vllm_config.scheduler_config.async_scheduling:
            raise UnsupportedError(
                "with asynchronous scheduling, sampled tokens are not on the host when drafts are "
                "made; remove that option, or start with --no-async-scheduling"
            )
        attach()
        options, model = Options.of(vllm_config), vllm_config.model_config
        self.length = model.max_model_len
        self.tokenizer = _tokenizer(model)
        facts = facts_of(vllm_config, self.tokenizer)
        self.host = Host(
            registry.parse(options.drafter),
            facts,
            vllm_config.speculative_config.num_speculative_tokens,
            self.length,
            cost=options.curve(),
            answers=AnswerCache(options.answers, facts) if options.answers else None,
            warn=self.log.warning,
        )
        self.step: tuple[Any, Mapping[str, Sequence[int]]] | None = None
        """The runner that asks for drafts, and the drafts of its last pass."""
        self.seconds, self.drafts, self.skipped = 0.0, 0, 0
        """Seconds of drafting, requests drafted for, and steps skipped for `samples_wrongly`."""
        parallel = vllm_config.parallel_config
        self._counts = parallel.rank % parallel.tensor_parallel_size == 0
        """Every rank drafts for itself; only the first one counts and logs."""
        self._summarized = perf_counter()
        self._counted: dict[str, SourceStats] = {}
        self.log.info(
            "draftsmith drafts with %s, %d tokens at most", self.host.drafter,
            vllm_config.speculative_config.num_speculative_tokens,
        )  # fmt: skip

    def load_model(self, *_: Any, **__: Any) -> None:
        """Warn about defects of this vLLM. The drafter's own model is loaded already."""
        if self.samples_wrongly:
            self.log.warning(
                "this vLLM samples wrong tokens at temperatures above 0 when it verifies drafts on "
                "a CPU, with any proposer (vllm#55005); while such a request runs, no request gets "
                "drafts"
            )

    @cached_property
    def samples_wrongly(self) -> bool:
        """Whether temperatures of drafted tokens are wrong (vllm#55005): sampling gets no drafts.

        Tested late, because vLLM 0.29 has CPU kernels only after making the proposer.
        """
        from vllm.platforms import current_platform
        from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

        if not current_platform.is_cpu():
            return False
        values = torch.tensor([0.5, 2.0], device="cpu")
        ends = torch.tensor([1, 3], dtype=torch.int32, device="cpu")
        found: list[float] = expand_batch_to_tokens(values, ends, 3).tolist()
        return found != [0.5, 2.0, 2.0]

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,  # noqa: ARG002  vLLM names it
    ) -> list[list[int]]:
        """Return a draft for each row of a step; empty for rows that got no token (prefill).

        `num_tokens_no_spec` (B,) and `token_ids_cpu` (B, T) are NumPy arrays.
        """
        begin = perf_counter()
        if self.step is None:
            raise UnsupportedError(
                "the rows have no request ids, because this vLLM's model runner does not call "
                f"{CALLED} of GPUModelRunner"
            )
        (runner, scheduled), self.step = self.step, None
        names, records = runner.input_batch.req_ids, runner.requests
        self.host.keep(records)
        rows = {
            place: Row(
                names[place],
                records[names[place]],
                token_ids_cpu[place, : num_tokens_no_spec[place]],
                len(fresh),
                scheduled.get(names[place], ()),
            )
            for place, fresh in enumerate(sampled_token_ids)
            if fresh
        }
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self.samples_wrongly and any(map(_samples, records.values())):
            self.skipped += 1
            for row in rows.values():
                self.host.follow(row, self._asked)
        else:
            made = self.host.draft([*rows.values()], self._asked)
            for place, draft in zip(rows, made, strict=True):
                drafts[place] = draft
        self.seconds += perf_counter() - begin
        self.drafts += len(rows)
        self._notify()
        return drafts

    def _asked(self, row: Row) -> Asked:
        record: Any = row.record
        extra, size = record.sampling_params.extra_args or {}, self.host.model.vocab_size
        try:
            known = predicted(self.tokenizer, extra.get("prediction", ()), size)
        # An error here would end the engine for all requests
        except (TypeError, ValueError, LoadError) as error:
            self.log.warning("request %s continues without its prediction: %s", row.name, error)
            known = ()
        limit = record.sampling_params.max_tokens or self.length
        return Asked(record.num_prompt_tokens, limit, known, str(extra.get("cache_salt", "")))

    def _notify(self) -> None:
        """Update the counters by source, and log a summary every `SUMMARY_SECONDS` seconds."""
        if not self._counts:
            return
        for source, now in self.host.stats.by_source.items():
            before = self._counted.get(source, SourceStats())
            if now.drafted == before.drafted and now.accepted == before.accepted:
                continue
            drafted, accepted = counters()
            drafted.labels(source).inc(now.drafted - before.drafted)
            accepted.labels(source).inc(now.accepted - before.accepted)
            self._counted[source] = SourceStats(drafted=now.drafted, accepted=now.accepted)
        if perf_counter() - self._summarized > SUMMARY_SECONDS and self.drafts:
            self._summarized = perf_counter()
            self.log.info("%s", self.summary())

    def summary(self) -> str:
        """Return the effect of the drafts so far in a line."""
        stats = self.host.stats
        sources = ", ".join(
            f"{source} {one.accepted}/{one.drafted}" for source, one in stats.by_source.items()
        )
        skipped = (
            f"; {self.skipped} steps without drafts because of vllm#55005" if self.skipped else ""
        )
        return (
            f"draftsmith: {stats.tokens_per_pass:.2f} tokens per pass, accepted of drafted: "
            f"{sources or 'none'}; {1e6 * self.seconds / max(1, self.drafts):.0f} µs per "
            f"request and step{skipped}"
        )


@cache
def attach() -> None:
    """Tell our proposers which runner asks; raises UnsupportedError for an unknown vLLM.

    Done once per process. Runners with another proposer are not affected.
    """
    from vllm import __version__
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    plain = GPUModelRunner.propose_draft_token_ids
    check(textwrap.dedent(inspect.getsource(plain)), __version__)

    @functools.wraps(plain)
    def propose_draft_token_ids(self: Any, scheduler_output: Any, *args: Any, **named: Any) -> Any:
        if isinstance(self.drafter, Proposer):
            self.drafter.step = self, scheduler_output.scheduled_spec_decode_tokens
        return plain(self, scheduler_output, *args, **named)

    GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids


def check(source: str, version: str) -> None:
    """Raise UnsupportedError for a vLLM that calls proposers with other arguments than ours.

    `source` is that of `GPUModelRunner.propose_draft_token_ids`.
    """
    function = ast.parse(source).body[0]
    named = [arg.arg for arg in function.args.args] if isinstance(function, ast.FunctionDef) else []
    if named[1:3] != ["scheduler_output", "sampled_token_ids"]:
        raise UnsupportedError(
            f"vLLM {version} cannot host draftsmith: it has "
            f"propose_draft_token_ids({', '.join(named)}), expected {CALLED}"
        )
    ours = inspect.signature(Proposer.propose)
    call = next((call for call in _calls(function) if _custom(call[0])), None)
    if call is None:
        raise UnsupportedError(
            f"vLLM {version} cannot host draftsmith: it has no method 'custom_class' that calls "
            f"propose{ours}"
        )
    # Compare arguments by place and name: `self.input_batch.token_ids_cpu` is token_ids_cpu.
    given = [ast.unparse(argument).split(".")[-1] for argument in call[1].args]
    keywords = [str(keyword.arg) for keyword in call[1].keywords]
    known = [name for name in ours.parameters if name != "self"]
    if given != known[: len(given)] or not {*keywords} <= {*known[len(given) :]}:
        raise UnsupportedError(
            f"vLLM {version} cannot host draftsmith: it calls "
            f"propose({', '.join([*given, *(f'{name}=…' for name in keywords)])}), expected "
            f"propose{ours}"
        )


def _calls(function: ast.AST) -> list[tuple[ast.expr, ast.Call]]:
    """Calls of a `propose` in the source, each with the condition directly above it."""
    return [
        (branch.test, node)
        for branch in ast.walk(function)
        if isinstance(branch, ast.If)
        for statement in branch.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "propose"
    ]


def _custom(test: ast.expr) -> bool:
    """Whether a condition tests for our method."""
    return any(getattr(node, "value", None) == "custom_class" for node in ast.walk(test))


def facts_of(config: Any, tokenizer: Any) -> ModelFacts:
    """Return what drafters may know about the model of a `VllmConfig`."""
    model = config.model_config
    hf = model.hf_text_config
    return ModelFacts(
        layers=int(getattr(hf, "num_hidden_layers", 0)),
        heads=int(getattr(hf, "num_attention_heads", 0)),
        name=model.model,
        vocabulary=lambda: None if tokenizer is None else fingerprint(tokenizer),
        tokenizer=tokenizer,
        vocab_size=model.get_vocab_size(),
        device=str(config.device_config.device_type),
        shape="chain",
    )


def _tokenizer(model: Any) -> Any:
    """Read the tokenizer of a vLLM model; None if vLLM itself uses none."""
    if model.skip_tokenizer_init:
        return None
    try:
        return read_tokenizer(model.tokenizer, {})
    except LoadError as error:
        raise UnsupportedError(
            f"the tokenizer {model.tokenizer} cannot be read here ({first_line(error)}); start "
            "with skip_tokenizer_init=True, or without draftsmith"
        ) from error


def _samples(record: Any) -> bool:
    """Whether a request samples its tokens."""
    params = record.sampling_params
    return params is not None and params.temperature > 0


@cache
def counters() -> tuple[Any, Any]:
    """Prometheus counters of drafted and accepted tokens by source; one pair per process."""
    from prometheus_client import Counter

    drafted, accepted = "Drafted tokens by source.", "Accepted tokens by source."
    return (
        Counter("draftsmith:draft_tokens_by_source", drafted, ["source"]),
        Counter("draftsmith:accepted_tokens_by_source", accepted, ["source"]),
    )
