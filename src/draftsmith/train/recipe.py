"""Every setting of a training, checked before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from draftsmith.errors import OptionError, UnknownName

OBJECTIVES = ("improved", "basic", "plain")
SHARES = ("replaced", "windows")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train; the defaults are the paper's. Raises OptionError for values that cannot work.

    Source: SDSAT, sections 2.2, 3.1 and 3.2. The paper's batch is 4M tokens in sequences of 16,384.
    """

    objective: str = "improved"
    """`improved` (equation 9), `basic` (equation 8), or `plain`: no adaptive tokens, to compare."""
    L: int = 5
    """The longest window of adaptive tokens."""
    diverse: bool = False
    """A token of its own for each depth (appendix B), instead of one for all."""
    share: float = 0.1
    """Of the positions of a mixed sequence; of which, `share_of` says."""
    share_of: str = "replaced"
    """`replaced`: so many positions hold adaptive tokens. `windows`: a window begins at so many."""
    w: float = 1.0
    """Weight of the adaptive tokens in equation 9."""
    infill: float = 0.5
    """Share of code samples rearranged for infilling: half PSM, half SPM; 0 for none."""
    length: int = 1024
    """T: tokens of a sequence."""
    rows: int = 8
    """Sequences of a step."""
    rows_per_pass: int = 8
    """Sequences of a forward pass; fewer than `rows` accumulate their gradients."""
    steps: int = 2000
    learning_rate: float = 5e-5
    """The highest, reached after warming up."""
    final_learning_rate: float = 1e-5
    token_rate: float = 1.0
    """ours: the adaptive tokens' own rows learn so many times as fast; worth 100 in short runs."""
    warmup: float = 0.2
    """Share of the steps with a rising learning rate."""
    weight_decay: float = 0.1
    """Of matrices. Not in the paper; Llama 2's and so Code Llama's."""
    clip: float = 1.0
    """Largest norm of a gradient. Not in the paper; Llama 2's."""
    lora: int = 0
    """Rank of low-rank adapters on all linear layers, merged at the end; 0: full fine-tuning."""
    bfloat16: bool = True
    """Compute in bfloat16 where that is safe (autocast); weights and sums stay in float32."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise UnknownName("objective", self.objective, OBJECTIVES)
        if self.share_of not in SHARES:
            raise UnknownName("share_of", self.share_of, SHARES)
        for name in ("L", "rows", "rows_per_pass", "steps"):
            self._least(name, 1)
        for name in ("lora", "seed", "w", "token_rate", "weight_decay", "final_learning_rate"):
            self._least(name, 0)
        self._least("length", 2)
        for name in ("share", "infill", "warmup"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"{name}={getattr(self, name)} is no share; give 0 to 1")
        if not (self.clip > 0 and self.learning_rate > 0):
            raise OptionError(
                f"clip={self.clip} and learning_rate={self.learning_rate} must be above 0"
            )
        if self.diverse and self.L < 2:
            raise OptionError("diverse tokens need L=2 or more; with L=1 there is one token")
        most = math.ceil(self.windows)
        if self.adaptive and most * (self.L + 1) > self.length:
            raise OptionError(
                f"{most} windows of up to L={self.L} tokens with gaps between do not fit into "
                f"length={self.length}: lower share={self.share} or L"
            )

    def _least(self, name: str, least: int) -> None:
        if not getattr(self, name) >= least:
            raise OptionError(f"{name}={getattr(self, name)} cannot work; give at least {least}")

    @property
    def adaptive(self) -> bool:
        """Whether adaptive tokens are learnt at all."""
        return self.objective != "plain"

    @property
    def windows(self) -> float:
        """Expected windows of a sequence: those of L tokens and fewer are equally frequent."""
        begun = self.share * self.length
        return begun if self.share_of == "windows" else begun * 2 / (self.L + 1)

    @property
    def token_count(self) -> int:
        """Adaptive tokens the model learns."""
        return (self.L if self.diverse else 1) if self.adaptive else 0

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0: rising linearly, then falling as a cosine."""
        rising = round(self.warmup * self.steps)
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        fallen = (step - rising) / max(1, self.steps - 1 - rising)
        span = self.learning_rate - self.final_learning_rate
        return self.final_learning_rate + span * (1 + math.cos(math.pi * fallen)) / 2

    def settings(self) -> dict[str, Any]:
        """All of it, for a file."""
        return asdict(self)

    def differing(self, settings: dict[str, Any]) -> list[str]:
        """What is different in other settings, as "name: theirs, now ours"."""
        return [
            f"{f.name}: {settings.get(f.name)!r}, now {getattr(self, f.name)!r}"
            for f in fields(self)
            if settings.get(f.name) != getattr(self, f.name)
        ]
