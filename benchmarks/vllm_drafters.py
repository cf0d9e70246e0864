"""Our drafters beside vLLM's own `ngram` and `suffix`, with the Python that vLLM is installed for.

    python -m benchmarks.vllm_drafters replay ../shared/data [--count 20]
    python -m benchmarks.vllm_drafters cost ../shared/data
    python -m benchmarks.vllm_drafters live FOLDER PROMPTS.jsonl

`replay`: the very proposers on recorded answers, as if the target had just written them; no model.
Tokens per pass at equal drafted tokens: `auto` is drawn as a curve over what a drafted token is
said to cost, with as long drafts as the other's, and read where that one's drafted tokens per pass
are. `cost`: processor time of drafting at 8,192 tokens of context, 32 requests. Where vLLM is not
installed these two run ours alone. `live`: vLLM itself, each proposer in a process of its own, on
the same prompts, which are lists of token ids, one a line.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import chain, groupby
from pathlib import Path
from statistics import median
from time import process_time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.named_suites import recorded
from draftsmith.bench.encoding import Encoding
from draftsmith.bench.suites import parts, sample

LONGEST = 32_768
COSTS = (0.0, 0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.5, 0.8, 1.5)
"""What a drafted token is said to cost, in plain passes: the dearer, the choosier ours are."""
SUITES = ("mt-bench", "mt-redundant", "spec-bench", "humaneval", "gsm8k-json", "commit-edits")
MEMORY = 64_000_000
"""Bytes of earlier answers, for the arm that has them; `suffix` keeps 10,000 answers."""
LOGGER: Any = SimpleNamespace(init_logger=logging.getLogger)
"""All that our proposer asks of vLLM by itself, for where that is not installed."""


@dataclass
class Batch:
    """The rows that proposers look at, with vLLM's names."""

    token_ids_cpu: Any
    num_tokens_no_spec: Any
    num_prompt_tokens: Any
    req_ids: list[str]
    requests: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], room: int, tag: str) -> Batch:
        """Rows that hold the prompts, and have room for answers."""
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
    """As much of a `VllmConfig` as proposers read."""
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
            patch("draftsmith.integrations.vllm.attach"),  # no engine is here that would call it
            patch.dict(sys.modules, {} if find_spec("vllm") else {"vllm.logger": LOGGER}),
        ):
            self.proposer = Proposer(config(tokens, vocab, **options))
        self.proposer.samples_wrongly = False  # nobody samples here

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
WEIGHING = ("auto", "auto, earlier answers")


@dataclass
class Count:
    """What proposers brought."""

    passes: int = 0
    tokens: int = 0
    drafted: int = 0
    times: list[float] = field(default_factory=list)
    """Processor seconds of each step but the first, by request."""
    seconds: float = 0.0
    """Of all these steps together."""

    @property
    def per_pass(self) -> tuple[float, float]:
        """Drafted tokens, and tokens."""
        return self.drafted / self.passes, self.tokens / self.passes


def decode(proposer: Any, batch: Batch, answers: Sequence[Sequence[int]], count: Count) -> float:
    """Write the answers into the rows, as fast as drafts allow; seconds of the first step."""
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


def replay(data: Path, count: int) -> None:
    """Print for each suite what each of vLLM's brings, and ours at as many drafted tokens."""
    encoding = Encoding((data / "tokenizers",))
    for suite in SUITES:
        records = sample([r for r in recorded(suite, data) if r.answered], count)
        named = sorted(zip(parts(records), records, strict=True), key=lambda pair: pair[0])
        for part, members in groupby(named, key=lambda pair: pair[0]):
            _compare(part, [encoding(record) for _, record in members])


def _compare(part: str, records: Sequence[Any]) -> None:
    vocab = max(one.vocab_size for one in records)

    def run(make: Callable[..., Any], width: int) -> Count:
        proposer, found = make(width, vocab), Count()
        for number, one in enumerate(records):
            batch = Batch.of([one.prompt], len(one.answer) + 1, str(number))
            decode(proposer, batch, [one.answer], found)
        return found

    print(f"\n{part}: {len(records)} answers", flush=True)
    for width in (4, 8):
        curves = {
            name: [
                run(partial(OURS[name], cost={"0": 1.0, "64": 1 + 64 * cost}), width)
                for cost in COSTS
            ]
            for name in WEIGHING
        }
        for name in ("prompt_lookup", "copyspec"):
            print(f"  {name}, {width} at most: {_told(run(OURS[name], width))}")
        for name, curve in curves.items():
            points = "  ".join("{:.2f}→{:.2f}".format(*found.per_pass) for found in curve)
            print(f"  {name}, {width} at most: {points}; {_micro(curve[1])} µs")
        for name, make in THEIRS.items():
            try:
                found = run(make, width)
            except ImportError as error:
                print(f"  {name}: {error}")
                continue
            beside = ", ".join(f"{o} {_at(c, found.per_pass[0]):.2f}" for o, c in curves.items())
            print(f"  {name}, {width} at most: {_told(found)}; there {beside}", flush=True)


def _told(found: Count) -> str:
    drafted, tokens = found.per_pass
    return f"{drafted:.2f} drafted, {tokens:.2f} tokens a pass, {_micro(found)} µs"


def _at(curve: Sequence[Count], drafted: float) -> float:
    """Tokens a pass on a curve where it drafts as much; at its end where it never does."""
    points = sorted({(0.0, 1.0), *(found.per_pass for found in curve)})
    return float(np.interp(drafted, *zip(*points, strict=True)))


def _micro(found: Count) -> str:
    return f"{1e6 * median(found.times):.0f}" if found.times else "-"


def cost(data: Path, rows: int, context: int) -> None:
    """Print what drafting takes a request and step, on real text, behind so long a context."""
    encoding = Encoding((data / "tokenizers",))
    records = [r for r in recorded("commit-edits", data) if r.answered]
    encoded = (encoding(record) for record in records)
    stream = chain.from_iterable((*one.prompt, *one.answer) for one in encoded)
    length = context + 200
    ids = [token for token, _ in zip(stream, range(rows * length), strict=False)]
    texts = [ids[i * length : (i + 1) * length] for i in range(rows)]
    vocab = max(ids) + 1
    for name, make in {**THEIRS, **OURS}.items():
        try:
            proposer = make(8, vocab)
        except ImportError as error:
            print(f"{name}: {error}")
            continue
        for turn in ("cold", "warm"):  # what is compiled is compiled once
            found = Count()
            batch = Batch.of([text[:context] for text in texts], 201, turn)
            first = decode(proposer, batch, [text[context:] for text in texts], found)
        times = sorted(1e6 * spent for spent in found.times)
        token = 1e6 * found.seconds / found.tokens
        print(
            f"{name}: {median(times):.0f} µs a request and step (nine in ten below "
            f"{times[len(times) * 9 // 10]:.0f}), {token:.0f} a token; "
            f"first {1e3 * first / rows:.2f} ms a request; "
            "{:.2f} drafted, {:.2f} tokens a pass".format(*found.per_pass),
            flush=True,
        )


def live(folder: str, prompts: Path, tokens: int, width: int) -> None:
    """Print what vLLM itself does with each proposer on the same prompts."""
    asked = [json.loads(line) for line in prompts.read_text().splitlines()]
    spec = {"num_speculative_tokens": width}
    ours = {"method": "custom_class", "model": "draftsmith.integrations.vllm.Proposer", **spec}
    arms: dict[str, dict[str, Any]] = {"plain": {}}
    ngram = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, **spec}
    arms["ngram(1..3)"] = {"speculative_config": ngram}
    arms["suffix"] = {"speculative_config": {"method": "suffix", **spec}}
    for drafter in ("copyspec", "prompt_lookup", "auto"):
        options = {"draftsmith": {"drafter": drafter}}
        arms[drafter] = {"speculative_config": ours, "additional_config": options}
    plain = None
    for name, options in arms.items():
        llm = {
            "model": folder, "dtype": "float32", "enforce_eager": True, "max_model_len": 2048,
            "max_num_seqs": 32, "seed": 0, "disable_log_stats": False, **options,
        }  # fmt: skip
        job = {"llm": llm, "prompts": asked, "max_tokens": tokens, "one_process": True}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("vllm_session.py"))],
            input=json.dumps(job), capture_output=True, text=True,
            env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )  # fmt: skip
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        made = next(line for line in done.stdout.splitlines() if line.startswith('{"answers"'))
        found = json.loads(made)
        plain = plain or found["answers"]
        counts = found["metrics"]
        drafted = counts.get("vllm:spec_decode_num_draft_tokens", 0)
        accepted = counts.get("vllm:spec_decode_num_accepted_tokens", 0)
        passes = counts["vllm:generation_tokens"] - accepted
        same = sum(a == b for a, b in zip(plain[0], found["answers"][0], strict=True))
        per_step = 1e6 * found["seconds"] / max(1, found.get("asked", 0))
        print(
            f"{name}: {counts['vllm:generation_tokens'] / passes:.3f} tokens a pass, "
            f"{drafted / passes:.3f} drafted, {per_step:.0f} µs a request and step, "
            f"{found['wall']:.1f} s in all, {same} of {len(asked)} answers as without drafts",
            flush=True,
        )


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ways = parser.add_subparsers(dest="way", required=True)
    replaying = ways.add_parser("replay")
    replaying.add_argument("data", type=Path)
    replaying.add_argument("--count", type=int, default=20)
    costing = ways.add_parser("cost")
    costing.add_argument("data", type=Path)
    costing.add_argument("--rows", type=int, default=32)
    costing.add_argument("--context", type=int, default=8192)
    living = ways.add_parser("live")
    living.add_argument("folder")
    living.add_argument("prompts", type=Path)
    living.add_argument("--tokens", type=int, default=64)
    living.add_argument("--width", type=int, default=8)
    given = vars(parser.parse_args(None if arguments is None else [*arguments]))
    {"replay": replay, "cost": cost, "live": live}[given.pop("way")](**given)


if __name__ == "__main__":
    main()
