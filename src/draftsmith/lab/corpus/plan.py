"""Options of a corpus: those of `draftsmith corpus build`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from draftsmith.cli.options import group
from draftsmith.values import number

LEAST_PIECE = 4
"""Documents cut at this many tokens never leave a piece of one token, which predicts nothing."""


@group("Texts", 1)
@dataclass(frozen=True, kw_only=True)
class CorpusPlan:
    """Options of a corpus; raises OptionError for invalid numbers."""

    texts: tuple[Path, ...]
    """Files (.jsonl, else plain text; also .gz, .xz) and folders of .txt, .md and .jsonl. May be
    given several times."""
    fields: Annotated[tuple[str, ...], Parameter(name="--field")] = ("text",)
    """Fields to read from each JSON line; several are joined by line breaks."""
    piece: int = 512
    """Longest piece in tokens. Longer documents are cut, and the pieces are ranked."""
    keep: Annotated[int | None, Parameter(negative="--no-filter", allow_repeating=False)] = 100_000
    """Number of pieces to keep, those of lowest perplexity; --no-filter keeps all, unranked, and
    does not run the model (REST)."""

    def __post_init__(self) -> None:
        number("piece", self.piece, int, least=LEAST_PIECE)
        if self.keep is not None:
            number("keep", self.keep, int, least=1)

    def settings(self) -> dict[str, Any]:
        """Return the options that the header stores."""
        return {"fields": list(self.fields), "piece": self.piece, "keep": self.keep}
