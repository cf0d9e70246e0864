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


@dataclass(frozen=True, repr=False)
class Eagle3(HeadDrafter):
    """Trees drafted by an EAGLE-3 head: the folder or hub id `model`, in either format.

    The head reads the states of three blocks of the target and drafts the likeliest continuations.
    A target that verifies chains gets the likeliest chain.
    """

    model: str
    nodes: int = 16
    depth: int = 5
    sample: bool = False

    name: ClassVar[str] = "eagle3"
    summary: ClassVar[str] = "a trained head drafts from the model's own states (EAGLE-3)"
    needs: ClassVar[Needs] = Needs(hidden_layers=(2, 16, 29))

    def bind(self, model: ModelFacts) -> Drafter:
        """Read the head; raises LoadError or UnsupportedError where it does not fit the model."""
        from draftsmith.model.dtype import dtype_beside
        from draftsmith.model.heads import eagle3_files
        from draftsmith.model.heads.eagle3 import build, fitted

        files = eagle3_files.read(str(self.model))
        ids, layers, embeddings = fitted(files, model, self.model)
        stored = files.tensors["fc.weight"].dtype
        target = stored if model.model is None else model.model.dtype
        dtype = dtype_beside(target, stored, torch.device(model.device))
        head = build(files, len(layers), model.device, dtype, self.model)
        head.embeddings = embeddings.to(model.device)
        head.ids = None if ids is None else ids.to(model.device)
        return BoundHead.of(self, head, Needs(layers, fold=head.fuse), model)
