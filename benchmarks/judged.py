"""Drafts of `auto`, and which of their nodes came true."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from draftsmith.core.draft import ROOT, Draft
from draftsmith.drafters.auto import Auto


class Recording(Auto):
    """`auto`, which keeps its drafts, each with the number of ids before it."""

    kept: ClassVar[list[tuple[int, Draft]]] = []

    def draft(self, states: Any, contexts: Any) -> list[Draft]:
        made = super().draft(states, contexts)
        self.kept.extend(zip((len(ctx.ids) for ctx in contexts), made, strict=True))
        return made


def judged(ids: Sequence[int], length: int, draft: Draft) -> Iterator[tuple[float, bool, int]]:
    """Yield probability, truth and depth of the nodes whose parents came true in `ids`.

    `length` ids were known when the draft was made.
    """
    true, depths, chances = {ROOT}, draft.node_depths(), draft.chances or ()
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        place = length + depths[node] - 1
        if parent in true and place < len(ids):
            true |= {node} if (right := ids[place] == token) else set()
            yield chances[node], right, depths[node]
