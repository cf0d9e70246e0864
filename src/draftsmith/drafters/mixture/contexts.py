"""Contexts: what followed the last 0, 1, 2, 8 and 32 tokens before, in one text or in several.

A bank keeps for every context of its texts which tokens followed it, the newest first, how often,
and where last; and of every token how often it was there, and where. A context is found by a hash
of its tokens, which are compared with the text before it counts. Hashes are drawn anew in every
process, so nobody can write a text whose contexts collide; no result depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from secrets import randbelow
from typing import NamedTuple

from draftsmith.drafters.mixture.compiled import Ints, grown, inner, ints

LENGTHS = (0, 1, 2, 8, 32)
"""How many last tokens each context has; where one is unknown, longer ones are."""
ORDERS = len(LENGTHS)
REACH = LENGTHS[-1]
KEPT = 64
"""Different followers of a context: the latest."""
FREQUENT = 8

SPANS = (1, *LENGTHS[1:])
"""Tokens that a node is found by; that of order 0 counts one token, whatever came before it."""
PRIME = 2**31 - 1
"""Of polynomial hashes: products of two fit into 63 bits."""
_DRAWN = 2**20 + randbelow(2**30), 2**30 + 2 * randbelow(2**29) + 1
"""RADIX and SPREAD of all banks, so that a context has one hash in all of them."""

KEY, ORDER, TOTAL, END, HEAD, KINDS, NODE = range(7)
"""Fields of a node, and how many: hash, place in LENGTHS, times seen, where it last ended, newest
follower or -1, followers kept."""
TOKEN, COUNT, PLACE, NEXT, FOLLOWER = range(5)
"""Fields of a follower, and how many: token, times it followed, where last, next older or -1."""
(
    LENGTH, NODES, PLACED, FOLLOWERS, KNOWN, LATEST, BEFORE, LISTED, RADIX, SPREAD, POWERS, FIRST,
) = (*range(11), 10 + ORDERS)  # fmt: skip
"""Places in `marks`: tokens indexed; nodes in use, and those that have slots; followers in use;
different tokens; the latest token, and the latest other one; how many are on the list of the most
frequent; what hashes are made with; that list, each token with its count."""
MARKS = FIRST + 2 * FREQUENT


class Bank(NamedTuple):
    """Contexts in arrays, which grow by doubling."""

    ids: Ints
    """The texts; behind them is room for a path that is asked about."""
    prefix: Ints
    """[i]: hash of ids[:i]."""
    slots: Ints
    """Hash table of nodes, at most half full: 1 + node, 0 where empty; a power of two long."""
    nodes: Ints
    followers: Ints
    marks: Ints


def new_bank() -> Bank:
    """A bank without a text."""
    marks = ints(MARKS)
    marks[RADIX], marks[SPREAD] = _DRAWN
    for order, span in enumerate(SPANS):
        marks[POWERS + order] = pow(int(marks[RADIX]), span, PRIME)
    marks[LATEST] = marks[BEFORE] = -1
    return Bank(ints(1), ints(2), ints(2), ints(NODE), ints(FOLLOWER), marks)


def put(bank: Bank, length: int, ids: Sequence[int], room: int) -> Bank:
    """The bank with `ids` behind its first `length`, to be indexed, and `room` for more.

    Where this fails or is interrupted, the old bank goes on; else it is to be used no more.
    """
    end, marks = length + len(ids), bank.marks
    new = end - int(marks[LENGTH])
    nodes = int(marks[NODES]) + ORDERS * new
    bank = bank._replace(
        ids=grown(bank.ids, end + room),
        prefix=grown(bank.prefix, end + room + 1),
        nodes=grown(bank.nodes, nodes * NODE),
        followers=grown(bank.followers, (int(marks[FOLLOWERS]) + (ORDERS - 1) * new) * FOLLOWER),
    )
    if len(bank.slots) < 2 * nodes:
        bank = bank._replace(slots=ints(1 << (2 * nodes - 1).bit_length()), marks=ints(MARKS))
        bank.marks[:] = marks
        bank.marks[PLACED] = 0
    bank.ids[length:end] = ids
    return bank


@inner
def hash_on(bank: Bank, start: int, end: int) -> None:
    """Hash ids[start:end] behind what is hashed."""
    for place in range(start, end):
        key = bank.prefix[place] * bank.marks[RADIX] + bank.ids[place] + 1
        bank.prefix[place + 1] = key % PRIME


@inner
def hash_of(bank: Bank, order: int, end: int) -> int:
    """Hash of the tokens before `end` that a node of this order is found by."""
    start = bank.prefix[end - SPANS[order]]
    return (bank.prefix[end] - start * bank.marks[POWERS + order]) % PRIME


@inner
def find(bank: Bank, order: int, key: int, ids: Ints, end: int) -> int:
    """The node of the context that ends at `end` of `ids`; where it is unknown, -1 - its slot."""
    span, mask = SPANS[order], len(bank.slots) - 1
    start = end - span if span > 1 else end  # of one token its key tells which it is
    slot = ((key * bank.marks[SPREAD] + order) >> 16) & mask
    while bank.slots[slot]:
        node = bank.slots[slot] - 1
        at = node * NODE
        if bank.nodes[at + KEY] == key and bank.nodes[at + ORDER] == order:
            here, same = bank.nodes[at + END] - end, True
            for i in range(start, end):
                if bank.ids[here + i] != ids[i]:
                    same = False
                    break
            if same:
                return node
        slot = (slot + 1) & mask
    return -1 - slot


@inner
def rehash(bank: Bank) -> None:
    """Give slots to the nodes that have none, after the table has grown."""
    mask = len(bank.slots) - 1
    for node in range(bank.marks[PLACED], bank.marks[NODES]):
        key, order = bank.nodes[node * NODE + KEY], bank.nodes[node * NODE + ORDER]
        slot = ((key * bank.marks[SPREAD] + order) >> 16) & mask
        while bank.slots[slot]:
            slot = (slot + 1) & mask
        bank.slots[slot] = node + 1
    bank.marks[PLACED] = bank.marks[NODES]


@inner
def see(bank: Bank, order: int, end: int) -> int:
    """Count one more occurrence of the context that ends at `end`; its node."""
    key = hash_of(bank, order, end)
    node = find(bank, order, key, bank.ids, end)
    if node < 0:
        slot, node = -1 - node, bank.marks[NODES]
        bank.marks[NODES] = bank.marks[PLACED] = node + 1
        bank.slots[slot] = node + 1
        at = node * NODE
        bank.nodes[at + KEY], bank.nodes[at + ORDER] = key, order
        bank.nodes[at + TOTAL], bank.nodes[at + KINDS], bank.nodes[at + HEAD] = 0, 0, -1
    bank.nodes[node * NODE + TOTAL] += 1
    bank.nodes[node * NODE + END] = end
    return node


@inner
def follow(bank: Bank, node: int, place: int) -> None:
    """The token at `place` came after the context: it is its newest follower now."""
    token, at, f = bank.ids[place], node * NODE, bank.followers
    older = previous = -1
    entry = bank.nodes[at + HEAD]
    while entry >= 0 and f[entry * FOLLOWER + TOKEN] != token:
        older, previous, entry = previous, entry, f[entry * FOLLOWER + NEXT]
    if entry < 0:
        if bank.nodes[at + KINDS] < KEPT:
            entry, previous = bank.marks[FOLLOWERS], -1
            bank.marks[FOLLOWERS] += 1
            bank.nodes[at + KINDS] += 1
            f[entry * FOLLOWER + NEXT] = -1
        else:  # in the place of the oldest
            entry, previous = previous, older
        f[entry * FOLLOWER + TOKEN], f[entry * FOLLOWER + COUNT] = token, 0
    if previous >= 0:
        f[previous * FOLLOWER + NEXT] = f[entry * FOLLOWER + NEXT]
    if bank.nodes[at + HEAD] != entry:
        f[entry * FOLLOWER + NEXT] = bank.nodes[at + HEAD]
        bank.nodes[at + HEAD] = entry
    f[entry * FOLLOWER + COUNT] += 1
    f[entry * FOLLOWER + PLACE] = place


@inner
def index(bank: Bank, end: int, quiet: int, floor: int) -> None:
    """Index what is new of ids[:end], but for what lies before `quiet`: that is only context.

    Contexts begin at `floor` or later.
    """
    marks = bank.marks
    start = marks[LENGTH]
    hash_on(bank, start, end)
    for place in range(max(start, quiet), end):
        token = bank.ids[place]
        for order in range(ORDERS):
            if LENGTHS[order] > place - floor:
                break
            node = see(bank, order, place if order else place + 1)
            if order:
                follow(bank, node, place)
                continue
            times = bank.nodes[node * NODE + TOTAL]
            if times == 1:
                marks[KNOWN] += 1
            rank(marks, token, times)
        if token != marks[LATEST]:
            marks[BEFORE], marks[LATEST] = marks[LATEST], token
    marks[LENGTH] = end


@inner
def rank(marks: Ints, token: int, times: int) -> None:
    """Keep the list of the most frequent tokens, the latest first among equals."""
    listed = marks[LISTED]
    at = 0
    while at < listed and marks[FIRST + 2 * at] != token:
        at += 1
    if at == listed:
        if listed < FREQUENT:
            marks[LISTED] += 1
        elif times >= marks[FIRST + 2 * listed - 1]:
            at = listed - 1
        else:
            return
    while at and marks[FIRST + 2 * at - 1] <= times:
        for field in range(2):
            marks[FIRST + 2 * at + field] = marks[FIRST + 2 * at - 2 + field]
        at -= 1
    marks[FIRST + 2 * at], marks[FIRST + 2 * at + 1] = token, times
