"""Initial weights with which the network copies before any training.

A network this small needs millions of tokens before copying heads form by chance, and they compare
about three tokens: too few to keep the place in a file with repeated lines. The circuit is known,
so it is written directly, layer by layer below. It finds the place with the past (six tokens and a
bag of some dozens) nearest to the present one, and outputs the token after that place. The effect
of each part is in `docs/lab-notes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from circuit import BACKS, BAG_HEAD, HOP, MATCH, PAIRS, Circuit
from common import ASSISTANT, FILE, ID
from substitute import (
    relate,
    write_markers,
    write_mending,
    write_signs,
    write_silence,
    write_substitution,
)
from torch import Tensor

from model import Network

ANCHOR, MARKED = ID[FILE], ID[ASSISTANT]
PART = 0.1  # of a scalar among the hidden dimensions: small, so that it does not change the norm


@torch.no_grad()
def head_start(network: Network, sample: Tensor, tokens: Sequence[str] | None = None) -> Circuit:
    """Write the circuit into new weights; a sample of text sets the scales.

    With `tokens`, the text of each id, it also substitutes words (`substitute`).
    """
    circuit = Circuit(network, sample, tokens)
    write_embeddings(circuit, tokens)
    network.model.norm.weight.fill_(circuit.logits)
    for layer in circuit.layers[: MATCH + 1] if tokens else circuit.layers[:MATCH]:
        layer.mlp.down_proj.weight.zero_()
    for layer in circuit.layers[:MATCH]:
        for projection in layer.self_attn.children():
            projection.weight.zero_()
    write_past(circuit)
    if tokens:
        write_signs(circuit)
    scale = norm_scale(circuit.states(1))
    write_hop(circuit, scale)
    write_answered(circuit, scale)
    if tokens:
        write_mending(circuit)
    compared = choose(circuit)
    write_lengths(circuit, compared)
    write_match(circuit, compared)
    if tokens:
        write_substitution(circuit)
    circuit.freeze()
    return circuit


def norm_scale(x: Tensor) -> float:
    """Factor by which a norm multiplies states, on average."""
    return float(x.pow(2).mean(-1).rsqrt().mean())


def write_embeddings(circuit: Circuit, tokens: Sequence[str] | None) -> None:
    """Write embeddings without a part in the circuit's spaces, with one direction in common.

    The marker before a file has a larger part in the compared directions. For a while after it, the
    nearest place is the one at the same distance from the other such marker.
    """
    table, typical = circuit.table, circuit.typical
    table.copy_((table @ circuit.free.T) @ circuit.free)
    table *= typical / table.norm(dim=1, keepdim=True)
    if tokens:
        relate(circuit, tokens)
    row = table[ANCHOR].clone()
    compared = circuit.content.T @ (circuit.content @ row)
    size = typical * circuit.anchor * math.sqrt(circuit.size / len(circuit.free))
    rest = (row - compared) / (row - compared).norm()
    table[ANCHOR] = compared / compared.norm() * size + rest * math.sqrt(typical**2 - size**2)
    table[MARKED] = 0.6 * table[MARKED] + 0.8 * typical * circuit.mark
    if circuit.signs:
        write_markers(circuit)
        table[ANCHOR] = 0.8 * table[ANCHOR] + 0.6 * typical * circuit.signs.filed
    # Adding the same vector to every row of a tied table changes no probability.
    table += circuit.common * circuit.shared


def write_past(circuit: Circuit) -> None:
    """Layer 0: three heads look one, two and three places back, one averages the last few dozen.

    Each writes a part of the token there into its own space.
    """
    scale, size = norm_scale(circuit.states(0)), circuit.size
    gain = circuit.common * scale
    queries, keys, values, output = circuit.heads(0)
    known = torch.cat((circuit.content, circuit.words))
    values[:, : 3 * size] = known / scale
    for back in range(HOP):
        circuit.look_back(0, back, back + 1, gain)
        output[back, :, :size] = circuit.spaces[back].T * circuit.written
    query = torch.zeros(circuit.width)
    query[torch.tensor(bag_pairs(circuit))] = circuit.bag_sharp
    circuit.point(0, BAG_HEAD, query, gain)
    # A bag restarts at a file: tokens before its marker do not identify a place in it.
    row = circuit.table[ANCHOR]
    seen = known.T @ (known @ row)
    key = seen / (seen @ row) / scale * circuit.anew
    keys[BAG_HEAD // circuit.each, circuit.slowest] = key
    queries[BAG_HEAD, circuit.slowest] = circuit.shared / gain * math.sqrt(circuit.width)
    output[BAG_HEAD, :, size : 3 * size] = circuit.bag.T * circuit.bag_written


def bag_pairs(circuit: Circuit) -> range:
    """Return the rotary pairs with which a head averages the last few dozen tokens."""
    first = next(pair for pair, turn in enumerate(circuit.turns) if turn < circuit.bag_turn)
    return range(first, min(first + PAIRS, circuit.half))


def write_hop(circuit: Circuit, scale: float) -> None:
    """Layer 1, head 0: copy what layer 0 wrote three tokens back: tokens four to six back."""
    circuit.look_back(1, 0, HOP, circuit.common * scale)
    near, far = torch.cat(circuit.spaces[:HOP]), torch.cat(circuit.spaces[HOP:])
    if circuit.signs:  # the fourth token back is there already
        near, far = near[circuit.size :], far[circuit.size :]
    _, _, values, output = circuit.heads(1)
    values[0, : len(near)] = near / scale
    output[0, :, : len(far)] = far.T


def write_answered(circuit: Circuit, scale: float) -> None:
    """Layer 1, the first head of the last group: whether the assistant's marker has occurred."""
    queries, keys, values, output = circuit.heads(1)
    head, slowest = -circuit.each, circuit.slowest
    strong = math.sqrt(20 * math.sqrt(circuit.width))
    seen = circuit.mark / float(circuit.table[MARKED] @ circuit.mark) / scale
    keys[-1, slowest] = seen * strong
    queries[head, slowest] = circuit.shared / (circuit.common * scale) * strong
    values[-1, 0] = seen
    output[head, :, 0] = circuit.answered * PART


Compared = list[tuple[Tensor, Tensor]]  # keys and queries of a group, [width, hidden]


def choose(circuit: Circuit) -> Compared:
    """Choose coordinates for each group of heads; they differ, so that their errors differ.

    Only rotary pairs that turn slowly: with others, the similarity would depend on the distance.
    """
    shape = circuit.network.config
    limit = circuit.turned / (shape.max_position_embeddings / 2)
    # The slowest pair holds the length of a key, the next whether the query is in the message.
    slow = [pair for pair, turn in enumerate(circuit.turns) if turn < limit][:-2]
    places = torch.tensor([*slow, *(pair + circuit.half for pair in slow)])
    tokens = round(circuit.share * len(places))
    # Part of a token in its own bag, which a key leaves out, because it is what is looked for.
    turns = torch.tensor([circuit.turns[pair] for pair in bag_pairs(circuit)])
    scores = circuit.bag_sharp * torch.outer(torch.arange(512), turns).cos().sum(1)
    own = circuit.bag_written * float(scores.softmax(0)[0])
    random = torch.Generator().manual_seed(7)
    compared: Compared = []
    for group in range(circuit.groups):
        mixed = places[torch.randperm(len(places), generator=random)]
        keys, queries = torch.zeros(2, circuit.width, shape.hidden_size)
        for back, used in enumerate(mixed[:tokens].tensor_split(BACKS)):
            chosen = (torch.arange(len(used)) + group * len(used) + back) % circuit.size
            here = circuit.spaces[back - 1] if back else circuit.content * circuit.written
            if circuit.signs and not back:  # as the file would have it
                here = here + circuit.mended * circuit.written
            keys[used] = circuit.spaces[back][chosen] * circuit.weights[back]
            queries[used] = here[chosen] * circuit.weights[back]
        used = mixed[tokens:]
        chosen = (torch.arange(len(used)) + group * len(used)) % len(circuit.bag)
        bag, words = circuit.bag[chosen], circuit.words[chosen]
        keys[used] = (bag - own * words) * circuit.bag_weight
        queries[used] = bag * circuit.bag_weight
        compared.append((keys, queries))
    return compared


def write_lengths(circuit: Circuit, compared: Compared) -> None:
    """Layer 1's MLP: the squared length of every key. silu(x) x + silu(-x) (-x) is x squared."""
    layer, x = circuit.layers[MATCH - 1], circuit.states(MATCH - 1)
    turned = circuit.network.model.rotary_emb(x, torch.arange(x.shape[1])[None])
    scale = norm_scale(x + layer.self_attn(layer.input_layernorm(x), turned, None)[0])
    at = 0
    for group, (keys, _) in enumerate(compared):
        rows = keys[keys.abs().sum(1) > 0] / scale
        units = slice(at, at + 2 * len(rows))
        for projection in (layer.mlp.gate_proj, layer.mlp.up_proj):
            projection.weight[units] = torch.cat((rows, -rows))
        layer.mlp.down_proj.weight[:, units] = circuit.lengths[group][:, None] * PART
        at = units.stop


def write_match(circuit: Circuit, compared: Compared) -> None:
    """Layer 2: find the place with the nearest past, and write its token.

    The key has the tokens before a place, its bag and half its squared length; the query has the
    present tokens and bag. Their product is minus half the squared distance, plus a term that all
    keys share. Places inside the answer have a handicap, so that a copy does not follow its own
    repetitions.
    """
    all_queries, all_keys, all_values, output = circuit.heads(MATCH)
    scale, slowest = norm_scale(circuit.states(MATCH)), circuit.slowest
    sharp = math.sqrt(circuit.nearness * math.sqrt(circuit.width)) / scale
    handicap = -circuit.handicap / circuit.nearness * circuit.answered / PART
    said = circuit.output_below if circuit.signs else circuit.output
    for group, (keys, queries) in enumerate(compared):
        keys[slowest] = -0.5 * circuit.lengths[group] / PART
        keys[slowest + circuit.half] = handicap
        queries[[slowest, slowest + circuit.half]] = circuit.shared / circuit.common
        if circuit.signs:
            write_silence(keys, queries, slowest - 1, circuit)
        values, own = circuit.said(group), circuit.heads_of(group)
        all_keys[group] = keys * sharp
        all_queries[own] = queries * sharp
        all_values[group], output[own] = 0.0, 0.0
        all_values[group, : len(values)] = values / math.sqrt(len(circuit.shared))
        output[own, :, : len(values)] = values.T * said * circuit.typical
