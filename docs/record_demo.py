"""Record the demo as an animated SVG: `python docs/record_demo.py docs/demo.svg`.

Runs the bundled edit plainly and with CopySpec on the built-in model, and replays both token by
token from the measured times, slowed down so that an eye can follow. Copied tokens are coloured.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.console import Console

from draftsmith import builtin
from draftsmith.cli.demo import prepare
from draftsmith.core.stats import TARGET
from draftsmith.engine.jobs import Piece

SLOWER = 4
ROWS, COLUMNS = 30, 58
CHARACTER, LINE = 6.62, 15
PANEL = int(COLUMNS * CHARACTER + 24)
INK, PAPER, BORDER, COPIED, FADED = "#d8dee9", "#11151c", "#2b3442", "#7fd1a0", "#8893a5"


@dataclass(frozen=True)
class Glyphs:
    """A run of characters on one line, and when it appears."""

    row: int
    column: int
    text: str
    source: str
    seconds: float


def lay_out(pieces: list[Piece]) -> list[Glyphs]:
    """Pieces of text on a grid; the page scrolls when it is full."""
    glyphs: list[Glyphs] = []
    row = column = 0
    for piece in pieces:
        for index, part in enumerate(piece.text.replace("\t", "    ").split("\n")):
            if index:
                row, column = row + 1, 0
            visible = part[: max(0, COLUMNS - column)]
            if visible:
                glyphs.append(Glyphs(row, column, visible, piece.source, piece.seconds * SLOWER))
            column += len(part)
    return glyphs


def panel(x: int, title: str, pieces: list[Piece]) -> list[str]:
    """SVG of one panel: text that appears when it came, a counter, a scroll."""
    glyphs = lay_out(pieces)
    end = pieces[-1].seconds
    out = [
        f'<g transform="translate({x},44)">',
        f'<rect width="{PANEL}" height="{ROWS * LINE + 50}" rx="8" fill="{PAPER}" '
        f'stroke="{BORDER}"/>',
        f'<text x="12" y="22" fill="{INK}" font-weight="bold">{escape(title)}</text>',
        f'<text x="{PANEL - 12}" y="22" fill="{FADED}" text-anchor="end" opacity="0">'
        f"{len(pieces)} tokens in {end:.2f} s: {len(pieces) / end:.0f} a second"
        f'<set attributeName="opacity" to="1" begin="{end * SLOWER:.2f}s"/></text>',
        f'<svg y="34" width="{PANEL}" height="{ROWS * LINE + 8}"><g>',
    ]
    scrolls: dict[int, float] = {}
    for g in glyphs:
        scrolls.setdefault(g.row, g.seconds)
        colour = INK if g.source == TARGET else COPIED
        out.append(
            f'<text x="{12 + g.column * CHARACTER:.1f}" y="{(g.row + 1) * LINE}" fill="{colour}" '
            f'opacity="0" xml:space="preserve">{escape(g.text)}'
            f'<set attributeName="opacity" to="1" begin="{g.seconds:.2f}s"/></text>'
        )
    for row, seconds in scrolls.items():
        if row >= ROWS:
            out.append(
                '<animateTransform attributeName="transform" type="translate" fill="freeze" '
                f'to="0 {-(row - ROWS + 1) * LINE}" begin="{seconds:.2f}s" dur="0.01s"/>'
            )
    out.append("</g></svg></g>")
    return out


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/demo.svg")
    engine = prepare(Console(), None)
    before, message = builtin.demo()
    messages = builtin.edit_messages("inventory.py", message, before)
    options = {"max_new_tokens": 2000, "temperature": 0.0}
    arms = {"plain decoding": "none", "CopySpec": "copyspec(gamma=3, block=10)"}
    runs: dict[str, list[Piece]] = {}
    for title, drafter in arms.items():
        engine.generate(messages, drafter=drafter, **options)  # warm up
        runs[title] = list(engine.stream(messages, drafter=drafter, **options))
    plain, drafted = ([p.token for p in pieces] for pieces in runs.values())
    same = "the same answer" if plain == drafted else "NOT the same answer"
    width, height = 2 * PANEL + 36, ROWS * LINE + 106
    speed = runs["plain decoding"][-1].seconds / runs["CopySpec"][-1].seconds
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="11">',
        f'<rect width="{width}" height="{height}" rx="10" fill="#0b0e13"/>',
        f'<text x="14" y="28" fill="{INK}" font-size="13">“{escape(message)}” · {same}, '
        f'<tspan fill="{COPIED}">{speed:.1f} times faster</tspan> '
        f'<tspan fill="{FADED}">(played {SLOWER} times slower; '
        f'<tspan fill="{COPIED}">copied</tspan>)</tspan></text>',
    ]
    for index, (title, pieces) in enumerate(runs.items()):
        svg += panel(12 + index * (PANEL + 12), title, pieces)
    svg.append("</svg>")
    target.write_text("\n".join(svg), encoding="utf-8")
    print(f"{target}: {target.stat().st_size // 1024} KiB, {same}, {speed:.2f} times")


if __name__ == "__main__":
    main()
