"""`draftsmith demo`: one edit, decoded plainly and with drafts, side by side."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from draftsmith import builtin
from draftsmith.cli.doctor import DTYPES, by_threads
from draftsmith.cli.loading import busy, own_threads, quiet, resolve, waiting
from draftsmith.cli.render import TARGET, dtype_of, label, plain_table, plural, visible
from draftsmith.cli.report import FAILED, stdout
from draftsmith.cli.run import room_for_edit
from draftsmith.errors import OptionError

if TYPE_CHECKING:
    from draftsmith.core.drafter import Drafter
    from draftsmith.core.stats import Stats
    from draftsmith.engine.engine import Engine
    from draftsmith.engine.result import GenerationResult

FILE = "shop.py"
_REFRESH_SECONDS = 0.08
_COPIED = "bold green"
_PANEL_LINES = 22


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
        lanes = [Lane("plain decoding", "none"), Lane(f"with {label(guesser)}", guesser)]
        prompt = builtin.edit_messages(FILE, message, before)
        plain, drafted = race(console, engine, prompt, limit, lanes)
        console.print()
        same = compare(console, engine, plain, drafted)
        show_speeds(console, lanes, (plain.stats, drafted.stats))
        show_diff(console, before, drafted)
    if not same and dtype_of(engine.model) == "float32":
        raise typer.Exit(FAILED)


def prepare(console: Console, dtype: str | None) -> Engine:
    """The engine in the dtype and threads that are cheapest here; `dtype` decides if given.

    Plain and wide passes count alike, so that neither run is at its worst. Sets torch's thread
    count, and says what it found.
    """
    import torch

    disturbed = busy()
    with waiting("loading and measuring …"), quiet():
        from draftsmith.engine.engine import Engine
        from draftsmith.model.measure import WIDE, cheapest

        engines = {
            name: Engine.from_pretrained(resolve(None), dtype=name)
            for name in (DTYPES if dtype is None else (dtype,))
        }
        costs = {
            (name, threads): seconds
            for name, engine in engines.items()
            for threads, seconds in by_threads(engine.model).items()
        }
    best = cheapest(costs, {way for way in costs if way[0] == "float32"})
    torch.set_num_threads(best[1])
    engine = engines[best[0]]
    size = sum(p.numel() for p in engine.model.model.parameters()) / 1e6
    say(console, "Model", f"{builtin.DEFAULT}, {size:.1f} million parameters")
    took = " and ".join(f"{1000 * seconds:.1f}" for seconds in costs[best].values())
    passes = f"a plain pass and one over {WIDE} tokens take {took} ms"
    least = f", the least of {len(costs)} ways" if len(costs) > 1 else ""
    say(console, "Run", f"{best[0]} with {plural(best[1], 'thread')}: {passes}{least}")
    if disturbed:
        say(console, "Note", disturbed)
    return engine


def say(console: Console, name: str, *parts: str | tuple[str, str]) -> None:
    """One line that begins with a name in bold."""
    console.print(Text.assemble((f"{name:7}", "bold"), *parts))


@dataclass(slots=True)
class Lane:
    """One of the two runs: its text so far, coloured, and its counters."""

    title: str
    drafter: str | Drafter
    text: Text = field(default_factory=Text)
    counters: str = "waiting"

    def count(self, s: Stats) -> None:
        speed, seconds = s.tokens_per_second, s.seconds.total
        self.counters = f"{s.tokens} tokens · {speed:.0f} tok/s · {seconds:.2f} s"


def race(
    console: Console, engine: Engine, prompt: list[dict[str, str]], limit: int, lanes: list[Lane]
) -> list[GenerationResult]:
    """Decode in one lane after the other, live in a terminal, after a short warm-up."""
    with waiting("warming up …"):
        for lane in lanes:
            engine.generate(
                prompt, drafter=lane.drafter, max_new_tokens=min(limit, 24), temperature=0.0
            )
    results = []
    # Refreshed between steps by hand: drawing must not steal time from a pass, and is not
    # part of the times shown.
    with Live(console=console, auto_refresh=False, transient=not console.is_terminal) as live:
        for lane in lanes:
            drawn = 0.0
            with engine.stream(
                prompt, drafter=lane.drafter, max_new_tokens=limit, temperature=0.0
            ) as stream:
                for piece in stream:
                    style = "" if piece.source == TARGET else _COPIED
                    lane.text.append(visible(piece.text), style)
                    if console.is_terminal and perf_counter() - drawn > _REFRESH_SECONDS:
                        lane.count(stream.result.stats)
                        live.update(view(console, lanes), refresh=True)
                        drawn = perf_counter()
            results.append(stream.result)
            lane.count(stream.result.stats)
            if console.is_terminal:
                live.update(view(console, lanes), refresh=True)
    return results


def view(console: Console, lanes: list[Lane]) -> Group:
    """The last lines of both texts, side by side."""
    lines = max(3, min(_PANEL_LINES, console.height - 6))
    both = Table.grid(expand=True)
    panels = []
    for lane in lanes:
        last = list(lane.text.split("\n", allow_blank=True))[-lines:]
        tail = Text("\n", no_wrap=True, overflow="ellipsis").join(last)
        panels.append(Panel(tail, title=lane.title, subtitle=lane.counters, height=lines + 2))
        both.add_column(ratio=1)
    both.add_row(*panels)
    legend = Text.assemble(
        ("■ guessed, and confirmed by the model", _COPIED), "   ■ the model's own"
    )
    return Group(both, legend)


def compare(
    console: Console, engine: Engine, plain: GenerationResult, drafted: GenerationResult
) -> bool:
    """Say if the tokens are the same, and if not, where they part and how close it was."""
    from draftsmith.model.agreement import first_difference, top_two_gap
    from draftsmith.text.tokenizer import decode

    count = len(plain.tokens)
    at = first_difference(plain.tokens, drafted.tokens)
    if at is None:
        say(console, "Output", ("identical", "bold green"), f", all {plural(count, 'token')}")
        return True
    gap = top_two_gap(engine.model, [*plain.prompt_tokens, *plain.tokens[:at]])
    next_tokens = (result.tokens[at : at + 1] for result in (plain, drafted))
    ours, theirs = (repr(decode(engine.model.tokenizer, ids)) for ids in next_tokens)
    say(
        console,
        "Output",
        (f"differs from token {at + 1} of {count} on", "bold red"),
        f": {ours} against {theirs}. The model's two best logits are {gap:.2g} apart there, "
        f"in {dtype_of(engine.model)} (plain and block passes round differently)",
    )
    return False


def show_speeds(console: Console, lanes: list[Lane], found: tuple[Stats, Stats]) -> None:
    """How the times compare, and the counts behind them."""
    table = plain_table("", "tokens", "passes", "tokens/pass", "tok/s", "seconds", header=True)
    for lane, s in zip(lanes, found, strict=True):
        numbers = (str(s.tokens), str(s.passes), f"{s.tokens_per_pass:.2f}")
        table.add_row(lane.title, *numbers, f"{s.tokens_per_second:.0f}", f"{s.seconds.total:.2f}")
    plain, drafted = (s.seconds.total for s in found)
    ratio = plain / drafted
    verdict = f"{ratio:.2f} times as fast" if ratio >= 1 else f"{1 / ratio:.2f} times slower"
    say(console, "Speed", (verdict, "bold green" if ratio > 1 else ""))
    console.print("", table, sep="\n")


def show_diff(console: Console, before: str, result: GenerationResult) -> None:
    """The edit that was made, as a unified diff; not if the answer is only a part of the file."""
    if result.finish_reason == "length":
        cut = plural(result.stats.tokens, "token")
        console.print(f"\nThe answer was cut after {cut}; no edit to show.")
        return
    old, new = before.splitlines(), result.text.splitlines()
    lines = list(difflib.unified_diff(old, new, FILE, f"{FILE} (edited)", lineterm="", n=2))
    shown = Syntax("\n".join(lines), "diff", theme="ansi_dark", background_color="default")
    console.print("", shown if lines else "The model left the file as it was.", sep="\n")
