"""A real model's passes on a CPU: as transformers runs them, with packed layers, in llama.cpp.

    python -m benchmarks.passes                      # float32 and, where there is one, bfloat16
    python -m benchmarks.passes --runs 5 --dtype float32

SmolLM2-135M-Instruct, two tables. Tokens per second of whole greedy answers, prompt included:
`model.generate` on the layers as loaded, and our plain loop on them and on packed ones. Seconds of
a pass by width after 256 tokens, all in turn in one process, each after two of its own; with
`llama-cpp-python` installed (built here, seven minutes on two cores) also llama.cpp's on the same
weights in bfloat16.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.paired import in_turn, ratio
from draftsmith import Engine, builtin
from draftsmith.core.draft import Draft
from draftsmith.model.measure import processor
from draftsmith.model.runner import Runner

CONTEXT = 256
WIDTHS = (1, 2, 4, 8, 16, 32)
MODEL = "smollm2"
PROMPT = (
    "A lighthouse keeper and his dog live on an island. Tell the story of the night on which the "
    "lamp went out, from the dog's point of view."
)


def answers(plain: Engine, packed: Engine, tokens: int, runs: int) -> None:
    """Print tokens per second of `tokens` greedy tokens, prompt included."""
    messages = [{"role": "user", "content": PROMPT}]
    ids = torch.tensor([plain.generate(messages, max_new_tokens=1).prompt_tokens])
    exact: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens}

    def theirs() -> object:
        # No attention mask: nothing is padded, and none saves it a look at one.
        return plain.model.model.generate(ids, do_sample=False, pad_token_id=0, **exact)

    def ours(engine: Engine) -> Callable[[], object]:
        return lambda: engine.generate(messages, temperature=0, **exact)

    arms = {"model.generate": theirs, "plain": ours(plain), "plain, packed": ours(packed)}
    seconds = dict(zip(arms, in_turn(list(arms.values()), runs), strict=True))
    print("\n| tokens/s of an answer | median | over model.generate |\n|---|---|---|")
    for name, own in seconds.items():
        over = ratio(seconds["model.generate"], own)
        print(f"| {name} | {tokens / over.b_seconds:.1f} | {over} |")


def passes(plain: Engine, packed: Engine, other: Llama | None, runs: int) -> None:
    """Print milliseconds of a pass by width."""
    arms = {"transformers' layers": _pass(plain), "packed layers": _pass(packed)}
    if other is not None:
        arms["llama.cpp, bfloat16"] = other.run
    print("\n| tokens | " + " | ".join(f"{name}, ms" for name in arms) + " | packed over plain | ")
    print("|---" * (len(arms) + 2) + "|")
    for width in WIDTHS:
        timed = [partial(arm, width) for arm in arms.values()]
        seconds = in_turn(timed, runs * 4, again=2)
        cells = [f"{sorted(own)[len(own) // 2] * 1e3:.1f}" for own in seconds]
        print(f"| {width} | " + " | ".join(cells) + f" | {ratio(seconds[0], seconds[1])} |")


def _pass(engine: Engine) -> Callable[[int], object]:
    """Runs a pass over so many tokens; nothing is kept, so the next one begins at the same end."""
    runner = Runner(engine.model)
    row = runner.open(range(100, 101 + CONTEXT))
    runner.prefill(row)
    return lambda width: runner.forward([row], [Draft.chain(range(200, 199 + width), "fixed")])


class Llama:
    """llama.cpp with the same weights in bfloat16, through its C interface."""

    def __init__(self, gguf: Path, folder: Path) -> None:
        import llama_cpp as lib

        self._lib, target = lib, folder / "bfloat16.gguf"
        lib.llama_backend_init()
        wanted = lib.llama_model_quantize_default_params()
        wanted.ftype, wanted.allow_requantize = lib.LLAMA_FTYPE_MOSTLY_BF16, True
        if lib.llama_model_quantize(os.fsencode(gguf), os.fsencode(target), ctypes.byref(wanted)):
            raise SystemExit(f"llama.cpp cannot write {gguf} in bfloat16")
        options = lib.llama_model_default_params()
        options.n_gpu_layers = 0
        model = lib.llama_model_load_from_file(os.fsencode(target), options)
        context = lib.llama_context_default_params()
        context.n_ctx = CONTEXT + max(WIDTHS) + 1
        context.n_threads = context.n_threads_batch = torch.get_num_threads()
        self._context = lib.llama_init_from_model(model, context)
        self._batch = lib.llama_batch_init(CONTEXT, 0, 1)
        self._decode(range(CONTEXT), logits=False)

    def run(self, width: int) -> None:
        """A pass over so many tokens, with logits for each, which are then forgotten."""
        memory = self._lib.llama_get_memory(self._context)
        self._lib.llama_memory_seq_rm(memory, 0, CONTEXT, -1)
        self._decode(range(CONTEXT, CONTEXT + width), logits=True)

    def _decode(self, positions: Sequence[int], logits: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(positions)
        for i, position in enumerate(positions):
            batch.token[i], batch.pos[i], batch.logits[i] = 100 + position, position, logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if self._lib.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp cannot decode")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--runs", type=int, default=9, help="repetitions of every answer")
    parser.add_argument("--tokens", type=int, default=100, help="tokens per answer")
    args = parser.parse_args(argv)
    print(f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        other = None
        if importlib.util.find_spec("llama_cpp") is not None:
            other = Llama(Path(builtin.resolve(MODEL)), Path(folder))
        for dtype in args.dtype:
            print(f"\n## {MODEL}, {dtype}")
            plain, packed = (
                Engine.from_pretrained(
                    MODEL, dtype=dtype, drafter="none", prepack=prepack, prefixes=0
                )
                for prepack in (False, True)
            )
            prepacked = packed.model.prepacked
            print(prepacked.explain() if prepacked else "")
            answers(plain, packed, args.tokens, args.runs)
            passes(plain, packed, other if dtype == "bfloat16" else None, args.runs)


if __name__ == "__main__":
    main()
