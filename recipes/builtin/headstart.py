"""Initial weights under which the network copies before it has seen a single token.

A network this small needs millions of tokens before heads that copy form by chance, and on two
cores that is a large part of the whole run. The circuit is well known, so it is written down
instead of waited for; it is only where training starts, and every weight of it stays trainable.

* In layer 0 three heads look one, two and three places back (a direction that all embeddings share,
  turned by the rotary positions) and write a part of what stands there into spaces of their own.
* In layer 1 two heads look three and six places back at those spaces, so that every place knows
  the nine tokens before it.
* In layer 2 every head compares the present token and the eight before it with the nine before each
  place. Where most of them agree, the token at that place is what came next last time, and is
  written out. Nine, because in code three often agree by chance; and most, because in an edit some
  of them have changed.

The comparison uses only the rotary pairs that turn slowly: with the others, what agrees would
depend on how far away it is.
"""

from __future__ import annotations

import math

import torch

from model import Attention, TinyLlama

NEAR = 3  # heads of layer 0 that look back
BACKS = 9  # how many tokens are compared
FAST_PAIRS = 6  # rotary pairs that tell neighbouring places apart


def slow_pairs(network: TinyLlama) -> list[int]:
    """Rotary pairs that turn less than a radian over half the context."""
    half = network.shape.head_dim // 2
    rates = [network.shape.rope_theta ** (-pair / half) for pair in range(half)]
    return [pair for pair, rate in enumerate(rates) if rate * network.shape.context / 2 < 1.0]


@torch.no_grad()
def head_start(
    network: TinyLlama,
    sharp: float = 8.0,
    written: float = 1.5,
    match: float = 4.0,
    output: float = 20.0,
) -> None:
    """Write the circuit into freshly made weights. The gains were found by trying a few."""
    shape = network.shape
    if shape.layers < 3 or shape.heads < NEAR:
        raise ValueError("the circuit needs three layers of three heads")
    width, half, group = shape.head_dim, shape.head_dim // 2, shape.heads // shape.kv_heads
    random = torch.Generator().manual_seed(7)
    basis = torch.linalg.qr(torch.randn(shape.hidden, shape.hidden, generator=random))[0].T
    shared, rest = basis[0], basis[1:]
    table = network.model.embed_tokens.weight
    table -= (table @ shared)[:, None] * shared
    typical = table.norm(dim=1).mean()
    # Adding the same vector to every row of a tied table changes no probability.
    table += typical * shared

    size = max(1, min(width // NEAR, (len(rest) - 2 * width) // BACKS))
    spaces = [rest[back * size : (back + 1) * size] for back in range(BACKS)]
    free = rest[BACKS * size :]
    content = free[:size]
    # What the norms of layers 0 and 1 make of a vector as long as an embedding's content.
    gain = math.sqrt(shape.hidden / 2)
    later = math.sqrt(shape.hidden / (2 + NEAR * (2 * written) ** 2 * size / shape.hidden))

    fast = list(range(min(FAST_PAIRS, half)))
    turns = [shape.rope_theta ** (-pair / half) for pair in fast]
    key = torch.zeros(width)
    key[fast] = 1.0

    def look_back(attention: Attention, head: int, places: int, scale: float) -> None:
        query = torch.zeros(width)
        for pair, turn in zip(fast, turns, strict=True):
            # Turned so that it lines up with the key that many places earlier.
            query[pair] = math.cos(turn * places)
            query[pair + half] = -math.sin(turn * places)
        rows = slice(head * width, (head + 1) * width)
        strength = sharp * math.sqrt(width) * gain / scale**2
        attention.q_proj.weight[rows] = torch.outer(strength * query, shared)
        attention.o_proj.weight[:, rows] = 0

    first, second, third = (layer.self_attn for layer in network.model.layers[:3])
    for start in range(0, shape.kv_heads * width, width):
        first.k_proj.weight[start : start + width] = torch.outer(key, shared) / gain
        first.v_proj.weight[start : start + width] = 0
        first.v_proj.weight[start : start + size] = content * 2 / gain
    for head in range(NEAR):
        look_back(first, head, head + 1, gain)
        first.o_proj.weight[:, head * width : head * width + size] = spaces[head].T * written

    start = (shape.kv_heads - 1) * width
    second.k_proj.weight[start : start + width] = torch.outer(key, shared) / later
    second.v_proj.weight[start : start + width] = 0
    second.v_proj.weight[start : start + NEAR * size] = torch.cat(spaces[:NEAR]) / later
    for turn, head in enumerate(range(shape.heads - 2, shape.heads), start=1):
        look_back(second, head, NEAR * turn, later)
        target = torch.cat(spaces[NEAR * turn : NEAR * (turn + 1)])
        second.o_proj.weight[:, head * width : head * width + len(target)] = target.T

    slow = slow_pairs(network)
    places = torch.tensor([*slow, *(pair + half for pair in slow)])
    for part in range(shape.kv_heads):
        keys, queries = torch.zeros(width, shape.hidden), torch.zeros(width, shape.hidden)
        for back, used in enumerate(places.tensor_split(BACKS)):
            # Every group of heads compares other dimensions, so that their errors differ.
            chosen = (torch.arange(len(used)) + part * len(used)) % size
            keys[used] = spaces[back][chosen]
            queries[used] = spaces[back - 1][chosen] if back else content[chosen] * 2 * written
        rows = slice(part * width, (part + 1) * width)
        values = free[part * width % (len(free) - width + 1) :][:width]
        third.k_proj.weight[rows] = keys * match / written
        third.v_proj.weight[rows] = values / math.sqrt(shape.hidden)
        for head in range(part * group, (part + 1) * group):
            rows = slice(head * width, (head + 1) * width)
            third.q_proj.weight[rows] = queries * match / written
            third.o_proj.weight[:, rows] = values.T * output * typical
