"""Do sampled answers follow the target's distribution? Draws from two tiny models against the exact
distribution.

    python -m benchmarks.sampled_distributions                   # ours, five minutes on two cores
    python -m benchmarks.sampled_distributions --transformers    # its own assisted generation
    python -m benchmarks.sampled_distributions --draws 2000

Three tokenizers trained on the spot (9, 7 and 5 tokens over the letters a, b, c and the space) and
random Llamas for them. The distribution of the first two tokens is computed from the target alone;
answers go on for two more tokens, so that drafts overshoot them. χ² over all first two tokens.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.core.drafter import Drafter
from draftsmith.drafters.cascade import Cascade
from draftsmith.drafters.copyspec import CopySpec
from draftsmith.drafters.draft_model.draft_model import DraftModel
from draftsmith.engine.engine import Engine

TEXTS = {"target": "abcaab bacbabaab cabcbbaac ab ", "drafter": "bb acb aacbbc cbb ca bbca bcc "}
SIZES = {"target": 9, "drafter": 7, "letters": 5}
PROMPT = "ab ca abc"
LENGTH = 4
"""New tokens per answer; the first two are looked at."""

Distribution = dict[tuple[int, ...], float]


@cache
def tokenizer(name: str) -> Any:
    """A BPE of `SIZES[name]` tokens, its end of sequence among them."""
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
    """A random Llama whose distributions are neither flat nor certain."""
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
    """The distribution of the first two tokens; an answer that ends at once has one."""

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
    """The probability of counts at least as far from `distribution`; cells that expect under 5 are
    one."""
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
    if found.keys() - distribution.keys():  # outcomes that cannot be
        return 0.0
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def distance(found: Counter[tuple[int, ...]], distribution: Distribution) -> float:
    """Total variation."""
    draws = found.total()
    return sum(abs(found[o] / draws - distribution.get(o, 0)) for o in {*found, *distribution}) / 2


def drafters() -> dict[str, Drafter]:
    """Every algorithm, with its confidence rule on."""

    def draft(name: str, algorithm: Any, **options: Any) -> DraftModel:
        own = {"tokens": 3, "confidence": 0.3} | options
        return DraftModel(model(name, 2), tokenizer=tokenizer(name), algorithm=algorithm, **own)

    return {
        "standard": draft("target", "standard"),
        "union": draft("drafter", "union"),
        "tli": draft("drafter", "tli"),
        "slem": draft("drafter", "slem"),
        "slrs, path": draft("letters", "slrs"),
        "slrs, enumerate": draft("letters", "slrs", psi="enumerate"),
        "tli, reproducible": draft("drafter", "tli", reproducible=True),
        "copyspec+tli": Cascade((CopySpec(gamma=1), draft("drafter", "tli"))),
    }


def drawn(drafter: Drafter, draws: int, seed: int = 0) -> Counter[tuple[int, ...]]:
    """The first two tokens of `draws` answers of our loop."""
    engine = Engine.from_pretrained(
        model("target", 1),
        tokenizer=tokenizer("target"),
        drafter=drafter,
        budget="drafter",
        max_batch=64,
    )
    found: Counter[tuple[int, ...]] = Counter()
    for start in range(0, draws, 1000):
        results = engine.generate(
            prompt(),
            n=min(1000, draws - start),
            temperature=1.0,
            max_new_tokens=LENGTH,
            seed=seed + start,
        )
        found.update(tuple(result.tokens[:2]) for result in results)
    return found


def peers() -> dict[str, dict[str, Any]]:
    """transformers' own ways of drafting for a sampling target."""
    other = {"tokenizer": tokenizer("target"), "assistant_tokenizer": tokenizer("drafter")}
    return {
        "generate": {},
        "prompt lookup": {"prompt_lookup_num_tokens": 3},
        "assisted, same tokenizer": {"assistant_model": model("target", 2)},
        "assisted, other tokenizer": {"assistant_model": model("drafter", 2)} | other,
    }


def drawn_by_transformers(options: dict[str, Any], draws: int) -> Counter[tuple[int, ...]]:
    """The first two tokens of `draws` answers of `model.generate`."""
    ids = torch.tensor([prompt()])
    found: Counter[tuple[int, ...]] = Counter()
    torch.manual_seed(0)
    for _ in range(draws):
        answer = model("target", 1).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=LENGTH,
            **options,
        )
        new = answer[0, ids.shape[1] :].tolist()
        found[tuple(new[: 1 if new[0] == 0 else 2])] += 1
    return found


def report(
    name: str, draw: Callable[[], Counter[tuple[int, ...]]], distribution: Distribution
) -> None:
    try:
        found = draw()
    except Exception as error:  # what crashes is a finding, too
        print(f"{name:28} {type(error).__name__}: {str(error).splitlines()[0][:60]}")
        return
    p = chi_square(found, distribution)
    print(
        f"{name:28} p = {p:.2g}   total variation {distance(found, distribution):.3f}   "
        f"{found.total()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, help="20,000 of ours, 2,000 of transformers'")
    parser.add_argument("--transformers", action="store_true", help="its own generation instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    distribution = exact_distribution(model("target", 1), prompt())
    if options.transformers:
        for name, given in peers().items():
            report(
                name, lambda g=given: drawn_by_transformers(g, options.draws or 2000), distribution
            )
        return
    for name, drafter in drafters().items():
        report(name, lambda d=drafter: drawn(d, options.draws or 20_000), distribution)


if __name__ == "__main__":
    main()
