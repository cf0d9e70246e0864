"""Calibrates PLD+: finds the heads that copy, the layer that locates copies, and K.

Source: PLD+, sections 4.2.1 (heads), 5.5 and 7.2–7.3 (layer with K = 10, then K). Plain answers
suffice: `reach[t]` is how many tokens of the draft made at position t the answer confirms, and the
passes of the whole answer follow from it for every K.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Scripted, common_prefix
from draftsmith.core.sampling import SamplingParams, TorchSampler
from draftsmith.core.target import NO_NEEDS, ModelFacts, Needs
from draftsmith.drafters.calibration import Calibration
from draftsmith.drafters.ngrams import common_past
from draftsmith.drafters.pld_plus import DEPTH, PldPlus
from draftsmith.engine.engine import Engine
from draftsmith.errors import DrafterError, OptionError, UnsupportedError
from draftsmith.lab.fingerprint import fingerprint
from draftsmith.lab.lines import Finished
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.taps import PassTaps
from draftsmith.model.taps import check as check_needs

LENGTHS = tuple(range(10, 101, 10))
"""Draft lengths to try. Source: section 7.2."""
LAYER_K = 10
"""Draft length for the comparison of layers. Source: section 7.3."""
HEADS = 50
"""Number of heads for the search of K. Source: appendix B.1."""
NEARLY = 0.99
"""ours: use the shortest drafts within 1 % of the best accepted length; longer ones only cost."""


@dataclass(frozen=True)
class CalibrationPlan:
    """Engine and prompts of a calibration."""

    engine: Engine
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        model = self.engine.model
        check(model)
        if not model.facts.name:
            raise OptionError(
                "calibrations are stored by name, but a model made in memory has none"
            )
        if not self.prompts:
            raise OptionError("there are no prompts to calibrate on")

    @cached_property
    def key(self) -> list[Any]:
        """Settings that every result depends on, in addition to its prompt."""
        return [*identity(self.engine.model), self.max_new_tokens]

    @property
    def attends(self) -> bool:
        """Whether attention rows can be recorded."""
        return self.engine.model.capabilities.attention == "draftsmith"

    @property
    def size(self) -> int:
        """Units of work per prompt: its answer, its layers, and the drafts of heads."""
        return len(self.prompts) * (3 if self.attends else 2)


def check(model: LoadedModel) -> None:
    """Raise UnsupportedError for a model that cannot verify drafts."""
    if model.capabilities.shape == "plain":
        why = "; ".join(model.capabilities.reasons)
        raise UnsupportedError(f"{model.name} decodes one token per pass, drafts or not: {why}")


def identity(model: LoadedModel) -> list[str]:
    """What answers of a model depend on: its name, weights and dtype."""
    return [model.facts.name, fingerprint(model), str(model.dtype)]


def calibrate(
    plan: CalibrationPlan, finished: Finished, advance: Callable[[int], None]
) -> Calibration:
    """Find heads, layer and K. Results in `finished` are not computed again."""

    def for_each(compute: Callable[..., Any], kind: list[Any], *given: Sequence[Any]) -> list[Any]:
        """Run `compute` for every prompt with its part of `given`."""
        found = []
        for prompt, *rest in zip(plan.prompts, *given, strict=True):
            key = [kind[0], plan.key, *kind[1:], *prompt]
            found.append(finished.recall(key, partial(compute, plan, prompt, *rest)))
            advance(1)
        return found

    decoded = for_each(answer_and_peaks, ["answer"])
    answers = [one["answer"] for one in decoded]
    tokens = sum(map(len, answers))
    peaks: Counter[tuple[int, int]] = Counter()
    for one in decoded:
        peaks.update({(layer, head): count for layer, head, count in one["peaks"]})
    heads = ranked(peaks)

    # Passes of all answers: by layer and K, then by rank and K.
    found = for_each(passes_by_layer, ["layers"], answers)
    by_layer = torch.tensor(found, device="cpu").sum(0).tolist()
    at = LENGTHS.index(LAYER_K)
    layers = {n: tokens / counts[at] for n, counts in enumerate(by_layer, start=1)}
    layer = best_layer(layers)
    by_rank = {"hidden": by_layer[layer - 1]}
    if heads:
        best = [head for head, _ in heads[:HEADS]]
        compute = partial(passes_by_attention, heads=tuple(best))
        found = for_each(compute, ["heads", best], answers)
        by_rank["attention"] = torch.tensor(found, device="cpu").sum(0).tolist()

    lengths = {
        rank: {K: tokens / n for K, n in zip(LENGTHS, counts, strict=True)}
        for rank, counts in by_rank.items()
    }
    facts = plan.engine.model.facts
    return Calibration(
        model=facts.name,
        layers=facts.layers,
        heads_per_layer=facts.heads,
        layer=layer,
        heads=tuple((*head, count) for head, count in heads),
        K={rank: shortest_good(by_K) for rank, by_K in lengths.items()},
        accepted={
            kind: {str(n): length for n, length in by_number.items()}
            for kind, by_number in {"layer": layers, **lengths}.items()
        },
        prompts=len(answers),
        tokens=tokens,
    )


# ------------------------------------------------------------------------------------ choices


def ranked(peaks: Counter[tuple[int, int]]) -> list[tuple[tuple[int, int], int]]:
    """Sort heads by how often they peaked at the copy; heads that never did are left out."""
    return sorted(
        ((head, n) for head, n in peaks.items() if n), key=lambda pair: (-pair[1], pair[0])
    )


def best_layer(accepted: dict[int, float]) -> int:
    """Return the layer with the longest accepted drafts; of equal ones the usual depth."""
    usual = DEPTH * len(accepted)
    return max(accepted, key=lambda layer: (accepted[layer], -abs(layer - usual)))


def shortest_good(accepted: dict[int, float]) -> int:
    """Return the smallest K with nearly the best mean accepted length."""
    best = max(accepted.values())
    return min(K for K, length in accepted.items() if length >= NEARLY * best)


def passes(reach: Sequence[int], K: int) -> int:  # noqa: N803
    """Count target passes for an answer of len(reach) tokens with drafts of at most K."""
    done = count = 0
    while done < len(reach):
        done += min(reach[done], K) + 1
        count += 1
    return count


# ------------------------------------------------------------------------------------ heads


def answer_and_peaks(plan: CalibrationPlan, prompt: Sequence[int]) -> dict[str, list[Any]]:
    """Return the plain greedy answer, and [layer, head, count] of heads that peaked at a copy.

    Source: section 4.2.1. For every generated token that occurs in the prompt, the copy is the
    place with the longest common past. A head counts if the row that chose the token has its
    maximum there.
    """
    facts = plan.engine.model.facts
    counts = torch.zeros(facts.layers * facts.heads, dtype=torch.long, device="cpu")

    def see(ctx: Context) -> None:
        place = likely_source(ctx.ids, ctx.prompt_length)
        if place is not None and ctx.attention is not None:
            row = ctx.attention(torch.arange(len(ctx.ids) - 1, device="cpu"))
            counts.add_((row.argmax(-1) == place).cpu())

    everything = PldPlus(rank="attention", heads="all").needs_of(facts)
    answer = watched(plan, prompt, everything if plan.attends else NO_NEEDS, see)
    peaks = Counter({divmod(i, facts.heads): n for i, n in enumerate(counts.tolist())})
    return {"answer": answer, "peaks": [[*head, n] for head, n in ranked(peaks)]}


def likely_source(ids: Sequence[int], prompt_length: int) -> int | None:
    """Return the position in the prompt from which the last id was probably copied.

    It is the one with the longest common past, the latest of equal ones. None if nothing was
    generated yet, or if the prompt does not contain the id.
    """
    t = len(ids) - 1
    if t < prompt_length:
        return None
    places = [j for j in range(prompt_length) if ids[j] == ids[t]]
    return max(places, key=lambda j: (common_past(ids, j, t), j), default=None)


# ----------------------------------------------------------------------- layers and lengths


def passes_by_layer(
    plan: CalibrationPlan, prompt: Sequence[int], answer: Sequence[int]
) -> list[list[int]]:
    """Passes for every K, by layer from 1, all from one pass over prompt and answer."""
    model, ids = plan.engine.model, [*prompt, *answer]
    layers = range(1, model.facts.layers + 1)
    needs = [Needs(hidden_layers=(layer,)) for layer in layers]
    check_needs(needs[0], model, PldPlus.name)
    assert model.blocks is not None
    taps = PassTaps(needs, model.blocks)
    with torch.inference_mode():
        model.forward([ids[:-1]], [range(len(ids) - 1)], None, False, 1, taps)
    counts = []
    for layer in layers:
        drafter = PldPlus(layer=layer, K=LENGTHS[-1])
        reach = reach_by_states(ids, len(prompt), taps.hidden[layer][0], drafter)
        counts.append([passes(reach, K) for K in LENGTHS])
    return counts


def reach_by_states(
    ids: Sequence[int], prompt_length: int, hidden: Tensor, drafter: PldPlus
) -> list[int]:
    """For each generated position, how many tokens of its draft are right; hidden is (T-1, D)."""
    known = list(ids[:prompt_length])
    ctx = Context(
        ids=known,
        prompt_length=prompt_length,
        vocab_size=0,
        sampling=SamplingParams(),
        sampler=TorchSampler(),
        budget=drafter.K,
    )
    state, reach = drafter.open(ctx), []
    for t in range(prompt_length, len(ids)):
        ctx.hidden = hidden[: t - 1]
        reach.append(agreement(state.draft(ctx).tokens, ids, t))
        known.append(ids[t])
    return reach


def passes_by_attention(
    plan: CalibrationPlan,
    prompt: Sequence[int],
    answer: Sequence[int],
    heads: tuple[tuple[int, int], ...],
) -> list[int]:
    """Passes for every K with these heads. The answer is decoded again to record their rows."""
    drafter = PldPlus(rank="attention", heads=heads, K=LENGTHS[-1])
    ids, state = [*prompt, *answer], None
    reach = [0] * len(answer)

    def see(ctx: Context) -> None:
        nonlocal state
        state = state or drafter.open(ctx)
        wide = replace(ctx, budget=drafter.K)
        t = len(ctx.ids)
        reach[t - len(prompt)] = agreement(state.draft(wide).tokens, ids, t)

    watched(plan, prompt, drafter.needs_of(plan.engine.model.facts), see)
    return [passes(reach, K) for K in LENGTHS]


def agreement(draft: Sequence[int], ids: Sequence[int], t: int) -> int:
    """Return how many tokens of a draft from position t on are right."""
    return common_prefix(draft, ids[t : t + len(draft)])


# ----------------------------------------------------------------------------- plain decoding


def watched(
    plan: CalibrationPlan, prompt: Sequence[int], needs: Needs, see: Callable[[Context], None]
) -> list[int]:
    """Return the plain greedy answer; `see` is called with the context of every step.

    Raises DrafterError if a step could not be seen.
    """

    def look(ctx: Context) -> Draft:
        see(ctx)
        return EMPTY

    result = plan.engine.generate(
        list(prompt),
        drafter=Onlooker(look, needs),
        budget=1,
        temperature=0.0,
        max_new_tokens=plan.max_new_tokens,
    )
    if result.stats.drafter_failures or result.stats.failed_passes:
        raise DrafterError(result.notices[-1])
    tokens: list[int] = result.tokens
    return tokens


@dataclass(frozen=True, eq=False, repr=False)
class Onlooker(Scripted):
    """A drafter for which the target records what `wanted` names."""

    wanted: Needs

    name = "onlooker"

    def needs_of(self, model: ModelFacts) -> Needs:  # noqa: ARG002
        return self.wanted
