"""From the command's options to an engine, checked before and quiet while loading."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith import builtin
from draftsmith.cli.options import ModelOptions
from draftsmith.cli.report import stderr
from draftsmith.errors import OptionError

if TYPE_CHECKING:
    from draftsmith.core.drafter import Drafter
    from draftsmith.engine.engine import BudgetSpec, Engine


def resolve(model: str | None) -> str:
    """The folder or hub id that `--model` means; no value is the built-in model."""
    return str(builtin.path()) if model is None else builtin.resolve(model)


def is_builtin(source: str) -> bool:
    """Whether a resolved model is one of ours, with our edit prompts in its template."""
    return Path(source).parent == Path(builtin.__file__).parent


def short(source: str) -> str:
    """What to call a model in a sentence: a hub id as it is, a folder by its name."""
    path = Path(source)
    return path.resolve().name if path.exists() else source


def load_engine(options: ModelOptions) -> Engine:
    """The engine for these options; bad options are refused before anything is loaded."""
    drafter, budget = checked(options)
    source = resolve(options.model)
    with waiting(f"loading {short(source)} …"), quiet():
        import torch

        from draftsmith.engine.engine import Engine

        if options.threads is not None:
            torch.set_num_threads(options.threads)
        return Engine.from_pretrained(
            source,
            drafter=drafter,
            budget=budget,
            dtype=options.dtype,
            device=checked_device(options.device),
        )


def checked(options: ModelOptions) -> tuple[Drafter, BudgetSpec]:
    """Drafter and budget; raises OptionError."""
    from draftsmith.drafters.registry import parse

    return parse(options.drafter), _budget(options.budget)


def _budget(value: str) -> BudgetSpec:
    from draftsmith.engine.engine import checked_budget

    # The engine checks the words, too, and says what would work.
    return checked_budget(int(value) if value.isdecimal() else value)  # type: ignore[arg-type]


def checked_device(device: str | None) -> str | None:
    """The device's name if it works here; raises OptionError with torch's reason."""
    if device is None:
        return None
    import torch

    try:
        torch.zeros(1, device=device).sum().item()
    except (RuntimeError, AssertionError, ValueError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise OptionError(f"device={device!r} cannot be used here: {reason}") from error
    return device


def busy() -> str | None:
    """A warning if other work on this machine will disturb the times; None if it is idle."""
    try:
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
    except (AttributeError, OSError):  # Windows does not know
        return None
    if load < 0.6 * cores:
        return None
    return f"other work is running here (load {load:.1f} on {cores} cores), so times vary"


@contextlib.contextmanager
def own_threads() -> Iterator[int]:
    """Torch's thread count may be changed inside; the value it had is given and put back."""
    import torch

    before = torch.get_num_threads()
    try:
        yield before
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say on stderr what takes so long, if somebody is watching."""
    console = stderr()
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and warnings, which speak to programmers."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
