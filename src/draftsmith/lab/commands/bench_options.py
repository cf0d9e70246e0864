"""Options that name the records of a bench command, and reading them with progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from draftsmith.cli.loading import bar, waiting
from draftsmith.cli.options import Count, SomeTokens, group
from draftsmith.cli.render import label
from draftsmith.cli.report import note

if TYPE_CHECKING:
    from draftsmith.core.drafter import Drafter
    from draftsmith.lab.bench.replay import ReplayBudget
    from draftsmith.lab.bench.suites import Reading
    from draftsmith.lab.bench.sweep import Sweep

_SHOWN = 5
"""Wrong lines that are printed; the rest is counted."""


@group("Records", 1)
@dataclass(frozen=True)
class FileOptions:
    """Records to read."""

    files: tuple[Path, ...]
    """JSON lines (plain, .gz, .xz) with messages or prompt, for a replay also output; or an API's
    log of request and response."""
    _: KW_ONLY
    limit: Annotated[Count | None, Parameter(show_default="all")] = None
    """Conversations of each suite and Spec-Bench task, evenly spread."""
    on_error: Literal["skip", "fail"] = "fail"
    """What a wrong line does."""

    def read(self) -> Reading:
        """Read the records of all files, in their order."""
        from draftsmith.lab.bench import suites

        whole = suites.Reading()
        with waiting("reading …"):
            for path in self.files:
                part = suites.read(path, self.on_error)
                whole.records += part.records
                whole.wrong += part.wrong
        whole.records = suites.sample(whole.records, self.limit)
        return whole


@dataclass(frozen=True)
class AnswerOptions(FileOptions):
    """Recorded answers to replay, and their tokenizer."""

    _: KW_ONLY
    drafter: Annotated[tuple[str, ...], Parameter(alias="-d")] = (
        "prompt_lookup", "copyspec", "longest_match", "auto"
    )  # fmt: skip
    """A drafter, e.g. 'copyspec(gamma=3)'. May be given several times."""
    tokenizer: Annotated[str | None, Parameter(alias="-t")] = None
    """The tokenizer of the model that answered, where the records do not name it: a model's folder
    or hub id, a built-in model, or a name in tokenizers/."""
    template: str | None = None
    """Chat template, where the tokenizer has none: qwen2, llama2 (Vicuna) or llama3."""
    max_tokens: Annotated[SomeTokens | None, Parameter(show_default="whole answers")] = None
    """Cut answers after N tokens."""
    processes: Count = 1
    """Replay in N processes."""
    resume: Path | None = None
    """Store finished replays here, and resume from them."""

    def drafters(self) -> list[Drafter]:
        """Parse the drafters, each once; raises UnsupportedError for those that need a model."""
        from draftsmith.drafters.registry import parse
        from draftsmith.lab.bench.replay import check

        found = {str(d): d for d in map(parse, self.drafter)}
        for drafter in found.values():
            check(drafter)
        return list(found.values())

    def names(self) -> dict[str, str]:
        """Names of the drafters in tables: without options that are defaults."""
        return {str(drafter): label(drafter) for drafter in self.drafters()}

    def replay(self, budget: ReplayBudget | None) -> Sweep:
        """Read and replay, with a progress bar."""
        from draftsmith.lab.bench.encoding import Encoding
        from draftsmith.lab.bench.sweep import Replayer, sweep
        from draftsmith.lab.lines import Finished

        drafters = self.drafters()
        found, on_error = self.read(), self.on_error
        # Beside the files, and one level above.
        places = [place for path in self.files for place in (path.parent, path.parent / "..")]
        folders = dict.fromkeys((place / "tokenizers").resolve() for place in places)
        encoding = Encoding(tuple(folders), self.tokenizer, self.template)
        replayer = Replayer(encoding, budget, on_error, self.max_tokens)
        known = Finished(self.resume, sync=False)
        with bar("replaying", len(found.records)) as advance:
            result = sweep(found.records, drafters, replayer, self.processes, known, advance)
        result.wrong[:0] = found.wrong
        return result


def tell(wrong: Sequence[str]) -> None:
    """Print what was left out, on stderr."""
    for line in wrong[:_SHOWN]:
        note(f"left out: {line}")
    if len(wrong) > _SHOWN:
        note(f"left out: {len(wrong) - _SHOWN} more; {len(wrong)} in all")
