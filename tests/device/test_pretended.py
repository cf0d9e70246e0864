"""The pretended device refuses what an accelerator refuses, and counts what it waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pretended
import pytest
import torch
import torch.nn.functional as F

SAME = "Expected all tensors to be on the same device"


MIXES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "two devices": lambda here, other, _host: here + other,
    "a device and the host": lambda here, _other, host: here + host,
    "concatenation": lambda here, other, _host: torch.cat([here, other]),
    "an index on the host": lambda here, _o, _h: here.index_select(1, torch.tensor([1])),
    "attention": lambda here, other, _host: F.scaled_dot_product_attention(here, other, other),
    "a foreign generator": lambda here, _o, _h: here.bernoulli(generator=torch.Generator()),
}


@pytest.mark.parametrize("mix", MIXES)
def test_devices_do_not_mix(device: str, mix: str) -> None:
    here, host = torch.ones(2, 3, device=device), torch.ones(2, 3)
    other = host.to(device.replace("0", "1"))
    with pytest.raises(RuntimeError, match=f"{SAME}|device type for generator"):
        MIXES[mix](here, other, host)


def test_kernels_and_waits_are_counted(device: str) -> None:
    x = torch.ones(8, 8, device=device)
    with pretended.counted() as seen:
        y = (x @ x + 1).view(64)[3:].transpose(0, 0)
        assert not seen.waits
        assert y[0].item() == 9
        torch.tensor([1, 2], device=device)
        y.nonzero()
        torch.accelerator.synchronize()
    why = [name for name, line in seen.waits.elements()]
    assert why == ["copy to the host", "copy from the host", "nonzero", "synchronize"]
    assert (seen.kernels["aten::mm"], seen.kernels["aten::add"]) == (1, 1)
    assert not [name for name in seen.kernels if "view" in name or "slice" in name]
    (x + 1).tolist()
    assert sum(seen.waits.values()) == 4  # nothing is counted any more


def test_a_capture_forbids_waits_and_pageable_copies(device: str) -> None:
    x, pinned = torch.ones(4, device=device), torch.ones(4).pin_memory()
    assert pinned.is_pinned()
    with pretended.capturing():
        y = torch.zeros(4, device=device).copy_(pinned, non_blocking=True) + x.softmax(0)
        for wrong in (
            lambda: x.tolist(),
            lambda: torch.tensor([1], device=device),
            lambda: torch.ones(1).to(device, non_blocking=True),
            lambda: x[x > 0],
            lambda: x[[1, 2]],
            lambda: torch.accelerator.synchronize(),
        ):
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                wrong()
    assert y.tolist() == [1.25] * 4


def test_late_copies_need_their_source(device: str) -> None:
    with pretended.like_mps():
        held = torch.ones(3)
        x = held.to(device, non_blocking=True) + 1
        assert x.tolist() == [2, 2, 2]  # the host has waited
        held.zero_()
        (x + 1).sum()
    with pretended.like_mps():
        torch.ones(3).pin_memory().to(device, non_blocking=True).sum()  # its allocator waits
    with pytest.raises(RuntimeError, match="late copy 0 released"), pretended.like_mps():
        torch.ones(3).to(device, non_blocking=True).sum()

    def overwrite(copied: torch.Tensor) -> None:
        held.add_(1)
        copied.sum()

    with pytest.raises(RuntimeError, match="late copy 0 overwritten"), pretended.like_mps():
        overwrite(held.to(device, non_blocking=True))
    refused = pytest.raises(AssertionError, match=r"may read garbage: .*released': 1}")
    with refused, pretended.like_mps(), pytest.raises(RuntimeError):
        torch.ones(3).to(device, non_blocking=True).sum()


def test_float64_can_be_missing(device: str) -> None:
    x = torch.ones(2, device=device)
    with pretended.like_mps():
        for wrong in (x.double, lambda: torch.ones(2, dtype=torch.float64).to(device)):
            with pytest.raises(TypeError, match="no float64"):
                wrong()
    assert x.double().dtype == torch.float64
