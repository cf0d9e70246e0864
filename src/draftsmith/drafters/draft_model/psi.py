"""ψ: the distribution of the first target token of a drafted text. Two rules, both exact.

Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", sections 3.3 and 3.4; `Path` is ours. `slrs.py` drafts with them.

A *letter* is a byte, or a control token that both vocabularies have. A text is a string of letters:
`chr(0)` … `chr(255)` are the bytes, `chr(256 + i)` is the drafter's control token i.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from draftsmith.core.draft import LazyDistribution
from draftsmith.core.sampling import Sampler
from draftsmith.drafters.draft_model.translation import Ids, Mask
from draftsmith.errors import UnsupportedError

LONGEST = 32
"""Maximum length, in letters, of target tokens that are proposed."""

MOST_FORWARDS = 4096
"""Maximum number of draft model evaluations per ψ for which `enumerate` is allowed."""

DRAWS = 256
"""Draws from a residual before ψ is computed wherever p is not zero, in hundreds of passes. After
many draws, ψ of most drawn tokens is already known."""

STOP = ""
"""Step of a walk that ends it without another letter."""

Distributions = Callable[[Sequence[Ids]], dict[Ids, Tensor]]
"""Branches → the drafter's distributions (V_D,) after each prefix of each branch, including the
empty prefix."""


class Lexicon:
    """The target's tokens as texts, one id each, with look-ups as in a trie."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.ids = {text: i for text, i in tokens.items() if 0 < len(text) <= LONGEST}
        self.texts = {i: text for text, i in self.ids.items()}
        self._sorted = sorted(self.ids)
        self._letters: dict[str, str] = {}

    def letters(self, text: str) -> str:
        """Return the letters that may follow `text` in a token; none at a leaf or outside."""
        if text not in self._letters:
            found, at = "", bisect_right(self._sorted, text)
            while at < len(self._sorted) and self._sorted[at].startswith(text):
                found += self._sorted[at][len(text)]
                at = bisect_left(self._sorted, text + chr(ord(found[-1]) + 1), at)
            self._letters[text] = found
        return self._letters[text]

    def first(self, text: str) -> int | None:
        """Return the first token of `text`, its longest prefix that is one (section 3); or None."""
        ends = range(min(len(text), LONGEST), 0, -1)
        return next((self.ids[text[:end]] for end in ends if text[:end] in self.ids), None)


@dataclass(slots=True)
class Walk:
    """State of one proposal: drafter ids, until they determine a target token."""

    stop: str | None
    """Text at which the walk always stops; None: there is none."""
    ids: Ids = ()
    """Drafter ids since the start of the proposal."""
    text: str = ""
    token: int | None = None
    """The proposed target token; None is ⊥, nothing."""
    over: bool = False


# ---------------------------------------------------------------------------- psi="enumerate"


class Enumerate:
    """The paper's rule: draft until the first target token is determined, or `lookahead` ids.

    It is determined if no token begins with the drafted text, except for a token equal to the text.
    `texts` (V_D,) are the texts of the drafter's ids, None for ids to mask.
    """

    def __init__(self, lexicon: Lexicon, texts: Sequence[str | None], lookahead: int) -> None:
        self.lexicon, self.texts = lexicon, texts
        self.reach = lookahead
        """Maximum number of drafter ids per proposal."""
        self.mask = Mask(torch.tensor([not text for text in texts], device="cpu"))
        """Forbids ids that no target token can contain, before anything is drawn."""

    def decided(self, ids: Ids, text: str) -> bool:
        """Return the look-ahead indicator: whether to stop after these ids."""
        return len(ids) == self.reach or not self.lexicon.letters(text)

    @cached_property
    def open(self) -> dict[Ids, str]:
        """Drafts after which the rule continues, with their texts, shorter ones first.

        ψ needs the drafter's distribution after each. Raises UnsupportedError for too many.
        """
        found: dict[Ids, str] = {(): ""}
        level = dict(found)
        while level:
            longer = {
                (*ids, i): text + more
                for ids, text in level.items()
                for i, more in enumerate(self.texts)
                if more and not self.decided((*ids, i), text + more)
            }
            if len(found) + len(longer) > MOST_FORWARDS:
                raise UnsupportedError(
                    f"slrs: psi='enumerate' needs more than {MOST_FORWARDS} drafter evaluations "
                    "per proposal with these vocabularies; use psi='path' with a byte-level "
                    "draft model, or algorithm='tli' or 'slem'"
                )
            found |= longer
            level = longer
        return found

    def step(self, walk: Walk, q: Tensor, sampler: Sampler) -> None:
        """Add one drafter id to `walk`, drawn from the drafter's distribution q (V_D,) after it.

        If no id has a probability, the walk ends with ⊥.
        """
        if not bool(q.any()):
            walk.over = True
            return
        drawn = sampler.draw(q)
        walk.ids = (*walk.ids, drawn)
        walk.text += self.texts[drawn] or ""
        if self.decided(walk.ids, walk.text):
            walk.over, walk.token = True, self.lexicon.first(walk.text)

    def psi(self, distributions: Distributions, size: int) -> Tensor:
        """Return ψ of `size` target tokens: the sum over all drafts, including longer ones."""
        psi = [0.0] * size
        known = distributions(list(self.open))
        reached: dict[Ids, float] = {(): 1.0}
        for ids, text in self.open.items():
            for i, q in enumerate(known[ids].tolist()):
                weight, more = reached.get(ids, 0.0) * q, self.texts[i]
                if not weight or not more:
                    continue
                longer = (*ids, i)
                if longer in self.open:
                    reached[longer] = weight
                elif (first := self.lexicon.first(text + more)) is not None:
                    psi[first] += weight
        return _float64(psi)


# --------------------------------------------------------------------------------- psi="path"


class Path:
    """Ours: one path of letters to every token, so that ψ(t) needs the distributions along t only.

    At a text that is a token, the walk stops with probability σ: one minus the drafter's
    probability of all letters inside the trie. At a leaf and at the text `stop` it always stops.
    Where it may not stop, the drafter's distribution is normalized over the letters inside the
    trie; if these have no probability, nothing is proposed. `ids` are the drafter's ids of the
    letters, one each; `size` is V_D.
    """

    reach = LONGEST

    def __init__(self, lexicon: Lexicon, ids: Mapping[str, int], size: int) -> None:
        self.lexicon = lexicon
        used = set().union(*lexicon.ids)
        self.ids = {letter: i for letter, i in ids.items() if letter in used}
        forbidden = torch.ones(size, dtype=torch.bool, device="cpu")
        forbidden[list(self.ids.values())] = False
        self.mask = Mask(forbidden)
        self._rows: dict[str, tuple[str, Tensor]] = {}

    def spell(self, text: str) -> Ids:
        """Return the drafter's ids of a text, one for each letter."""
        return tuple(self.ids[letter] for letter in text)

    def ends(self, text: str, stop: str | None) -> bool:
        """Return whether a walk always stops at `text`."""
        return text == stop or not self.lexicon.letters(text)

    def fork(self, text: str, q: Tensor) -> dict[str, float]:
        """Return the steps of a walk at `text`: the probability of each letter, and σ for STOP.

        q is the drafter's distribution (V_D,) there. An empty result means ⊥.
        """
        if text not in self._rows:
            letters = self.lexicon.letters(text)
            ids = [self.ids[letter] for letter in letters]
            self._rows[text] = letters, torch.tensor(ids, device="cpu")
        letters, rows = self._rows[text]
        inside = q[rows.to(q.device)].tolist()
        mass = math.fsum(inside)
        if text in self.lexicon.ids:
            return {STOP: max(0.0, 1 - mass), **dict(zip(letters, inside, strict=True))}
        return {letter: p / mass for letter, p in zip(letters, inside, strict=True) if mass}

    def step(self, walk: Walk, q: Tensor, sampler: Sampler) -> None:
        fork = self.fork(walk.text, q)
        if not fork:
            walk.over = True
            return
        step = list(fork)[sampler.draw(q.new_tensor(list(fork.values())))]
        if step != STOP:
            walk.text += step
            walk.ids = (*walk.ids, self.ids[step])
        if step == STOP or self.ends(walk.text, walk.stop):
            walk.over, walk.token = True, self.lexicon.ids[walk.text]


class PathPsi:
    """ψ(t) = Π over t's letters of their probabilities · σ(t), with one pass along t."""

    draws = DRAWS

    def __init__(
        self,
        rule: Path,
        stop: str | None,
        known: Mapping[Ids, Tensor],
        distributions: Distributions,
    ) -> None:
        self.rule, self.stop, self.distributions = rule, stop, distributions
        self.known = dict(known)
        self.forks: dict[str, dict[str, float]] = {}

    def of(self, tokens: Sequence[int]) -> Tensor:
        texts = [self.rule.lexicon.texts.get(token, "") for token in tokens]
        missing = [text for text in texts if self._along(text) is None]
        if missing:
            # Keep the distributions that the walk has drawn from, to the last bit.
            self.known = (
                self.distributions([self.rule.spell(text) for text in missing]) | self.known
            )
        return _float64(self._along(text) or 0.0 for text in texts)

    def _along(self, text: str) -> float | None:
        """Return ψ of a token's text (0 for ""); None if a distribution is missing."""
        psi = 1.0 if text else 0.0
        for end, step in enumerate((*text, STOP)):
            if not psi:
                break
            fork = self._fork(text[:end])
            if fork is None:
                return None
            psi *= fork.get(step, 0.0)
        return psi

    def _fork(self, text: str) -> dict[str, float] | None:
        if self.rule.ends(text, self.stop):
            return {STOP: 1.0}
        if text not in self.forks:
            q = self.known.get(self.rule.spell(text))
            if q is None:
                return None
            self.forks[text] = self.rule.fork(text, q)
        return self.forks[text]


Rule = Enumerate | Path
"""Rule for when to stop drafting, which determines ψ; shared by the sequences of a pair."""


def psi_of(
    rule: Rule,
    stop: str | None,
    known: Mapping[Ids, Tensor],
    distributions: Distributions,
    size: int,
) -> Tensor | LazyDistribution:
    """Return ψ over `size` target tokens, for the proposal of a walk that stops at `stop`.

    `known` has distributions (V_D,) that need not be computed again.
    """
    if isinstance(rule, Enumerate):  # one value costs as much as all values
        return rule.psi(distributions, size)
    return PathPsi(rule, stop, known, distributions)


def _float64(values: Iterable[float]) -> Tensor:
    """Return (n,) float64 values on the CPU, because other devices may not support float64."""
    return torch.tensor([*values], dtype=torch.float64, device="cpu")
