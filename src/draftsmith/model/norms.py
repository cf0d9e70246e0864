"""RMS norms of few rows in one compiled call: eight operations of torch take longer to start.

A row's squares are summed as torch sums them, so that the bits are torch's: in lanes, of which four
groups alternate, and beyond some thousand numbers in levels of partial sums.
"""

from __future__ import annotations

import math
from functools import cache
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, types
from torch import Tensor

from draftsmith.compiled import inner

MOST = 1 << 14
"""Numbers up to which one thread is quicker than torch's operations."""
DTYPES = (torch.float32, torch.bfloat16)

_LANES = 8
"""Numbers that torch adds at a time on x86."""
_GROUP = 4 * _LANES
_LEVELS = 4
_STEPS = 16
"""Groups that are added before a level passes its sums on; torch takes more in wider rows only."""
_TRIED = 32
"""Rows of which every norm must be torch's, which in float32 no other sum would give."""

_KEPT: list[Any] = []
"""Compiled code whose address is in use."""

_F, _U = np.float32, np.uint32
_ZERO, _ONE = _F(0), _F(1)
_HALF, _BELOW, _NAN = _U(16), _U(0x7FFF), _U(0x7FC0)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`weight * torch.rms_norm(x)` of contiguous tensors of one of `DTYPES`, on a CPU."""
    out, width = torch.empty_like(x), weight.shape[0]
    addresses = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    half = x.dtype == torch.bfloat16
    _kernel()(*addresses, x.numel() // width, width, epsilon, half)
    return out


@cache
def alike(width: int) -> bool:
    """Whether torch sums rows so wide as is known here."""
    if not 0 < width <= MOST:
        return False
    usual: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever somebody made the default
    x = torch.randn((_TRIED, width), generator=torch.Generator().manual_seed(0), **usual)
    ones = torch.ones(width, **usual)
    theirs = torch.stack([torch.rms_norm(row, ones.shape, None, 0.0) for row in x])
    return torch.equal(rms_norm(x, ones, 0.0), theirs)


@cache
def _kernel() -> Any:
    address, integer = types.voidptr, types.int64
    given = address, address, address, integer, integer, types.float32, types.boolean
    signature, options = types.void(*given), {"error_model": "numpy"}
    try:
        made = cfunc(signature, cache=True, **options)(_rms_norm)
    except (RuntimeError, OSError, EOFError, UnpicklingError):
        # There is no folder for the cache, or its disk is full, or its file was cut off.
        made = cfunc(signature, **options)(_rms_norm)
    _KEPT.append(made)
    return made.ctypes


def _rms_norm(
    x: Any, weight: Any, out: Any, rows: int, width: int, epsilon: Any, half: bool
) -> None:
    """Norms of (rows, width) numbers; `half`: all three are bfloat16, else float32."""
    numbers, factors = np.empty(width, np.float32), np.empty(width, np.float32)
    bits = numbers.view(np.uint32)
    sums = np.empty((_LEVELS, _GROUP), np.float32)
    if half:
        _raise(carray(weight, width, np.uint16), factors.view(np.uint32))
    else:
        _copy(carray(weight, width, np.float32), factors)
    for row in range(rows):
        if half:
            _raise(carray(x, (rows, width), np.uint16)[row], bits)
        else:
            _copy(carray(x, (rows, width), np.float32)[row], numbers)
        root = _ONE / _F(math.sqrt(_squares(numbers, sums) / _F(width) + epsilon))
        for i in range(width):
            numbers[i] *= root
        if half:
            for i in range(width):
                bits[i] = _rounded(numbers[i], bits[i]) << _HALF
        for i in range(width):
            numbers[i] *= factors[i]
        if half:
            to = carray(out, (rows, width), np.uint16)[row]
            for i in range(width):
                to[i] = _rounded(numbers[i], bits[i])
        else:
            _copy(numbers, carray(out, (rows, width), np.float32)[row])


@inner
def _copy(given: Any, to: Any) -> None:
    for i in range(len(given)):
        to[i] = given[i]


@inner
def _raise(given: Any, bits: Any) -> None:
    """bfloat16 → float32, as bits."""
    for i in range(len(given)):
        bits[i] = _U(given[i]) << _HALF


@inner
def _rounded(number: Any, bits: Any) -> Any:
    """The bits of the bfloat16 that is nearest to a float32, the even one of two."""
    nearest = (bits + _BELOW + ((bits >> _HALF) & _U(1))) >> _HALF
    return nearest if number == number else _NAN  # only NaN is not itself


@inner
def _squares(line: Any, sums: Any) -> Any:
    """Σx², as torch's cascade_sum adds a row up (aten/src/ATen/native/cpu/SumKernel.cpp)."""
    steps = len(line) // _GROUP
    sums[:] = _ZERO
    for step in range(steps):
        at = step * _GROUP
        for k in range(_GROUP):
            sums[0, k] += line[at + k] * line[at + k]
        every, level = _STEPS, 1
        while level < _LEVELS and (step + 1) % every == 0:
            for k in range(_GROUP):
                sums[level, k] += sums[level - 1, k]
                sums[level - 1, k] = _ZERO
            every, level = every * _STEPS, level + 1
    for level in range(1, _LEVELS):
        for k in range(_GROUP):
            sums[0, k] += sums[level, k]
    whole = len(line) // _LANES * _LANES
    for at in range(steps * _GROUP, whole, _LANES):
        for k in range(_LANES):
            sums[0, k] += line[at + k] * line[at + k]
    for at in range(_LANES, _GROUP, _LANES):
        for k in range(_LANES):
            sums[0, k] += sums[0, at + k]
    total = _ZERO
    for i in range(whole, len(line)):
        total += line[i] * line[i]
    for k in range(_LANES):
        total += sums[0, k]
    return total
