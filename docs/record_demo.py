"""Record the demo as an animated SVG: `python docs/record_demo.py docs/demo.svg`.

Runs what `draftsmith demo` runs on SmolLM2, in float32, and replays both lanes token by token in
the time they took, the requests one after the other. Copied tokens are coloured.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import torch
from rich.console import Console

from draftsmith import builtin
from draftsmith.cli.demo import LIMIT, WARM_UP, Messages
from draftsmith.cli.loading import load_engine
from draftsmith.cli.options import ModelOptions
from draftsmith.cli.render import plural
from draftsmith.core.stats import TARGET
from draftsmith.engine.engine import Engine
from draftsmith.model.measure import processor

ROWS, COLUMNS = 26, 62
CHARACTER, LINE = 6.62, 15
PANEL = int(COLUMNS * CHARACTER + 24)
INK, PAPER, BORDER, COPIED, FADED = "#d8dee9", "#11151c", "#2b3442", "#7fd1a0", "#8893a5"


@dataclass(frozen=True)
class Glyphs:
    """A run of characters on one line, and when it appears."""

    row: int
    column: int
    text: str
    colour: str
    seconds: float


@dataclass
class Lane:
    """One side of the picture: what appears on it, and its clock."""

    title: str
    drafter: str
    glyphs: list[Glyphs] = field(default_factory=list)
    row: int = 0
    column: int = 0
    seconds: float = 0.0
    tokens: int = 0

    def write(self, text: str, colour: str, seconds: float) -> None:
        """Text at the cursor; a word that does not fit begins a line."""
        for index, part in enumerate(text.split("\n")):
            if index:
                self.row, self.column = self.row + 1, 0
            if self.column + len(part) > COLUMNS:
                self.row, self.column, part = self.row + 1, 0, part.lstrip()
            if part.strip():
                self.glyphs.append(Glyphs(self.row, self.column, part, colour, seconds))
            self.column += len(part)

    def answer(self, engine: Engine, title: str, asked: Messages) -> tuple[str, list[int]]:
        """Stream one answer; its text and its tokens."""
        start = self.seconds
        self.write(f"“{title}”\n", FADED, start)
        with engine.stream(
            asked, drafter=self.drafter, max_new_tokens=LIMIT, temperature=0.0
        ) as stream:
            for piece in stream:
                colour = INK if piece.source == TARGET else COPIED
                self.write(piece.text, colour, start + piece.seconds)
        self.write("\n\n", INK, start)
        self.seconds += stream.result.stats.seconds.total
        self.tokens += len(stream.result.tokens)
        return stream.result.text, stream.result.tokens


def panel(x: int, lane: Lane) -> list[str]:
    """SVG of one panel: text that appears when it came, a counter, a scroll."""
    out = [
        f'<g transform="translate({x},44)">',
        f'<rect width="{PANEL}" height="{ROWS * LINE + 50}" rx="8" fill="{PAPER}" '
        f'stroke="{BORDER}"/>',
        f'<text x="12" y="22" fill="{INK}" font-weight="bold">{escape(lane.title)}</text>',
        f'<text x="{PANEL - 12}" y="22" fill="{FADED}" text-anchor="end" opacity="0">'
        f"{lane.tokens} tokens in {lane.seconds:.1f} s: {lane.tokens / lane.seconds:.0f} a second"
        f'<set attributeName="opacity" to="1" begin="{lane.seconds:.2f}s"/></text>',
        f'<svg y="34" width="{PANEL}" height="{ROWS * LINE + 8}"><g>',
    ]
    scrolls: dict[int, float] = {}
    for g in lane.glyphs:
        scrolls.setdefault(g.row, g.seconds)
        out.append(
            f'<text x="{12 + g.column * CHARACTER:.1f}" y="{(g.row + 1) * LINE}" '
            f'fill="{g.colour}" opacity="0" xml:space="preserve">{escape(g.text)}'
            f'<set attributeName="opacity" to="1" begin="{g.seconds:.2f}s"/></text>'
        )
    for row, seconds in scrolls.items():
        if row >= ROWS:
            out.append(
                '<animateTransform attributeName="transform" type="translate" fill="freeze" '
                f'to="0 {-(row - ROWS + 1) * LINE - 4}" begin="{seconds:.2f}s" dur="0.01s"/>'
            )
    out.append("</g></svg></g>")
    return out


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/demo.svg")
    engine = load_engine(ModelOptions(model=builtin.SMOLLM2, dtype="float32"), {}, prefixes=0)
    plain, drafted = lanes = (Lane("plain decoding", "none"), Lane("draftsmith, auto", "auto"))
    same = True
    for talk in builtin.talks():
        asked: Messages = []
        for title, message in talk:
            asked.append({"role": "user", "content": message})
            for lane in lanes:
                engine.generate(
                    asked, drafter=lane.drafter, max_new_tokens=WARM_UP, temperature=0.0
                )
            (text, tokens), (_, again) = (lane.answer(engine, title, asked) for lane in lanes)
            same = same and tokens == again
            asked.append({"role": "assistant", "content": text})
    told = "the same answers" if same else "NOT the same answers"
    width, height = 2 * PANEL + 36, ROWS * LINE + 106
    speed = plain.seconds / drafted.seconds
    where = f"{processor()[:40]}, {plural(torch.get_num_threads(), 'thread')}, float32"
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="11">',
        f'<rect width="{width}" height="{height}" rx="10" fill="#0b0e13"/>',
        f'<text x="14" y="28" fill="{INK}" font-size="12">SmolLM2-135M: {told}, '
        f'<tspan fill="{COPIED}">{speed:.1f} times as fast</tspan> '
        f'<tspan fill="{FADED}">({escape(where)}, in real time; '
        f'<tspan fill="{COPIED}">copied</tspan>)</tspan></text>',
    ]
    for index, lane in enumerate(lanes):
        svg += panel(12 + index * (PANEL + 12), lane)
    svg.append("</svg>")
    target.write_text("\n".join(svg), encoding="utf-8")
    Console().print(f"{target}: {target.stat().st_size // 1024} KiB, {told}, {speed:.2f} times")


if __name__ == "__main__":
    main()
