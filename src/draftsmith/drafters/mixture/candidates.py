"""Candidates: the tokens that may come next, and what every context has to say about each.

What a context knows of a token is one of a few *cells*: how often it came after the context, of how
often the context was seen; and where it never did, how often and how variously the context went on.
"""

from __future__ import annotations

from typing import NamedTuple

from draftsmith.drafters.mixture.compiled import Floats, Ints, compiled, floats, ints
from draftsmith.drafters.mixture.contexts import (
    BEFORE,
    COUNT,
    END,
    FIRST,
    FOLLOWER,
    HEAD,
    KINDS,
    KNOWN,
    LATEST,
    LENGTH,
    LENGTHS,
    LISTED,
    NEXT,
    NODE,
    ORDERS,
    PLACE,
    TOKEN,
    TOTAL,
    Bank,
    find,
    hash_of,
)  # fmt: skip

ASKED = 8
"""Followers of a context, the newest, that become candidates; so do a bank's latest two tokens and its
most frequent ones."""

PRESENT = 7 * 7
"""Cells of a follower: times seen after the context, by times the context was seen (or by age)."""
CELLS = PRESENT + 7 * 4
"""And of any other candidate: times the context was seen, by how many kinds followed it."""

MOST = 128
"""Candidates; two banks can name 84."""
TABLE = 256
"""Slots in which candidates are found by their token."""
ID, ROW, ORIGIN, SLOT, CELL = range(5)
"""Fields of a candidate: token; the place its weights are chosen by; where the first bank's longest
context saw it last, or -1; slot; from CELL on a cell for each input, -1 where nothing is known."""


class Work(NamedTuple):
    """Room for one question with `I` inputs: a context of a bank each."""

    nodes: Ints
    """(I,) the contexts' nodes; -1: unknown."""
    absent: Ints
    """(I,) cells of a candidate that is not among the followers; -1: unknown context."""
    candidates: Ints
    """(MOST * (CELL + I),)"""
    slots: Ints
    """(TABLE,) 1 + candidate, 0 where empty."""
    odds: Floats
    """(MOST,) logits."""
    chances: Floats
    """(MOST,) probabilities."""


def new_work(inputs: int) -> Work:
    """Room for questions with so many inputs."""
    room = ints(inputs), ints(inputs), ints(MOST * (CELL + inputs)), ints(TABLE)
    return Work(*room, floats([0.0] * MOST), floats([0.0] * MOST))


@compiled
def size_class(n: int) -> int:
    """0; 1; 2; to 4; to 8; to 16; more."""
    if n <= 2:
        return n
    return 3 if n <= 4 else 4 if n <= 8 else 5 if n <= 16 else 6


@compiled
def age_class(n: int) -> int:
    """To 4, and so on fourfold to 4096; more."""
    if n <= 64:
        return 0 if n <= 4 else 1 if n <= 16 else 2
    return 3 if n <= 256 else 4 if n <= 1024 else 5 if n <= 4096 else 6


@compiled
def absence(total: int, kinds: int) -> int:
    """The cell of a candidate that a context seen `total` times never saw."""
    variety = 0 if kinds <= 1 else 1 if kinds == 2 else 2 if kinds <= 4 else 3
    return PRESENT + size_class(total) * 4 + variety


@compiled
def look_up(bank: Bank, first: int, text: Bank, end: int, work: Work) -> None:
    """Find the contexts that the first `end` ids of `text` end with.

    `first`: the first of the bank's inputs.
    """
    for i in range(first, first + ORDERS):
        work.nodes[i] = work.absent[i] = -1
    if bank.marks[LENGTH]:
        work.absent[first] = absence(bank.marks[LENGTH], bank.marks[KNOWN])
    for order in range(1, ORDERS):
        if LENGTHS[order] > end:
            break
        node = find(bank, order, hash_of(text, order, end), text.ids, end)
        if node < 0:
            break
        at = node * NODE
        work.nodes[first + order] = node
        work.absent[first + order] = absence(bank.nodes[at + TOTAL], bank.nodes[at + KINDS])


@compiled
def slot_of(work: Work, token: int) -> int:
    """Where the candidate is noted, or would be."""
    width = CELL + len(work.absent)
    slot = token % TABLE
    while work.slots[slot] and work.candidates[(work.slots[slot] - 1) * width + ID] != token:
        slot = (slot + 1) % TABLE
    return slot


@compiled
def nominate(work: Work, count: int, token: int) -> int:
    """Make the token a candidate, unless it is one; how many there are now."""
    slot = slot_of(work, token)
    if work.slots[slot] or count == MOST:
        return count
    c, inputs = work.candidates, len(work.absent)
    at = count * (CELL + inputs)
    c[at + ID], c[at + ROW], c[at + ORIGIN], c[at + SLOT] = token, 0, -1, slot
    for i in range(inputs):
        c[at + CELL + i] = work.absent[i]
    work.slots[slot] = count + 1
    return count + 1


@compiled
def gather(bank: Bank, first: int, work: Work, count: int) -> int:
    """The bank's candidates join the `count` there are; how many there are now."""
    f, marks = bank.followers, bank.marks
    for order in range(ORDERS - 1, 0, -1):
        node = work.nodes[first + order]
        if node >= 0:
            entry = bank.nodes[node * NODE + HEAD]
            for _ in range(ASKED):
                if entry < 0:
                    break
                count = nominate(work, count, f[entry * FOLLOWER + TOKEN])
                entry = f[entry * FOLLOWER + NEXT]
    for i in (LATEST, BEFORE):
        if marks[i] >= 0:
            count = nominate(work, count, marks[i])
    for i in range(marks[LISTED]):
        count = nominate(work, count, marks[FIRST + 2 * i])
    return count


@compiled
def examine(bank: Bank, first: int, origins: bool, work: Work, count: int) -> None:
    """Say what each of the bank's contexts knows of each candidate; with `origins`, where from."""
    f, c, width = bank.followers, work.candidates, CELL + len(work.absent)
    for at in range(0, count * width, width):
        c[at + ROW] *= ORDERS
        node = find(bank, 0, c[at + ID] + 1, c, at + ID + 1)
        if node >= 0:
            times, end = bank.nodes[node * NODE + TOTAL], bank.nodes[node * NODE + END]
            c[at + CELL + first] = size_class(times) * 7 + age_class(bank.marks[LENGTH] - end + 1)
    for order in range(1, ORDERS):
        node = work.nodes[first + order]
        if node < 0:
            break
        seen = size_class(bank.nodes[node * NODE + TOTAL])
        entry = bank.nodes[node * NODE + HEAD]
        while entry >= 0:
            slot = slot_of(work, f[entry * FOLLOWER + TOKEN])
            if work.slots[slot]:
                at = (work.slots[slot] - 1) * width
                c[at + CELL + first + order] = size_class(f[entry * FOLLOWER + COUNT]) * 7 + seen
                c[at + ROW] += order - c[at + ROW] % ORDERS
                if origins:
                    c[at + ORIGIN] = f[entry * FOLLOWER + PLACE]
            entry = f[entry * FOLLOWER + NEXT]


@compiled
def forget(work: Work, count: int) -> None:
    """Empty the table for the next question."""
    width = CELL + len(work.absent)
    for at in range(0, count * width, width):
        work.slots[work.candidates[at + SLOT]] = 0
