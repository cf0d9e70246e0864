"""Options that name the records of a bench command, and reading them with progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from draftsmith.cli.loading import bar, waiting
from draftsmith.cli.render import label
from draftsmith.cli.report import note
from draftsmith.errors import OptionError

if TYPE_CHECKING:
    from draftsmith.core.drafter import Drafter
    from draftsmith.lab.bench.replay import ReplayBudget
    from draftsmith.lab.bench.suites import OnError, Reading
    from draftsmith.lab.bench.sweep import Sweep

_SHOWN = 5
"""Wrong lines that are printed; the rest is counted."""


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Records to read."""

    panel: ClassVar = "Records"

    spelt: ClassVar = {"files": "FILES", "on_error": "--on-error skip|fail"}

    files: tuple[Path, ...] = ()
    """JSON lines (plain, .gz, .xz) with messages or prompt, and for a replay output; or an API's
    log of request and response.
    """
    limit: int | None = None
    """Conversations of each suite and Spec-Bench task, evenly spread. [all]"""
    on_error: str = "fail"
    """On a wrong line: skip it or fail."""

    def read(self) -> Reading:
        """Read the records of all files, in their order."""
        from draftsmith.lab.bench import suites

        if self.on_error not in ("skip", "fail"):
            raise OptionError(f"on_error must be skip or fail, got {self.on_error!r}")
        if not self.files:
            raise OptionError("no records: give FILES, e.g. log.jsonl")
        whole = suites.Reading()
        with waiting("reading …"):
            for path in self.files:
                part = suites.read(path, cast("OnError", self.on_error))
                whole.records += part.records
                whole.wrong += part.wrong
        whole.records = suites.sample(whole.records, self.limit)
        return whole


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(FileOptions):
    """Recorded answers to replay, and their tokenizer."""

    spelt: ClassVar = {"drafter": "--drafter -d NAME", "tokenizer": "--tokenizer -t NAME"}

    drafter: tuple[str, ...] = ("prompt_lookup", "copyspec", "longest_match", "auto")
    """Drafter, e.g. 'copyspec(gamma=3)'."""
    tokenizer: str | None = None
    """Tokenizer of the model that answered, if the records do not name it: a model's folder or hub
    id, a built-in model, or a name in tokenizers/.
    """
    template: str | None = None
    """Chat template, if the tokenizer has none: qwen2, llama2 (Vicuna) or llama3."""
    max_tokens: int | None = None
    """Cut answers after N tokens. [whole answers]"""
    processes: int = 1
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
        found, on_error = self.read(), cast("OnError", self.on_error)
        # In the folders of the files, and one level above.
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
