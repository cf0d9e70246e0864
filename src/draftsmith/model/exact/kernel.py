"""Attention with results for a query that do not depend on what else is computed.

A query's keys are taken in the order of their positions, wherever they are stored: first a run of
slots, then, in a tree, the slots of its ancestors. A score is one sum over the width in order.
Weights are summed in lanes counted from the query's first key, and values are added in order. So
nothing depends on other queries, on where a pass began, nor on the borders of tiles.

Shapes: `Q` queries, `H` query heads, `K` key heads, `C` slots, `D` and `W` widths of keys and
values. Keys and values are given as integers; shifted left by `shift`, their bits are float32's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from draftsmith.compiled import compiled, fused, inner

TILE = 64
"""Slots converted to float32 at a time; a multiple of `LANES`."""
LANES = 16
STEP = 8
"""Products added to a sum at a time. The sum does not depend on it."""

_F = np.float32
_NONE = _F(-np.inf)
_ZERO, _ONE, _HALF = _F(0), _F(1), _F(0.5)
_LOG2E, _LN2, _LN2_REST = _F(1.4426950408889634), _F(0.693359375), _F(-2.12194440e-4)
_SMALLEST = _F(-87.0)
"""Smaller exponents count as minus infinity."""


@compiled
def attend(
    q: Any,
    keys: Any,
    values: Any,
    shift: int,
    lows: Any,
    highs: Any,
    starts: Any,
    slots: Any,
    scale: Any,
    cap: Any,
    sinks: Any,
    out: Any,
) -> None:
    """Write the attention of q (Q, H, D) over keys (K, D, C), values (K, C, W) to out (Q, H, W).

    Query i sees the slots lows[i] … highs[i] - 1, then slots[starts[i]:starts[i + 1]], ascending
    and not before highs[i]. `cap` bounds the scores; 0: no bound. `sinks` is (H,) or empty.
    """
    queries, heads, width = q.shape
    groups = heads // len(keys)
    first, last = lows[0], 0
    for i in range(queries):
        first, last = min(first, lows[i]), max(last, highs[i])
        if starts[i] < starts[i + 1]:
            last = max(last, slots[starts[i + 1] - 1] + 1)
    # Scores of a query begin at its first slot and are padded to whole lanes at the end.
    scores = np.empty((queries * groups, last - first + LANES), np.float32)
    counts, totals = np.empty(queries, np.int64), np.empty(queries * groups, np.float32)
    for i in range(queries):
        counts[i] = highs[i] - lows[i] + starts[i + 1] - starts[i]
    powers = np.empty(scores.shape[1], np.int32)
    bits = np.zeros((max(width * TILE, values.shape[2] * TILE),), np.uint32)
    line = np.empty(TILE, np.float32)
    for head in range(len(keys)):
        nexts = starts[:queries].copy()
        for begin in range(first, last, TILE):
            end = min(begin + TILE, last)
            tile = _columns(keys[head], begin, end, shift, bits)
            for i in range(queries):
                run, stop = (lows[i], highs[i]), starts[i + 1]
                low, high, new = _visible(run, begin, end, slots, nexts[i], stop)
                if low == high and new == nexts[i]:
                    continue
                for g in range(groups):
                    own = scores[i * groups + g]
                    _products(q[i, head * groups + g], tile, line)
                    _scale(line, scale, cap)
                    for slot in range(low, high):
                        own[slot - lows[i]] = line[slot - begin]
                    at = highs[i] - lows[i] - starts[i]
                    for e in range(nexts[i], new):
                        own[at + e] = line[slots[e] - begin]
                nexts[i] = new
        for i in range(queries):
            for g in range(groups):
                at = head * groups + g
                sink = sinks[at] if len(sinks) else _NONE
                place = i * groups + g
                totals[place] = _weights(scores[place], counts[i], sink, powers)
                out[i, at, :] = _ZERO
        nexts = starts[:queries].copy()
        for begin in range(first, last, TILE):
            end = min(begin + TILE, last)
            tile = _lines(values[head], begin, end, shift, bits)
            for i in range(queries):
                run, stop = (lows[i], highs[i]), starts[i + 1]
                low, high, new = _visible(run, begin, end, slots, nexts[i], stop)
                for g in range(groups):
                    own, sums = scores[i * groups + g], out[i, head * groups + g]
                    _add(own, low - lows[i], tile, low - begin, high - begin, sums)
                    at = highs[i] - lows[i] - starts[i]
                    for e in range(nexts[i], new):
                        place = slots[e] - begin
                        _add(own, at + e, tile, place, place + 1, sums)
                nexts[i] = new
        for i in range(queries):
            for g in range(groups):
                sums, total = out[i, head * groups + g], totals[i * groups + g]
                for w in range(len(sums)):
                    sums[w] = sums[w] / total


@inner
def _visible(
    run: tuple[int, int], begin: int, end: int, slots: Any, place: int, stop: int
) -> tuple[int, int, int]:
    """Return the part of a query's run in a tile, and the end of its further slots there."""
    low, high = max(run[0], begin), min(run[1], end)
    while place < stop and slots[place] < end:
        place += 1
    return low, max(low, high), place


@inner
def _columns(keys: Any, begin: int, end: int, shift: int, bits: Any) -> Any:
    """(D, TILE) float32 of keys (D, C). Columns from `end` on are arbitrary."""
    tile = bits[: len(keys) * TILE].reshape((len(keys), TILE))
    for d in range(len(keys)):
        own, to = keys[d, begin:end], tile[d]
        for j in range(end - begin):
            to[j] = np.uint32(own[j]) << shift
    return tile.view(np.float32)


@inner
def _lines(values: Any, begin: int, end: int, shift: int, bits: Any) -> Any:
    """(end - begin, W) float32 of values (C, W)."""
    width = values.shape[1]
    tile = bits[: (end - begin) * width].reshape((end - begin, width))
    for j in range(end - begin):
        own, to = values[begin + j], tile[j]
        for w in range(width):
            to[w] = np.uint32(own[w]) << shift
    return tile.view(np.float32)


@fused
def _products(q: Any, tile: Any, line: Any) -> None:
    """Write the dot products of q (D,) with each column of a tile (D, TILE) to line (TILE,)."""
    line[:] = _ZERO
    whole = len(q) // STEP * STEP
    for d in range(0, whole, STEP):
        a, b, c, e = q[d], q[d + 1], q[d + 2], q[d + 3]
        f, g, h, i = q[d + 4], q[d + 5], q[d + 6], q[d + 7]
        ta, tb, tc, te = tile[d], tile[d + 1], tile[d + 2], tile[d + 3]
        tf, tg, th, ti = tile[d + 4], tile[d + 5], tile[d + 6], tile[d + 7]
        for j in range(TILE):
            first = line[j] + a * ta[j] + b * tb[j] + c * tc[j] + e * te[j]
            line[j] = first + f * tf[j] + g * tg[j] + h * th[j] + i * ti[j]
    for d in range(whole, len(q)):
        a, ta = q[d], tile[d]
        for j in range(TILE):
            line[j] += a * ta[j]


@inner
def _scale(line: Any, scale: Any, cap: Any) -> None:
    for j in range(TILE):
        line[j] *= scale
    if cap:
        for j in range(TILE):
            line[j] = np.tanh(line[j] / cap) * cap


@inner
def _weights(line: Any, count: int, sink: Any, powers: Any) -> Any:
    """Turn `count` scores into weights before normalization; return their sum, sink included.

    `powers` is a buffer for as many int32.
    """
    end = -(-count // LANES) * LANES
    line[count:end] = _NONE
    lanes = np.full(LANES, _NONE, np.float32)
    for j in range(0, end, LANES):
        own = line[j : j + LANES]
        for k in range(LANES):
            lanes[k] = own[k] if own[k] > lanes[k] else lanes[k]
    most = sink
    for k in range(LANES):
        most = lanes[k] if lanes[k] > most else most
    _exponents(line[:end], most, powers)
    factors = powers.view(np.float32)
    for j in range(end):
        line[j] *= factors[j]
    lanes[:] = _ZERO
    for j in range(0, end, LANES):
        own = line[j : j + LANES]
        for k in range(LANES):
            lanes[k] += own[k]
    total = _ZERO
    for k in range(LANES):
        total += lanes[k]
    if sink > _NONE:
        lanes[0] = sink
        _exponents(lanes[:1], most, powers)
        total += lanes[0] * factors[0]
    return total


@fused
def _exponents(line: Any, most: Any, powers: Any) -> None:
    """Compute exp(line - most) without its factor 2^n; that factor's bits go to `powers`.

    A NaN stays one. Source: Cephes' expf.
    """
    for k in range(len(line)):
        x = line[k] - most
        x = _SMALLEST if x < _SMALLEST else x
        whole = np.floor(x * _LOG2E + _HALF)
        r = x - whole * _LN2 - whole * _LN2_REST
        p = _F(1.9875691500e-4) * r + _F(1.3981999507e-3)
        p = p * r + _F(8.3334519073e-3)
        p = p * r + _F(4.1665795894e-2)
        p = p * r + _F(1.6666665459e-1)
        p = p * r + _F(5.0000001201e-1)
        powers[k] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        p = p * (r * r) + r + _ONE
        line[k] = _ZERO if x <= _SMALLEST else p


@fused
def _add(weights: Any, at: int, tile: Any, low: int, high: int, sums: Any) -> None:
    """Add the lines low … high - 1 of a tile (·, W), times weights[at:], to sums (W,) in order."""
    whole = low + (high - low) // STEP * STEP
    for j in range(low, whole, STEP):
        w = weights[at + j - low : at + j - low + STEP]
        a, b, c, e, f, g, h, i = w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
        ta, tb, tc, te = tile[j], tile[j + 1], tile[j + 2], tile[j + 3]
        tf, tg, th, ti = tile[j + 4], tile[j + 5], tile[j + 6], tile[j + 7]
        for d in range(len(sums)):
            first = sums[d] + a * ta[d] + b * tb[d] + c * tc[d] + e * te[d]
            sums[d] = first + f * tf[d] + g * tg[d] + h * th[d] + i * ti[d]
    for j in range(whole, high):
        a, ta = weights[at + j - low], tile[j]
        for d in range(len(sums)):
            sums[d] += a * ta[d]
