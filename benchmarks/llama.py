"""llama.cpp through its C interface, on the weights of a GGUF file in bfloat16."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import llama_cpp as lib
import torch


class Llama:
    """A context with some tokens, and passes after it."""

    def __init__(self, gguf: Path, context: int, widest: int) -> None:
        """Load the file and compute `context` tokens; `widest` is the largest width of a pass."""
        lib.llama_backend_init()
        wanted = lib.llama_model_quantize_default_params()
        wanted.ftype, wanted.allow_requantize = lib.LLAMA_FTYPE_MOSTLY_BF16, True
        with tempfile.TemporaryDirectory() as folder:
            target = os.fsencode(Path(folder) / "bfloat16.gguf")
            if lib.llama_model_quantize(os.fsencode(gguf), target, ctypes.byref(wanted)):
                raise SystemExit(f"llama.cpp cannot write {gguf} in bfloat16")
            options = lib.llama_model_default_params()
            options.n_gpu_layers = 0
            model = lib.llama_model_load_from_file(target, options)
        own = lib.llama_context_default_params()
        own.n_ctx = context + widest + 1
        own.n_threads = own.n_threads_batch = torch.get_num_threads()
        self._context, self._length = lib.llama_init_from_model(model, own), context
        self._batch = lib.llama_batch_init(max(context, widest), 0, 1)
        self._decode(range(context), logits=False)

    def run(self, width: int) -> None:
        """Run a pass over `width` tokens, with logits for each, and remove its tokens again."""
        memory = lib.llama_get_memory(self._context)
        lib.llama_memory_seq_rm(memory, 0, self._length, -1)
        self._decode(range(self._length, self._length + width), logits=True)

    def _decode(self, positions: Sequence[int], logits: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(positions)
        for i, position in enumerate(positions):
            batch.token[i], batch.pos[i], batch.logits[i] = 100 + position, position, logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if lib.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp cannot decode")
