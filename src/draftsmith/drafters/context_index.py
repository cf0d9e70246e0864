"""ContextIndex: the tokens that followed each context of one or several texts, and how often.

A context is the last 0, 1, 2, 8 or 32 tokens before a position. For each context that occurred, the
index lists the tokens that followed it, the newest first, with counts and last positions. For each
token it holds how often it occurred, and the last position.

A context is found by a hash of its tokens, which are then compared with the text. Hashes differ
from process to process, so that no text can be made to collide. Results do not depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from secrets import randbelow
from typing import Any, NamedTuple

import numpy as np

from draftsmith.compiled import inlined

LENGTHS = (0, 1, 2, 8, 32)
"""Length of a context by its order, the index in this tuple. If a context is unknown, all longer
ones are unknown, too."""
ORDERS = len(LENGTHS)
LONGEST = LENGTHS[-1]
MAX_FOLLOWERS = 64
"""Maximum number of followers of a context; the newest are kept."""
FREQUENT = 8
"""Number of most frequent tokens that are listed."""

SPANS = (1, *LENGTHS[1:])
"""Number of tokens in the hash of an entry. Order 0 has an entry for each token."""
PRIME = 2**31 - 1
"""Modulus of the polynomial hashes; a product of two hashes fits into 63 bits."""
RADIX, SPREAD = 2**20 + randbelow(2**30), 2**30 + 2 * randbelow(2**29) + 1
"""Base of the hashes, and factor that spreads them over the slots. They are equal in all indexes of
a process, so that a context has the same hash in each."""

_I4 = np.int32
CONTEXT = np.dtype(
    [
        ("hash", _I4),
        ("order", _I4),
        ("count", _I4),  # number of occurrences
        ("end", _I4),  # end of the last occurrence
        ("newest", _I4),  # index of its newest follower in `followers`, or -1
        ("followers", _I4),  # number of followers that are kept
    ],
    align=True,
)
FOLLOWER = np.dtype(
    [
        ("token", _I4),
        ("count", _I4),  # number of times that it followed
        ("position", _I4),  # position of the last time
        ("older", _I4),  # index of the next older follower in `followers`, or -1
    ],
    align=True,
)
TOTALS = np.dtype(
    [
        ("length", _I4),  # number of indexed ids
        ("contexts", _I4),  # number of entries in `contexts`
        ("placed", _I4),  # number of these that have a slot
        ("followers", _I4),  # number of entries in `followers`
        ("distinct", _I4),  # number of different tokens
        ("latest", _I4),  # the last token, or -1
        ("previous", _I4),  # the last token that differs from it, or -1
        ("listed", _I4),  # number of entries in `frequent`
        ("frequent", _I4, FREQUENT),  # the most frequent tokens
        ("counts", _I4, FREQUENT),  # number of occurrences of each
        ("radix", _I4),
        ("spread", _I4),
        ("powers", _I4, ORDERS),  # radix to the power of each span
    ],
    align=True,
)


class ContextIndex(NamedTuple):
    """Arrays of an index; they grow by doubling."""

    ids: Any
    """(room,) int32: the texts, followed by room for a path, to look up its contexts."""
    hashes: Any
    """(room + 1,) int32: hashes[i] is the hash of ids[:i]."""
    slots: Any
    """(2^k,) int32: hash table, at most half full; 1 + index in `contexts`, or 0."""
    contexts: Any
    """(room,) CONTEXT."""
    followers: Any
    """(room,) FOLLOWER."""
    totals: Any
    """(1,) TOTALS."""

    @property
    def length(self) -> int:
        """Number of indexed ids."""
        return int(self.totals["length"][0])

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(int(array.nbytes) for array in self)


def new_index() -> ContextIndex:
    """Return an empty index."""
    totals = np.zeros(1, TOTALS)
    totals["latest"] = totals["previous"] = -1
    totals["radix"], totals["spread"] = RADIX, SPREAD
    totals["powers"] = [pow(RADIX, span, PRIME) for span in SPANS]
    ids, hashes, slots = (np.zeros(size, np.int32) for size in (1, 2, 2))
    return ContextIndex(ids, hashes, slots, np.zeros(1, CONTEXT), np.zeros(1, FOLLOWER), totals)


def with_ids(index: ContextIndex, length: int, ids: Sequence[int] | Any, room: int) -> ContextIndex:
    """Return the index with `ids` after its first `length` ids, and room for `room` more.

    The ids are not indexed yet (see `extend`). Do not use the old index afterwards, unless this
    call failed or was interrupted.
    """
    end = length + len(ids)
    new = end - index.length
    contexts = int(index.totals["contexts"][0]) + ORDERS * new
    followers = int(index.totals["followers"][0]) + (ORDERS - 1) * new
    index = index._replace(
        ids=_grown(index.ids, end + room),
        hashes=_grown(index.hashes, end + room + 1),
        contexts=_grown(index.contexts, contexts),
        followers=_grown(index.followers, followers),
    )
    if len(index.slots) < 2 * contexts:
        slots = np.zeros(1 << (2 * contexts - 1).bit_length(), np.int32)
        index = index._replace(slots=slots, totals=index.totals.copy())
        index.totals["placed"] = 0
    index.ids[length:end] = ids
    return index


def _grown(array: Any, size: int) -> Any:
    """Return the array, or a copy of it with room for at least `size` items."""
    if len(array) >= size:
        return array
    more = np.zeros(max(size, 2 * len(array)), array.dtype)
    as_bytes(more)[: array.nbytes] = as_bytes(array)
    return more


def as_bytes(array: Any) -> Any:
    """Return a byte view of an array of records; numpy copies it 30 times faster."""
    return array.view(np.uint8)


def copied(array: Any) -> Any:
    """Return a copy of an array of records."""
    return as_bytes(array).copy().view(array.dtype)


@inlined
def extend(index: ContextIndex, end: int, count_from: int, floor: int) -> None:
    """Index the new ids of ids[:end].

    Ids before `count_from` are used as context only. No context begins before `floor`.
    """
    totals = index.totals[0]
    start = totals.length
    extend_hashes(index, start, end)
    for position in range(max(start, count_from), end):
        token = index.ids[position]
        for order in range(ORDERS):
            if LENGTHS[order] > position - floor:
                break
            context = count_context(index, order, position if order else position + 1)
            if order:
                count_follower(index, context, position)
                continue
            count = index.contexts[context].count
            if count == 1:
                totals.distinct += 1
            rank(index, token, count)
        if token != totals.latest:
            totals.previous, totals.latest = totals.latest, token
    totals.length = end


@inlined
def extend_hashes(index: ContextIndex, start: int, end: int) -> None:
    """Compute the hashes of ids[start:end]; earlier ids must have hashes."""
    radix = index.totals[0].radix
    for i in range(start, end):
        index.hashes[i + 1] = (index.hashes[i] * radix + index.ids[i] + 1) % PRIME


@inlined
def hash_of(index: ContextIndex, order: int, end: int) -> int:
    """Return the hash for an entry of this order that ends at `end`."""
    start = index.hashes[end - SPANS[order]]
    return (index.hashes[end] - start * index.totals[0].powers[order]) % PRIME


@inlined
def find(index: ContextIndex, order: int, key: int, ids: Any, end: int) -> int:
    """Return the index of the context with the hash `key` that ends at `end` of `ids`.

    If it is unknown, return -1 - slot, with the slot that it would get. For order 0 only the key
    counts, which is 1 + token.
    """
    span, mask = SPANS[order], len(index.slots) - 1
    start = end - span if span > 1 else end
    slot = ((key * index.totals[0].spread + order) >> 16) & mask
    while index.slots[slot]:
        place = index.slots[slot] - 1
        context = index.contexts[place]
        if context.hash == key and context.order == order:
            shift, same = context.end - end, True
            for i in range(start, end):
                if index.ids[shift + i] != ids[i]:
                    same = False
                    break
            if same:
                return place
        slot = (slot + 1) & mask
    return -1 - slot


@inlined
def give_slots(index: ContextIndex) -> None:
    """Assign slots to the contexts without one, after the table has grown."""
    totals, mask = index.totals[0], len(index.slots) - 1
    for place in range(totals.placed, totals.contexts):
        context = index.contexts[place]
        slot = ((context.hash * totals.spread + context.order) >> 16) & mask
        while index.slots[slot]:
            slot = (slot + 1) & mask
        index.slots[slot] = place + 1
    totals.placed = totals.contexts


@inlined
def count_context(index: ContextIndex, order: int, end: int) -> int:
    """Count one more occurrence of the context that ends at `end`; return its index."""
    key = hash_of(index, order, end)
    place = find(index, order, key, index.ids, end)
    if place < 0:
        totals, slot = index.totals[0], -1 - place
        place = totals.contexts
        totals.contexts = totals.placed = place + 1
        index.slots[slot] = place + 1
        new = index.contexts[place]
        new.hash, new.order, new.count, new.followers, new.newest = key, order, 0, 0, -1
    context = index.contexts[place]
    context.count += 1
    context.end = end
    return place


@inlined
def count_follower(index: ContextIndex, place: int, position: int) -> None:
    """Make the token at `position` the newest follower of the context with index `place`."""
    followers, context, token = index.followers, index.contexts[place], index.ids[position]
    before = newer = -1  # the last two followers that were visited
    at = context.newest
    while at >= 0 and followers[at].token != token:
        before, newer, at = newer, at, followers[at].older
    if at < 0:
        if context.followers < MAX_FOLLOWERS:
            at, newer = index.totals[0].followers, -1
            index.totals[0].followers += 1
            context.followers += 1
            followers[at].older = -1
        else:  # reuse the entry of the oldest follower
            at, newer = newer, before
        followers[at].token, followers[at].count = token, 0
    if newer >= 0:
        followers[newer].older = followers[at].older
    if context.newest != at:
        followers[at].older = context.newest
        context.newest = at
    followers[at].count += 1
    followers[at].position = position


@inlined
def rank(index: ContextIndex, token: int, count: int) -> None:
    """Update the list of the most frequent tokens; of equal counts the latest token is first."""
    totals = index.totals[0]
    tokens, counts, listed = totals.frequent, totals.counts, totals.listed
    at = 0
    while at < listed and tokens[at] != token:
        at += 1
    if at == listed:
        if listed < FREQUENT:
            totals.listed += 1
        elif count >= counts[listed - 1]:
            at = listed - 1
        else:
            return
    while at and counts[at - 1] <= count:
        tokens[at], counts[at] = tokens[at - 1], counts[at - 1]
        at -= 1
    tokens[at], counts[at] = token, count
