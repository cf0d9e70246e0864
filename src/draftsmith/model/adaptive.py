"""`sdsat.json` in a model's folder: its semantic adaptive tokens, and how it learnt them.

`draftsmith train sdsat` writes it, `drafters/sdsat.py` reads it. Source: SDSAT, section 2.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers.utils import cached_file

from draftsmith.errors import LoadError, OptionError, first_line
from draftsmith.storage import write_text

FILE = "sdsat.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class AdaptiveTokens:
    """The tokens that a model was taught to read as "say what comes here"."""

    tokens: tuple[int, ...]
    """One id a, repeated at every depth; or L ids, one a depth (appendix B)."""
    L: int
    """The longest window of adaptive tokens in training."""
    objective: str
    """`improved` (equation 9) or `basic` (equation 8)."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The other settings of the training, for people."""

    def __post_init__(self) -> None:
        if self.L < 1 or len(self.tokens) not in (1, self.L):
            raise OptionError(f"one adaptive token or L={self.L} are wanted, not {self.tokens}")

    @property
    def diverse(self) -> bool:
        """Whether every depth has a token of its own."""
        return len(self.tokens) > 1

    def ask(self, k: int) -> tuple[int, ...]:
        """The k ids that ask for the next k+1 tokens when they follow the last one.

        Raises OptionError where a token would be missing. Source: appendix B (k < L if diverse).
        """
        if self.diverse and k >= self.L:
            raise OptionError(
                f"k={k}, but this model has an adaptive token of its own for each depth, learnt "
                f"with L={self.L}: k must be smaller"
            )
        return self.tokens[:k] if self.diverse else self.tokens * k

    def save(self, folder: Path) -> None:
        """Write the file; WriteError if it cannot be."""
        write_text(folder / FILE, json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, source: str) -> AdaptiveTokens | None:
        """Those of a folder or a hub id; None if the model was never taught any.

        Raises LoadError for a file that is damaged.
        """
        try:  # of a hub id: offline, or without the file, there is none
            path = cached_file(
                str(Path(source).expanduser()), FILE, _raise_exceptions_for_missing_entries=False
            )
        except OSError as error:
            if isinstance(cause := error.__cause__, GatedRepoError) or not isinstance(
                cause, ValueError | RepositoryNotFoundError
            ):
                raise LoadError(
                    f"cannot find out whether {source} has adaptive tokens: {first_line(error)}"
                ) from error
            path = None  # it is the name of a file or of a built-in model
        if path is None:
            return None
        try:
            entry = json.loads(Path(path).read_text(encoding="utf-8"))
            if entry.pop("format") != FORMAT:
                raise ValueError("another version wrote it")
            tokens = tuple(int(token) for token in entry.pop("tokens"))
            return cls(tokens=tokens, **entry)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoadError(
                f"{path} does not say what the model's adaptive tokens are ({error}); train it "
                "again with `draftsmith train sdsat`"
            ) from error
