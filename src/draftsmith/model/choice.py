"""Which of several ways to compute is taken: by what a plain pass and a wide one cost in each."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import TypeVar

from draftsmith.errors import WriteError
from draftsmith.storage import write_text, writing

WIDE = 16
"""A pass over so many tokens stands for all that verify drafts."""
CLEARLY_CHEAPER = 0.9
"""Less than this of another one's time is no accident of measuring."""
MEASURED = "measured"
"""A dtype by this name is the one that `Measured` chooses."""

Way = TypeVar("Way")


def cheapest(ways: Mapping[Way, Mapping[int, float]], usual: Container[Way]) -> Way:
    """The way to compute whose plain pass and wide pass take the least time together.

    `ways` are seconds by width, as `pass_cost` gives them: of a dtype, or a number of threads. One
    of the `usual` ways is chosen unless another one is clearly cheaper.
    """
    seconds = {way: sum(plain_and_wide(costs)) for way, costs in ways.items()}
    best = min(seconds, key=lambda way: seconds[way])
    kept = min((way for way in ways if way in usual), key=lambda way: seconds[way], default=best)
    return kept if seconds[best] > CLEARLY_CHEAPER * seconds[kept] else best


def plain_and_wide(costs: Mapping[int, float]) -> tuple[float, float]:
    """Of seconds by width: a plain pass, and the widest up to `WIDE`."""
    return costs[1], costs[max(width for width in costs if width <= WIDE)]


@dataclass(frozen=True, slots=True)
class Measured:
    """What passes cost in each dtype that was tried, and so which one is taken."""

    own: str
    """The checkpoint's dtype."""
    seconds: Mapping[str, Mapping[int, float]]
    """dtype → tokens of a pass → seconds; empty where there was nothing to compare."""
    left_out: Mapping[str, str]
    """dtype → why it was not tried."""
    faithful: frozenset[str]
    """The dtypes that hold the weights as well as the checkpoint does; one of these is taken."""
    when: str = ""
    """The day of measuring, where that was another time."""

    @property
    def best(self) -> str:
        """float32, where answers are the same with any drafts, unless another is clearly cheaper.

        Without anything to compare it with, the checkpoint's own.
        """
        able = {name: costs for name, costs in self.seconds.items() if name in self.faithful}
        return cheapest(able, {"float32"}) if len(able) > 1 else self.own

    def explain(self) -> str:
        """The choice and its reasons in a sentence for a person."""
        said = [f"{self.best}, the checkpoint's own"]
        if self.seconds:
            widths = [width for width in self.seconds[self.best] if width <= WIDE]
            said = [f"{self.best}: plain passes and those over {max(widths)} tokens take "]
            said[0] += f"{self._took(self.best)} ms"
        for name in self.seconds:
            if name != self.best:
                less = "" if name in self.faithful else " (which rounds these weights)"
                said.append(f"{self._took(name)} in {name}{less}")
        said += [f"{name} was not tried: {reason}" for name, reason in self.left_out.items()]
        return ", ".join(said) + (f" (measured on {self.when})" if self.when else "")

    def save(self, path: Path | None) -> None:
        """Remember the choice; where that cannot be, the next load measures again."""
        if path is None:
            return
        known = asdict(self) | {"faithful": sorted(self.faithful), "when": date.today().isoformat()}
        with suppress(WriteError), writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(known) + "\n")

    @classmethod
    def load(cls, path: Path | None) -> Measured | None:
        """What `save` wrote; None where there is nothing of the kind."""
        if path is None:
            return None
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            timed = known.pop("seconds").items()
            seconds = {name: {int(w): float(s) for w, s in costs.items()} for name, costs in timed}
            faithful = frozenset(known.pop("faithful"))
            found = cls(seconds=seconds, faithful=faithful, **known)
            found.explain()  # fails where passes are missing
            return found if found.own in seconds.keys() & faithful else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _took(self, name: str) -> str:
        return " and ".join(f"{1000 * s:.1f}" for s in plain_and_wide(self.seconds[name]))
