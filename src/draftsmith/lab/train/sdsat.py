"""SDSAT: train a model to draft for itself. Source: SDSAT, sections 2.2 and 3.2.

A step depends only on the seed and its number, dropout is off, and a checkpoint holds the complete
weights and optimizer. So a killed training ends with the same weights as an uninterrupted one.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.errors import OptionError, TrainingError
from draftsmith.lab.corpus.build import Show, unseen
from draftsmith.lab.fingerprint import fingerprint
from draftsmith.lab.train.batches import Batches
from draftsmith.lab.train.curves import Curves, StepLosses
from draftsmith.lab.train.evaluate import DEPTHS, Depths, by_depth, standard_loss
from draftsmith.lab.train.loss import loss_of
from draftsmith.lab.train.recipe import Options, Recipe, Texts
from draftsmith.lab.train.rows import AdaptiveRows
from draftsmith.lab.train.run import Run, check_installed, kept_whole
from draftsmith.lab.train.texts import held_out_stream, sequences
from draftsmith.lab.train.texts import stream as stream_of
from draftsmith.lab.train.trainable import Trainable, open_trainable
from draftsmith.model.adaptive import AdaptiveTokens
from draftsmith.model.dtype import computes_in
from draftsmith.text.tokenizer import opening

_MEASURED = 256
"""Most held-out sequences that are measured."""
_BETAS = (0.9, 0.95)
"""Source: SDSAT, section 3.2."""


@dataclass(frozen=True)
class Trained:
    """Result of a training. Figures on held-out text are None without such text."""

    folder: Path
    tokens: tuple[int, ...]
    steps: int
    before: float | None
    """Standard-token loss of the model before the training."""
    after: float | None
    depths: Depths | None


def train(
    source: str,
    recipe: Recipe,
    texts: Texts,
    output: Path,
    options: Options | None = None,
    show: Show = unseen,
    follow: Callable[[StepLosses], None] = lambda _: None,
) -> Trained:
    """Train the model of a hub id or folder, and write the result into a new folder.

    Resumes an earlier training in the same folder. `follow` is called after every step, in the main
    process. Raises OptionError, LoadError, UnsupportedError. Existing files are never overwritten.
    """
    options = options or Options()
    check_installed()
    from accelerate import Accelerator

    run, accelerator = Run(output), Accelerator(cpu=options.cpu, mixed_precision="no")
    if recipe.rows % accelerator.num_processes:
        raise OptionError(
            f"rows={recipe.rows} cannot be shared by {accelerator.num_processes} processes; give "
            f"a multiple of {accelerator.num_processes}"
        )
    run.check_free()
    trainable = open_trainable(
        source, recipe.token_count, tokens=options.tokens, add=options.add_token
    )
    room, tokenizer = trainable.loaded.context_length, trainable.loaded.tokenizer
    if room is not None and recipe.length > room:
        raise OptionError(f"length={recipe.length}, but the context of {source} is {room} tokens")
    stream = stream_of(texts, tokenizer, recipe.infill, recipe.seed, show)
    held_out = held_out_stream(texts, tokenizer)
    for ids, what in ((stream, "texts"), (held_out, "held-out texts")):
        used = np.intersect1d(ids, trainable.tokens)
        if len(used):
            raise OptionError(
                f"the {what} contain token {used[0]}, which is an adaptive token: name "
                "another with --token, or add one with --add-token"
            )
    cut = partial(sequences, length=recipe.length, before=opening(tokenizer))
    batches = Batches(cut(stream, what="training texts"), recipe)
    measured = cut(held_out, what="held-out texts") if texts.held_out else None
    about = {
        "model": source,
        "weights": fingerprint(trainable.loaded),
        "tokens": list(trainable.tokens),
        "text": f"{len(stream)} tokens ({zlib.crc32(stream.tobytes()):08x})",
        "held-out text": zlib.crc32(held_out.tobytes()),
    }
    with run.alone() if accelerator.is_main_process else nullcontext():
        with accelerator.main_process_first():
            run.begin(recipe, about)
        trainer = Trainer(trainable, batches, run, options, accelerator, measured)
        return trainer.run_to_end(follow)


class Trainer:
    """A running training."""

    def __init__(
        self,
        trainable: Trainable,
        batches: Batches,
        run: Run,
        options: Options,
        accelerator: Any,
        measured: NDArray[np.int32] | None = None,
    ) -> None:
        self.trainable, self.batches, self.run, self.options = trainable, batches, run, options
        self.recipe = batches.recipe
        self.measured = None if measured is None else measured[:_MEASURED]
        self.accelerator = accelerator
        self.half = self.recipe.bfloat16 and computes_in(torch.bfloat16, accelerator.device)
        model, recipe, tokens = self._adapted(), self.recipe, trainable.tokens
        self.rows: AdaptiveRows | None = None
        self.adaptive: AdaptiveTokens | None = None
        if tokens:
            self.rows = AdaptiveRows(model.get_input_embeddings(), tokens)
            self.adaptive = AdaptiveTokens(
                tokens=tokens, L=recipe.L, objective=recipe.objective, recipe=asdict(recipe)
            )
        self.model: Any = self.accelerator.prepare(model)
        weights = self.accelerator.unwrap_model(self.model).named_parameters()
        self.weights = {name: weight for name, weight in weights if weight.requires_grad}
        learnt = [self.rows.learnt] if self.rows else []
        others = [w for w in self.weights.values() if not any(w is row for row in learnt)]
        groups = (
            ([w for w in others if w.ndim >= 2], self.recipe.weight_decay, 1.0),
            ([w for w in others if w.ndim < 2], 0.0, 1.0),
            (learnt, 0.0, self.recipe.token_rate),
        )
        self.adamw = torch.optim.AdamW(
            [
                {"params": weights, "weight_decay": decay, "faster": faster}
                for weights, decay, faster in groups
            ],
            betas=_BETAS,
        )

    def _adapted(self) -> Any:
        """Return the model, with adapters if the recipe has LoRA."""
        model = self.trainable.model.requires_grad_(not self.recipe.lora)
        if not self.recipe.lora:
            return model
        from peft import LoraConfig, get_peft_model

        rank = self.recipe.lora
        settings = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        # The model is still on the CPU, so the adapters are initialized there.
        with torch.random.fork_rng(devices=()), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # between peft and transformers
            torch.manual_seed(self.recipe.seed)
            return get_peft_model(model, settings).eval()

    def run_to_end(self, follow: Callable[[StepLosses], None]) -> Trained:
        """Train from the newest checkpoint to the end and write the model."""
        recipe, leads = self.recipe, self.accelerator.is_main_process
        before = self._standard_loss()
        step, seconds = self.run.restore(self.weights, self.adamw)
        with closing(Curves(self.run.training, step)) if leads else nullcontext() as curves:
            while step < recipe.steps:
                began = perf_counter()
                row = self._step(step)
                step += 1
                seconds += perf_counter() - began
                if self.options.measure_every and step % self.options.measure_every == 0:
                    row = replace(row, held_out=self._standard_loss())
                row = replace(row, seconds=round(seconds, 3))
                if curves is not None:
                    curves.add(row)
                    if step % self.options.save_every == 0 or step == recipe.steps:
                        with kept_whole(self.run.training):
                            curves.flush()
                        self.run.save(step, seconds, self.weights, self.adamw)
                    follow(row)
        tokens, after, depths = self.trainable.tokens, self._standard_loss(), self._depths()
        trained = Trained(self.run.folder, tokens, step, before, after, depths)
        if leads:
            self.run.finish(self._save, asdict(trained) | {"folder": str(trained.folder)})
        self.accelerator.wait_for_everyone()
        return trained

    def _step(self, step: int) -> StepLosses:
        """Run one step of AdamW over all rows, in several passes if the recipe says so."""
        recipe, accelerator = self.recipe, self.accelerator
        rate = recipe.rate(step)
        whole = self.batches.step(step)
        positions, replaced = whole.labels.numel(), int(whole.replaced.sum())
        own = whole.part(slice(accelerator.process_index, None, accelerator.num_processes))
        for group in self.adamw.param_groups:
            group["lr"] = rate * group["faster"]
        parts = []
        starts = range(0, len(own.ids), recipe.rows_per_pass)
        for start in starts:
            last = start == starts[-1]
            with nullcontext() if last else accelerator.no_sync(self.model):
                part = own.part(slice(start, start + recipe.rows_per_pass))
                tokens = self.trainable.tokens
                loss = loss_of(recipe.objective, self._logits, part, tokens, positions, recipe.w)
                # Processes average their gradients, but a step's loss is a sum over its rows.
                accelerator.backward(loss.total * accelerator.num_processes)
            parts.append(torch.stack([loss.total.detach(), loss.standard, loss.adaptive]))
        sums = torch.stack(parts).cpu().double().sum(0)  # some devices have no float64
        if accelerator.num_processes > 1:
            sums = accelerator.reduce(sums.to(accelerator.device), "sum")
        total, standard, adaptive = sums.tolist()
        if not math.isfinite(total):
            raise TrainingError(
                f"the loss of step {step + 1} is {total}: the training diverged; lower "
                f"learning_rate={recipe.learning_rate}, or compute in float32"
            )
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), recipe.clip)
        self.adamw.step()
        self.adamw.zero_grad()
        plain = positions - (replaced if recipe.objective == "basic" else 0)
        return StepLosses(
            step=step + 1,
            tokens=(step + 1) * recipe.rows * recipe.length,
            seconds=0.0,
            learning_rate=rate,
            loss=total,
            standard=standard / plain if plain else None,
            adaptive=adaptive / replaced if replaced else None,
        )

    def _logits(self, ids: Tensor) -> Tensor:
        """(R, T, V) logits of ids (R, T)."""
        device = self.accelerator.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.half):
            logits: Tensor = self.model(input_ids=ids.to(device), use_cache=False).logits
        return logits

    def _standard_loss(self) -> float | None:
        if self.measured is None:
            return None
        rows = self.recipe.rows_per_pass
        return standard_loss(self._logits, self.measured, self.trainable.tokens, rows)

    def _depths(self) -> Depths | None:
        if self.measured is None or self.adaptive is None:
            return None
        longest, rows = min(DEPTHS, self.recipe.length // 2), self.recipe.rows_per_pass
        return by_depth(self._logits, self.measured, self.adaptive, longest, rows)

    def _save(self, folder: Path) -> None:
        model = self.accelerator.unwrap_model(self.model)
        if self.recipe.lora:
            model = model.merge_and_unload()
        if self.rows is not None:
            self.rows.fold()
        self.trainable.save(model, folder)
        if self.adaptive is not None:
            self.adaptive.save(folder)
