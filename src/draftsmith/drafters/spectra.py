"""SPECTRA: guess with n-grams that the target predicts in the same passes.

"SPECTRA: Faster Large Language Model Inference with Optimized Internal and External Speculation",
section 3.1 and algorithm 1. `docs/algorithms/spectra.md` shows the algorithm beside this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.draft import ROOT, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState, Outcome
from draftsmith.core.target import ModelFacts, Needs, RowOutput
from draftsmith.core.tree import Continuation, merge
from draftsmith.drafters.corpus.datastore import Datastore
from draftsmith.drafters.options import at_least, one_of, switches, within
from draftsmith.drafters.retrieval import Retrieval
from draftsmith.drafters.spectra_ngrams import Ngrams
from draftsmith.errors import OptionError
from draftsmith.model.devices import send


@dataclass(frozen=True, repr=False)
class Spectra(Drafter):
    """SPECTRA-CORE: up to `G` guesses from two dictionaries that a pool of `W` chains fills.

    Every pass also contains the pool: W chains of N−1 probe nodes, after which the target predicts
    the next tokens. So a pass may use W·(N−1) nodes in addition to the guesses. With a smaller
    budget the pool gets at most half of it, in whole chains that take turns, plus what the guesses
    leave.

    Where the paper is silent: the backward guess goes first (`backward_first`) and stops at the
    first miss; guesses are merged into a tree, the latest first; a key of the forward dictionary
    gives the latest W continuations; above `memory` keys the oldest half is dropped; chains start
    with random tokens of the prompt; the dictionaries are kept between turns of a chat. The
    ablations of table 2 are `forward`, `backward` and `sub_ngrams`.

    With a `corpus`, a folder created by `draftsmith corpus build`, continuations from it fill the
    rest of the G guesses (section 3.2; `retrieval` is that part alone).

    Without the `pool` there are no probes: the text, prompt and answer, is the only chain that
    fills the dictionaries. Drafts then depend on token ids only.
    """

    N: int = 5
    """Tokens of a chain; the longest n-gram."""
    W: int = 15
    """Number of chains in the pool, and of continuations per key of the forward dictionary."""
    G: int = 15
    """Number of guesses (sequences, not nodes) per step."""
    tau: float = 0.1
    """Share of predictions that may be a known key; the others take the best unknown token."""
    forward: bool = True
    backward: bool = True
    sub_ngrams: bool = True
    backward_first: bool = True
    positions: Literal["own", "staggered"] = "own"
    """Position of chain i: right after the root (own), or i positions later (staggered)."""
    pool: bool = True
    memory: int = 65_536
    seed: int = 0
    """Seed of the drafter's draws: start tokens of the chains, and the r compared to tau."""
    corpus: str | None = None

    name: ClassVar[str] = "spectra"
    summary: ClassVar[str] = "n-grams that the target predicts in the same pass (SPECTRA)"

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """Logits, for the pool."""
        return Needs(logits=self.pool)

    def __post_init__(self) -> None:
        _check_pool(self)
        at_least(self, 1, "memory")
        switches(self)
        within(self, "tau", 0, 1)
        if not (self.forward or self.backward):
            raise OptionError(
                f"{self.name}: forward=False and backward=False leave no guesses; enable one of "
                "them, or use retrieval"
            )
        if self.corpus is not None:  # reports a wrong folder now
            object.__setattr__(self, "corpus", Retrieval(self.corpus).corpus)

    def preferred_width(self) -> int:
        """Return the nodes of the whole pool and of all guesses without shared beginnings."""
        pool = self.W * (self.N - 1) if self.pool else 0
        sizes = [self.N] * self.backward + [self.N - 1] * (self.G * self.forward)
        if self.corpus is not None:
            sizes = [max(self.N, Retrieval(self.corpus).depth)] * self.G
        return pool + sum(sizes[: self.G])

    def bytes_for(self, positions: int) -> int:
        """Return the size of the dictionaries.

        Every pass adds the n-grams of W chains. After some thousand passes few of them are new.
        """
        entry = 200 + 8 * self.N
        return 1024 * positions + entry * self.W * self.pool * min(positions, 5000)

    def needs_of(self, model: ModelFacts) -> Needs:
        """Return `needs`; raise OptionError if the corpus was built for another vocabulary."""
        if self.corpus is not None:
            Retrieval(self.corpus).needs_of(model)
        return self.needs

    def open(self, ctx: Context) -> DrafterState:
        kind = _Pool if self.pool else _Text
        if self.corpus is None:
            return kind(self)
        store = Retrieval(self.corpus).datastore()
        store.header.check_ids(ctx.vocab_size, store.folder)
        return kind(self, store=store)


@dataclass(frozen=True, repr=False)
class Lookahead(Drafter):
    """Guesses like Lookahead's: SPECTRA with full n-grams, forward look-up, most probable tokens.

    In Lookahead itself (Fu et al. 2024) the columns of the window attend to each other; here chains
    are isolated.
    """

    N: int = 5
    W: int = 15
    G: int = 15
    positions: Literal["own", "staggered"] = "staggered"
    seed: int = 0

    name: ClassVar[str] = "lookahead"
    summary: ClassVar[str] = "full n-grams that the target predicts in the same pass (Lookahead)"
    needs: ClassVar[Needs] = Needs(logits=True)

    def __post_init__(self) -> None:
        _check_pool(self)

    def preferred_width(self) -> int:
        return self.spectra().preferred_width()

    def spectra(self) -> Spectra:
        """Return the special case of SPECTRA that this is."""
        return Spectra(
            self.N, self.W, self.G, tau=1.0, backward=False, sub_ngrams=False,
            positions=self.positions, seed=self.seed,
        )  # fmt: skip

    def bytes_for(self, positions: int) -> int:
        return self.spectra().bytes_for(positions)

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        return _Pool(self.spectra(), self.name)


def _check_pool(drafter: Spectra | Lookahead) -> None:
    """Raise OptionError for wrong values of the options that both drafters have."""
    at_least(drafter, 2, "N")
    at_least(drafter, 1, "W", "G")
    at_least(drafter, 0, "seed")
    one_of(drafter, "positions", ("own", "staggered"))


class _Pool(DrafterState):
    """The candidate pool of one sequence, and its dictionaries."""

    def __init__(
        self, config: Spectra, name: str | None = None, store: Datastore | None = None
    ) -> None:
        self.config = config
        self.name = name or config.name
        self.store = store
        self.ngrams = Ngrams(config.W, config.memory, config.sub_ngrams)
        self.predictor: Predictor | None = None
        self.chains: list[tuple[int, ...]] = []
        """W chains of N−1 tokens; empty before the first step."""
        self._grew = False  # whether they have predicted tokens, not only random ones
        self._start_length = 0
        self._turn = 0  # the chain with the oldest last pass
        self._running: list[int] = []  # chains in the current pass

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
        """Return continuations of `ids`; the first G count (algorithm 1, lines 7 to 17)."""
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
        if self.store is not None and len(found) <= c.G:  # one may be the beginning of another
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
        """Return the chains that end within `depth`, the one with the oldest last pass first."""
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
            return  # a target that verifies chains only has dropped the pool
        ends = slice(c.N - 2 - probes, None, c.N - 1)
        fresh = [self._rng.random() > c.tau for _ in running]
        if self.predictor is None:
            self.predictor = Predictor(outcome.output.logits.shape[-1])
        predicted = self.predictor(outcome.output, ends, fresh)
        grown = [(*self.chains[i], token) for i, token in zip(running, predicted, strict=True)]
        for i, tokens in zip(running, self.ngrams.record(*grown), strict=True):
            self.chains[i] = tokens
        self._grew = True
        self._turn = (running[-1] + 1) % c.W
        self.predictor.update(self.ngrams.changed_keys())

    def truncate(self, length: int) -> None:
        """Keep the dictionaries, which hold no positions; drop chains from a removed prompt."""
        self._running = []
        if length < self._start_length:
            self.chains, self._grew = [], False
            self._turn = 0


class _Text(_Pool):
    """State without a pool: the text is the only chain."""

    _read = 0
    """Number of ids with n-grams in the dictionaries."""

    def _begin(self, ctx: Context) -> None:
        ids, n = ctx.ids, self.config.N
        for end in range(max(n, self._read + 1), len(ids) + 1):
            self.ngrams.record(tuple(ids[end - n : end]))
        self.chains, self._grew, self._read = [tuple(ids[1 - n :])], True, len(ids)

    def _fitting(self, depth: int) -> list[int]:  # noqa: ARG002
        return []  # there is no pool

    def truncate(self, length: int) -> None:
        """Clear the dictionaries, which depend on the ids only; they are filled again."""
        if length < self._read:
            c = self.config
            self._read, self.ngrams = 0, Ngrams(c.W, c.memory, c.sub_ngrams)


class Predictor:
    """Picks the next token of every chain from its logits (algorithm 1, lines 26 to 34)."""

    def __init__(self, vocab_size: int) -> None:
        self._penalty = np.zeros(vocab_size, np.float32)
        """(V,) -inf for keys of the forward dictionary, else 0."""

    def update(self, keys: dict[int, bool]) -> None:
        """Update the keys that were added (True) or removed (False)."""
        self._penalty[[*keys]] = [-np.inf if known else 0.0 for known in keys.values()]

    def __call__(self, output: RowOutput, ends: slice, fresh: Sequence[bool]) -> list[int]:
        """Return the most probable token after each of the positions `ends`, an unknown one if
        `fresh`.

        If all possible tokens are known, the most probable token is returned.
        """
        if output.highest is None:
            # NumPy's arg-max takes a twentieth of the time of torch's on a CPU.
            return _best(output.logits[ends].float().cpu().numpy(), self._penalty, fresh)
        values, ids = (one[ends] for one in output.highest)
        order = np.arange(len(ids))
        found = ids[order, _best(values, self._penalty[ids], fresh)]
        known = order[np.array(fresh) & np.isinf(self._penalty[found])].tolist()
        if known:
            rows = output.logits[ends]
            found[known] = self._unknown(torch.stack([rows[i] for i in known]))
        tokens: list[int] = found.tolist()
        return tokens

    def _unknown(self, logits: Tensor) -> Any:
        """Pick from all of an accelerator's logits (n, V), for which the host waits."""
        best = (logits + send(self._penalty, logits.device)).max(-1)
        return torch.where(best.values == -torch.inf, logits.argmax(-1), best.indices).cpu().numpy()


def _best(values: Any, penalty: Any, fresh: Sequence[bool]) -> list[int]:
    """Return the place of the best value of each row (n, k), with its penalty if `fresh`."""
    unknown = values + penalty
    found: list[int] = unknown.argmax(-1).tolist()
    for i, wants_unknown in enumerate(fresh):
        if not wants_unknown or unknown[i, found[i]] == -np.inf:
            found[i] = int(values[i].argmax())
    return found
