"""`draftsmith demo`: a few requests, answered plainly and with drafts, side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from draftsmith import builtin
from draftsmith.cli.loading import busy, load_engine, short, waiting
from draftsmith.cli.options import ModelOptions, SomeTokens
from draftsmith.cli.render import TARGET, label, plain_table, plural, visible
from draftsmith.cli.report import FAILED, stdout
from draftsmith.cli.run import room_for_edit

if TYPE_CHECKING:
    from draftsmith.core.stats import Stats
    from draftsmith.engine.engine import Engine
    from draftsmith.engine.result import GenerationResult

Messages = list[dict[str, str]]

FILE = "shop.py"
LIMIT = 160
"""Most tokens of an answer; the edited file may be as long as it must."""
WARM_UP = 24
"""Tokens of an answer that is begun in both ways, so that neither is timed on a cold machine."""
_REFRESH_SECONDS = 0.08
_COPIED = "bold green"
_PANEL_LINES = 12


def demo(
    *,
    model: ModelOptions = ModelOptions(),
    max_new_tokens: Annotated[
        SomeTokens | None, Parameter(help="Longest answer.", show_default="160")
    ] = None,
) -> int:
    """Watch a model do a few short jobs: plainly, then with drafts, to the same answers.

    A small real model does them where it is installed; the built-in one edits a file. Needs no
    network. The exit code is 1 if two answers differ in float32.

    Examples

    draftsmith demo
    draftsmith demo --drafter copyspec --dtype float32
    """
    console = stdout()
    engine = load_engine(model, {}, prefixes=0)  # each answer pays for its own prompt
    introduce(console, engine)
    ours = builtin.is_ours(engine.model.name)
    limit = max_new_tokens or (room_for_edit(engine, builtin.demo()[0]) if ours else LIMIT)
    columns = ("", "plain", "drafts", "faster", "per pass", "guessed from")
    table = plain_table(*columns, folds=1)
    same = True
    for talk in talks(ours):
        asked: Messages = []
        for title, message in talk:
            asked.append({"role": "user", "content": message})
            console.print("", Text(f"“{title}”", "bold italic"), sep="\n")
            plain, drafted = race(console, engine, asked, limit)
            same = compare(console, engine, plain, drafted) and same
            table.add_row(title, *figures(plain, drafted))
            asked.append({"role": "assistant", "content": plain.text})
    console.print("", table, sep="\n")
    return 0 if same or engine.model.dtype_name != "float32" else FAILED


def talks(ours: bool) -> list[list[tuple[str, str]]]:
    """Return the requests: turns of title and message. A built-in model can only edit."""
    if not ours:
        return builtin.talks()
    before, message = builtin.demo()
    return [[(f"{message} in {FILE}", builtin.edit_messages(FILE, message, before)[0]["content"])]]


def introduce(console: Console, engine: Engine) -> None:
    """Print the model and the machine."""
    import torch

    from draftsmith.model.devices import name_of
    from draftsmith.model.measure import parameters_of, processor

    model = engine.model
    size = f"{parameters_of(model) / 1e6:.1f} million parameters in {model.dtype_name}"
    where = f"{processor()}, {plural(torch.get_num_threads(), 'thread')}"
    say(console, "Model", f"{short(model.name)}, {size}")
    say(console, "Machine", where if model.device.type == "cpu" else name_of(model.device))
    if model.widened is not None:
        say(console, "Dtype", model.dtype_explained)
    if disturbed := busy():
        say(console, "Note", disturbed)


def say(console: Console, name: str, *parts: str | tuple[str, str]) -> None:
    """One line that begins with a name in bold."""
    console.print(Text.assemble((f"{name:8}", "bold"), *parts))


@dataclass(slots=True)
class Lane:
    """One of the two runs: its text so far, coloured, and its counters."""

    title: str
    drafter: str | None
    """None: the engine's own."""
    text: Text = field(default_factory=Text)
    counters: str = "waiting"

    def count(self, s: Stats) -> None:
        self.counters = f"{s.tokens} tokens · {_speed(s):.0f} tok/s · {s.seconds.total:.2f} s"


def _speed(stats: Stats) -> float:
    """Tokens per second of the steps: drawing takes time between them."""
    return stats.tokens / stats.seconds.total if stats.seconds.total else 0.0


def race(
    console: Console, engine: Engine, asked: Messages, limit: int
) -> tuple[GenerationResult, GenerationResult]:
    """Answer plainly and then with drafts, live in a terminal, after a short warm-up."""
    lanes = [Lane("plain decoding", "none"), Lane(f"with {label(engine.drafter)}", None)]
    with waiting("warming up …"):
        for lane in lanes:
            engine.generate(asked, drafter=lane.drafter, max_new_tokens=WARM_UP, temperature=0.0)
    results = []
    # Refreshed between steps by hand: drawing must not steal time from a pass, and is not
    # part of the times shown.
    with Live(console=console, auto_refresh=False, transient=not console.is_terminal) as live:
        for lane in lanes:
            drawn = 0.0
            with engine.stream(
                asked, drafter=lane.drafter, max_new_tokens=limit, temperature=0.0
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
    return results[0], results[1]


def view(console: Console, lanes: list[Lane]) -> Group:
    """The last lines of both texts, side by side."""
    most, width = max(3, min(_PANEL_LINES, console.height - 8)), console.width // 2 - 4
    both = Table.grid(expand=True)
    panels = []
    for lane in lanes:
        tail = Text("\n").join(lane.text.wrap(console, width)[-most:])
        panels.append(Panel(tail, title=lane.title, subtitle=lane.counters, height=most + 2))
        both.add_column(ratio=1)
    both.add_row(*panels)
    legend = Text.assemble(
        ("■ guessed, and confirmed by the model", _COPIED), "   ■ the model's own"
    )
    return Group(both, legend)


def compare(
    console: Console, engine: Engine, plain: GenerationResult, drafted: GenerationResult
) -> bool:
    """Print whether the tokens are equal; if not, where they differ, and by how much."""
    from draftsmith.model.agreement import first_difference, top_two_gap
    from draftsmith.text.tokenizer import decode

    count = len(plain.tokens)
    at = first_difference(plain.tokens, drafted.tokens)
    if at is None:
        say(console, "Output", ("identical", "bold green"), f", all {plural(count, 'token')}")
        return True
    exact = engine.model.dtype_name == "float32"
    why = "" if exact else ": plain and wide passes round differently; not so with --dtype float32"
    gap = top_two_gap(engine.model, [*plain.prompt_tokens, *plain.tokens[:at]])
    next_tokens = (result.tokens[at : at + 1] for result in (plain, drafted))
    ours, theirs = (repr(decode(engine.model.tokenizer, ids)) for ids in next_tokens)
    say(
        console,
        "Output",
        (f"differs from token {at + 1} of {count} on", "bold red" if exact else "yellow"),
        f": {ours} against {theirs}. The model's two best logits are {gap:.2g} apart there, "
        f"in {engine.model.dtype_name}{why}",
    )
    return False


def figures(plain: GenerationResult, drafted: GenerationResult) -> tuple[str, ...]:
    """Return the times, and the sources of the accepted tokens."""
    before, after = (result.stats for result in (plain, drafted))
    ratio = _speed(after) / _speed(before)
    guessed = [source != TARGET for source in drafted.sources]
    copied = [origin for origin in drafted.origins if origin is not None]
    prompt = sum(origin < len(drafted.prompt_tokens) for origin in copied)
    places = {"prompt": prompt, "answer": len(copied) - prompt, "drafter": sum(guessed)}
    places["drafter"] -= len(copied)
    return (
        f"{before.seconds.total:.2f} s",
        f"{after.seconds.total:.2f} s",
        f"{ratio:.2f}×",
        f"{after.tokens_per_pass:.2f}",
        ", ".join(f"{place} {count}" for place, count in places.items() if count) or "nothing",
    )
