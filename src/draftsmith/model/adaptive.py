"""`sdsat.json` in a model's folder: its semantic adaptive tokens, and how they were trained.

`draftsmith train sdsat` writes it, `drafters/sdsat.py` reads it. Source: SDSAT, section 2.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from transformers.utils import cached_file

from draftsmith.errors import LoadError, OptionError, first_line
from draftsmith.storage import expanded, write_text

FILE = "sdsat.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class AdaptiveTokens:
    """Tokens that a model was trained to read as placeholders for the tokens to predict."""

    tokens: tuple[int, ...]
    """One id a, repeated at every depth; or L ids, one per depth (appendix B)."""
    L: int
    """Longest window of adaptive tokens in training."""
    objective: str
    """`improved` (equation 9) or `basic` (equation 8)."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Other settings of the training, for documentation."""

    def __post_init__(self) -> None:
        if self.L < 1 or len(self.tokens) not in (1, self.L):
            raise OptionError(f"tokens must be one id, or L={self.L} ids, got {self.tokens}")

    @property
    def diverse(self) -> bool:
        """Whether every depth has its own token."""
        return len(self.tokens) > 1

    def ask(self, k: int) -> tuple[int, ...]:
        """Return the k ids that follow the last token to predict the next k+1 tokens.

        Raises OptionError if the model has fewer tokens. Source: appendix B (k < L if diverse).
        """
        if self.diverse and k >= self.L:
            raise OptionError(
                f"k must be less than {self.L}, got {k}: this model was trained with a different "
                f"adaptive token at each depth, and with L={self.L}"
            )
        return self.tokens[:k] if self.diverse else self.tokens * k

    def save(self, folder: Path) -> None:
        """Write the file; raises WriteError."""
        write_text(folder / FILE, json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, source: str) -> AdaptiveTokens | None:
        """Read the file of a folder or a hub id; None if there is none.

        Raises LoadError for a damaged file.
        """
        # For a hub id: None if it has no such file, or offline.
        try:
            path = cached_file(
                str(expanded(source)), FILE, _raise_exceptions_for_missing_entries=False
            )
        except OSError as error:
            if isinstance(cause := error.__cause__, GatedRepoError) or not isinstance(
                cause, ValueError | RepositoryNotFoundError
            ):
                raise LoadError(
                    f"cannot check whether {source} has adaptive tokens: {first_line(error)}"
                ) from error
            path = None  # `source` names a file or a built-in model
        except HFValidationError:  # transformers 4 raises it as it is: `source` is no hub id
            path = None
        if path is None:
            return None
        try:
            entry = json.loads(Path(path).read_text(encoding="utf-8"))
            if entry.pop("format") != FORMAT:
                raise ValueError("written by another version")
            tokens = tuple(int(token) for token in entry.pop("tokens"))
            return cls(tokens=tokens, **entry)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoadError(
                f"{path} has no valid adaptive tokens ({error}); train the model again with "
                "`draftsmith train sdsat`"
            ) from error
