"""The distribution ψ of a target token that a text in other tokens begins with: two rules, both
exact.

Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", sections 3.3 and 3.4; `Path` is ours. `slrs.py` drafts by them.

A *letter* is a byte, or a control token that both vocabularies have; a text is a string of letters:
`chr(0)` … `chr(255)` are the bytes, `chr(256 + i)` is the drafter's control token i.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
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
"""Letters of the longest target token that is proposed."""

MOST_FORWARDS = 4096
"""Drafter forwards per ψ beyond which enumerating is refused."""

DRAWS = 256
"""Draws that a residual takes before ψ is computed wherever p is not zero, in hundreds of passes.

Most of many draws are of tokens whose ψ is known by then.
"""

STOP = ""
"""What a walk may do instead of adding a letter."""

Distributions = Callable[[Sequence[Ids]], dict[Ids, Tensor]]
"""Branches → the drafter's distributions (V_D,) after each of their prefixes, the empty one
included."""


class Lexicon:
    """The target's tokens as texts, one id each, seen as a trie."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.ids = {text: i for text, i in tokens.items() if 0 < len(text) <= LONGEST}
        self.texts = {i: text for text, i in self.ids.items()}
        self._sorted = sorted(self.ids)
        self._letters: dict[str, str] = {}

    def letters(self, text: str) -> str:
        """The letters that may follow `text` in a token; none at a leaf or outside the trie."""
        if text not in self._letters:
            found, at = "", bisect_right(self._sorted, text)
            while at < len(self._sorted) and self._sorted[at].startswith(text):
                found += self._sorted[at][len(text)]
                at = bisect_left(self._sorted, text + chr(ord(found[-1]) + 1), at)
            self._letters[text] = found
        return self._letters[text]

    def first(self, text: str) -> int | None:
        """The first token of `text`, its longest prefix that is one (section 3); None: none is."""
        ends = range(min(len(text), LONGEST), 0, -1)
        return next((self.ids[text[:end]] for end in ends if text[:end] in self.ids), None)


@dataclass(slots=True)
class Walk:
    """One proposal in the making: drafter ids, until they decide a target token."""

    stop: str | None
    """A text at which it stops for sure."""
    ids: Ids = ()
    """Drafted since the place where the proposal begins."""
    text: str = ""
    token: int | None = None
    """The target token proposed; None is ⊥, nothing."""
    over: bool = False


class Rule(ABC):
    """When to stop drafting, and hence ψ: for one pair of vocabularies, shared by its sequences."""

    lexicon: Lexicon
    mask: Mask
    """Forbids ids that no target token can use, before anything is drawn."""
    plans: bool
    """Whether it can stop where a plan says so; else it makes one proposal a step."""
    reach: int
    """Most drafter ids per proposal."""

    @abstractmethod
    def step(self, walk: Walk, q: Tensor, sampler: Sampler) -> None:
        """Go on by at most one drafter id, given the drafter's distribution q (V_D,) after
        `walk.ids`."""

    @abstractmethod
    def distribution(
        self, stop: str | None, known: Mapping[Ids, Tensor], distributions: Distributions
    ) -> LazyDistribution:
        """The distribution ψ of what a walk to `stop` proposes, some distributions (V_D,) being
        known."""

    def spell(self, text: str) -> Ids:
        """The drafter's ids of a text, where it has one for each letter."""
        raise NotImplementedError


# ---------------------------------------------------------------------------- psi="enumerate"


class Enumerate(Rule):
    """The paper's rule: draft until the first target token is determined, or `lookahead` ids.

    It is determined where no token begins with the drafted text, or that text is the only one that
    does. `texts` (V_D,) are what the drafter's ids write, None for ids to mask.
    """

    plans = False  # what is drafted beyond the first token is no sample of the drafter's after it

    def __init__(self, lexicon: Lexicon, texts: Sequence[str | None], lookahead: int) -> None:
        self.lexicon, self.texts, self.reach = lexicon, texts, lookahead
        self.mask = Mask(torch.tensor([not text for text in texts], device="cpu"))

    def decided(self, ids: Ids, text: str) -> bool:
        """The look-ahead indicator: whether to stop after these ids."""
        return len(ids) == self.reach or not self.lexicon.letters(text)

    @cached_property
    def open(self) -> dict[Ids, str]:
        """Every draft after which the rule goes on, with its text, shorter ones first.

        ψ takes a forward of the drafter for each. Raises UnsupportedError where they are too many.
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
                    f"slrs: psi='enumerate' takes more than {MOST_FORWARDS} forwards of the "
                    "drafter per proposal with these vocabularies; use psi='path' with a "
                    "byte-level drafter, or algorithm='tli' or 'slem'"
                )
            found |= longer
            level = longer
        return found

    def step(self, walk: Walk, q: Tensor, sampler: Sampler) -> None:
        drawn = sampler.draw(q)
        walk.ids = (*walk.ids, drawn)
        walk.text += self.texts[drawn] or ""
        if self.decided(walk.ids, walk.text):
            walk.over, walk.token = True, self.lexicon.first(walk.text)

    def distribution(
        self,
        stop: str | None,  # noqa: ARG002
        known: Mapping[Ids, Tensor],  # noqa: ARG002
        distributions: Distributions,
    ) -> LazyDistribution:
        return EnumeratedPsi(self, distributions)


class EnumeratedPsi:
    """ψ by summing over all drafts, those that run past the first token included."""

    draws = 0  # a single value costs as much as all of them

    def __init__(self, rule: Enumerate, distributions: Distributions) -> None:
        self.rule, self.distributions = rule, distributions

    @cached_property
    def _whole(self) -> dict[int, float]:
        rule, psi = self.rule, dict[int, float]()
        distributions = self.distributions(list(rule.open))
        reached: dict[Ids, float] = {(): 1.0}
        for ids, text in rule.open.items():
            for i, q in enumerate(distributions[ids].tolist()):
                weight, more = reached.get(ids, 0.0) * q, rule.texts[i]
                if not weight or not more:
                    continue
                longer = (*ids, i)
                if longer in rule.open:
                    reached[longer] = weight
                elif (first := rule.lexicon.first(text + more)) is not None:
                    psi[first] = psi.get(first, 0.0) + weight
        return psi

    def of(self, tokens: Sequence[int]) -> Tensor:
        return _float64(self._whole.get(t, 0.0) for t in tokens)


# --------------------------------------------------------------------------------- psi="path"


class Path(Rule):
    """Ours: one path of letters to every token, so that ψ(t) takes the distributions along t alone.

    At a text that is a token the walk stops with probability σ, one minus the drafter's probability
    of a letter that stays inside the trie; at a leaf and at the text `stop` for sure. Where it may
    not stop, the drafter's distribution is normalized over the letters that stay inside; if none of
    them has mass it proposes nothing. `ids` are the drafter's ids of the letters, one each; `size`
    is V_D.
    """

    plans = True
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
        return tuple(self.ids[letter] for letter in text)

    def ends(self, text: str, stop: str | None) -> bool:
        """Whether a walk goes no further than `text`, whatever the drafter says."""
        return text == stop or not self.lexicon.letters(text)

    def fork(self, text: str, q: Tensor) -> dict[str, float]:
        """What a walk does at `text`: the probability of each letter, and σ, that of STOP.

        q is the drafter's distribution (V_D,) there. Empty: ⊥.
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

    def distribution(
        self, stop: str | None, known: Mapping[Ids, Tensor], distributions: Distributions
    ) -> LazyDistribution:
        return PathPsi(self, stop, known, distributions)


class PathPsi:
    """ψ(t) = Π over t's letters of their probabilities · σ(t), one forward along t."""

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
            # What the walk drew from stays as it was, to the last bit.
            self.known = (
                self.distributions([self.rule.spell(text) for text in missing]) | self.known
            )
        return _float64(self._along(text) or 0.0 for text in texts)

    def _along(self, text: str) -> float | None:
        """ψ of a token's text, "" for one that is never proposed; None: something is missing."""
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


def _float64(values: Iterable[float]) -> Tensor:
    """(n,) on the CPU: other devices may have no float64."""
    return torch.tensor([*values], dtype=torch.float64, device="cpu")
