"""Draw a run's log: `python plot.py --log log.csv --out loss.png` (needs matplotlib)."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SHOWN = {
    "repeat_random": "repeated random span",
    "copied": "commits, copied part",
    "changed": "commits, changed part",
    "synth_copied": "instructions, copied part",
    "synth_changed": "instructions, changed part",
    "text": "documents and code",
    "instruct": "answers to questions",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smooth", type=float, default=0.8)
    args = parser.parse_args()
    rows = list(csv.DictReader(args.log.open(encoding="utf-8")))
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=100)
    for column, label in SHOWN.items():
        places, losses = [], []
        for row in rows:
            if row[column]:
                value = float(row[column])
                losses.append(
                    args.smooth * losses[-1] + (1 - args.smooth) * value if losses else value
                )
                places.append(int(row["tokens"]) / 1e6)
        axes.plot(places, losses, label=label)
    axes.set(xlabel="tokens (millions)", ylabel="loss", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(args.out)


if __name__ == "__main__":
    main()
