"""SLRS: propose the first target token of a drafted text, and know the probability ψ of doing so.

Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", algorithm 3, sections 3.3 and 3.4; psi="path" is ours.
`docs/algorithms/slrs.md` lays the algorithm beside this file and derives why it is lossless.

A *letter* is a byte, or a control token that both vocabularies have; a text is a string of letters:
`chr(0)` … `chr(255)` are the bytes, `chr(256 + i)` is the drafter's control token i.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from draftsmith.core.draft import Draft, LazyLaw, Proposal
from draftsmith.core.drafter import Context
from draftsmith.core.sampling import Chance
from draftsmith.drafters.slem import Bridge, StringMatch, masked
from draftsmith.drafters.translation import Ids, Pair, Translation
from draftsmith.errors import OptionError, UnsupportedError

LONGEST = 32
"""Letters of the longest target token that is proposed."""

MOST_FORWARDS = 4096
"""Drafter forwards per ψ beyond which enumerating is refused."""

DRAWS = 8
"""Draws that a residual takes before ψ is computed wherever p is not zero."""

STOP = ""
"""What a walk may do instead of adding a letter."""

Laws = Callable[[Sequence[Ids]], dict[Ids, Tensor]]
"""Branches → the drafter's laws (V_D,) after each of their prefixes, the empty one included."""


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


class Walk(ABC):
    """One proposal in the making: drafter ids, until they decide a target token."""

    def __init__(self) -> None:
        self.ids: Ids = ()
        """Drafted since the place where the proposal begins."""
        self.text = ""
        self.seen: dict[Ids, Tensor] = {}
        """The laws (V_D,) that it drew from."""
        self.token: int | None = None
        """The target token proposed; None is ⊥, nothing."""
        self.probability = 1.0
        """Of this very walk: at most ψ(token)."""
        self.over = False

    @abstractmethod
    def step(self, q: Tensor, chance: Chance) -> None:
        """Go on by at most one drafter id, given the drafter's law q (V_D,) after `ids`."""


class Rule(ABC):
    """When to stop drafting, and hence ψ: for one pair of vocabularies, shared by its sequences."""

    lexicon: Lexicon
    forbidden: Tensor
    """(V_D,) True for ids that are masked before anything is drawn."""
    most: int
    """Most proposals per step."""
    reach: int
    """Most drafter ids per proposal."""

    @abstractmethod
    def walk(self) -> Walk:
        """A walk from the beginning of a proposal."""

    @abstractmethod
    def law(self, walk: Walk, laws: Laws) -> LazyLaw:
        """The law ψ that a walk's token was drawn from."""


# ---------------------------------------------------------------------------- psi="enumerate"


class Enumerate(Rule):
    """The paper's rule: draft until the first target token is determined, or `lookahead` ids.

    It is determined where no token begins with the drafted text, or that text is the only one that
    does. `texts` (V_D,) are what the drafter's ids write, None for ids to mask.
    """

    most = 1  # what is drafted beyond the first token is no sample of the drafter's after it

    def __init__(self, lexicon: Lexicon, texts: Sequence[str | None], lookahead: int) -> None:
        self.lexicon, self.texts, self.reach = lexicon, texts, lookahead
        self.forbidden = torch.tensor([not text for text in texts])

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

    def walk(self) -> Walk:
        return _EnumerateWalk(self)

    def law(self, walk: Walk, laws: Laws) -> LazyLaw:  # noqa: ARG002
        return EnumeratedPsi(self, laws)


class _EnumerateWalk(Walk):
    def __init__(self, rule: Enumerate) -> None:
        super().__init__()
        self.rule = rule

    def step(self, q: Tensor, chance: Chance) -> None:
        drawn = chance.draw(q)
        self.probability *= float(q[drawn])
        self.ids = (*self.ids, drawn)
        self.text += self.rule.texts[drawn] or ""
        if self.rule.decided(self.ids, self.text):
            self.over, self.token = True, self.rule.lexicon.first(self.text)


class EnumeratedPsi:
    """ψ by summing over all drafts, those that run past the first token included."""

    draws = 0  # a single value costs as much as all of them

    def __init__(self, rule: Enumerate, laws: Laws) -> None:
        self.rule, self.laws = rule, laws

    @cached_property
    def _whole(self) -> dict[int, float]:
        rule, psi = self.rule, dict[int, float]()
        laws = self.laws(list(rule.open))
        reached: dict[Ids, float] = {(): 1.0}
        for ids, text in rule.open.items():
            for i, q in enumerate(laws[ids].tolist()):
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
        return torch.tensor([self._whole.get(t, 0.0) for t in tokens], dtype=torch.float64)


# --------------------------------------------------------------------------------- psi="path"


class Path(Rule):
    """Ours: one path of letters to every token, so that ψ(t) takes the laws along t alone.

    At a text that is a token the walk stops with probability σ, one minus the drafter's probability
    of a letter that stays inside the trie, and at a leaf for sure. Where it may not stop, the
    drafter's law is normalized over the letters that stay inside; if none of them has mass it
    proposes nothing. `ids` are the drafter's ids of the letters, one each; `size` is V_D.
    """

    reach = LONGEST

    def __init__(self, lexicon: Lexicon, ids: Mapping[str, int], size: int, most: int) -> None:
        self.lexicon, self.most = lexicon, most
        used = set().union(*lexicon.ids)
        self.ids = {letter: i for letter, i in ids.items() if letter in used}
        self.forbidden = torch.ones(size, dtype=torch.bool)
        self.forbidden[list(self.ids.values())] = False
        self._rows: dict[str, tuple[str, Tensor]] = {}

    def spell(self, text: str) -> Ids:
        """The drafter's ids of a text."""
        return tuple(self.ids[letter] for letter in text)

    def fork(self, text: str, q: Tensor | None) -> dict[str, float]:
        """What a walk does at `text`: the probability of each letter, and σ, that of STOP.

        q is the drafter's law (V_D,) there, which a leaf does without. Empty: ⊥.
        """
        if text not in self._rows:
            letters = self.lexicon.letters(text)
            self._rows[text] = letters, torch.tensor([self.ids[letter] for letter in letters])
        letters, rows = self._rows[text]
        inside = q[rows.to(q.device)].tolist() if letters and q is not None else []
        mass = math.fsum(inside)
        if text in self.lexicon.ids:
            return {STOP: max(0.0, 1 - mass), **dict(zip(letters, inside, strict=True))}
        return {letter: p / mass for letter, p in zip(letters, inside, strict=True) if mass}

    def walk(self) -> Walk:
        return _PathWalk(self)

    def law(self, walk: Walk, laws: Laws) -> LazyLaw:
        return PathPsi(self, walk, laws)


class _PathWalk(Walk):
    def __init__(self, rule: Path) -> None:
        super().__init__()
        self.rule = rule

    def step(self, q: Tensor, chance: Chance) -> None:
        self.seen[self.ids] = q
        fork = self.rule.fork(self.text, q)
        if not fork:
            self.over = True
            return
        step = list(fork)[chance.draw(q.new_tensor(list(fork.values())))]
        self.probability *= fork[step]
        if step != STOP:
            self.text += step
            self.ids = (*self.ids, self.rule.ids[step])
        if step == STOP or not self.rule.lexicon.letters(self.text):
            self.over, self.token = True, self.rule.lexicon.ids[self.text]


class PathPsi:
    """ψ(t) = Π over t's letters of their probabilities · σ(t), one forward along t."""

    draws = DRAWS

    def __init__(self, rule: Path, walk: Walk, laws: Laws) -> None:
        self.rule, self.laws = rule, laws
        self.seen = dict(walk.seen)
        self.forks: dict[str, dict[str, float]] = {}

    def of(self, tokens: Sequence[int]) -> Tensor:
        texts = [self.rule.lexicon.texts.get(token, "") for token in tokens]
        missing = [text for text in texts if self._along(text) is None]
        if missing:
            self.seen = self.laws([self.rule.spell(text) for text in missing]) | self.seen
        return torch.tensor([self._along(text) or 0.0 for text in texts], dtype=torch.float64)

    def _along(self, text: str) -> float | None:
        """ψ of a token's text, "" for one that is never proposed; None: a law is missing."""
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
        if text not in self.forks:
            q = self.seen.get(self.rule.spell(text))
            if q is None and self.rule.lexicon.letters(text):
                return None
            self.forks[text] = self.rule.fork(text, q)
        return self.forks[text]


# ------------------------------------------------------------------------------ in the drafter


def rule_of(pair: Pair, bridge: Bridge) -> Rule:
    """The rule of a pair of vocabularies; raises OptionError or UnsupportedError if it has none."""
    if pair.reproducible:
        raise OptionError("draft_model: reproducible=True has no meaning for algorithm='slrs'")
    T, D = bridge.target, bridge.drafter  # noqa: N806
    texts: list[str | None] = [None if not data else data.decode("latin-1") for data in D.tokens]
    tokens = {data.decode("latin-1"): i for data, i in T.ids.items()}
    for i in D.special:
        if pair.shared.to_target[i] >= 0:
            texts[i] = chr(256 + i)
            tokens[chr(256 + i)] = int(pair.shared.to_target[i])
    if pair.psi == "enumerate":
        rule = Enumerate(Lexicon(tokens), texts, lookahead=pair.tokens)
        rule.open  # noqa: B018  refuses what would take too long
        return rule
    longest = max((text for text in texts if text), key=len, default="")
    if len(longest) > 1:
        raise UnsupportedError(
            f"slrs: psi='path' needs a drafter whose tokens are single bytes, and this one has "
            f"{longest.encode('latin-1')!r}; use algorithm='tli' or 'slem'"
        )
    ids = {text: i for i, text in reversed(list(enumerate(texts))) if text}
    lexicon = Lexicon({text: i for text, i in tokens.items() if all(c in ids for c in text)})
    if not lexicon.ids:
        raise UnsupportedError("slrs: the drafter's bytes spell no token of the target's")
    # However long the tokens turn out, half of what the drafter can read is left for the text.
    most = pair.tokens
    if pair.context_length is not None:
        most = min(most, pair.context_length // 2 // Path.reach)
    if not most:
        raise OptionError(
            f"slrs: psi='path' may draft {Path.reach} bytes for one token, and the drafter can "
            f"read only {pair.context_length}; use algorithm='tli' or 'slem'"
        )
    return Path(lexicon, ids, D.size, most)


class StringRejection(StringMatch):
    """One sequence drafted by algorithm 3, several proposals in a row where the rule allows.

    Under a greedy target every law is one point, and rejection sampling is exact match: SLEM.
    """

    def __init__(self, pair: Pair, bridge: Bridge, rule: Rule) -> None:
        super().__init__(pair, bridge)
        self.rule = rule

    def begin(self, ctx: Context) -> Sequence[int]:
        ids = Translation.begin(self, ctx)
        if not self.law.greedy:
            self.walks: list[Walk] = []
            self.walk = self.rule.walk()
            self.most = min(self.rule.most, ctx.budget, ctx.depth)
            self.limit = self.most * self.rule.reach
        return ids

    def scores(self, logits: Tensor) -> Tensor:
        if self.law.greedy:
            return super().scores(logits)
        return masked(logits, self.rule.forbidden)

    def draw(self, q: Tensor) -> int | None:
        while True:
            fed = len(self.walk.ids)
            self.walk.step(q, self.context.chance)
            new = self.walk.ids[fed:]
            if self.walk.over and not self._book():
                return None
            if new:
                return new[0]

    def _book(self) -> bool:
        """Take a finished walk into the draft; whether to go on with another."""
        walk, self.walk = self.walk, self.rule.walk()
        self.walks.append(walk)
        # What decides about the next proposal stays in the draft itself, so ψ is all that counts.
        return (
            len(self.walks) < self.most
            and walk.token is not None
            and walk.token not in self.bridge.target.special
            and walk.probability >= self.pair.confidence
        )

    def take(self, token: int, q: Tensor | None, confidence: float) -> bool:
        if self.law.greedy:
            return super().take(token, q, confidence)
        self.ids.append(token)
        return True

    def draft(self) -> Draft:
        if self.law.greedy:
            return super().draft()
        tokens: list[int] = []
        proposals: dict[int, Proposal] = {}
        before: Ids = ()
        for walk in self.walks:
            psi = self.rule.law(walk, self._laws(before))
            proposals[len(tokens) - 1] = Proposal(psi, None if walk.token is None else len(tokens))
            if walk.token is not None:
                tokens.append(walk.token)
            before += walk.ids
        chain = Draft.chain(tokens, self.pair.source)
        return replace(chain, proposals=proposals)

    def _laws(self, before: Ids) -> Laws:
        """The drafter's laws after other letters than it drew, behind the draft's first ids.

        Asked for while the target verifies, under the very text and law that it drafted by.
        """
        after, law, forbidden = self.after, self.law, self.rule.forbidden

        def laws(branches: Sequence[Ids]) -> dict[Ids, Tensor]:
            logits = after.logits(before, branches)
            return {
                ids: law.probs(law.scores(None, masked(row, forbidden)))
                for ids, row in logits.items()
            }

        return laws
