"""Tree search: adds the most probable nodes to a tree, best first, as long as nodes pay."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from draftsmith.compiled import compiled, inlined, int64
from draftsmith.core.draft import ROOT
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
"""Maximum number of nodes in a tree."""
LEAST_SLOPE = 0.002
"""Minimum cost of a node, in plain passes, because the search takes time, too."""

START, ALLOWED, FORBIDDEN = range(3)
"""Arguments of a search: start, or add the first node of the queue, or drop it."""
ASK = -1
"""Result of a search that needs ALLOWED or FORBIDDEN for the first node of its queue."""

NODE = np.dtype(
    [
        ("token", np.int32),
        ("parent", np.int32),  # or ROOT
        ("depth", np.int32),  # from 1
        ("position", np.int32),  # position it is copied from, or negative: see `mixer.CANDIDATE`
        ("prob", np.float64),  # probability that it is accepted if its parent is
        ("path_prob", np.float64),  # probability that it is accepted
    ],
    align=True,
)
PROGRESS = np.dtype(
    [
        ("nodes", np.int32),
        ("queued", np.int32),
        ("paying", np.int32),  # number of nodes, from the first on, that pay
        ("gain", np.float64),  # expected tokens of all nodes, less the tokens that their cost takes
        ("best", np.float64),  # largest gain so far, which is that of the paying nodes
    ],
    align=True,
)


class Search(NamedTuple):
    """Arrays for a tree and for its search."""

    candidates: Any
    """(MAX_CANDIDATES,) CANDIDATE."""
    lookup: Any
    """(1,) LOOKUP."""
    nodes: Any
    """(LARGEST,) NODE."""
    queue: Any
    """(LARGEST,) NODE that may be added, the most probable first."""
    progress: Any
    """(1,) PROGRESS."""


class Limits(NamedTuple):
    """Limits of a draft, and the cost of its nodes."""

    nodes: int
    """At most LARGEST; 0 drafts nothing."""
    depth: int
    chain: bool
    """Whether only one branch can be verified."""
    costs: Any
    """(P, 2) nodes, rising from 0, and cost of a pass with that many nodes, in plain passes."""
    rate: float
    """Tokens that decoding currently gives in the time of a plain pass."""
    judged: bool
    """Whether a grammar must allow every node before it is added."""
    forced: Any
    """Tokens that the grammar forces after the root, or after the node that it has just allowed."""
    few: Any
    """All tokens that it allows after these, at most 64; empty if it allows more."""


def new_search() -> Search:
    """Return the arrays for a search."""
    sizes = {CANDIDATE: MAX_CANDIDATES, LOOKUP: 1}, {NODE: LARGEST}, {NODE: LARGEST}, {PROGRESS: 1}
    return Search(*(np.zeros(n, dtype) for part in sizes for dtype, n in part.items()))


NO_TOKENS, NO_ROWS = np.zeros(0, np.int32), np.zeros(0, ROW)
NO_ANSWERS = new_index()
NO_DRAFT = Limits(0, 0, False, np.array([[0.0, 1.0], [1.0, 1.0]]), 1.0, False, NO_TOKENS, NO_TOKENS)
_MIXER, _SEARCH = new_mixer(1), new_search()


def index_ids(index: ContextIndex, end: int, count_from: int, floor: int) -> None:
    """Index ids up to `end` as `advance` does, without learning or drafting."""
    advance(
        index, end, count_from, floor, end, NO_ANSWERS, NO_ROWS, NO_ROWS, NO_ROWS, 0, _MIXER,
        _SEARCH, 0.0, MAX_COUNT, 1.0, NO_DRAFT, START,
    )  # fmt: skip


@compiled
def advance(
    text: ContextIndex, end: int, count_from: int, floor: int, emitted: int,
    answers: ContextIndex, rows: Any, new_rows: Any, head: Any, base: int, mixer: Mixer,
    search: Search, rate: float, max_count: float, weight: float, limits: Limits, verdict: int,
) -> int:  # fmt: skip
    """Index the ids of `text` up to `end`, then draft what follows them; return the result of
    `grow`.

    Ids before `count_from` are used as context only, and no context begins before `floor`. Ids from
    `emitted` on were emitted by the target, so the mixer learns from them (`mixer.learn`). `head`:
    rows that a head gave, by paths from `base` on.
    """
    candidates, lookup = search.candidates, search.lookup[0]
    give_slots(text)
    start = min(end, max(emitted, text.totals[0].length))
    extend(text, start, count_from, floor)
    for position in range(start, end):
        count = predict(text, answers, rows, head, base, mixer, candidates, lookup, position)
        token = text.ids[position]
        learn(mixer, candidates, lookup, count, token, rate, max_count, weight)
        extend(text, position + 1, count_from, floor)
    # Only now: the logits that emitted a token must not predict it while it is learned.
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

    A node pays if the probability that it is accepted exceeds the tokens that decoding gives in the
    time of the node. If a grammar judges the nodes, the result is ASK each time the first node of
    the queue needs a verdict; the next call passes the verdict and continues.
    """
    candidates, nodes, queue = search.candidates, search.nodes, search.queue
    progress = search.progress[0]
    if verdict == START:
        progress.nodes = progress.queued = progress.paying = 0
        progress.gain = progress.best = 0.0
    elif verdict == FORBIDDEN:
        drop_first(search)
    node, depth, path_prob, forced = int64(ROOT), int64(0), 1.0, 0
    expand, allowed = verdict == START, verdict == ALLOWED
    while True:
        count = int64(progress.nodes)
        here = pass_cost(limits.costs, count)
        least = limits.rate * next_cost(limits.costs, count, here)
        deeper = expand and depth < limits.depth
        if deeper and forced < len(limits.forced) and count < limits.nodes and path_prob >= least:
            token = limits.forced[forced]
            add_node(search, token, node, depth + 1, FORCED, 1.0, path_prob)
            forced += 1
        else:
            if deeper:
                end = put_path(text, search, node, depth)
                found = predict(
                    text, answers, rows, head, int64(text.totals[0].length), mixer, candidates,
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
        progress.gain += path_prob - limits.rate * (pass_cost(limits.costs, count + 1) - here)
        if progress.gain > progress.best:
            progress.best, progress.paying = progress.gain, count + 1


@inlined
def pass_cost(costs: Any, nodes: int) -> float:
    """Return the cost of a pass by linear interpolation of the points."""
    i = 1
    while i < len(costs) - 1 and costs[i][0] < nodes:
        i += 1
    rise = (costs[i][1] - costs[i - 1][1]) / (costs[i][0] - costs[i - 1][0])
    return costs[i - 1][1] + max(rise, LEAST_SLOPE) * (nodes - costs[i - 1][0])


@inlined
def next_cost(costs: Any, nodes: int, here: float) -> float:
    """Return the minimum cost of one more node, for any number of nodes after it."""
    least = pass_cost(costs, nodes + 1) - here
    for i in range(1, len(costs)):
        if costs[i][0] > nodes:
            least = min(least, (costs[i][1] - here) / (costs[i][0] - nodes))
    return max(least, LEAST_SLOPE)


@inlined
def put_path(text: ContextIndex, search: Search, node: int, depth: int) -> int:
    """Write the path to `node` after the indexed ids; return its end."""
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
    """If only `few` tokens are allowed, append them as candidates; return the first one that
    counts.

    The probability that the mixer leaves to other tokens is divided equally among them.
    """
    if not len(few):
        return int64(0)
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
    """Insert the candidates from `first` to `last` that may pay into the queue of size `room`.

    Of equal probabilities the child of the earlier node is first, of one node's children the lower
    id.
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
    """Move the first node of the queue to the tree."""
    new = search.queue[0]
    position = new.position
    onward = search.nodes[new.parent].position + 1 if new.parent >= 0 else 0
    # Continue the parent's copy if possible; ids before `floor` are another text.
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
