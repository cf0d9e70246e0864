"""`draftsmith demo`: one edit, decoded plainly and with drafts, side by side."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from draftsmith import builtin
from draftsmith.cli.loading import busy, own_threads, quiet, resolve, short, waiting
from draftsmith.cli.render import TARGET, dtype_of, label, plain_table, plural, visible
from draftsmith.cli.report import FAILED, stdout
from draftsmith.cli.run import room_for_edit
from draftsmith.errors import OptionError

if TYPE_CHECKING:
    from draftsmith.core.drafter import Drafter
    from draftsmith.core.stats import Stats
    from draftsmith.engine.engine import Engine
    from draftsmith.engine.jobs import Piece
    from draftsmith.engine.result import GenerationResult

FILE = "shop.py"
DTYPES = ("float32", "bfloat16")
TIE = 1e-5
"""Two best logits closer than this are a tie: rounding may decide between them."""
_REFRESH_SECONDS = 0.08
_COPIED = "bold green"
_PANEL_LINES = 22
_SIDE_BY_SIDE = 100
"""Terminal columns from which two panels of code fit beside each other."""


def demo(
    drafter: Annotated[
        str, typer.Option("--drafter", "-d", metavar="NAME", help="Who guesses.")
    ] = "copyspec",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", show_default="the file and a bit", help="Longest answer."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", show_default="the cheaper here", help="Of the weights."),
    ] = None,
) -> None:
    """Watch the built-in model edit a file: plainly, then with drafts, to the same result.

    Needs no network. The exit code is 1 if the two outputs differ in float32.

    [bold]Examples[/bold]

    draftsmith demo

    draftsmith demo --drafter auto --dtype bfloat16
    """
    from draftsmith.drafters.registry import parse

    guesser = parse(drafter)
    if max_new_tokens is not None and max_new_tokens < 1:
        raise OptionError(f"max_new_tokens={max_new_tokens} cannot work; it must be at least 1")
    before, message = builtin.demo()
    with own_threads():
        console = stdout()
        engine = prepare(console, dtype)
        say(console, "Task", f"edit {FILE}: ", (message, "italic"))
        limit = max_new_tokens or room_for_edit(engine, before)
        race = Race(engine, builtin.edit_messages(FILE, message, before), limit, guesser)
        race.run(console)
        same = report(console, race)
        show_diff(console, before, race.results[1])
    if not same and dtype_of(engine.model) == "float32":
        raise typer.Exit(FAILED)


def prepare(console: Console, dtype: str | None) -> Engine:
    """The engine in the dtype and threads that are cheapest here; `dtype` decides if given.

    Plain and wide passes count alike, so that neither run is at its worst. Sets torch's thread
    count, and says what it found.
    """
    import torch

    source, disturbed = resolve(None), busy()
    with waiting("loading and measuring …"), quiet():
        from draftsmith.engine.engine import Engine
        from draftsmith.model.measure import WIDE, cheapest, pass_cost

        names = DTYPES if dtype is None else (dtype,)
        engines = {name: Engine.from_pretrained(source, dtype=name) for name in names}
        costs: dict[tuple[str, int], dict[int, float]] = {}
        for threads in sorted({1, torch.get_num_threads()}):
            torch.set_num_threads(threads)
            for name, engine in engines.items():
                costs[name, threads] = pass_cost(engine.model, widths=(1, WIDE), repeats=9)
    best = cheapest(costs, {way for way in costs if way[0] == "float32"})
    torch.set_num_threads(best[1])
    engine = engines[best[0]]
    size = sum(p.numel() for p in engine.model.model.parameters()) / 1e6
    say(console, "Model", f"{short(source)}, {size:.1f} million parameters")
    told = {way: _milliseconds(seconds) for way, seconds in costs.items()}
    passes = f"a plain pass and one over {WIDE} tokens take {told.pop(best)} ms"
    say(console, "Run", f"{_called(best)}: {passes}")
    if told:
        others = ", ".join(f"{_called(way)} ({took})" for way, took in told.items())
        say(console, "", f"chosen by their sum from {others}")
    if disturbed:
        say(console, "Note", disturbed)
    return engine


def say(console: Console, name: str, *parts: str | tuple[str, str]) -> None:
    """One line that begins with a name in bold."""
    console.print(Text.assemble((f"{name:7}", "bold"), *parts))


def _called(way: tuple[str, int]) -> str:
    return f"{way[0]} with {plural(way[1], 'thread')}"


def _milliseconds(seconds: dict[int, float]) -> str:
    return " and ".join(f"{1000 * s:.1f}" for s in seconds.values())


@dataclass(slots=True)
class Lane:
    """One of the two runs: its text so far, coloured, and its numbers."""

    title: str
    text: Text = field(default_factory=lambda: Text(no_wrap=True, overflow="ellipsis"))
    stats: Stats | None = None
    state: str = "waiting"

    def add(self, piece: Piece) -> None:
        self.text.append(visible(piece.text), style=_COPIED if piece.source != TARGET else "")

    def panel(self, lines: int, width: int) -> Panel:
        """The last lines of the text, with counters below."""
        tail = Text("\n", no_wrap=True, overflow="ellipsis").join(
            list(self.text.split("\n", allow_blank=True))[-lines:]
        )
        done = self.state == "done"
        return Panel(
            tail,
            title=Text(self.title, "bold"),
            subtitle=self.counters(),
            height=lines + 2,
            width=width,
            border_style="green" if done else "white" if self.stats else "dim",
        )

    def counters(self) -> str:
        if self.stats is None:
            return self.state
        s = self.stats
        return f"{s.tokens} tokens · {s.tokens_per_second:.0f} tok/s · {s.seconds.total:.2f} s"


class Race:
    """The same prompt twice; every step of both is shown as it happens."""

    def __init__(self, engine: Engine, prompt: Any, limit: int, drafter: Drafter) -> None:
        self.engine, self.prompt, self.limit = engine, prompt, limit
        self.drafters: tuple[str | Drafter, ...] = ("none", drafter)
        self.lanes = [Lane("plain decoding"), Lane(f"with {label(drafter)}")]
        self.results: list[GenerationResult] = []

    def run(self, console: Console) -> None:
        """Decode twice, live in a terminal, after a short warm-up."""
        with waiting("warming up …"):
            for drafter in self.drafters:
                few = min(self.limit, 24)
                self.engine.generate(
                    self.prompt, drafter=drafter, max_new_tokens=few, temperature=0.0
                )
        if not console.is_terminal:
            for number in range(2):
                self._decode(number, None)
                console.print(f"{self.lanes[number].title}: {self.lanes[number].counters()}")
            return
        # Refreshed between steps by hand: drawing must not steal time from a pass, and is not
        # part of the times shown.
        with Live(self.view(console), console=console, auto_refresh=False) as live:
            for number in range(2):
                self._decode(number, live)

    def _decode(self, number: int, live: Live | None) -> None:
        lane, drawn = self.lanes[number], 0.0
        drafter, limit = self.drafters[number], self.limit
        with self.engine.stream(
            self.prompt, temperature=0.0, drafter=drafter, max_new_tokens=limit
        ) as stream:
            for piece in stream:
                lane.add(piece)
                if live is not None and perf_counter() - drawn > _REFRESH_SECONDS:
                    lane.stats = stream.result.stats
                    live.update(self.view(live.console), refresh=True)
                    drawn = perf_counter()
        lane.stats, lane.state = stream.result.stats, "done"
        self.results.append(stream.result)
        if live is not None:
            live.update(self.view(live.console), refresh=True)

    def view(self, console: Console) -> RenderableType:
        """Both panels, beside each other where there is room."""
        wide = console.width >= _SIDE_BY_SIDE
        lines = min(_PANEL_LINES, (console.height - 6 if wide else (console.height - 9) // 2))
        width = console.width // 2 if wide else console.width
        panels = [lane.panel(max(3, lines), width) for lane in self.lanes]
        legend = Text.assemble(
            ("■ guessed, and confirmed by the model", _COPIED), "   ■ the model's own"
        )
        both = Columns(panels, padding=0) if wide else Group(*panels)
        return Group(both, legend)


def report(console: Console, race: Race) -> bool:
    """Say whether the outputs are identical and how the times compare; False if they differ."""
    plain, drafted = race.results
    console.print()
    same = compare(console, race)
    ratio = plain.stats.seconds.total / max(drafted.stats.seconds.total, 1e-9)
    verdict = f"{ratio:.2f} times as fast" if ratio >= 1 else f"{1 / ratio:.2f} times slower"
    say(console, "Speed", (verdict, "bold green" if ratio > 1 else ""))
    console.print()
    table = plain_table("", "tokens", "passes", "tokens/pass", "tok/s", "seconds", header=True)
    for lane, result in zip(race.lanes, race.results, strict=True):
        s = result.stats
        numbers = (str(s.tokens), str(s.passes), f"{s.tokens_per_pass:.2f}")
        table.add_row(lane.title, *numbers, f"{s.tokens_per_second:.0f}", f"{s.seconds.total:.2f}")
    console.print(table)
    return same


def compare(console: Console, race: Race) -> bool:
    """Print whether the tokens are the same, and if not, the first difference and how close."""
    from draftsmith.model.agreement import first_difference, top_two_gap

    plain, drafted = race.results
    count = len(plain.tokens)
    at = first_difference(plain.tokens, drafted.tokens)
    if at is None:
        say(console, "Output", ("identical", "bold green"), f", all {plural(count, 'token')}")
        return True
    gap = top_two_gap(race.engine.model, [*plain.prompt_tokens, *plain.tokens[:at]])
    tie = gap < TIE
    words = "a tie, which rounding decides" if tie else "plain and block passes round differently"
    say(
        console,
        "Output",
        (f"differs from token {at + 1} of {count} on", "bold yellow" if tie else "bold red"),
        f": {_token(race, plain, at)} against {_token(race, drafted, at)}. The model's two best "
        f"logits are {gap:.2g} apart there, in {dtype_of(race.engine.model)} ({words})",
    )
    return tie


def _token(race: Race, result: GenerationResult, at: int) -> str:
    if at >= len(result.tokens):
        return "the end"
    from draftsmith.text.tokenizer import decode

    return repr(decode(race.engine.model.tokenizer, [result.tokens[at]]))


def show_diff(console: Console, before: str, result: GenerationResult) -> None:
    """The edit that was made, as a unified diff; not if the answer is only a part of the file."""
    console.print()
    if result.finish_reason == "length":
        console.print(
            f"The answer was cut after {plural(result.stats.tokens, 'token')}; no edit to show."
        )
        return
    old, new = before.splitlines(), result.text.splitlines()
    lines = list(difflib.unified_diff(old, new, FILE, f"{FILE} (edited)", lineterm="", n=2))
    if not lines:
        console.print("The model left the file as it was.")
    for line in lines:
        style = {"+": "green", "-": "red", "@": "cyan"}.get(line[0], "")
        console.print(Text(line, style if not line.startswith(("+++", "---")) else "bold"))
