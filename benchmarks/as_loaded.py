"""`auto` as engines run it, beside transformers' prompt lookup on the layers as they were loaded.

    python -m benchmarks.as_loaded ../shared/data            # about 12 minutes on two quiet cores

First turns of the prompts of `live_smollm2`, greedy, in turn in one process. Only `auto`'s model
has its linear layers laid out, so this is what someone gains who comes from `model.generate`;
`live_smollm2` compares drafters on the same layers. In bfloat16 both arms may write another answer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.live_smollm2 import FILES, LOOKUP
from benchmarks.shared import asks, setup
from draftsmith.bench.arms import build, parse_arm
from draftsmith.bench.run import RunPlan
from draftsmith.bench.suites import read, sample
from draftsmith.bench.summary import interval, speed_ratio
from draftsmith.core.sampling import SamplingParams
from draftsmith.model.load import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="the folder with prompts/ and recorded/")
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--limit", type=int, default=3, help="conversations of each suite and task")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    records = sample([r for name in FILES for r in read(args.data / name).records], args.limit)
    print(setup())
    for dtype in args.dtypes:
        models = [load(args.model, dtype=dtype, prepack=packed) for packed in (True, False)]
        arms = [build(models[0], [parse_arm("auto")])[0], build(models[1], [parse_arm(LOOKUP)])[0]]
        plan = RunPlan(
            models[0], arms, records, SamplingParams(), max_new_tokens=args.max_new_tokens
        )
        asked = [ask for _, ask in asks(plan)]
        for arm in arms:
            arm.answer(asked[0])
        pairs = []
        for number, ask in enumerate(asked):
            answers = {arm: arm.answer(ask) for arm in (arms if number % 2 else arms[::-1])}
            pairs.append([(len(answers[arm].tokens), answers[arm].seconds) for arm in arms])
            print(f"{number + 1} of {len(asked)}: {speed_ratio(pairs[-1:]):.2f}", flush=True)
        found = interval(pairs, speed_ratio)
        print(f"{dtype}: {found.shown('×')} the tokens per second of {arms[1].name}", flush=True)


if __name__ == "__main__":
    main()
