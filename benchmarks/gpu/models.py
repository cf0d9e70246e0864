"""Llamas of known shapes with random weights, which can be made to say a recorded answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.probe import with_store

CONTEXT = 4096
VOCAB = 128_256
"""Llama 3's, whose tokenizer encodes the recorded answers."""
SHAPES: dict[str, dict[str, Any]] = {
    "toy": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 16_384},
    "small": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
              "num_attention_heads": 8, "num_key_value_heads": 2},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8},
}  # fmt: skip
CERTAIN = 1e4
"""Logit of a recited token."""


class Reciting(LlamaForCausalLM):
    """A Llama whose best token after each position can be given, at the same cost for all arms."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.register_buffer("following", torch.zeros(CONTEXT, dtype=torch.long), persistent=False)
        self.register_buffer("certain", torch.zeros(()), persistent=False)  # a graph runs no Python

    def recite(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Let every answer to this prompt be `answer`; without an answer, the model's own."""
        ids = torch.tensor([*prompt, *answer], dtype=torch.long)[1:]
        self.following[: len(ids)] = ids.to(self.following.device)
        self.certain.fill_(CERTAIN if answer else 0)

    @wraps(LlamaForCausalLM.forward)
    def forward(self, *args: Any, **options: Any) -> Any:
        output = super().forward(*args, **options)
        if (positions := options.get("position_ids")) is not None:
            kept, last = options.get("logits_to_keep", 0), slice(-output.logits.shape[1], None)
            wanted = self.following[positions[:, last if isinstance(kept, int) else kept], None]
            output.logits.scatter_add_(2, wanted, self.certain.expand(wanted.shape))
        return output


class Model:
    """A model of one shape, made on its device at its first use."""

    def __init__(self, shape: str, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self._loaded: dict[str, LoadedModel] = {}

    def loaded(self, dtype: torch.dtype, store: str = "packed") -> LoadedModel:
        """Return the model in a dtype, which recites nothing; the one before is converted."""
        before = self._loaded.get("packed")
        if before is None or before.dtype != dtype:
            self._loaded.clear()
            live = self._random() if before is None else before.model
            before = self._loaded["packed"] = load(live.to(dtype), store="packed")
        before.model.recite([], [])
        if store not in self._loaded:
            self._loaded[store] = with_store(before, store)
        assert self._loaded[store].store == store, self._loaded[store].reasons
        return self._loaded[store]

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights that a pass reads: all but the embeddings of other tokens."""
        with torch.device("meta"):
            model = Reciting(self._config())
        read = set(model.parameters()) - {model.get_input_embeddings().weight}
        read.add(model.get_output_embeddings().weight)
        return dtype.itemsize * sum(weight.numel() for weight in read)

    def _config(self) -> LlamaConfig:
        shape = {"vocab_size": VOCAB, "bos_token_id": None, **SHAPES[self.shape]}
        # Transformers 4's prompt lookup needs a token that ends answers; no text has this one.
        end = shape["vocab_size"] - 1
        return LlamaConfig(eos_token_id=end, max_position_embeddings=CONTEXT, **shape)

    def _random(self) -> Any:
        torch.manual_seed(0)
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with self.device:
                return Reciting(self._config()).eval()
        finally:
            torch.set_default_dtype(usual)
