"""SPECTRA: guess with the n-grams that the target itself keeps predicting, beside the answer.

"SPECTRA: Faster Large Language Model Inference with Optimized Internal and External Speculation",
section 3.1 and algorithm 1. `docs/algorithms/spectra.md` lays the algorithm beside this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from draftsmith.core.draft import ROOT, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState, Outcome
from draftsmith.core.target import ModelFacts, Needs
from draftsmith.core.tree import Continuation, merge
from draftsmith.drafters.corpus.datastore import Datastore
from draftsmith.drafters.options import at_least, one_of, switches, within
from draftsmith.drafters.retrieval import Retrieval
from draftsmith.drafters.spectra_ngrams import Ngrams
from draftsmith.errors import OptionError


@dataclass(frozen=True, repr=False)
class Spectra(Drafter):
    """SPECTRA-CORE: up to `G` guesses from two dictionaries that a pool of `W` chains fills.

    Every pass also carries the pool: W chains of N−1 probe nodes, whose next tokens the target
    predicts. A pass may thus spend W·(N−1) nodes beside the guesses; under a smaller budget the
    pool gets at most half, in whole chains that take turns, and whatever the guesses leave.

    Decisions where the paper is silent: the backward guess goes first (`backward_first`); it stops
    at the first miss; guesses are merged to a tree, the latest first; a key of the forward
    dictionary gives the latest W continuations; with more than `memory` keys those that came first
    are forgotten, down to half; chains start from random tokens of the prompt; the dictionaries
    stay from one turn of a chat to the next. Ablations of its table 2: `forward`, `backward`,
    `sub_ngrams`.

    With a `corpus`, a folder made by `draftsmith corpus build`, what followed there fills the rest
    of the G guesses (section 3.2; `retrieval` is that half alone).

    Without the `pool` nothing is asked beside the answer: the text itself, prompt and answer, is
    the one chain that the dictionaries are filled from. So it needs token ids alone.
    """

    N: int = 5
    """Tokens of a chain: the longest n-gram."""
    W: int = 15
    """Chains in the pool, and continuations per key of the forward dictionary."""
    G: int = 15
    """Guesses (sequences, not nodes) per step."""
    tau: float = 0.1
    """Share of predictions that may repeat a known key; the others take the best unseen token."""
    forward: bool = True
    backward: bool = True
    sub_ngrams: bool = True
    backward_first: bool = True
    positions: Literal["own", "staggered"] = "own"
    """Chain i begins right after the root (own), or i positions later (staggered)."""
    pool: bool = True
    memory: int = 65_536
    seed: int = 0
    """Of the drafter's own draws: where the chains start, and the r that is held against tau."""
    corpus: str | None = None

    name: ClassVar[str] = "spectra"
    summary: ClassVar[str] = "n-grams that the target predicts beside the answer (SPECTRA)"

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """The logits of its pool."""
        return Needs(logits=self.pool)

    def __post_init__(self) -> None:
        _check_pool(self)
        at_least(self, "memory", 1)
        switches(self)
        within(self, "tau", 0, 1)
        if not (self.forward or self.backward):
            raise OptionError(
                f"{self.name}: forward=False and backward=False leave nothing to guess with; "
                "turn one of them on, or use retrieval"
            )
        if self.corpus is not None:  # a wrong folder is told now
            object.__setattr__(self, "corpus", Retrieval(self.corpus).corpus)

    def preferred_width(self) -> int:
        """The whole pool, and all guesses were they to share nothing."""
        pool = self.W * (self.N - 1) if self.pool else 0
        sizes = [self.N] * self.backward + [self.N - 1] * (self.G * self.forward)
        if self.corpus is not None:
            sizes = [max(self.N, Retrieval(self.corpus).depth)] * self.G
        return pool + sum(sizes[: self.G])

    def needs_of(self, model: ModelFacts) -> Needs:
        """As `needs`; raises OptionError if the corpus was built for another vocabulary."""
        if self.corpus is not None:
            Retrieval(self.corpus).needs_of(model)
        return self.needs

    def ngrams(self) -> Ngrams:
        """Empty dictionaries."""
        return Ngrams(self.W, self.memory, self.sub_ngrams)

    def open(self, ctx: Context) -> DrafterState:
        kind = _Pool if self.pool else _Text
        if self.corpus is None:
            return kind(self)
        store = Retrieval(self.corpus).datastore()
        store.header.check_ids(ctx.vocab_size, store.folder)
        return kind(self, store=store)


@dataclass(frozen=True, repr=False)
class Lookahead(Drafter):
    """Lookahead-like guesses: SPECTRA with full n-grams, looked up forward, most probable tokens.

    True Lookahead (Fu et al. 2024) lets the columns of its window see one another; here chains are
    isolated.
    """

    N: int = 5
    W: int = 15
    G: int = 15
    positions: Literal["own", "staggered"] = "staggered"
    seed: int = 0

    name: ClassVar[str] = "lookahead"
    summary: ClassVar[str] = "full n-grams that the target predicts beside the answer (Lookahead)"
    needs: ClassVar[Needs] = Needs(logits=True)

    def __post_init__(self) -> None:
        _check_pool(self)

    def preferred_width(self) -> int:
        return self.spectra().preferred_width()

    def spectra(self) -> Spectra:
        """The special case of SPECTRA that this is."""
        return Spectra(
            self.N, self.W, self.G, tau=1.0, backward=False, sub_ngrams=False,
            positions=self.positions, seed=self.seed,
        )  # fmt: skip

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        return _Pool(self.spectra(), self.name)


def _check_pool(drafter: Spectra | Lookahead) -> None:
    """Raise OptionError for options of both that cannot work."""
    at_least(drafter, "N", 2)
    for option in ("W", "G"):
        at_least(drafter, option, 1)
    at_least(drafter, "seed", 0)
    one_of(drafter, "positions", ("own", "staggered"))


class _Pool(DrafterState):
    """The candidate pool of one sequence, and the dictionaries it fills."""

    def __init__(
        self, config: Spectra, name: str | None = None, store: Datastore | None = None
    ) -> None:
        self.config = config
        self.name = name or config.name
        self.store = store
        self.ngrams = config.ngrams()
        self.predictor: Predictor | None = None
        self.chains: list[tuple[int, ...]] = []
        """W chains of N−1 tokens; empty until the first step shows the prompt."""
        self._grew = False  # since they began with random tokens
        self._rng = Random(config.seed)
        self._start_length = 0
        self._turn = 0  # the chain that has waited longest
        self._running: list[int] = []  # chains in the pass under way

    # ------------------------------------------------------------------------------- drafting

    def draft(self, ctx: Context) -> Draft:
        self._begin(ctx)
        c, length = self.config, self.config.N - 1
        fitting = self._fitting(ctx.depth)
        reserved = min(len(fitting), ctx.budget // 2 // length) * length
        most = ctx.budget - reserved
        guesses = merge(self.guesses(ctx.ids), most, depth=ctx.depth, branches=c.G)
        size = len(guesses)
        self._running = fitting[: (ctx.budget - size) // length]
        tokens = [token for i in self._running for token in self.chains[i]]
        parents = [*range(size - 1, size + len(tokens) - 1)]
        parents[::length] = [ROOT] * len(self._running)
        draft = Draft(
            (*guesses.tokens, *tokens),
            (*guesses.parents, *parents),
            (*guesses.source, *[f"{self.name}.pool"] * len(tokens)),
            probes=len(tokens),
        )
        if c.positions == "own" or not tokens:
            return draft
        later = [i + j for i in self._running for j in range(1, c.N)]
        return replace(draft, depths=(*guesses.node_depths(), *later))

    def guesses(self, ids: Sequence[int]) -> list[Continuation]:
        """What may follow `ids`, the first G of it (algorithm 1, lines 7 to 17)."""
        c = self.config
        found: list[Continuation] = []
        if c.forward:
            name = f"{self.name}.forward"
            grown = self.chains if self._grew else ()
            found = [Continuation(guess, name) for guess in self.ngrams.forward(ids[-1], grown)]
        if c.backward:
            guess = self.ngrams.backward(ids[1 - c.N :], c.N)
            place = 0 if c.backward_first else len(found)
            more = [Continuation(guess, f"{self.name}.backward")] if guess else []
            found[place:place] = more
        if self.store is not None and len(found) <= c.G:  # the backward one may begin another
            name, trie = f"{self.name}.retrieval", self.store.follow(ids)
            branches = [] if trie is None else trie.branches(c.G)
            found += [Continuation(guess, name) for guess in branches]
        return found

    def _begin(self, ctx: Context) -> None:
        if not self.chains:
            self._rng = Random(self.config.seed)
            prompt = self._start_length = min(ctx.prompt_length, len(ctx.ids))
            self.chains = [
                tuple(ctx.ids[self._rng.randrange(prompt)] for _ in range(1, self.config.N))
                for _ in range(self.config.W)
            ]
            self.ngrams.begin(self.chains)

    def _fitting(self, depth: int) -> list[int]:
        """The chains that end within `depth`, the one that has waited longest first."""
        c = self.config
        room = depth - (c.N - 1)
        order = [*range(self._turn, c.W), *range(self._turn)]
        if c.positions == "own":
            return order if room >= 0 else []
        return [i for i in order if i <= room]

    # ------------------------------------------------------------------------------- learning

    def observe(self, ctx: Context, outcome: Outcome) -> None:  # noqa: ARG002
        running, self._running = self._running, []
        c, probes = self.config, outcome.draft.probes
        if not running or probes != len(running) * (c.N - 1):
            return  # a target that verifies one branch only left the pool out
        logits, ends = outcome.output.logits, slice(c.N - 2 - probes, None, c.N - 1)
        fresh = [self._rng.random() > c.tau for _ in running]
        if self.predictor is None:
            self.predictor = Predictor(logits)
        predicted = self.predictor(logits, ends, fresh)
        grown = [(*self.chains[i], token) for i, token in zip(running, predicted, strict=True)]
        for i, tokens in zip(running, self.ngrams.record(*grown), strict=True):
            self.chains[i] = tokens
        self._grew = True
        self._turn = (running[-1] + 1) % c.W
        self.predictor.update(self.ngrams.changed_keys())

    def truncate(self, length: int) -> None:
        """Dictionaries stay, for they hold no positions; chains from a prompt that went do not."""
        self._running = []
        if length < self._start_length:
            self.chains, self._grew = [], False
            self._turn = 0


class _Text(_Pool):
    """Without a pool: the text is the one chain, and grows by itself."""

    _read = 0
    """Ids whose n-grams are in the dictionaries."""

    def _begin(self, ctx: Context) -> None:
        ids, n = ctx.ids, self.config.N
        for end in range(max(n, self._read + 1), len(ids) + 1):
            self.ngrams.record(tuple(ids[end - n : end]))
        self.chains, self._grew, self._read = [tuple(ids[1 - n :])], True, len(ids)

    def _fitting(self, depth: int) -> list[int]:  # noqa: ARG002
        return []  # nothing is asked

    def truncate(self, length: int) -> None:
        """Dictionaries follow from the ids alone: they are filled anew."""
        if length < self._read:
            self._read, self.ngrams = 0, self.config.ngrams()


class Predictor:
    """Picks the next token of every chain from its logits (algorithm 1, lines 26 to 34)."""

    def __init__(self, like: Tensor) -> None:
        """`like`: logits (…, V) such as will come: their vocabulary and device."""
        self._device = like.device
        self._penalty = _array(torch.zeros(like.shape[-1], device=like.device))
        """(V,) -inf for the keys of the forward dictionary, else 0."""

    def update(self, keys: dict[int, bool]) -> None:
        """Keys that came (True) or went (False)."""
        if keys:
            values = [-torch.inf if known else 0.0 for known in keys.values()]
            self._penalty[list(keys)] = _array(torch.tensor(values, device=self._device))

    def __call__(self, logits: Tensor, ends: slice, fresh: Sequence[bool]) -> list[int]:
        """The most probable token by each row `ends` of logits (…, V); where `fresh`, the best
        unseen one.

        Where every possible token was seen, the most probable all the same.
        """
        rows = _array(logits[ends])
        unseen = rows + self._penalty
        found: list[int] = unseen.argmax(-1).tolist()
        scores = unseen[[*range(len(found))], found].tolist()
        for i, choosy in enumerate(fresh):
            if not choosy or scores[i] == -torch.inf:
                found[i] = int(rows[i].argmax())
        return found


def _array(values: Tensor) -> Any:
    """As they are; on a CPU as NumPy's, whose arg-max takes a twentieth of the time there."""
    return values.float().numpy() if values.device.type == "cpu" else values
