"""vLLM's proposers and ours, run without vLLM on rows with recorded answers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from time import process_time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from draftsmith.lab.bench.encoding import Encoded

LONGEST = 32_768
MEMORY = 64_000_000
"""Bytes of earlier answers, for the arm that has them; `suffix` keeps 10,000 answers."""
LOGGER: Any = SimpleNamespace(init_logger=logging.getLogger)
"""All that our proposer imports from vLLM, if that is not installed."""


@dataclass
class Batch:
    """The rows that proposers read, with vLLM's names."""

    token_ids_cpu: Any
    num_tokens_no_spec: Any
    num_prompt_tokens: Any
    req_ids: list[str]
    requests: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], room: int, tag: str) -> Batch:
        """Make rows with the prompts, and room for answers."""
        ids = np.zeros((len(prompts), max(map(len, prompts)) + room), np.int32)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        lengths = np.array([*map(len, prompts)], np.int32)
        names = [f"{tag}-{i}" for i in range(len(prompts))]
        params = SimpleNamespace(extra_args=None, max_tokens=room, temperature=0.0)
        records = {
            name: SimpleNamespace(sampling_params=params, num_prompt_tokens=len(prompt))
            for name, prompt in zip(names, prompts, strict=True)
        }
        return cls(ids, lengths.copy(), lengths, names, records)

    @property
    def req_id_to_index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.req_ids)}


def config(tokens: int, vocab: int, **options: Any) -> Any:
    """Return the part of a `VllmConfig` that proposers read."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=tokens, prompt_lookup_min=options.pop("least", 5),
            prompt_lookup_max=options.pop("most", 5), suffix_decoding_max_tree_depth=24,
            suffix_decoding_max_cached_requests=10_000, suffix_decoding_max_spec_factor=1.0,
            suffix_decoding_min_token_prob=0.1,
        ),
        model_config=SimpleNamespace(
            max_model_len=LONGEST, skip_tokenizer_init=True, model="", tokenizer="",
            hf_text_config=None, get_vocab_size=lambda: vocab,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=64, async_scheduling=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
        device_config=SimpleNamespace(device_type="cpu"),
        additional_config={"draftsmith": options},
    )  # fmt: skip


class Ours:
    def __init__(self, tokens: int, vocab: int, **options: Any) -> None:
        from draftsmith.integrations.vllm import Proposer

        with (
            patch("draftsmith.integrations.vllm.attach"),  # there is no engine to attach to
            patch.dict(sys.modules, {} if find_spec("vllm") else {"vllm.logger": LOGGER}),
        ):
            self.proposer = Proposer(config(tokens, vocab, **options))
        self.proposer.samples_wrongly = False  # no request samples here

    def __call__(self, batch: Batch, fresh: Any, scheduled: dict[str, list[int]]) -> Any:
        self.proposer.step = SimpleNamespace(input_batch=batch, requests=batch.requests), scheduled
        return self.proposer.propose(fresh, batch.num_tokens_no_spec, batch.token_ids_cpu)


class Ngram:
    def __init__(self, tokens: int, vocab: int, **options: Any) -> None:
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        self.proposer, self.tokens = NgramProposer(config(tokens, vocab, **options)), tokens

    def __call__(self, batch: Batch, fresh: Any, _: Any) -> Any:
        lengths, ids = batch.num_tokens_no_spec, batch.token_ids_cpu
        return self.proposer.propose(self.tokens, fresh, lengths, ids)


class Suffix:
    def __init__(self, tokens: int, vocab: int) -> None:
        from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

        self.proposer, self.tokens = SuffixDecodingProposer(config(tokens, vocab)), tokens

    def __call__(self, batch: Batch, fresh: Any, _: Any) -> Any:
        return self.proposer.propose(self.tokens, batch, fresh)


THEIRS: dict[str, Callable[..., Any]] = {
    "ngram": Ngram,
    "ngram(1..3)": partial(Ngram, least=1, most=3),
    "suffix": Suffix,
}
OURS: dict[str, Callable[..., Any]] = {
    "auto": partial(Ours, drafter="auto"),
    "auto, earlier answers": partial(Ours, drafter="auto", answers=MEMORY),
    "prompt_lookup": partial(Ours, drafter="prompt_lookup"),
    "copyspec": partial(Ours, drafter="copyspec"),
}


def proposers() -> dict[str, Callable[..., Any]]:
    """Return the proposers that can be made here, vLLM's own first; print which cannot."""
    found: dict[str, Callable[..., Any]] = {}
    for name, make in (THEIRS | OURS).items():
        try:
            make(8, 100)
            found[name] = make
        except ImportError as error:
            print(f"without {name}: {error}")
    return found


@dataclass
class Count:
    """Results of a proposer."""

    passes: int = 0
    tokens: int = 0
    drafted: int = 0
    times: list[float] = field(default_factory=list)
    """Processor seconds of each step but the first, per request."""
    seconds: float = 0.0
    """Total of all these steps."""

    @property
    def per_pass(self) -> tuple[float, float]:
        """Drafted tokens, and emitted tokens."""
        return self.drafted / self.passes, self.tokens / self.passes


def decode(proposer: Any, batch: Batch, answers: Sequence[Sequence[int]], count: Count) -> float:
    """Write the answers into the rows as fast as drafts allow; return seconds of the first step."""
    drafts: list[list[int]] = [[] for _ in answers]
    done, first = [0] * len(answers), 0.0
    while any(n < len(answer) for n, answer in zip(done, answers, strict=True)):
        fresh, scheduled = [], {}
        for i, (answer, draft) in enumerate(zip(answers, drafts, strict=True)):
            rest = answer[done[i] : done[i] + len(draft) + 1]
            right = next((n for n, t in enumerate(draft) if [t] != [*rest[n : n + 1]]), len(draft))
            tokens = [*rest[: right + 1]]
            if draft:
                scheduled[batch.req_ids[i]] = draft
            start = batch.num_tokens_no_spec[i]
            batch.token_ids_cpu[i, start : start + len(tokens)] = tokens
            batch.num_tokens_no_spec[i] += len(tokens)
            done[i] += len(tokens)
            if tokens and done[i] > len(tokens):  # the prompt's own pass carries no draft
                count.passes += 1
                count.tokens += len(tokens)
                count.drafted += len(draft)
            fresh.append(tokens)
        begin = process_time()
        drafts = proposer(batch, fresh, scheduled)
        spent = process_time() - begin
        if first:
            count.times.append(spent / sum(map(bool, fresh)))
            count.seconds += spent
        first = first or spent
    return first


def replayed(
    make: Callable[..., Any], answers: Sequence[Encoded], width: int
) -> tuple[float, float]:
    """Return drafted tokens and tokens per pass of a proposer, on answers one after another."""
    proposer, found = make(width, max(one.vocab_size for one in answers)), Count()
    for number, one in enumerate(answers):
        batch = Batch.of([one.prompt], len(one.answer) + 1, str(number))
        decode(proposer, batch, [one.answer], found)
    return found.per_pass
