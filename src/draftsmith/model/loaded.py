"""A model ready to decode: the user's own object, untouched, and what we know about it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from typing import Any

import torch

from draftsmith.core.drafter import common_prefix
from draftsmith.core.target import ModelFacts
from draftsmith.model.capabilities import Capabilities
from draftsmith.model.exact.widths import Widths
from draftsmith.model.forward import Forward
from draftsmith.model.prepack import Prepacked
from draftsmith.model.windows import windows_by_layer
from draftsmith.text.grammar import Grammars
from draftsmith.text.vocab import fingerprint

_WITHOUT_KEYS = {"linear_attention", "mamba", "conv", "moe"}
"""Layer types that keep no keys."""


def _number(config: Any, name: str) -> int:
    """A setting that some models have for each layer: the largest; 0 where none can be read."""
    try:
        given = getattr(config, name, 0)
        return int((max(given) if isinstance(given, list | tuple) else given) or 0)
    except Exception:  # what a configuration raises that wants to be asked layer by layer
        return 0


def last_part(name: str) -> str:
    """What tables call a model: a path of this machine says nothing to a reader elsewhere."""
    return name.rstrip("/").rsplit("/", 1)[-1]


@dataclass(frozen=True, eq=False, repr=False)
class LoadedModel:
    """What `load` returns. Several runners may share one; the model itself is never changed."""

    model: Any
    """A `PreTrainedModel`, or a PEFT model around one."""
    tokenizer: Any | None
    capabilities: Capabilities
    name: str
    """What the user called it: hub id, folder, or the class of a live model."""
    prepacked: Prepacked | None = None
    """Which linear layers are laid out for this CPU; None where that was not asked for."""
    widened: torch.dtype | None = None
    """The checkpoint's dtype, where its weights are float32 instead (`model.dtype`)."""
    exact: Widths | None = None
    """The widths of its passes, where rows shall come out alike to the bit; None: any will do."""

    def __repr__(self) -> str:
        kind = type(self.model).__name__
        return f"LoadedModel({last_part(self.name)!r}, {kind}, {self.dtype_name} on {self.device})"

    @cached_property
    def forward(self) -> Forward:
        """How the model is called; shared by all runners, which take turns."""
        return Forward(self.model, packs=self.capabilities.packed)

    @property
    def config(self) -> Any:
        """The configuration of the text decoder."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def device(self) -> torch.device:
        """Where input ids go."""
        return self.forward.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights that are not quantized."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def dtype_name(self) -> str:
        """The same as people write it: float32."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def dtype_explained(self) -> str:
        """The same, and why it is not the checkpoint's."""
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
        return int(width or self.config.vocab_size)

    @property
    def context_length(self) -> int | None:
        """Positions the model was made for; None if its config names none."""
        names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
        lengths = (getattr(self.config, name, None) for name in names)
        return next((n for n in lengths if isinstance(n, int) and n > 0), None)

    def row_bytes(self, positions: int, spare: int | None = None, *, windowed: bool = False) -> int:
        """Of keys and values of so many positions, as the self-test found them.

        `spare`: positions that a layer with a window may have beside it; None: it keeps them all.
        `windowed`: only of the layers with a window.
        """
        each = self.capabilities.position_sizes or self._configured_sizes
        windows = cycle(windows_by_layer(self.config))
        slots = (
            (0 if windowed else positions)
            if spare is None or window is None
            else min(positions, window.size + spare)
            for window in windows
        )
        numbers = sum(one * many for one, many in zip(each, slots, strict=False))
        return int(numbers * self.dtype.itemsize)

    @property
    def _configured_sizes(self) -> list[int]:
        """The same as `position_sizes`, as most configurations tell them."""
        config = self.config
        layers, heads, groups, size, width = (
            _number(config, name)
            for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                         "hidden_size", "head_dim")
        )  # fmt: skip
        groups, width = groups or heads, width or (size // heads if heads else 0)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
        return [0 if kind in _WITHOUT_KEYS else 2 * groups * width for kind in kinds]

    @property
    def facts(self) -> ModelFacts:
        """What drafters may know of it."""
        config = self.config
        heads = getattr(config, "num_attention_heads", 0)
        return ModelFacts(
            layers=int(getattr(config, "num_hidden_layers", 0)),
            # Where every layer has its own number, ask for heads that all layers have.
            heads=min(heads) if isinstance(heads, list | tuple) else int(heads or 0),
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
        """Fingerprint of what its tokenizer's ids mean; None without a tokenizer."""
        return None if self.tokenizer is None else fingerprint(self.tokenizer)

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars that answers were asked to follow, compiled for its tokenizer."""
        return Grammars(self.tokenizer, self.vocab_size)

    @cached_property
    def blocks(self) -> torch.nn.ModuleList | None:
        """The decoder blocks in order: of the module lists with one entry per layer, the outermost.

        A vision tower may have as many blocks, so the list nearest the word embeddings wins.
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
        """The defaults its authors recommend for `generate`."""
        return self.model.generation_config
