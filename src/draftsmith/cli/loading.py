"""From the command's options to texts, a model or an engine, checked before."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith import builtin
from draftsmith.cli.options import Given, MachineOptions, ModelOptions, PlaceOptions
from draftsmith.cli.render import plural
from draftsmith.cli.report import note, stderr
from draftsmith.errors import LoadError, OptionError

if TYPE_CHECKING:
    from rich.progress import Progress

    from draftsmith.engine.engine import Engine
    from draftsmith.model.loaded import LoadedModel


def resolve(model: str | None) -> str:
    """The folder, file or hub id that `--model` means."""
    return builtin.resolve(builtin.default() if model is None else model)


def short(source: str) -> str:
    """What to call a model in a sentence: a hub id as it is, a folder by its name."""
    path = Path(source)
    return path.resolve().name if path.exists() else source


def load_engine(options: ModelOptions, sampling: Given, **others: Any) -> Engine:
    """The engine for these options; bad ones are refused before anything is loaded.

    `others` are handed to `Engine.from_pretrained`.
    """
    source = resolve(options.model)  # before torch is imported: a mistyped folder is told at once
    with waiting(f"loading {short(source)} …"):
        from draftsmith.core.sampling import SamplingParams
        from draftsmith.engine.engine import Engine

        SamplingParams(**sampling)
        given = asdict(options) | {"model": source} | others
        set_threads(given.pop("threads") or idle())
        engine = Engine.from_pretrained(**given)
    tell_device(options, engine.model)
    if options.model is None and builtin.is_ours(source):
        note(
            f"note: answered by {short(source)}, a small model that ships with this package and "
            f"renames words in files; for one that answers: {builtin.GET_SMOLLM2}"
        )
    return engine


def load_model(machine: MachineOptions, named: str | None = None) -> LoadedModel:
    """The model that `--model` or MODEL (`named`) means, with torch's threads set as wanted."""
    if named is not None and machine.model is not None:
        raise OptionError("MODEL and --model were both given: choose one")
    source = resolve(named or machine.model)
    with waiting(f"loading {short(source)} …"):
        from draftsmith.model.load import load

        set_threads(machine.threads)
        loaded = load(source, None, machine.dtype, machine.device, prepack=machine.prepack)
    tell_device(machine, loaded)
    return loaded


def tell_device(options: PlaceOptions, loaded: LoadedModel) -> None:
    """Say on stderr which accelerator is used where nobody chose one."""
    if options.device is None and loaded.device.type != "cpu":
        from draftsmith.model.devices import name_of

        note(f"note: running on {name_of(loaded.device)}; --device cpu runs on the CPU")


def load_tokenizer(model: str | None) -> Any:
    """The tokenizer of the model that `--model` means."""
    source = resolve(model)
    with waiting(f"reading the tokenizer of {short(source)} …"):
        from draftsmith.model.load import read_tokenizer

        return read_tokenizer(source, {})


def read_text(path: str) -> str:
    """A text file, or standard input for -; raises LoadError for what is no text."""
    name = "standard input" if path == "-" else path
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).expanduser().read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise LoadError(f"cannot read {name}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise LoadError(f"{name} is not UTF-8 text (byte {error.start} does not fit)") from error
    if "\0" in text:
        raise LoadError(f"{name} is not text: it contains zero bytes")
    return text


def set_threads(threads: int | None) -> None:
    """Let torch use so many CPU threads; None leaves it its choice."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


_OURS: set[int] | None = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
"""The processors that this command may use, before any library binds its threads."""


def _busy_seconds() -> float:
    """Of our processors, for anybody but this process, since the machine started; 0: not told."""
    ours, ticks = {f"cpu{number}" for number in _OURS or ()}, 0
    try:
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            if line.partition(" ")[0] in ours:
                user, nice, system, _, _, *others = map(int, line.split()[1:9])
                ticks += user + nice + system + sum(others)
    except (OSError, ValueError):  # Only Linux tells, and not in every sandbox.
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time() if ticks else 0.0


_BEGAN = time.perf_counter(), _busy_seconds()


def _cores_of_others() -> float:
    """How many cores other work has kept busy since this command began."""
    return (_busy_seconds() - _BEGAN[1]) / (time.perf_counter() - _BEGAN[0])


def idle() -> int | None:
    """How many CPU threads to use beside other work; None: torch's choice.

    A thread without a core of its own lets all others wait for it, in every layer.
    """
    import torch

    cores, others = len(_OURS or ()) or os.cpu_count() or 1, _cores_of_others()
    threads = max(1, round(cores - others))
    if threads >= torch.get_num_threads():
        return None
    note(
        f"note: other work keeps {others:.1f} of {cores} cores busy, so this takes "
        f"{plural(threads, 'thread')}; --threads sets how many"
    )
    return threads


def busy() -> str | None:
    """A warning if other work on this machine will disturb the times; None if it is idle."""
    others = _cores_of_others()
    return f"other work keeps {others:.1f} cores busy, so times vary" if others > 0.5 else None


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say on stderr what takes so long, if somebody is watching."""
    console = stderr()
    with console.status(what) if console.is_terminal else contextlib.nullcontext():
        yield


def progress(*, transient: bool = False) -> Progress:
    """Bars that show done and total and the time left; silent in a file."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console, text = stderr(), TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    silent = not console.is_terminal
    return Progress(*columns, console=console, disable=silent, transient=transient)


@contextlib.contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar that its caller advances."""
    with progress(transient=True) as shown:
        number = shown.add_task(what, total=total)
        yield lambda done: shown.advance(number, done)
