"""Which recorded answers a bench command reads, and how it shows that it is reading them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from draftsmith.cli.loading import waiting
from draftsmith.cli.progress import bar
from draftsmith.cli.render import label
from draftsmith.cli.report import note
from draftsmith.errors import OptionError

if TYPE_CHECKING:
    from draftsmith.bench.replay import ReplayBudget
    from draftsmith.bench.suites import OnError, Reading
    from draftsmith.bench.sweep import Sweep
    from draftsmith.core.drafter import Drafter

_RECORDS = "Records"
_SHOWN = 5
"""Wrong lines that are named; the rest is only counted."""

DEFAULT_DRAFTERS = ["prompt_lookup", "copyspec", "auto"]


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """Which recorded answers, and how they become tokens."""

    files: Annotated[
        list[str] | None,
        typer.Argument(
            show_default=False, metavar="FILES",
            help="JSON lines (plain, .gz, .xz) with messages or prompt, and output; or names of "
            "suites in --data, e.g. mt-redundant or spec-bench/rag.",
        ),
    ] = None  # fmt: skip
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter", "-d", metavar="NAME", show_default=", ".join(DEFAULT_DRAFTERS),
            help="Who guesses, e.g. 'copyspec(gamma=3)'; may be given several times.",
        ),
    ] = None  # fmt: skip
    data: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_RECORDS, metavar="DIR",
            help="Folder with recorded/ and tokenizers/.",
        ),
    ] = None  # fmt: skip
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", "-t", rich_help_panel=_RECORDS, metavar="NAME",
            help="The tokenizer of the model that answered, where the records do not name it: "
            "a model's folder or hub id, or a name in tokenizers/.",
        ),
    ] = None  # fmt: skip
    template: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_RECORDS, metavar="NAME",
            help="Chat template, where the tokenizer has none: qwen2, llama2 (Vicuna) or llama3.",
        ),
    ] = None  # fmt: skip
    limit: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_RECORDS, metavar="N", min=1, show_default="all",
            help="Conversations of each suite and Spec-Bench task, evenly spread.",
        ),
    ] = None  # fmt: skip
    max_tokens: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_RECORDS, metavar="N", min=1, show_default="whole answers",
            help="Cut answers after N tokens.",
        ),
    ] = None  # fmt: skip
    on_error: Annotated[
        str,
        typer.Option(
            rich_help_panel=_RECORDS, metavar="skip|fail", help="What a wrong line does."
        ),
    ] = "fail"  # fmt: skip
    processes: Annotated[
        int,
        typer.Option(rich_help_panel=_RECORDS, metavar="N", min=1, help="Replay in N processes."),
    ] = 1
    resume: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_RECORDS, metavar="FILE",
            help="Remember finished replays here, and go on from them.",
        ),
    ] = None  # fmt: skip

    def drafters(self) -> list[Drafter]:
        """The drafters asked for, each once."""
        from draftsmith.drafters.registry import parse

        found = [parse(spec) for spec in self.drafter or DEFAULT_DRAFTERS]
        return list({str(drafter): drafter for drafter in found}.values())

    def names(self) -> dict[str, str]:
        """How tables call the drafters: without the options that are defaults."""
        return {str(drafter): label(drafter) for drafter in self.drafters()}

    def errors(self) -> OnError:
        """What a wrong line does, checked."""
        if self.on_error not in ("skip", "fail"):
            raise OptionError(f"--on-error {self.on_error!r} is unknown; give skip or fail")
        return cast("OnError", self.on_error)

    def reading(self) -> Reading:
        """All records of all files."""
        from draftsmith.bench import suites

        whole = suites.Reading()
        for name in self.files or self._everything():
            if not Path(name).exists() and self.data is not None:
                part = suites.recorded(name, self.data, self.errors())
            elif not Path(name).exists() and name.partition("/")[0] in suites.NAMED:
                raise OptionError(f"{name} is a suite; give --data with the folder that holds it")
            else:
                part = suites.read(name, self.errors())
            whole.records += part.records
            whole.wrong += part.wrong
        return whole

    def _everything(self) -> list[str]:
        found = sorted((self.data / "recorded").glob("*.jsonl*")) if self.data else []
        if not found:
            raise OptionError("nothing to replay: give files of recorded answers, or --data DIR")
        return list(map(str, found))

    def folders(self) -> tuple[Path, ...]:
        """Where tokenizers are looked for: --data, beside the files, and one level above."""
        near = [Path(name).parent for name in self.files or () if Path(name).exists()]
        places = [*([self.data] if self.data else []), *(p for n in near for p in (n, n / ".."))]
        return tuple(dict.fromkeys((place / "tokenizers").resolve() for place in places))

    def sweep(self, budget: ReplayBudget | None) -> Sweep:
        """Read and replay, with a progress bar."""
        from draftsmith.bench.encoding import Encoding
        from draftsmith.bench.journal import Journal
        from draftsmith.bench.replay import check
        from draftsmith.bench.suites import sample
        from draftsmith.bench.sweep import Replayer, sweep

        drafters = self.drafters()
        for drafter in drafters:
            check(drafter)
        with waiting("reading …"):
            reading = self.reading()
        records = sample(reading.records, self.limit)
        encoding = Encoding(self.folders(), self.tokenizer, self.template)
        replayer = Replayer(encoding, budget, self.errors(), self.max_tokens)
        with Journal(self.resume) as journal, bar("replaying", len(records)) as advance:
            result = sweep(records, drafters, replayer, self.processes, journal, advance)
        result.wrong[:0] = reading.wrong
        return result


def tell(wrong: Sequence[str]) -> None:
    """What was left out, on stderr."""
    for line in wrong[:_SHOWN]:
        note(f"left out: {line}")
    if len(wrong) > _SHOWN:
        note(f"left out: {len(wrong) - _SHOWN} more; {len(wrong)} in all")
