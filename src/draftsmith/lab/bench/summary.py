"""Figures from rows: one summary per arm and suite, with intervals over the prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, pvariance
from typing import Any, TypeVar

from draftsmith.core.stats import Stats, total
from draftsmith.lab.bench.generations import Generation
from draftsmith.lab.bench.run import PLAIN
from draftsmith.lab.bench.suites import parts
from draftsmith.storage import digest

STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""97.5 % quantiles of Student's t for 1, 2, … degrees of freedom."""
T = TypeVar("T")
Pace = tuple[float, float]
"""Tokens and seconds of one prompt, medians over its runs."""


_USELESS = 10
"""Intervals that end above this multiple of their figure are not shown: prompts are too few."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 95 % interval over prompts: NaN if there is none."""

    value: float
    low: float
    high: float

    def shown(self, unit: str, digits: int = 2) -> str:
        """Format as `2.00× [1.50, 2.50]`, for the unit ×; nothing where there is no value.

        Without an interval, or with one that says nothing, as two prompts have, as `2.00×`.
        """
        if math.isnan(self.value):
            return ""
        value = f"{self.value:.{digits}f}{unit}"
        if math.isnan(self.low) or self.high > _USELESS * self.value:
            return value
        return f"{value} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@dataclass(frozen=True, slots=True)
class Summary:
    """One arm on one suite; suite None for all of them."""

    suite: str | None
    arm: str
    drafter: str
    budget: int | str | None
    prompts: int
    answers: int
    tokens: int
    seconds: float
    tokens_per_second: Interval
    """Total tokens over total time."""
    macro_tokens_per_second: float
    """Mean over prompts."""
    speedup: Interval
    """Tokens per second over the baseline's, on the prompts that both answered."""
    macro_speedup: float
    first_token_ms: float
    """Median over answers."""
    token_ms: float
    """Milliseconds of a token after the first, median over answers."""
    passes: int
    tokens_per_pass: float
    drafted_per_pass: float | None
    accepted_share: float
    compared: int
    identical: int
    """Number of compared answers equal to plain decoding's."""
    largest_gap: float | None
    """Largest distance of the two best logits where an answer leaves plain decoding's."""
    peak_mib: float | None
    stats: Stats | None
    """The loop's statistics; None for peers."""

    @property
    def ours(self) -> bool:
        return self.stats is not None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with None for NaN."""
        made: dict[str, Any] = without_nan(asdict(self))
        if self.stats is not None:
            made["stats"] = self.stats.as_dict()
        return made


@dataclass(frozen=True, slots=True)
class Section:
    """Results of one setup: all settings but arms, prompts, seed and commit are equal."""

    settings: dict[str, Any]
    baseline: str
    rows: list[Generation]
    tables: dict[str | None, list[Summary]]
    """Every arm over all suites (None), then on each part (`suites.parts`) if there are several."""

    @property
    def title(self) -> str:
        """`edit-7m, bfloat16, cpu, 2 threads`."""
        known = self.settings
        parts = [known.get("model"), known.get("dtype"), known.get("device")]
        if known.get("device") == "cpu":
            count = known.get("threads")
            parts.append(f"{count} thread{'s' if count != 1 else ''}")
        if known.get("temperature"):
            parts.append(f"temperature {known['temperature']}")
        if "dictated" in known:
            parts.append("dictated answers")
        return ", ".join(str(part) for part in parts if part)

    @property
    def whole(self) -> list[Summary]:
        return self.tables[None]

    def as_dict(self) -> dict[str, Any]:
        rows = [summary.as_dict() for table in self.tables.values() for summary in table]
        return {"settings": self.settings, "baseline": self.baseline, "rows": rows}


_OWN = ("arms", "budgets", "prompts", "seed", "commit", "corpora")
"""Settings that may differ within a setup. The budget of each arm is compared separately."""


def sections(files: Sequence[Sequence[Generation]]) -> list[Section]:
    """Group the rows of all files by setup.

    Arms of one name with other options are separated, and other prompts with the same ids.
    """
    groups: list[tuple[str, dict[str, tuple[object, ...]], list[Generation]]] = []
    runs = 0
    for rows in files:
        parts: dict[str, list[Generation]] = {}
        for row in rows:
            row.run += runs  # the same prompt in two files was measured twice
            setup = digest(sorted(item for item in row.settings.items() if item[0] not in _OWN))
            parts.setdefault(setup, []).append(row)
        for setup, part in parts.items():
            arms: dict[str, tuple[object, ...]] = {
                r.arm: (r.drafter, r.budget, "corpus=" in r.drafter and r.settings.get("corpora"))
                for r in part
            }
            for known, others, whole in groups:
                same = known == setup and all(others.get(a, own) == own for a, own in arms.items())
                if same and ambiguous(whole, part) is None:
                    others.update(arms)
                    whole += part
                    break
            else:
                groups.append((setup, arms, part))
        runs = 1 + max(row.run for row in rows)
    return [_section(rows) for _, _, rows in groups]


def ambiguous(a: Iterable[Generation], b: Iterable[Generation]) -> str | None:
    """Return an id that stands for different prompts in A and B; None if there is none.

    Later turns may differ, because they contain earlier answers.
    """
    first = {row.id: row for row in a if row.turn == 1}
    for row in b:
        other = first.get(row.id) if row.turn == 1 else None
        # With equal texts only the tokenizer is another one.
        if other is None or row.settings.get("prompts") == other.settings.get("prompts"):
            continue
        if row.prompt_ids != other.prompt_ids:
            return row.id
    return None


def _section(rows: list[Generation]) -> Section:
    arms = list(dict.fromkeys(name for row in rows for name in row.settings.get("arms", [])))
    drafters = {row.arm: row.drafter for row in rows}
    arms = [*(a for a in arms if a in drafters), *(a for a in drafters if a not in arms)]
    plain = [arm for name in PLAIN for arm in arms if drafters[arm] == name]
    baseline = next(iter(plain), arms[0])
    suites: dict[str | None, list[Generation]] = {None: rows}
    if len(set(named := parts(rows))) > 1:
        for row, part in zip(rows, named, strict=True):
            suites.setdefault(part, []).append(row)
    tables = {}
    for suite, of in suites.items():
        by_arm = {arm: [row for row in of if row.arm == arm] for arm in arms}
        base = paces(by_arm[baseline])
        tables[suite] = [
            _summary(found, baseline, base, suite) for found in by_arm.values() if found
        ]
    return Section(rows[0].settings, baseline, rows, tables)


def paces(rows: Iterable[Generation]) -> dict[str, Pace]:
    """Return the median tokens and seconds of every prompt over its runs."""
    runs: dict[str, list[Generation]] = {}
    for row in rows:
        runs.setdefault(row.id, []).append(row)
    return {
        name: (median(len(r.output_ids) for r in of), median(r.seconds for r in of))
        for name, of in runs.items()
    }


def rate(units: Sequence[Pace]) -> float:
    """Total tokens over total time."""
    return sum(unit[0] for unit in units) / sum(unit[1] for unit in units)


def interval(units: Sequence[T], statistic: Callable[[Sequence[T]], float]) -> Interval:
    """Return a statistic of prompts, above 0, with its interval by the jackknife.

    The logarithm of the statistic varies as it does when single prompts are left out, and the
    interval is Student's. A single prompt has none. The statistic must be smooth, such as a ratio
    of sums; for a median the jackknife fails.
    """
    value, free = statistic(units), len(units) - 1
    others = [statistic([*units[:i], *units[i + 1 :]]) for i in range(len(units)) if free]
    if not others or not all(other > 0 for other in others):
        return Interval(value, math.nan, math.nan)
    student = STUDENT[free - 1] if free <= len(STUDENT) else 1.96 + 2.72 / free
    factor = math.exp(student * math.sqrt(free * pvariance(map(math.log, others))))
    return Interval(value, value / factor, value * factor)


def speed_ratio(units: Sequence[tuple[Pace, Pace]]) -> float:
    """Tokens per second of the first over those of the second; NaN if that has none."""
    usual = rate([unit[1] for unit in units])
    return rate([unit[0] for unit in units]) / usual if usual else math.nan


def without_nan(value: Any) -> Any:
    """Return plain values with None for NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {name: without_nan(part) for name, part in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _summary(
    rows: list[Generation], baseline: str, base: dict[str, Pace], suite: str | None
) -> Summary:
    first = rows[0]
    own = paces(rows)
    both = [(own[name], base[name]) for name in own if name in base and base[name][0]]
    passes, tokens = sum(r.passes for r in rows), sum(len(r.output_ids) for r in rows)
    stats = [s for r in rows if (s := r.stats) is not None]
    whole = total(stats) if len(stats) == len(rows) else None
    later = [(r.seconds - r.first_token_seconds) / (n - 1) for r in rows
             if (n := len(r.output_ids)) > 1]  # fmt: skip
    # A run without this baseline compared its answers with another arm's.
    compared = [row for row in rows if row.compared and baseline in row.settings.get("arms", ())]
    gaps = [row.gap for row in compared if row.gap is not None]
    peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None]
    return Summary(
        suite=suite,
        arm=first.arm,
        drafter=first.drafter,
        budget=first.budget,
        prompts=len(own),
        answers=len(rows),
        tokens=tokens,
        seconds=sum(row.seconds for row in rows),
        tokens_per_second=interval(list(own.values()), rate),
        macro_tokens_per_second=fmean(rate([unit]) for unit in own.values()),
        speedup=interval(both, speed_ratio) if both else Interval(*[float("nan")] * 3),
        macro_speedup=fmean(speed_ratio([unit]) for unit in both) if both else float("nan"),
        first_token_ms=1e3 * median(row.first_token_seconds for row in rows),
        token_ms=1e3 * median(later) if later else math.nan,
        passes=passes,
        tokens_per_pass=tokens / passes if passes else 0.0,
        drafted_per_pass=whole.drafted / passes if whole is not None and passes else None,
        accepted_share=sum(row.accepted for row in rows) / tokens if tokens else 0.0,
        compared=len(compared),
        identical=sum(row.divergence is None for row in compared),
        largest_gap=max(gaps, default=None),
        peak_mib=max(peaks) / 2**20 if peaks else None,
        stats=whole,
    )
