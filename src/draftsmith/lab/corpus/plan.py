"""What becomes a corpus: the options of `draftsmith corpus build`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from draftsmith.cli.options import group
from draftsmith.values import number

LEAST_PIECE = 4
"""Documents cut at so many tokens never leave a piece of one, in which nothing is predicted."""


@group("Texts", 1)
@dataclass(frozen=True, kw_only=True)
class CorpusPlan:
    """What becomes a corpus. Raises OptionError for numbers that cannot work."""

    texts: tuple[Path, ...]
    """Files (.jsonl, else plain text; also .gz, .xz) and folders of .txt, .md and .jsonl. May be
    given several times."""
    fields: Annotated[tuple[str, ...], Parameter(name="--field")] = ("text",)
    """Of JSON lines: what to read of each; several are joined by line breaks."""
    piece: int = 512
    """Documents longer than so many tokens are cut; the pieces are what is ranked."""
    keep: Annotated[int | None, Parameter(negative="--no-filter", allow_repeating=False)] = 100_000
    """How many pieces to keep, those of lowest perplexity; None, or --no-filter: all of them, and
    the model is not run (REST)."""

    def __post_init__(self) -> None:
        number("piece", self.piece, int, least=LEAST_PIECE)
        if self.keep is not None:
            number("keep", self.keep, int, least=1)

    def settings(self) -> dict[str, Any]:
        """What a header remembers of it."""
        return {"fields": list(self.fields), "piece": self.piece, "keep": self.keep}
