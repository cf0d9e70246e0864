"""Tree search: the most probable paths, best first, as far as their nodes pay."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from draftsmith.compiled import compiled, inlined
from draftsmith.drafters.context_index import (
    ContextIndex,
    extend,
    extend_hashes,
    give_slots,
    new_index,
)
from draftsmith.drafters.logit_rows import ROW, remember
from draftsmith.drafters.mixer import (
    CANDIDATE,
    FORCED,
    LOOKUP,
    MAX_CANDIDATES,
    MAX_COUNT,
    Mixer,
    learn,
    new_mixer,
    predict,
)

LARGEST = 64
"""Nodes of a tree at most."""
ROOT = -1
LEAST_SLOPE = 0.002
"""A node is never taken to cost less, in plain passes: the search takes time, too."""

START, ALLOWED, FORBIDDEN = range(3)
"""Arguments of a search: begin, or let the first node of its queue join, or drop that node."""
ASK = -1
"""What a search returns that waits for such a verdict."""

NODE = np.dtype(
    [
        ("token", np.int32),
        ("parent", np.int32),  # or ROOT
        ("depth", np.int32),  # from 1
        ("position", np.int32),  # that it is copied from, or negative: see `mixer.CANDIDATE`
        ("prob", np.float64),  # that it is accepted where its parent is
        ("path_prob", np.float64),  # that it is accepted
    ],
    align=True,
)
PROGRESS = np.dtype(
    [
        ("nodes", np.int32),
        ("queued", np.int32),
        ("paying", np.int32),  # nodes, the first ones, that pay
        ("gain", np.float64),  # tokens that all nodes bring, less what their cost would bring
        ("best", np.float64),  # the highest gain so far: that of the nodes that pay
    ],
    align=True,
)


class Search(NamedTuple):
    """Room for a tree, and for what is needed while it grows."""

    candidates: Any
    """(MAX_CANDIDATES,) CANDIDATE."""
    lookup: Any
    """(1,) LOOKUP."""
    nodes: Any
    """(LARGEST,) NODE."""
    queue: Any
    """(LARGEST,) NODE that may join, the most probable first."""
    progress: Any
    """(1,) PROGRESS."""


class Limits(NamedTuple):
    """What a draft may be, and what it is worth."""

    nodes: int
    """At most LARGEST; 0: nothing is drafted."""
    depth: int
    chain: bool
    """Whether only one branch can be verified."""
    line: Any
    """(P, 2) nodes, rising from 0, and cost of a pass with so many, in plain passes."""
    rate: float
    """Tokens that the time of a plain pass yields at present."""
    judged: bool
    """Whether a grammar judges every node before it joins."""
    forced: Any
    """Tokens that the grammar forces after the root, or after the node that it just allowed."""
    few: Any
    """All tokens that it allows after these, at most 64; empty: more are allowed."""


def new_search() -> Search:
    """Return room for a search."""
    sizes = {CANDIDATE: MAX_CANDIDATES, LOOKUP: 1}, {NODE: LARGEST}, {NODE: LARGEST}, {PROGRESS: 1}
    return Search(*(np.zeros(n, dtype) for part in sizes for dtype, n in part.items()))


NO_TOKENS, NO_ROWS = np.zeros(0, np.int32), np.zeros(0, ROW)
NO_ANSWERS = new_index()
NO_DRAFT = Limits(0, 0, False, np.array([[0.0, 1.0], [1.0, 1.0]]), 1.0, False, NO_TOKENS, NO_TOKENS)
_MIXER, _SEARCH = new_mixer(1), new_search()


def index_ids(index: ContextIndex, end: int, quiet: int, floor: int) -> None:
    """Index ids up to `end` as `advance` does, and neither learn nor draft."""
    advance(
        index, end, quiet, floor, end, NO_ANSWERS, NO_ROWS, NO_ROWS, NO_ROWS, 0, _MIXER, _SEARCH,
        0.0, MAX_COUNT, 1.0, NO_DRAFT, START,
    )  # fmt: skip


@compiled
def advance(
    text: ContextIndex, end: int, quiet: int, floor: int, emitted: int, answers: ContextIndex,
    rows: Any, new_rows: Any, head: Any, base: int, mixer: Mixer, search: Search, rate: float,
    max_count: float, weight: float, limits: Limits, verdict: int,
) -> int:  # fmt: skip
    """Index the ids of `text` up to `end`, then draft what follows them; return as `grow` does.

    Ids before `quiet` only serve as context, no context begins before `floor`. From `emitted` on
    the target emitted the ids, so they are learned from: see `mixer.learn`. `head`: rows that a
    head gave, by paths from `base` on.
    """
    candidates, lookup = search.candidates, search.lookup[0]
    give_slots(text)
    start = min(end, max(emitted, text.totals[0].length))
    extend(text, start, quiet, floor)
    for position in range(start, end):
        count = predict(text, answers, rows, head, base, mixer, candidates, lookup, position)
        token = text.ids[position]
        learn(mixer, candidates, lookup, count, token, rate, max_count, weight)
        extend(text, position + 1, quiet, floor)
    # Not earlier: the row that a token was emitted by would tell what is to be learned.
    remember(rows, new_rows)
    if not limits.nodes:
        return 0
    return grow(text, floor, answers, rows, head, mixer, search, limits, verdict)


@inlined
def grow(
    text: ContextIndex, floor: int, answers: ContextIndex, rows: Any, head: Any, mixer: Mixer,
    search: Search, limits: Limits, verdict: int,
) -> int:  # fmt: skip
    """Grow a tree after the indexed ids; return how many of its nodes pay.

    A node pays if it is accepted more often than decoding would yield tokens in the time that it
    takes. Where a grammar judges the nodes, return ASK instead whenever the first of the queue
    waits for its verdict, with which the search then goes on.
    """
    candidates, nodes, queue = search.candidates, search.nodes, search.queue
    progress = search.progress[0]
    if verdict == START:
        progress.nodes = progress.queued = progress.paying = 0
        progress.gain = progress.best = 0.0
    elif verdict == FORBIDDEN:
        drop_first(search)
    node, depth, path_prob, forced = ROOT, 0 * floor, 1.0, 0
    expand, allowed = verdict == START, verdict == ALLOWED
    while True:
        count = progress.nodes
        here = pass_cost(limits.line, count)
        least = limits.rate * next_cost(limits.line, count, here)
        deeper = expand and depth < limits.depth
        if deeper and forced < len(limits.forced) and count < limits.nodes and path_prob >= least:
            token = limits.forced[forced]
            add_node(search, token, node, depth + 1, FORCED, 1.0, path_prob)
            forced += 1
        else:
            if deeper:
                end = put_path(text, search, node, depth)
                found = predict(
                    text, answers, rows, head, text.totals[0].length, mixer, candidates,
                    search.lookup[0], end,
                )  # fmt: skip
                first = allow_only(candidates, found, limits.few)
                last = max(found, first + len(limits.few))
                room = limits.nodes - count
                enqueue(search, room, first, last, node, depth, path_prob, least)
            if not progress.queued or count == limits.nodes or queue[0].path_prob < least:
                return progress.paying
            if limits.judged and not allowed:
                return ASK
            expand, allowed = True, False
            take_first(text, floor, search)
            if limits.chain:
                progress.queued = 0
        node = count
        depth, path_prob = nodes[node].depth, nodes[node].path_prob
        progress.gain += path_prob - limits.rate * (pass_cost(limits.line, count + 1) - here)
        if progress.gain > progress.best:
            progress.best, progress.paying = progress.gain, count + 1


@inlined
def pass_cost(line: Any, nodes: int) -> float:
    """Return the cost of a pass on the line through the points."""
    i = 1
    while i < len(line) - 1 and line[i][0] < nodes:
        i += 1
    rise = (line[i][1] - line[i - 1][1]) / (line[i][0] - line[i - 1][0])
    return line[i - 1][1] + max(rise, LEAST_SLOPE) * (nodes - line[i - 1][0])


@inlined
def next_cost(line: Any, nodes: int, here: float) -> float:
    """Return what one more node costs at least, however many more follow."""
    least = pass_cost(line, nodes + 1) - here
    for i in range(1, len(line)):
        if line[i][0] > nodes:
            least = min(least, (line[i][1] - here) / (line[i][0] - nodes))
    return max(least, LEAST_SLOPE)


@inlined
def put_path(text: ContextIndex, search: Search, node: int, depth: int) -> int:
    """Put the path to `node` after the indexed ids; return where it ends."""
    length = text.totals[0].length
    end = position = length + depth
    while node >= 0:
        position -= 1
        text.ids[position] = search.nodes[node].token
        node = search.nodes[node].parent
    extend_hashes(text, length, end)
    return end


@inlined
def allow_only(candidates: Any, found: int, few: Any) -> int:
    """Where only `few` tokens are allowed, put these after the candidates; return the first that
    counts.

    The probability that the mixer leaves to tokens it does not name is theirs in equal parts.
    """
    if not len(few):
        return 0 * found
    others = 1.0
    for i in range(found):
        others -= candidates[i].prob
    total = others
    for new in range(len(few)):
        one = candidates[found + new]
        one.token, one.position, one.prob = few[new], FORCED, others / len(few)
        for i in range(found):
            if candidates[i].token == few[new]:
                one.position = candidates[i].position
                one.prob += candidates[i].prob
                total += candidates[i].prob
    for new in range(len(few)):
        candidates[found + new].prob /= total
    return found


@inlined
def enqueue(
    search: Search, room: int, first: int, last: int, node: int, depth: int, path_prob: float,
    least: float,
) -> None:  # fmt: skip
    """Put the candidates from `first` to `last` that may pay into the queue's first `room` places.

    Of equals the child of the earlier node goes first, of one node's children the lower id.
    """
    queue, queued = search.queue, search.progress[0].queued
    for i in range(first, last):
        one = search.candidates[i]
        reached = path_prob * one.prob
        if reached < least:
            continue
        at = queued
        while at:
            before = queue[at - 1]
            if reached < before.path_prob:
                break
            if reached == before.path_prob and (before.parent < node or before.token < one.token):
                break
            at -= 1
        if at >= room:
            continue
        queued = min(queued + 1, room)
        for place in range(queued - 1, at, -1):
            queue[place] = queue[place - 1]
        new = queue[at]
        new.token, new.parent, new.depth, new.position = one.token, node, depth + 1, one.position
        new.prob, new.path_prob = one.prob, reached
    search.progress[0].queued = queued


@inlined
def take_first(text: ContextIndex, floor: int, search: Search) -> None:
    """Make the first of the queue a node of the tree."""
    new = search.queue[0]
    position = new.position
    onward = search.nodes[new.parent].position + 1 if new.parent >= 0 else 0
    # A copy goes on where it was; what is before `floor` is another text.
    if 0 < onward < text.totals[0].length and onward != floor and text.ids[onward] == new.token:
        position = onward
    add_node(search, new.token, new.parent, new.depth, position, new.prob, new.path_prob)
    drop_first(search)


@inlined
def add_node(
    search: Search, token: int, parent: int, depth: int, position: int, prob: float,
    path_prob: float,
) -> None:  # fmt: skip
    """Add a node to the tree."""
    new = search.nodes[search.progress[0].nodes]
    new.token, new.parent, new.depth, new.position = token, parent, depth, position
    new.prob, new.path_prob = prob, path_prob
    search.progress[0].nodes += 1


@inlined
def drop_first(search: Search) -> None:
    """Remove the first of the queue."""
    search.progress[0].queued -= 1
    for i in range(search.progress[0].queued):
        search.queue[i] = search.queue[i + 1]
