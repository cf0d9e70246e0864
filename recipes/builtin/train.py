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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
import torch.nn.functional as functional
from headstart import MATCH, head_start
from sampling import Markers, Sampler
from tokenizers import Tokenizer
from torch import Tensor

from model import Shape, SlicedLoss, TinyLlama

SLICE = 1024  # places whose logits are held at a time
SAMPLE = 2048  # tokens of text that say how large things are in fresh weights
COLUMNS = [
    *("step", "tokens", "seconds", "progress", "rate", "length", "loss"),
    *("repeat_random", "text", "copied", "changed", "synth_copied", "synth_changed", "instruct"),
]


@dataclass(frozen=True)
class Stage:
    until: float
    lengths: dict[str, float]
    mixture: dict[str, float]
    spans: list[int]
    batch_tokens: int
    rate: float  # share of the config's learning rates
    weights: list[float]  # in the loss: skipped, copied, changed, prompt or text


@dataclass(frozen=True)
class Config:
    name: str
    seed: int
    head_start: bool
    substitutes: bool  # with a head start: follows "rename a to b", see substitute.py
    learning_rate: float
    matrix_learning_rate: float
    weight_decay: float
    warmup_steps: int
    decay_from: float
    shape: Shape
    stages: list[Stage]

    @staticmethod
    def load(path: Path) -> Config:
        raw: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        stages = [Stage(**stage) for stage in raw.pop("stage")]
        return Config(**{**raw, "shape": Shape(**raw["shape"]), "stages": stages})

    def stage(self, progress: float) -> Stage:
        return next((s for s in self.stages if progress < s.until), self.stages[-1])

    def rate(self, step: int, progress: float) -> float:
        """Warm up, stay, then fall linearly: what `progress` measures may end at any time."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        fall = (1.0 - progress) / (1.0 - self.decay_from)
        return warm * max(0.02, min(1.0, fall))


WRITTEN = f"model.layers.{MATCH}.self_attn"
"""Where `headstart` writes what may change: what the copying heads say."""
WRITTEN_RATE = 0.1


def optimizers(network: TinyLlama, config: Config) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the network, AdamW for the embedding and the norms.

    The heads that a head start has written already copy: they change more slowly than the rest,
    or the first steps, meant for noise, would wash them out.
    """
    matrices, written, others = [], [], []
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        inner = parameter.dim() == 2 and "embed_tokens" not in name
        known = config.head_start and name.startswith(WRITTEN)
        (written if inner and known else matrices if inner else others).append(parameter)
    groups = [{"params": matrices, "scale": 1.0}]
    if written:
        groups.append({"params": written, "scale": WRITTEN_RATE})
    return [
        torch.optim.Muon(
            groups,
            lr=config.matrix_learning_rate,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            others, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        ),
    ]


class Averages:
    """Mean loss of each kind of token since the last progress line."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    def add(self, name: str, losses: Tensor) -> None:
        if len(losses):
            entry = self.sums.setdefault(name, [0.0, 0.0])
            entry[0] += float(losses.sum())
            entry[1] += len(losses)

    def take(self) -> dict[str, float]:
        means = {name: total / count for name, (total, count) in self.sums.items()}
        self.sums.clear()
        return means


class Threads:
    """Gives way to other programs: fewer threads while they take processor time from this one.

    A step waits for its slowest thread, so with another program on one of two cores a single
    thread is several times faster than two.
    """

    def __init__(self, most: int) -> None:
        self.most = self.now = most
        self.wait = 0
        self.cpu, self.wall = time.process_time(), time.monotonic()

    def adapt(self) -> None:
        cpu, wall = time.process_time(), time.monotonic()
        busy = (cpu - self.cpu) / (wall - self.wall) / self.now
        self.cpu, self.wall = cpu, wall
        self.wait -= 1
        if self.now > 1 and busy < 0.75:
            self.now, self.wait = self.now - 1, 16
        elif self.now < self.most and self.wait <= 0:
            self.now += 1
        torch.set_num_threads(self.now)


def columns_of(kind: str) -> list[tuple[str, int]]:
    """Which loss columns the tokens of a row feed, by class (1 copied, 2 changed, 3 prompt)."""
    if kind in ("edits", "hunks"):
        return [("copied", 1), ("changed", 2)]
    if kind == "synth":
        return [("synth_copied", 1), ("synth_changed", 2)]
    return {
        "instruct": [("instruct", 2)],
        "text": [("text", 3)],
        "repeat_random": [("repeat_random", 1)],
    }.get(kind, [])


def vocabulary(data: Path) -> list[str]:
    """What each id writes, as the tokenizer spells it."""
    tokenizer = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    return [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]


def markers(data: Path) -> Markers:
    vocabulary = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    special = [vocabulary.token_to_id(t) for t in common.SPECIALS]
    if special != list(range(len(special))):
        raise ValueError("the special tokens do not come first in the vocabulary")
    ids = dict(zip(common.SPECIALS, special, strict=True))
    return Markers(
        pad=ids[common.PAD],
        first=ids[common.TEXT_END],
        prefix=ids[common.FIM_PREFIX],
        suffix=ids[common.FIM_SUFFIX],
        middle=ids[common.FIM_MIDDLE],
        first_plain=len(special),
        vocab=vocabulary.get_vocab_size(),
    )


def save(path: Path, state: dict[str, Any]) -> None:
    """Write beside the old checkpoint and swap: a crash leaves one of the two whole."""
    fresh = path.with_suffix(".new")
    torch.save(state, fresh)
    os.replace(fresh, path)


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
    parser.add_argument("--log-steps", type=int, default=20)
    parser.add_argument("--share", action="store_true", help="give way to other programs")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    config = Config.load(args.config)
    torch.manual_seed(config.seed)
    device = torch.device(args.device)
    args.run.mkdir(parents=True, exist_ok=True)
    network = TinyLlama(config.shape)
    kinds = {kind for stage in config.stages for kind in stage.mixture}
    present = {kind for kind in kinds if (args.data / f"{kind}.ids.npy").exists()}
    plain = {"text", "infill", "repeat_text", "repeat_random"}
    sampler = Sampler(args.data, markers(args.data), config.seed, present | plain)
    circuit = None
    if config.head_start:
        sample = torch.from_numpy(sampler.text.ids[:SAMPLE].astype(np.int64))
        circuit = head_start(network, sample, vocabulary(args.data) if config.substitutes else None)
        circuit.to(device)
    still = 0 if circuit is None else MATCH + config.substitutes
    network.to(device)
    count = sum(p.numel() for p in network.parameters())
    steppers = optimizers(network, config)
    base_rates = [config.matrix_learning_rate, config.learning_rate]
    step, tokens, seconds = 0, 0, 0.0
    checkpoint = args.run / "last.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        network.load_state_dict(state["network"])
        for stepper, saved in zip(steppers, state["steppers"], strict=True):
            stepper.load_state_dict(saved)
        step, tokens, seconds = state["step"], state["tokens"], state["seconds"]
    print(f"{config.name}: {count / 1e6:.2f}M parameters, from step {step}", flush=True)

    torch._dynamo.config.recompile_limit = 64
    body = network.model if args.no_compile else torch.compile(network.model, dynamic=False)
    tables = {}
    averages = Averages()
    log_path = args.run / "log.csv"
    fresh_log = not log_path.exists()
    log = log_path.open("a", newline="", encoding="utf-8")
    writer = csv.DictWriter(log, COLUMNS, restval="", extrasaction="ignore")
    if fresh_log:
        writer.writeheader()
    last_log, last_save, logged_tokens = time.monotonic(), time.monotonic(), tokens

    def write_checkpoint() -> None:
        save(
            checkpoint,
            {
                "network": network.state_dict(),
                "steppers": [s.state_dict() for s in steppers],
                "step": step,
                "tokens": tokens,
                "seconds": seconds,
                "shape": asdict(config.shape),
                "name": config.name,
                "seed": config.seed,
            },
        )

    threads = Threads(args.threads) if args.share else None
    asked_to_stop = False

    def stop(*_: object) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    while not asked_to_stop:
        since = time.monotonic()
        progress = tokens / args.tokens
        if args.hours:
            progress = max(progress, seconds / 3600 / args.hours)
        if progress >= 1 or (args.stop_at is not None and tokens >= args.stop_at):
            break
        stage = config.stage(progress)
        lengths = sorted(stage.lengths, key=int)
        odds = np.array([stage.lengths[name] for name in lengths])
        draw = np.random.default_rng([config.seed, step, 1])
        length = int(lengths[draw.choice(len(lengths), p=odds / odds.sum())])
        rows = max(1, stage.batch_tokens // length)
        ids, classes, row_kinds = sampler.batch(step, length, rows, stage.mixture, stage.spans)
        batch = torch.from_numpy(ids).to(device)
        label = torch.from_numpy(classes[:, 1:].copy()).to(device).long()
        if length not in tables:
            tables[length] = network.positions(length, torch.bfloat16, device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            hidden = body(batch[:, :-1], *tables[length], torch.bfloat16, still)
        weights = torch.tensor(stage.weights, device=device)[label]
        # Whole slices only: a new shape at every step would fill the matrix library's cache.
        used = weights.flatten().nonzero()[:, 0]
        short = -len(used) % SLICE
        places = functional.pad(used, (0, short))
        wanted = functional.pad(weights.flatten()[used], (0, short))
        loss, losses = SlicedLoss.apply(
            hidden.flatten(0, 1)[places],
            network.model.embed_tokens.weight,
            batch[:, 1:].flatten()[places],
            wanted,
            SLICE,
        )
        loss.backward()
        rate = stage.rate * config.rate(step, progress)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for stepper, base in zip(steppers, base_rates, strict=True):
            for group in stepper.param_groups:
                group["lr"] = base * rate * group.get("scale", 1.0)
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        if circuit is not None:
            circuit.protect(network)
        step += 1
        tokens += rows * length
        seconds += time.monotonic() - since
        if threads:
            threads.adapt()
        averages.add("loss", loss.detach()[None])
        every = torch.zeros(label.numel(), device=device)
        every[used] = losses[: len(used)]
        every = every.view(label.shape)
        for number, kind in enumerate(row_kinds):
            for column, kept in columns_of(kind):
                averages.add(column, every[number][label[number] == kept])
        if step % args.log_steps == 0:
            means = averages.take()
            now = time.monotonic()
            speed = (tokens - logged_tokens) / (now - last_log)
            last_log, logged_tokens = now, tokens
            left = (1 - progress) * (seconds / max(progress, 1e-9)) / 3600
            means |= {"step": step, "tokens": tokens, "seconds": round(seconds, 1)}
            means |= {"progress": round(progress, 4), "rate": rate, "length": length}
            writer.writerow(
                {k: round(v, 4) if isinstance(v, float) else v for k, v in means.items()}
            )
            log.flush()
            shown = " ".join(f"{k} {means[k]:.3f}" for k in COLUMNS[6:] if k in means)
            print(
                f"{step} {tokens / 1e6:.2f}M {100 * progress:.1f}% {speed:.0f} tok/s "
                f"{left:.2f}h left | {shown}",
                flush=True,
            )
        if time.monotonic() - last_save > 60 * args.checkpoint_minutes:
            write_checkpoint()
            last_save = time.monotonic()
    write_checkpoint()
    print(f"done: {step} steps, {tokens} tokens, {seconds / 3600:.2f} hours", flush=True)


if __name__ == "__main__":
    main()
