"""Which of several ways to compute is taken."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from draftsmith import Engine
from draftsmith.errors import OptionError
from draftsmith.model import measure
from draftsmith.model.choice import Measured, cheapest
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.measure import CostTable, Point, Slope

FLOAT = {("float32", 1), ("float32", 2)}


def test_plain_and_wide_passes_count_alike() -> None:
    # A processor without bfloat16 arithmetic: plain passes are cheaper in it, wide ones costly.
    ways = {("float32", 1): {1: 1.0, 16: 2.0}, ("bfloat16", 1): {1: 0.6, 16: 6.0}}
    assert cheapest(ways, FLOAT) == ("float32", 1)
    ways = {("float32", 1): {1: 1.0, 16: 2.0}, ("bfloat16", 2): {1: 0.6, 16: 1.1}}
    assert cheapest(ways, FLOAT) == ("bfloat16", 2)


def test_the_usual_way_is_kept_unless_another_is_clearly_cheaper() -> None:
    ways = {
        ("float32", 1): {1: 1.0, 16: 2.0},
        ("bfloat16", 1): {1: 0.95, 16: 1.9},
        ("float32", 2): {1: 2.0, 16: 2.0},
    }
    assert cheapest(ways, FLOAT) == ("float32", 1)
    assert cheapest({("bfloat16", 1): {1: 1.0, 16: 2.0}}, FLOAT) == ("bfloat16", 1)


def test_without_a_pass_of_16_the_widest_narrower_one_counts() -> None:
    ways = {"float32": {1: 1.0, 8: 1.5, 64: 9.0}, "bfloat16": {1: 0.5, 8: 5.0, 64: 6.0}}
    assert cheapest(ways, {"float32"}) == "float32"
    assert cheapest({"float32": {1: 1.0}, "bfloat16": {1: 0.5}}, {"float32"}) == "bfloat16"


SAVE = Measured.save
COSTS = {"float32": {1: 1.0, 16: 2.0}, "bfloat16": {1: 0.5, 16: 0.9}}


def saved(folder: Path, dtype: torch.dtype) -> Path:
    copy.deepcopy(tiny.model()).to(dtype).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Passes cost what `COSTS` says; the dtypes that were timed."""
    seen: list[str] = []

    def cost(loaded: LoadedModel, *_: Any, **__: Any) -> dict[int, float]:
        seen.append(loaded.dtype_name)
        return COSTS[seen[-1]]

    monkeypatch.setattr(measure, "pass_cost", cost)
    return seen


def test_half_precision_weights_may_go_either_way(
    tmp_path: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, torch.bfloat16)
    loaded = load(folder, dtype="measured")
    assert timed == ["bfloat16", "float32"]
    assert loaded.dtype == torch.bfloat16
    assert loaded.name == str(folder)
    assert loaded.measured is not None
    assert "500.0 and 900.0 ms, 1000.0 and 2000.0 in float32" in loaded.measured.explain()
    # A processor without bfloat16 arithmetic: plain passes are cheaper in it, wide ones costly.
    monkeypatch.setitem(COSTS, "bfloat16", {1: 0.6, 16: 6.0})
    assert Engine.from_pretrained(folder, dtype="measured").model.dtype == torch.float32


def test_float32_weights_are_not_rounded_for_speed(tmp_path: Path, timed: list[str]) -> None:
    folder = saved(tmp_path, torch.float32)
    loaded = load(folder, dtype="measured")
    assert (timed, loaded.dtype) == ([], torch.float32)
    assert loaded.measured is not None
    assert loaded.measured.explain() == "float32, the checkpoint's own"
    told, models = measure.compare_dtypes(load(folder), lambda d: load(folder, dtype=d), True)
    assert models.keys() == told.seconds.keys() == {"float32", "bfloat16"}
    assert told.best == "float32"
    assert "500.0 and 900.0 in bfloat16 (which rounds these weights)" in told.explain()


@pytest.fixture
def mindful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder in which choices are remembered."""
    monkeypatch.setattr(Measured, "save", SAVE)
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dtypes"


def test_a_choice_is_measured_once(
    tmp_path: Path, timed: list[str], mindful: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "model", torch.bfloat16)
    first = load(folder, dtype="measured")
    again = load(folder, dtype="measured")
    assert timed == ["bfloat16", "float32"]
    assert again.dtype == first.dtype == torch.bfloat16
    assert first.measured is not None
    assert again.measured is not None
    told = f" (measured on {again.measured.when})"
    assert again.measured.explain() == first.measured.explain() + told
    # Another number of threads, or a file that nobody can read: measured again.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    load(folder, dtype="measured")
    assert timed == ["bfloat16", "float32"] * 2
    for spoil in ({}, {"seconds": {"bfloat16": {}, "float32": {}}}, {"own": "banana"}, None):
        for file in mindful.iterdir():
            known = json.loads(file.read_text())
            file.write_text(json.dumps(spoil and known | spoil))
        timed.clear()
        load(folder, dtype="measured")
        assert timed == ["bfloat16", "float32"]
    assert len(list(mindful.iterdir())) == 2


def test_a_choice_is_not_for_other_weights(tmp_path: Path, timed: list[str], mindful: Path) -> None:
    folder = tmp_path / "model"
    for dtype in (torch.bfloat16, torch.float32):
        saved(folder, dtype)
        config = json.loads((folder / "config.json").read_text())
        del config["dtype"]  # nothing but the weights tells
        (folder / "config.json").write_text(json.dumps(config))
        assert load(folder, dtype="measured").dtype == dtype
    assert timed == ["bfloat16", "float32"]
    assert len(list(mindful.iterdir())) == 1


def test_without_a_home_folder_choices_are_not_remembered(
    tmp_path: Path,
    timed: list[str],
    mindful: Path,
    homeless: None,  # noqa: ARG001
) -> None:
    folder = saved(tmp_path / "model", torch.bfloat16)
    for _ in range(2):
        assert load(folder, dtype="measured").dtype == torch.bfloat16
    assert timed == ["bfloat16", "float32"] * 2
    assert not mindful.exists()


def test_a_cache_folder_that_cannot_be_written_costs_only_time(
    tmp_path: Path, timed: list[str], mindful: Path
) -> None:
    mindful.parent.write_text("no folder")
    folder = saved(tmp_path / "model", torch.bfloat16)
    assert load(folder, dtype="measured").dtype == torch.bfloat16
    assert load(folder, dtype="measured").dtype == torch.bfloat16
    assert timed == ["bfloat16", "float32"] * 2


def test_a_dtype_that_is_asked_for_is_not_measured(tmp_path: Path, timed: list[str]) -> None:
    folder = saved(tmp_path, torch.bfloat16)
    assert load(folder).measured is None
    assert load(folder, dtype="float32").dtype == torch.float32
    assert timed == []
    with pytest.raises(OptionError, match="cannot be applied to a live model"):
        load(tiny.model(), dtype="measured")


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


def test_recorded_costs_hold_what_was_measured() -> None:
    points = [Point(b, c, p, b * (9 + p + c / 100), 0.0, 0.0)
              for b in (1, 4) for c in (100, 200, 300) for p in (1, 65)]  # fmt: skip
    table = CostTable("m", "cpu", "float32", 1, "", {}, tuple(points), {})
    cost = measure.recorded(table)
    assert cost.relative(8) == pytest.approx((9 + 9 + 2) / (9 + 1 + 2))
    assert cost.at(4).relative(8) == pytest.approx((9 + 3 + 2) / (9 + 1 + 2))  # two for each row
    assert measure.recorded(Slope(0.1)).at(2).relative(1) == pytest.approx(1.2 / 1.1)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("_MOST_PARAMETERS", 10, "billion parameters that would take long"),
        ("memory_bytes", lambda _: 1000, "its weights alone would take"),
    ],
)
def test_what_is_too_large_keeps_its_dtype(
    tmp_path: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch,
    name: str, value: Any, words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(measure, name, value)
    loaded = load(saved(tmp_path, torch.bfloat16), dtype="measured")
    assert (timed, loaded.dtype) == ([], torch.bfloat16)
    assert loaded.measured is not None
    assert loaded.measured.explain().startswith("bfloat16, the checkpoint's own, float32 was not")
    assert words in loaded.measured.explain()


def test_a_dtype_that_cannot_be_run_is_left_out(
    tmp_path: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(COSTS, "float32")

    def broken(_: str) -> LoadedModel:
        raise RuntimeError("no kernel\nfor this")

    own = load(saved(tmp_path, torch.bfloat16))
    told, models = measure.compare_dtypes(own, broken)
    assert (told.best, list(models), timed) == ("bfloat16", ["bfloat16"], ["bfloat16"])
    assert told.left_out == {"float32": "no kernel"}


def test_quantized_blocks_are_not_held_to_float32() -> None:
    both = frozenset(COSTS)
    assert Measured("float32", COSTS, {}, both).best == "bfloat16"
    assert Measured("float32", COSTS, {}, frozenset({"float32"})).best == "float32"
