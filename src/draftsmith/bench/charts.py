"""Plots as SVG text: drawn for a column of a phone's width, coloured by the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 360
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 10, 38
_LABEL = 36
"""Characters of a name that fit above its bar, beside the figures."""


def svg(height: float, body: Sequence[str], label: str, width: float = WIDTH) -> str:
    """A drawing with its description for those who cannot see it."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">'
        + "".join(body)
        + "</svg>"
    )


def text(x: float, y: float, content: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">' + (
        f"{escape(content)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'


def dot(x: float, y: float, style: str, radius: float = 4.5, hint: str = "") -> str:
    title = f"<title>{escape(hint)}</title>" if hint else ""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{style}">{title}</circle>'


def short(name: str, length: int = _LABEL) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


def ticks(top: float, wanted: int = 5) -> list[float]:
    """Round numbers from 0 to about `top`."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


@dataclass(slots=True)
class Frame:
    """Axes with linear or doubling x; maps data to the drawing."""

    x_title: str
    y_title: str
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    doubling: bool = False
    height: float = 250
    y_format: Callable[[float], str] = "{:g}".format
    body: list[str] = field(default_factory=list)

    def x(self, value: float) -> float:
        low, high = self._scaled(self.x_ticks[0]), self._scaled(self.x_ticks[-1])
        share = (self._scaled(value) - low) / ((high - low) or 1)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        share = (value - low) / ((high - low) or 1)
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM - 14)

    def _scaled(self, value: float) -> float:
        return math.log2(max(value, 0.5)) if self.doubling else value

    def axes(self) -> list[str]:
        floor = self.height - BOTTOM
        drawn = [text(0, TOP + 2, self.y_title, "axis")]
        for value in self.y_ticks:
            drawn.append(line(LEFT, self.y(value), WIDTH - RIGHT, self.y(value), "grid"))
            drawn.append(text(LEFT - 6, self.y(value) + 4, self.y_format(value), "tick", "end"))
        for value in self.x_ticks:
            drawn.append(text(self.x(value), floor + 16, f"{value:g}", "tick", "middle"))
        drawn.append(text(WIDTH - RIGHT, floor + 33, self.x_title, "axis", "end"))
        return drawn

    def path(self, points: Sequence[tuple[float, float]], style: str) -> None:
        """A line through data points."""
        at = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self.body.append(f'<polyline points="{at}" class="{style}"/>')

    def dot(self, x: float, y: float, style: str, radius: float = 4.5, hint: str = "") -> None:
        self.body.append(dot(self.x(x), self.y(y), style, radius, hint))

    def draw(self, label: str) -> str:
        return svg(self.height, [*self.axes(), *self.body], label)


@dataclass(frozen=True, slots=True)
class Mark:
    """One row of `intervals`: a dot with its whiskers."""

    name: str
    style: str
    value: float
    low: float
    high: float


def intervals(groups: Sequence[tuple[str, Sequence[Mark]]], label: str) -> str:
    """Dots with whiskers, a line of text above each; the short upright lines are 1×."""
    top = max((mark.high for _, marks in groups for mark in marks), default=1.0)
    scale = ticks(max(top, 1.2), 5)
    left, right = 4, WIDTH - 10

    def x(value: float) -> float:
        return left + value / scale[-1] * (right - left)

    body: list[str] = []
    y = 4.0
    for title, marks in groups:
        if title:
            y += 18
            body.append(text(0, y, title, "group"))
            y += 4
        for mark in marks:
            said = f"{mark.value:.2f}×  [{mark.low:.2f}, {mark.high:.2f}]"
            body.append(text(0, y + 15, short(mark.name), "name"))
            body.append(text(WIDTH, y + 15, said, "figure", "end"))
            body.append(line(left, y + 26, right, y + 26, "grid"))
            body.append(line(x(1), y + 20, x(1), y + 32, "one"))
            body.append(line(x(mark.low), y + 26, x(mark.high), y + 26, f"whisker {mark.style}"))
            body.append(dot(x(mark.value), y + 26, mark.style, 5, f"{mark.name}: {said}"))
            y += 38
    ends = {scale[0]: "start", scale[-1]: "end"}
    axis = [text(x(t), y + 18, f"{t:g}×", "tick", ends.get(t, "middle")) for t in scale]
    return svg(y + 26, [*body, *axis], label)


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of `bars`: its parts from left to right."""

    name: str
    said: str
    parts: Sequence[tuple[float, str, str]]
    """Length, style, what it is."""


def bars(rows: Sequence[Bar], label: str, top: float | None = None) -> str:
    """Stacked bars, a line of text above each."""
    longest = top or max((sum(p[0] for p in row.parts) for row in rows), default=1.0) or 1.0
    body: list[str] = []
    y = 0.0
    for row in rows:
        body.append(text(0, y + 15, short(row.name), "name"))
        body.append(text(WIDTH, y + 15, row.said, "figure", "end"))
        body.append(f'<rect x="0" y="{y + 21:.1f}" width="{WIDTH}" height="10" class="track"/>')
        x = 0.0
        for length, style, what in row.parts:
            width = length / longest * WIDTH
            body.append(
                f'<rect x="{x:.1f}" y="{y + 21:.1f}" width="{max(width, 0):.1f}" height="10" '
                f'class="{style}"><title>{escape(what)}</title></rect>'
            )
            x += width
        y += 40
    return svg(max(y, 10), body, label)
