"""Grow: the tree of drafts, best first, as far as its nodes pay."""

from __future__ import annotations

from typing import NamedTuple

from draftsmith.compiled import compiled, inner
from draftsmith.drafters.mixture.belief import Belief, guess, learn
from draftsmith.drafters.mixture.candidates import (
    CANDIDATE,
    CANDIDATES,
    CHANCE,
    CHANCES,
    DEPTH,
    FIELDS,
    HOPE,
    ID,
    LABEL,
    ORIGIN,
    PARENT,
    RANK,
    REACH,
    SOURCE,
    TREE,
    WAITING,
    Work,
)
from draftsmith.drafters.mixture.compiled import Floats, floats, no
from draftsmith.drafters.mixture.contexts import LENGTH, Bank, hash_on, index, rehash
from draftsmith.drafters.mixture.rows import remember

LEAST_SLOPE = 0.002
"""A node is never taken to cost less, in plain passes: growing costs time, too."""


class Wanted(NamedTuple):
    """What a draft may be, and what it is worth."""

    most: int
    """Nodes, at most LARGEST."""
    depth: int
    chain: bool
    """Whether only one branch can be verified."""
    widths: Floats
    costs: Floats
    """Of passes with so many nodes, rising from 0, in plain passes."""
    rate: float
    """Tokens that the time of a plain pass yields at present."""


NOTHING = Wanted(0, 0, False, floats((0.0, 1.0)), floats((1.0, 1.0)), 1.0)


@compiled
def advance(
    own: Bank, end: int, quiet: int, floor: int, told: int, earlier: Bank, belief: Belief,
    work: Work, rate: float, memory: float, weight: float, wanted: Wanted,
) -> int:  # fmt: skip
    """Read what is new of the bank's ids up to `end`, then draft; the number of nodes that pay.

    What lies before `quiet` is only context, contexts begin at `floor` or later, and from `told` on
    the target said the tokens, so they are learnt from: see `belief.learn`.
    """
    rehash(own)
    start = min(end, max(told, own.marks[LENGTH]))
    index(own, start, quiet, floor)
    for place in range(start, end):
        count = guess(own, earlier, belief, work, place)
        learn(belief, work, count, own.ids[place], rate, memory, weight)
        index(own, place + 1, quiet, floor)
    # Not before: the row that a token was said by would tell what is to be learnt.
    remember(work)
    return grow(own, floor, earlier, belief, work, wanted) if wanted.most else 0


@inner
def grow(own: Bank, floor: int, earlier: Bank, belief: Belief, work: Work, wanted: Wanted) -> int:
    """A tree behind the indexed ids; how many of its nodes pay.

    A node pays where it is accepted oftener than decoding would yield tokens in the time that it
    takes.
    """
    f, rate, widths, costs = work.floats, wanted.rate, wanted.widths, wanted.costs
    count = waiting = best = level = no(floor)
    gain = highest = 0.0
    reach, node = 1.0, -1 - level
    while True:
        here = cost(widths, costs, count)
        least = rate * slope(widths, costs, count, here)
        if level < wanted.depth:
            end = walk(own, work, node, level)
            found = guess(own, earlier, belief, work, end)
            room = 1 if wanted.chain else wanted.most - count
            waiting = queue(work, waiting, room, found, node, level, reach, least)
        if not waiting or count == wanted.most or f[RANK] < least:
            return best
        node, count = count, count + 1
        waiting = take(own, floor, work, node, waiting)
        level, reach = work.ints[TREE + node * FIELDS + DEPTH], f[REACH + node]
        gain += reach - rate * (cost(widths, costs, count) - here)
        if gain > highest:
            highest, best = gain, count


@inner
def cost(widths: Floats, costs: Floats, nodes: int) -> float:
    """Of a pass, on the line through the points."""
    i = 1
    while i < len(widths) - 1 and widths[i] < nodes:
        i += 1
    rise = (costs[i] - costs[i - 1]) / (widths[i] - widths[i - 1])
    return costs[i - 1] + max(rise, LEAST_SLOPE) * (nodes - widths[i - 1])


@inner
def slope(widths: Floats, costs: Floats, nodes: int, here: float) -> float:
    """What one more node costs at least, however many more there will be."""
    least = cost(widths, costs, nodes + 1) - here
    for i in range(1, len(widths)):
        if widths[i] > nodes:
            least = min(least, (costs[i] - here) / (widths[i] - nodes))
    return max(least, LEAST_SLOPE)


@inner
def walk(own: Bank, work: Work, node: int, level: int) -> int:
    """Put the path down to `node` behind the indexed ids; where it ends."""
    length = own.marks[LENGTH]
    end = place = length + level
    while node >= 0:
        place -= 1
        own.ids[place] = work.ints[TREE + node * FIELDS + LABEL]
        node = work.ints[TREE + node * FIELDS + PARENT]
    hash_on(own, length, end)
    return end


@inner
def queue(
    work: Work, waiting: int, room: int, found: int, node: int, level: int, reach: float,
    least: float,
) -> int:  # fmt: skip
    """Let the candidates wait that may pay, in `room` places; how many wait now.

    Of equals the child of the earlier node is before, of a node's children the lower id.
    """
    w, f = work.ints, work.floats
    for one in range(found):
        rank, token = reach * f[CHANCES + one], w[CANDIDATES + one * CANDIDATE + ID]
        if rank < least:
            continue
        at = waiting
        while at:
            to = WAITING + (at - 1) * FIELDS
            if rank < f[RANK + at - 1]:
                break
            if rank == f[RANK + at - 1] and (w[to + PARENT] < node or w[to + LABEL] < token):
                break
            at -= 1
        if at >= room:
            continue
        waiting = min(waiting + 1, room)
        for i in range(waiting - 1, at, -1):
            copy(work, i - 1, i)
        to = WAITING + at * FIELDS
        f[RANK + at], f[HOPE + at] = rank, f[CHANCES + one]
        w[to + LABEL], w[to + PARENT], w[to + DEPTH] = token, node, level + 1
        w[to + SOURCE] = w[CANDIDATES + one * CANDIDATE + ORIGIN]
    return waiting


@inner
def copy(work: Work, one: int, to: int) -> None:
    """Move one that waits to another place."""
    work.floats[RANK + to] = work.floats[RANK + one]
    work.floats[HOPE + to] = work.floats[HOPE + one]
    for field in range(FIELDS):
        work.ints[WAITING + to * FIELDS + field] = work.ints[WAITING + one * FIELDS + field]


@inner
def take(own: Bank, floor: int, work: Work, node: int, waiting: int) -> int:
    """The first that waits becomes a node; how many wait now."""
    w, at = work.ints, TREE + node * FIELDS
    work.floats[CHANCE + node], work.floats[REACH + node] = work.floats[HOPE], work.floats[RANK]
    for field in range(FIELDS):
        w[at + field] = w[WAITING + field]
    onward = w[TREE + w[at + PARENT] * FIELDS + SOURCE] + 1 if w[at + PARENT] >= 0 else 0
    # A copy goes on where it was; what lies before `floor` is another text.
    if 0 < onward < own.marks[LENGTH] and onward != floor and own.ids[onward] == w[at + LABEL]:
        w[at + SOURCE] = onward
    for i in range(waiting - 1):
        copy(work, i + 1, i)
    return waiting - 1
