"""A small language model drafts, in its own vocabulary or in the target's.

Algorithms 1, 2, 3, 4 and 5 of "Accelerating LLM Inference with Lossless Speculative Decoding
Algorithms for Heterogeneous Vocabularies"; what they do not share is in `tli`, `slem` and `slrs`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor

from draftsmith import builtin
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.core.target import ModelFacts, Needs, Row, Target
from draftsmith.drafters.options import at_least, one_of
from draftsmith.drafters.slem import Bridge, StringMatch
from draftsmith.drafters.slrs import StringRejection, rule_of
from draftsmith.drafters.tli import TokenLevel, TokenMap
from draftsmith.drafters.translation import After, Pair, Translation
from draftsmith.errors import OptionError, UnsupportedError
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import REST, Runner
from draftsmith.text.comparison import Comparison, Usage
from draftsmith.text.vocab import Intersection, Vocabulary, intersect

Algorithm = Literal["auto", "standard", "union", "tli", "slem", "slrs"]


def _token_level(pair: Pair, *, beyond: bool = False) -> Callable[[], Translation]:
    maps = TokenMap(pair, beyond=beyond)
    return lambda: TokenLevel(maps)


def _string_match(pair: Pair) -> Callable[[], Translation]:
    bridge = Bridge(pair)
    return lambda: StringMatch(pair, bridge)


def _string_rejection(pair: Pair) -> Callable[[], Translation]:
    bridge = Bridge(pair)
    rule = rule_of(pair, bridge)
    return lambda: StringRejection(pair, bridge, rule)


ALGORITHMS: dict[str, Callable[[Pair], Callable[[], Translation]]] = {
    "standard": _token_level,
    "union": lambda pair: _token_level(pair, beyond=True),
    "tli": _token_level,
    "slem": _string_match,
    "slrs": _string_rejection,
}
"""Algorithm → what makes a new sequence's translation, once the pair is known."""

GUESSING = ("slem",)
"""Algorithms that guess: their drafts carry no laws, even where the target samples."""


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
    """How `slrs` knows the law of its proposals: a walk over bytes, or by the paper's rule."""
    tokenizer: Any = None
    dtype: Any = None
    device: Any = None

    name: ClassVar[str] = "draft_model"
    summary: ClassVar[str] = "a small language model drafts, whatever its vocabulary"

    def __post_init__(self) -> None:
        at_least(self, "tokens", 1)
        one_of(self, "algorithm", ("auto", *ALGORITHMS))
        one_of(self, "psi", ("path", "enumerate"))
        if type(self.confidence) not in (int, float) or not 0 <= self.confidence <= 1:
            raise OptionError(
                f"{self.name}: confidence={self.confidence!r} cannot work; give a probability "
                "from 0 (draft all tokens) to 1"
            )

    @property
    def sampled(self) -> bool:  # type: ignore[override]
        """Whether its drafts carry laws where the target samples."""
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
        loaded = self._load(model)
        _check(loaded, self.tokens)
        pair = self._pair(model, loaded)
        algorithm, why = self._choose(pair)
        return BoundDraftModel(
            self,
            Runner(loaded, rest=REST),  # what was accepted is read in the pass that drafts
            ALGORITHMS[algorithm](pair),
            guesses=self.reproducible or algorithm in GUESSING,
            why=why,
            context_length=loaded.context_length,
            rewinds=loaded.capabilities.cache != "replay",
        )

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        raise UnsupportedError(
            f"{self} was not bound to a target, so it cannot draft; a host calls "
            "drafter.bind(facts) first, and recordings have no model to bind it to"
        )

    def __str__(self) -> str:
        shown = (f"{f.name}={_shown(getattr(self, f.name))}" for f in fields(self))
        return f"{self.name}({', '.join(shown)})"

    def _load(self, model: ModelFacts) -> LoadedModel:
        source, device = self.model, self.device
        if isinstance(source, str | Path):
            source = builtin.resolve(str(source))
            device = model.device if device is None else device
        return load(source, self.tokenizer, self.dtype, device)

    def _pair(self, model: ModelFacts, loaded: LoadedModel) -> Pair:
        target = drafter = None
        if model.tokenizer is not None and loaded.tokenizer is not None:
            target = Vocabulary.of(model.tokenizer, model.vocab_size)
            drafter = Vocabulary.of(loaded.tokenizer, loaded.vocab_size)
            shared = intersect(target, drafter)
        elif self.algorithm == "standard":
            shared = _by_number(model.vocab_size, loaded.vocab_size)
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
            begins=() if same else _begins(loaded.tokenizer),
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


def _by_number(target: int, drafter: int) -> Intersection:
    """The maps of two vocabularies whose equal ids are said to mean the same."""
    size = min(target, drafter)
    to_target, to_drafter = torch.full((drafter,), -1), torch.full((target,), -1)
    to_target[:size] = to_drafter[:size] = torch.arange(size)
    return Intersection(to_target, to_drafter, size, same=True)


def _end_ids(loaded: LoadedModel) -> frozenset[int]:
    """Every id that some part of the model calls an end of text."""
    found: set[int] = set()
    for part in (loaded.generation_config, loaded.config, loaded.tokenizer):
        ids = getattr(part, "eos_token_id", None)
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return frozenset(found)


def _begins(tokenizer: Any) -> tuple[int, ...]:
    """The token that a tokenizer puts before every text, if it does."""
    first = tokenizer.bos_token_id
    return (first,) if first is not None and tokenizer("")["input_ids"][:1] == [first] else ()


@dataclass(frozen=True, eq=False, repr=False)
class BoundDraftModel(Drafter):
    """A draft model beside its target: the drafting loop over all sequences of a step.

    The loop is bare: one pass of the drafter per drafted token, for all sequences at once, and one
    copy to the host. A sequence's pass also carries what was accepted since its last one.
    """

    config: DraftModel
    runner: Target[Any]
    """The drafter model."""
    translate: Callable[[], Translation]
    """Makes the translation of a new sequence."""
    guesses: bool
    """Whether its drafts never carry laws."""
    why: str
    """Why it drafts by this algorithm; empty: because it was told to."""
    context_length: int | None = None
    """Tokens that the drafter model can read; None: any number."""
    rewinds: bool = True
    """Whether its cache can forget drafted tokens at no cost; else they are never committed."""
    lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    """Sequences share one cache, so they are drafted for in turns."""
    forgotten: list[Row] = field(init=False, default_factory=list)
    """Rows of sequences that nobody closed; given back before the next draft."""

    name: ClassVar[str] = DraftModel.name

    @property
    def sampled(self) -> bool:  # type: ignore[override]
        """Whether its drafts carry laws where the target samples."""
        return not self.guesses

    @property
    def shares_noise(self) -> bool:  # type: ignore[override]
        """Whether the target shall draw with noise that this drafter can foresee."""
        return self.config.shares_noise

    def preferred_width(self) -> int:
        return self.config.preferred_width()

    def needs_of(self, model: ModelFacts) -> Needs:  # noqa: ARG002
        """Nothing, but for a sentence about the choice of the algorithm."""
        return Needs(why=self.why)

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        return _Sequence(self)

    def draft(self, states: Sequence[DrafterState], contexts: Sequence[Context]) -> list[Draft]:
        sequences = cast("Sequence[_Sequence]", states)
        with self.lock, torch.inference_mode():
            while self.forgotten:
                self.runner.close(self.forgotten.pop())
            active = [s for s, ctx in zip(sequences, contexts, strict=True) if s.begin(ctx)]
            while active:
                active = self._draft_one(active)
            return [sequence.translation.draft() for sequence in sequences]

    def _draft_one(self, active: Sequence[_Sequence]) -> list[_Sequence]:
        """One more token for each of these sequences; those that draft on."""
        outputs = self.runner.forward([s.row for s in active], [s.ahead for s in active])
        picks = pick([s.translation for s in active], [o.logits[-1] for o in outputs])
        on = []
        for sequence, picked in zip(active, picks, strict=True):
            if picked is not None:
                sequence.feed(picked.token)
                if sequence.translation.take(*picked):
                    on.append(sequence)
        return on

    def __str__(self) -> str:
        return str(self.config)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return hash(self.config)


class Pick(NamedTuple):
    """A drafted token, the law (V_D,) it was drawn from if it was, and its probability."""

    token: int
    q: Tensor | None
    confidence: float


def pick(translations: Sequence[Translation], logits: Sequence[Tensor]) -> list[Pick | None]:
    """The next drafter token of each sequence, from logits (V_D,) each; None ends its draft.

    Where the target is greedy it is the arg-max, else a draw at the target's own temperature,
    top-k, top-p and min-p, which apply to masked logits.
    """
    picks: list[Pick | None] = [None] * len(logits)
    greedy: dict[int, Tensor] = {}
    for i, (translation, row) in enumerate(zip(translations, logits, strict=True)):
        scores = translation.scores(row)
        if scores is None:
            continue
        law = translation.law
        if law.greedy:
            greedy[i] = scores
            continue
        q = law.probs(law.scores(None, scores))
        token = translation.draw(q)
        if token is not None:
            picks[i] = Pick(token, q, float(q[token]))
    if greedy:
        stacked = torch.stack(list(greedy.values()))
        stacked = stacked if stacked.dtype == torch.float64 else stacked.float()
        best = stacked.max(-1)
        confidence = (best.values - stacked.logsumexp(-1)).exp()
        # One copy to the host for all sequences; a double holds every id.
        ids, sure = torch.stack((best.indices.double(), confidence.double())).tolist()
        for i, token, probability in zip(greedy, ids, sure, strict=True):
            picks[i] = Pick(int(token), None, probability)
    return picks


class _Sequence(DrafterState):
    """One sequence: its row in the drafter's cache, and its translation."""

    row: Row

    def __init__(self, drafter: BoundDraftModel) -> None:
        self.drafter = drafter
        self.translation = drafter.translate()
        self.ahead = EMPTY
        """Drafted tokens that a model which does not rewind reads again in every pass."""
        self._opened: weakref.finalize[..., _Sequence] | None = None

    def draft(self, ctx: Context) -> Draft:
        return self.drafter.draft([self], [ctx])[0]

    def begin(self, ctx: Context) -> bool:
        """Follow the text to its end; whether there is something to draft."""
        ids = self._window(self.translation.begin(ctx))
        self.ahead = EMPTY
        if not ids:
            return False
        runner = self.drafter.runner
        if self._opened is None:
            self.row = runner.open(ids)
            # Not closed at once: a pass over the shared cache may be under way.
            self._opened = weakref.finalize(self, self.drafter.forgotten.append, self.row)
        else:
            runner.extend(self.row, ids)
        runner.prefill(self.row)
        self.translation.after = After(runner, self.drafter.lock, self.row, tuple(ids))
        return True

    def _window(self, ids: Sequence[int]) -> Sequence[int]:
        """The end of a text that does not fit the drafter's context.

        It moves in quarters of the context, so that the cache serves most steps.
        """
        context = self.drafter.context_length
        over = 0 if context is None else len(ids) + self.translation.reach - context
        if over <= 0 or context is None:
            return ids
        stride = max(1, context // 4)
        return ids[min(-(-over // stride) * stride, len(ids) - 1) :]

    def feed(self, token: int) -> None:
        """Let a drafted token be the row's last."""
        if self.drafter.rewinds:
            self.drafter.runner.commit([self.row], [()], [[token]])
        else:
            self.ahead = Draft.chain([*self.ahead.tokens, token], self.drafter.name)

    def truncate(self, length: int) -> None:
        self.translation.truncate(length)

    def close(self) -> None:
        if self._opened is not None:
            self._opened()
            self._opened = None
