"""Thoughts: what a model writes before its answer, between two tags of its chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from draftsmith.core.sampling import only, without
from draftsmith.errors import OptionError
from draftsmith.text.tokenizer import StreamDecoder, decode, encode, overlap
from draftsmith.text.vocab import Vocabulary
from draftsmith.values import number

TAIL = 32
"""Ids at a prompt's end that may hold the tag which begins the thoughts."""


@dataclass(frozen=True)
class Thoughts:
    """The tags around a model's thoughts, and how many tokens it may think.

    Raises OptionError for a `limit` that is no integer >= 0.
    """

    begin: str
    """The tag before the thoughts; "" where every answer begins with them."""
    end: str
    """The tag after them. What comes next is the answer, which a grammar shapes."""
    closing: str
    """Text that ends them at the limit; it contains `end`."""
    limit: int | None = None
    """Most tokens of the thoughts; None: no limit of their own."""
    begun: bool | None = None
    """Whether the prompt has begun them (False: ended them); None: as the tag at its end says."""

    def __post_init__(self) -> None:
        if self.limit is not None:
            object.__setattr__(self, "limit", number("limit", self.limit, int, least=0))

    @classmethod
    def of(cls, tokenizer: Any) -> Thoughts | None:
        """Return what a chat template shows of the model's thoughts; None: it has none."""
        template = str(getattr(tokenizer, "chat_template", None) or "")
        found = (tags for taught, tags in _TAUGHT.items() if re.search(taught, template))
        return next(found, None)

    def after(self, said: str) -> Thoughts:
        """Return the tags for the rest of an answer that has begun with `said`."""
        if self.begun is not None or not said.strip():
            return self
        thinks = bool(self.begin) and said.rfind(self.begin) > said.rfind(self.end)
        return replace(self, begun=thinks)

    def opened(self, tokenizer: Any, ids: Sequence[int]) -> bool | None:
        """Return whether an answer to the prompt `ids` begins in the midst of thoughts.

        False: they are over. None: the model may begin them.
        """
        if self.begun is not None:
            return self.begun
        text = decode(tokenizer, ids[-TAIL:], special=True).rstrip()
        return True if text.endswith(self.begin) else False if text.endswith(self.end) else None


_FINAL = "<|channel|>final<|message|>"
_TAUGHT = {
    r"<\|channel\|>analysis": Thoughts("", _FINAL, f"<|end|><|start|>assistant{_FINAL}"),
    r"\[/THINK\]": Thoughts("[THINK]", "[/THINK]", "[/THINK]"),
    r"</seed:think>": Thoughts("<seed:think>", "</seed:think>", "</seed:think>"),
    r"<\|channel>thought": Thoughts("<|channel>thought", "<channel|>", "<channel|>"),
    r"</think>": Thoughts("<think>", "</think>", "</think>"),
}
"""What a chat template holds (gpt-oss, Magistral, Seed-OSS, Gemma 4, all others) → the tags."""


class ThinkingState:
    """Progress of one sequence's reasoning; a processor that ends it at the limit."""

    def __init__(
        self,
        thoughts: Thoughts,
        tokenizer: Any,
        ids: Sequence[int],
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """`ids`: the prompt. `vocabulary`: given where a grammar shapes the answer.

        Thoughts then begin with the first token, if at all, and no token ends them and goes on.
        """
        begin = encode(tokenizer, thoughts.begin)
        self.begin = begin[0] if len(begin) == 1 else None
        """The token that begins the thoughts; None if it takes several."""
        opened = thoughts.opened(tokenizer, ids)
        self.thinks = opened is True
        self.read = len(ids)
        """Ids of the sequence that were followed."""
        self._thoughts, self._vocabulary = thoughts, vocabulary
        self._decoder = StreamDecoder(tokenizer, special=True)
        self._text = ""
        """The end of what was written."""
        self._count = 0
        never = opened is False or (
            opened is None and vocabulary is not None and self.begin is None
        )
        self._answer = len(ids) if never else None
        self._closing = encode(tokenizer, thoughts.closing)
        if thoughts.end not in decode(tokenizer, self._closing, special=True):
            raise OptionError(
                f"this tokenizer cannot write {thoughts.end!r}, which ends thoughts; leave out "
                "their limit and the grammar"
            )
        self._written: int | None = None
        """Tokens of `closing` emitted since the limit was reached; None before."""
        self._past: dict[str, list[int]] = {}

    def follow(self, new: Sequence[int]) -> int | None:
        """Read ids that follow those `read`; return where in the sequence the answer begins.

        None: the thoughts go on, or may still begin.
        """
        for token in new:
            self.read += 1
            if self._answer is None:
                self._text += self._decoder.push(token)
                self._take()
        return self._answer

    def _take(self) -> None:
        begin, end = self._thoughts.begin, self._thoughts.end
        if self.thinks:
            self._count += 1
            self._written = None if self._written is None else self._written + 1
        else:
            text = self._text.lstrip()
            if not text.startswith(begin):
                if self._vocabulary is not None or not begin.startswith(text):
                    self._answer = self.read - 1
                return
            self.thinks, self._text = True, text[len(begin) :]
        if end in self._text:
            self._answer = self.read
        self._text = self._text[-len(end) :]

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """(1, V) the scores; at the limit only the next token of `closing` is possible."""
        if self.follow(ids[0, self.read :].tolist()) is not None or not self.thinks:
            return scores
        limit = self._thoughts.limit
        if limit is None or self._count < limit:
            return without(scores, self._going_past())
        self._written = self._written or 0
        return only(scores, self._closing[self._written % len(self._closing)])

    def _going_past(self) -> list[int]:
        """Return the tokens that would end the thoughts and begin the answer at once."""
        end = self._thoughts.end
        rest = end[overlap(self._text, end) :]
        if rest == end or self._vocabulary is None:
            return []
        if rest not in self._past:
            last = rest.encode()
            self._past[rest] = [
                i for i, data in enumerate(self._vocabulary.tokens)
                if data and data.startswith(last) and data[len(last) :].strip()
            ]  # fmt: skip
        return self._past[rest]
