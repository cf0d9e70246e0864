"""EAGLE-3: a small head that reads the target's hidden states drafts for the unmodified model.

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test" (arXiv 2503.01840). `docs/algorithms/eagle3.md` shows the paper beside the
code: `model/heads/eagle3_files.py` reads published heads, `model/heads/eagle3.py` is the module,
and `drafters/trained_head.py` drafts with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from draftsmith.core.drafter import Drafter
from draftsmith.core.target import ModelFacts, Needs
from draftsmith.drafters.trained_head import BoundHead, HeadDrafter
from draftsmith.errors import LoadError


@dataclass(frozen=True, repr=False)
class Eagle3(HeadDrafter):
    """Trees drafted by an EAGLE-3 head: the folder or hub id `model`, in either format.

    The head reads the states of three blocks of the target and drafts the likeliest continuations.
    A target that verifies chains gets the likeliest chain.
    """

    model: str
    nodes: int = 16
    """Nodes of a tree at a fixed budget."""
    depth: int = 5
    """Tokens of a branch at most: so often is the head asked for a draft."""
    sample: bool = False
    """Where the target samples, draw a chain from the head's distribution instead of guessing a
    tree. Seeds then give other tokens than plain decoding, by the same distribution."""

    name: ClassVar[str] = "eagle3"
    summary: ClassVar[str] = "a trained head drafts from the model's own states (EAGLE-3)"
    needs: ClassVar[Needs] = Needs(hidden_layers=(2, 16, 29))

    def bind(self, model: ModelFacts) -> Drafter:
        """Read the head; raises LoadError or UnsupportedError where it does not fit the model."""
        from draftsmith.model.dtype import dtype_beside
        from draftsmith.model.heads import eagle3_files
        from draftsmith.model.heads.eagle3 import build, usual_layers
        from draftsmith.model.heads.head import embeddings_of

        files = eagle3_files.read(str(self.model))
        ids = eagle3_files.target_ids(files.tensors, model.vocab_size, self.model)
        layers = files.layer_ids or usual_layers(model.layers)
        embeddings = files.tensors.pop("embed_tokens.weight", None)
        if embeddings is None:
            embeddings = embeddings_of(model, self.model)
        width = files.layer.hidden_size
        if embeddings.shape[1] != width or len(embeddings) < model.vocab_size:
            raise LoadError(
                f"{self.model} does not fit this model: it needs embeddings of {model.vocab_size} "
                f"tokens and the width {width}, and those there are have the shape "
                f"{tuple(embeddings.shape)}"
            )
        config = model.model and model.model.config.get_text_config(decoder=True)
        own_width = getattr(config, "hidden_size", files.target_width)
        if own_width != files.target_width:
            raise LoadError(
                f"{self.model} reads states of the width {files.target_width}, and this model's "
                f"have {own_width}"
            )
        stored = files.tensors["fc.weight"].dtype
        target = stored if model.model is None else model.model.dtype
        dtype = dtype_beside(target, stored, torch.device(model.device))
        head = build(files, len(layers), model.device, dtype, self.model)
        head.embeddings = embeddings.to(model.device)
        head.ids = None if ids is None else ids.to(model.device)
        return BoundHead.of(self, head, Needs(layers, fold=head.fuse), model)
