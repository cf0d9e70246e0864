"""EAGLE-3: train a head for a model that stays as it is. Source: EAGLE-3, sections 3.1 and 3.2.

The head learns the target's own distribution over any text (distillation). In a training-time test
it is unrolled for a few steps: step k reads the states that step k-1 gave, as in drafts. Everything
of a step follows from the seed and the step's number, and a checkpoint holds weights and optimizer
in full, so a killed training ends as an unbroken one.

Shapes: `B` rows, `T` tokens of a row, `K` tokens that the head knows.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import embedding
from transformers import DynamicCache, LlamaConfig

from draftsmith.core.target import Needs
from draftsmith.errors import OptionError, TrainingError, UnsupportedError
from draftsmith.lab.corpus.build import Show, unseen
from draftsmith.lab.fingerprint import fingerprint
from draftsmith.lab.train.batches import in_order
from draftsmith.lab.train.curves import Curves, Panels
from draftsmith.lab.train.recipe import HeadRecipe, Texts
from draftsmith.lab.train.run import Run, check_installed, kept_whole
from draftsmith.lab.train.texts import held_out_stream, sequences, stream
from draftsmith.model.heads.eagle3 import Eagle3Head, build, fitted, usual_layers
from draftsmith.model.heads.eagle3_files import FLAGS
from draftsmith.model.heads.eagle3_files import read as read_head
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.taps import PassTaps
from draftsmith.model.taps import check as check_needs
from draftsmith.storage import write_text
from draftsmith.text.tokenizer import opening

_ORDER = 1
"""Kind of random numbers: the order of the sequences."""
_MEASURED = 64
"""Held-out sequences that are measured at most."""
_FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
           "head_dim", "rms_norm_eps", "max_position_embeddings")  # fmt: skip
"""Fields of the head's layer that are the target's."""


@dataclass(frozen=True, kw_only=True)
class HeadStep:
    """Progress after a step."""

    step: int
    tokens: int
    """Number of tokens of text so far."""
    seconds: float
    learning_rate: float
    loss: float
    """Cross entropy to the target's distribution, in nats, weighted over the unrolled steps."""
    right: float
    """Share of places at which head and target name the same token, at the first step."""
    right_at_last: float
    """The same at the last unrolled step."""

    panels: ClassVar[Panels] = {"loss": ("loss",), "right": ("right", "right_at_last")}


@dataclass(frozen=True)
class TrainedHead:
    """Result of a training."""

    folder: Path
    steps: int
    tokens: int
    right: tuple[float, ...] | None
    """For each unrolled step, on held-out text; None without such text."""


@dataclass
class Lessons:
    """A head and its target: losses of batches of text."""

    loaded: LoadedModel
    recipe: HeadRecipe
    head: Eagle3Head
    ids: Tensor
    """(K,) the tokens that the head knows."""
    layers: tuple[int, ...]
    """Blocks of the target, counted from 1, that it reads."""
    config: Mapping[str, Any] | None = None
    """Its configuration in the speculators format; None: it is new."""

    def __post_init__(self) -> None:
        self.ids, self.needs = self.ids.to(self.loaded.device), Needs(self.layers)
        check_needs(self.needs, self.loaded, "train eagle3")

    def losses(self, tokens: Tensor) -> tuple[Tensor, list[float]]:
        """The loss of tokens (B, T), and by step the share of places that are right."""
        states, logits = self.target(tokens)
        total = logits.float().logsumexp(-1, keepdim=True)
        probs, best = (logits[..., self.ids].float() - total).exp(), logits.argmax(-1)
        T, right = tokens.shape[1], list[float]()  # noqa: N806
        loss = torch.zeros((), device=tokens.device)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.recipe.bfloat16):
            for k, logits in enumerate(self.unrolled(tokens, states)):
                wanted = probs[:, 1 + k : T]
                entropy = -(wanted * logits.log_softmax(-1)).sum(-1).mean()
                loss = loss + self.recipe.decay**k * entropy
                named = self.ids[logits.detach().argmax(-1)]
                right.append(float((named == best[:, 1 + k : T]).float().mean()))
        return loss, right

    def unrolled(self, tokens: Tensor, states: Tensor) -> Iterator[Tensor]:
        """Logits (B, T - 1 - k, K) of each step k: those at i say what follows token i + 1 + k."""
        head, T = self.head, tokens.shape[1]  # noqa: N806
        g, cache = head.fuse(states[:, :-1]), DynamicCache()
        past = torch.ones(T - 1, T - 1, dtype=torch.bool, device=tokens.device).tril()
        own = torch.eye(T - 1, dtype=torch.bool, device=tokens.device)
        position = torch.arange(T - 1, device=tokens.device)[None]
        for k in range(self.recipe.unrolled):
            # Entry i reads x_{i+1+k} and what step k-1 gave at i; it sees the true entries up to
            # i, and its own of the steps before.
            mask = torch.cat([past, *([own] * k)], dim=1)[None, None]
            shifted = torch.roll(tokens, -1 - k, dims=1)[:, :-1]
            embedded = embedding(shifted, head.embeddings)
            g = head.step(embedded, g, position_ids=position + k, attention_mask=mask, cache=cache)
            # Only entries with their token, and so their answer, in the row.
            yield head.logits(g[:, : T - 1 - k]).float()

    @torch.no_grad()
    def target(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """States (B, T, k·D) of the layers, and logits (B, T, V)."""
        B, T = tokens.shape  # noqa: N806
        assert self.loaded.blocks is not None  # or `check_needs` has refused
        taps = PassTaps([self.needs], self.loaded.blocks)
        output = self.loaded.forward(tokens.tolist(), [range(T)] * B, None, False, T, taps)
        states = torch.cat([taps.hidden[layer] for layer in self.layers], dim=-1)
        return states.float(), output.logits


def with_new_head(loaded: LoadedModel, recipe: HeadRecipe, ids: Tensor) -> Lessons:
    """Lessons of a new head: the LM head has rows of the target's, all else random weights."""
    config, count = loaded.config, loaded.facts.layers
    usual = {min(max(1, layer), count) for layer in usual_layers(count)}  # small models have fewer
    layers = recipe.layers or tuple(sorted(usual))
    known = {name: getattr(config, name) for name in _FIELDS if getattr(config, name, None)}
    layer = LlamaConfig(**known, vocab_size=loaded.vocab_size, num_hidden_layers=1)
    layer._attn_implementation = "sdpa"
    torch.manual_seed(recipe.seed)
    flags = dict.fromkeys(FLAGS, False)
    head = Eagle3Head(layer, len(layers), config.hidden_size, len(ids), flags)
    head.to(loaded.device)
    head.embeddings = loaded.model.get_input_embeddings().weight.detach().float()
    with torch.no_grad():
        head.lm_head.weight.copy_(loaded.model.get_output_embeddings().weight[ids])
    return Lessons(loaded, recipe, head, ids, layers)


def with_trained_head(loaded: LoadedModel, recipe: HeadRecipe) -> Lessons:
    """Lessons of the head `recipe.start`; raises LoadError or UnsupportedError."""
    source, files = recipe.start, read_head(recipe.start)
    if "speculators_model_type" not in files.config or "embed_tokens.weight" in files.tensors:
        raise UnsupportedError(
            f"{source}: a training begins only with heads in the speculators format that have no "
            "embeddings of their own"
        )
    ids, layers, embeddings = fitted(files, loaded.facts, source)
    head = build(files, len(layers), str(loaded.device), torch.float32, source)
    head.embeddings = embeddings.float()
    known = torch.arange(loaded.vocab_size, device="cpu") if ids is None else ids
    return Lessons(loaded, recipe, head.requires_grad_(True), known, layers, files.config)


def train(
    source: str,
    recipe: HeadRecipe,
    texts: Texts,
    output: Path,
    save_every: int = 100,
    show: Show = unseen,
    follow: Callable[[HeadStep], None] = lambda _: None,
) -> TrainedHead:
    """Train a head for the model of a hub id or folder, and write it into a new folder.

    Goes on where an earlier training in the same folder was stopped. Raises OptionError, LoadError,
    UnsupportedError, TrainingError; nothing that exists is overwritten.
    """
    check_installed()
    run = Run(output)
    run.check_free()
    # Nothing is generated, so the self-test need not capture passes.
    loaded = load(source, dtype="bfloat16" if recipe.bfloat16 else "float32", store="packed")
    room, tokenizer = loaded.context_length, loaded.tokenizer
    if room is not None and recipe.length > room:
        raise OptionError(f"length={recipe.length}, but the context of {source} is {room} tokens")
    cut = partial(sequences, length=recipe.length - 1, before=opening(tokenizer))
    text = stream(texts, tokenizer, 0.0, recipe.seed, show)
    rows = cut(text, what="texts")
    held_out = held_out_stream(texts, tokenizer)
    measured = cut(held_out, what="held-out texts")[:_MEASURED] if texts.held_out else None
    if recipe.start:
        lessons = with_trained_head(loaded, recipe)
    else:
        counts = np.bincount(text, minlength=loaded.vocab_size)
        most = np.argsort(-counts, kind="stable")[: min(recipe.vocabulary, loaded.vocab_size)]
        lessons = with_new_head(loaded, recipe, torch.from_numpy(np.sort(most)))
    about = {
        "model": fingerprint(loaded),
        "texts": zlib.crc32(text.tobytes()),
        "held-out text": zlib.crc32(held_out.tobytes()),
        "tokens": zlib.crc32(lessons.ids.cpu().numpy().tobytes()),
        "blocks": list(lessons.layers),
    }
    with run.alone():
        run.begin(recipe, about)
        seconds = _learn(lessons, run, rows, save_every, follow)
        right = None if measured is None else _measure(lessons, measured)
        found = {"right": right, "steps": recipe.steps, "seconds": seconds}
        run.finish(partial(write, lessons, source), found)
    return TrainedHead(output, recipe.steps, recipe.steps * recipe.rows * recipe.length, right)


def _learn(
    lessons: Lessons,
    run: Run,
    rows: NDArray[np.int32],
    save_every: int,
    follow: Callable[[HeadStep], None],
) -> float:
    """All steps that are left; returns the seconds of the whole training."""
    recipe, head = lessons.recipe, lessons.head.train()
    weights = dict(head.named_parameters())
    adamw = torch.optim.AdamW(weights.values(), betas=(0.9, 0.95), weight_decay=0.0)
    done, before = run.restore(weights, adamw)
    begin = perf_counter() - before
    with closing(Curves(run.training, done, HeadStep)) as curves:
        for step in range(done, recipe.steps):
            chosen = in_order([recipe.seed, _ORDER], step, recipe.rows, len(rows))
            tokens = torch.tensor(rows[chosen], device=head.device).long()
            loss, right = lessons.losses(tokens)
            value = float(loss.detach())
            if not math.isfinite(value):
                raise TrainingError(f"step {step + 1}: the loss is {value}; lower --learning-rate")
            adamw.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(head.parameters(), recipe.clip)
            for group in adamw.param_groups:
                group["lr"] = recipe.rate(step)
            adamw.step()
            row = HeadStep(
                step=step + 1,
                tokens=(step + 1) * tokens.numel(),
                seconds=perf_counter() - begin,
                learning_rate=recipe.rate(step),
                loss=value,
                right=right[0],
                right_at_last=right[-1],
            )
            curves.add(row)
            follow(row)
            if (step + 1) % save_every == 0 or step + 1 == recipe.steps:
                with kept_whole(run.training):
                    curves.flush()
                run.save(step + 1, row.seconds, weights, adamw)
    return perf_counter() - begin


@torch.no_grad()
def _measure(lessons: Lessons, rows: NDArray[np.int32]) -> tuple[float, ...]:
    """The share of places that are right on held-out text, by unrolled step."""
    lessons.head.eval()
    device = lessons.ids.device
    found = [lessons.losses(torch.tensor(row[None], device=device).long())[1] for row in rows]
    return tuple(np.mean(found, axis=0).round(4).tolist())


def write(lessons: Lessons, source: str, folder: Path) -> None:
    """Write the head in the speculators format, in bfloat16 if its passes were computed in it.

    Its embeddings are the target's.
    """
    dtype = torch.bfloat16 if lessons.recipe.bfloat16 else torch.float32
    tensors = {
        n.removeprefix("fuse."): t.detach().to(dtype) for n, t in lessons.head.state_dict().items()
    }
    ids = lessons.ids.cpu()
    tensors["d2t"] = ids - torch.arange(len(ids), device="cpu")
    tensors["t2d"] = torch.zeros(lessons.loaded.vocab_size, dtype=torch.bool, device="cpu")
    tensors["t2d"][ids] = True
    save_file(
        {name: t.cpu().contiguous() for name, t in tensors.items()}, folder / "model.safetensors"
    )
    config = lessons.config or new_config(lessons, source)
    write_text(folder / "config.json", json.dumps(config, indent=1) + "\n")


def new_config(lessons: Lessons, source: str) -> dict[str, Any]:
    """The configuration of a new head for the model `source`, in the speculators format."""
    head, loaded = lessons.head, lessons.loaded
    layer = {name: getattr(head.config, name) for name in _FIELDS} | {
        "model_type": "llama",
        "vocab_size": loaded.vocab_size,
        "num_hidden_layers": 1,
        "max_position_embeddings": loaded.context_length or 2048,
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": lessons.recipe.unrolled}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": len(lessons.ids),
        "eagle_aux_hidden_state_layer_ids": list(lessons.layers),
        "target_hidden_size": loaded.config.hidden_size,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": source,
                "architectures": list(loaded.config.architectures or []),
            },
        },
    }
