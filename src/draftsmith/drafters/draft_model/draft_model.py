"""draft_model: a small language model drafts, with the target's vocabulary or its own.

Algorithms 1 to 5 of "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies". What differs between them is in `tli`, `slem` and `slrs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

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
from draftsmith.text.comparison import Comparison, Usage
from draftsmith.text.tokenizer import opening
from draftsmith.text.vocab import Intersection, Vocabulary, intersect

if TYPE_CHECKING:
    from draftsmith.model.loaded import LoadedModel
    from draftsmith.model.runner import Runner

Algorithm = Literal["auto", "standard", "union", "tli", "slem", "slrs"]


ALGORITHMS: dict[str, Callable[[Pair], Callable[[], Translation]]] = {
    "standard": lambda pair: partial(TokenLevel, TokenMap(pair)),
    "union": lambda pair: partial(TokenLevel, TokenMap(pair, beyond=True)),
    "tli": lambda pair: partial(TokenLevel, TokenMap(pair)),
    "slem": lambda pair: partial(StringMatch, Bridge(pair)),
    "slrs": lambda pair: partial(StringRejection, bridge := Bridge(pair), rule_of(bridge)),
}
"""Algorithm → function that creates a factory for translations of new sequences."""


@dataclass(frozen=True, repr=False)
class DraftModel(Drafter):
    """Draft up to `tokens` tokens with `model`: a hub id, a folder, or a transformers model.

    `algorithm="auto"` compares the bytes that the ids of both tokenizers write. `tokenizer` is the
    draft model's own, for loaded models and folders without one. `dtype` (default: the
    checkpoint's) and `device` (default: the target's) apply to models that are loaded here.
    """

    model: Any
    tokens: int = 5
    confidence: float = 0.4
    """Drafting stops after a token with a smaller probability; that token stays in the draft."""
    algorithm: Algorithm = "auto"
    reproducible: bool = False
    """Draw target and draft with the same noise per position, so that the output depends on the
    seed only, not on the drafter."""
    psi: Literal["path", "enumerate"] = "path"
    """Distribution of the proposals of `slrs`: of a walk over bytes, or the paper's enumeration."""
    copies: bool = True
    """Let the draft model read tokens that it probably copies in one pass; drafts stay the same."""
    tokenizer: Any = None
    dtype: Any = None
    device: Any = None

    name: ClassVar[str] = "draft_model"
    summary: ClassVar[str] = "a small language model drafts, whatever its vocabulary"

    def __post_init__(self) -> None:
        at_least(self, 1, "tokens")
        one_of(self, "algorithm", ("auto", *ALGORITHMS))
        one_of(self, "psi", ("path", "enumerate"))
        switches(self)
        within(self, "confidence", 0, 1, "(0 drafts all tokens)")

    @property
    def sampled(self) -> bool:  # type: ignore[override]
        """Whether its drafts contain samples if the target samples. Those of slem are guesses."""
        return not self.reproducible and self.algorithm != "slem"

    @property
    def shares_noise(self) -> bool:  # type: ignore[override]
        """Whether the target should draw with noise that this drafter can predict."""
        return self.reproducible

    def preferred_width(self) -> int:
        return self.tokens

    def bind(self, model: ModelFacts) -> Drafter:
        """Load the draft model, compare the vocabularies, choose the algorithm.

        Raises LoadError, OptionError or UnsupportedError if the models do not fit together.
        """
        from draftsmith.model.load import load
        from draftsmith.model.runner import Runner

        unplaced = self.device is None and isinstance(self.model, str | Path)
        device = model.device if unplaced else self.device
        loaded = load(self.model, self.tokenizer, self.dtype, device, prepack=True)
        _check(loaded, self.tokens)
        pair = self._pair(model, loaded)
        algorithm, why = self._choose(pair)
        try:
            translate = ALGORITHMS[algorithm](pair)
        except (OptionError, UnsupportedError) as error:
            if self.algorithm != "auto" or algorithm == "slem":
                raise
            algorithm, translate = "slem", ALGORITHMS["slem"](pair)
            why = f"{self.name} uses slem with {_shown(self.model)}: {error}"
        copier, runner = LongestMatch() if self.copies else None, Runner(loaded)
        return BoundDraftModel(
            self,
            runner,
            translate,
            guesses=self.reproducible or algorithm == "slem",
            why=why,
            rewinds=loaded.capabilities.cache != "replay",
            state_bytes=partial(_state_bytes, runner, copier, _finer(pair)),
            copier=copier,
            target=model,
        )

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        raise UnsupportedError(
            f"{self} was not bound to a target: call drafter.bind(facts) before open(); it cannot "
            "be used with recordings, which have no model"
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
            owner, where = (
                ("the target", "when loading it")
                if model.tokenizer is None
                else (loaded.name, f"as an option of {self.name}")
            )
            raise UnsupportedError(
                f"{self.name}: {owner} has no tokenizer, so the two vocabularies cannot be "
                f"compared; pass tokenizer=… {where}, or set algorithm='standard' if equal ids "
                "mean the same token"
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
        """Return the algorithm and the reason for it; raise OptionError if it cannot be used."""
        shared, name = pair.shared, _shown(self.model)
        if self.algorithm == "standard":
            if not shared.same:
                raise OptionError(
                    f"{self.name}: algorithm='standard' needs one vocabulary, but {name} shares "
                    f"only {shared.size} tokens; use 'tli' or 'auto'"
                )
            return "standard", ""
        if self.algorithm in ("tli", "union") and not shared.size:
            raise OptionError(
                f"{self.name}: algorithm={self.algorithm!r} needs tokens that both models have, "
                f"and {name} shares none; use 'slem'"
            )
        if self.algorithm != "auto":
            return self.algorithm, ""
        assert pair.target is not None  # `_pair` has raised an error for None
        assert pair.drafter is not None
        # The text of `draftsmith vocab`, so that both give the same advice.
        sample = "\n".join(builtin.demo())
        found, why = Comparison(Usage(pair.target, sample), Usage(pair.drafter, sample)).advice
        if found == "slrs" and self.reproducible:
            found, why = "slem", "its drafts can be reproducible, those of slrs cannot"
        return found, f"{self.name} uses {found} with {name}: {why}"


def _shown(value: Any) -> str:
    """Return the `repr` of a plain value, the class name of a model or tokenizer."""
    plain = isinstance(value, str | int | float | bool | Path | None)
    return repr(str(value) if isinstance(value, Path) else value) if plain else type(value).__name__


def _check(loaded: LoadedModel, tokens: int) -> None:
    abilities, context = loaded.capabilities, loaded.context_length
    if abilities.shape == "plain":
        reasons = "; ".join(abilities.reasons) or "its cache cannot be rewound"
        raise UnsupportedError(f"draft_model: {loaded.name} cannot draft: {reasons}")
    if context is not None and context <= tokens:
        raise OptionError(
            f"draft_model: tokens must be < {context}, the context of {loaded.name}, which must "
            f"hold some text as well, got {tokens}"
        )


def _finer(pair: Pair) -> float:
    """Return the draft model's tokens for each token of the target, in a sample text."""
    if pair.shared.same or pair.target is None or pair.drafter is None:
        return 1.0
    sample = "\n".join(builtin.demo())
    target, drafter = (Usage(vocabulary, sample) for vocabulary in (pair.target, pair.drafter))
    return len(drafter.ids) / max(1, len(target.ids))


def _state_bytes(runner: Runner, copier: Drafter | None, finer: float, positions: int) -> int:
    """Return the peak size of a row of the draft model, plus the copier's state."""
    own, context = math.ceil(finer * positions), runner.loaded.context_length
    row = runner.row_bytes(own if context is None else min(own, context))
    return runner.store.bytes_for([row], ()) + (0 if copier is None else copier.bytes_for(own))


def _end_ids(loaded: LoadedModel) -> frozenset[int]:
    """Return all end-of-sequence ids in the model's configurations and tokenizer."""
    found: set[int] = set()
    for part in (loaded.generation_config, loaded.config, loaded.tokenizer):
        ids = getattr(part, "eos_token_id", None)
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return frozenset(found)
