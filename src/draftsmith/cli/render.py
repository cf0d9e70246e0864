"""How answers, statistics and notices are shown."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from draftsmith import builtin
from draftsmith.cli.loading import short
from draftsmith.cli.report import note, stderr, stdout
from draftsmith.text.repetition import looping, lost_lines, repeated_lines, surroundings

if TYPE_CHECKING:
    from draftsmith.core.drafter import Drafter
    from draftsmith.engine.engine import Engine
    from draftsmith.engine.result import GenerationResult
    from draftsmith.engine.sequence import Piece

TARGET = "target"
COLOURS = ("green", "cyan", "yellow", "magenta", "blue", "bright_red")
LOST_SHARE = 0.1
"""An edit that drops or repeats more of a file's lines than this is worth a look."""
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

_PICTURES = {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"}
_PICTURES |= {127: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


def visible(text: str) -> str:
    """Text that cannot steer a terminal: control characters as their pictures."""
    return text.translate(_PICTURES)


class AnswerPrinter:
    """Prints an answer while it comes, in colours if wanted and if stdout is a terminal."""

    def __init__(self, show_drafts: bool) -> None:
        self._console: Console = stdout()
        self._coloured = show_drafts and self._console.is_terminal
        self._styles = {TARGET: ""}
        self._last = ""

    def piece(self, piece: Piece) -> None:
        """Print one piece at once."""
        if not piece.text:
            return
        self._last = piece.text[-1]
        text = visible(piece.text) if sys.stdout.isatty() else piece.text
        if self._coloured:
            self._console.out(text, style=self._style(piece.source) or None, end="")
        else:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _style(self, source: str) -> str:
        """A colour for each source, given in the order they turn up; the target's own is none."""
        return self._styles.setdefault(source, COLOURS[(len(self._styles) - 1) % len(COLOURS)])

    def end(self) -> None:
        """Finish the last line, if there is one to finish."""
        if self._last not in ("", "\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._last = ""

    def legend(self, sources: list[str]) -> None:
        """Explain the colours on stderr: the number of tokens of each drafter."""
        if self._coloured and sources:
            parts = []
            for source, count in Counter(sources).items():
                name = "the model itself" if source == TARGET else source
                parts.append(Text(f"■ {name} {count}", self._style(source)))
            stderr().print(Text("   ").join(parts))


def show_stats(engine: Engine, results: list[GenerationResult]) -> None:
    """Print the stats of one answer, or the sum over several, on stderr."""
    from draftsmith.core.stats import total

    if not results:
        return
    stats = results[0].stats if len(results) == 1 else total([r.stats for r in results])
    reasons = ", ".join(dict.fromkeys(result.finish_reason for result in results))
    s, console = stats.seconds, stderr()
    # A short prompt is read in the first pass that decodes: then prefill takes none of its own.
    named = ("prefill", "draft", "target", "verify", "other")
    phases = [f"{name} {getattr(s, name):.3f}" for name in named if getattr(s, name) >= 0.0005]
    facts = {
        "answer": f"{plural(stats.tokens, 'token')}, ended by {reasons}",
        "prompt": f"{plural(stats.prompt_tokens, 'token')}, {stats.reused_tokens} of them "
        "still cached",
        "passes": f"{stats.passes}, {stats.tokens_per_pass:.2f} tokens each",
        "drafts": f"in {plural(stats.attempts, 'pass')}, {stats.accepted} of {stats.drafted} "
        "accepted",
        "speed": f"{stats.tokens_per_second:.1f} tokens per second",
        "seconds": f"{s.total:.3f} = {' + '.join(phases)}",
        "first token": f"after {stats.first_token_seconds:.3f} s",
        "weights": engine.model.dtype_explained,
    }
    console.print(facts_table(facts))
    if stats.by_source:
        table = plain_table("guessed by", "drafts", "tokens", "accepted", "share")
        for source, entry in stats.by_source.items():
            numbers = map(str, (entry.attempts, entry.drafted, entry.accepted))
            table.add_row(source, *numbers, _share(entry.accepted, entry.drafted))
        console.print("", table, sep="\n")
    if stats.drafted_by_depth:
        depths = [d for d in _DEPTHS if d <= len(stats.drafted_by_depth)]
        accepted = [*stats.accepted_by_depth, *[0] * len(stats.drafted_by_depth)]
        counts = [(accepted[d - 1], stats.drafted_by_depth[d - 1]) for d in depths]
        table = plain_table("draft position", *map(str, depths))
        table.add_row("drafted", *(str(drafted) for _, drafted in counts))
        table.add_row("accepted", *(str(held) for held, _ in counts))
        table.add_row("share", *(_share(*both) for both in counts))
        console.print("", table, sep="\n")


def _share(part: int, whole: int) -> str:
    return f"{part / whole if whole else 0:.0%}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    end = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{end}"


def label(drafter: Drafter) -> str:
    """A drafter's name with only the options that are not its defaults."""
    from draftsmith.drafters.own_model import OwnModel

    drafter = drafter.config if isinstance(drafter, OwnModel) else drafter
    changed = []
    for f in fields(drafter):
        usual = f.default if f.default_factory is MISSING else f.default_factory()
        if (value := getattr(drafter, f.name)) != usual:
            changed.append(f"{f.name}={value!r}")
    return f"{drafter.name}({', '.join(changed)})" if changed else drafter.name


class _Unpadded(Table):
    """A table that keeps its first column, without trailing spaces in files and pipes."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first = self.columns[0]  # what a row is about; a narrow terminal cuts other columns
        longest = max((console.measure(cell).maximum for cell in first.cells), default=0)
        first.min_width = min(longest, options.max_width // 2)
        rendered = super().__rich_console__(console, options)
        if console.is_terminal:
            yield from rendered
            return
        for line in Segment.split_lines(part for part in rendered if isinstance(part, Segment)):
            yield Segment("".join(part.text for part in line).rstrip())
            yield Segment.line()


def plain_table(*columns: str, folds: int = 0) -> Table:
    """A table without lines: reads the same in a terminal, in a file and in a mail.

    `folds`: number of last columns that are text, which goes on in the next line.
    """
    table = _Unpadded(box=None, show_header=any(columns), pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        text = number >= len(columns) - folds
        justify: Literal["left", "right"] = "right" if number and not text else "left"
        fold: Literal["fold", "ellipsis"] = "fold" if text else "ellipsis"
        table.add_column(column, justify=justify, overflow=fold, no_wrap=fold != "fold")
    return table


def facts_table(facts: Mapping[str, str]) -> Table:
    """Make a table of bold names and their values."""
    table = plain_table("", "", folds=1)
    for name, value in facts.items():
        table.add_row(Text(name, "bold"), Text(value))
    return table


def say_notices(engine: Engine) -> None:
    """Print, once, whether this model cannot use drafts, and why."""
    if engine.model.capabilities.shape == "plain" and engine.drafter.preferred_width():
        why = "; ".join(engine.notices) or "it verifies one token per pass"
        note(f"note: this model decodes plainly, without drafts: {why}")


def say_end(engine: Engine, result: GenerationResult, before: str | None = None) -> None:
    """Print failures of drafting that were handled, whether the answer was cut off, and whether it
    lacks or repeats lines of an edited file."""
    if result.stats.failed_passes or result.stats.drafter_failures:
        for said in result.notices:
            if said not in engine.notices:
                note(f"note: {said}")
    tokens, room = len(result.tokens), engine.model.context_length
    if result.finish_reason == "length":
        passage = looping(result.tokens)
        if passage:
            note(
                f"note: the answer loops: its end repeats the same {plural(passage, 'token')}, and "
                f"was cut after {tokens}; try --repetition-penalty 1.1 or another model"
            )
        elif room is not None and len(result.prompt_tokens) + tokens >= room:
            note("note: cut because the model's context is full")
        else:
            note(f"note: cut after {plural(tokens, 'token')}; --max-new-tokens sets this")
    if before is not None and result.finish_reason != "cancelled":
        lost, had = lost_lines(before, result.text), len(before.splitlines())
        again = repeated_lines(before, result.text)
        if around := surroundings(before, result.text):
            note(f"note: {' and '.join(around)} stand around the new file; take them out")
        if builtin.is_ours(engine.model.name):
            name = short(engine.model.name)
            note(f"note: {name} renames words, not always rightly; compare before you use it")
        if lost > LOST_SHARE * had:
            note(f"note: {lost} of the file's {had} lines are gone; compare before you use it")
        elif again > LOST_SHARE * had:
            note(f"note: {plural(again, 'line')} repeated; compare before you use it")
