"""PLD+'s and SPECTRA's ablations on SmolLM2's recorded answers, in tokens per pass.

    python -m benchmarks.smollm2_ablations ANSWERS.jsonl
    python -m benchmarks.smollm2_ablations ANSWERS.jsonl --corpus FOLDER --each 2 --tokens 64

ANSWERS are plain greedy answers, of `draftsmith bench run PROMPTS.jsonl -m smollm2 --dtype float32
-a none -o ANSWERS.jsonl`. How far a copy of PLD+ would have held follows from one pass over prompt
and answer. SPECTRA's pool is asked in the passes themselves, so with --corpus the answers are given
again, `each` of every task.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from recipes.auto.passes import HALVES, task_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.bench import generations
from draftsmith.core.drafter import Context
from draftsmith.core.sampling import SamplingParams, TorchSampler
from draftsmith.drafters.ngrams import common_past
from draftsmith.drafters.pld_plus import PldPlus
from draftsmith.engine.engine import Engine
from draftsmith.model.load import folder_of, load
from draftsmith.tune.pld_plus import agreement, likely_source, passes, ranked

K = (5, 10, 20, 30, 50, 70, 100)
LAYERS = (1, 2, 4, 8, 9, 12, 16, 20, 24, 26, 28, 29, 30)
COPYING = ("summarization", "rag", "commit_edits")
"""Tasks whose answers repeat their prompts."""

Places = list[int]


def read(path: Path) -> list[tuple[str, list[int], int]]:
    """Task, ids and prompt length of each answer."""
    rows = (row for row in generations.read(path).entries if row.arm == "none")
    return [
        (task_of(row.suite, row.category), [*row.prompt_ids, *row.output_ids], len(row.prompt_ids))
        for row in rows
    ]


class Looks:
    """A model that shows its states and its attention."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder_of("smollm2"), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.rows: list[Tensor] = []
        """By layer: (H, T - first, T) weights of the last positions."""
        self.first = 0
        for block in self.model.model.layers:
            block.self_attn.register_forward_hook(self._keep)

    def _keep(self, _module: Any, _inputs: Any, output: Any) -> None:
        self.rows.append(output[1][0, :, self.first :].clone())

    @torch.inference_mode()
    def __call__(self, ids: Sequence[int], prompt: int) -> tuple[list[Tensor], Tensor]:
        """States (T, D) behind each block and the weights (L, H, rows, T) from the last prompt
        token on."""
        self.rows, self.first = [], prompt - 1
        hidden: list[Tensor] = []
        hooks = [
            block.register_forward_hook(lambda _m, _i, out: hidden.append(out[0]))
            for block in self.model.model.layers
        ]
        self.model(torch.tensor([ids]), use_cache=False, logits_to_keep=1)
        for hook in hooks:
            hook.remove()
        return hidden, torch.stack(self.rows)


def reach(ids: list[int], prompt: int, best: Callable[[Places, int], int]) -> list[int]:
    """By position of the answer: how far the copy that `best` chooses agrees; -1 copies nothing."""
    found = []
    for end in range(prompt, len(ids)):
        t = end - 1
        places = [j for j in range(t - 1, -1, -1) if ids[j] == ids[t]]
        j = best(places, t) if places else -1
        found.append(agreement(ids[j + 1 : min(j + 1 + K[-1], t + 1)], ids, end) if j >= 0 else 0)
    return found


def by_drafter(drafter: PldPlus, hidden: Tensor | None, weights: Any) -> Callable[..., int]:
    """The drafter's own choice."""
    state: Any = drafter.open(None)  # type: ignore[arg-type]

    def best(found: Places, t: int) -> int:
        ctx = Context([0] * (t + 1), 1, 0, SamplingParams(), TorchSampler())
        ctx.hidden = None if hidden is None else hidden[:t]
        ctx.attention = None if weights is None else lambda j: weights(t)[:, j]
        chosen = state._best(found, ctx)
        return -1 if chosen is None else int(chosen)

    return best


def rankings(
    ids: list[int], prompt: int, looks: Looks, heads: Sequence[tuple[int, int]]
) -> dict[str, list[int]]:
    """The reach of all of them, by name."""
    hidden, weights = looks(ids[:-1], prompt)
    layer = PldPlus().needs_of(Facts()).hidden_layer  # type: ignore[arg-type]

    def of(pairs: Any, combine: Any = "max") -> Callable[..., int]:
        index = torch.tensor(pairs)
        drafter = PldPlus(rank="attention", heads=((0, 0),), combine=combine)
        own = weights[index[:, 0], index[:, 1]]
        return by_drafter(drafter, None, lambda t: own[:, t - prompt])

    def furthest(found: Places, t: int) -> int:
        return max(found, key=lambda j: agreement(ids[j + 1 : t + 1], ids, t + 1))

    total, each = weights.shape[:2]
    everything = [(n, head) for n in range(total) for head in range(each)]
    chosen: dict[str, Callable[[Places, int], int]] = {
        "the last place": lambda found, _: found[0],
        "the first place": lambda found, _: found[-1],
        "the longest common past, then the last": lambda found, t: max(
            found, key=lambda j: (common_past(ids, j, t), j)
        ),
        "attention, the best 50 heads": of(heads[:50]),
        "… the best 12": of(heads[:12]),
        "… the best 1": of(heads[:1]),
        "… the best 50, sum": of(heads[:50], "sum"),
        f"… all heads of layer {layer}": of([(layer - 1, head) for head in range(each)]),
        "… all heads": of(everything),
        "… all heads, sum": of(everything, "sum"),
        "the place that holds longest (an oracle)": furthest,
    }
    for n in LAYERS:
        chosen[f"states of layer {n}"] = by_drafter(PldPlus(layer=n), hidden[n - 1], None)
    for m in (2, 4):
        chosen[f"states of layer {layer}, mean of {m}"] = by_drafter(
            PldPlus(layer=layer, average=m), hidden[layer - 1], None
        )
    chosen[f"states of layer {layer}, threshold 0"] = by_drafter(
        PldPlus(layer=layer, threshold=0.0), hidden[layer - 1], None
    )
    return {name: reach(ids, prompt, best) for name, best in chosen.items()}


class Facts:
    """As much of SmolLM2 as the drafter asks for; no calibration."""

    layers, heads, name = 30, 9, ""


def peaks(ids: list[int], prompt: int, looks: Looks) -> Counter[tuple[int, int]]:
    """How often each head peaked at the copy. Source: PLD+, section 4.2.1."""
    _, weights = looks(ids[:-1], prompt)
    found: Counter[tuple[int, int]] = Counter()
    for t in range(prompt, len(ids)):
        place = likely_source(ids[: t + 1], prompt)
        if place is not None:
            at = weights[:, :, t - prompt, :t].argmax(-1) == place
            found.update(map(tuple, at.nonzero().tolist()))
    return found


def pld_plus(answers: Sequence[tuple[str, list[int], int]]) -> None:
    looks = Looks()
    counts = {True: Counter[tuple[int, int]](), False: Counter[tuple[int, int]]()}
    for task, ids, prompt in answers:
        counts[task in HALVES] += peaks(ids, prompt, looks)
    heads = {half: [head for head, _ in ranked(counts[half])] for half in counts}
    tokens: Counter[str] = Counter()
    found: dict[str, Counter[tuple[str, int]]] = {}
    for task, ids, prompt in answers:
        kinds = ("all", "copying" if task in COPYING else "others")
        for kind in kinds:
            tokens[kind] += len(ids) - prompt
        held = rankings(ids, prompt, looks, heads[task not in HALVES])
        for name, far in held.items():
            for kind in kinds:
                for k in K:
                    found.setdefault(name, Counter())[kind, k] += passes(far, k)
    copying = [len(half) for half in heads.values()]
    print(f"{len(answers)} answers, tokens: {dict(tokens)}; heads seen copying: {copying}")
    columns = [("all", k) for k in K] + [("copying", 10), ("copying", 70), ("others", 10)]
    print("| place |", " | ".join(f"{kind}, K = {k}" for kind, k in columns), "|")
    print("|---" * (1 + len(columns)) + "|")
    for name, sums in found.items():
        print(
            f"| {name} |",
            " | ".join(f"{tokens[c[0]] / sums[c]:.3f}" for c in columns),
            "|",
            flush=True,
        )


ARMS = {
    "internal and external": "spectra(corpus={corpus})",
    "internal alone": "spectra",
    "… without forward": "spectra(forward=False)",
    "… without backward": "spectra(backward=False)",
    "… without sub-n-grams": "spectra(sub_ngrams=False)",
    "external alone": "retrieval(corpus={corpus})",
}


def spectra(
    answers: Sequence[tuple[str, list[int], int]], corpus: Path, arms: Sequence[str]
) -> None:
    engine = Engine(
        load("smollm2", dtype="float32", prepack=True), drafter="none", budget="drafter"
    )
    for name in arms:
        tokens, count, nodes, same = Counter[str](), Counter[str](), Counter[str](), 0
        for task, ids, prompt in answers:
            drafter = ARMS[name].format(corpus=repr(str(corpus)))
            got = engine.generate(
                ids[:prompt],
                drafter=drafter,
                max_new_tokens=len(ids) - prompt,
                temperature=0.0,
                stop=(),
            )
            same += got.tokens == ids[prompt:]
            for kind in ("all", "copying" if task in COPYING else "others"):
                tokens[kind] += got.stats.tokens
                count[kind] += got.stats.passes
                nodes[kind] += got.stats.drafted + got.stats.probes
        cells = (
            f"{tokens[k] / count[k]:.3f} | {nodes[k] / count[k]:.1f}"
            for k in ("all", "copying", "others")
        )
        print(
            f"| {name} |",
            " | ".join(cells),
            f"| {same}/{len(answers)} equal, {dict(tokens)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path)
    parser.add_argument("--corpus", type=Path, help="then SPECTRA's table")
    parser.add_argument("--each", type=int, default=99, help="answers of a task")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer, at most")
    parser.add_argument("--arm", choices=ARMS, action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found, seen = [], Counter[str]()
    for task, ids, prompt in read(options.answers):
        seen[task] += 1
        if seen[task] <= options.each:
            found.append((task, ids[: prompt + options.tokens], prompt))
    if options.corpus is None:
        pld_plus(found)
    else:
        spectra(found, options.corpus, options.arm or list(ARMS))


if __name__ == "__main__":
    main()
