"""SDSAT's figures 3 to 5, of the arms that `recipes/sdsat/arms.sh` has trained.

    python -m benchmarks.sdsat_arms --texts WORK/texts --runs WORK/runs --out WORK/figures

`losses.png` is figure 5. Tables go to stdout; the second one is figures 3 and 4.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from draftsmith import Engine
from draftsmith.core.stats import total
from draftsmith.model.adaptive import AdaptiveTokens
from draftsmith.model.load import load
from draftsmith.text.tokenizer import encode, opening
from draftsmith.train.curves import draw, read
from draftsmith.train.evaluate import DEPTHS, standard_loss
from draftsmith.train.texts import Texts, sequences

FIGURE_5 = ("plain", "improved-5", "basic-5")
HELD_OUT = ("held_out_code.jsonl", "held_out_edits.jsonl")
PROMPTS = 4  # of each


def each_loss(folder: str, texts: Path, length: int) -> np.ndarray:
    """(N,) standard-token loss of each held-out sequence."""
    loaded = load(folder, dtype="float32")
    held_out = Texts(paths=[], held_out=[texts / name for name in HELD_OUT])
    stream = held_out.held_out_stream(loaded.tokenizer)
    rows = sequences(stream, length, "held-out texts", opening(loaded.tokenizer))
    suppressed = list(loaded.generation_config.suppress_tokens or ())

    def logits(ids: torch.Tensor) -> torch.Tensor:
        return loaded.model(input_ids=ids, use_cache=False).logits

    return np.array([standard_loss(logits, rows[i : i + 1], suppressed) for i in range(len(rows))])


def accepted(folder: Path, texts: Path) -> list[float]:
    """Live, greedy, two passes: how many of k drafts were accepted in the mean, for k = 1, 2, …"""
    loaded, adaptive = load(str(folder), dtype="bfloat16"), AdaptiveTokens.load(str(folder))
    asked = [
        encode(loaded.tokenizer, json.loads(line)["text"])[:256]
        for name in HELD_OUT
        for line in (texts / name).read_text("utf-8").splitlines()[:PROMPTS]
    ]
    found = []
    for k in range(1, adaptive.L if adaptive.diverse else DEPTHS + 1):
        engine = Engine(loaded, drafter=f"sdsat(k={k})", budget="drafter")
        results = [engine.generate(ids, max_new_tokens=64, temperature=0) for ids in asked]
        stats = total([result.stats for result in results])
        # Two passes are one loop of the paper, and only the second one carries a draft.
        found.append(stats.accepted / max(1, stats.attempts))
    return found


def line(*cells: object) -> None:
    """Print a row of a table."""
    print(f"| {' | '.join(map(str, cells))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--texts", "--runs", "--out"):
        parser.add_argument(name, type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = {path.parent.name: path.parent for path in sorted(args.runs.glob("*/config.json"))}
    args.out.mkdir(parents=True, exist_ok=True)
    draw({arm: read(runs[arm] / "training") for arm in FIGURE_5}, args.out / "losses.png")

    about = json.loads((runs["plain"] / "training" / "run.json").read_text("utf-8"))
    folders = {"before": about["about"]["model"]} | runs
    length = about["recipe"]["length"]
    losses = {arm: each_loss(str(path), args.texts, length) for arm, path in folders.items()}
    line("arm", "standard-token loss, held out", "above plain (paired, ± 2 s.e.)")
    line(*["---"] * 3)
    for arm, each in losses.items():
        gap = each - losses["plain"]
        error = 2 * gap.std(ddof=1) / len(gap) ** 0.5
        line(arm, f"{each.mean():.4f}", f"{gap.mean():+.4f} ± {error:.4f}")

    print()
    line("accepted per loop, by k", *range(1, DEPTHS + 1))
    line(*["---"] * (DEPTHS + 1))
    for arm, path in runs.items():
        if (path / "sdsat.json").exists():
            counts = accepted(path, args.texts)
            line(arm, *(f"{count:.2f}" for count in counts), *[""] * (DEPTHS - len(counts)))


if __name__ == "__main__":
    main()
