"""SLRS: propose the first target token of a drafted text, with its exact probability ψ.

Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", algorithm 3, section 3.3. ψ is in `psi.py`. `docs/algorithms/slrs.md`
shows the algorithm beside both files and derives why it is lossless.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from draftsmith.core.draft import EMPTY, Draft, Proposal
from draftsmith.core.drafter import Context
from draftsmith.drafters.draft_model.psi import (
    Distributions,
    Enumerate,
    Lexicon,
    Path,
    Rule,
    Walk,
    psi_of,
)
from draftsmith.drafters.draft_model.slem import Bridge, StringMatch
from draftsmith.drafters.draft_model.translation import Ids, Translation
from draftsmith.errors import OptionError, UnsupportedError


def rule_of(bridge: Bridge) -> Rule:
    """Return the rule for a pair; raise OptionError or UnsupportedError if none fits."""
    pair = bridge.pair
    if pair.reproducible:
        raise OptionError("draft_model: reproducible=True cannot be used with algorithm='slrs'")
    T, D = bridge.target, bridge.drafter  # noqa: N806
    texts: list[str | None] = [None if not data else data.decode("latin-1") for data in D.tokens]
    tokens = {data.decode("latin-1"): i for data, i in T.ids.items()}
    for i in D.special:
        if pair.shared.to_target[i] >= 0:
            texts[i] = chr(256 + i)
            tokens[chr(256 + i)] = int(pair.shared.to_target[i])
    if pair.psi == "enumerate":
        rule = Enumerate(Lexicon(tokens), texts, lookahead=pair.tokens)
        rule.open  # noqa: B018  raises an error if it would take too long
        return rule
    longest = max((text for text in texts if text), key=len, default="")
    if len(longest) > 1:
        shown = reprlib.repr(longest.encode("latin-1"))
        raise UnsupportedError(
            "slrs: psi='path' needs a draft model with single-byte tokens, but this one has "
            f"{shown} with {len(longest)} bytes; use algorithm='tli' or 'slem'"
        )
    ids = {text: i for i, text in reversed(list(enumerate(texts))) if text}
    lexicon = Lexicon({text: i for text, i in tokens.items() if all(c in ids for c in text)})
    if not lexicon.ids:
        raise UnsupportedError(
            "slrs: the draft model's bytes spell no token of the target; use algorithm='tli' or "
            "'slem'"
        )
    if pair.context_length is not None and pair.context_length < 4 * Path.reach:
        raise OptionError(
            f"slrs: psi='path' may draft {Path.reach} bytes for one token, but the context of the "
            f"draft model is {pair.context_length}; use algorithm='tli' or 'slem'"
        )
    return Path(lexicon, ids, D.size)


class StringRejection(StringMatch):
    """Drafting of one sequence by algorithm 3.

    With psi="path" it first makes a plan: the draft of SLEM. The plan depends on nothing that is
    drawn, so it may determine where walks stop, and all walks use its distributions. With a greedy
    target every distribution is a single point and rejection sampling is exact match, as in SLEM.
    """

    def __init__(self, bridge: Bridge, rule: Rule) -> None:
        super().__init__(bridge)
        self.rule = rule

    def begin(self, ctx: Context) -> Sequence[int]:
        self.known: dict[Ids, Tensor] = {}
        """Distributions (V_D,) after each beginning of the plan."""
        return Translation.begin(self, ctx)

    @property
    def reach(self) -> int:
        return self.limit if self.distribution.greedy else self.limit + self.rule.reach

    def scores(self, logits: Tensor) -> Tensor:
        if self.distribution.greedy:
            return super().scores(logits)
        return self.rule.mask(logits)

    def draw(self, q: Tensor) -> int | None:
        self.known[tuple(self.ids[self.start :])] = q
        # Under `Enumerate`, ids drafted after the first token are no samples given that token.
        return int(q.argmax()) if isinstance(self.rule, Path) else None

    def draft(self) -> Draft:
        if self.distribution.greedy or not self.known:
            return super().draft() if self.distribution.greedy else EMPTY
        tokens: list[int] = []
        proposals: dict[int, Proposal] = {}
        before: Ids = ()
        for stop in self._stops():
            n, distributions = len(before), self._distributions(before)
            known = {ids[n:]: q for ids, q in self.known.items() if ids[:n] == before}
            walk = Walk(stop)
            while not walk.over:
                if walk.ids not in known:
                    known = distributions([walk.ids]) | known  # keep what was drawn from
                self.rule.step(walk, known[walk.ids], self.context.sampler)
            psi = psi_of(self.rule, stop, known, distributions, self.context.vocab_size)
            proposals[len(tokens) - 1] = Proposal(psi, None if walk.token is None else len(tokens))
            if walk.token is not None:
                tokens.append(walk.token)
            if walk.token is None or walk.text != stop:
                break
            before += walk.ids
        return replace(Draft.chain(tokens, self.pair.source), proposals=proposals)

    def _stops(self) -> Sequence[str | None]:
        """Return the texts of the planned tokens, without an unfinished word; None: no plan."""
        rule, planned = self.rule, tuple(self.ids[self.start :])
        if not isinstance(rule, Path):
            return [None]
        found: list[str] = []
        at = 0
        for token in self._tokens():
            text = rule.lexicon.texts.get(token)
            if text is None or planned[at : at + len(text)] != rule.spell(text):
                break
            found.append(text)
            at += len(text)
        if found and at == len(planned) and planned[-1] not in self.pair.ends:
            # The complete word may be tokenized differently.
            while found and found.pop()[0].isalnum():
                pass
        most = min(self.pair.tokens, self.context.budget, self.context.depth)
        return found[:most] or [None]

    def _distributions(self, before: Ids) -> Distributions:
        """Return a function for the drafter's distributions after other letters than the plan's.

        It is also called during verification, so it keeps the text and the distribution of this
        draft. `before` are the first ids of the plan. Where the drafter overflows, no id has a
        probability. An error would drop the proposal depending on what it was: a wrong
        distribution.
        """
        after, distribution, mask = self.after, self.distribution, self.rule.mask

        def distributions(branches: Sequence[Ids]) -> dict[Ids, Tensor]:
            logits = after.logits(before, branches)
            return {
                ids: distribution.probs(distribution.scores(None, mask(row))).nan_to_num(0.0)
                for ids, row in logits.items()
            }

        return distributions
