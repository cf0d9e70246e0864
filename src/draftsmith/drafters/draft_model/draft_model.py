"""A small language model drafts, in its own vocabulary or in the target's.

Algorithms 1, 2, 3, 4 and 5 of "Accelerating LLM Inference with Lossless Speculative Decoding
Algorithms for Heterogeneous Vocabularies"; what they do not share is in `tli`, `slem` and `slrs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from draftsmith import builtin
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.core.target import ModelFacts
from draftsmith.drafters.draft_model.drafting import BoundDraftModel
from draftsmith.drafters.draft_model.slem import Bridge, StringMatch
from draftsmith.drafters.draft_model.slrs import StringRejection, rule_of
from draftsmith.drafters.draft_model.tli import TokenLevel, TokenMap
from draftsmith.drafters.draft_model.translation import Pair, Translation
from draftsmith.drafters.longest_match import LongestMatch
from draftsmith.drafters.options import at_least, one_of, switches, within
from draftsmith.errors import OptionError, UnsupportedError
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner
from draftsmith.text.comparison import Comparison, Usage
from draftsmith.text.tokenizer import opening
from draftsmith.text.vocab import Intersection, Vocabulary, intersect

Algorithm = Literal["auto", "standard", "union", "tli", "slem", "slrs"]


ALGORITHMS: dict[str, Callable[[Pair], Callable[[], Translation]]] = {
    "standard": lambda pair: partial(TokenLevel, TokenMap(pair)),
    "union": lambda pair: partial(TokenLevel, TokenMap(pair, beyond=True)),
    "tli": lambda pair: partial(TokenLevel, TokenMap(pair)),
    "slem": lambda pair: partial(StringMatch, Bridge(pair)),
    "slrs": lambda pair: partial(StringRejection, bridge := Bridge(pair), rule_of(bridge)),
}
"""Algorithm → what makes a new sequence's translation, once the pair is known."""

GUESSING = ("slem",)
"""Algorithms that guess: their drafts carry no distributions, even where the target samples."""


@dataclass(frozen=True, repr=False)
class DraftModel(Drafter):
    """Drafts of up to `tokens` tokens by `model`: a hub id, a folder, or a live model.

    `algorithm="auto"` compares what the ids of both tokenizers write. `tokenizer` is the drafter's
    own, for live models and folders without one; `dtype` (the checkpoint's) and `device` (the
    target's) are for models that are loaded here.
    """

    model: Any
    tokens: int = 5
    confidence: float = 0.4
    """Drafting stops after a token less probable than this, which stays in the draft."""
    algorithm: Algorithm = "auto"
    reproducible: bool = False
    """Draw target and draft with the same noise per position: the output no longer depends on the
    drafter, only on the seed."""
    psi: Literal["path", "enumerate"] = "path"
    """How `slrs` knows the distribution of its proposals: a walk over bytes, or by the paper's
    rule."""
    copies: bool = True
    """Let the drafter read in one pass what it is expected to copy; its drafts are the same."""
    tokenizer: Any = None
    dtype: Any = None
    device: Any = None

    name: ClassVar[str] = "draft_model"
    summary: ClassVar[str] = "a small language model drafts, whatever its vocabulary"

    def __post_init__(self) -> None:
        at_least(self, "tokens", 1)
        one_of(self, "algorithm", ("auto", *ALGORITHMS))
        one_of(self, "psi", ("path", "enumerate"))
        switches(self)
        within(self, "confidence", 0, 1, "(0 drafts all tokens)")

    @property
    def sampled(self) -> bool:  # type: ignore[override]
        """Whether its drafts carry distributions where the target samples."""
        return not self.reproducible and self.algorithm not in GUESSING

    @property
    def shares_noise(self) -> bool:  # type: ignore[override]
        """Whether the target shall draw with noise that this drafter can foresee."""
        return self.reproducible

    def preferred_width(self) -> int:
        return self.tokens

    def bind(self, model: ModelFacts) -> Drafter:
        """Load the drafter model, compare vocabularies, choose the algorithm.

        Raises LoadError, OptionError or UnsupportedError where the two do not go together.
        """
        own = self.device is None and isinstance(self.model, str | Path)
        device = model.device if own else self.device
        loaded = load(self.model, self.tokenizer, self.dtype, device, prepack=True)
        _check(loaded, self.tokens)
        pair = self._pair(model, loaded)
        algorithm, why = self._choose(pair)
        return BoundDraftModel(
            self,
            Runner(loaded),
            ALGORITHMS[algorithm](pair),
            guesses=self.reproducible or algorithm in GUESSING,
            why=why,
            rewinds=loaded.capabilities.cache != "replay",
            row_bytes=loaded.row_bytes,
            copier=LongestMatch() if self.copies else None,
        )

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        raise UnsupportedError(
            f"{self} was not bound to a target, so it cannot draft; a host calls "
            "drafter.bind(facts) first, and recordings have no model to bind it to"
        )

    def __str__(self) -> str:
        shown = (f"{f.name}={_shown(getattr(self, f.name))}" for f in fields(self))
        return f"{self.name}({', '.join(shown)})"

    def _pair(self, model: ModelFacts, loaded: LoadedModel) -> Pair:
        target = drafter = None
        if model.tokenizer is not None and loaded.tokenizer is not None:
            target = Vocabulary.of(model.tokenizer, model.vocab_size)
            drafter = Vocabulary.of(loaded.tokenizer, loaded.vocab_size)
            shared = intersect(target, drafter)
        elif self.algorithm == "standard":
            ids = [(i, i) for i in range(min(model.vocab_size, loaded.vocab_size))]
            shared = Intersection.of(ids, model.vocab_size, loaded.vocab_size, same=True)
        else:
            whose, where = (
                ("the target", "when loading it")
                if model.tokenizer is None
                else (loaded.name, f"as an option of {self.name}")
            )
            raise UnsupportedError(
                f"{self.name}: {whose} has no tokenizer, so the two vocabularies cannot be "
                f"compared; give tokenizer=… {where}, or algorithm='standard' if you know that "
                "equal ids mean the same"
            )
        same = shared.same or drafter is None
        return Pair(
            shared,
            target,
            drafter,
            ends=_end_ids(loaded),
            begins=() if same else opening(loaded.tokenizer),
            tokens=self.tokens,
            confidence=self.confidence,
            reproducible=self.reproducible,
            source=self.name,
            psi=self.psi,
            context_length=loaded.context_length,
        )

    def _choose(self, pair: Pair) -> tuple[str, str]:
        """The algorithm, and the reason in a sentence; raises OptionError if it cannot work."""
        shared, name = pair.shared, _shown(self.model)
        if self.algorithm == "standard":
            if not shared.same:
                raise OptionError(
                    f"{self.name}: algorithm='standard' needs one vocabulary, but {name} shares "
                    f"{shared.size} tokens only; use 'tli' or 'auto'"
                )
            return "standard", ""
        if self.algorithm in ("tli", "union") and not shared.size:
            raise OptionError(
                f"{self.name}: algorithm={self.algorithm!r} needs tokens that both models have, "
                f"and {name} shares none; use 'slem'"
            )
        if self.algorithm != "auto":
            return self.algorithm, ""
        assert pair.target is not None  # else `_pair` has refused
        assert pair.drafter is not None
        # By the text that `draftsmith vocab` takes, too, so that both say the same.
        sample = "\n".join(builtin.demo())
        found, why = Comparison(Usage(pair.target, sample), Usage(pair.drafter, sample)).advice
        if found == "slrs" and self.reproducible:
            found, why = "slem", "its drafts can be reproducible, those of slrs cannot"
        return found, f"{self.name} uses {found} with {name}: {why}"


def _shown(value: Any) -> str:
    """A plain value as one types it; a live model or tokenizer by its class."""
    plain = isinstance(value, str | int | float | bool | Path | None)
    return repr(str(value) if isinstance(value, Path) else value) if plain else type(value).__name__


def _check(loaded: LoadedModel, tokens: int) -> None:
    abilities, context = loaded.capabilities, loaded.context_length
    if abilities.shape == "plain":
        reasons = "; ".join(abilities.reasons) or "its cache cannot be rewound"
        raise UnsupportedError(f"draft_model: {loaded.name} cannot draft: {reasons}")
    if context is not None and context <= tokens:
        raise OptionError(
            f"draft_model: tokens={tokens} cannot work: {loaded.name} has a context of {context}, "
            "which must hold some text as well"
        )


def _end_ids(loaded: LoadedModel) -> frozenset[int]:
    """Every id that some part of the model calls an end of text."""
    found: set[int] = set()
    for part in (loaded.generation_config, loaded.config, loaded.tokenizer):
        ids = getattr(part, "eos_token_id", None)
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return frozenset(found)
