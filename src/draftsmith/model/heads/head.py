"""Head: a trained head as a model that reads hidden states beside tokens.

Shapes: `n` positions, `d` width of a state, `K` tokens of the head, `V` vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers.modeling_outputs import CausalLMOutputWithPast

from draftsmith.core.target import ModelFacts
from draftsmith.errors import LoadError, UnsupportedError
from draftsmith.model.capabilities import Capabilities
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.prepack import prepack
from draftsmith.model.runner import Runner


class Head(nn.Module, ABC):
    """A head as a model. `feed` passes it the states of the tokens that `Runner` calls it with."""

    config: Any
    """Configuration of its own blocks, for the runner's caches and masks."""
    embeddings: Tensor
    """(V, d)"""
    ids: Tensor | None = None
    """(K,) ids of its tokens in the target's vocabulary; None: they are the same."""

    @abstractmethod
    def step(self, embedded: Tensor, states: Tensor, **attention: Any) -> Tensor:
        """Return the next states (1, n, d) from embedded tokens and states, (1, n, d) each.

        `attention`: positions, mask and cache.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Return logits (n, K) from states (n, d)."""

    def feed(self, states: Tensor) -> None:
        """Set the states (n, d) for the tokens of the next passes, in the same order."""
        self._fed = states.to(self.dtype)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = True,  # noqa: ARG002  always used
        logits_to_keep: int | Tensor = 0,
    ) -> CausalLMOutputWithPast:
        """Return the states (1, m, d) of the tokens to keep in place of logits."""
        n = input_ids.shape[1]
        states, self._fed = self._fed[None, :n], self._fed[n:]
        if attention_mask is None:  # transformers' own cache: slots are positions
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
        """Dtype of its weights."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Device of its weights."""
        return self.embeddings.device

    def get_input_embeddings(self) -> Any:
        """Return an object with the embeddings as its weight, for the device of input ids."""
        return SimpleNamespace(weight=self.embeddings)

    def get_output_embeddings(self) -> Any:
        """Return None, because `forward` returns states."""
        return None


def embeddings_of(model: ModelFacts, who: str) -> Tensor:
    """Return the target's embeddings (V, D), not copied; raise UnsupportedError if it has none."""
    if model.model is None:
        raise UnsupportedError(f"{who} needs the embeddings of a model, and there is none")
    weight: Tensor = model.model.get_input_embeddings().weight.detach()
    if weight.device.type == "meta":
        raise UnsupportedError(f"{who} uses the embeddings of the model, and these are offloaded")
    return weight


def runner_of(head: Head, packs: bool) -> Runner:
    """Return a runner for a head; on a CPU, the weights of its linear layers are prepacked.

    `packs`: whether the head can use our attention, so that trees of all sequences share its
    passes; otherwise it computes chains, one sequence after the other.
    """
    packed = Capabilities("tree", "draftsmith", "packed")
    if head.device.type == "cpu":
        prepack(head, keep=False)
    abilities = packed if packs else Capabilities("chain", "sdpa", "own")
    return Runner(LoadedModel(head.eval(), None, abilities, type(head).__name__))


def check_tensors(head: Head, tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise UnsupportedError for unknown tensors, LoadError for missing ones and wrong shapes."""
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    if unknown := sorted(tensors.keys() - wanted.keys()):
        raise UnsupportedError(
            f"{source}: the head's tensor {unknown[0].removeprefix('fuse.')!r} is not known, and "
            "may change what it computes"
        )
    for name, shape in wanted.items():
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != shape:
            raise LoadError(
                f"{source}: the head's tensor {name.removeprefix('fuse.')!r} should have the shape "
                f"{shape}, and {'is missing' if found is None else f'has {found}'}"
            )
