"""Curves of a training: a CSV and a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from draftsmith.errors import LoadError
from draftsmith.storage import write_text

Panels = Mapping[str, Sequence[str]]
"""Label of the left and of the right half of a picture → the columns that it shows."""


@dataclass(frozen=True, kw_only=True)
class StepLosses:
    """Figures of a step. Losses are means in nats; None if nothing was counted."""

    step: int
    """Finished steps."""
    tokens: int
    """Tokens of text seen so far. A mixed row repeats a plain one and is not counted."""
    seconds: float
    learning_rate: float
    loss: float
    """The objective."""
    standard: float | None
    """Loss of standard input tokens: equation 7."""
    adaptive: float | None
    """Loss of adaptive input tokens."""
    held_out: float | None = None
    """Standard-token loss on held-out text, if it was measured."""

    panels: ClassVar[Panels] = {
        "loss of standard tokens (nats)": ("standard", "held_out"),
        "loss of adaptive tokens (nats)": ("adaptive",),
    }


class Curves:
    """Writes the curves. Rows after `step`, from a training that was killed, are replaced."""

    def __init__(self, folder: Path, step: int, kind: type[Any] = StepLosses) -> None:
        """`kind`: the dataclass of a row, with `step` and `tokens`, and the `panels` to draw."""
        self.folder, self.kind = folder, kind
        self.rows = [row for row in read(folder, kind) if row.step <= step]

    def add(self, row: Any) -> None:
        """Add a step's row."""
        self.rows.append(row)

    def flush(self) -> None:
        """Write the log and the picture."""
        self.close()
        draw(self.rows, self.folder / "losses.png", self.kind.panels)

    def close(self) -> None:
        """Write the log, also of a training that failed."""
        log = io.StringIO()
        table = csv.DictWriter(log, [f.name for f in fields(self.kind)])
        table.writeheader()
        table.writerows(map(asdict, self.rows))
        write_text(self.folder / "log.csv", log.getvalue())


def read(folder: Path, kind: type[Any] = StepLosses) -> list[Any]:
    """Read the rows of a log; none if there is no log yet. Raises LoadError for a damaged one."""
    path = folder / "log.csv"
    if not path.is_file():
        return []
    found = []
    with path.open(newline="", encoding="utf-8") as file:
        for number, line in enumerate(csv.DictReader(file)):
            try:
                numbers = {name: float(text) if text else None for name, text in line.items()}
                whole = {name: int(line[name]) for name in ("step", "tokens")}
                found.append(kind(**(numbers | whole)))
            except (KeyError, TypeError, ValueError) as error:
                raise LoadError(f"{path}, line {number + 2} is damaged; delete the file") from error
    return found


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Means over the last `span` values."""
    return [
        sum(values[max(0, i + 1 - span) : i + 1]) / min(span, i + 1) for i in range(len(values))
    ]


def draw(rows: Sequence[Any], path: Path, panels: Panels) -> None:
    """Draw a PNG of losses against steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for name in names:
            known = [row for row in rows if getattr(row, name) is not None]
            if not known:
                continue
            span, style = (1, "o--") if name == "held_out" else (1 + len(known) // 50, "-")
            values = smooth([getattr(row, name) for row in known], span)
            steps, label = [row.step for row in known], name.replace("_", "-")
            axes.plot(steps, values, style, color="C0", markersize=3, label=label)
        axes.set_xlabel("steps")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
        if axes.lines:
            # Above the plot, where it hides no curve.
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize="small")
    figure.savefig(path, dpi=110)
