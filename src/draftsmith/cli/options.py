"""Options that commands share, in groups: a command takes a group where others take an option."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

_MODEL = "Model"
_SAMPLING = "Sampling (what is not given comes from the model's generation_config)"
_OUTPUT = "Output"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model answers, and who guesses for it."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", rich_help_panel=_MODEL, metavar="MODEL", show_default="built-in",
            help="A Hugging Face hub id or a folder.",
        ),
    ] = None  # fmt: skip
    drafter: Annotated[
        str,
        typer.Option(
            "--drafter", "-d", rich_help_panel=_MODEL, metavar="NAME",
            help="Who guesses, e.g. none or 'copyspec(gamma=3)'; see `draftsmith drafters`.",
        ),
    ] = "auto"  # fmt: skip
    budget: Annotated[
        str,
        typer.Option(
            rich_help_panel=_MODEL, metavar="N",
            help="Draft tokens per pass: a number, auto (what pays here), or drafter (its own).",
        ),
    ] = "auto"  # fmt: skip
    dtype: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_MODEL, metavar="DTYPE", show_default="the checkpoint's",
            help="float32, bfloat16 or float16.",
        ),
    ] = None  # fmt: skip
    device: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_MODEL, metavar="DEVICE", show_default="cpu",
            help="cpu, cuda, cuda:1, mps, …",
        ),
    ] = None  # fmt: skip
    threads: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_MODEL, metavar="N", min=1, show_default="torch's choice",
            help="CPU threads; `draftsmith doctor` tells what is best here.",
        ),
    ] = None  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen and when the answer ends."""

    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_SAMPLING, metavar="N", show_default="256",
            help="Longest answer, in tokens.",
        ),
    ] = None  # fmt: skip
    temperature: Annotated[
        float | None,
        typer.Option(rich_help_panel=_SAMPLING, metavar="T", help="0 takes the best token."),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(rich_help_panel=_SAMPLING, metavar="K", help="Only the K best; 0 for all."),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_SAMPLING, metavar="P", help="Only the best that sum to P."
        ),
    ] = None  # fmt: skip
    min_p: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_SAMPLING, metavar="P", help="Only those above P times the best."
        ),
    ] = None  # fmt: skip
    repetition_penalty: Annotated[
        float | None,
        typer.Option(rich_help_panel=_SAMPLING, metavar="X", help="Above 1: repeat less."),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(rich_help_panel=_SAMPLING, metavar="N", help="Makes sampling repeatable."),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_SAMPLING, metavar="TEXT",
            help="Ends the answer; may be given several times.",
        ),
    ] = None  # fmt: skip

    def given(self) -> dict[str, Any]:
        """What the caller said, checked; nothing for what they left open."""
        from draftsmith.core.sampling import SamplingParams

        named = {f.name: getattr(self, f.name) for f in fields(self)}
        given = {name: value for name, value in named.items() if value is not None}
        if "stop" in given:
            given["stop"] = tuple(given["stop"])
        SamplingParams(**given)  # raises now, not after minutes of loading
        return given


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is shown beside the answer."""

    show_drafts: Annotated[
        bool,
        typer.Option(
            "--show-drafts", rich_help_panel=_OUTPUT,
            help="Colour each token by who guessed it (in a terminal).",
        ),
    ] = False  # fmt: skip
    stats: Annotated[
        bool,
        typer.Option(
            "--stats", rich_help_panel=_OUTPUT,
            help="Show passes, acceptance and times on standard error.",
        ),
    ] = False  # fmt: skip


Dtype = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", show_default="the checkpoint's", help="e.g. bfloat16."),
]
Device = Annotated[
    str | None, typer.Option(metavar="DEVICE", show_default="cpu", help="cpu, cuda, …")
]
Threads = Annotated[int | None, typer.Option(metavar="N", min=1, show_default="torch's choice")]

NewFolder = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", show_default=False, help="A new folder.")
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", rich_help_panel=_OUTPUT, help="Print one JSON object instead, for machines."
    ),
]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer wants it: every field of its dataclass parameters its own parameter."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            flat.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        inner = get_type_hints(groups[name], include_extras=True)
        flat += [
            inspect.Parameter(
                f.name, parameter.KEYWORD_ONLY, default=f.default, annotation=inner[f.name]
            )
            for f in fields(groups[name])
        ]

    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})  # type: ignore[operator]
        command(**values)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in flat}
    return call
