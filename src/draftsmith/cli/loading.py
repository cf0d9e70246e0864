"""From the command's options to texts, a model or an engine, checked before."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from threading import Timer
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from draftsmith import builtin
from draftsmith.cli.options import ModelOptions, PlaceOptions
from draftsmith.cli.report import interactive, note, stderr
from draftsmith.errors import LoadError, OptionError
from draftsmith.storage import expanded

if TYPE_CHECKING:
    from rich.progress import Progress

    from draftsmith.engine.engine import Engine
    from draftsmith.model.loaded import LoadedModel


T = TypeVar("T")


def resolve(model: str | None) -> str:
    """The folder, file or hub id that `--model` means."""
    return builtin.resolve(builtin.default() if model is None else model)


def short(source: str) -> str:
    """Return a short name of a model: a hub id, or the name of a folder."""
    return Path(source).resolve().name if os.path.exists(source) else source


def load_engine(options: ModelOptions, sampling: Mapping[str, Any], **others: Any) -> Engine:
    """The engine for these options; bad ones are refused before anything is loaded.

    `others` are handed to `Engine.from_pretrained`.
    """
    source = resolve(options.model)  # before torch is imported: a mistyped folder fails at once
    with waiting(_loading(source)):
        from draftsmith.core.sampling import SamplingParams
        from draftsmith.engine.engine import Engine

        SamplingParams(**sampling)
        given = asdict(options) | {"model": source} | others
        set_threads(given.pop("threads"))
        engine = Engine.from_pretrained(**given)
    tell_device(options, engine.model)
    if options.model is None and builtin.is_ours(source):
        note(
            f"note: answered by {short(source)}, a small model that ships with this package and "
            f"renames words in files; for one that answers: {builtin.GET_SMOLLM2}"
        )
    return engine


def load_model(machine: PlaceOptions) -> LoadedModel:
    """The model that `--model` means, with torch's threads set as wanted."""
    source = resolve(machine.model)
    how = asdict(machine) | {"model": source}
    with waiting(_loading(source)):
        from draftsmith.model.load import load

        set_threads(how.pop("threads"))
        loaded = load(**how)
    tell_device(machine, loaded)
    return loaded


def tell_device(options: PlaceOptions, loaded: LoadedModel) -> None:
    """Print to stderr which accelerator is used, if the user chose none."""
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
        data = sys.stdin.buffer.read() if path == "-" else expanded(path).read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise LoadError(f"cannot read {name}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise LoadError(f"{name} is not UTF-8 text (byte {error.start} does not fit)") from error
    if "\0" in text:
        raise LoadError(f"{name} is not text: it contains zero bytes")
    return text


MOST_THREADS = 1024
"""Torch ends the process if the system refuses to make a thread."""


def set_threads(threads: int | None) -> None:
    """Let torch use `threads` CPU threads; None keeps torch's default."""
    if threads is not None:
        if threads > MOST_THREADS:
            raise OptionError(f"threads must be at most {MOST_THREADS}, got {threads}")
        import torch

        torch.set_num_threads(threads)


_LOAD = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
"""Processes that wanted to run in the minute before this command; Windows does not tell."""


def busy() -> str | None:
    """A warning if other work on this machine will disturb the times; None if it is idle."""
    return f"the load was {_LOAD:.1f} before this began, so times vary" if _LOAD > 0.5 else None


PATIENCE = 10.0
"""Seconds after which a file or a pipe hears what takes so long."""


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say on stderr what takes long: in a terminal at once, else when it has taken `PATIENCE`."""
    console = stderr()
    if interactive(console):
        with console.status(what):
            yield
        return
    late = Timer(PATIENCE, note, [what])
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def awaited(pieces: Iterator[T]) -> Iterator[T]:
    """The pieces of an answer; says on stderr what is waited for until the first one comes."""
    with waiting("waiting for the first token … (longer the first time: functions are compiled)"):
        first = next(pieces, None)
    if first is not None:
        yield first
        yield from pieces


def _loading(source: str) -> str:
    """Return the message shown while a model is loaded."""
    why = ""
    if source.endswith(".gguf"):
        why = " (longer the first time: a GGUF file is converted once)"
    elif not os.path.exists(source):
        why = " (from the hub, unless it is in its cache)"
    return f"loading {short(source)} …{why}"


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
    silent = not interactive(console)
    return Progress(*columns, console=console, disable=silent, transient=transient)


EVERY = 30
"""Seconds between two lines about progress in a file."""


@contextlib.contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar that its caller advances; in a file, a line every half minute."""
    with progress(transient=True) as shown:
        number, last = shown.add_task(what, total=total), monotonic()

        def advance(done: int) -> None:
            nonlocal last
            shown.advance(number, done)
            if shown.disable and monotonic() - last > EVERY:
                last = monotonic()
                note(f"{what}: {shown.tasks[0].completed:.0f} of {total}")

        yield advance
