"""Candidates: the tokens that may come next, and what every context has to say about each.

What a context knows of a token is one of a few *cells*: how often the token came after it, of how
often it was seen; and where the token never did, how often and how variously it went on.
"""

from __future__ import annotations

from typing import NamedTuple

from draftsmith.drafters.mixture.compiled import Floats, Ints, floats, inner, ints
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
)

ASKED = 8
"""Followers of a context, the newest, that become candidates; so do a bank's latest two tokens and
its most frequent ones."""

PRESENT = 2 * 7 * 7
"""Cells of a follower: whether it is the newest, times it followed, times the context was seen (for
the context of no tokens: its age)."""
CELLS = PRESENT + 7 * 4
"""And of any other candidate: times the context was seen, by how many kinds followed it."""

MOST = 160
"""Candidates; two banks name at most 84, a row 8, a grammar 64."""
INPUTS = 16
"""Most inputs: one for every context of every bank, then the rows."""
TABLE = 256
"""Slots in which candidates are found by their token."""
LARGEST = 64
"""Nodes of a tree."""

ELSEWHERE = -2
"""Where a candidate was seen last that longer contexts of the second bank alone know."""
FORCED = -3
"""Where a candidate was seen that only the answer's grammar named."""
ID, ROW, ORIGIN, SLOT, CELL, CANDIDATE = 0, 1, 2, 3, 4, 4 + INPUTS
"""Fields of a candidate, and how many: token; what its weights are chosen by; where the first
bank's longest context saw it last, or -1; its slot; a cell for each input, -1: nothing known."""
LABEL, PARENT, DEPTH, SOURCE, FIELDS = range(5)
"""Fields of a node of the tree, and how many: token, parent or -1, depth from 1, where it was
copied from or -1."""

USED, BANKED, FOUND, ABSENT, SLOTS = 0, 1, 2, 2 + INPUTS, 2 + 2 * INPUTS
CANDIDATES = SLOTS + TABLE
TREE = CANDIDATES + MOST * CANDIDATE
WAITING = TREE + LARGEST * FIELDS
GROWN, WAITS, PAYING = (WAITING + LARGEST * FIELDS + i for i in range(3))
"""Where in `Work.ints` things begin: how many inputs there are, and how many of them, the first
ones, are contexts of banks; the node of each input's context, -1 where it is unknown, and the cell
of a candidate that is none of its followers; 1 + candidate by slot; candidates; the tree's nodes,
and those that wait to be such; how many there are of both, and how many nodes pay."""
ALONE, CHANCES, CHANCE, REACH, HOPE, RANK = 0, MOST, *(2 * MOST + i * LARGEST for i in range(4))
GAIN, HIGHEST = RANK + LARGEST, RANK + LARGEST + 1
"""Where in `Work.floats`: probabilities of candidates, each by itself and as one of all; of nodes
the probability of being right where the parent is, and of being accepted; both of those that wait;
what all nodes bring over what they cost, and the most that the first ones do."""


class Work(NamedTuple):
    """Room to work in."""

    ints: Ints
    floats: Floats
    rows: Ints
    """What the target's own logits said, see `rows`; empty where it gave none."""
    new: Ints
    """Rows that the last pass gave, to be kept when its tokens are read."""


def new_work(banks: int) -> Work:
    """Room for the contexts of so many banks, and the rows."""
    room = ints(PAYING + 1), floats([0.0] * (HIGHEST + 1))
    work = Work(*room, ints(0), ints(0))
    work.ints[BANKED], work.ints[USED] = banks * ORDERS, banks * ORDERS + 1
    return work


@inner
def size_class(n: int) -> int:
    """0; 1; 2; to 4; to 8; to 16; more."""
    # A sum, no branches: these could not be foretold, and what they wait for comes from far.
    return min(n, 2) + (n > 2) + (n > 4) + (n > 8) + (n > 16)


@inner
def age_class(n: int) -> int:
    """To 4, and so on fourfold to 4096; more."""
    return (n > 4) + (n > 16) + (n > 64) + (n > 256) + (n > 1024) + (n > 4096)


@inner
def absence(total: int, kinds: int) -> int:
    """The cell of a candidate that a context seen `total` times never saw."""
    variety = (kinds > 1) + (kinds > 2) + (kinds > 4)
    return PRESENT + size_class(total) * 4 + variety


@inner
def look_up(bank: Bank, first: int, text: Bank, end: int, work: Work) -> None:
    """Find the contexts that the first `end` ids of `text` end with.

    `first`: the first of the bank's inputs.
    """
    w = work.ints
    for i in range(first, first + ORDERS):
        w[FOUND + i] = w[ABSENT + i] = -1
    if bank.marks[LENGTH]:
        w[ABSENT + first] = absence(bank.marks[LENGTH], bank.marks[KNOWN])
    for order in range(1, ORDERS):
        if LENGTHS[order] > end:
            break
        node = find(bank, order, hash_of(text, order, end), text.ids, end)
        if node < 0:
            break
        at = node * NODE
        w[FOUND + first + order] = node
        w[ABSENT + first + order] = absence(bank.nodes[at + TOTAL], bank.nodes[at + KINDS])


@inner
def slot_of(work: Work, token: int) -> int:
    """Where the candidate is noted, or would be."""
    w, slot = work.ints, token % TABLE
    while w[SLOTS + slot] and w[CANDIDATES + (w[SLOTS + slot] - 1) * CANDIDATE + ID] != token:
        slot = (slot + 1) % TABLE
    return slot


@inner
def nominate(work: Work, count: int, token: int) -> int:
    """Make the token a candidate, unless it is one; how many there are now."""
    w, slot = work.ints, slot_of(work, token)
    if w[SLOTS + slot] or count == MOST:
        return count
    at = CANDIDATES + count * CANDIDATE
    w[at + ID], w[at + ROW], w[at + ORIGIN], w[at + SLOT] = token, 0, -1, slot
    for i in range(w[USED]):
        w[at + CELL + i] = w[ABSENT + i]
    w[SLOTS + slot] = count + 1
    return count + 1


@inner
def gather(bank: Bank, first: int, work: Work, count: int) -> int:
    """The bank's candidates join the `count` there are; how many there are now."""
    f, marks = bank.followers, bank.marks
    for order in range(ORDERS - 1, -2, -1):
        # Contexts, the longest first; then the latest two tokens; then the most frequent ones.
        entry, left = order, ASKED
        if order > 0:
            node = work.ints[FOUND + first + order]
            entry = bank.nodes[node * NODE + HEAD] if node >= 0 else -1
        elif order == 0:
            left = 2 if marks[BEFORE] >= 0 else 1 if marks[LATEST] >= 0 else 0
        else:
            left = marks[LISTED]
        for i in range(left):
            if order > 0:
                if entry < 0:
                    break
                token = f[entry * FOLLOWER + TOKEN]
                entry = f[entry * FOLLOWER + NEXT]
            else:
                token = marks[LATEST + i] if order == 0 else marks[FIRST + 2 * i]
            count = nominate(work, count, token)
    return count


@inner
def examine(bank: Bank, first: int, work: Work, count: int) -> None:
    """Say what each of the bank's contexts knows of each candidate, and where from."""
    f, w = bank.followers, work.ints
    for order in range(ORDERS):
        if not order:
            for at in range(CANDIDATES, CANDIDATES + count * CANDIDATE, CANDIDATE):
                w[at + ROW] *= ORDERS
                node = find(bank, order, w[at + ID] + 1, w, at + ID + 1)
                if node >= 0:
                    times, end = bank.nodes[node * NODE + TOTAL], bank.nodes[node * NODE + END]
                    age = age_class(bank.marks[LENGTH] - end + 1)
                    w[at + CELL + first] = size_class(times) * 7 + age
            continue
        node = w[FOUND + first + order]
        if node < 0:
            break
        seen = size_class(bank.nodes[node * NODE + TOTAL])
        entry = bank.nodes[node * NODE + HEAD]
        while entry >= 0:
            slot = slot_of(work, f[entry * FOLLOWER + TOKEN])
            if w[SLOTS + slot]:
                at = CANDIDATES + (w[SLOTS + slot] - 1) * CANDIDATE
                times = size_class(f[entry * FOLLOWER + COUNT])
                older = 0 if entry == bank.nodes[node * NODE + HEAD] else 7
                w[at + CELL + first + order] = (older + times) * 7 + seen
                w[at + ROW] += order - w[at + ROW] % ORDERS
                if not first:
                    w[at + ORIGIN] = f[entry * FOLLOWER + PLACE]
                elif w[at + ORIGIN] < 0:
                    w[at + ORIGIN] = ELSEWHERE
            entry = f[entry * FOLLOWER + NEXT]


@inner
def forget(work: Work, count: int) -> None:
    """Empty the slots for the next question."""
    for at in range(CANDIDATES, CANDIDATES + count * CANDIDATE, CANDIDATE):
        work.ints[SLOTS + work.ints[at + SLOT]] = 0
