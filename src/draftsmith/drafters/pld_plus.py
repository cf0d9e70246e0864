"""PLD+: copy after the earlier occurrence of the last token with the most similar past.

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
from draftsmith.drafters.ngrams import NgramIndex
from draftsmith.drafters.options import at_least, one_of, within
from draftsmith.errors import OptionError
from draftsmith.model.devices import send
from draftsmith.values import is_number, listed, shown, token_ids

DEPTH = 0.28
"""Depth of the paper's layer 9 of 32, for models with other numbers of layers."""

LAST = float("-inf")
"""Score of the first position, which has no past."""

AT_ONCE = 64
"""Candidates compared at a time on a CPU: those that fit its cache are compared much faster."""


@dataclass(frozen=True, repr=False)
class PldPlus(Drafter):
    """Copy the `K` tokens after the earlier occurrence of x_t with the most similar past.

    rank="hidden" compares the state before each occurrence with the state before x_t, by cosine,
    at one `layer` (counted from 1; None: the calibrated one, else 0.28 of the depth).
    rank="attention" takes the largest weight that one of the `heads` gives the occurrence.
    combine='sum' adds the weights instead. `heads` is a number of best heads from a calibration
    (`draftsmith tune pld-plus`), (layer, head) pairs counted from 0, 'layer' for all heads of one
    layer, or 'all'.

    Where the paper is silent: of equal scores the most recent occurrence is used; a single
    candidate is not scored; the first position, which has no state before it, ranks last; x_t
    itself is the last token that can be copied. With a `threshold` on the cosine (the paper's best
    is 0.0) a single candidate is scored, too, and the first position is never used. `average` > 1
    compares means over that many states, fewer at the beginning of the text. The `prediction` has
    no states and is not used.
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
        at_least(self, 1, "K", "average")
        if self.layer is not None:
            at_least(self, 1, "layer")
        self._check_heads()
        if self.rank == "attention":  # an example, like `needs` above
            object.__setattr__(self, "needs", Needs(attention_heads=((8, 0),)))
        if self.rank == "attention" and (self.threshold is not None or self.average > 1):
            raise OptionError(
                "pld_plus: threshold and average compare hidden states; use rank='hidden'"
            )
        if self.threshold is not None:
            within(self, "threshold", -1, 1, "(a cosine)")

    def _check_heads(self) -> None:
        heads: Any = self.heads
        if isinstance(heads, str) and heads in ("layer", "all"):
            return
        if is_number(heads, int):
            at_least(self, 1, "heads")
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
                f"pld_plus: there is no calibration of heads for {model.name or 'this model'}; run "
                "`draftsmith tune pld-plus MODEL PROMPTS` once, set heads=((layer, head), …), or "
                "use rank='hidden'"
            )
        best = tuple((layer, head) for layer, head, _ in found.heads[: self.heads])
        return Needs(attention_heads=best, why=self._why(f"the best {len(best)} heads", found))

    def _states(self, model: ModelFacts) -> Needs:
        """Return the needs for comparing hidden states."""
        if self.layer is not None:
            return Needs(hidden_layers=(self.layer,))
        found = calibration.load(model)
        if found is None:
            return Needs(hidden_layers=(max(1, round(DEPTH * model.layers)),))
        return Needs(hidden_layers=(found.layer,), why=self._why(f"layer {found.layer}", found))

    def _why(self, what: str, found: calibration.Calibration) -> str:
        K = found.K.get(self.rank, self.K)  # noqa: N806
        other = f"; K={K} was best there, K={self.K} is used" if K != self.K else ""
        return f"pld_plus uses {what} from its calibration on {found.prompts} prompts{other}"

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        return _Places(self)


class _Places(DrafterState):
    """Positions of every token in the sequence, and the choice among them."""

    def __init__(self, config: PldPlus) -> None:
        self.config = config
        self.ids: list[int] = []
        self.places = NgramIndex(1, self.ids)

    def draft(self, ctx: Context) -> Draft:
        # 1  P = {j | x_j = x_t, j < t}, the newest first                      (equation 1)
        self.ids.extend(ctx.ids[len(self.ids) :])
        self.places.extend()
        t = len(ctx.ids) - 1
        P = self.places.recent(t - 1, most=t)  # noqa: N806
        # 2  j* = argmax over P, by attention or by hidden states              (equations 2, 3)
        j = self._best(P, ctx)
        if j is None:
            return EMPTY
        # 3  draft x_{j*+1} … x_{j*+K}; x_t is the last known token           (section 4.3)
        end = min(j + 1 + min(self.config.K, ctx.budget), t + 1)
        return Draft.chain(ctx.ids[j + 1 : end], self.config.name, origins=range(j + 1, end))

    def _best(self, P: list[int], ctx: Context) -> int | None:  # noqa: N803
        """Return the most recent candidate with the highest score; None: no draft."""
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
        """Return (|P|,) scores of the candidates; None if the target recorded nothing."""
        c, t = self.config, len(ctx.ids) - 1
        if c.rank == "hidden" and ctx.hidden is not None:
            j = send([*P, t], ctx.hidden.device)
            query = state_before(ctx.hidden, j[-1:], c.average)
            parts = torch.split(j[:-1], AT_ONCE if j.device.type == "cpu" else 64 * AT_ONCE)
            states = (state_before(ctx.hidden, some, c.average) for some in parts)
            scores = torch.cat([torch.cosine_similarity(H, query, dim=-1) for H in states])
        elif c.rank == "attention" and ctx.attention is not None:
            A = ctx.attention(torch.tensor(P, device="cpu"))  # noqa: N806
            scores = A.amax(0) if c.combine == "max" else A.sum(0)
        else:
            return None
        # The first position, and states that overflowed, rank last.
        past = torch.tensor(P, device="cpu") > 0
        return torch.where(past, scores.cpu().nan_to_num(nan=LAST), LAST)

    def truncate(self, length: int) -> None:
        self.places.truncate(length)
        del self.ids[length:]


def state_before(hidden: Tensor, j: Tensor, m: int) -> Tensor:
    """Return (|j|, D) means of the `m` states before each position j; fewer at the beginning.

    m = 1: H_{j−1}. For j = 0, which has no past, the value is arbitrary. Source: equation 3,
    appendix B.2.
    """
    back = j[:, None] - torch.arange(1, m + 1, device=j.device)
    if m == 1:
        return hidden.index_select(0, back[:, 0].clamp_min(0)).float()
    inside = (back >= 0)[..., None]
    states = hidden[back.clamp_min(0)].float() * inside
    return states.sum(1) / inside.sum(1).clamp_min(1)


def _all_heads(layers: Sequence[int], model: ModelFacts) -> tuple[tuple[int, int], ...]:
    return tuple((layer, head) for layer in layers for head in range(model.heads))
