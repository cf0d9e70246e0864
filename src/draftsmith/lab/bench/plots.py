"""Plots of a report as SVG, each from one section's summaries."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from html import escape
from itertools import accumulate, cycle
from typing import TYPE_CHECKING, Any

from draftsmith.errors import extra
from draftsmith.lab.bench.cost import CostTable
from draftsmith.lab.bench.summary import Section, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PHASES = {
    "prefill": ("prompt", "#8a9099"), "draft": ("draft", "#d9902f"),
    "target": ("target pass", "#2f6fce"), "verify": ("verify", "#8b5bd0"),
    "other": ("other", "#c4c8ce"), "unknown": ("not split by phase", "#aab0b8"),
}  # fmt: skip
"""Phases of the loop with titles and colours. transformers does not separate them."""

_BASELINE = "#6d7278"
_COLOURS = ("#1f66d1", "#d0590b", "#14855c", "#a3348a", "#6a4bd0", "#0b7f92", "#94690a", "#c0304a",
            "#4d6b16")  # fmt: skip
_FAINT = "#e3e3de"

STYLE = """
svg text { font-family: inherit !important; }
@media (prefers-color-scheme: dark) { svg, .key i { filter: invert(0.9) hue-rotate(180deg); } }
"""
"""Dark mode inverts lightness and keeps hues."""

_LOOK: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": _FAINT,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "lines.linewidth": 2,
}
_WIDTH, _HEIGHT = 5.0, 3.4
"""In inches of 72 points, each one pixel of the page: a column of a phone's width."""
_SHARE = (0, 1)
"""Limits of an axis in percent."""
_LABEL = 36
"""Characters of a name that fit above its bar, beside the figures."""


def check() -> None:
    """Raise OptionError if matplotlib is not installed."""
    with extra("bench", "a report's plots need matplotlib"):
        import matplotlib  # noqa: F401


def draw(label: str, paint: Callable[[Axes], None], height: float = _HEIGHT) -> str:
    """Return what `paint` draws, with `label` for screen readers; the same SVG every time."""
    import matplotlib
    from matplotlib.figure import Figure

    written = io.StringIO()
    with matplotlib.rc_context({**_LOOK, "svg.hashsalt": label}):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        paint(figure.subplots())
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    found = re.sub(r"<metadata>.*?</metadata>", "", written.getvalue(), flags=re.DOTALL)
    found = re.sub(r' id="[A-Za-z2.]+_\d+"', "", found)  # numbers that are equal in every drawing
    body = found[found.index(">", found.index("<svg")) + 1 :].replace("xlink:href", "href")
    box = f"0 0 {72 * _WIDTH:g} {72 * height:g}"
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(label)}">{body.strip()}'


Label = tuple[str, str]
"""A name and its figures; without figures it is a heading."""


def draw_rows(label: str, rows: Sequence[Label], paint: Callable[[Axes], None]) -> str:
    """Draw horizontal bars, number n at y=n, each below its name and figures."""

    def whole(axes: Axes) -> None:
        across = axes.get_yaxis_transform()
        for y, (name, figures) in enumerate(rows):
            shown = name if len(name) <= _LABEL else name[: _LABEL - 1] + "…"
            weight = "normal" if figures else "bold"
            axes.text(0, y - 0.28, shown, transform=across, fontweight=weight)
            axes.text(1, y - 0.28, figures, transform=across, ha="right")
        paint(axes)
        axes.set(yticks=[], ylim=(len(rows) - 0.6, -0.8))

    return draw(label, whole, 0.5 + 0.52 * len(rows))


Bar = tuple[str, str, Sequence[tuple[float, str]]]
"""A name, its figures, and the lengths and colours of its parts in order."""


def draw_bars(label: str, bars: Sequence[Bar], **axis: Any) -> str:
    """Draw horizontal bars of several parts; returns an empty string if there are none."""
    if not bars:
        return ""

    def paint(axes: Axes) -> None:
        for y, (_, _, parts) in enumerate(bars):
            ends = accumulate((length for length, _ in parts), initial=0.0)
            for left, (length, colour) in zip(ends, parts, strict=False):
                axes.barh(y, length, 0.25, left=left, color=colour)
        axes.set(**axis)
        if axis.get("xlim") == _SHARE:
            axes.xaxis.set_major_formatter("{x:.0%}")

    return draw_rows(label, [(name, figures) for name, figures, _ in bars], paint)


Line = tuple[Sequence[tuple[float, float]], str, dict[str, Any]]
"""Points, matplotlib's format string for their marks, and further options."""


def draw_lines(label: str, lines: Sequence[Line], **axis: Any) -> str:
    """Draw lines or dots over a logarithmic axis; returns an empty string if there are none."""
    if not lines:
        return ""

    def paint(axes: Axes) -> None:
        for points, marks, look in lines:
            axes.plot(*zip(*points, strict=True), marks, **look)
        axes.set(**axis)
        axes.set_ylim(bottom=0)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        if axis.get("ylim") == _SHARE:
            axes.yaxis.set_major_formatter("{x:.0%}")
        # The page has one legend for all its plots.
        if any("label" in look for *_, look in lines):
            axes.legend(frameon=False)

    return draw(label, paint)


class Plots:
    """All plots of a section. An arm has the same colour in each; peers have hollow dots."""

    def __init__(self, section: Section) -> None:
        self.section = section
        others = (s.arm for s in section.whole if s.arm != section.baseline)
        self.colour = dict(zip(others, cycle(_COLOURS), strict=False))
        self.colour[section.baseline] = _BASELINE
        self.ours = {summary.arm: summary.ours for summary in section.whole}

    def fill(self, arm: str) -> str:
        """Colour of the inside of an arm's dots."""
        return self.colour[arm] if self.ours[arm] else "white"

    def speedups(self) -> str:
        """Speed-up over the baseline, by suite."""
        rows: list[Label] = []
        marks: dict[int, Summary] = {}
        for suite, summaries in self.section.tables.items():
            shown = [s for s in summaries if s.arm != self.section.baseline]
            shown = [s for s in shown if not math.isnan(s.speedup.value)]
            if shown and len(self.section.tables) > 1:
                rows.append((suite or "all suites", ""))
            for summary in shown:
                marks[len(rows)] = summary
                rows.append((summary.arm, summary.speedup.shown("×")))
        if not marks:
            return ""

        def paint(axes: Axes) -> None:
            axes.vlines([1.0] * len(marks), [y - 0.2 for y in marks], [y + 0.2 for y in marks],
                        color=_BASELINE, linewidth=1.2)  # fmt: skip
            for y, summary in marks.items():
                found, colour = summary.speedup, self.colour[summary.arm]
                axes.plot([found.low, found.high], [y, y], color=colour, linewidth=3, alpha=0.45)
                axes.plot(found.value, y, "o", color=colour, mfc=self.fill(summary.arm), mew=2)
            # The intervals of two or three prompts may be much longer.
            axes.set_xlim(0, 2 * max(1.0, *(s.speedup.value for s in marks.values())))
            axes.xaxis.set_major_formatter("{x:g}×")

        return draw_rows(f"speed over {self.section.baseline}", rows, paint)

    def width(self) -> str:
        """Tokens per pass against draft nodes per pass; a line joins one drafter's budgets."""
        drafting = [s for s in self.section.whole if s.drafted_per_pass is not None]
        peers = [s for s in self.section.whole if s.drafted_per_pass is None and s.accepted_share]
        if not any(s.drafted_per_pass for s in drafting) and not peers:
            return ""
        by_drafter: dict[str, list[Summary]] = {}
        for s in drafting:
            by_drafter.setdefault(s.drafter, []).append(s)

        def paint(axes: Axes) -> None:
            for s in peers:  # their drafted tokens are unknown
                axes.axhline(s.tokens_per_pass, color=self.colour[s.arm], linestyle="--")
            for same in by_drafter.values():
                at = sorted((s.drafted_per_pass or 0.0, s.tokens_per_pass) for s in same)
                axes.plot(*zip(*at, strict=True), color=self.colour[same[0].arm])
                for s in same:
                    dot = (s.drafted_per_pass or 0.0, s.tokens_per_pass)
                    axes.plot(*dot, "o", color=self.colour[s.arm], clip_on=False)
            axes.set(xlabel="draft tokens per pass", ylabel="tokens per pass")
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)

        return draw("tokens per pass against draft tokens per pass", paint)

    def depth(self) -> str:
        """Share of the drafts accepted down to each depth."""
        lines: list[Line] = []
        for s in self.section.whole:
            if s.stats and s.stats.drafted_by_depth:
                points = list(enumerate(s.stats.acceptance_by_depth, 1))
                single = "o" if len(points) == 1 else "-"
                lines.append((points, single, {"color": self.colour[s.arm]}))
        label = "share of drafts accepted by draft position"
        return draw_lines(label, lines, xlabel="draft position", ylabel="accepted", ylim=_SHARE)

    def source(self) -> str:
        """Accepted share of drafted nodes, by source."""
        bars: list[Bar] = []
        for s in self.section.whole:
            for name, entry in (s.stats.by_source if s.stats else {}).items():
                share = entry.accepted / entry.drafted if entry.drafted else 0.0
                title = s.arm if s.drafter.partition("(")[0] == name else f"{s.arm} → {name}"
                parts = [(share, self.colour[s.arm]), (1 - share, _FAINT)]
                bars.append((title, f"{share:.0%} of {entry.drafted:,}", parts))
        return draw_bars("accepted share of drafted tokens by source", bars, xlim=_SHARE)

    def passes(self) -> str:
        """Accepted tokens per pass against passes, one dot per prompt: its first answer."""
        first = {(row.arm, row.id): row for row in reversed(self.section.rows)}
        lines: list[Line] = []
        for s in self.section.whole:
            points = [
                (row.passes, row.accepted / row.passes)
                for (arm, _), row in reversed(first.items())
                if arm == s.arm and row.passes
            ]
            if points and s.accepted_share:
                look = {"color": self.colour[s.arm], "mfc": self.fill(s.arm)}
                lines.append((points, "o", look | {"alpha": 0.6, "markersize": 4}))
        label = "accepted tokens per pass against passes, one dot per prompt"
        return draw_lines(label, lines, xlabel="passes", ylabel="accepted tokens per pass")

    def time(self) -> str:
        """Milliseconds per token, by phase."""
        bars: list[Bar] = []
        for s in self.section.whole:
            per_token = 1e3 / max(1, s.tokens)
            whole = s.seconds * per_token
            if s.stats is None:
                first = sum(r.first_token_seconds for r in self.section.rows if r.arm == s.arm)
                known, rest = [("prefill", first)], "unknown"
            else:
                *phases, rest, _ = PHASES
                known = [(name, getattr(s.stats.seconds, name)) for name in phases]
            parts = [(seconds * per_token, PHASES[name][1]) for name, seconds in known]
            parts.append((max(0.0, whole - sum(ms for ms, _ in parts)), PHASES[rest][1]))
            bars.append((s.arm, f"{whole:.2f} ms", parts))
        return draw_bars("milliseconds per token by phase", bars, xlabel="milliseconds")


def cost_colours(table: CostTable) -> dict[int, str]:
    """Return the colour of every context."""
    return dict(zip(table.contexts, cycle(_COLOURS), strict=False))


def cost_curve(table: CostTable) -> str:
    """Milliseconds of a pass by its width, a line for each context."""
    lines: list[Line] = []
    for context, colour in cost_colours(table).items():
        points = [p for p in table.points if p.context == context]
        at = sorted((p.positions, p.ms) for p in points)
        lines.append((at, "o-", {"color": colour, "markersize": 3}))
    label = "milliseconds of a pass by its width"
    return draw_lines(label, lines, xlabel="positions in a pass", ylabel="milliseconds")


def legend(items: Sequence[tuple[str, str, bool]]) -> str:
    """Return an HTML list of (name, colour, hollow) with a swatch each."""
    cells = "".join(
        f'<li><i style="border-color: {colour}'
        + ("" if hollow else f"; background: {colour}")
        + f'"></i>{escape(name)}</li>'
        for name, colour, hollow in items
    )
    return f'<ul class="key">{cells}</ul>'
