"""PLD+: of all earlier places of the last token, copy after the one that is most like this one.

Somasundaram, Phukan and Saxena 2024, "PLD+: Accelerating LLM inference by leveraging Language Model
Artifacts", section 4, appendix B. `docs/algorithms/pld_plus.md` shows the paper beside this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.core.target import ModelFacts, Needs
from draftsmith.drafters import calibration
from draftsmith.drafters.options import at_least, one_of, within
from draftsmith.errors import OptionError
from draftsmith.values import is_number, listed, shown, token_ids

DEPTH = 0.28
"""The paper's layer 9 of 32, for models of other depths."""

LAST = float("-inf")
"""The score of the first position, which nothing precedes."""

AT_ONCE = 64
"""Candidates compared at a time: what fits a processor's cache is compared several times faster."""


@dataclass(frozen=True, repr=False)
class PldPlus(Drafter):
    """Copy the `K` tokens after the earlier place of x_t whose past is most like x_t's own.

    rank="hidden": by the cosine between the states before each place and before x_t, at one
    `layer` (counted from 1; None: the calibrated one, else 0.28 of the depth). rank="attention": by
    the largest weight that some of `heads` give the place: the best so many of a calibration
    (`draftsmith tune pld-plus`), (layer, head) pairs counted from 0, 'layer' for all heads of one
    layer, or 'all'; combine='sum' adds them up instead.

    Decisions where the paper is silent: ties go to the most recent place; a lone candidate is not
    scored; the first position, which has no state before it, ranks last; x_t itself is the last
    token that can be copied. With a `threshold` (on the cosine; the paper's best is 0.0) a lone
    candidate is scored, too, and the first position is none. `average` > 1 compares means over as
    many states, fewer where the text begins. The `prediction` text has no states and is not used.
    """

    rank: Literal["hidden", "attention"] = "hidden"
    layer: int | None = None
    heads: int | Literal["layer", "all"] | tuple[tuple[int, int], ...] = 50
    combine: Literal["max", "sum"] = "max"
    K: int = 70
    threshold: float | None = None
    average: int = 1

    name: ClassVar[str] = "pld_plus"
    summary: ClassVar[str] = "copy after the last token's most similar earlier place (PLD+)"
    needs: ClassVar[Needs] = Needs(hidden_layers=(9,))

    def __post_init__(self) -> None:
        one_of(self, "rank", ("hidden", "attention"))
        one_of(self, "combine", ("max", "sum"))
        at_least(self, "K", 1)
        at_least(self, "average", 1)
        if self.layer is not None:
            at_least(self, "layer", 1)
        self._check_heads()
        if self.rank == "attention":  # an example, as above
            object.__setattr__(self, "needs", Needs(attention_heads=((8, 0),)))
        if self.rank == "attention" and (self.threshold is not None or self.average > 1):
            raise OptionError("pld_plus: threshold and average compare states; use rank='hidden'")
        if self.threshold is not None:
            within(self, "threshold", -1, 1, "(a cosine)")

    def _check_heads(self) -> None:
        heads: Any = self.heads
        if isinstance(heads, str) and heads in ("layer", "all"):
            return
        if is_number(heads, int):
            at_least(self, "heads", 1)
            return
        what = "an integer >= 1, 'layer', 'all', or (layer, head) pairs like ((9, 3), (12, 0))"
        heads = listed(heads)
        if not isinstance(heads, tuple | list) or not heads:
            raise OptionError(f"pld_plus: heads must be {what}, got {shown(heads)}")
        pairs = tuple(tuple(token_ids("pld_plus: heads", pair, what=what)) for pair in heads)
        if any(len(pair) != 2 or min(pair) < 0 for pair in pairs):
            raise OptionError(f"pld_plus: heads must be {what}, got {shown(heads)}")
        object.__setattr__(self, "heads", pairs)

    def preferred_width(self) -> int:
        return self.K

    def needs_of(self, model: ModelFacts) -> Needs:
        if self.rank == "hidden":
            return self._states(model)
        if isinstance(self.heads, tuple):
            return Needs(attention_heads=self.heads)
        if self.heads == "all":
            return Needs(attention_heads=_all_heads(range(model.layers), model))
        if self.heads == "layer":
            states = self._states(model)
            heads = _all_heads([layer - 1 for layer in states.hidden_layers], model)
            return Needs(attention_heads=heads, why=states.why)
        found = calibration.load(model)
        if found is None or not found.heads:
            raise OptionError(
                f"pld_plus: which heads copy is not known for {model.name or 'this model'}; run "
                "`draftsmith tune pld-plus MODEL PROMPTS` once, name them with "
                "heads=((layer, head), …), or use rank='hidden'"
            )
        best = tuple((layer, head) for layer, head, _ in found.heads[: self.heads])
        return Needs(attention_heads=best, why=self._told(f"the best {len(best)} heads", found))

    def _states(self, model: ModelFacts) -> Needs:
        """The layer whose states are compared."""
        if self.layer is not None:
            return Needs(hidden_layers=(self.layer,))
        found = calibration.load(model)
        if found is None:
            return Needs(hidden_layers=(max(1, round(DEPTH * model.layers)),))
        return Needs(hidden_layers=(found.layer,), why=self._told(f"layer {found.layer}", found))

    def _told(self, what: str, found: calibration.Calibration) -> str:
        K = found.K.get(self.rank, self.K)  # noqa: N806
        other = f"; K={K} was best there, this is K={self.K}" if K != self.K else ""
        return f"pld_plus uses {what} from its calibration on {found.prompts} prompts{other}"

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        return _Places(self)


class _Places(DrafterState):
    """Where every token of the sequence occurs, and the choice among these places."""

    def __init__(self, config: PldPlus) -> None:
        self.config = config
        self.ids: list[int] = []
        self.places: dict[int, list[int]] = {}

    def draft(self, ctx: Context) -> Draft:
        # 1  P = {j | x_j = x_t, j < t}, the newest first                      (equation 1)
        self._index(ctx.ids)
        t = len(ctx.ids) - 1
        P = self.places[ctx.ids[t]][-2::-1]  # noqa: N806
        # 2  j* = argmax over P, by attention or by hidden states              (equations 2, 3)
        j = self._best(P, ctx)
        if j is None:
            return EMPTY
        # 3  draft x_{j*+1} … x_{j*+K}; x_t is the last that is known          (section 4.3)
        end = min(j + 1 + min(self.config.K, ctx.budget), t + 1)
        return Draft.chain(ctx.ids[j + 1 : end], self.config.name, origins=range(j + 1, end))

    def _best(self, P: list[int], ctx: Context) -> int | None:  # noqa: N803
        """The candidate with the highest score, the most recent one of several; None: no draft."""
        c = self.config
        if len(P) < 2 and c.threshold is None:
            return P[0] if P else None
        scores = self._scores(P, ctx) if P else None
        if scores is None:
            return None
        highest = scores.max()
        if c.threshold is not None and not float(highest) > c.threshold:
            return None
        return P[int((scores == highest).nonzero()[0, 0])]

    def _scores(self, P: list[int], ctx: Context) -> Tensor | None:  # noqa: N803
        """(|P|,) one score per candidate; None where the target recorded nothing."""
        c, t, j = self.config, len(ctx.ids) - 1, torch.tensor(P, device="cpu")
        if c.rank == "hidden" and ctx.hidden is not None:
            own = state_before(ctx.hidden, j.new_tensor([t]), c.average)
            states = (state_before(ctx.hidden, some, c.average) for some in torch.split(j, AT_ONCE))
            scores = torch.cat([torch.cosine_similarity(H, own, dim=-1) for H in states])
        elif c.rank == "attention" and ctx.attention is not None:
            A = ctx.attention(j)  # noqa: N806
            scores = A.amax(0) if c.combine == "max" else A.sum(0)
        else:
            return None
        # A state that overflowed is like nothing, and nothing precedes the first position.
        return torch.where(j == 0, LAST, scores.cpu().nan_to_num(nan=LAST))

    def _index(self, ids: Sequence[int]) -> None:
        for position in range(len(self.ids), len(ids)):
            self.ids.append(ids[position])
            self.places.setdefault(ids[position], []).append(position)

    def truncate(self, length: int) -> None:
        for token in reversed(self.ids[length:]):
            self.places[token].pop()
        del self.ids[length:]


def state_before(hidden: Tensor, j: Tensor, m: int) -> Tensor:
    """(|j|, D) mean of the `m` states before each position j; fewer where the text begins.

    m = 1: H_{j−1}. For j = 0, which nothing precedes, the value means nothing. Source: equation 3,
    appendix B.2.
    """
    back = (j[:, None] - torch.arange(1, m + 1, device=j.device)).to(hidden.device)
    if m == 1:
        return hidden.index_select(0, back[:, 0].clamp_min(0)).float()
    inside = (back >= 0)[..., None]
    states = hidden[back.clamp_min(0)].float() * inside
    return states.sum(1) / inside.sum(1).clamp_min(1)


def _all_heads(layers: Sequence[int], model: ModelFacts) -> tuple[tuple[int, int], ...]:
    return tuple((layer, head) for layer in layers for head in range(model.heads))
