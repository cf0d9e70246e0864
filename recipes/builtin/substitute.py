"""Initial weights that follow one kind of instruction: replace one word by another.

`headstart` writes heads that copy. The heads here look at the token about to be copied. If the
message is "rename item to product" or "replace 'item' with 'product'", and that token is "item",
they output "product".

This replaces single tokens only. Training adds the rest and does not change these heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from circuit import Circuit
from common import ASSISTANT, FILE, ID, TEXT_END, USER
from torch import Tensor

from model import states

LAYER = 3  # the layer that substitutes
SPACE = "Ġ"  # the vocabulary's symbol for the space before a word
VERBS = ("ename", "name", "place", "replace", "Ġreplace", "ange", "Ġchange")
VERBS += ("Ġfunction", "Ġmethod", "Ġclass", "Ġvariable")
LINKS = ("Ġto", "Ġwith", "->", "Ġ->")
QUOTES = ("'", '"', "`", "Ġ'", 'Ġ"', "Ġ`")
NUMBERS = (SPACE, *"0123456789", *(SPACE + digit for digit in "0123456789"))


class Gains:
    """Sizes, relative to what makes a match certain."""

    space = 0.5  # share of an embedding for a leading space
    special = 0.4  # share of an embedding for being a verb, a link or a number
    empty = 0.6  # share of the user's marker for attracting attention
    sign = 0.3  # size of a sign at a place, as a share of an embedding
    token = 6.0  # in the comparison: the token, ...
    link = 2.0
    verb = 2.0  # or a quote, if the new word is quoted
    message = 2.0
    threshold = 11.0  # the sum of all exceeds this by one
    number = 3.0  # a number is not a name
    sharp = 45.0
    idle = 0.4  # by how much the empty marker exceeds the threshold
    silence = 20.0
    loud = 2.0  # the substitute's score over that of the token about to be copied


def relate(circuit: Circuit, tokens: Sequence[str]) -> None:
    """Let a word's two tokens, with and without a leading space, share all but one direction.

    So " item" in the message matches "item" in the file, too, and the new word gets the file's
    space. The compared part has the same length in all embeddings.
    """
    table, typical = circuit.table, circuit.typical
    ids = {token: i for i, token in enumerate(tokens)}
    for i, token in enumerate(tokens):
        if token.isalpha() and not token.startswith(SPACE) and SPACE + token in ids:
            table[i] = table[ids[SPACE + token]]
    sign = torch.tensor([1.0 if token.startswith(SPACE) else -1.0 for token in tokens])
    table -= torch.outer(table @ circuit.space, circuit.space)
    length, compared = typical * math.sqrt(1 - Gains.space**2), code_length(circuit)
    known = (table @ circuit.content.T) @ circuit.content
    other = table - known
    known *= compared / known.norm(dim=1, keepdim=True)
    other *= math.sqrt(length**2 - compared**2) / other.norm(dim=1, keepdim=True)
    table.copy_(known + other)
    signs, share = circuit.signs, Gains.special
    rest = math.sqrt(1 - share**2)
    directions = {VERBS: signs.verb, LINKS: signs.link, QUOTES: signs.quote, NUMBERS: signs.number}
    for names, direction in directions.items():
        chosen = [ids[name] for name in names if name in ids]
        table[chosen] = rest * table[chosen] + share * typical * direction
    table += torch.outer(sign, circuit.space) * typical * Gains.space


def write_markers(circuit: Circuit) -> None:
    """Make heads without a match attend to the user's marker, or to the one before plain text."""
    signs, typical, table = circuit.signs, circuit.typical, circuit.table
    rest = math.sqrt(1 - Gains.empty**2)
    table[ID[USER]] = typical * (Gains.empty * signs.empty + rest * signs.asking)
    # Outside a message it must exceed a threshold of which the user's marker is spared a part.
    full = (Gains.threshold + Gains.idle) / (Gains.threshold + Gains.idle - Gains.message)
    table[ID[TEXT_END]] = typical * Gains.empty * full * signs.empty


def write_signs(circuit: Circuit) -> None:
    """Layer 0: mark verbs and links before a place, the fourth token back, and the message."""
    signs, size = circuit.signs, circuit.size
    queries, keys, values, output = circuit.heads(0)
    probe = Probe(circuit, 0)
    gain, sign = circuit.common * probe.scale, Gains.sign * circuit.typical
    carried = (
        (0, signs.link, signs.once),
        (1, signs.link, signs.twice),
        (2, signs.verb, signs.thrice),
        (0, signs.quote, signs.quoted),
    )
    for row, (head, mark, place) in enumerate(carried, start=3 * size):  # after what heads carry
        seen = mark / (Gains.special * circuit.typical) / probe.scale
        values[head // circuit.each, row] = seen
        output[head, :, row] = place * sign
    fourth = 3 * circuit.each
    circuit.look_back(0, fourth, 4, gain)
    output[fourth, :, :size] = circuit.spaces[3].T * circuit.written
    strong = math.sqrt(20 * math.sqrt(circuit.width))
    values[2] = 0.0
    marks = ((signs.asking, probe.asking, 1.0), (signs.filed, probe.filed, -1.0))
    for number, (mark, at, way) in enumerate(marks):
        head, row = 2 * circuit.each + number, circuit.slowest + number * circuit.half
        seen = mark / float(probe.normed[at] @ mark)
        keys[2, row] = seen * strong
        queries[head, row] = circuit.shared / gain * strong
        values[2, number] = seen
        output[head, :, number] = signs.message * way * sign


def instructed(circuit: Circuit, quoted: bool) -> Tensor:
    """Part of a place's key that marks it as the new word of an instruction, (hidden,)."""
    signs, typical = circuit.signs, circuit.typical
    sign = Gains.sign * typical
    return (
        (signs.twice if quoted else signs.once) * (Gains.link / sign)
        + (signs.quoted if quoted else signs.thrice) * (Gains.verb / sign)
        + signs.message * (Gains.message / sign)
        - signs.number * (Gains.number / (Gains.special * typical))
        - signs.filed * (4 * Gains.threshold / typical)  # its code is larger than others
        - circuit.shared * (Gains.threshold / circuit.common)
        + signs.empty * ((Gains.threshold - Gains.message + Gains.idle) / (Gains.empty * typical))
    )


def code_rows(circuit: Circuit) -> tuple[list[int], int]:
    """Return coordinates of a head that compare a token's code, and one for the rest."""
    slow = range(circuit.half - circuit.size // 2, circuit.half)
    return [*slow, *(pair + circuit.half for pair in slow)], slow[0] - 1


def code_length(circuit: Circuit) -> float:
    """Length of the part of an embedding that copying compares."""
    share = (1 - Gains.space**2) * circuit.size / (len(circuit.free) - 1)
    return circuit.typical * math.sqrt(share)


def write_mending(circuit: Circuit) -> None:
    """Layer 1: where a new word was written, compare as if the old one were there.

    For the present token and the one before it. Otherwise the copy would lose its place.
    """
    all_queries, all_keys, values, output = circuit.heads(1)
    scale, size = Probe(circuit, 1).scale, circuit.size
    length, gains = code_length(circuit), math.sqrt(Gains.sharp * math.sqrt(circuit.width))
    code, rest = code_rows(circuit)
    places = (
        (circuit.content, circuit.mended, 1.0),
        (circuit.spaces[0] / circuit.written, circuit.spaces[0], circuit.written),
    )
    for group, quoted in ((1, False), (2, True)):
        keys = torch.zeros_like(all_keys[group])
        keys[code] = circuit.content / length
        keys[rest] = instructed(circuit, quoted)
        all_keys[group] = keys * gains / scale
        old = circuit.spaces[3 if quoted else 1] / circuit.written
        values[group, :size] = (old - circuit.content) / scale
        for head, (held, target, times) in enumerate(places, start=group * circuit.each):
            queries = torch.zeros_like(keys)
            queries[code] = held / length * Gains.token
            queries[rest] = circuit.shared / circuit.common
            all_queries[head] = queries * gains / scale
            output[head, :, :size] = target.T * times


def write_silence(keys: Tensor, queries: Tensor, row: int, circuit: Circuit) -> None:
    """Layer 2: make places in the message, and those without content, attend to an empty one."""
    signs, typical = circuit.signs, circuit.typical
    keys[row] = signs.empty / (Gains.empty * typical) * Gains.silence
    queries[row] = signs.message / (Gains.sign * typical) + signs.empty / (Gains.empty * typical)


def write_substitution(circuit: Circuit) -> None:
    """Layer 3, two groups of heads: find the token about to be copied in the message.

    The query has that token. The key of a place in the message has the token two before it (four
    with quotes between), and whether verb and link are where they belong. A place where all match
    wins over the empty marker, and its token is written, larger than the copy.
    """
    width, size, probe = circuit.width, circuit.size, Probe(circuit, LAYER)
    all_queries, all_keys, values, output = circuit.heads(LAYER)
    # Part of the next token in a query, for a token's code of length one.
    held = code_length(circuit)
    answer = probe.normed[probe.answer]
    copied = circuit.table[probe.next]
    codes = copied @ circuit.content.T / held
    # Number of groups in layer 2 that write each of the compared directions.
    said = torch.cat([circuit.said(group) for group in range(circuit.groups)]).sum(0)
    times = (circuit.free @ said)[:size]
    strength = float(((answer @ circuit.content.T / times) * codes).sum(1).median())
    always = circuit.shared / float((answer @ circuit.shared).median())
    gains = math.sqrt(Gains.sharp * math.sqrt(width))
    code, rest = code_rows(circuit)
    window = circuit.free[[i for i in range(len(circuit.free)) if i != 3 * size]][:width]
    score = (probe.states[probe.answer] * copied).sum(1) / (copied @ window.T).pow(2).sum(1)
    loud = Gains.loud * float(score.median()) / circuit.each
    for group, (back, quoted) in enumerate(((1, False), (3, True))):
        keys, queries = torch.zeros_like(all_keys[:2])
        keys[code] = circuit.spaces[back] / (circuit.written * held)
        queries[code] = circuit.content / times[:, None] / strength * Gains.token
        keys[rest] = instructed(circuit, quoted)
        queries[rest] = always
        own = circuit.heads_of(group)
        all_keys[group] = keys * gains / probe.scale
        all_queries[own] = queries * gains
        values[group], output[own] = 0.0, 0.0
        values[group, : len(window)] = window / probe.scale
        output[own, :, : len(window)] = window.T * loud
    layer, groups, heads = circuit.layers[LAYER], 2 * width, 2 * circuit.each * width
    circuit.keep(layer.self_attn.q_proj.weight, slice(heads))
    circuit.keep(layer.self_attn.k_proj.weight, slice(groups))
    circuit.keep(layer.self_attn.v_proj.weight, slice(groups))
    circuit.keep(layer.self_attn.o_proj.weight, slice(None), slice(heads))
    circuit.keep(layer.input_layernorm.weight, slice(None))


class Probe:
    """States of a layer for an instruction that leaves a file unchanged, and its answer."""

    def __init__(self, circuit: Circuit, layer: int) -> None:
        text, words = circuit.sample[100:400], circuit.sample[:8]
        user, file, answer = (torch.tensor([ID[i]]) for i in (USER, FILE, ASSISTANT))
        self.ids = torch.cat((user, words, file, text, answer, file, text))
        self.asking, self.filed = 0, 1 + len(words)
        self.answer = slice(len(self.ids) - 250, len(self.ids) - 1)
        [self.states] = states(circuit.network, self.ids[None], layer)
        self.normed = circuit.layers[layer].input_layernorm(self.states)
        self.next = self.ids[len(self.ids) - 249 :]
        # Change by the norm of the direction that all tokens share, in a message.
        common = self.normed[3 : self.filed] @ circuit.shared
        self.scale = float(common.median()) / circuit.common
