"""Tables and plots of the arms: `python figures.py --texts T --runs R --out DIR`.

`losses.png` is figure 5, `accepted.png` figures 3 and 4 (left halves). Tables go to stdout.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiments import ARMS, texts
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from draftsmith import Engine
from draftsmith.core.stats import total
from draftsmith.model.load import load
from draftsmith.text.tokenizer import encode, opening
from draftsmith.train.curves import draw, read
from draftsmith.train.evaluate import DEPTHS, standard_loss
from draftsmith.train.texts import sequences

FIGURE_5 = ("plain", "improved-5", "basic-5")


def each_loss(folder: str, held_out: Path, length: int) -> np.ndarray:
    """(N,) standard-token loss of each held-out sequence."""
    loaded = load(folder, dtype="float32")
    stream = texts(held_out).held_out_stream(loaded.tokenizer)
    rows = sequences(stream, length, "held-out texts", opening(loaded.tokenizer))
    suppressed = list(loaded.generation_config.suppress_tokens or ())

    def logits(ids: torch.Tensor) -> torch.Tensor:
        return loaded.model(input_ids=ids, use_cache=False).logits

    return np.array([standard_loss(logits, rows[i : i + 1], suppressed) for i in range(len(rows))])


def loss_table(runs: dict[str, Path], base: str, held_out: Path, length: int) -> None:
    """Held-out loss of each arm, and its paired difference to plain fine-tuning."""
    losses = {"before": each_loss(base, held_out, length)}
    losses |= {arm: each_loss(str(folder), held_out, length) for arm, folder in runs.items()}
    print("| arm | standard-token loss, held out | above plain (paired, ± 2 s.e.) |\n|---|---|---|")
    for arm, each in losses.items():
        gap = each - losses["plain"]
        error = 2 * gap.std(ddof=1) / len(gap) ** 0.5
        print(f"| {arm} | {each.mean():.4f} | {gap.mean():+.4f} ± {error:.4f} |")


def accepted(folder: Path, held_out: Path, prompts: int, tokens: int) -> list[dict[str, Any]]:
    """Live, greedy, two passes: what of k drafts was accepted, by k."""
    settings = json.loads((folder / "sdsat.json").read_text(encoding="utf-8"))
    loaded = load(str(folder), dtype="bfloat16")
    asked = [
        encode(loaded.tokenizer, json.loads(line)["text"])[:256]
        for name in ("code", "edits")
        for line in (held_out / f"held_out_{name}.jsonl").read_text("utf-8").splitlines()[:prompts]
    ]
    deepest = settings["L"] - 1 if len(settings["tokens"]) > 1 else DEPTHS
    found = []
    for k in range(1, deepest + 1):
        engine = Engine(loaded, drafter=f"sdsat(k={k})", budget="drafter")
        results = [engine.generate(ids, max_new_tokens=tokens, temperature=0) for ids in asked]
        stats = total([result.stats for result in results])
        # Two passes are one loop of the paper, and only the second one carries a draft.
        mean = stats.accepted / max(1, stats.attempts)
        found.append(
            {"k": k, "accepted": mean, "rate": mean / k, "per_pass": stats.tokens_per_pass}
        )
    return found


def depth_tables(runs: dict[str, Path], live: dict[str, list[dict[str, Any]]]) -> None:
    """By depth on the text itself, and by k in decoding."""
    ks = range(1, DEPTHS + 1)
    print("\n| right by depth | " + " | ".join(map(str, ks)) + " |\n|---|" + "---|" * len(ks))
    for arm, folder in runs.items():
        measured = json.loads((folder / "training" / "measured.json").read_text("utf-8"))
        if measured["depths"]:
            row = [f"{share:.2f}" for share in measured["depths"]["accuracy"]]
            print(f"| {arm} | " + " | ".join(row + [""] * (len(ks) - len(row))) + " |")
    print(
        "\n| accepted per loop, by k | " + " | ".join(map(str, ks)) + " |\n|---|" + "---|" * len(ks)
    )
    for arm, rows in live.items():
        cells = [f"{row['accepted']:.2f}" for row in rows]
        print(f"| {arm} | " + " | ".join(cells + [""] * (len(ks) - len(cells))) + " |")


def draw_accepted(live: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Accepted adaptive tokens, and their share of k, against k."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name, title in zip(
        figure.subplots(1, 2), ("accepted", "rate"),
        ("adaptive tokens accepted per loop", "accept rate"), strict=True,
    ):  # fmt: skip
        for arm, rows in live.items():
            axes.plot(
                [r["k"] for r in rows], [r[name] for r in rows], "o-", label=arm, markersize=3
            )
        axes.set_xlabel("k")
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    runs = {arm: args.runs / arm for arm in ARMS if (args.runs / arm / "config.json").exists()}
    about = json.loads((runs["plain"] / "training" / "run.json").read_text("utf-8"))
    args.out.mkdir(parents=True, exist_ok=True)
    curves = {arm: read(runs[arm] / "training") for arm in FIGURE_5 if arm in runs}
    draw(curves, args.out / "losses.png")
    loss_table(runs, about["about"]["model"], args.texts, about["recipe"]["length"])
    live = {
        arm: accepted(folder, args.texts, args.prompts, args.tokens)
        for arm, folder in runs.items()
        if (folder / "sdsat.json").exists()
    }
    depth_tables(runs, live)
    draw_accepted(live, args.out / "accepted.png")
    (args.out / "accepted.json").write_text(json.dumps(live, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
