"""A report of live runs: cells of its tables, and the complete report as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from statistics import median

from draftsmith.lab.bench.summary import Section, Summary, interval, paces, speed_ratio
from draftsmith.lab.bench.versus import Comparison

HEADS = ("arm", "tokens/s", "speed-up", "per prompt", "tokens/pass", "drafted/pass",
         "first token", "later tokens", "same answer", "memory")  # fmt: skip
VERSUS_HEADS = ("arm", "prompts", "A tokens/s", "B tokens/s", "B over A", "A tokens/pass",
                "B tokens/pass", "same answer")  # fmt: skip
NOTE = (
    "tokens/s: total tokens over total time, prompts included; speed-up: over {baseline}; in "
    "brackets 95 % intervals over prompts, if these are enough; per prompt: mean of the prompts' "
    "speed-ups; same answer: answers with exactly the tokens of {baseline}; memory: peak, of the "
    "process on a CPU"
)


def cells(summary: Summary, baseline: str) -> list[str]:
    """Return one row of the main table."""
    own = summary.arm == baseline
    fast, macro = "1×" if own else "", ""
    if not own and not math.isnan(summary.speedup.value):
        fast, macro = summary.speedup.shown("×"), f"{summary.macro_speedup:.2f}×"
    return [
        summary.arm,
        summary.tokens_per_second.shown("", 1),
        fast,
        macro,
        f"{summary.tokens_per_pass:.2f}",
        "" if summary.drafted_per_pass is None else f"{summary.drafted_per_pass:.2f}",
        f"{summary.first_token_ms:.0f} ms",
        "" if math.isnan(summary.token_ms) else f"{summary.token_ms:.2f} ms",
        same(summary, own),
        "" if summary.peak_mib is None else f"{summary.peak_mib:,.0f} MiB",
    ]


def same(summary: Summary, own: bool) -> str:
    """Return how many answers equal plain decoding's, and the largest gap where they differ."""
    if own or not summary.compared:
        return ""
    text = f"{summary.identical} of {summary.compared}"
    if summary.largest_gap is not None:
        gap = f"gap ≤ {summary.largest_gap:.2g}" if summary.largest_gap else "exact ties"
        text += f" ({gap})"
    return text


def versus_cells(comparison: Comparison) -> list[list[str]]:
    """Return the rows of the table that compares two files."""
    return [
        [
            row.arm + (f", {row.suite}" if row.suite else ""),
            str(row.prompts),
            f"{row.a_tokens_per_second:.1f}",
            f"{row.b_tokens_per_second:.1f}",
            row.ratio.shown("×", 3),
            f"{row.a_tokens_per_pass:.2f}",
            f"{row.b_tokens_per_pass:.2f}",
            f"{row.identical} of {row.prompts}",
        ]
        for row in comparison.rows
    ]


def facts(section: Section) -> list[tuple[str, str]]:
    """Return what was measured, and on what."""
    known = section.settings
    runs: dict[str, set[int]] = {}
    for row in section.rows:
        runs.setdefault(row.id, set()).add(row.run)
    times = sorted({len(of) for of in runs.values()})
    each = " to ".join(map(str, dict.fromkeys((times[0], times[-1]))))
    versions = ", ".join(f"{name} {v}" for name, v in known.get("versions", {}).items())
    found = [
        ("Model", _model(str(known.get("model")), str(known.get("weights")))),
        ("Runs in", section.title),
        ("Machine", str(known.get("machine"))),
        ("Linear layers", str(known.get("linear layers", "unknown"))),
        *_circumstances(section),
        ("Prompts", f"{len(runs)}, {each} run{'s' * (times[-1] > 1)} each"),
        ("Suites", ", ".join(dict.fromkeys(row.suite for row in section.rows))),
        ("Versions", versions),
    ]
    if known.get("max_new_tokens"):
        found.append(("Longest answer", f"{known['max_new_tokens']} tokens"))
    if "cost" in known:
        found.append(("Automatic budgets", f"by a recorded cost: {known['cost']}"))
    commits = dict.fromkeys(str(row.settings.get("commit") or "") for row in section.rows)
    if any(commits):
        found.append(("Commit", ", ".join(filter(None, commits))))
    return found


def _model(name: str, weights: str) -> str:
    """`weights` is a number of parameters and, in brackets, their checksum."""
    count, _, checksum = weights.rstrip(")").partition(" (")
    counted = f"{int(count):,}" if count.isdecimal() else count
    return f"{name}: {counted} parameters, checksum {checksum}"


def _circumstances(section: Section) -> Iterator[tuple[str, str]]:
    """Yield when it was measured, and the machine's load, if the rows have them."""
    times = sorted(row.began for row in section.rows if row.began is not None)
    if times:
        shown = [time[:16].replace("T", " ") for time in (times[0], times[-1])]
        yield "Measured", " to ".join(dict.fromkeys(shown)) + " UTC"
    loads = sorted(row.load for row in section.rows if row.load is not None)
    if loads:
        load = f"{loads[0]:.2f} to {loads[-1]:.2f} per core, median {median(loads):.2f}"
        yield "Machine load", load + "; this run's own threads count"


def headline(section: Section) -> str:
    """Return a sentence: our fastest arm, over plain decoding and the fastest peer."""
    others = [s for s in section.whole if s.arm != section.baseline]
    others = [s for s in others if not math.isnan(s.speedup.value)]
    ours, peers = [s for s in others if s.ours], [s for s in others if not s.ours]
    if not ours:
        return ""
    best = _fastest(ours)
    text = f"{best.arm} is {best.speedup.shown(' times')} as fast as {section.baseline}"
    if peers:
        peer = _fastest(peers).arm
        own, theirs = (paces(r for r in section.rows if r.arm == arm) for arm in (best.arm, peer))
        both = [(own[name], theirs[name]) for name in own if name in theirs]
        if both:
            text += f" and {interval(both, speed_ratio).shown(' times')} as fast as {peer}"
    if all(one.speedup.low <= 1 for one in ours):
        text = f"No arm of draftsmith is clearly faster than {section.baseline}: {text}"
    if best.compared:
        text += f", with the same tokens in {best.identical} of {best.compared} answers"
    return text + "."


def _fastest(summaries: Sequence[Summary]) -> Summary:
    return max(summaries, key=lambda summary: summary.speedup.value)


def markdown(sections: Sequence[Section], comparison: Comparison | None = None) -> str:
    """Return the report without its plots."""
    parts = ["# draftsmith bench"]
    for section in sections:
        parts += [f"## {_cell(section.title)}", _cell(headline(section))]
        parts.append("\n".join(f"- {name}: {_cell(value)}" for name, value in facts(section)))
        for suite, summaries in section.tables.items():
            parts.append(f"### {_cell(suite)}" if suite is not None else "")
            parts.append(table(HEADS, [cells(s, section.baseline) for s in summaries]))
        parts.append(_cell(NOTE.format(baseline=section.baseline)) + ".")
    if comparison is not None:
        parts.append(_cell(f"## B ({comparison.b}) over A ({comparison.a})"))
        parts.append(_cell(differing(comparison)))
        parts.append(table(VERSUS_HEADS, versus_cells(comparison)))
    return "\n\n".join(filter(None, parts)) + "\n"


def differing(found: Comparison) -> str:
    """Return a sentence on how the settings of A and B differ."""
    if not found.changed:
        return "Measured with the same settings."
    changed = "; ".join(found.changed).replace(" there", " in A").replace(" now", " in B")
    return f"Measured with other settings: {changed}."


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the columns after the first are aligned right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(content: str) -> str:
    return escape(content, quote=False).replace("|", "\\|")
