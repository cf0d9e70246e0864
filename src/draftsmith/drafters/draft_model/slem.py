"""SLEM: the draft model continues the text in its own tokens; the target's tokenizer encodes it.

Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", algorithm 2, section 3.2. `docs/algorithms/slem.md` shows the algorithm
beside this file.
"""

from __future__ import annotations

import math
from bisect import bisect, bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context
from draftsmith.core.sampling import Distribution
from draftsmith.drafters.draft_model.translation import Mask, Pair, Translation
from draftsmith.text.alignment import boundaries
from draftsmith.text.vocab import Vocabulary, complete

LOOK_BEHIND = 16
"""Target tokens before the new ones that are tokenized again together with them."""


class Bridge:
    """Translation of text between the two vocabularies of a pair; shared by its sequences.

    Text is bytes, in runs between control tokens. A control token that both vocabularies have is
    mapped; other control tokens write nothing.
    """

    def __init__(self, pair: Pair) -> None:
        assert pair.target is not None  # bind() refuses
        assert pair.drafter is not None
        self.pair = pair
        self.target, self.drafter = pair.target, pair.drafter
        self._to_target: list[int] = pair.shared.to_target.tolist()
        self._to_drafter: list[int] = pair.shared.to_drafter.tolist()
        special = self.drafter.special
        mute = [not data and i not in special for i, data in enumerate(self.drafter.tokens)]
        self.mask = Mask(torch.tensor(mute, device="cpu"))
        """Forbids ids that write nothing and are not control tokens."""

    def target_text(self, token: int) -> bytes:
        """Return the bytes that a target id writes; for a shared control token, its name."""
        if self._to_drafter[token] >= 0 and token in self.target.special:
            return b"\0" + self.target.special[token].encode()
        return self.target.tokens[token] or b""

    def drafter_text(self, token: int) -> bytes:
        """Return the bytes that a drafter id writes; for a control token, its name."""
        if token in self.drafter.special:
            return b"\0" + self.drafter.special[token].encode()
        return self.drafter.tokens[token] or b""

    def to_drafter(self, ids: Sequence[int]) -> list[int]:
        """Return the drafter's ids for a text of target ids."""
        found: list[int] = []
        for part in _parts(self.target, ids):
            if isinstance(part, bytes):
                found += self.drafter.encode_known(part)
            elif self._to_drafter[part] >= 0:
                found.append(self._to_drafter[part])
        return found

    def to_target(
        self, before: Sequence[int], drafted: Sequence[int], seen: bytes | None = None
    ) -> list[int]:
        """Return the target's ids for the ids `drafted` after the committed ids `before`.

        `seen` is the end of the text as the drafter read it; None: as the target's ids write it. If
        the drafter's tokenizer drops a space at the end of a text, the draft begins with that
        space, and it is removed here.

        The result ends before the bytes of an unfinished character, before a control token that the
        target lacks, and before an id that its logits lack.
        """
        found: list[int] = []
        *_, last = (b"", *_parts(self.target, before))
        context = last if isinstance(last, bytes) else b""
        dropped = seen is not None and context[-1:].isspace() and not seen[-1:].isspace()
        for part in _parts(self.drafter, drafted):
            if isinstance(part, bytes):
                if dropped:
                    part = part.lstrip()
                text = complete(context + part)
                found += beyond(self.target, context, text[len(context) :])
            elif self._to_target[part] >= 0:
                found.append(self._to_target[part])
            else:
                break
            context, dropped = b"", False
        inside = (i < self.target.size for i in found)
        return found[: next((n for n, fits in enumerate(inside) if not fits), len(found))]


def beyond(vocabulary: Vocabulary, text: bytes, more: bytes) -> list[int]:
    """Return the ids of `more` as the tokenizer writes it after `text`.

    Both together are tokenized, and the tokens after `text` are returned. If a token spans the end
    of `text`, the rest of it is tokenized alone. If the tokenizer rewrites its input, its own
    output for `text` is compared. If that is not the beginning of its output for both, the longest
    overlap of the two tokenizations is used (section 3.2).
    """
    old, new = vocabulary.encode(text), vocabulary.encode(text + more)
    written, whole = vocabulary.bytes_of(old), vocabulary.bytes_of(new)
    if not whole.startswith(written):
        overlap = longest_overlap(old, new)
        return new[overlap:] if overlap else vocabulary.encode(more)
    stops = accumulate((len(vocabulary.bytes_of([i])) for i in new), initial=0)
    j, stop = next((j, stop) for j, stop in enumerate(stops) if stop >= len(written))
    return vocabulary.encode(whole[len(written) : stop]) + new[j:]


def longest_overlap(old: Sequence[int], new: Sequence[int]) -> int:
    """Return the last end in `new` of the longest part that `old` ends with; 0 if there is none."""
    for length in range(min(len(old), len(new)), 0, -1):
        for end in range(len(new), length - 1, -1):
            if new[end - length : end] == old[len(old) - length :]:
                return end
    return 0


def _parts(vocabulary: Vocabulary, ids: Sequence[int]) -> Iterator[bytes | int]:
    """Yield the bytes of ids between control tokens, and the ids of control tokens."""
    for special, part in groupby(ids, vocabulary.special.__contains__):
        if special:
            yield from part
        elif run := b"".join(vocabulary.tokens[i] or b"" for i in part):
            yield run


class StringMatch(Translation):
    """Drafting of one sequence string by string: algorithm 2.

    A draft is a guess, so the draft model is greedy, even if the target samples. It drafts as many
    of its own tokens as `tokens` target tokens correspond to in this text.
    """

    def __init__(self, bridge: Bridge) -> None:
        super().__init__(bridge.pair)
        self.bridge = bridge
        self.ids: list[int] = []
        """The drafter's ids of the text so far and of the last draft."""
        self.anchors: list[tuple[int, int]] = [(0, 0)]
        """(t, d), rising to the text's end: the first t target ids are the first d of `ids`."""
        self.limit = 0

    def begin(self, ctx: Context) -> Sequence[int]:
        ids = super().begin(ctx)
        self.distribution = Distribution((), greedy=True)
        return ids

    @property
    def reach(self) -> int:
        return self.limit

    def read(self, ctx: Context) -> Sequence[int]:
        tokens = min(self.pair.tokens, ctx.budget, ctx.depth)
        self.limit = 0
        if tokens <= 0:
            return ()
        self.follow(ctx.ids)
        self.start = len(self.ids)
        self.limit = math.ceil(tokens * len(self.ids) / len(ctx.ids))
        if self.pair.context_length is not None:
            self.limit = min(self.limit, self.pair.context_length // 2)
        begins = self.pair.begins
        return self.ids if tuple(self.ids[: len(begins)]) == begins else [*begins, *self.ids]

    def follow(self, ids: Sequence[int]) -> None:
        """Set `self.ids` to the text of the target's `ids`, with as few changes as possible.

        New text is tokenized together with some text before it. The old tokenization is kept up to
        the last place where both agree. It includes the last draft, so the draft model's cache can
        be reused for the accepted part.
        """
        bridge = self.bridge
        t, d = self._anchor()
        old, new = self.ids[d:], bridge.to_drafter(ids[t:])
        drafted = [bridge.drafter_text(i) for i in old]
        kept, same = boundaries(drafted, [bridge.drafter_text(i) for i in new])[-1]
        self.ids[d + kept :] = new[same:]
        target = [bridge.target_text(i) for i in ids[t:]]
        found = boundaries(target, [*drafted[:kept], *map(bridge.drafter_text, new[same:])])
        del self.anchors[bisect_left(self.anchors, (t, 0)) :]
        self.anchors += ((t + i, d + j) for i, j in found)
        if self.anchors[-1] != (len(ids), len(self.ids)):  # a tokenizer that rewrites its input
            self.anchors.append((len(ids), len(self.ids)))

    def _anchor(self) -> tuple[int, int]:
        """Return the anchor nearest to LOOK_BEHIND target tokens before the end of the text."""
        wanted = self.anchors[-1][0] - LOOK_BEHIND
        at = bisect(self.anchors, (wanted, 0), hi=len(self.anchors) - 1)
        near = self.anchors[max(0, at - 1) : at + 1]
        return min(near, key=lambda anchor: abs(anchor[0] - wanted))

    def scores(self, logits: Tensor) -> Tensor:
        return self.bridge.mask(logits)

    def take(self, token: int, q: Tensor | None, confidence: float) -> bool:
        del q
        self.ids.append(token)
        drafted = len(self.ids) - self.start
        return drafted < self.limit and not self.pair.ends_after(token, confidence)

    def draft(self) -> Draft:
        if not self.limit:
            return EMPTY
        return Draft.chain(self._tokens()[: self.context.budget], self.pair.source)

    def _tokens(self) -> list[int]:
        """Return the target's tokens of the draft."""
        before, last = self.context.ids[-LOOK_BEHIND:], self.ids[self.start - 1 : self.start]
        return self.bridge.to_target(
            before, self.ids[self.start :], self.bridge.drafter.bytes_of(last)
        )

    def truncate(self, length: int) -> None:
        while self.anchors[-1][0] > length:
            self.anchors.pop()
