"""MTP: the head for multi-token prediction in the model's own checkpoint drafts.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 2.2. The module is in
`model/heads/mtp.py`; `drafters/trained_head.py` drafts with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from draftsmith.core.drafter import Drafter
from draftsmith.core.target import ModelFacts, Needs
from draftsmith.drafters.trained_head import BoundHead, HeadDrafter
from draftsmith.errors import UnsupportedError


@dataclass(frozen=True, repr=False)
class MTP(HeadDrafter):
    """Drafts by the model's own head for multi-token prediction, of which one module is used.

    For Qwen3-Next, Qwen3.5, DeepSeek-V3, GLM-4.5 and MiMo. The module was trained for one token
    ahead; longer drafts feed it its own states again.
    """

    nodes: int = 16
    depth: int = 3
    sample: bool = False
    normed: bool = True
    """Whether it reads the model's states after the final norm, as other engines do, or before."""

    name: ClassVar[str] = "mtp"
    summary: ClassVar[str] = "the head for multi-token prediction in the model's own checkpoint"
    needs: ClassVar[Needs] = Needs(hidden_layers=(61,))

    def bind(self, model: ModelFacts) -> Drafter:
        """Read the head; raises LoadError or UnsupportedError where the checkpoint has none."""
        from draftsmith.model.forward import unwrapped
        from draftsmith.model.heads.head import embeddings_of
        from draftsmith.model.heads.mtp import FinalNorm, read

        embeddings = embeddings_of(model, self.name)
        if not model.name:
            raise UnsupportedError(
                f"{self.name}: the model was made in memory; its head is read from the files of "
                "the checkpoint that a model was loaded from"
            )
        live = unwrapped(model.model)
        if not hasattr(live.get_decoder(), "rotary_emb"):
            raise UnsupportedError(f"{self.name}: no head is known for {type(live).__name__}")
        head = read(live, model.name)
        head.embeddings = embeddings
        fold = FinalNorm(live) if self.normed else None
        needs = Needs((model.layers,), fold=fold)
        return BoundHead.of(self, head, needs, model, packs=model.shape == "tree")
