"""The dtype that a model gets, and what passes cost."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import tiny
from draftsmith import Engine
from draftsmith.model import dtype as dtypes
from draftsmith.model import measure
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from tiers import slow_after


def saved(folder: Path, dtype: torch.dtype) -> Path:
    copy.deepcopy(tiny.model()).to(dtype).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(params=[True, False], ids=["computes in half precision", "does not"])
def computes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the processor has arithmetic of the half precisions."""
    monkeypatch.setattr(
        dtypes, "computes_in", lambda dtype, _: dtype == torch.float32 or request.param
    )
    return bool(request.param)


@pytest.mark.parametrize("own", slow_after(1, [torch.bfloat16, torch.float16, torch.float32]))
def test_a_model_gets_the_checkpoints_dtype_if_the_processor_computes_in_it(
    tmp_path: Path, computes: bool, own: torch.dtype
) -> None:
    folder = saved(tmp_path, own)
    wanted = own if computes else torch.float32
    for loaded in (load(folder), Engine(folder, drafter="none", prepack=False).model):
        assert loaded.dtype == wanted
        assert loaded.widened == (None if wanted == own else own)
        name = str(own).removeprefix("torch.")
        assert loaded.dtype_explained.startswith(str(wanted).removeprefix("torch."))
        assert (f"checkpoint is {name}" in loaded.dtype_explained) == (wanted != own)
        assert {p.dtype for p in loaded.model.parameters()} == {wanted}
    want = copy.deepcopy(tiny.model()).to(own).state_dict()
    for name, weight in load(folder).model.state_dict().items():
        assert torch.equal(weight, want[name].to(wanted))  # no number changes
    assert load(folder, dtype="auto").dtype == own
    assert load(folder, dtype="bfloat16").dtype == torch.bfloat16
    live = copy.deepcopy(tiny.model()).to(own)
    assert load(live).dtype == own  # the user's own model is never changed


def test_weights_that_would_not_fit_in_float32_keep_their_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtypes, "computes_in", lambda *_: False)
    monkeypatch.setattr(dtypes, "free_bytes", lambda _: 1000)
    loaded = load(saved(tmp_path, torch.bfloat16))
    assert (loaded.dtype, loaded.widened) == (torch.bfloat16, None)


def test_a_dtype_that_cannot_be_tried_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: str) -> LoadedModel:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(measure, "pass_cost", lambda _: {1: 1.0})
    own = load(saved(tmp_path, torch.float32))
    assert measure.compare_dtypes(own, broken) == ({"float32": {1: 1.0}}, {"bfloat16": "no kernel"})
    monkeypatch.setattr(measure, "memory_bytes", lambda _: 1000)
    _, left_out = measure.compare_dtypes(own, broken)
    assert "its weights alone would take" in left_out["bfloat16"]


def test_what_is_free_is_what_the_container_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 1000 kB\n",
        "/proc/self/cgroup": "0::/a/b\n",
        "/sys/fs/cgroup/memory.max": "max\n",
        "/sys/fs/cgroup/memory.current": "600000\n",
        "/sys/fs/cgroup/memory.stat": "anon 500000\nfile 100000\n",
    }

    def free(**changed: str) -> int | None:
        monkeypatch.setattr(measure, "Path", lambda path: tmp_path / str(path).lstrip("/"))
        for path, text in files.items():
            own = tmp_path / path.lstrip("/")
            own.parent.mkdir(parents=True, exist_ok=True)
            own.write_text(changed.get(own.name.replace(".", "_"), text))
        return measure.free_bytes(torch.device("cpu"))

    assert free() == 1_024_000
    assert free(memory_max="900000\n") == 400_000
    assert free(memory_max="400000\n") == 0
    inner = tmp_path / "sys/fs/cgroup/a/b"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("700000\n")
    (inner / "memory.current").write_text("100000\n")
    assert free() == 600_000
    assert free(memory_max="900000\n") == 400_000  # of the parent
    old = tmp_path / "sys/fs/cgroup/memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("500000\n")
    (old / "memory.usage_in_bytes").write_text("300000\n")
    (old / "memory.stat").write_text("cache 0\ntotal_cache 50000\n")
    assert free(cgroup="9:cpu:/\n8:memory:/of/the/host\n0::/\n") == 250_000
    (tmp_path / "proc/meminfo").unlink()
    monkeypatch.setattr(measure, "memory_bytes", lambda _: 8000)
    assert measure.free_bytes(torch.device("cpu")) == 4000  # where no kernel's file tells


def test_what_torch_holds_unused_of_an_accelerator_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 400)
    assert measure.free_bytes(torch.device("cuda")) == 1300
