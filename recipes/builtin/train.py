"""Train a model from prepared rows: `python train.py --config edit-7m.toml --data D --run R`.

Stops at `--tokens`; with `--hours` the schedule is squeezed so that it ends in that time at the
latest. Started again with the same arguments it goes on from the last checkpoint, and draws the
rows it would have drawn.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from common import SPECIALS
from headstart import MATCH, head_start
from rows import CHANGED, COPIED, PROMPT, Sampler
from tokenizers import Tokenizer
from torch import Tensor

from model import Network, fresh, states

BLOCK = 1024  # the loss is taken at a multiple of so many places
SAMPLE = 2048  # tokens of text that say how large things are in fresh weights
WRITTEN = f"model.layers.{MATCH}.self_attn"  # where what copying heads say may change
WRITTEN_RATE = 0.1
SHOWN = {"copied": COPIED, "changed": CHANGED, "text": PROMPT}
COLUMNS = ["step", "tokens", "seconds", "rate", "loss", *SHOWN]


@dataclass(frozen=True)
class Config:
    """A .toml file."""

    name: str
    seed: int
    substitutes: bool  # follows "rename a to b" from the start, see substitute.py
    learning_rate: float
    matrix_learning_rate: float
    weight_decay: float
    warmup_steps: int
    decay_from: float
    lengths: dict[str, float]
    mixture: dict[str, float]
    spans: list[int]
    batch_tokens: int
    weights: list[float]  # in the loss: skipped, copied, changed, prompt or text
    sizes: dict[str, float]

    @staticmethod
    def load(path: Path) -> Config:
        return Config(**tomllib.loads(path.read_text(encoding="utf-8")))

    def rate(self, step: int, progress: float) -> float:
        """Warm up, stay, then fall linearly: what `progress` measures may end at any time."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        fall = (1.0 - progress) / (1.0 - self.decay_from)
        return warm * max(0.02, min(1.0, fall))

    def length(self, step: int) -> int:
        """Of the rows of a step."""
        lengths = sorted(self.lengths, key=int)
        odds = np.array([self.lengths[name] for name in lengths])
        draw = np.random.default_rng([self.seed, step, 1])
        return int(lengths[draw.choice(len(lengths), p=odds / odds.sum())])


def optimizers(network: Network, config: Config) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the network, AdamW for the embedding and the norms.

    The heads that a head start has written already copy: they change more slowly than the rest,
    or the first steps, meant for noise, would wash them out.
    """
    matrices: list[Tensor] = []
    written: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        inner = parameter.dim() == 2 and "embed_tokens" not in name
        known = name.startswith(WRITTEN)
        (written if inner and known else matrices if inner else others).append(parameter)
    muon, adamw = config.matrix_learning_rate, config.learning_rate
    groups = [{"params": matrices, "highest": muon}]
    if written:
        groups.append({"params": written, "highest": muon * WRITTEN_RATE})
    return [
        torch.optim.Muon(
            groups, lr=muon, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(
            [{"params": others, "highest": adamw}],
            lr=adamw, betas=(0.9, 0.98), weight_decay=0.0, fused=True,
        ),
    ]  # fmt: skip


def loss_of(hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """Weighted mean of the losses, and the losses (R, T), 0 where there is no weight."""
    used = weights.flatten().nonzero()[:, 0]
    # Whole blocks only: a new shape at every step would fill the matrix library's cache.
    places = functional.pad(used, (0, -len(used) % BLOCK))
    logits = (hidden.flatten(0, 1)[places] @ table.T).float()
    found = functional.cross_entropy(logits, targets.flatten()[places], reduction="none")
    found = found[: len(used)]
    shown = torch.zeros(weights.numel(), device=found.device)
    shown[used] = found.detach()
    total = (found * weights.flatten()[used]).sum() / weights.sum().clamp_min(1e-6)
    return total, shown.view(weights.shape)


def save(path: Path, state: dict[str, Any]) -> None:
    """Write beside the old checkpoint and swap: a crash leaves one of the two whole."""
    new = path.with_suffix(".new")
    torch.save(state, new)
    os.replace(new, path)


class Run:
    """A training under way."""

    def __init__(self, config: Config, data: Path, folder: Path, device: str) -> None:
        torch.manual_seed(config.seed)
        tokenizer = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
        vocabulary = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
        if vocabulary[: len(SPECIALS)] != SPECIALS:
            raise ValueError("the special tokens do not come first in the vocabulary")
        self.config, self.device = config, torch.device(device)
        self.network = fresh(**config.sizes)
        self.sampler = Sampler(data, config.mixture, config.seed, len(vocabulary))
        sample = torch.from_numpy(self.sampler.text.ids[:SAMPLE].astype(np.int64))
        self.circuit = head_start(self.network, sample, vocabulary if config.substitutes else None)
        self.circuit.to(self.device)
        self.network.to(self.device)
        self.steppers = optimizers(self.network, config)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.path = folder / "last.pt"
        if self.path.exists():
            state = torch.load(self.path, map_location=self.device, weights_only=True)
            self.network.load_state_dict(state["network"])
            for stepper, saved in zip(self.steppers, state["steppers"], strict=True):
                stepper.load_state_dict(saved)
            self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]

    def checkpoint(self) -> None:
        state: dict[str, Any] = {
            name: getattr(self, name) for name in ("step", "tokens", "seconds")
        }
        state["network"] = self.network.state_dict()
        state["steppers"] = [stepper.state_dict() for stepper in self.steppers]
        state["sizes"] = self.config.sizes
        save(self.path, state)

    def train_step(self, states_of: Any, progress: float) -> dict[str, float]:
        """One step; returns its row of the log."""
        since = time.monotonic()
        config = self.config
        length = config.length(self.step)
        rows = max(1, config.batch_tokens // length)
        ids, classes = self.sampler.batch(self.step, length, rows, config.spans)
        batch = torch.from_numpy(ids).to(self.device)
        label = torch.from_numpy(classes[:, 1:].copy()).to(self.device).long()
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            hidden = states_of(
                self.network, batch[:, :-1], still=MATCH + config.substitutes, dtype=torch.bfloat16
            )
            table = self.network.model.embed_tokens.weight
            weights = torch.tensor(config.weights, device=self.device)[label]
            loss, losses = loss_of(hidden, table, batch[:, 1:], weights)
        loss.backward()
        rate = config.rate(self.step, progress)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for stepper in self.steppers:
            for group in stepper.param_groups:
                group["lr"] = group["highest"] * rate
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        self.circuit.protect(self.network)
        self.step += 1
        self.tokens += rows * length
        self.seconds += time.monotonic() - since
        kinds = {name: losses[label == kind].mean().item() for name, kind in SHOWN.items()}
        return {
            "step": self.step, "tokens": self.tokens, "seconds": self.seconds, "rate": rate,
            "loss": loss.item(), **{name: loss for name, loss in kinds.items() if loss == loss},
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--tokens", type=float, required=True, help="where the schedule ends")
    parser.add_argument("--hours", type=float, help="end by then at the latest")
    parser.add_argument("--stop-at", type=float, help="stop here, to be resumed; 0: at once")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--checkpoint-minutes", type=float, default=5.0)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    args.run.mkdir(parents=True, exist_ok=True)
    run = Run(Config.load(args.config), args.data, args.run, args.device)
    print(f"{run.network.num_parameters() / 1e6:.2f}M parameters, from step {run.step}", flush=True)
    torch._dynamo.config.recompile_limit = 64
    states_of = states if args.no_compile else torch.compile(states, dynamic=False)
    asked_to_stop = False

    def stop(*_: object) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    saved, log_path = time.monotonic(), args.run / "log.csv"
    begun = log_path.exists()
    with log_path.open("a", newline="", encoding="utf-8") as log:
        writer = csv.DictWriter(log, COLUMNS, restval="")
        if not begun:
            writer.writeheader()
        while not asked_to_stop:
            progress = run.tokens / args.tokens
            if args.hours:
                progress = max(progress, run.seconds / 3600 / args.hours)
            if progress >= 1 or (args.stop_at is not None and run.tokens >= args.stop_at):
                break
            row = run.train_step(states_of, progress)
            writer.writerow(row)
            if run.step % 20 == 0:
                log.flush()
                shown = " ".join(f"{name} {row[name]:.3f}" for name in COLUMNS[4:] if name in row)
                print(f"{run.step} {run.tokens / 1e6:.2f}M {progress:.1%} | {shown}", flush=True)
            if time.monotonic() - saved > 60 * args.checkpoint_minutes:
                run.checkpoint()
                saved = time.monotonic()
    run.checkpoint()
    print(f"done: {run.step} steps, {run.tokens} tokens, {run.seconds / 3600:.2f} hours")


if __name__ == "__main__":
    main()
