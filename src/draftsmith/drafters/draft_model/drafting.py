"""The drafting loop: a model drafts a few tokens for each sequence of a step.

Everything that depends on the algorithm is in a `Translation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.core.target import MOST_BESIDE_DRAFT, ModelFacts, Needs, RowOutput
from draftsmith.drafters.draft_model.reading_ahead import ReadAhead
from draftsmith.drafters.draft_model.translation import After, Translation
from draftsmith.drafters.own_model import OwnModel, OwnRow


@dataclass(frozen=True, eq=False, repr=False)
class BoundDraftModel(OwnModel):
    """A draft model bound to a target; runs the drafting loop for all sequences of a step.

    A pass for a sequence also reads the tokens that were accepted since its last pass.
    """

    translate: Callable[[], Translation]
    """Creates the translation of a new sequence."""
    guesses: bool
    """Whether its drafts never contain samples."""
    why: str
    """Reason for its algorithm; empty if the user chose it."""
    rewinds: bool = True
    """Whether its cache can drop drafted tokens at no cost; else they are never committed."""
    state_bytes: Callable[[int], int] = lambda _positions: 0
    """Number of target tokens → bytes that the draft model and the copier keep for them."""
    copier: Drafter | None = None
    """Predicts the tokens of the draft model, to read several per pass; None: not used."""

    @property
    def sampled(self) -> bool:  # type: ignore[override]
        """Whether its drafts contain samples if the target samples."""
        return not self.guesses

    @property
    def shares_noise(self) -> bool:  # type: ignore[override]
        """Whether the target should draw with noise that this drafter can predict."""
        return self.config.shares_noise

    def needs_of(self, model: ModelFacts) -> Needs:  # noqa: ARG002
        """Return needs without recordings, with the reason for the algorithm."""
        return Needs(why=self.why)

    def bytes_for(self, positions: int) -> int:
        return self.state_bytes(positions)

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        return _Sequence(self)

    def draft(self, states: Sequence[DrafterState], contexts: Sequence[Context]) -> list[Draft]:
        sequences = cast("Sequence[_Sequence]", states)
        with self.lock, torch.inference_mode():
            self.close_ended()
            active = [s for s, ctx in zip(sequences, contexts, strict=True) if s.begin(ctx)]
            while active:
                active = self._draft_on(active)
            return [sequence.translation.draft() for sequence in sequences]

    def _draft_on(self, active: Sequence[_Sequence]) -> list[_Sequence]:
        """Run one pass and draft its tokens; return the sequences that continue drafting."""
        outputs = self.runner.forward([s.row for s in active], [s.nodes() for s in active])
        reading = list(zip(active, outputs, strict=True))
        while reading:
            picks = pick([s for s, _ in reading], [o.logits[s.at] for s, o in reading])
            reading = [r for r, picked in zip(reading, picks, strict=True) if r[0].write(picked)]
        for sequence, output in zip(active, outputs, strict=True):
            sequence.commit(output)
        return [sequence for sequence in active if sequence.drafting]


Pick = tuple[int, Tensor | None, float]
"""A drafted token, the distribution (V_D,) it was drawn from or None, and its probability."""


def pick(sequences: Sequence[_Sequence], logits: Sequence[Tensor]) -> list[Pick | None]:
    """Return the next draft token of each sequence from logits (V_D,); None ends its draft.

    For a greedy target it is the arg-max, else a draw with the target's temperature, top-k, top-p
    and min-p, which are applied to masked logits.
    """
    picks: list[Pick | None] = [None] * len(logits)
    greedy: dict[int, Tensor] = {}
    for i, (sequence, row) in enumerate(zip(sequences, logits, strict=True)):
        translation = sequence.translation
        scores = translation.scores(row)
        distribution = translation.distribution
        if distribution.greedy:
            greedy[i] = scores
            continue
        q = distribution.probs(distribution.scores(None, scores))
        # After a draw, an error would drop it depending on what it was: a wrong distribution.
        lost = sequence.begun and not bool(q.isfinite().all())
        token = None if lost else translation.draw(q)
        if token is not None:
            picks[i] = token, q, float(q[token])
    if greedy:
        rows = [scores[None] for scores in greedy.values()]
        found = best(rows[0] if len(rows) == 1 else torch.cat(rows))
        for i, (token, probability) in zip(greedy, found, strict=True):
            if not math.isnan(probability):
                picks[i] = token, None, probability
            elif not sequences[i].begun:
                raise FloatingPointError("the draft model's logits are not finite")
    return picks


def best(scores: Tensor) -> list[tuple[int, float]]:
    """Return the arg-max and its probability for each row (N, V), with one copy to the host.

    The probability is NaN after an overflow.
    """
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if scores.device.type == "cpu":  # NumPy takes half the time there
        rows = scores.numpy()
        top = rows.argmax(-1)
        with np.errstate(invalid="ignore"):
            sums = np.exp(rows - rows[range(len(rows)), top, None]).sum(-1)
        return list(zip(top.tolist(), (1 / sums).tolist(), strict=True))
    found = scores.max(-1)
    confidence = (found.values - scores.logsumexp(-1)).exp()
    # In one integer tensor: float64, which could hold every id, is missing on some devices.
    bits = confidence.float().view(torch.int32)
    ids, sure = torch.stack((found.indices.int(), bits)).cpu()
    return list(zip(ids.tolist(), sure.view(torch.float32).tolist(), strict=True))


class _Sequence(OwnRow, DrafterState):
    """Drafting state of one sequence: its row in the draft model's cache, and its translation."""

    drafter: BoundDraftModel

    def __init__(self, drafter: BoundDraftModel) -> None:
        super().__init__(drafter)
        self.translation = drafter.translate()
        self.reading: ReadAhead | None = None
        self.ahead = EMPTY
        """Drafted tokens that a model without rewinding reads again in every pass."""
        self.guess = EMPTY
        """Guesses that the current pass reads after its pending tokens."""
        self.written: list[int] = []
        """Tokens drafted from the current pass."""
        self.drafted = 0
        """Tokens drafted since `begin`, without those of the current pass."""
        self.drafting = False
        """Whether the draft continues."""

    def draft(self, ctx: Context) -> Draft:
        return self.drafter.draft([self], [ctx])[0]

    def begin(self, ctx: Context) -> bool:
        """Read the text up to its end; return whether there is something to draft."""
        read = self._window(self.translation.begin(ctx))
        ids = read if isinstance(read, list) else list(read)
        self.ahead, self.drafted = EMPTY, 0
        if not ids:
            return False
        runner, copier = self.drafter.runner, self.drafter.copier
        if self.reading is not None:
            self.reading.follow(ids)
        elif copier is not None:
            self.reading = ReadAhead(copier, runner.vocab_size, ids)
        self.follow(ids)
        # The first drafting pass reads the last accepted tokens.
        runner.prefill(self.row, MOST_BESIDE_DRAFT)
        self.translation.after = After(self.drafter, self.row, ids, len(ids))
        return True

    def _window(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the end of a text that exceeds the draft model's context.

        Its start moves in quarters of the context, so that the cache can be reused in most steps.
        """
        context = self.translation.pair.context_length
        over = 0 if context is None else len(ids) + self.translation.reach - context
        if over <= 0 or context is None:
            return ids
        stride = max(1, context // 4)
        return ids[min(-(-over // stride) * stride, len(ids) - 1) :]

    def nodes(self) -> Draft:
        """Return what the next pass reads after the text."""
        self.guess, self.written = EMPTY, []
        if self.reading is not None:
            room = self.drafter.runner.room(self.row) - len(self.ahead)
            self.guess = self.reading.guess(min(room, self.translation.limit - self.drafted - 1))
        if not self.ahead.tokens:
            return self.guess
        return Draft.chain([*self.ahead.tokens, *self.guess.tokens], self.drafter.name)

    @property
    def begun(self) -> bool:
        """Whether the draft has a token."""
        return bool(self.drafted or self.written)

    @property
    def at(self) -> int:
        """Index of the logits row of the current pass that predicts the next token."""
        return len(self.ahead) + len(self.written)

    def write(self, picked: Pick | None) -> bool:
        """Draft a token (None ends the draft); return whether the current pass has the next one."""
        self.drafting = False
        if picked is None:
            return False
        expected = self.guess.tokens[len(self.written) :][:1]
        self.written.append(picked[0])
        self.drafting = self.translation.take(*picked)
        return self.drafting and expected == picked[:1]

    def commit(self, output: RowOutput) -> None:
        """Commit the tokens that were drafted from the pass of `output`."""
        tokens = self.written
        if not tokens:
            return
        self.drafted += len(tokens)
        if self.reading is not None:
            self.reading.learn(self.guess, tokens, output)
        if self.drafter.rewinds:
            # All tokens but the last one were guessed, so they are nodes of the pass.
            self.drafter.runner.commit([self.row], [range(len(tokens) - 1)], [tokens])
        else:
            self.ahead = Draft.chain([*self.ahead.tokens, *tokens], self.drafter.name)

    def truncate(self, length: int) -> None:
        self.translation.truncate(length)
