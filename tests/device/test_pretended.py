"""That the pretended device computes what the CPU does, and refuses what an accelerator refuses."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretended
import pytest
import torch
import torch.nn.functional as F

SAME = "Expected all tensors to be on the same device"


def test_it_computes_what_the_cpu_does(device: str) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    there = x.to(device)
    assert there.device == torch.device(device)
    for compute in (
        lambda t: t @ t.T,
        lambda t: t.T.contiguous(),
        lambda t: t[t > 2],
        lambda t: t.softmax(-1).cumsum(-1),
        lambda t: torch.cat([t, t + 1]).topk(2, dim=0).values,
        lambda t: t.index_select(1, t[0].long()),
    ):
        assert torch.equal(compute(there).cpu(), compute(x))
    assert there.sum().item() == 15
    assert str(there[0]) == "tensor([0., 1., 2.], device='pretend:0')"


def test_views_share_memory_and_outputs_may_be_given(device: str) -> None:
    x = torch.zeros(4, 3, device=device)
    x.view(3, 4)[0, 0] = 9
    assert x[0, 0].item() == 9
    torch.cat([torch.ones(2, 3, device=device)] * 2, out=x)
    assert x.tolist() == [[1] * 3] * 4
    x.narrow(0, 1, 2).zero_()
    assert x.sum(1).tolist() == [3, 0, 0, 3]
    grown = torch.empty(0, device=device)
    torch.add(x, x, out=grown)
    assert grown.shape == x.shape
    assert torch.equal(copy.deepcopy(x).cpu(), x.cpu())


def test_attention_has_the_cpus_bits(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, n, 16, generator=generator) for heads, n in ((4, 3), (4, 7)))
    mask = torch.ones(1, 1, 3, 7, dtype=torch.bool).tril(4)
    ours = F.scaled_dot_product_attention(*(t.to(device) for t in (q, k, k, mask)))
    assert torch.equal(ours.cpu(), F.scaled_dot_product_attention(q, k, k, mask))


def test_gradients_are_the_cpus(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 1, 4, 5, 8, generator=generator)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()

    def gradient(on: str, **options: Any) -> torch.Tensor:
        w = weights.clone().to(on).requires_grad_()
        F.scaled_dot_product_attention(*w, **options).square().sum().backward()
        assert w.grad is not None
        return w.grad.cpu()

    for options in ({"is_causal": True}, {"attn_mask": mask}):
        there = {
            name: value if value is True else value.to(device) for name, value in options.items()
        }
        torch.testing.assert_close(gradient(device, **there), gradient("cpu", **options))


def test_autocast_lowers_products(device: str) -> None:
    x, linear = torch.ones(2, 3, device=device), torch.nn.Linear(3, 4).to(device)
    assert linear(x).dtype == torch.float32
    with torch.autocast(device.split(":")[0], torch.bfloat16):
        assert linear(x).dtype == (x @ x.T).dtype == torch.bfloat16
        assert (x + x).dtype == torch.float32


@pytest.mark.parametrize("seeded", [True, False])
def test_draws_are_the_cpus(device: str, seeded: bool) -> None:
    def draws(on: str) -> Any:
        torch.manual_seed(5)
        generator = torch.Generator(on).manual_seed(3) if seeded else None
        p = torch.ones(1, 50, device=on)
        return torch.multinomial(p, 9, generator=generator).tolist()

    assert draws(device) == draws("cpu")


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


def test_single_numbers_and_indices_may_come_from_the_host(device: str) -> None:
    x = torch.arange(6, device=device).reshape(2, 3)
    assert (x + torch.tensor(1)).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert x[torch.tensor([1])].tolist() == [[3, 4, 5]]
    x[[0], [1]] = 7
    assert x[0].tolist() == [0, 7, 2]


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


def test_lists_are_one_kernel_where_they_are_dense(device: str) -> None:
    def kernels(to: list[torch.Tensor]) -> int:
        news = [torch.ones(2, 3, device=device) for _ in to]
        with pretended.counted() as seen:
            torch._foreach_copy_(to, news)
        assert all(t.eq(1).all() for t in to)
        return seen.kernels["aten::_foreach_copy_"]

    whole = torch.zeros(5, 2, 9, device=device)
    assert kernels([torch.zeros(2, 3, device=device) for _ in range(4)]) == 1
    assert kernels(list(whole[:4, :, 3:6])) == 4


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
    with pretended.late_copies():
        held = torch.ones(3)
        x = held.to(device, non_blocking=True) + 1
        assert x.tolist() == [2, 2, 2]  # the host has waited
        held.zero_()
        (x + 1).sum()
    with pretended.late_copies():
        torch.ones(3).pin_memory().to(device, non_blocking=True).sum()  # its allocator waits
    with pytest.raises(RuntimeError, match="late copy 0 released"), pretended.late_copies():
        torch.ones(3).to(device, non_blocking=True).sum()
    with pytest.raises(RuntimeError, match="late copy 0 overwritten"), pretended.late_copies():
        overwrite(held, held.to(device, non_blocking=True))


def overwrite(source: torch.Tensor, copied: torch.Tensor) -> None:
    source += 1
    copied.sum()


def test_late_copies_are_told_even_if_the_error_was_caught(device: str) -> None:
    told = pytest.raises(AssertionError, match=r"may read garbage: .*released': 1}")
    with told, pretended.late_copies(), pytest.raises(RuntimeError):
        torch.ones(3).to(device, non_blocking=True).sum()


def test_a_late_copy_to_the_host_arrives_with_a_wait(device: str) -> None:
    x, event = torch.ones(3, device=device), torch.Event(device)
    with pretended.late_copies():
        host = x.to("cpu", non_blocking=True)
        assert host.tolist() != [1, 1, 1]
        event.record()
        assert not event.query()
        event.synchronize()
        assert host.tolist() == [1, 1, 1]


def test_float64_can_be_missing(device: str) -> None:
    x = torch.ones(2, device=device)
    with pretended.without_float64():
        for wrong in (x.double, lambda: torch.ones(2, dtype=torch.float64).to(device)):
            with pytest.raises(TypeError, match="no float64"):
                wrong()
    assert x.double().dtype == torch.float64


def test_it_is_found_only_where_it_is_asked_for(device: str) -> None:
    assert not torch.accelerator.is_available()
    with pretended.there():
        assert torch.accelerator.is_available()
        assert torch.accelerator.current_accelerator(check_available=True) == torch.device(
            "pretend"
        )
        assert torch.accelerator.device_count() == 2
    assert not torch.accelerator.is_available()
    assert torch.ones(2).device.type == "cpu"
    assert torch.device(device).index == 0


def test_it_is_built_once_and_kept_outside(device: str, tmp_path: Path) -> None:  # noqa: ARG001
    path = pretended.built()
    before = path.stat().st_mtime_ns
    assert pretended.built() == path
    assert path.stat().st_mtime_ns == before
    assert Path(__file__).parents[2] not in path.parents
    assert torch.__version__ in path.name


def test_no_compiler_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(pretended.NoCompiler, match=r"no C\+\+ compiler .*install g\+\+"):
        pretended.built()


@pytest.mark.slow
def test_no_compiler_is_a_reason_to_skip(tmp_path: Path) -> None:
    """All tests of the folder say why, and none fails."""
    environment = dict(os.environ, PATH=str(tmp_path))
    environment.pop("CXX", None)
    asked = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", __file__]
    found = subprocess.run(
        [*asked, "-k", "views_share or attention_has"],
        env=environment,
        text=True,
        capture_output=True,
    )
    assert re.search(r"no C\+\+ compiler .*install g\+\+", found.stdout), found.stdout
    assert "2 skipped" in found.stdout
    assert not found.returncode
