"""Several requests at once: plain, `auto`, and transformers' own continuous batching.

    python -m benchmarks.under_load DATA        # 25 minutes on two quiet cores
    python -m benchmarks.under_load --quick     # two, on prompts of the demo

For 1 to 16 callers: four prompts of each caller per round, of which one per caller decodes at any
time. Built-in models get held-out edits, all others Spec-Bench, MT-Redundant, HumanEval and edits.
Every arm is a process with a model with laid-out linear layers, and an engine that keeps no
prefixes (`benchmarks/load.py` describes their turns). The table has tokens per second, greedy, and
tokens per pass. The exit code is 1 if `auto` is slower than plain.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import torch
from transformers import GenerationConfig

from benchmarks import load
from benchmarks.shared import Blocks, Options, run
from draftsmith import Engine, builtin
from draftsmith.engine.request import end_ids
from draftsmith.model import load as models
from draftsmith.model.loaded import last_part
from draftsmith.text.tokenizer import render_chat

PEER = "generate_batch"
ARMS = (load.PLAIN, load.AUTO, PEER)


def parser() -> Options:
    made = Options("under_load", __doc__, data="optional")
    made.add_argument("--models", nargs="+", default=["edit-7m", "smollm2"])
    made.add_argument("--dtypes", nargs="+", default=["float32"])
    made.add_size("--at-once", [1, 2, 4, 8, 16], [2], "numbers of callers", nargs="+")
    made.add_size("--limit", 64, 8, "different prompts")
    made.add_size("--tokens", 64, 8, "most tokens of an answer")
    made.add_size("--rounds", 6, 1, "rounds of plain and auto; fewer callers have more")
    made.add_size("--peer-rounds", 2, 1, "rounds of generate_batch")
    made.set_defaults(requests=4, warm=load.MANY)
    return made


def answering(arm: str, name: str, dtype: str, threads: int) -> load.Answerer:
    """Load a model in this process, and return a function that answers with it."""
    torch.set_num_threads(threads)
    with ThreadPoolExecutor(1) as once:  # its OpenMP threads end with it
        model = once.submit(models.load, name, dtype=dtype, prepack=True).result()
    engines: dict[int, Engine] = {}

    def ours(prompts: list[list[int]], at_once: int, tokens: int) -> list[load.Answer]:
        if at_once not in engines:
            engines[at_once] = Engine(model, drafter=arm, max_batch=at_once, prefixes=0)
        results = engines[at_once].generate(prompts, max_new_tokens=tokens, temperature=0)
        return [(result.tokens, result.stats.passes) for result in results]

    def theirs(prompts: list[list[int]], at_once: int, tokens: int) -> list[load.Answer]:
        from transformers import ContinuousBatchingConfig  # since transformers 5

        blocks = at_once * ((max(map(len, prompts)) + tokens) // 32 + 2)
        settings = ContinuousBatchingConfig(  # the best settings of those tried
            page_size=32, num_blocks=blocks, max_batch_tokens=256, max_requests_per_batch=at_once,
            scheduler_type="prefill_first", allow_block_sharing=False, auto_switch_to_flash=False,
        )  # fmt: skip
        greedy = GenerationConfig(do_sample=False, eos_token_id=end_ids(model) or -1)
        how = {"warmup": False, "max_new_tokens": tokens}
        found = model.model.generate_batch(prompts, greedy, settings, **how)
        answers = [list(one.generated_tokens) for one in found.values() if not one.error]
        if len(answers) < len(prompts):
            raise RuntimeError(f"{len(answers)} of {len(prompts)} prompts were answered")
        return [(answer, len(answer)) for answer in answers]

    return theirs if arm == PEER else ours


def measure(args: argparse.Namespace) -> Blocks:
    broken = False
    for name, dtype in product(args.models, args.dtypes):
        tokenizer, title = models.read_tokenizer(name, {}), f"{last_part(name)}, {dtype}"
        chats = load.chats(name, tokenizer, args.data, args.limit)
        prompts = [render_chat(tokenizer, chat) for chat in chats]
        how = name, dtype, args.threads
        arms = {arm: partial(load.Worker, answering, arm, *how) for arm in ARMS}
        programs = dict.fromkeys(ARMS, builtin.resolve(name))
        found = load.Load(args, title, arms, programs, prompts).compare()
        broken |= load.slower(found)
        yield load.block(title, found, ["tokens/pass"], load.per_pass)
    return broken


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
