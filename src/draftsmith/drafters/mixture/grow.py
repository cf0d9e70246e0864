"""Grow: the tree of drafts, best first, as far as its nodes pay."""

from __future__ import annotations

from typing import NamedTuple

from draftsmith.drafters.mixture.belief import Belief, guess, learn
from draftsmith.drafters.mixture.candidates import CELL, ID, ORIGIN, Work
from draftsmith.drafters.mixture.compiled import Floats, Ints, compiled, floats, ints
from draftsmith.drafters.mixture.contexts import Bank, hash_on, index

LARGEST = 64
"""Nodes of a tree."""
LABEL, PARENT, DEPTH, SOURCE, FIELDS = range(5)
"""Fields of a node, and how many: token, parent or -1, depth from 1, where it was copied from or -1."""
LEAST_SLOPE = 0.002
"""A node is never taken to cost less, in plain passes: growing costs time, too."""


class Tree(NamedTuple):
    """Nodes, the likeliest to be accepted first, and those that may be next, in the same order."""

    nodes: Ints
    """(LARGEST * FIELDS,)"""
    chances: Floats
    """(LARGEST,) of being right where the parent is."""
    reaches: Floats
    """(LARGEST,) of being accepted."""
    waiting: Ints
    """(LARGEST * FIELDS,)"""
    hopes: Floats
    """(LARGEST,) chances of those that wait."""
    ranks: Floats
    """(LARGEST,) reaches of those that wait."""


def new_tree() -> Tree:
    """Room for a tree."""
    zeros = [0.0] * LARGEST
    nodes, waiting = ints(LARGEST * FIELDS), ints(LARGEST * FIELDS)
    return Tree(nodes, floats(zeros), floats(zeros), waiting, floats(zeros), floats(zeros))


@compiled
def read(
    own: Bank, start: int, end: int, floor: int, earlier: Bank, belief: Belief, work: Work,
    rate: float, memory: float, weight: float,
) -> None:  # fmt: skip
    """Learn from what the target said, ids[start:end], token by token, and index it."""
    for place in range(start, end):
        count = guess(own, earlier, belief, work, place)
        learn(belief, work, count, own.ids[place], rate, memory, weight)
        index(own, place, place + 1, floor)


@compiled
def grow(
    own: Bank, length: int, earlier: Bank, belief: Belief, work: Work, tree: Tree,
    most: int, depth: int, chain: bool, widths: Floats, costs: Floats, rate: float, floor: int,
) -> int:  # fmt: skip
    """Draft at most `most` nodes after the `length` ids, `depth` deep, or a `chain`; how many pay.

    `costs`: of a pass with `widths` nodes, rising from 0, in plain passes; `rate`: tokens that a
    plain pass's time yields at present. A node pays where it is accepted oftener than decoding
    would yield tokens in the time that it takes.
    """
    count = waiting = best = 0
    gain = highest = 0.0
    node, level, reach = -1, 0, 1.0
    while True:
        least = rate * slope(widths, costs, count)
        if level < depth:
            end = walk(own, length, tree, node)
            found = guess(own, earlier, belief, work, end)
            waiting = queue(
                tree, waiting, most - count, work, found, node, level, reach, least, chain
            )
        if not waiting or count == most or tree.ranks[0] < least:
            return best
        waiting = take(own, length, floor, tree, count, waiting)
        node, level, reach = count, tree.nodes[count * FIELDS + DEPTH], tree.reaches[count]
        count += 1
        gain += reach - rate * (cost(widths, costs, count) - cost(widths, costs, count - 1))
        if gain > highest:
            highest, best = gain, count


@compiled
def cost(widths: Floats, costs: Floats, nodes: int) -> float:
    """Of a pass, on the line through the points."""
    i = 1
    while i < len(widths) - 1 and widths[i] < nodes:
        i += 1
    rise = (costs[i] - costs[i - 1]) / (widths[i] - widths[i - 1])
    return costs[i - 1] + max(rise, LEAST_SLOPE) * (nodes - widths[i - 1])


@compiled
def slope(widths: Floats, costs: Floats, nodes: int) -> float:
    """What one more node costs at least, however many more there will be."""
    here = cost(widths, costs, nodes)
    least = cost(widths, costs, nodes + 1) - here
    for i in range(1, len(widths)):
        if widths[i] > nodes:
            least = min(least, (cost(widths, costs, int(widths[i])) - here) / (widths[i] - nodes))
    return max(least, LEAST_SLOPE)


@compiled
def walk(own: Bank, length: int, tree: Tree, node: int) -> int:
    """Put the path down to `node` behind the ids; where it ends."""
    end = length + (tree.nodes[node * FIELDS + DEPTH] if node >= 0 else 0)
    place = end
    while node >= 0:
        place -= 1
        own.ids[place] = tree.nodes[node * FIELDS + LABEL]
        node = tree.nodes[node * FIELDS + PARENT]
    hash_on(own, length, end)
    return end


@compiled
def queue(
    tree: Tree, waiting: int, room: int, work: Work, found: int, node: int, level: int,
    reach: float, least: float, chain: bool,
) -> int:  # fmt: skip
    """Let the candidates wait that may pay, in `room` places; how many wait now."""
    width, c = CELL + len(work.absent), work.candidates
    if chain:
        room = 1
    for one in range(found):
        rank, token = reach * work.chances[one], c[one * width + ID]
        if rank < least:
            continue
        at = waiting
        while at and (
            rank > tree.ranks[at - 1]
            or (
                rank == tree.ranks[at - 1]
                and node == tree.waiting[(at - 1) * FIELDS + PARENT]
                and token < tree.waiting[(at - 1) * FIELDS + LABEL]
            )
        ):
            at -= 1
        if at >= room:
            continue
        waiting = min(waiting + 1, room)
        for i in range(waiting - 1, at, -1):
            tree.ranks[i], tree.hopes[i] = tree.ranks[i - 1], tree.hopes[i - 1]
            for field in range(FIELDS):
                tree.waiting[i * FIELDS + field] = tree.waiting[(i - 1) * FIELDS + field]
        tree.ranks[at], tree.hopes[at] = rank, work.chances[one]
        to = at * FIELDS
        tree.waiting[to + LABEL], tree.waiting[to + PARENT] = token, node
        tree.waiting[to + DEPTH] = level + 1
        tree.waiting[to + SOURCE] = c[one * width + ORIGIN]
    return waiting


@compiled
def take(own: Bank, length: int, floor: int, tree: Tree, count: int, waiting: int) -> int:
    """The first that waits becomes node `count`; how many wait now."""
    tree.chances[count], tree.reaches[count] = tree.hopes[0], tree.ranks[0]
    for field in range(FIELDS):
        tree.nodes[count * FIELDS + field] = tree.waiting[field]
    parent = tree.nodes[count * FIELDS + PARENT]
    onward = tree.nodes[parent * FIELDS + SOURCE] + 1 if parent >= 0 else 0
    # A copy goes on where it was: the text up to `floor` and that behind are two.
    if 0 < onward < length and onward != floor:
        if own.ids[onward] == tree.nodes[count * FIELDS + LABEL]:
            tree.nodes[count * FIELDS + SOURCE] = onward
    for i in range(waiting - 1):
        tree.ranks[i], tree.hopes[i] = tree.ranks[i + 1], tree.hopes[i + 1]
        for field in range(FIELDS):
            tree.waiting[i * FIELDS + field] = tree.waiting[(i + 1) * FIELDS + field]
    return waiting - 1
