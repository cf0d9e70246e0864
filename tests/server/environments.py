"""Environments of their own for the programs that the server is tried with.

`python tests/server/environments.py` makes them all, as .ci/run does; a test makes its own.
They stay in $DRAFTSMITH_CLIENTS, by default a folder in draftsmith's cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from draftsmith.storage import cache_folder

PACKAGES = {
    "openai-2": (
        "openai==2.54.0",
        "langchain-openai==1.7.3",
        "litellm==1.106.2",
        "mcp==2.3.0",  # which litellm wants where tools are
        "llm==0.32.1",
    ),
    "openai-3": ("openai==3.54.0",),
    "guidellm": ("guidellm==0.8.1", "torch==2.13.0"),
    "node": ("openai@7.57.0",),
}
"""What is installed in each: by npm in `node`, by pip in the others."""


def make(name: str) -> Path:
    """The folder of an environment; raises OSError or CalledProcessError if it cannot be made."""
    packages = PACKAGES[name]
    named = hashlib.sha256(repr((sys.version_info[:2], packages)).encode()).hexdigest()[:8]
    base = Path(os.environ.get("DRAFTSMITH_CLIENTS") or cache_folder() / "clients")
    folder, ready = base / f"{name}-{named}", base / f"{name}-{named}" / "ready"
    base.mkdir(parents=True, exist_ok=True)
    with (base / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not ready.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            if name == "node":
                call("npm", "install", "--prefix", folder, *packages)
            else:
                call(sys.executable, "-m", "venv", folder)
                call(folder / "bin" / "python", "-m", "pip", "install", "-q", *packages)
            ready.touch()
    return folder


def call(*command: str | Path) -> None:
    """Run a command; raises CalledProcessError with what it said."""
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    for name in PACKAGES:
        if name == "node" and shutil.which("npm") is None:
            print("there is no npm here, so its library is not tried")
        else:
            print(make(name), flush=True)
