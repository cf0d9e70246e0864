"""Llamas of known shapes with random weights, which can be made to say a recorded answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel

CONTEXT = 4096
VOCAB = 128_256
"""Llama 3's, whose tokenizer encodes the recorded answers."""
SHAPES: dict[str, dict[str, Any]] = {
    "toy": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2},
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
    """A Llama whose best token after each position can be given.

    A logits processor could dictate an answer, too, but our loop and transformers call it in
    different ways. Here all arms pay the same: at most three kernels a pass, and no wait.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.register_buffer("following", torch.zeros(CONTEXT, dtype=torch.long), persistent=False)
        self.recites = False

    def recite(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Let every answer to this prompt be `answer`."""
        ids = torch.tensor([*prompt, *answer])
        self.following.zero_()
        self.following[: len(ids) - 1] = ids[1:].to(self.following.device)
        self.recites = True

    @wraps(LlamaForCausalLM.forward)
    def forward(self, *args: Any, **options: Any) -> Any:
        output = super().forward(*args, **options)
        if self.recites:
            kept, positions = options.get("logits_to_keep", 0), options["position_ids"]
            last = slice(-output.logits.shape[1], None)
            wanted = positions[:, last if isinstance(kept, int) else kept]
            output.logits.scatter_(2, self.following[wanted][..., None], CERTAIN)
        return output


class Model:
    """A model of one shape, made on its device at its first use."""

    def __init__(self, shape: str, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self._loaded: LoadedModel | None = None

    def loaded(self, dtype: torch.dtype) -> LoadedModel:
        """Return the model in a dtype; the one before is converted. It recites nothing."""
        before = self._loaded
        if before is None or before.dtype != dtype:
            self._loaded = None
            live = self._random() if before is None else before.model
            self._loaded = load(live.to(dtype))
        self._loaded.model.recites = False
        return self._loaded

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights that a pass reads: all but the embeddings of other tokens."""
        with torch.device("meta"):
            model = Reciting(LlamaConfig(vocab_size=VOCAB, **SHAPES[self.shape]))
        read = set(model.parameters()) - {model.get_input_embeddings().weight}
        read.add(model.get_output_embeddings().weight)
        return dtype.itemsize * sum(weight.numel() for weight in read)

    def _random(self) -> Any:
        torch.manual_seed(0)
        # Transformers 4's prompt lookup needs a token that ends answers; no text has this one.
        config = LlamaConfig(
            vocab_size=VOCAB, max_position_embeddings=CONTEXT, eos_token_id=VOCAB - 1,
            bos_token_id=None, **SHAPES[self.shape],
        )  # fmt: skip
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with self.device:
                return Reciting(config).eval()
        finally:
            torch.set_default_dtype(usual)
