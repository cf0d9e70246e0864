"""Train a model from prepared rows: `python train.py --config edit-7m.toml --data D --out MODEL`.

The schedule ends at `--tokens`. The log is written next to the model's folder.
"""

from __future__ import annotations

import argparse
import csv
import time
import tomllib
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as functional
from circuit import MATCH
from headstart import head_start
from rows import Sampler
from tokenizers import Tokenizer
from torch import Tensor

from model import Network, fresh, save, states

BLOCK = 1024  # the loss is computed for a multiple of this many positions
SAMPLE = 2048  # tokens of text that set the scales of new weights
WRITTEN = f"model.layers.{MATCH}.self_attn"  # where the output of copying heads may change
WRITTEN_RATE = 0.1
COLUMNS = ("step", "tokens", "seconds", "rate", "loss")  # of the log
Config = SimpleNamespace  # a .toml file


def rate_of(config: Config, step: int, progress: float) -> float:
    """Warm up, stay constant, then decay linearly with `progress`."""
    warm = min(1.0, (step + 1) / config.warmup_steps)
    fall = (1.0 - progress) / (1.0 - config.decay_from)
    return warm * max(0.02, min(1.0, fall))


def length_of(config: Config, step: int) -> int:
    """Length of the rows of a step."""
    lengths = sorted(config.lengths, key=int)
    odds = np.array([config.lengths[name] for name in lengths])
    draw = np.random.default_rng([config.seed, step, 1])
    return int(lengths[draw.choice(len(lengths), p=odds / odds.sum())])


def optimizers(network: Network, config: Config) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the network, AdamW for the embedding and the norms.

    Heads written by the head start already copy. They have a lower rate, because the first steps,
    which suit random weights, would destroy them.
    """
    matrices: dict[float, list[Tensor]] = defaultdict(list)
    others: list[Tensor] = []
    for name, parameter in network.named_parameters():
        slowed = WRITTEN_RATE if name.startswith(WRITTEN) else 1.0
        if parameter.requires_grad and parameter.dim() == 2 and "embed_tokens" not in name:
            matrices[config.matrix_learning_rate * slowed].append(parameter)
        elif parameter.requires_grad:
            others.append(parameter)
    return [
        torch.optim.Muon(
            [{"params": some, "highest": rate} for rate, some in matrices.items()],
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [{"params": others, "highest": config.learning_rate}],
            betas=(0.9, 0.98), weight_decay=0.0, fused=True,
        ),
    ]  # fmt: skip


def loss_of(hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """() weighted mean of the losses; hidden (R, T, D), targets and weights (R, T)."""
    used = weights.flatten().nonzero()[:, 0]
    # Whole blocks only: a new shape at every step would fill the matrix library's cache.
    places = functional.pad(used, (0, -len(used) % BLOCK))
    logits = (hidden.flatten(0, 1)[places] @ table.T).float()
    found = functional.cross_entropy(logits, targets.flatten()[places], reduction="none")
    return (found[: len(used)] * weights.flatten()[used]).sum() / weights.sum().clamp_min(1e-6)


class Run:
    """A running training."""

    def __init__(self, config: Config, data: Path) -> None:
        torch.manual_seed(config.seed)
        tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
        vocabulary = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
        self.config = config
        self.network = fresh(**config.sizes)
        self.sampler = Sampler(data, config.mixture, config.seed, len(vocabulary))
        sample = torch.from_numpy(self.sampler.text.ids[:SAMPLE].astype(np.int64))
        self.circuit = head_start(self.network, sample, vocabulary if config.substitutes else None)
        self.optimizers = optimizers(self.network, config)
        self.states = torch.compile(states, dynamic=False)
        self.step, self.tokens, self.seconds = 0, 0, 0.0

    def train_step(self, progress: float) -> dict[str, float]:
        """Run one step; returns its row of the log."""
        since = time.monotonic()
        config = self.config
        length = length_of(config, self.step)
        rows = max(1, config.batch_tokens // length)
        ids, classes = map(torch.from_numpy, self.sampler.batch(self.step, length, rows))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            still = MATCH + config.substitutes
            hidden = self.states(self.network, ids[:, :-1], still=still, dtype=torch.bfloat16)
            table = self.network.model.embed_tokens.weight
            weights = torch.tensor(config.weights)[classes[:, 1:].long()]
            loss = loss_of(hidden, table, ids[:, 1:], weights)
        loss.backward()
        rate = rate_of(config, self.step, progress)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["highest"] * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.circuit.protect()
        self.step += 1
        self.tokens += rows * length
        self.seconds += time.monotonic() - since
        numbers = (self.step, self.tokens, self.seconds, rate, loss.item())
        return dict(zip(COLUMNS, numbers, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--config", "--data", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--tokens", type=float, required=True, help="0: only what is written")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    config = Config(**tomllib.loads(args.config.read_text(encoding="utf-8")))
    run = Run(config, args.data)
    print(f"{run.network.num_parameters() / 1e6:.2f}M parameters", flush=True)
    torch._dynamo.config.recompile_limit = 64
    with args.out.with_suffix(".log.csv").open("w", newline="", encoding="utf-8") as log:
        writer = csv.DictWriter(log, COLUMNS)
        writer.writeheader()
        while run.tokens < args.tokens:
            progress = run.tokens / args.tokens
            row = run.train_step(progress)
            writer.writerow(row)
            if run.step % 20 == 0:
                log.flush()
                state = f"{run.step} {run.tokens / 1e6:.2f}M {progress:.1%}"
                print(f"{state} | loss {row['loss']:.3f}", flush=True)
    save(run.network, args.data / "tokenizer.json", args.out)
    print(f"done: {run.step} steps, {run.tokens} tokens, {run.seconds / 3600:.2f} hours")


if __name__ == "__main__":
    main()
