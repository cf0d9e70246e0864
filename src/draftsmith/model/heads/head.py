"""What a trained head is to the rest of the program: a model that reads states beside tokens.

Shapes: `n` entries, `d` width of a state, `K` tokens that the head knows, `V` vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers.modeling_outputs import CausalLMOutputWithPast

from draftsmith.core.target import ModelFacts
from draftsmith.errors import UnsupportedError
from draftsmith.model.capabilities import Capabilities
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.prepack import prepack
from draftsmith.model.runner import Runner


class Head(nn.Module, ABC):
    """A head as a model: `Runner` calls it with tokens; `feed` gave it their states before."""

    config: Any
    """Of its own blocks, for the runner's caches and masks."""
    embeddings: Tensor
    """(V, d)"""
    ids: Tensor | None = None
    """(K,) its tokens' ids in the target's vocabulary; None: they are the same."""

    @abstractmethod
    def step(self, embedded: Tensor, states: Tensor, **attention: Any) -> Tensor:
        """(1, n, d) states of the next positions, from those before and the tokens, (1, n, d) each.

        `attention`: positions, mask and cache.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """(n, K) logits of the tokens that follow states (n, d)."""

    def feed(self, states: Tensor) -> None:
        """Give the states (n, d) for the tokens that the next passes read, in their order."""
        self._fed = states.to(self.dtype)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = True,  # noqa: ARG002  there is always one
        logits_to_keep: int | Tensor = 0,
    ) -> CausalLMOutputWithPast:
        """Tokens (1, n) → in place of logits the states (1, m, d) of those to keep."""
        n = input_ids.shape[1]
        states, self._fed = self._fed[None, :n], self._fed[n:]
        if attention_mask is None:  # a cache of transformers: its slots are positions
            slots = torch.arange(int(position_ids.max()) + 1, device=position_ids.device)
            attention_mask = slots <= position_ids[:, None, :, None]
        found = self.step(
            embedding(input_ids, self.embeddings).to(states.dtype),
            states,
            position_ids=position_ids,
            attention_mask=attention_mask,
            cache=past_key_values,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=found[:, kept])

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.embeddings.device

    def get_input_embeddings(self) -> Any:
        """Where input ids go is where the embeddings are."""
        return _Weight(self.embeddings)

    def get_output_embeddings(self) -> Any:
        """None: what it gives are states."""
        return None


@dataclass(frozen=True, slots=True)
class _Weight:
    weight: Tensor


def embeddings_of(model: ModelFacts, who: str) -> Tensor:
    """(V, D) the target's own, shared and not copied; raises UnsupportedError where it has none."""
    if model.model is None:
        raise UnsupportedError(f"{who} needs the embeddings of a model, and there is none")
    weight: Tensor = model.model.get_input_embeddings().weight.detach()
    if weight.device.type == "meta":
        raise UnsupportedError(f"{who} uses the embeddings of the model, and these are offloaded")
    return weight


def runner_of(head: Head, packs: bool) -> Runner:
    """Run a head over many sequences; its linear layers are laid out if it is on the CPU.

    `packs`: whether its attention can be ours, so that trees of all sequences share its passes;
    else it takes chains, one sequence after the other.
    """
    packed = Capabilities("tree", "draftsmith", "packed")
    if head.device.type == "cpu":
        prepack(head, keep=False)
    abilities = packed if packs else Capabilities("chain", "sdpa", "own")
    return Runner(LoadedModel(head.eval(), None, abilities, type(head).__name__))
