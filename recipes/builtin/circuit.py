"""Sizes and directions that the circuits of the initial weights share, and their protection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from model import Network, states

HOP = 3  # tokens that layer 0 looks back, and layer 1 beyond them
BACKS = 2 * HOP  # number of single tokens that are compared
BAG_HEAD = HOP  # in layer 0, after the heads that look back
MATCH = 2  # the layer that compares
PAIRS = 6  # rotary pairs of a look-back: the fastest; the bag uses as many slower ones


@dataclass(frozen=True)
class Signs:
    """Directions that identify parts of an instruction: of tokens, and of places."""

    empty: Tensor  # a token without content, attended to when nothing else matches
    asking: Tensor  # the user's marker
    filed: Tensor  # the marker before a file
    verb: Tensor  # a word like "rename" in "rename a to b"
    link: Tensor  # a word like "to" in it
    quote: Tensor  # around a word
    number: Tensor  # a digit, or the space before one
    once: Tensor  # a place after a link
    twice: Tensor  # the place after that
    thrice: Tensor  # a place three after a verb
    quoted: Tensor  # a place after a quote
    message: Tensor  # a place between the user's marker and the file's


class Circuit:
    """Gains (found by trying a few), and the directions in use."""

    sharp = 10.0  # how sharply a head attends to one place
    written = 1.5  # size of layer 0's output for a single token
    bag_written = 6.0  # and for a bag, an average, which is smaller
    bag_sharp = 2.0
    bag_turn = 0.03  # radians per token of the fastest pair that forms the bag: about 30 tokens
    weights = (2.2, 1.5, 1.0, 0.7, 0.5, 0.4)  # of the compared tokens, the newest first
    bag_weight = 1.5  # of the bag in the comparison
    anew = 4.0  # weight of a marker before a file over other tokens in a bag
    share = 2 / 3  # share of the compared dimensions for single tokens; the rest is for the bag
    nearness = 200.0  # how clearly the nearest place wins
    handicap = 10.0  # of places inside the answer
    anchor = 2.0  # weight of the marker before a file over other tokens
    turned = 0.3  # radians that a compared pair may turn over half the context
    constant = 2.0  # size of what all embeddings share: steadies the divisor of the norms
    output = 6.0  # size of the output
    output_below = 3.0  # and if a substitute must exceed it
    logits = 3.0  # gain of the last norm: how certain the network is

    def __init__(self, network: Network, sample: Tensor, tokens: Sequence[str] | None) -> None:
        """`tokens`: text of each id. With it, room is kept for `substitute`."""
        shape = network.config
        self.network, self.sample = network, sample
        self.table = network.model.embed_tokens.weight
        self.layers = network.model.layers
        self.width, self.half = shape.head_dim, shape.head_dim // 2
        self.slowest = self.half - 1  # of the rotary pairs
        self.groups = shape.num_key_value_heads
        self.each = shape.num_attention_heads // self.groups
        self.size = min(shape.head_dim // 4, shape.hidden_size // 16)
        sizes = (shape.num_hidden_layers, shape.num_attention_heads, self.groups)
        if sizes[0] <= MATCH or sizes[1] <= BAG_HEAD or sizes[2] < 2:
            raise ValueError(
                f"head_start needs {MATCH + 1} layers, {BAG_HEAD + 1} heads and 2 groups of them, "
                f"not {sizes}"
            )
        # Along the axes, so that rounding of one part does not affect another.
        widths = [1, *[self.size] * BACKS, 2 * self.size, self.groups, 1, 1]
        widths += [len(fields(Signs)), self.size] if tokens else [0, 0]
        basis = torch.eye(shape.hidden_size)
        parts = basis.split([*widths, shape.hidden_size - sum(widths)])
        self.shared = parts[0][0]
        self.spaces = parts[1 : 1 + BACKS]
        self.bag, self.lengths, mark, answered, signs, self.mended, self.free = parts[1 + BACKS :]
        self.mark, self.answered = mark[0], answered[0]
        self.signs = Signs(*signs) if tokens else None
        self.content, self.words, _ = self.free.split(
            [self.size, 2 * self.size, len(self.free) - 3 * self.size]
        )
        self.space = self.free[3 * self.size]  # with tokens: whether one begins with a space
        # Directions in which embeddings may move.
        self.moving = self.free[3 * self.size + bool(tokens) :]
        self.turns = network.model.rotary_emb.inv_freq.tolist()
        self.typical = float(self.table.norm(dim=1).mean())  # length of an embedding
        self.common = self.typical * self.constant  # size of the shared direction
        # Of matrices that are trained.
        self.kept: list[tuple[Tensor, tuple[slice, ...], Tensor]] = []

    def freeze(self) -> None:
        """Let training change only the layers above the circuit, and its output.

        If the embeddings or the first layers move, exact values become approximate, and copies
        fail.
        """
        parts = self.table @ self.moving.T
        self.fixed = self.table - parts @ self.moving
        self.lengths_of_moving = parts.norm(dim=1, keepdim=True)
        match = self.layers[MATCH]
        own = [match.input_layernorm, match.self_attn.q_proj, match.self_attn.k_proj]
        if self.signs:  # substitutes are read together with this layer's output
            own = [match]
        for module in (*self.layers[:MATCH], *own):
            module.requires_grad_(False)

    def keep(self, parameter: Tensor, *part: slice) -> None:
        """Protect a part of a matrix while its other parts are trained."""
        self.kept.append((parameter, part, parameter[part].clone()))

    @torch.no_grad()
    def protect(self) -> None:
        """Undo changes to the parts of the embeddings that the circuit compares.

        Their lengths are restored, too, because the first norms divide by them.
        """
        parts = self.table @ self.moving.T
        parts *= self.lengths_of_moving / parts.norm(dim=1, keepdim=True).clamp_min(1e-9)
        self.table.copy_(self.fixed + parts @ self.moving)
        for parameter, part, values in self.kept:
            parameter[part] = values

    def states(self, layer: int) -> Tensor:
        """(1, T, D) input of a layer for the sample."""
        return states(self.network, self.sample[None], layer)

    def heads(self, layer: int) -> tuple[Tensor, ...]:
        """Return views of a layer's matrices.

        Queries (heads, width, hidden), keys and values (groups, width, hidden), outputs (heads,
        hidden, width).
        """
        attention = self.layers[layer].self_attn
        queries, keys, values = (
            projection.weight.view(-1, self.width, projection.in_features)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        output = attention.o_proj.weight
        return queries, keys, values, output.view(len(output), -1, self.width).transpose(0, 1)

    def heads_of(self, group: int) -> slice:
        """Return the heads of a group."""
        return slice(group * self.each, (group + 1) * self.each)

    def said(self, group: int) -> Tensor:
        """Return the free directions that a group of layer 2 writes, (at most width, hidden)."""
        first = group * self.width % max(1, len(self.free) - self.width + 1)
        return self.free[first : first + self.width]

    def look_back(self, layer: int, head: int, back: int, gain: float) -> None:
        """Make a head attend to the place `back` tokens before."""
        query = torch.zeros(self.width)
        for pair in range(PAIRS):
            # Rotated to match the key that many places earlier.
            query[pair] = math.cos(self.turns[pair] * back)
            query[pair + self.half] = -math.sin(self.turns[pair] * back)
        self.point(layer, head, query * self.sharp, gain)

    def point(self, layer: int, head: int, query: Tensor, gain: float) -> None:
        """Give a head the same query everywhere, and a key in the pairs that it uses."""
        queries, keys, _, _ = self.heads(layer)
        used = query[: self.half].abs() + query[self.half :].abs() > 0
        keys[head // self.each, : self.half][used] = self.shared / gain
        queries[head] = torch.outer(query * math.sqrt(self.width), self.shared) / gain
