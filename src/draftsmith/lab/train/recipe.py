"""All settings of a training, checked before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from draftsmith.cli.options import group
from draftsmith.errors import OptionError, UnknownName
from draftsmith.values import number


def setting(default: Any, help: str, **limits: Any) -> Any:
    """Declare a dataclass field with a help text for users in its `metadata`.

    `limits`: `least` and `most` are inclusive bounds, `above` is an exclusive one, `choices` lists
    the valid values.
    """
    return field(default=default, metadata={"help": help, **limits})


def check(settings: Any) -> None:
    """Raise OptionError for the first field of a dataclass that exceeds its limits."""
    for known in fields(settings):
        name, value, limits = known.name, getattr(settings, known.name), dict(known.metadata)
        if value not in limits.pop("choices", [value]):
            raise UnknownName(name, value, known.metadata["choices"])
        if limits.pop("help", None) and limits:
            number(name, value, int if isinstance(known.default, int) else float, **limits)


def rate_of(step: int, rising: int, falling: int, highest: float, lowest: float) -> float:
    """Return the learning rate of a step: a linear rise, then a cosine decay."""
    if step < rising:
        return highest * (step + 1) / rising
    fallen = (step - rising) / max(1, falling)
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * fallen)) / 2


ADAPTIVE = Parameter(group=Group("Adaptive tokens", sort_key=2))
STEPS = Parameter(group=Group("Steps", sort_key=3))


@group("Learning", 4)
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a training; the defaults are the paper's. Raises OptionError for invalid values.

    Source: SDSAT, sections 2.2, 3.1 and 3.2. The paper's batch is 4M tokens in sequences of 16,384.
    Not in the paper: `weight_decay` and `clip`, which are Llama 2's, and `token_rate`.
    """

    objective: Annotated[str, ADAPTIVE] = setting(
        "improved",
        "improved (equation 9), basic (equation 8), or plain: no adaptive tokens, for comparison.",
        choices=("improved", "basic", "plain"),
    )
    L: Annotated[int, Parameter(name="--L"), ADAPTIVE] = setting(
        5, "The longest window of adaptive tokens.", least=1
    )
    diverse: Annotated[bool, ADAPTIVE] = setting(
        False, "One for each depth (appendix B), not one for all; then k < L when decoding."
    )
    share: Annotated[float, ADAPTIVE] = setting(
        0.1, "Share of the positions of a mixed sequence; see --share-of.", least=0, most=1
    )
    share_of: Annotated[str, ADAPTIVE] = setting(
        "windows",
        "What the share counts: positions where windows begin (the paper), or replaced ones.",
        choices=("windows", "replaced"),
    )
    w: Annotated[float, ADAPTIVE] = setting(
        1.0, "Weight of the adaptive tokens in equation 9.", least=0
    )
    infill: Annotated[float, STEPS] = setting(
        0.5, "Share of code rearranged as prefix, suffix, middle; 0 for none.", least=0, most=1
    )
    length: Annotated[int, STEPS] = setting(1024, "T: tokens of a sequence.", least=2)
    rows: Annotated[int, STEPS] = setting(8, "Sequences of a step.", least=1)
    rows_per_pass: Annotated[int, STEPS] = setting(
        8, "Sequences of a forward pass; fewer accumulate their gradients.", least=1
    )
    steps: Annotated[int, STEPS] = setting(2000, "How many steps.", least=1)
    learning_rate: float = setting(5e-5, "The highest, reached after warming up.", above=0)
    final_learning_rate: float = setting(1e-5, "The last.", least=0)
    token_rate: float = setting(
        1.0,
        "Factor on the learning rate of adaptive tokens' rows; use 100 in short runs.",
        least=0,
    )
    warmup: float = setting(0.2, "Share of the steps with a rising learning rate.", least=0, most=1)
    weight_decay: float = setting(0.1, "Weight decay of matrices.", least=0)
    clip: float = setting(1.0, "Largest norm of the gradient.", above=0)
    lora: int = setting(
        0, "Rank of LoRA on all linear layers, merged at the end; 0 trains all weights.", least=0
    )
    bfloat16: Annotated[bool, Parameter(negative="--float32")] = setting(
        True,
        "Compute passes in bfloat16 where that is safe and the processor has its arithmetic; "
        "weights stay in float32.",
    )
    seed: int = setting(0, "Seed of the order of the texts, and of the windows.", least=0)

    def __post_init__(self) -> None:
        check(self)
        if self.diverse and self.L < 2:
            raise OptionError("diverse tokens need L=2 or more; with L=1 there is one token")
        most = math.ceil(self.windows)
        if self.adaptive and most * (self.L + 1) > self.length:
            raise OptionError(
                f"{most} windows of up to L={self.L} tokens with gaps between do not fit into "
                f"length={self.length}: lower share={self.share} or L"
            )

    @property
    def adaptive(self) -> bool:
        """Whether adaptive tokens are trained."""
        return self.objective != "plain"

    @property
    def windows(self) -> float:
        """Expected windows per sequence. All lengths from 1 to L are equally frequent."""
        begun = self.share * self.length
        return begun if self.share_of == "windows" else begun * 2 / (self.L + 1)

    @property
    def token_count(self) -> int:
        """Number of adaptive tokens."""
        return (self.L if self.diverse else 1) if self.adaptive else 0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        rising = round(self.warmup * self.steps)
        falling = self.steps - 1 - rising
        return rate_of(step, rising, falling, self.learning_rate, self.final_learning_rate)


HEAD = Parameter(group=Group("Head", sort_key=2))


@group("Learning", 4)
@dataclass(frozen=True, kw_only=True)
class HeadRecipe:
    """Settings of the training of a head. Raises OptionError for invalid values.

    Source: EAGLE-3, section 3.2, for the unrolled steps; the vocabulary by frequency and the
    weights of deeper steps are those of the authors' code. Learning rates are ours.
    """

    start: Annotated[str, Parameter(show_default=False), HEAD] = setting(
        "", "Head to begin with, a folder or hub id; its tokens and layers stay."
    )
    vocabulary: Annotated[int, HEAD] = setting(
        8192, "K: the most frequent tokens of the texts.", least=8
    )
    layers: Annotated[tuple[int, ...], Parameter(name="--layer"), HEAD] = setting(
        (), "Block that it reads, counted from 1, once for each; the paper's if none are named."
    )
    unrolled: Annotated[int, STEPS] = setting(3, "Steps of the training-time test.", least=1)
    decay: Annotated[float, STEPS] = setting(0.8, "Weight of each further step.", above=0, most=1)
    length: Annotated[int, STEPS] = setting(512, "T: tokens of a sequence.", least=8)
    rows: Annotated[int, STEPS] = setting(4, "Sequences of a step.", least=1)
    steps: Annotated[int, STEPS] = setting(2000, "Number of steps.", least=1)
    bfloat16: Annotated[bool, Parameter(negative="--float32"), STEPS] = setting(
        False, "Compute passes in bfloat16, and save the head in it."
    )
    learning_rate: float = setting(
        1e-3, "Highest learning rate, reached after the warm-up.", above=0
    )
    warmup: float = setting(
        0.03, "Share of the steps with a rising learning rate.", least=0, most=1
    )
    clip: float = setting(0.5, "Largest norm of a gradient.", above=0)
    seed: int = setting(0, "Seed of the order of the texts, and of the first weights.", least=0)

    def __post_init__(self) -> None:
        check(self)
        if self.start and (self.layers or self.vocabulary != HeadRecipe.vocabulary):
            raise OptionError("the head of start keeps its tokens and layers; do not give others")
        if self.unrolled + 2 > self.length:
            raise OptionError(f"unrolled={self.unrolled} does not fit into length={self.length}")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        rising = round(self.warmup * self.steps)
        return rate_of(step, rising, self.steps - rising, self.learning_rate, 0.0)


@group("Steps", 3)
@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run a training. Only `tokens` changes the weights it ends with.

    Raises OptionError for invalid values.
    """

    tokens: Annotated[tuple[int, ...], Parameter(name="--token"), ADAPTIVE] = setting(
        (),
        "Id of an adaptive token, once for each; free ones are found if none are named.",
    )
    add_token: Annotated[bool, ADAPTIVE] = setting(
        False, "Add new tokens to the vocabulary instead."
    )
    cpu: bool = setting(False, "Stay on the CPU.")
    save_every: int = setting(100, "Steps between checkpoints.", least=1)
    measure_every: int = setting(
        0, "Steps between held-out losses; 0: only before and after.", least=0
    )

    def __post_init__(self) -> None:
        check(self)


@group("Texts", 1)
@dataclass(frozen=True, kw_only=True)
class Texts:
    """Texts to train on, and held-out texts."""

    paths: Annotated[tuple[Path, ...], Parameter(name="--texts")]
    """Files (.jsonl, else plain text; also .gz, .xz) and folders of such and of source files. Those
    that end in .txt or .md are prose, all others code. May be given several times."""
    prose: tuple[Path, ...] = ()
    """Files and folders of other texts, such as chats: never rearranged for infilling."""
    held_out: tuple[Path, ...] = ()
    """Files and folders of text that is removed from the others and measured on."""
    fields: Annotated[tuple[str, ...], Parameter(name="--field")] = ("text",)
    """Fields to read from each JSON line; several are joined by line breaks."""
