"""Tiny models with tokenizers of their own, and tests of samples from them.

Three tokenizers are trained on the spot (9, 7 and 5 tokens over the letters a, b, c and the space),
with random Llamas for them.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith import Engine
from draftsmith.core.drafter import Drafter

TEXTS = {"target": "abcaab bacbabaab cabcbbaac ab ", "drafter": "bb acb aacbbc cbb ca bbca bcc "}
SIZES = {"target": 9, "drafter": 7, "letters": 5}
PROMPT = "ab ca abc"
LENGTH = 4
"""New tokens of an answer; the first two are compared."""

Distribution = dict[tuple[int, ...], float]


@cache
def tokenizer(name: str) -> Any:
    """Return a BPE of `SIZES[name]` tokens, with an end of sequence."""
    bpe = Tokenizer(models.BPE())
    bpe.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES[name],
        special_tokens=["</s>"],
        initial_alphabet=list("abc "),
        show_progress=False,
    )
    bpe.train_from_iterator([TEXTS.get(name, "abc ")] * 20, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", pad_token="</s>")
    made.clean_up_tokenization_spaces = False
    return made


@cache
def model(name: str, seed: int) -> Any:
    """Return a random Llama with distributions that are neither flat nor certain."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer(name)),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=0,
    )
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(0.35 * torch.randn(parameter.shape))
    return made


def prompt() -> list[int]:
    ids: list[int] = tokenizer("target")(PROMPT)["input_ids"]
    return ids


def exact_distribution(target: Any, ids: list[int], end: int = 0) -> Distribution:
    """Return the distribution of the first two tokens, or one if the answer ends at once."""

    def following(prefix: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = target(torch.tensor([prefix])).logits[0, -1]
        return torch.as_tensor(logits.double().softmax(-1))

    distribution: Distribution = {}
    for first, p in enumerate(following(ids).tolist()):
        if first == end:
            distribution[(first,)] = p
            continue
        for second, q in enumerate(following([*ids, first]).tolist()):
            distribution[first, second] = p * q
    return distribution


def chi_square(found: Counter[tuple[int, ...]], distribution: Distribution) -> float:
    """Return the probability of counts at least as far from `distribution`.

    Cells with an expected count below 5 are merged.
    """
    draws = found.total()
    rare_found = rare_expected = statistic = 0.0
    cells = 0
    for outcome, p in distribution.items():
        expected = draws * p
        if expected < 5:
            rare_found, rare_expected = rare_found + found[outcome], rare_expected + expected
        else:
            statistic += (found[outcome] - expected) ** 2 / expected
            cells += 1
    if rare_expected:
        statistic += (rare_found - rare_expected) ** 2 / rare_expected
        cells += 1
    if found.keys() - distribution.keys():  # impossible outcomes
        return 0.0
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def distance(found: Counter[tuple[int, ...]], distribution: Distribution) -> float:
    """Total variation."""
    draws = found.total()
    return sum(abs(found[o] / draws - distribution.get(o, 0)) for o in {*found, *distribution}) / 2


def drawn(drafter: Drafter, draws: int) -> Counter[tuple[int, ...]]:
    """Count the first two tokens of `draws` answers of our loop."""
    engine = Engine.from_pretrained(model("target", 1), tokenizer=tokenizer("target"),
                                    drafter=drafter, budget="drafter", max_batch=64)  # fmt: skip
    found: Counter[tuple[int, ...]] = Counter()
    for start in range(0, draws, 1000):
        n, options = min(1000, draws - start), {"temperature": 1.0, "max_new_tokens": LENGTH}
        results = engine.generate(prompt(), n=n, seed=start, **options)
        found.update(tuple(result.tokens[:2]) for result in results)
    return found
