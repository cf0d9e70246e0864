"""Grow: the tree of drafts, best first, as far as its nodes pay."""

from __future__ import annotations

from typing import NamedTuple

from draftsmith.compiled import compiled
from draftsmith.drafters.mixture.belief import Belief, guess, learn
from draftsmith.drafters.mixture.candidates import (
    CANDIDATE,
    CANDIDATES,
    CHANCE,
    CHANCES,
    DEPTH,
    FIELDS,
    FORCED,
    GAIN,
    GROWN,
    HIGHEST,
    HOPE,
    ID,
    LABEL,
    ORIGIN,
    PARENT,
    PAYING,
    RANK,
    REACH,
    SOURCE,
    TREE,
    WAITING,
    WAITS,
    Work,
)
from draftsmith.drafters.mixture.compiled import Floats, Ints, floats, inner, ints, no
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
    judged: bool
    """Whether it stops at each node that waits, to be told if a grammar allows it: `proceed`."""
    forced: Ints
    """Tokens that a grammar forces behind the root, or behind the node that it just allowed."""
    few: Ints
    """All tokens that may come behind these, at most 64; none: they are more."""


NOTHING = Wanted(0, 0, False, floats((0.0, 1.0)), floats((1.0, 1.0)), 1.0, False, ints(0), ints(0))
START, ALLOWED, FORBIDDEN = range(3)
"""Of a tree: it begins, or goes on since the first that waits may or may not be a node."""


@compiled
def advance(
    own: Bank, end: int, quiet: int, floor: int, told: int, earlier: Bank, belief: Belief,
    work: Work, rate: float, memory: float, weight: float, wanted: Wanted,
) -> int:  # fmt: skip
    """Read what is new of the bank's ids up to `end`, then draft: see `grow`.

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
    start = no(end) + START
    return grow(own, floor, earlier, belief, work, wanted, start) if wanted.most else 0


@compiled
def proceed(
    own: Bank, floor: int, earlier: Bank, belief: Belief, work: Work, wanted: Wanted, verdict: int
) -> int:
    """Go on with a tree that stopped to be judged."""
    return grow(own, floor, earlier, belief, work, wanted, verdict)


@inner
def grow(
    own: Bank, floor: int, earlier: Bank, belief: Belief, work: Work, wanted: Wanted, verdict: int
) -> int:
    """A tree behind the indexed ids; how many of its nodes pay, or -1: it waits for a verdict.

    A node pays where it is accepted oftener than decoding would yield tokens in the time that it
    takes.
    """
    w, f, rate, widths, costs = work.ints, work.floats, wanted.rate, wanted.widths, wanted.costs
    if verdict == START:
        w[GROWN] = w[WAITS] = w[PAYING] = 0
        f[GAIN] = f[HIGHEST] = 0.0
    elif verdict == FORBIDDEN:
        leave(work)
    forced = level = no(floor)
    reach, node = 1.0, -1 - level
    new, allowed = verdict == START, verdict == ALLOWED
    while True:
        count = w[GROWN]
        here = cost(widths, costs, count)
        least = rate * slope(widths, costs, count, here)
        deeper = new and level < wanted.depth
        if deeper and forced < len(wanted.forced) and count < wanted.most and reach >= least:
            add(work, wanted.forced[forced], node, level + 1, FORCED, 1.0, reach)
            forced += 1
        else:
            if deeper:
                end = walk(own, work, node, level)
                found = guess(own, earlier, belief, work, end)
                first = restrict(work, found, wanted.few)
                found = max(found, first + len(wanted.few))
                queue(work, wanted.most - count, first, found, node, level, reach, least)
            if not w[WAITS] or count == wanted.most or f[RANK] < least:
                return w[PAYING]
            if wanted.judged and not allowed:
                return -1
            new, allowed = True, False
            take(own, floor, work)
            if wanted.chain:
                w[WAITS] = 0
        node = count
        level, reach = w[TREE + node * FIELDS + DEPTH], f[REACH + node]
        f[GAIN] += reach - rate * (cost(widths, costs, count + 1) - here)
        if f[GAIN] > f[HIGHEST]:
            f[HIGHEST], w[PAYING] = f[GAIN], count + 1


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
def restrict(work: Work, found: int, few: Ints) -> int:
    """Where only `few` may come, put these behind the candidates; the first that counts.

    What the candidates leave to others is theirs in equal parts.
    """
    w, f = work.ints, work.floats
    if not len(few):
        return no(found)
    others = 1.0
    for one in range(found):
        others -= f[CHANCES + one]
    whole = others
    for new in range(len(few)):
        to = CANDIDATES + (found + new) * CANDIDATE
        w[to + ID], w[to + ORIGIN] = few[new], FORCED
        f[CHANCES + found + new] = others / len(few)
        for one in range(found):
            at = CANDIDATES + one * CANDIDATE
            if w[at + ID] == few[new]:
                w[to + ORIGIN] = w[at + ORIGIN]
                f[CHANCES + found + new] += f[CHANCES + one]
                whole += f[CHANCES + one]
    for new in range(len(few)):
        f[CHANCES + found + new] /= whole
    return found


@inner
def queue(
    work: Work, room: int, first: int, end: int, node: int, level: int, reach: float, least: float
) -> None:
    """Let the candidates from `first` on wait that may pay, in `room` places.

    Of equals the child of the earlier node is before, of a node's children the lower id.
    """
    w, f = work.ints, work.floats
    waiting = w[WAITS]
    for one in range(first, end):
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
    w[WAITS] = waiting


@inner
def copy(work: Work, one: int, to: int) -> None:
    """Move one that waits to another place."""
    work.floats[RANK + to] = work.floats[RANK + one]
    work.floats[HOPE + to] = work.floats[HOPE + one]
    for field in range(FIELDS):
        work.ints[WAITING + to * FIELDS + field] = work.ints[WAITING + one * FIELDS + field]


@inner
def take(own: Bank, floor: int, work: Work) -> None:
    """The first that waits becomes a node."""
    w, f = work.ints, work.floats
    label, parent, source = w[WAITING + LABEL], w[WAITING + PARENT], w[WAITING + SOURCE]
    onward = w[TREE + parent * FIELDS + SOURCE] + 1 if parent >= 0 else 0
    # A copy goes on where it was; what lies before `floor` is another text.
    if 0 < onward < own.marks[LENGTH] and onward != floor and own.ids[onward] == label:
        source = onward
    add(work, label, parent, w[WAITING + DEPTH], source, f[HOPE], f[RANK])
    leave(work)


@inner
def add(
    work: Work, label: int, parent: int, depth: int, source: int, chance: float, reach: float
) -> None:
    """One more node."""
    w, f, node = work.ints, work.floats, work.ints[GROWN]
    at = TREE + node * FIELDS
    w[at + LABEL], w[at + PARENT], w[at + DEPTH], w[at + SOURCE] = label, parent, depth, source
    f[CHANCE + node], f[REACH + node] = chance, reach
    w[GROWN] = node + 1


@inner
def leave(work: Work) -> None:
    """The first that waits does so no more."""
    work.ints[WAITS] -= 1
    for i in range(work.ints[WAITS]):
        copy(work, i + 1, i)
