"""A tiny model and tokenizer made on the spot: nothing to download, nothing shared."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, this is a test of the tokenizer",
    "def foo(x): return x + 1",
] * 20
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {{ hint or '' }}{% endif %}"
)


@cache
def tokenizer(vocab: int = 400) -> Any:
    """Byte-level BPE with a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXT, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = TEMPLATE
    return made


@cache
def sentencepiece(fallback: bool = True) -> Any:
    """SentencePiece's kind, as of Llama 2: it drops the space before the first word of all.

    Without `fallback`, T5's decoder, to which bytes are names.
    """
    special = ["<pad>", "<s>", "</s>"]
    pieces = [*special, *"abcdefghijklmnopqrstuvwxyz", "▁", "▁once", "▁upon", "▁a", "▁time"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    scored = [(piece, -5.0 if len(piece) == 1 else -1.0) for piece in pieces]
    unigram = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    unigram.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    unigram.decoder = decoders.Metaspace()
    if fallback:
        whole = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
        unigram.decoder = decoders.Sequence([*whole, decoders.Strip(" ", 1, 0)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=unigram, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = TEMPLATE
    return made


@cache
def model(layers: int = 2, context: int = 512) -> Any:
    """A random Llama with peaked distributions, so that greedy answers wander and repeat."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    made = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(0.35 * torch.randn(parameter.shape, generator=generator))
    return made


def save(folder: Path) -> Path:
    """Save model and tokenizer in a folder, and return it."""
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
