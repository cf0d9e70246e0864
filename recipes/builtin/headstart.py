"""Initial weights under which the network copies before it has seen a single token.

A network this small needs millions of tokens before heads that copy form by chance, and on two
cores that is a large part of the whole run. The circuit is well known, so it is written down
instead of waited for; it is only where training starts, and every weight of it stays trainable.

* In layer 0 three heads look one, two and three places back (a direction that all embeddings share,
  turned by the rotary positions) and write a part of what stands there into spaces of their own.
* In layer 1 one head looks three places back and copies those three spaces into three more, which
  so hold the tokens four, five and six places back.
* In layers 2 and 3 every head compares the present token and the five before it with the six
  tokens before each place. Where they agree, the token at that place is what came next last time,
  and is written out.

The comparison uses only the rotary pairs that turn slowly: with the others, what agrees would
depend on how far away it is. Embeddings start without any part in the six spaces, so that what the
heads write there is not blurred.

Accuracy on the copied tokens of held-out edits before any training: 0.67 with three tokens that
have to agree and embeddings everywhere, 0.85 with clean spaces, 0.94 with six tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model import Attention, TinyLlama

HOP = 3  # tokens that layer 0 looks back, and that layer 1 looks further
BACKS = 2 * HOP  # how many tokens have to agree
FAST_PAIRS = 6  # rotary pairs that tell neighbouring places apart
MATCH_LAYERS = (2, 3)


class Circuit:
    """The gains (found by trying a few), and the directions that the circuit uses."""

    sharp = 10.0  # how clearly a head looks at one place
    written = 1.5  # size of what layer 0 writes
    hop = 0.15  # of what layer 1 writes, whose input is larger
    match = 2.8  # how clearly agreement wins
    output = 2.5  # size of the answer
    logits = 3.0  # the last norm's gain: how sure the network is

    def __init__(self, network: TinyLlama) -> None:
        shape = network.shape
        if shape.layers <= max(MATCH_LAYERS):
            raise ValueError(f"head_start needs {max(MATCH_LAYERS) + 1} layers, not {shape.layers}")
        random = torch.Generator().manual_seed(7)
        basis = torch.linalg.qr(torch.randn(shape.hidden, shape.hidden, generator=random))[0].T
        self.size = min(shape.head_dim // HOP - 1, shape.hidden // 12)
        self.shared = basis[0]
        spaces = basis[1 : 1 + BACKS * self.size]
        self.spaces = spaces.view(BACKS, self.size, shape.hidden)
        self.free = basis[1 + BACKS * self.size :]
        self.content = self.free[: self.size]
        self.gain = math.sqrt(shape.hidden / 2)  # what the first norm makes of the shared direction
        self.half = shape.head_dim // 2
        self.turns = [shape.rope_theta ** (-pair / self.half) for pair in range(self.half)]
        self.random = random

    def slow_places(self, context: int) -> Tensor:
        """Places of a head whose rotary pairs turn less than a radian over half the context."""
        slow = [pair for pair, turn in enumerate(self.turns) if turn * context / 2 < 1.0]
        places = torch.tensor([*slow, *(pair + self.half for pair in slow)])
        return places[torch.randperm(len(places), generator=self.random)]

    @torch.no_grad()
    def protect(self, network: TinyLlama) -> None:
        """Keep the spaces free of everything but what the circuit writes there."""
        spaces = self.spaces.flatten(0, 1)
        table = network.model.embed_tokens.weight
        table -= (table @ spaces.T) @ spaces
        for layer in network.model.layers[: max(MATCH_LAYERS)]:
            output = layer.mlp.down_proj.weight
            output -= spaces.T @ (spaces @ output)

    def look_back(self, attention: Attention, head: int, back: int) -> None:
        """Make a head attend to the place `back` before."""
        width = 2 * self.half
        group = head * attention.shape.kv_heads // attention.shape.heads
        key, query = torch.zeros(width), torch.zeros(width)
        for pair in range(min(FAST_PAIRS, self.half)):
            key[pair] = 1.0
            # Turned so that it lines up with the key that many places earlier.
            query[pair] = math.cos(self.turns[pair] * back)
            query[pair + self.half] = -math.sin(self.turns[pair] * back)
        query *= self.sharp * math.sqrt(width)
        keys, queries = slice(group * width, (group + 1) * width), slice(head * width, None)
        attention.k_proj.weight[keys] = torch.outer(key, self.shared) / self.gain
        attention.q_proj.weight[queries][:width] = torch.outer(query, self.shared) / self.gain


@torch.no_grad()
def head_start(network: TinyLlama) -> None:
    """Write the circuit into freshly made weights."""
    shape, circuit = network.shape, Circuit(network)
    width, size = shape.head_dim, circuit.size
    typical = clear_embeddings(network, circuit)
    network.model.norm.weight.fill_(circuit.logits)

    first, second = network.model.layers[0].self_attn, network.model.layers[1].self_attn
    for group in range(shape.kv_heads):
        values = first.v_proj.weight[group * width : (group + 1) * width]
        values.zero_()
        values[:size] = circuit.content * 2 / circuit.gain
    for back in range(HOP):
        circuit.look_back(first, back, back + 1)
        output = first.o_proj.weight[:, back * width : (back + 1) * width]
        output.zero_()
        output[:, :size] = circuit.spaces[back].T * circuit.written

    circuit.look_back(second, 0, HOP)
    near, far = circuit.spaces[:HOP].flatten(0, 1), circuit.spaces[HOP:].flatten(0, 1)
    second.v_proj.weight[:width].zero_()
    second.v_proj.weight[: len(near)] = near
    second.o_proj.weight[:, : width * shape.heads // shape.kv_heads].zero_()
    second.o_proj.weight[:, : len(far)] = far.T * circuit.hop

    for number, layer in enumerate(MATCH_LAYERS):
        attention = network.model.layers[layer].self_attn
        for group in range(shape.kv_heads):
            write_match(attention, circuit, group, number * shape.kv_heads + group, typical)


def clear_embeddings(network: TinyLlama, circuit: Circuit) -> Tensor:
    """Embeddings without a part in the spaces, with one direction in common; their typical norm."""
    table = network.model.embed_tokens.weight
    before = table.norm(dim=1).mean()
    taken = torch.cat((circuit.shared[None], circuit.spaces.flatten(0, 1)))
    table -= (table @ taken.T) @ taken
    table *= before / table.norm(dim=1).mean()
    # Adding the same vector to every row of a tied table changes no probability.
    table += before * circuit.shared
    return before


def write_match(
    attention: Attention, circuit: Circuit, group: int, turn: int, typical: Tensor
) -> None:
    """Let one group of heads find the place where the last tokens agree, and write its token."""
    shape, width = attention.shape, attention.shape.head_dim
    keys, queries = torch.zeros(width, shape.hidden), torch.zeros(width, shape.hidden)
    for back, used in enumerate(circuit.slow_places(shape.context).tensor_split(BACKS)):
        # Every group of heads compares other dimensions, so that their errors differ.
        chosen = (torch.arange(len(used)) + turn * len(used) + back) % circuit.size
        here = circuit.spaces[back - 1] if back else circuit.content * 2 * circuit.written
        keys[used], queries[used] = circuit.spaces[back][chosen], here[chosen]
    free = circuit.free
    values = free[turn * width % (len(free) - width + 1) :][:width]
    rows = slice(group * width, (group + 1) * width)
    attention.k_proj.weight[rows] = keys * circuit.match / circuit.written
    attention.v_proj.weight[rows] = values / math.sqrt(shape.hidden)
    each = shape.heads // shape.kv_heads
    for head in range(group * each, (group + 1) * each):
        rows = slice(head * width, (head + 1) * width)
        attention.q_proj.weight[rows] = queries * circuit.match / circuit.written
        attention.o_proj.weight[:, rows] = values.T * circuit.output * typical
