"""A pretended accelerator: `install()` makes torch know the devices "pretend:0" and "pretend:1".

`pretended.cpp` says what is pretended. It is compiled once for each version of torch and of itself,
by one process, into the user's cache folder.

    with counted() as seen: ...         # kernels, and who made the host wait
    with like_mps(): ...                # no float64; the source of a copy must live until a wait
    with capturing(): ...               # raises where the capture of a CUDA graph would
    with there(): ...                   # torch.accelerator finds it
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import draftsmith

OWN = Path(draftsmith.__file__).parent
NAME = "pretend"
SOURCE = Path(__file__).with_suffix(".cpp")
IS_AVAILABLE = torch.accelerator.is_available
"""torch's own: tests/conftest.py hides the accelerator of this machine from other tests."""
TOLD = ctypes.CFUNCTYPE(None, ctypes.c_char_p)

_available = False
"""Whether `torch.accelerator.is_available()`: only in `there`, for other tests' sake."""


class NoCompiler(RuntimeError):
    """There is nothing to build the device with; the message says what is missing."""


def compiler() -> str:
    """The C++ compiler of this machine; raises NoCompiler."""
    if sys.platform != "linux":
        raise NoCompiler(f"the pretended device is built on Linux only, this is {sys.platform}")
    found = map(shutil.which, [os.environ.get("CXX") or "c++", "g++", "clang++"])
    if (first := next(filter(None, found), None)) is None:
        raise NoCompiler("no C++ compiler: install g++ to run the tests on a pretended device")
    return first


def built() -> Path:
    """The library, compiled if it is not there yet; raises NoCompiler, RuntimeError."""
    command = [compiler(), "-std=c++20", "-O1", "-g0", "-shared", "-fPIC", "-w"]
    parts = [SOURCE.read_bytes(), torch.__version__, sys.version, torch.__file__, *command]
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    name = f"pretended-{torch.__version__}-{digest}.so"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "draftsmith-tests"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(folder / f"{name}.lock", "w") as lock:
        return _build(folder / name, command, lock)


def _build(target: Path, command: list[str], lock: Any) -> Path:
    """Compile unless it is there; of several processes the first does, and the others wait."""
    import fcntl

    fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
    if target.exists():
        return target
    root = Path(torch.__file__).parent
    include, library = root / "include", root / "lib"
    made = target.with_suffix(f".{os.getpid()}")
    options = [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}", str(SOURCE),
        "-o", str(made), f"-L{library}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{library}",
    ]  # fmt: skip
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        made.unlink(missing_ok=True)
        raise RuntimeError(f"{command[0]} could not build {SOURCE.name}:\n{done.stderr[-4000:]}")
    made.rename(target)
    return target


@cache
def install() -> ctypes.CDLL:
    """Build and register the device, once in a process; raises NoCompiler."""
    path = built()
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(path)
    library = ctypes.CDLL(str(path))
    library.pretended_rule.argtypes = (ctypes.c_char_p, ctypes.c_bool)
    library.pretended_seed.argtypes = (ctypes.c_int, ctypes.c_uint64)
    library.pretended_kernels.restype = library.pretended_violations.restype = ctypes.c_char_p
    torch._register_device_module(NAME, _module(library))
    torch.utils.generate_methods_for_privateuse1_backend()
    return library


def _module(library: ctypes.CDLL) -> Any:
    """`torch.pretend`: what torch and others ask of a device's module."""

    def index(device: Any) -> int:
        found = device if isinstance(device, int | None) else torch.device(device).index
        return library.pretended_device() if found is None else found

    def manual_seed_all(seed: int) -> None:
        for device in range(2):
            library.pretended_seed(device, seed % 2**64)

    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: _available
    module.is_initialized = lambda: True
    module.device_count = lambda: 2
    module.current_device = library.pretended_device
    module.set_device = lambda device: library.pretended_set_device(index(device))
    module.get_device_name = lambda device=None: f"Pretended accelerator {index(device)}"
    module.synchronize = lambda device=None: torch.accelerator.synchronize(index(device))
    module.manual_seed = lambda seed: library.pretended_seed(index(None), seed % 2**64)
    module.manual_seed_all = manual_seed_all
    module.get_rng_state = lambda device=None: torch.ops.pretended.rng_state(index(device))
    module.set_rng_state = lambda state, device=None: torch.ops.pretended.set_rng_state(
        index(device), state
    )
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.mem_get_info = lambda device=None: (1 << 33, 1 << 34)  # noqa: ARG005
    module.memory_reserved = module.memory_allocated = lambda device=None: 0  # noqa: ARG005
    return module


@contextmanager
def _rule(name: str, on: bool) -> Iterator[ctypes.CDLL]:
    library = install()
    library.pretended_rule(name.encode(), on)
    try:
        yield library
    finally:
        library.pretended_rule(name.encode(), not on)


@contextmanager
def there() -> Iterator[None]:
    """Let `torch.accelerator` say that the device is there, as on a machine that has a GPU."""
    global _available
    install()
    before, _available = _available, True
    try:
        with patch.object(torch.accelerator, "is_available", IS_AVAILABLE):
            yield
    finally:
        _available = before


@contextmanager
def capturing() -> Iterator[None]:
    """Raise RuntimeError for what may not happen while a CUDA stream is captured."""
    with _rule("capturing", True):
        yield


@dataclass
class Seen:
    """What happened on the device: kernels by name, waits by (reason, `file:line` of ours)."""

    kernels: Counter[str] = field(default_factory=Counter)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)


@contextmanager
def counted(hear: Callable[[str], None] = lambda _: None) -> Iterator[Seen]:
    """Count kernels and waits, and say which line of draftsmith waited; `hear` is told each why."""
    seen = Seen()

    def waited(why: bytes) -> None:
        seen.waits[why.decode(), _line()] += 1
        hear(why.decode())

    listener = TOLD(waited)
    with _rule("counting", True) as library:
        library.pretended_kernels()
        library.pretended_listen(listener, TOLD())
        try:
            yield seen
        finally:
            library.pretended_listen(TOLD(), TOLD())
            for line in library.pretended_kernels().decode().splitlines():
                times, name = line.split(" ", 1)
                seen.kernels[name] += int(times)


@contextmanager
def like_mps() -> Iterator[None]:
    """Refuse float64, let copies that do not block happen at the next wait, and hold their sources.

    Host memory that was released or overwritten before then raises in the operation that follows,
    and AssertionError at the end, where somebody caught that. A copy to the host must wait.
    """
    lines: list[str] = []
    listener = TOLD(lambda _what: lines.append(_line()))
    with _rule("late", True) as library:
        library.pretended_listen(TOLD(), listener)
        try:
            yield
        finally:
            library.pretended_listen(TOLD(), TOLD())
            found = library.pretended_violations().decode().splitlines()
    broken = [line.split(" ", 1) for line in found]
    said = Counter(f"{lines[int(number)]}: its source was {what}" for number, what in broken)
    assert not said, f"copies that may read garbage: {dict(said)}"


def _line() -> str:
    """The innermost line of draftsmith that is running, as `core/loop.py:12`."""
    for frame, number in traceback.walk_stack(None):
        file = Path(frame.f_code.co_filename)
        if OWN in file.parents:
            return f"{file.relative_to(OWN)}:{number}"
    return "elsewhere"
