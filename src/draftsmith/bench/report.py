"""A report of live runs: cells of its tables, and the whole of it as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from draftsmith.bench.half import Difference
from draftsmith.bench.summary import Interval, Section, Summary, interval, paces, speed_ratio
from draftsmith.bench.versus import Comparison

HEADS = ("arm", "tokens/s", "speed-up", "per prompt", "tokens/pass", "drafted/pass",
         "first token", "later tokens", "same answer", "memory")  # fmt: skip
VERSUS_HEADS = ("arm", "prompts", "A tokens/s", "B tokens/s", "B over A", "A tokens/pass",
                "B tokens/pass", "same answer")  # fmt: skip
NOTE = (
    "tokens/s: total tokens over total time, prompts included; speed-up: over {baseline}; in "
    "brackets 95 % bootstrap intervals over prompts; per prompt: mean of the prompts' speed-ups; "
    "same answer: answers with exactly the tokens of {baseline}; memory: peak, of the process on "
    "a CPU"
)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one report shows."""

    sections: Sequence[Section]
    comparison: Comparison | None = None


def cells(summary: Summary, baseline: str) -> list[str]:
    """One row of the main table."""
    own = summary.arm == baseline
    found = summary.speedup
    fast = "1×" if own else f"{found.value:.2f}× [{found.low:.2f}, {found.high:.2f}]"
    macro = "" if own else f"{summary.macro_speedup:.2f}×"
    if math.isnan(found.value):
        fast = macro = ""
    return [
        summary.arm,
        f"{summary.tokens_per_second:.1f}",
        fast,
        macro,
        f"{summary.tokens_per_pass:.2f}",
        "" if summary.drafted_per_pass is None else f"{summary.drafted_per_pass:.2f}",
        f"{summary.first_token_ms:.0f} ms",
        f"{summary.token_ms:.2f} ms",
        same(summary, own),
        "" if summary.peak_mib is None else f"{summary.peak_mib:,.0f} MiB",
        *(f"{mean:.1%} of {n}" for mean, n in summary.scores.values()),
    ]


def same(summary: Summary, own: bool) -> str:
    """How many answers are plain decoding's, and how close the call was where they are not."""
    if own or not summary.compared:
        return ""
    said = f"{summary.identical} of {summary.compared}"
    if summary.largest_gap is not None:
        gap = f"gap ≤ {summary.largest_gap:.2g}" if summary.largest_gap else "exact ties"
        said += f" ({gap})"
    return said


def heads(summaries: Sequence[Summary]) -> list[str]:
    """The main table's columns; the scores that there are come last."""
    return [*HEADS, *dict.fromkeys(name for s in summaries for name in s.scores)]


def versus_cells(comparison: Comparison) -> list[list[str]]:
    """The rows of the table that compares two files."""
    return [
        [
            row.arm + (f", {row.suite}" if row.suite else ""),
            str(row.prompts),
            f"{row.a_tokens_per_second:.1f}",
            f"{row.b_tokens_per_second:.1f}",
            f"{row.ratio.value:.3f}× [{row.ratio.low:.3f}, {row.ratio.high:.3f}]",
            f"{row.a_tokens_per_pass:.2f}",
            f"{row.b_tokens_per_pass:.2f}",
            f"{row.identical} of {row.prompts}",
        ]
        for row in comparison.rows
    ]


def facts(section: Section) -> list[tuple[str, str]]:
    """What was measured, on what."""
    known = section.settings
    runs = len({row.run for row in section.rows})
    versions = ", ".join(f"{name} {v}" for name, v in known.get("versions", {}).items())
    found = [
        ("Model", f"{known.get('model')}, {known.get('weights')} parameters (checksum)"),
        ("Runs in", section.title),
        ("Machine", str(known.get("machine"))),
        ("Prompts", f"{len({row.id for row in section.rows})}, {runs} run{'s' * (runs > 1)} each"),
        ("Suites", ", ".join(dict.fromkeys(row.suite for row in section.rows))),
        ("Versions", versions),
    ]
    if known.get("commit"):
        found.append(("Commit", str(known["commit"])))
    return found


def headline(section: Section) -> str:
    """The sentence to remember: the fastest of ours, over plain decoding and the fastest peer."""
    others = [s for s in section.whole if s.arm != section.baseline]
    others = [s for s in others if not math.isnan(s.speedup.value)]
    ours, peers = [s for s in others if s.ours], [s for s in others if not s.ours]
    if not ours:
        return ""
    best = max(ours, key=_speed)
    said = f"{best.arm} is {_times(best.speedup)} as fast as {section.baseline}"
    if peers:
        peer = max(peers, key=_speed).arm
        own, theirs = (paces(r for r in section.rows if r.arm == arm) for arm in (best.arm, peer))
        both = [(own[name], theirs[name]) for name in own if name in theirs]
        if both:
            said += f" and {_times(interval(both, speed_ratio))} as fast as {peer}"
    if best.compared:
        said += f", with the same answer on {best.identical} of {best.compared} prompts"
    return said + "."


def _speed(summary: Summary) -> float:
    return summary.speedup.value


def _times(found: Interval) -> str:
    return f"{found.value:.2f} times [{found.low:.2f}, {found.high:.2f}]"


def markdown(report: Report) -> str:
    """The report without its plots."""
    parts = ["# draftsmith bench"]
    for section in report.sections:
        parts += [f"## {_cell(section.title)}", _cell(headline(section))]
        parts.append("\n".join(f"- {name}: {_cell(value)}" for name, value in facts(section)))
        parts.append(_summary_table(section.whole, section.baseline))
        for suite in dict.fromkeys(s.suite for s in section.suites):
            of = [s for s in section.suites if s.suite == suite]
            parts += [f"### {_cell(str(suite))}", _summary_table(of, section.baseline)]
        parts.append(_cell(NOTE.format(baseline=section.baseline)) + ".")
    if (found := report.comparison) is not None:
        parts += [_cell(f"## B ({found.b}) over A ({found.a})"), _cell(differing(found))]
        parts.append(_table(VERSUS_HEADS, versus_cells(found)))
    return "\n\n".join(filter(None, parts)) + "\n"


def differing(found: Comparison) -> str:
    """How the settings of A and B differ, in a sentence."""
    if not found.changed:
        return "Measured with the same settings."
    changed = "; ".join(found.changed).replace(" there", " in A").replace(" now", " in B")
    return f"Measured with other settings: {changed}."


def _summary_table(summaries: Sequence[Summary], baseline: str) -> str:
    return _table(heads(summaries), [cells(s, baseline) for s in summaries])


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(content: str) -> str:
    return escape(content, quote=False).replace("|", "\\|")


HALF_HEADS = ("answers of", "differ from", "prompts", "differing", "first difference")


def half_cells(found: Sequence[Difference]) -> list[list[str]]:
    """The rows of the half precision table."""
    return [
        [
            one.of,
            one.than,
            str(one.prompts),
            f"{one.differing} ({one.differing / one.prompts:.0%})",
            "" if one.median_first is None else f"token {one.median_first + 1} (median)",
        ]
        for one in found
    ]
