"""Options that commands share: cyclopts makes them of a class's fields and docstrings."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from cyclopts import Group, Parameter


def group(title: str, place: int) -> Parameter:
    """Make options of a class's fields, under a title of `--help`; `place` orders the titles."""
    return Parameter(name="*", group=Group(title, sort_key=place))


def _check_count(_: Any, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"must be an integer >= 1, got {value}")


Count = Annotated[int, Parameter(validator=_check_count)]
"""At least 1."""
OptionText = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""May begin with a hyphen; a positional one only if it is a hyphen, or comes after --."""
MaxTokens = Annotated[int, Parameter(name=("--max-new-tokens", "--max-tokens"))]
SomeTokens = Annotated[MaxTokens, Parameter(validator=_check_count)]
"""At least 1."""
NewFolder = Annotated[Path, Parameter(name=("--output", "-o"), help="A new folder.")]
Json = Annotated[
    bool,
    Parameter(
        name="--json",
        group=Group("Output", sort_key=4),
        help="Print one JSON object instead, for machines.",
    ),
]


@group("Model", 2)
@dataclass(frozen=True)
class PlaceOptions:
    """Which model is loaded, and where."""

    model: Annotated[
        str | None, Parameter(alias="-m", show_default="smollm2 if installed, else edit-7m")
    ] = None
    """A Hugging Face hub id, a folder, a GGUF file, or a name such as smollm2."""
    _: KW_ONLY
    device: Annotated[str | None, Parameter(show_default="a GPU if there is one")] = None
    """cpu, cuda, cuda:1, mps, …"""
    prepack: Annotated[bool, Parameter(negative="--no-prepack")] = True
    """Lay the linear layers out for this CPU, where that works."""
    threads: Annotated[Count | None, Parameter(show_default="torch's choice")] = None
    """CPU threads."""


@dataclass(frozen=True)
class MachineOptions(PlaceOptions):
    """How the model computes."""

    _: KW_ONLY
    dtype: Annotated[
        str | None,
        Parameter(
            show_default="auto, but float32 where this processor does not compute in half precision"
        ),
    ] = None
    """float32, bfloat16, float16, or auto: the checkpoint's."""


@dataclass(frozen=True)
class ModelOptions(MachineOptions):
    """Which model answers, in what dtype, and which drafter it has."""

    _: KW_ONLY
    exact: bool = False
    """Give plain decoding's answers to the bit, in bfloat16, too."""
    drafter: Annotated[str, Parameter(alias="-d")] = "auto"
    """The drafter, e.g. none or 'copyspec(gamma=3)'; see draftsmith drafters."""
    budget: str = "auto"
    """Draft tokens per pass: a number, auto (what pays here), or drafter (its own)."""


@group("Sampling (defaults hold where the model's generation_config says nothing)", 3)
class Sampling(TypedDict, total=False):
    """The fields of `SamplingParams` that the caller gives, without importing torch."""

    max_new_tokens: Annotated[MaxTokens, Parameter(show_default="256")]
    """Longest answer, in tokens."""
    temperature: Annotated[float, Parameter(show_default="0.0")]
    """0 takes the best token."""
    top_k: Annotated[int, Parameter(show_default="0")]
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: Annotated[float, Parameter(show_default="1.0")]
    """Keep the most probable tokens that together reach this probability."""
    min_p: Annotated[float, Parameter(show_default="0.0")]
    """Keep tokens at least this fraction as probable as the best one."""
    repetition_penalty: Annotated[float, Parameter(show_default="1.0")]
    """Divides (or multiplies, if negative) the score of every token already seen (CTRL paper)."""
    seed: int
    """Makes sampling repeatable."""
    stop: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True)]
    """A string that ends the answer; the text is cut before it. May be given several times."""


@group("Output", 4)
@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is shown beside the answer."""

    show_drafts: bool = False
    """Color each token by the drafter that guessed it (in a terminal)."""
    stats: bool = False
    """Show passes, acceptance and times on standard error."""
