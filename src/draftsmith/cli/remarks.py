"""What is said beside an answer, on stderr: that it has no drafts, was cut, loops, loses lines."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from draftsmith.cli.render import plural
from draftsmith.cli.report import note

if TYPE_CHECKING:
    from draftsmith.engine.engine import Engine
    from draftsmith.engine.result import GenerationResult

LOOP_TOKENS = 48
"""So many tokens at the end, the same passage again and again, are a loop."""
LOST_SHARE = 0.1
"""An edit that drops more of a file's lines than this is worth a look."""


def say_notices(engine: Engine) -> None:
    """Tell once if drafts are of no use with this model, and why."""
    if engine.model.capabilities.shape == "plain" and engine.drafter.preferred_width():
        why = "; ".join(engine.notices) or "it verifies one token per pass"
        note(f"note: this model decodes plainly, without drafts: {why}")


def say_end(engine: Engine, result: GenerationResult, before: str | None = None) -> None:
    """Tell if the answer was cut short, and if it lacks lines of the file that it is to edit."""
    tokens, room = len(result.tokens), engine.model.context_length
    if result.finish_reason == "length":
        passage = looping(result.tokens)
        if passage:
            note(
                f"note: the answer loops: its end repeats the same {plural(passage, 'token')}, and "
                f"was cut after {tokens}; try --repetition-penalty 1.1 or another model"
            )
        elif room is not None and len(result.prompt_tokens) + tokens >= room:
            note("note: cut because the model's context is full")
        else:
            note(f"note: cut after {plural(tokens, 'token')}; --max-new-tokens sets this")
    if before is not None and result.finish_reason != "cancelled":
        lost, had = lost_lines(before, result.text), len(before.splitlines())
        if lost > LOST_SHARE * had:
            note(f"note: {lost} of the file's {had} lines are gone; compare before you use it")


def looping(tokens: Sequence[int]) -> int:
    """The length of the passage that the end repeats, at least thrice; 0 if it does not."""
    for passage in range(1, len(tokens) // 3 + 1):
        tail = tokens[-max(LOOP_TOKENS, 3 * passage) :]
        if len(tail) >= LOOP_TOKENS and tail[passage:] == tail[:-passage]:
            return passage
    return 0


def lost_lines(before: str, after: str) -> int:
    """Lines of a text that another one has nothing in place of."""
    compared = SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    spans = ((i2 - i1, j2 - j1) for _, i1, i2, j1, j2 in compared.get_opcodes())
    return sum(max(0, old - new) for old, new in spans)
