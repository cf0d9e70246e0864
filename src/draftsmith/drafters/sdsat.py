"""SDSAT: the model drafts for itself, with adaptive tokens that it was fine-tuned on.

Liu and Zhu 2024, "SDSAT: Accelerating LLM Inference through Speculative Decoding with Semantic
Adaptive Tokens", section 2.1. `draftsmith train sdsat` is section 2.2. After the last token the
model reads k adaptive tokens a. It predicts the next token after the last one, and one more token
after each a. `docs/algorithms/sdsat.md` shows the paper beside this file.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate, islice
from operator import mul
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from draftsmith.core.draft import EMPTY, ROOT, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState, Outcome
from draftsmith.core.sampling import argmax, without
from draftsmith.core.target import ModelFacts, Needs
from draftsmith.core.tree import Continuation, merge
from draftsmith.drafters.longest_match import Frequency
from draftsmith.drafters.options import at_least
from draftsmith.errors import DrafterError, OptionError, UnsupportedError
from draftsmith.values import is_number, token_ids

if TYPE_CHECKING:
    from draftsmith.model.adaptive import AdaptiveTokens

CANDIDATES = 10
"""Candidates at each depth of a tree: the paper's top-k."""

MOST = 64
"""Maximum nodes of a tree with a fixed shape; of a larger one the most probable are drafted."""

ANSWER = 0.6
"""Value of an answer to a question, in drafted tokens: it costs a node now, and one more later."""

PRIOR = 0.6
"""Initial probability that a draft is accepted at a depth, if it was accepted before it."""


@dataclass(frozen=True, repr=False)
class SDSAT(Drafter):
    """Draft the model's predictions after `k` adaptive tokens a; for models trained with them.

    passes=2 (the paper): a pass over [last, a×k] gives the next token and k drafts; the next pass
    verifies them. passes=1 (ours): every pass also asks questions (tokens a) after each prefix of
    its own draft, so that the next drafts are available wherever it ends. All prefixes with k
    questions each are k + (k+1)·k nodes. A smaller budget is divided between draft and questions;
    the questions go to the prefixes where recent drafts ended. Models that verify chains only are
    asked after the whole draft; if it is not accepted, two passes are needed.

    `tree` (with passes=2) is for sampling. It is a shape, such as `(3, 2, 1)`: numbers of
    candidates at the first depths, the last one for all further depths; or a number of nodes, of
    which the most probable are drafted. None: the best token of each depth, a chain.

    k may exceed the L of the training. The token a is never drafted and never emitted: the trained
    model's generation_config suppresses it.
    """

    k: int
    passes: int = 2
    tree: int | tuple[int, ...] | None = None

    name: ClassVar[str] = "sdsat"
    summary: ClassVar[str] = (
        "the model's own drafts, with adaptive tokens it was trained on (SDSAT)"
    )
    needs: ClassVar[Needs] = Needs(logits=True)
    taught: ClassVar[AdaptiveTokens | None] = None
    """The model's adaptive tokens, after `bind`."""
    branches: ClassVar[bool] = True
    """Whether the bound model verifies trees."""

    def __post_init__(self) -> None:
        at_least(self, 1, "k", "passes")
        if self.passes > 2:
            raise OptionError(f"{self.name}: passes must be 1 or 2, got {self.passes}")
        if self.tree is None:
            return
        if self.passes == 1:
            raise OptionError(
                f"{self.name}: tree={self.tree!r} needs passes=2, because passes=1 asks questions "
                "after the nodes of a chain"
            )
        if is_number(self.tree, int):
            at_least(self, 1, "tree")
            return
        what = "a number of nodes, or numbers of candidates for each depth such as (3, 2, 1)"
        widths = tuple(token_ids(f"{self.name}: tree", self.tree, what=what))
        if not widths or min(widths) < 1:
            raise OptionError(f"{self.name}: tree must be {what}, got {self.tree!r}")
        object.__setattr__(self, "tree", widths)

    def preferred_width(self) -> int:
        if self.passes == 1:
            return self.k * (self.k + 2)
        if isinstance(self.tree, int):
            return max(self.k, self.tree)
        return min(int(sum(accumulate(self.widths(), mul))), MOST)

    def reach(self, width: int) -> int:
        return min(self.k, width if self.passes == 2 else (width + 1) // 2)

    def widths(self) -> list[int]:
        """Return (k,) numbers of candidates at each depth of the draft."""
        if self.tree is None:
            return [1] * self.k
        shape = (CANDIDATES,) if isinstance(self.tree, int) else self.tree
        return [shape[min(depth, len(shape) - 1)] for depth in range(self.k)]

    def bind(self, model: ModelFacts) -> Drafter:
        """Return the drafter with the model's adaptive tokens.

        Raises UnsupportedError if the model was not trained with them, OptionError for a k that
        they do not allow, LoadError for a damaged folder.
        """
        if self.taught is not None and not model.name:
            return self  # nothing says that this model was not trained with them
        from draftsmith.model.adaptive import AdaptiveTokens

        taught = AdaptiveTokens.load(model.name) if model.name else None
        if taught is None:
            raise UnsupportedError(
                f"{self.name}: {model.name or 'a model created in memory'} was not trained with "
                "adaptive tokens (its folder has no sdsat.json); train it with `draftsmith train "
                "sdsat`"
            )
        taught.ask(self.k)
        bound = copy.copy(self)
        object.__setattr__(bound, "taught", taught)
        object.__setattr__(bound, "branches", model.shape == "tree")
        return bound

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        if self.taught is None:
            raise DrafterError(f"{self.name} must be bound to a model before it can draft")
        return _Questions(self, self.taught)


class _Questions(DrafterState):
    """The model's predictions after the adaptive tokens at the end of the sequence."""

    def __init__(self, config: SDSAT, taught: AdaptiveTokens) -> None:
        self.config = config
        self.a = taught.ask(config.k)
        self.taught = taught.tokens
        self.answers: Tensor | None = None
        """(≤k, V) logits after them; row i predicts the token at position `length` + i."""
        self.length = 0
        self.held = [Frequency(PRIOR) for _ in range(config.k)]
        """(k,) how often drafts were accepted at this depth, if they were accepted before it."""

    def draft(self, ctx: Context) -> Draft:
        answers, self.answers = self.answers, None
        y = EMPTY if answers is None or self.length != len(ctx.ids) else self._guess(answers, ctx)
        if self.config.passes == 2:
            # Step 2: read the drafts y'; or step 1: read a×k                 (equations 2, 1)
            return y if y.tokens else self._ask((), ctx)
        return self._ask(y.tokens, ctx)

    def _guess(self, answers: Tensor, ctx: Context) -> Draft:
        """Return the draft y': the best token of each depth, or a tree of the best tokens."""
        c, name = self.config, self.config.name
        distributions = without(answers[: ctx.depth], self.taught)
        if c.tree is None:
            return Draft.chain(argmax(distributions[: ctx.budget]).tolist(), name)
        widths = c.widths()
        distribution = (distributions.float() / (ctx.sampling.temperature or 1.0)).softmax(-1)
        p, ids = distribution.topk(min(max(widths), distribution.shape[-1]))
        most = min(c.tree, ctx.budget) if isinstance(c.tree, int) else ctx.budget
        tokens = ids.tolist()
        found = islice(likeliest(p.tolist(), widths), most)
        return merge(
            Continuation([tokens[depth][rank] for depth, rank in enumerate(ranks)], name)
            for ranks in found
        )

    def _ask(self, y: tuple[int, ...], ctx: Context) -> Draft:
        """Return a chain that begins with `y`, with questions after its prefixes."""
        k, nodes = len(self.a), ctx.budget
        depth = min(ctx.depth - 1, 2 * k)
        # A question after prefix j is used j+1 tokens later, so the depth is smaller by that.
        if self.config.branches:
            held = tuple(round(20 * share.value) / 20 for share in self.held)
            asked = questions(held, len(y), nodes, depth)
        else:  # only the questions after a fully accepted draft can be used
            c = min(len(y), max(1, nodes // 2))
            asked = (0,) * c + (max(0, min(k, nodes - c, depth - c)),)
        c = len(asked) - 1
        tokens, parents = [*y[:c]], [*range(-1, c - 1)]
        for j, count in enumerate(asked):
            parents += [j - 1, *range(len(tokens), len(tokens) + count - 1)][:count]
            tokens += self.a[:count]
        return Draft(
            tuple(tokens),
            tuple(parents),
            (self.config.name,) * len(tokens),
            probes=len(tokens) - c,
        )

    def observe(self, ctx: Context, outcome: Outcome) -> None:
        draft, path = outcome.draft, outcome.verification.path
        if self.config.tree is None:
            for depth in range(min(draft.size, len(path) + 1)):
                self.held[depth].record(depth < len(path))
        node, rows = path[-1] if path else ROOT, []
        for probe in range(draft.size, len(draft)):
            if draft.parents[probe] == node:
                rows.append(1 + probe)
                node = probe
        self.answers = outcome.output.logits[rows] if rows else None
        self.length = len(ctx.ids)

    def truncate(self, length: int) -> None:  # noqa: ARG002
        self.answers = None


@lru_cache(4096)
def questions(held: tuple[float, ...], found: int, nodes: int, depth: int) -> tuple[int, ...]:
    """Return (c+1,) numbers of questions after each prefix of a draft of c of the `found` tokens.

    One of the prefixes will be the accepted one. A question at depth i is useful if i of the next
    drafts are accepted. The most probable of these pairs are asked, with the c that gives the
    largest expected sum of drafts and questions. `nodes` is the number of drafts and questions
    together; `depth` is the maximum of j + i.
    """
    reach = list(accumulate(held, mul, initial=1.0))
    best, asked = -1.0, tuple[int, ...]()
    for c in range(min(1, found), min(found, nodes) + 1):
        ends = [reach[j] - reach[j + 1] for j in range(c)] + [reach[c]]
        pairs = sorted(
            (-ends[j] * reach[i], i, j)
            for j in range(c + 1)
            for i in range(1, min(len(held), depth - j, nodes - c) + 1)
        )[: nodes - c]
        promise = sum(reach[1 : c + 1]) - ANSWER * sum(pair[0] for pair in pairs)
        if promise > best:
            counts = Counter(j for _, _, j in pairs)
            best, asked = promise, tuple(counts[j] for j in range(c + 1))
    return asked


def likeliest(p: Sequence[Sequence[float]], widths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield prefixes in falling order of probability, each as the ranks of its candidates by depth.

    p[depth] are the probabilities of the candidates in falling order; a node tries widths[depth] of
    them.
    """
    heap: list[tuple[float, int, tuple[int, ...], float]] = []
    """(−probability, depth, ranks, probability of the prefix without its last token)"""

    def push(above: tuple[int, ...], rank: int, reach: float) -> None:
        depth = len(above)
        if depth < len(p) and rank < min(widths[depth], len(p[depth])) and p[depth][rank] > 0:
            heappush(heap, (-reach * p[depth][rank], depth, (*above, rank), reach))

    push((), 0, 1.0)
    while heap:
        likely, _, ranks, reach = heappop(heap)
        yield ranks
        push(ranks, 0, -likely)
        push(ranks[:-1], ranks[-1] + 1, reach)
