"""Mixer: the probability of each candidate, learned from the tokens that the target emits.

This is logistic mixing as in context-mixing compressors (PAQ, CMIX). Each input sorts a candidate
into one of a few cells: how often the token followed this context, and how often the context
occurred; or, if the token never followed it, how often the context occurred and how many different
tokens followed it. A table maps the cell to a probability. The logits of these probabilities are
added with weights. The weights are chosen by the longest contexts that contain the candidate, and
by what followed the last token.

There is one input for every context order of every index, and one for the row of the target's
logits. A mixer with a trained head has one more, for the row that the head gave at this place.

`I`: number of inputs, `K`: number of indexes.
"""

from __future__ import annotations

from math import exp, log
from typing import Any, NamedTuple

import numpy as np

from draftsmith.compiled import inlined, inner, int64
from draftsmith.drafters.context_index import (
    LENGTHS,
    ORDERS,
    ContextIndex,
    copied,
    find,
    hash_of,
)
from draftsmith.drafters.logit_rows import ROWS, TOP

NEWEST = 8
"""Newest followers of a context that become candidates. The last two tokens of an index and its
most frequent ones are candidates, too."""

SIZES, AGES, KINDS = 7, 7, 4
"""Classes of counts, of ages, and of the number of different followers."""
PRESENT = 2 * SIZES * AGES
"""Number of cells for followers. Cell of a follower: whether it is the newest, times it followed,
times the context occurred. For order 0: times the token occurred, its age. For a row: rank of the
token, class of its probability."""
CELLS = PRESENT + SIZES * KINDS
"""Number of all cells. Cell of other candidates: times the context occurred, number of different
followers. For a row: class of its best probability."""
AFTER = 1 + SIZES * KINDS
"""Classes of what followed the last token: 0 for a new token, else the times it occurred and the
number of its different followers."""
NAMED = 2
"""Whether the row contains the candidate."""

PROB_STEPS = (58982, 39322, 19661, 6554, 1966, 655)
"""Bounds of the classes of probability in a row: 0.9, 0.6, 0.3, 0.1, 0.03, 0.01 of WHOLE."""
PROBS, RANKS = 1 + len(PROB_STEPS), 6
"""Classes of probability and of rank in a row. Bigrams have separate cells after these."""

MAX_CANDIDATES = 168
"""Two indexes give at most 84 candidates, two rows 16, a grammar 64."""
SLOTS = 256
"""Number of slots in the hash table of candidates."""
MAX_INPUTS = 16
ELSEWHERE, FORCED = -2, -3
"""Position of a candidate that only the longer contexts of the second index contain (ELSEWHERE), or
only the answer's grammar allows (FORCED). -1: no context of the first index contains it."""

ROOT_KEY, KEY_STEP, KEY_MASK = 1, 1_000_003, 0x3FFFFFFF
"""Key of a head's row at the root, and numbers of the hash that makes the others (`path_key`)."""

MAX_COUNT = 255.0
"""Maximum number of cases that a cell counts while decoding."""
MIN_PROB = 0.0005
"""Minimum of a cell's probability and of its complement."""
MAX_WEIGHT = 16.0
MAX_LOGIT = 20.0
MAX_SUM = 0.995
"""Maximum sum of all candidates' probabilities, because only one of them can come next."""

CELL = np.dtype([("prob", np.float64), ("count", np.float64), ("logit", np.float64)], align=True)
"""Probability that a candidate in this cell comes next, number of cases it was learned from, and
its logit."""
CANDIDATE = np.dtype(
    [
        ("token", np.int32),
        ("weights", np.int32),  # its set of `Mixer.weights`, counted from AFTER
        ("position", np.int32),  # last position in the longest context of the first index, or < 0
        ("slot", np.int32),
        ("cells", np.int32, MAX_INPUTS),  # its cell for each input; -1: none
        ("alone", np.float64),  # probability before the sum is limited to MAX_SUM
        ("prob", np.float64),
    ],
    align=True,
)


LOOKUP = np.dtype(
    [
        ("inputs", np.int32),
        # For each input: index of the context in its index, or of the row in its table, or -1.
        ("found", np.int32, MAX_INPUTS),
        # For each input: cell of candidates that are not among the followers, or -1.
        ("absent", np.int32, MAX_INPUTS),
        ("slots", np.int32, SLOTS),  # hash table of candidates: 1 + index in the array, or 0
    ]
)


class Mixer(NamedTuple):
    """Everything that is learned."""

    cells: Any
    """(I, CELLS) CELL."""
    weights: Any
    """(AFTER + ORDERS^K * NAMED, I + 1) sets of weights and a bias. Two sets are added: one
    selected by what followed the last token, one by the longest context of each index that contains
    the candidate and by whether the row contains it. `with_head` adds as many of the latter, for
    candidates that the head names."""

    def copy(self) -> Mixer:
        """Return a copy with separate arrays."""
        return Mixer(copied(self.cells), self.weights.copy())

    @property
    def indexes(self) -> int:
        """K: number of indexes."""
        return len(self.cells) // ORDERS

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(int(array.nbytes) for array in self)


def new_mixer(indexes: int) -> Mixer:
    """Return a mixer for `indexes` indexes, with all numbers 0."""
    inputs = indexes * ORDERS + 1
    weights = np.zeros((AFTER + ORDERS**indexes * NAMED, inputs + 1))
    return Mixer(np.zeros((inputs, CELLS), CELL), weights)


def new_head(indexes: int) -> Mixer:
    """Return the input of a head (`with_head`), with all numbers 0."""
    sets, width = new_mixer(indexes).weights.shape
    return Mixer(np.zeros((1, CELLS), CELL), np.zeros((2 * sets - AFTER, width + 1)))


def with_head(mixer: Mixer, head: Mixer) -> Mixer:
    """Add the input of a head: its cells (1, CELLS), its weight in every set, and the sets of
    weights for candidates that it names."""
    weights, sets = head.weights.copy(), len(mixer.weights)
    weights[:sets, :-2], weights[:sets, -1] = mixer.weights[:, :-1], mixer.weights[:, -1]
    return Mixer(np.concatenate([mixer.cells, head.cells]), weights)


def without_head(mixer: Mixer) -> tuple[Mixer, Mixer]:
    """Undo `with_head`: return the mixer, and what it has learned of the head."""
    sets = (len(mixer.weights) + AFTER) // 2
    own = Mixer(mixer.cells[:-1].copy(), np.delete(mixer.weights[:sets], -2, axis=1))
    head = Mixer(mixer.cells[-1:].copy(), mixer.weights.copy())
    head.weights[:sets, :-2] = head.weights[:sets, -1] = 0
    return own, head


@inner
def predict(
    text: ContextIndex, answers: ContextIndex, rows: Any, head: Any, base: int, mixer: Mixer,
    candidates: Any, lookup: Any, end: int,
) -> int:  # fmt: skip
    """Fill `candidates` with tokens that may follow the first `end` ids of `text`; return how many.

    `answers`: the second index, if the mixer has two. `rows`: (ROWS,) ROW of the target's logits,
    or empty. `head`: (n,) ROW that a head gave, by the paths from the id at `base` on.
    """
    indexes, row = (text, answers), len(mixer.cells) // ORDERS * ORDERS
    lookup.inputs = len(mixer.cells)
    for k in range(row // ORDERS):
        find_contexts(indexes[k], k * ORDERS, text, end, lookup)
    # All inputs are found before a candidate is added, which begins with the cells of absence.
    find_row(rows, row, text.ids[end - 1] if end else -1, lookup)
    if row + 1 < lookup.inputs:
        find_head(head, row + 1, path_key(text.ids, base, end), lookup)
    count = add_row(rows, row, candidates, lookup, int64(0))
    if row + 1 < lookup.inputs:
        count = add_row(head, row + 1, candidates, lookup, count)
    for k in range(row // ORDERS):
        count = add_followers(indexes[k], k * ORDERS, candidates, lookup, count)
    for k in range(row // ORDERS):
        sort_followers(indexes[k], k * ORDERS, candidates, lookup, count)
    sort_row(rows, row, candidates, lookup, count)
    if row + 1 < lookup.inputs:
        sort_head(head, row + 1, candidates, lookup, (len(mixer.weights) - AFTER) // 2)
    for i in range(count):
        lookup.slots[candidates[i].slot] = 0
    mix(mixer, candidates, lookup, count)
    return count


# --- candidates ----------------------------------------------------------------------------------


@inlined
def find_contexts(
    index: ContextIndex, first: int, text: ContextIndex, end: int, lookup: Any
) -> None:
    """Find the contexts in `index` at the end of the first `end` ids of `text`.

    `first`: number of the index's first input.
    """
    totals, found, absent = index.totals[0], lookup.found, lookup.absent
    for i in range(first, first + ORDERS):
        found[i] = absent[i] = -1
    if totals.length:
        absent[first] = absent_cell(totals.length, totals.distinct)
    for order in range(1, ORDERS):
        if LENGTHS[order] > end:
            break
        place = find(index, order, hash_of(text, order, end), text.ids, end)
        if place < 0:
            break
        context = index.contexts[place]
        found[first + order] = place
        absent[first + order] = absent_cell(context.count, context.followers)


@inlined
def find_row(rows: Any, row: int, token: int, lookup: Any) -> None:
    """Find the row after `token`; `row`: number of its input."""
    place = token % ROWS
    lookup.found[row] = lookup.absent[row] = -1
    if token >= 0 and len(rows) and abs(rows[place].after) == token + 1:
        bigram = rows[place].after < 0
        lookup.found[row] = place
        lookup.absent[row] = PRESENT + prob_class(rows[place].probs[0]) + PROBS * bigram


def longer_key(key: int, token: int) -> int:
    """Return the key of a path that goes on with a token."""
    return (key * KEY_STEP + token + 1) & KEY_MASK


_longer_key = inlined(longer_key)


@inlined
def path_key(ids: Any, start: int, end: int) -> int:
    """Return the key of a head's row: a hash of the ids from `start` to `end`."""
    key = ROOT_KEY
    for i in range(start, end):
        key = _longer_key(key, ids[i])
    return key


@inlined
def find_head(head: Any, row: int, key: int, lookup: Any) -> None:
    """Find the row that a head gave at the place of this key; `row`: its input."""
    lookup.found[row] = lookup.absent[row] = -1
    for place in range(len(head)):
        if head[place].after == key:
            lookup.found[row] = place
            lookup.absent[row] = PRESENT + prob_class(head[place].probs[0])


@inlined
def slot_of(candidates: Any, lookup: Any, token: int) -> int:
    """Return the slot of a candidate, or the free slot that it would get."""
    slots, slot = lookup.slots, token % SLOTS
    while slots[slot] and candidates[slots[slot] - 1].token != token:
        slot = (slot + 1) % SLOTS
    return slot


@inlined
def add(candidates: Any, lookup: Any, count: int, token: int) -> int:
    """Add the token to the candidates if it is not one; return the number of candidates."""
    slot = slot_of(candidates, lookup, token)
    if lookup.slots[slot] or count == MAX_CANDIDATES:
        return count
    new = candidates[count]
    new.token, new.weights, new.position, new.slot = token, 0, -1, slot
    for i in range(lookup.inputs):
        new.cells[i] = lookup.absent[i]
    lookup.slots[slot] = count + 1
    return count + 1


@inlined
def add_row(rows: Any, row: int, candidates: Any, lookup: Any, count: int) -> int:
    """Add the tokens of the row; return the number of candidates."""
    place = lookup.found[row]
    if place >= 0:
        for i in range(TOP):
            count = add(candidates, lookup, count, rows[place].tokens[i])
    return count


@inlined
def add_followers(index: ContextIndex, first: int, candidates: Any, lookup: Any, count: int) -> int:
    """Add followers of the contexts, of the longest first, then the last two tokens, then the most
    frequent ones; return the number of candidates."""
    totals = index.totals[0]
    # One loop with one call of `add`, because `add` is inlined.
    for order in range(ORDERS - 1, -2, -1):
        at, left = order, NEWEST
        if order > 0:
            place = lookup.found[first + order]
            at = index.contexts[place].newest if place >= 0 else -1
        elif order == 0:
            left = 2 if totals.previous >= 0 else 1 if totals.latest >= 0 else 0
        else:
            left = totals.listed
        for i in range(left):
            if order > 0:
                if at < 0:
                    break
                token = index.followers[at].token
                at = index.followers[at].older
            elif order == 0:
                token = totals.previous if i else totals.latest
            else:
                token = totals.frequent[i]
            count = add(candidates, lookup, count, token)
    return count


# --- cells ---------------------------------------------------------------------------------------


@inlined
def size_class(n: int) -> int:
    """Return the class of a count: 0; 1; 2; 3-4; 5-8; 9-16; more."""
    # Branch-free: these branches mispredict and stall on cache misses.
    return min(n, 2) + (n > 2) + (n > 4) + (n > 8) + (n > 16)


@inlined
def age_class(n: int) -> int:
    """Return the class of a distance in tokens: up to 4, 16, 64, 256, 1024, 4096; more."""
    return (n > 4) + (n > 16) + (n > 64) + (n > 256) + (n > 1024) + (n > 4096)


@inlined
def prob_class(prob: int) -> int:
    """Return the class of a probability in a row, 0 for the highest."""
    found = 0
    for step in PROB_STEPS:
        found += prob < step
    return found


@inlined
def absent_cell(count: int, kinds: int) -> int:
    """Return the cell of a candidate that never followed a context with `count` occurrences."""
    return PRESENT + size_class(count) * KINDS + (kinds > 1) + (kinds > 2) + (kinds > 4)


@inlined
def sort_followers(
    index: ContextIndex, first: int, candidates: Any, lookup: Any, count: int
) -> None:
    """Set each candidate's cells for the contexts, and the longest context that contains it.

    For the first index, also set its last position in that context.
    """
    followers = index.followers
    for i in range(count):
        one = candidates[i]
        one.weights *= ORDERS
        place = find(index, int64(0), one.token + 1, index.ids, int64(0))
        if place >= 0:
            context = index.contexts[place]
            age = age_class(index.totals[0].length - context.end + 1)
            one.cells[first] = size_class(context.count) * AGES + age
    for order in range(1, ORDERS):
        place = lookup.found[first + order]
        if place < 0:
            break
        occurred, newest = size_class(index.contexts[place].count), index.contexts[place].newest
        at = newest
        while at >= 0:
            candidate = lookup.slots[slot_of(candidates, lookup, followers[at].token)]
            if candidate:
                one = candidates[candidate - 1]
                older = 0 if at == newest else SIZES
                times = size_class(followers[at].count)
                one.cells[first + order] = (older + times) * SIZES + occurred
                one.weights += order - one.weights % ORDERS
                if not first:
                    one.position = followers[at].position
                elif one.position < 0:
                    one.position = ELSEWHERE
            at = followers[at].older


@inlined
def sort_row(rows: Any, row: int, candidates: Any, lookup: Any, count: int) -> None:
    """Set each candidate's cell for the row, and whether the row contains it."""
    for i in range(count):
        candidates[i].weights *= NAMED
    place = lookup.found[row]
    if place < 0:
        return
    first = RANKS * (rows[place].after < 0)
    for i in range(TOP):
        candidate = lookup.slots[slot_of(candidates, lookup, rows[place].tokens[i])]
        if candidate:
            one = candidates[candidate - 1]
            rank = first + (i if i < 4 else 4 if i < 6 else 5)
            one.cells[row] = rank * PROBS + prob_class(rows[place].probs[i])
            one.weights += 1


@inlined
def sort_head(head: Any, row: int, candidates: Any, lookup: Any, named: int) -> None:
    """Sort each candidate that the head's row names into its cell, and choose its weights.

    `named`: number of the first set of weights for such candidates.
    """
    place = lookup.found[row]
    if place < 0:
        return
    for i in range(TOP):
        candidate = lookup.slots[slot_of(candidates, lookup, head[place].tokens[i])]
        if candidate:
            one = candidates[candidate - 1]
            rank = i if i < 4 else 4 if i < 6 else 5
            one.cells[row] = rank * PROBS + prob_class(head[place].probs[i])
            one.weights = named + one.weights % named


# --- probabilities -------------------------------------------------------------------------------


@inlined
def squash(logit: float) -> float:
    """Return the probability of a logit."""
    return 1.0 / (1.0 + exp(-min(MAX_LOGIT, max(-MAX_LOGIT, logit))))


@inlined
def after_class(lookup: Any) -> int:
    """Return the set of `Mixer.weights` for what followed the last token."""
    cell = lookup.absent[1]
    return 0 if cell < 0 else 1 + cell - PRESENT


@inlined
def mix(mixer: Mixer, candidates: Any, lookup: Any, count: int) -> None:
    """Compute the probability of each candidate."""
    inputs = len(mixer.cells)
    after = mixer.weights[after_class(lookup)]
    total = 0.0
    for n in range(count):
        one = candidates[n]
        weights = mixer.weights[AFTER + one.weights]
        logit = weights[inputs] + after[inputs]
        for i in range(inputs):
            if one.cells[i] >= 0:
                logit += (weights[i] + after[i]) * mixer.cells[i, one.cells[i]].logit
        one.alone = one.prob = squash(logit)
        total += one.prob
    if total > MAX_SUM:
        for n in range(count):
            candidates[n].prob *= MAX_SUM / total


@inlined
def learn(
    mixer: Mixer, candidates: Any, lookup: Any, count: int, token: int, rate: float,
    max_count: float, weight: float,
) -> None:  # fmt: skip
    """Learn that `token` followed where `predict` gave these candidates.

    `rate`: learning rate of the weights. `max_count`: maximum cases of a cell. `weight`: weight of
    this case.
    """
    inputs = len(mixer.cells)
    after = mixer.weights[after_class(lookup)]
    for n in range(count):
        one = candidates[n]
        weights = mixer.weights[AFTER + one.weights]
        right = 1.0 if one.token == token else 0.0
        step = (right - one.alone) * rate * weight
        for i in range(inputs + 1):
            change = step
            if i < inputs:
                if one.cells[i] < 0:
                    continue
                cell = mixer.cells[i, one.cells[i]]
                change *= cell.logit
                cases, p = min(cell.count + weight, max_count), cell.prob
                p = min(1.0 - MIN_PROB, max(MIN_PROB, p + (right - p) * weight / (cases + 1.5)))
                cell.count = cases
                if p != cell.prob:  # skip the logarithm at a bound
                    cell.prob, cell.logit = p, log(p / (1.0 - p))
            weights[i] = min(MAX_WEIGHT, max(-MAX_WEIGHT, weights[i] + change))
            after[i] = min(MAX_WEIGHT, max(-MAX_WEIGHT, after[i] + change))
