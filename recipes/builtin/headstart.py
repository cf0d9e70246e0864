"""Initial weights under which the network copies before it has seen a single token.

A network this small needs millions of tokens before heads that copy form by accident, and what
forms compares three tokens or so: too few to keep its place in a file of repeated lines. The
circuit is well known, so it is written down instead of waited for, layer by layer below. It finds
the place whose past (six tokens and a bag of some dozens) is nearest to the present one, and says
what came next there. What each part gives is in `docs/lab-notes.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import torch
from common import ASSISTANT, FILE, SPECIALS, TEXT_END, USER
from substitute import (
    Signs,
    relate,
    write_markers,
    write_mending,
    write_signs,
    write_silence,
    write_substitution,
)
from torch import Tensor, nn

from model import Network, states

HOP = 3  # tokens that layer 0 looks back, and that layer 1 looks further
BACKS = 2 * HOP  # how many single tokens are compared
BAG_HEAD = HOP  # in layer 0, after those that look back
MATCH = 2  # the layer that compares
PAIRS = 6  # rotary pairs a look-back uses: the fastest; the bag uses as many slower ones
PART = 0.1  # of a scalar among the hidden dimensions: small, so that it does not move the norm


class Circuit:
    """The gains (found by trying a few), and the directions in use."""

    sharp = 10.0  # how clearly a head looks at one place
    written = 1.5  # size of what layer 0 writes, of a single token
    bag_written = 6.0  # and of a bag, which is an average and so smaller
    bag_sharp = 2.0
    bag_turn = 0.03  # radians a token of the fastest pair that forms the bag: about 30 tokens
    weights = (2.2, 1.5, 1.0, 0.7, 0.5, 0.4)  # of the compared tokens, the newest first
    bag_weight = 1.5  # of the bag in the comparison
    anew = 4.0  # how much a marker before a file outweighs other tokens in a bag
    share = 2 / 3  # of the compared dimensions that hold single tokens, the rest hold the bag
    nearness = 200.0  # how clearly the nearest place wins
    handicap = 10.0  # of places inside the answer
    anchor = 2.0  # how much the marker before a file counts more than other tokens
    turned = 0.3  # radians that a compared pair may turn over half the context
    constant = 2.0  # size of what all embeddings share: steadies what the norms divide by
    output = 6.0  # size of the answer
    output_below = 3.0  # and where a substitute must be louder still
    logits = 3.0  # the last norm's gain: how sure the network is

    def __init__(self, network: Network, tokens: Sequence[str] | None = None) -> None:
        """`tokens`: what each id writes; with them, room is kept for `substitute`."""
        shape = network.config
        self.tokens = tokens
        self.width, self.half = shape.head_dim, shape.head_dim // 2
        self.groups = shape.num_key_value_heads
        self.each = shape.num_attention_heads // self.groups
        self.size = min(shape.head_dim // 4, shape.hidden_size // 16)
        bag_size = 2 * self.size
        sizes = (shape.num_hidden_layers, shape.num_attention_heads, self.groups)
        if sizes[0] <= MATCH or sizes[1] <= BAG_HEAD or sizes[2] < 2:
            raise ValueError(
                f"head_start needs {MATCH + 1} layers, {BAG_HEAD + 1} heads and 2 groups of them, "
                f"not {sizes}"
            )
        self.random = torch.Generator().manual_seed(7)
        # Along the axes, so that what rounding does to one part reaches no other.
        widths = [1, *[self.size] * BACKS, bag_size, self.groups, 1, 1]
        widths += [len(fields(Signs)), self.size] if tokens else [0, 0]
        basis = torch.eye(shape.hidden_size)
        parts = basis.split([*widths, shape.hidden_size - sum(widths)])
        self.shared = parts[0][0]
        self.spaces = parts[1 : 1 + BACKS]
        self.bag, self.lengths, mark, answered, signs, self.mended, self.free = parts[1 + BACKS :]
        self.mark, self.answered = mark[0], answered[0]
        self.signs = Signs(*signs) if tokens else None
        self.typical = 0.0  # the length of an embedding
        self.content = self.free[: self.size]
        self.words = self.free[self.size : self.size + bag_size]
        self.turns = network.model.rotary_emb.inv_freq.tolist()
        self.common = 1.0  # size of the shared direction
        self.fixed = torch.empty(0)  # of every embedding, what stays as it is, (vocab, hidden)
        self.space = self.free[3 * self.size]  # with tokens: whether one begins with a space
        self.moving = self.free[3 * self.size + (1 if tokens else 0) :]  # how embeddings may move
        self.lengths_of_moving = torch.empty(0)
        self.written_rows: list[tuple[Tensor, tuple[slice, ...]]] = []  # of matrices that train
        self.kept: list[Tensor] = []

    @torch.no_grad()
    def freeze(self, network: Network) -> None:
        """Let training change only what lies above the circuit, and what it says.

        When the embeddings or the first layers move, what was exact becomes approximate, and the
        copies derail.
        """
        table = network.model.embed_tokens.weight
        parts = table @ self.moving.T
        self.fixed = table - parts @ self.moving
        self.lengths_of_moving = parts.norm(dim=1, keepdim=True)
        match = network.model.layers[MATCH]
        own = [match.input_layernorm, match.self_attn.q_proj, match.self_attn.k_proj]
        if self.signs:  # what is substituted is read beside what this layer says
            own = [match]
        for module in (*network.model.layers[:MATCH], *own):
            module.requires_grad_(False)
        for parameter, part in self.written_rows:
            self.kept.append(parameter[part].clone())

    @torch.no_grad()
    def protect(self, network: Network) -> None:
        """Undo what a step did to the parts of the embeddings that the circuit compares.

        Their lengths stay as well: the first norms divide by them.
        """
        table = network.model.embed_tokens.weight
        parts = table @ self.moving.T
        parts *= self.lengths_of_moving / parts.norm(dim=1, keepdim=True).clamp_min(1e-9)
        table.copy_(self.fixed + parts @ self.moving)
        for (parameter, part), values in zip(self.written_rows, self.kept, strict=True):
            parameter[part] = values

    def heads(self, attention: nn.Module) -> tuple[Tensor, ...]:
        """Views of its matrices: queries (heads, width, hidden), keys and values (groups, …).

        And of what heads write, (heads, hidden, width).
        """
        queries, keys, values = (
            projection.weight.view(-1, self.width, projection.in_features)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        output = attention.o_proj.weight
        return queries, keys, values, output.view(len(output), -1, self.width).transpose(0, 1)

    def heads_of(self, group: int) -> slice:
        """The heads of a group."""
        return slice(group * self.each, (group + 1) * self.each)

    def said(self, group: int) -> Tensor:
        """The free directions that a group of layer 2 writes, (at most width, hidden)."""
        first = group * self.width % max(1, len(self.free) - self.width + 1)
        return self.free[first : first + self.width]

    def bag_pairs(self) -> range:
        first = next(pair for pair, turn in enumerate(self.turns) if turn < self.bag_turn)
        return range(first, min(first + PAIRS, self.half))

    def own(self) -> float:
        """How much of a token its own bag holds: a key leaves it out, being what is looked for."""
        turns = torch.tensor([self.turns[pair] for pair in self.bag_pairs()])
        scores = self.bag_sharp * torch.outer(torch.arange(512), turns).cos().sum(1)
        return self.bag_written * float(scores.softmax(0)[0])

    def look_back(self, attention: nn.Module, head: int, back: int, gain: float) -> None:
        """Make a head attend to the place `back` before."""
        query = torch.zeros(self.width)
        for pair in range(PAIRS):
            # Turned so that it lines up with the key that many places earlier.
            query[pair] = math.cos(self.turns[pair] * back)
            query[pair + self.half] = -math.sin(self.turns[pair] * back)
        self.point(attention, head, query * self.sharp, gain)

    def point(self, attention: nn.Module, head: int, query: Tensor, gain: float) -> None:
        """Give a head the same query everywhere, and a key that shows in the pairs it uses."""
        queries, keys, _, _ = self.heads(attention)
        used = query[: self.half].abs() + query[self.half :].abs() > 0
        keys[head // self.each, : self.half][used] = self.shared / gain
        queries[head] = torch.outer(query * math.sqrt(self.width), self.shared) / gain


ANCHOR, MARKED, ASKING, FIRST = map(SPECIALS.index, (FILE, ASSISTANT, USER, TEXT_END))


@torch.no_grad()
def scales(network: Network, sample: Tensor, layer: int) -> tuple[float, float]:
    """What the two norms of a layer multiply by, on average over the sample (ids, [places])."""
    here = network.model.layers[layer]
    x = states(network, sample[None], layer)
    first = x.pow(2).mean(-1).rsqrt().mean()
    turned = network.model.rotary_emb(x, torch.arange(len(sample))[None])
    x = x + here.self_attn(here.input_layernorm(x), turned, None)[0]
    return float(first), float(x.pow(2).mean(-1).rsqrt().mean())


@torch.no_grad()
def head_start(network: Network, sample: Tensor, tokens: Sequence[str] | None = None) -> Circuit:
    """Write the circuit into freshly made weights; a sample of text says how large things are.

    With `tokens`, what each id writes, it also substitutes words (`substitute`).
    """
    circuit = Circuit(network, tokens)
    write_embeddings(network, circuit)
    network.model.norm.weight.fill_(circuit.logits)
    layers = network.model.layers
    for layer in layers[: MATCH + 1] if circuit.signs else layers[:MATCH]:
        layer.mlp.down_proj.weight.zero_()
    write_past(network, circuit, scales(network, sample, 0)[0])
    if circuit.signs:
        write_signs(network, circuit, sample)
    write_hop(network, circuit, scales(network, sample, 1)[0])
    write_answered(network, circuit, scales(network, sample, 1)[0])
    if circuit.signs:
        write_mending(network, circuit, sample)
    compared = choose(network, circuit)
    write_lengths(network, circuit, compared, scales(network, sample, 1)[1])
    write_match(network, circuit, compared, scales(network, sample, MATCH)[0])
    if circuit.signs:
        write_substitution(network, circuit, sample)
    circuit.freeze(network)
    return circuit


def write_embeddings(network: Network, circuit: Circuit) -> None:
    """Embeddings without a part in the circuit's spaces, with one direction in common.

    The marker before a file has a larger part in what is compared, so that for a while after it the
    nearest place is the one as far behind the other such marker.
    """
    table = network.model.embed_tokens.weight
    typical = circuit.typical = float(table.norm(dim=1).mean())
    table.copy_((table @ circuit.free.T) @ circuit.free)
    table *= typical / table.norm(dim=1, keepdim=True)
    if circuit.tokens:
        relate(table, circuit, circuit.tokens)
    row = table[ANCHOR].clone()
    compared = circuit.content.T @ (circuit.content @ row)
    size = typical * circuit.anchor * math.sqrt(circuit.size / len(circuit.free))
    rest = (row - compared) / (row - compared).norm()
    table[ANCHOR] = compared / compared.norm() * size + rest * math.sqrt(typical**2 - size**2)
    table[MARKED] = 0.6 * table[MARKED] + 0.8 * typical * circuit.mark
    if circuit.signs:
        write_markers(table, circuit)
        table[ANCHOR] = 0.8 * table[ANCHOR] + 0.6 * typical * circuit.signs.filed
    # Adding the same vector to every row of a tied table changes no probability.
    table += typical * circuit.constant * circuit.shared
    circuit.common = typical * circuit.constant


def write_past(network: Network, circuit: Circuit, scale: float) -> None:
    """Layer 0: three heads look one, two and three places back, one averages the last few dozen.

    Each writes a part of what stands there into a space of its own.
    """
    attention, size, gain = network.model.layers[0].self_attn, circuit.size, circuit.common * scale
    for projection in attention.children():
        projection.weight.zero_()
    queries, keys, values, output = circuit.heads(attention)
    known = torch.cat((circuit.content, circuit.words))
    values[:, : 3 * size] = known / scale
    for back in range(HOP):
        circuit.look_back(attention, back, back + 1, gain)
        output[back, :, :size] = circuit.spaces[back].T * circuit.written
    query = torch.zeros(circuit.width)
    query[torch.tensor(circuit.bag_pairs())] = circuit.bag_sharp
    circuit.point(attention, BAG_HEAD, query, gain)
    # A bag begins anew at a file: what stood before its marker says nothing about a place in it.
    slowest, row = circuit.half - 1, network.model.embed_tokens.weight[ANCHOR]
    seen = known.T @ (known @ row)
    keys[BAG_HEAD // circuit.each, slowest] = seen / (seen @ row) / scale * circuit.anew
    queries[BAG_HEAD, slowest] = circuit.shared / gain * math.sqrt(circuit.width)
    output[BAG_HEAD, :, size : 3 * size] = circuit.bag.T * circuit.bag_written


def write_hop(network: Network, circuit: Circuit, scale: float) -> None:
    """Layer 1, head 0: the tokens four to six back are what was one to three back three ago."""
    attention = network.model.layers[1].self_attn
    for projection in attention.children():
        projection.weight.zero_()
    circuit.look_back(attention, 0, HOP, circuit.common * scale)
    near, far = torch.cat(circuit.spaces[:HOP]), torch.cat(circuit.spaces[HOP:])
    if circuit.signs:  # the fourth token back is there already
        near, far = near[circuit.size :], far[circuit.size :]
    _, _, values, output = circuit.heads(attention)
    values[0, : len(near)] = near / scale
    output[0, :, : len(far)] = far.T


def write_answered(network: Network, circuit: Circuit, scale: float) -> None:
    """Layer 1, the first head of the last group: whether the assistant's marker has been seen."""
    queries, keys, values, output = circuit.heads(network.model.layers[1].self_attn)
    head, slowest = -circuit.each, circuit.half - 1
    strong = math.sqrt(20 * math.sqrt(circuit.width))
    seen = circuit.mark / float(network.model.embed_tokens.weight[MARKED] @ circuit.mark) / scale
    keys[-1, slowest] = seen * strong
    queries[head, slowest] = circuit.shared / (circuit.common * scale) * strong
    values[-1, 0] = seen
    output[head, :, 0] = circuit.answered * PART


Compared = list[tuple[Tensor, Tensor]]  # keys and queries of a group, [width, hidden]


def choose(network: Network, circuit: Circuit) -> Compared:
    """Which coordinates every group of heads compares: others each, so that their errors differ.

    Only rotary pairs that turn slowly: with others, what agrees would depend on how far away it is.
    """
    shape = network.config
    limit = circuit.turned / (shape.max_position_embeddings / 2)
    # The slowest one says how long a key is, the next whether the query is in the message.
    slow = [pair for pair, turn in enumerate(circuit.turns) if turn < limit][:-2]
    places = torch.tensor([*slow, *(pair + circuit.half for pair in slow)])
    tokens = round(circuit.share * len(places))
    compared: Compared = []
    for group in range(circuit.groups):
        mixed = places[torch.randperm(len(places), generator=circuit.random)]
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
        keys[used] = (bag - circuit.own() * words) * circuit.bag_weight
        queries[used] = bag * circuit.bag_weight
        compared.append((keys, queries))
    return compared


def write_lengths(network: Network, circuit: Circuit, compared: Compared, scale: float) -> None:
    """Layer 1's MLP: the squared length of every key. silu(x) x + silu(-x) (-x) is x squared."""
    mlp = network.model.layers[MATCH - 1].mlp
    at = 0
    for group, (keys, _) in enumerate(compared):
        rows = keys[keys.abs().sum(1) > 0] / scale
        units = slice(at, at + 2 * len(rows))
        for projection in (mlp.gate_proj, mlp.up_proj):
            projection.weight[units] = torch.cat((rows, -rows))
        mlp.down_proj.weight[:, units] = circuit.lengths[group][:, None] * PART
        at = units.stop


def write_match(network: Network, circuit: Circuit, compared: Compared, scale: float) -> None:
    """Layer 2: find the place with the nearest past, and write its token.

    The key holds the tokens before a place, its bag and half its squared length, the query the
    present tokens and bag: the product is minus half the squared distance, but for a term that all
    keys have in common. Places inside the answer start with a handicap, so that a copy does not
    follow its own repetitions.
    """
    all_queries, all_keys, all_values, output = circuit.heads(network.model.layers[MATCH].self_attn)
    slowest, size = circuit.half - 1, network.config.hidden_size
    sharp = math.sqrt(circuit.nearness * math.sqrt(circuit.width)) / scale
    always = circuit.shared / circuit.common
    said = circuit.output_below if circuit.signs else circuit.output
    for group, (keys, queries) in enumerate(compared):
        keys[slowest] = -0.5 * circuit.lengths[group] / PART
        queries[slowest] = always
        keys[slowest + circuit.half] = (
            -circuit.handicap / circuit.nearness * circuit.answered / PART
        )
        queries[slowest + circuit.half] = always
        if circuit.signs:
            write_silence(keys, queries, slowest - 1, circuit)
        values, own = circuit.said(group), circuit.heads_of(group)
        all_keys[group] = keys * sharp
        all_queries[own] = queries * sharp
        all_values[group], output[own] = 0.0, 0.0
        all_values[group, : len(values)] = values / math.sqrt(size)
        output[own, :, : len(values)] = values.T * said * circuit.typical
