"""Retrieval: draft what followed the end of the text in a corpus.

SPECTRA-RETRIEVAL: "SPECTRA: Faster Large Language Model Inference with Optimized Internal and
External Speculation", section 3.2, with a corpus of low perplexity under the target. With an
unranked corpus it is REST (He et al. 2024).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState, Stateless
from draftsmith.core.target import NO_NEEDS, ModelFacts, Needs
from draftsmith.drafters.corpus.datastore import DEPTH, LONGEST, SAMPLE, SHORTEST, Datastore, shared
from draftsmith.drafters.options import at_least
from draftsmith.errors import OptionError


@dataclass(frozen=True, repr=False)
class Retrieval(Drafter):
    """Draft what followed the longest suffix of the text that occurs in a corpus.

    `corpus` is a folder created by `draftsmith corpus build`. Suffixes of `longest` to `shortest`
    ids are looked up. The next `depth` tokens of up to `sample` occurrences are merged into a tree,
    and its most frequent nodes are drafted. Where the paper is silent, REST's values are used:
    suffixes of 16 to 2, continuations of 10, 64 nodes.
    """

    corpus: str
    longest: int = LONGEST
    shortest: int = SHORTEST
    depth: int = DEPTH
    sample: int = SAMPLE

    name: ClassVar[str] = "retrieval"
    summary: ClassVar[str] = "what followed the last tokens in a corpus (SPECTRA-RETRIEVAL, REST)"
    width: ClassVar[int] = 64

    def __post_init__(self) -> None:
        if not isinstance(self.corpus, str | os.PathLike):
            raise OptionError(
                f"{self.name}: corpus must be a folder created by `draftsmith corpus build`, got "
                f"{self.corpus!r}"
            )
        object.__setattr__(self, "corpus", os.fspath(self.corpus))  # so that `str` can be parsed
        at_least(self, 1, "longest", "shortest", "depth", "sample")
        if self.shortest > self.longest:
            raise OptionError(
                f"{self.name}: shortest must be <= longest={self.longest}, got {self.shortest}"
            )
        self.datastore()  # reports a wrong folder now, not after loading a model

    def datastore(self) -> Datastore:
        """Return the corpus, shared by all sequences; raise LoadError if it cannot be read."""
        return shared(self.corpus)

    def needs_of(self, model: ModelFacts) -> Needs:
        """Return no needs; raise OptionError if the corpus was built for another vocabulary."""
        vocabulary = model.vocabulary()
        if vocabulary is not None:
            store = self.datastore()
            store.header.check_vocabulary(vocabulary, store.folder)
        return NO_NEEDS

    def open(self, ctx: Context) -> DrafterState:
        store = self.datastore()
        store.header.check_ids(ctx.vocab_size, store.folder)
        return Stateless(partial(self._follow, store))  # each step looks up the last ids only

    def _follow(self, store: Datastore, ctx: Context) -> Draft:
        depth = min(self.depth, ctx.depth)
        if not ctx.budget or not depth:
            return EMPTY
        found = store.follow(ctx.ids, self.longest, self.shortest, depth, self.sample)
        return EMPTY if found is None else found.draft(ctx.budget, self.name)
