"""Generations: the rows of a live run, one JSON line each, and their file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any

from draftsmith.core.stats import Stats
from draftsmith.errors import LoadError, OptionError
from draftsmith.lab.lines import JsonLines, Lines, read_lines

FORMAT = 1
RECORDED = ("attempts", "drafted", "probes", "accepted", "drafted_by_depth", "accepted_by_depth",
            "by_source")  # fmt: skip
"""Statistics of the loop that a row has as fields of the same name."""


@dataclass(slots=True)
class Generation:
    """One answer of one arm. `draftsmith bench replay` also reads these lines."""

    id: str
    suite: str
    category: str | None
    turn: int
    run: int
    arm: str
    drafter: str
    budget: int | str | None
    seed: int | None
    prompt_ids: list[int]
    output_ids: list[int]
    text: str
    finish_reason: str
    max_new_tokens: int
    """Limit of the answer's length, context included."""
    seconds: float
    first_token_seconds: float
    peak_bytes: int | None
    """Peak memory of this generation: of the device, or resident on the CPU."""
    passes: int
    attempts: int | None = None
    """None, as the next fields, if transformers does not report it."""
    drafted: int | None = None
    probes: int | None = None
    accepted: int = 0
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    by_source: dict[str, dict[str, int]] = field(default_factory=dict)
    phases: dict[str, float] | None = None
    """Seconds of prefill, draft, target, verify and other."""
    reference: str | None = None
    """The recorded or human answer, if the suite has one."""
    compared: bool = False
    """Whether the answer was compared with plain decoding's."""
    divergence: int | None = None
    """First token that differs from plain decoding's; None if none does, or if not compared."""
    gap: float | None = None
    """Distance of the model's two best logits at that token."""
    began: str | None = None
    """Start of the generation: date and time in UTC."""
    load: float | None = None
    """Load average of the last minute per core."""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, str, str]:
        return self.run, self.id, self.arm

    @property
    def stats(self) -> Stats | None:
        """The loop's statistics; None for peers."""
        if self.phases is None:
            return None
        names = ("passes", "first_token_seconds", *RECORDED)
        return Stats.from_dict(
            {name: value for name in names if (value := getattr(self, name)) is not None}
            | {
                "prompt_tokens": len(self.prompt_ids),
                "tokens": len(self.output_ids),
                "seconds": {name: s for name, s in self.phases.items() if name != "other"},
            }
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the row as it is written."""
        return {"format": FORMAT, **asdict(self)}


_TYPES: dict[str, type | tuple[type, ...]] = {
    "id": str, "suite": str, "turn": int, "run": int, "arm": str, "output_ids": list,
    "prompt_ids": list, "seconds": (int, float), "first_token_seconds": (int, float),
    "passes": int, "accepted": int, "settings": dict, "text": str, "by_source": dict,
    "drafted_by_depth": list, "accepted_by_depth": list, "began": (str, NoneType),
    "load": (int, float, NoneType), "attempts": (int, NoneType), "drafted": (int, NoneType),
    "probes": (int, NoneType), "phases": (dict, NoneType), "peak_bytes": (int, NoneType),
}  # fmt: skip


def parse(item: dict[str, Any]) -> Generation:
    """Return the row of a line; raises ValueError with the reason."""
    if "arm" not in item or "output_ids" not in item:
        raise ValueError("not a result of `draftsmith bench run`")
    if item.get("format") != FORMAT:
        raise ValueError(f"written in format {item.get('format')}, not {FORMAT}")
    known = {f.name for f in fields(Generation)}
    try:
        row = Generation(**{name: value for name, value in item.items() if name in known})
    except TypeError as error:
        missing = str(error).split("argument", 1)[-1].lstrip("s: ")
        raise ValueError(f"incomplete, it has no {missing}") from error
    for name, kind in _TYPES.items():
        if not isinstance(getattr(row, name), kind):
            raise ValueError(f"{name!r} is a {type(getattr(row, name)).__name__}")
    if not 0 < row.seconds < 1e9:
        raise ValueError(f"'seconds' is {row.seconds}")
    return row


_FILE: dict[str, Any] = {
    "read": parse,
    "begins": '{"format"',
    "hint": "give a file that `draftsmith bench run` wrote",
}


def read(path: str | Path) -> Lines[Generation]:
    """Read the rows of a result file, up to an incomplete line; raises LoadError."""
    found: Lines[Generation] = read_lines(Path(path), **_FILE)
    if not found.entries:
        raise LoadError(f"{path} is empty: it has no results")
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return `threads: 1 there, 2 now` for every setting that differs.

    The commit is left out, because people commit while a long run is paused.
    """
    names = [name for name in {**before, **now} if name != "commit"]
    return [
        f"{name}: {_shown(before.get(name))} there, {_shown(now.get(name))} now"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)


class ResultFile:
    """Rows that are on disk as soon as they are measured, so that a killed run can be resumed."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Continue with the rows at `path`; without one, keep rows in memory.

        Raises OptionError for rows of other settings, LoadError or WriteError as `JsonLines`.
        """
        self.rows: list[Generation] = []
        self.settings = settings
        self._lines: JsonLines[Generation] | None = None
        if path is None:
            return
        self._lines = JsonLines(path, **_FILE)
        self.rows = self._lines.entries
        for row in self.rows:
            if found := differences(row.settings, settings):
                raise OptionError(
                    f"{path} was measured with other settings ({'; '.join(found)}); give the same, "
                    "or another --output"
                )

    def add(self, row: Generation) -> None:
        """Store a row, immediately on disk."""
        if self._lines is not None:
            self._lines.add(row.as_dict())
        self.rows.append(row)

    def rewrite(self) -> None:
        """Write all rows again after they were completed; the old file stays until that is done."""
        if self._lines is not None:
            self._lines.rewrite(row.as_dict() for row in self.rows)
