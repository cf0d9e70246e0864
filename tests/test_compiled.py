"""Compiled functions: kept on disk, compiled anew after a change, failing for no disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from numba.core import caching

from draftsmith import compiled


def twice(number: int) -> int:
    return 2 * number


def run(source: Path) -> str:
    place = os.environ | {"NUMBA_CACHE_DIR": str(source.parent / "cache")}
    command = [sys.executable, str(source)]
    return subprocess.run(command, env=place, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def doubling(tmp_path: Path) -> Path:
    """A program whose compiled function calls one of another file."""
    (tmp_path / "factors.py").write_text(
        "from draftsmith.compiled import inner\n"
        "FACTOR = 2\n"
        "@inner\n"
        "def scaled(number):\n    return FACTOR * number\n"
    )
    source = tmp_path / "doubling.py"
    source.write_text(
        "from draftsmith.compiled import compiled\n"
        "from factors import scaled\n"
        "@compiled\n"
        "def double(number):\n    return scaled(number)\n"
        "print(double(21), sum(double.stats.cache_hits.values()))\n"
    )
    return source


@pytest.mark.slow
def test_a_change_in_another_file_is_noticed(doubling: Path) -> None:
    assert [run(doubling), run(doubling)] == ["42 0\n", "42 1\n"]
    other = doubling.with_name("factors.py")
    for old, new, found in (
        ("= 2", "= 3", "63 0\n"),
        ("* number", "* number + 1", "64 0\n"),
        ("inner", "inlined", "64 0\n"),
    ):
        other.write_text(other.read_text().replace(old, new))
        assert run(doubling) == found


@pytest.mark.slow
def test_a_cached_file_that_was_cut_off_is_made_anew(doubling: Path) -> None:
    run(doubling)
    for ending in ("nbi", "nbc"):
        (file,) = doubling.parent.rglob(f"*.{ending}")
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        assert run(doubling) == "42 0\n"
        assert file.stat().st_size == len(whole)


def test_versions_of_numba_keep_their_own_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    for version, hits in (("0.1", 0), ("0.2", 0), ("0.1", 1)):
        monkeypatch.setattr("numba.__version__", version)
        double = compiled.compiled(twice)
        assert double(21) == 42
        assert sum(double.stats.cache_hits.values()) == hits


def test_a_disk_that_is_full_or_read_only_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", "/dev/null/nowhere")
    assert compiled.compiled(twice)(21) == 42
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))

    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(caching.IndexDataCacheFile, "save", full)
    assert compiled.compiled(twice)(21) == 42


def test_seconds_of_compiling_are_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    before, call = compiled.compiling(), compiled.compiled(twice)
    assert call(21) == 42
    first = compiled.compiling()
    assert first > before
    call(21)
    assert compiled.compiling() == first
    call(2.5)
    assert compiled.compiling() > first
