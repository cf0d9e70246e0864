"""The plots of a report, each from one section's summaries."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.bench import charts
from draftsmith.bench.charts import Bar, Frame, Mark
from draftsmith.bench.cost import CostTable
from draftsmith.bench.summary import Section, Summary

PHASES = (("prefill", "prompt"), ("draft", "draft"), ("target", "target pass"),
          ("verify", "verify"), ("other", "other"))  # fmt: skip
COLOURS = 10
_DOUBLING = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Plots:
    """All plots of a section; an arm has the same colour in each, peers hollow dots."""

    def __init__(self, section: Section) -> None:
        self.section = section
        others = [s.arm for s in section.whole if s.arm != section.baseline]
        self.colour = {arm: f"a{1 + i % (COLOURS - 1)}" for i, arm in enumerate(others)}
        self.colour[section.baseline] = "a0"
        self.ours = {summary.arm: summary.ours for summary in section.whole}

    def style(self, arm: str) -> str:
        return self.colour[arm] + ("" if self.ours[arm] else " hollow")

    def speedups(self) -> str:
        """Speed-up over the baseline, by suite."""
        groups: list[tuple[str, list[Mark]]] = []
        several = bool(self.section.suites)
        for summary in (*self.section.whole, *self.section.suites):
            if summary.arm == self.section.baseline or summary.speedup.value != (
                summary.speedup.value
            ):
                continue
            title = (summary.suite or "all suites") if several else ""
            if not groups or groups[-1][0] != title:
                groups.append((title, []))
            found = summary.speedup
            style = self.style(summary.arm)
            groups[-1][1].append(Mark(summary.arm, style, found.value, found.low, found.high))
        return charts.intervals(groups, f"speed over {self.section.baseline}") if groups else ""

    def width(self) -> str:
        """Tokens per pass against draft nodes per pass; a line joins one drafter's budgets."""
        shown = [s for s in self.section.whole if s.drafted_per_pass is not None]
        if not any(s.drafted_per_pass for s in shown):
            return ""
        x_top = max(s.drafted_per_pass or 0 for s in shown)
        y_top = max(s.tokens_per_pass for s in shown)
        frame = Frame("draft tokens per pass", "tokens per pass",
                      charts.ticks(x_top), charts.ticks(y_top))  # fmt: skip
        by_drafter: dict[str, list[Summary]] = {}
        for s in shown:
            by_drafter.setdefault(s.drafter, []).append(s)
        for same in by_drafter.values():
            if len(same) > 1:
                at = sorted((s.drafted_per_pass or 0.0, s.tokens_per_pass) for s in same)
                frame.path(at, self.colour[same[0].arm])
        for s in shown:
            hint = f"{s.arm}, budget {s.budget}: {s.tokens_per_pass:.2f} tokens per pass"
            frame.dot(s.drafted_per_pass or 0.0, s.tokens_per_pass, self.style(s.arm), hint=hint)
        return frame.draw("tokens per pass against draft tokens per pass")

    def depth(self) -> str:
        """Share of the drafts accepted down to each depth."""
        drafting = [s for s in self.section.whole if s.stats and s.stats.drafted_by_depth]
        if not drafting:
            return ""
        deepest = max(len(s.stats.drafted_by_depth) for s in drafting if s.stats)
        scale = [d for d in _DOUBLING if d < 2 * deepest] or [1]
        quarters = [0.0, 0.25, 0.5, 0.75, 1.0]
        frame = Frame("draft position", "accepted", scale, quarters, doubling=True,
                      y_format="{:.0%}".format)  # fmt: skip
        for s in drafting:
            assert s.stats is not None
            held, reached = s.stats.accepted_by_depth, s.stats.drafted_by_depth
            points = [
                (d + 1.0, (held[d] if d < len(held) else 0) / n) for d, n in enumerate(reached)
            ]
            if len(points) > 1:
                frame.path(points, self.colour[s.arm])
            else:
                frame.dot(*points[0], self.style(s.arm))
        return frame.draw("share of drafts accepted by draft position")

    def source(self) -> str:
        """Accepted of drafted nodes, by who guessed them."""
        rows = []
        for s in self.section.whole:
            for name, entry in (s.stats.by_source if s.stats else {}).items():
                share = entry.accepted / entry.drafted if entry.drafted else 0.0
                title = s.arm if s.drafter.partition("(")[0] == name else f"{s.arm} → {name}"
                said = f"{share:.0%} of {entry.drafted:,}"
                rows.append(Bar(title, said, [(share, self.colour[s.arm], said)]))
        return charts.bars(rows, "accepted share of drafted tokens by source", 1.0) if rows else ""

    def passes(self) -> str:
        """Every answer: accepted tokens against passes."""
        rows = [r for r in self.section.rows if r.run == self.section.rows[0].run]
        arms = {s.arm for s in self.section.whole if s.accepted_share}
        rows = [r for r in rows if r.arm in arms]
        if not rows:
            return ""
        frame = Frame("passes", "accepted tokens", charts.ticks(max(r.passes for r in rows)),
                      charts.ticks(max(r.accepted for r in rows)))  # fmt: skip
        for row in rows:
            hint = f"{row.arm}, {row.id}: {row.accepted} accepted in {row.passes} passes"
            frame.dot(row.passes, row.accepted, f"{self.style(row.arm)} faint", 3, hint)
        return frame.draw("accepted tokens against passes, one dot per answer")

    def time(self) -> str:
        """Milliseconds per token, by phase."""
        rows = []
        for s in self.section.whole:
            per_token = 1e3 / max(1, s.tokens)
            whole = s.seconds * per_token
            parts = []
            if s.stats is None:
                first = sum(r.first_token_seconds for r in self.section.rows if r.arm == s.arm)
                first *= per_token
                parts = [(first, "p0", f"to the first token {first:.2f} ms")]
                parts.append((whole - first, "p5", f"after it {whole - first:.2f} ms"))
            else:
                for number, (name, title) in enumerate(PHASES[:-1]):
                    ms = getattr(s.stats.seconds, name) * per_token
                    parts.append((ms, f"p{number}", f"{title} {ms:.2f} ms"))
                rest = max(0.0, whole - sum(p[0] for p in parts))
                parts.append((rest, "p4", f"other {rest:.2f} ms"))
            rows.append(Bar(s.arm, f"{whole:.2f} ms", parts))
        return charts.bars(rows, "milliseconds per token by phase")


def cost_curve(table: CostTable) -> str:
    """Milliseconds of a pass by its width, a line for each context."""
    curves = {
        context: sorted(
            (float(p.positions), p.ms)
            for p in table.points
            if p.context == context and p.batch == min(table.batches)
        )
        for context in table.contexts
    }
    widest = max(x for points in curves.values() for x, _ in points)
    slowest = max(y for points in curves.values() for _, y in points)
    scale = [d for d in _DOUBLING if d < 2 * widest]
    frame = Frame("positions in a pass", "ms", scale, charts.ticks(slowest), doubling=True)
    for number, points in enumerate(curves.values()):
        frame.path(points, f"a{1 + number % (COLOURS - 1)}")
        for x, y in points:
            frame.dot(x, y, f"a{1 + number % (COLOURS - 1)}", 2.5, f"{x:g} positions: {y:.2f} ms")
    return frame.draw("milliseconds of a pass by its width")


def legend(items: Sequence[tuple[str, str]]) -> str:
    """A list of (style, name) with a swatch each."""
    from html import escape

    cells = []
    for style, name in items:
        shape = (
            f'<rect width="12" height="12" rx="2" class="{style}"/>'
            if style.startswith("p")
            else f'<circle cx="6" cy="6" r="4.5" class="{style}"/>'
        )
        cells.append(f'<li><svg viewBox="0 0 12 12" aria-hidden="true">{shape}</svg>'
                     f"{escape(name)}</li>")  # fmt: skip
    return f'<ul class="key">{"".join(cells)}</ul>'
