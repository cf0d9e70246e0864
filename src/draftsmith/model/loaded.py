"""A model ready to decode: the user's own object, unchanged, with what is known about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import cycle
from typing import Any, Literal

import torch

from draftsmith.core.drafter import common_prefix
from draftsmith.core.target import ModelFacts
from draftsmith.model.capabilities import Capabilities
from draftsmith.model.exact.widths import Widths
from draftsmith.model.forward import Forward, input_device
from draftsmith.model.graphs import Graphs
from draftsmith.model.prepack import Prepacked
from draftsmith.model.rope import yarn_positions
from draftsmith.model.windows import windows_by_layer
from draftsmith.text.grammar import Grammars
from draftsmith.text.vocab import fingerprint

Store = Literal["packed", "static"]
"""Names of the key/value stores between which a user can choose."""

_WITHOUT_KEYS = {"linear_attention", "mamba", "conv", "moe"}
"""Layer types without keys."""


def number(config: Any, name: str, of: Callable[[Any], Any] = max) -> int:
    """Return an integer setting: `of` the values if there is one per layer, 0 if unreadable."""
    try:
        given = getattr(config, name, 0)
        return int((of(given) if isinstance(given, list | tuple) else given) or 0)
    # Some configurations raise errors of their own for settings that differ by layer.
    except Exception:
        return 0


def last_part(name: str) -> str:
    """Return the last part of a hub id or path, for tables that are read on other machines."""
    return name.rstrip("/").rsplit("/", 1)[-1]


@dataclass(frozen=True, eq=False, repr=False)
class LoadedModel:
    """Result of `load`. Several runners may share one. The model itself is never changed."""

    model: Any
    """A `PreTrainedModel`, or a PEFT model around one."""
    tokenizer: Any | None
    capabilities: Capabilities
    name: str
    """Hub id, folder, or class of a live model."""
    prepacked: Prepacked | None = None
    """Linear layers that are laid out for this CPU; None unless requested."""
    widened: torch.dtype | None = None
    """Dtype of the checkpoint, if the weights were widened to float32 (`model.dtype`)."""
    exact: Widths | None = None
    """Allowed pass widths of an `exact` model; rows are then bit-equal in every pass."""
    store: Store = "packed"
    """Where a model that packs keeps keys and values: see `packed` and `static`."""

    def __repr__(self) -> str:
        kind = type(self.model).__name__
        return f"LoadedModel({last_part(self.name)!r}, {kind}, {self.dtype_name} on {self.device})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has graphs of its own and may be moved."""
        own = ("forward", "graphs", "_grammars")
        return {name: value for name, value in vars(self).items() if name not in own}

    @cached_property
    def forward(self) -> Forward:
        """Calls the model. Shared by all runners, which take turns."""
        return Forward(self.model, packs=self.capabilities.packed)

    @cached_property
    def graphs(self) -> Graphs:
        """CUDA graphs of passes with `store="static"`. Shared by all runners."""
        return Graphs(self.device)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why passes are not as fast as they could be, one sentence each."""
        notice = self.graphs.notice(self.model) if self.store == "static" else None
        return self.capabilities.reasons + (() if notice is None else (notice,))

    @property
    def config(self) -> Any:
        """Configuration of the text decoder."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def device(self) -> torch.device:
        """Device of the input ids."""
        return self.forward.device

    @property
    def moved(self) -> str | None:
        """Why passes cannot run, if the model is on another device than it was; else None."""
        now = input_device(self.model)
        if now == self.device:
            return None
        return f"the model was moved from {self.device} to {now} after it was loaded"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights that are not quantized."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def dtype_name(self) -> str:
        """Dtype as a short name: "float32"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def dtype_explained(self) -> str:
        """Dtype, and the checkpoint's if it differs."""
        if self.widened is None:
            return self.dtype_name
        own = str(self.widened).removeprefix("torch.")
        return f"{self.dtype_name} (the checkpoint is {own}, which this processor computes slowly)"

    @property
    def vocab_size(self) -> int:
        """Width of the logits, padding ids included."""
        head = self.model.get_output_embeddings()
        width = getattr(head, "out_features", None)
        if width is None and isinstance(getattr(head, "weight", None), torch.Tensor):
            width = head.weight.shape[0]
        whole = int(width or self.config.vocab_size)
        return min(whole, getattr(self.config, "unpadded_vocab_size", None) or whole)  # Inkling

    @property
    def context_length(self) -> int | None:
        """Maximum number of positions; None if the configuration names none."""
        names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
        lengths = (getattr(self.config, name, None) for name in names)
        length = next((n for n in lengths if isinstance(n, int) and n > 0), None)
        # Where YaRN is added to a model, its positions are often left as they were.
        return length and max(length, yarn_positions(self.config))

    def row_bytes(self, positions: int, spare: int | None = None, *, windowed: bool = False) -> int:
        """Bytes of keys and values of `positions` positions, as the self-test measured them.

        `spare`: positions that a windowed layer may keep beyond its window; None: it keeps all.
        `windowed`: count only windowed layers.
        """
        each = self.capabilities.position_sizes or self._configured_sizes
        windows = cycle(windows_by_layer(self.config))
        slots = (
            (0 if windowed else positions)
            if spare is None or window is None
            else min(positions, window + spare)
            for window in windows
        )
        numbers = sum(one * many for one, many in zip(each, slots, strict=False))
        return int(numbers * self.dtype.itemsize)

    @property
    def _configured_sizes(self) -> list[int]:
        """Estimate of `position_sizes` from the configuration."""
        config = self.config
        layers, heads, groups, size, width = (
            number(config, name)
            for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                         "hidden_size", "head_dim")
        )  # fmt: skip
        groups, width = groups or heads, width or (size // heads if heads else 0)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
        return [0 if kind in _WITHOUT_KEYS else 2 * groups * width for kind in kinds]

    @property
    def facts(self) -> ModelFacts:
        """Facts about the model for drafters."""
        return ModelFacts(
            layers=number(self.config, "num_hidden_layers"),
            # If the number differs by layer, every layer has at least the smallest.
            heads=number(self.config, "num_attention_heads", of=min),
            name=str(getattr(self.model.config, "_name_or_path", "") or ""),
            vocabulary=lambda: self.vocabulary,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            device=str(self.device),
            shape=self.capabilities.shape,
            model=self.model,
        )

    @cached_property
    def vocabulary(self) -> str | None:
        """Fingerprint of the tokenizer's vocabulary; None without a tokenizer."""
        return None if self.tokenizer is None else fingerprint(self.tokenizer)

    @property
    def grammars(self) -> Grammars:
        """Grammars compiled for the tokenizer and the width of the logits, which may change."""
        return self._grammars(self.vocab_size)

    @cached_property
    def _grammars(self) -> Callable[[int], Grammars]:
        return lru_cache(1)(partial(Grammars, self.tokenizer))

    @cached_property
    def blocks(self) -> torch.nn.ModuleList | None:
        """Decoder blocks in order; None if no module list has one entry per layer.

        A vision tower may have as many blocks, so the list nearest to the word embeddings wins, and
        then the outermost.
        """
        layers, words = self.facts.layers, self.model.get_input_embeddings()
        home: list[str] = []
        found: list[tuple[list[str], torch.nn.ModuleList]] = []
        for name, module in self.model.named_modules():
            if module is words:
                home = name.split(".")
            elif isinstance(module, torch.nn.ModuleList) and len(module) == layers:
                found.append((name.split("."), module))

        def nearness(candidate: tuple[list[str], torch.nn.ModuleList]) -> tuple[int, int]:
            return common_prefix(candidate[0], home), -len(candidate[0])

        return max(found, key=nearness)[1] if found else None

    @property
    def generation_config(self) -> Any:
        """The authors' defaults for `generate`."""
        return self.model.generation_config
