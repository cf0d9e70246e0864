"""Initial weights under which the network copies before it has seen a single token.

A network this small needs millions of tokens before heads that copy form by chance, and on two
cores that is a large part of the whole run. The circuit is well known, so it is written down
instead of waited for; it is only where training starts, and every weight of it stays trainable.

* Layer 0, heads 0 and 1 look one and two places back (a constant direction `steady` in every
  embedding, turned by the rotary positions) and write what stands there to spaces of their own.
* Layers 1 and 2, first group of heads: the query is the present token, the key is the token before
  a place; where they agree, the token at that place is what came next last time; it is written out.

Queries and keys for agreement use only the rotary pairs that turn slowly: the others would make
what agrees depend on how far away it is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model import TinyLlama


def slow_pairs(network: TinyLlama) -> list[int]:
    """Rotary pairs that turn less than a radian over half the context."""
    half = network.shape.head_dim // 2
    rates = [network.shape.rope_theta ** (-pair / half) for pair in range(half)]
    return [pair for pair, rate in enumerate(rates) if rate * network.shape.context / 2 < 1.0]


@torch.no_grad()
def head_start(
    network: TinyLlama,
    steady: float = 1.0,
    sharp: float = 8.0,
    written: float = 1.2,
    match: float = 3.5,
    output: float = 12.0,
) -> None:
    """Write the circuit into freshly made weights."""
    shape = network.shape
    width, half, group = shape.head_dim, shape.head_dim // 2, shape.heads // shape.kv_heads
    random = torch.Generator().manual_seed(7)
    basis = torch.linalg.qr(torch.randn(shape.hidden, shape.hidden, generator=random))[0].T
    direction, rest = basis[0], basis[1:]
    table = network.model.embed_tokens.weight
    table -= (table @ direction)[:, None] * direction
    typical = table.norm(dim=1).mean()
    table += steady * typical * direction
    # What a normed embedding is multiplied by, so that a gain of 1 below keeps its length.
    gain = math.sqrt(shape.hidden) / math.sqrt(1 + steady**2)
    size = (shape.hidden - 1) // 4 if shape.hidden < 4 * width + 1 else width
    content, spaces = rest[:size], [rest[size : 2 * size], rest[2 * size : 3 * size]]

    first = network.model.layers[0].self_attn
    fast = range(min(6, half))
    turns = [shape.rope_theta ** (-pair / half) for pair in range(half)]
    key = torch.zeros(width)
    for pair in fast:
        key[pair] = 1.0
    first.k_proj.weight[:width] = torch.outer(key, direction) / (gain * steady)
    for head in range(min(2, group)):
        query = torch.zeros(width)
        for pair in fast:
            # Turned so that it lines up with a key that is `head` + 1 places back.
            query[pair] = math.cos(turns[pair] * (head + 1))
            query[pair + half] = -math.sin(turns[pair] * (head + 1))
        rows = slice(head * width, (head + 1) * width)
        first.q_proj.weight[rows] = (
            sharp * math.sqrt(width) * torch.outer(query, direction) / (gain * steady)
        )
        first.o_proj.weight[:, rows] = 0
        first.o_proj.weight[:, head * width : head * width + size] = spaces[head].T * written
    first.v_proj.weight[:width] = 0
    first.v_proj.weight[:size] = content * 2 * typical / (gain * typical)
    slow = slow_pairs(network)
    places = [*slow, *(pair + half for pair in slow)]
    outputs = rest[3 * size :]
    for number, layer in enumerate(network.model.layers[1:3]):
        attention = layer.self_attn
        count = min(len(places), size)
        chosen = torch.arange(count) + number * count if 2 * count <= size else torch.arange(count)
        places_used = torch.tensor(places[:count])
        keys, queries = torch.zeros(width, shape.hidden), torch.zeros(width, shape.hidden)
        keys[places_used] = spaces[0][chosen]
        queries[places_used] = content[chosen]
        attention.k_proj.weight[:width] = keys * match
        values: Tensor = torch.cat((content, outputs))[number * size : (number + 1) * size]
        attention.v_proj.weight[:width] = 0
        attention.v_proj.weight[: len(values)] = values / math.sqrt(shape.hidden)
        for head in range(group):
            rows = slice(head * width, (head + 1) * width)
            attention.q_proj.weight[rows] = queries * match
            attention.o_proj.weight[:, rows] = 0
            attention.o_proj.weight[:, head * width : head * width + len(values)] = (
                values.T * output * typical
            )
