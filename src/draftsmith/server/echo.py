"""Echoed prompts (`echo`), with the log-probabilities of their tokens.

The engine scores a prompt by generating it as the answer to its first token: a processor forces
every token of the prompt, and a drafter drafts these tokens. So scoring shares passes with other
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context, Scripted
from draftsmith.core.sampling import Distribution, only
from draftsmith.engine.drafting import Drafting
from draftsmith.engine.engine import Engine
from draftsmith.engine.sequence import TextSequence
from draftsmith.server.alternatives import Logprob, logprob_of
from draftsmith.server.answers import Delta
from draftsmith.server.calls.source import TextPart
from draftsmith.text.tokenizer import StreamDecoder, decode, opening

WIDTH = 64
"""Maximum number of prompt tokens that are drafted for one pass."""


class Recital:
    """A processor that forces the tokens of a prompt and records their log-probabilities."""

    def __init__(self, ids: Sequence[int], top: int, logprobs: list[Logprob]) -> None:
        """`top`: number of alternatives for each token. Results are appended to `logprobs`."""
        self._ids, self._top, self._logprobs = ids, top, logprobs

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        token = self._ids[ids.shape[1]]
        self._logprobs.append(logprob_of(token, scores[0].log_softmax(-1), self._top))
        return only(scores, token)


def _rest(ctx: Context) -> Draft:
    """Draft the next tokens of the prompt, which is the prediction."""
    done = len(ctx.ids)
    return Draft.chain(ctx.prediction[done : done + min(ctx.budget, ctx.depth)], "prompt")


def echo_of(
    engine: Engine, prompt: Any, top: int | None, salt: str
) -> tuple[Delta, TextSequence | None]:
    """Return an echoed prompt, and the sequence that computes its log-probabilities.

    `top`: number of alternatives for each token; None: no log-probabilities. The first token has
    none. The sequence is None if there is nothing to compute. Raises PromptError.
    """
    ids, tokenizer = engine.prepare({"max_new_tokens": 0}).encode(prompt), engine.model.tokenizer
    # A prompt that is a text comes back with the special tokens that it names.
    named = isinstance(prompt, str)
    added = named and _added(tokenizer, prompt, ids)
    decoder, text, starts = StreamDecoder(tokenizer, special=named), "", [0] * added
    for token in ids[added:]:
        text += decoder.push(token)
        starts.append(decoder.start)
    text = prompt if named else text + decoder.unfinished
    starts = [min(start, len(text)) for start in starts]
    echo = Delta([TextPart(text)], offsets=starts)
    if top is None:
        return echo, None
    echo.logprobs.append(Logprob(ids[0], None))
    if len(ids) == 1:
        return echo, None
    options = {"max_new_tokens": len(ids) - 1, "prediction": ids, "cache_salt": salt}
    drafting = Drafting.of(engine.model, Scripted(_rest), WIDTH, engine.cost)
    sequence = replace(engine.prepare(options), drafting=drafting).sequence(ids[:1])
    recital = Recital(ids, top, echo.logprobs)
    sequence.distribution = Distribution((recital,), greedy=True)
    sequence.stop_rules = ()
    return echo, sequence


def _added(tokenizer: Any, prompt: str, ids: Sequence[int]) -> bool:
    """Return whether the tokenizer put a token before the text, which may name that token, too."""
    first = opening(tokenizer)
    if not first or ids[:1] != [*first]:
        return False
    return ids[1:2] == [*first] or not prompt.startswith(decode(tokenizer, first, special=True))
