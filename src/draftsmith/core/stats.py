"""What a step gives, and what it cost to generate one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import reduce
from itertools import zip_longest
from typing import Any, NamedTuple

from draftsmith.core.draft import Draft
from draftsmith.core.verify import Verification

TARGET = "target"
"""The source of tokens nobody had guessed."""
PREDICTION = "prediction"
"""The source of guesses that were copied from the request's prediction, by whatever drafter."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one pass gave one sequence."""

    tokens: tuple[int, ...]
    """Newly committed token ids."""
    sources: tuple[str, ...]
    """Who guessed each token: a drafter's name, or `TARGET`."""


class Guess(NamedTuple):
    """One node of a pass's draft, and what became of it."""

    token: int
    parent: int
    """Its place in the same draft, -1: what was there before."""
    source: str
    accepted: bool


def guesses(draft: Draft, verification: Verification) -> tuple[Guess, ...]:
    """The nodes of a draft that could be accepted, and whether they were."""
    nodes = zip(draft.tokens[: draft.size], draft.parents, draft.source, strict=False)
    return tuple(Guess(*node, number in verification.nodes) for number, node in enumerate(nodes))


@dataclass(slots=True)
class SourceStats:
    """One source's record: drafts attempted, nodes drafted, tokens accepted."""

    attempts: int = 0
    drafted: int = 0
    accepted: int = 0
    unread: int = 0
    """Nodes behind the token that ended the answer: the target never chose there."""

    @property
    def rejected(self) -> int:
        """Nodes that the target's choice went past."""
        return self.drafted - self.accepted - self.unread


@dataclass(slots=True)
class Seconds:
    """Wall time by phase; in a batch, each sequence gets its share of the step."""

    prefill: float = 0.0
    draft: float = 0.0
    target: float = 0.0
    verify: float = 0.0
    total: float = 0.0

    @property
    def other(self) -> float:
        """Everything outside the four phases: cache upkeep, stop rules, streaming."""
        return max(0.0, self.total - self.prefill - self.draft - self.target - self.verify)


@dataclass(slots=True)
class Stats:
    """What it cost to generate one sequence."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Prompt positions that were computed already: for another request that begins alike, or for
    the turns before."""
    passes: int = 0
    """Target passes that emitted tokens (prefill chunks not counted)."""
    tokens: int = 0
    attempts: int = 0
    """Passes that carried a draft."""
    drafted: int = 0
    accepted: int = 0
    probes: int = 0
    failed_passes: int = 0
    """Passes that failed and were repeated with less: without this answer's draft, or with a
    smaller part of its prompt. A result's notices name the error."""
    drafter_failures: int = 0
    """Times that the drafter failed; after the first that concerns this answer alone it is put
    aside. One that rests because it held up other answers counts, too."""
    drafted_by_depth: list[int] = field(default_factory=list)
    """Entry d: attempts whose draft reached depth d+1."""
    accepted_by_depth: list[int] = field(default_factory=list)
    """Entry d: attempts that had at least d+1 tokens accepted."""
    by_source: dict[str, SourceStats] = field(default_factory=dict)
    seconds: Seconds = field(default_factory=Seconds)
    wall_seconds: float = 0.0
    """From the call to the last token so far, waiting included. In a sum of several answers, the
    sum of their shares of the passes (`seconds.total`), so that a shared pass counts once."""
    first_token_seconds: float = 0.0
    """From the call to the first token, waiting and prefill included."""

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per pass that carried a draft, bonus token included (vLLM's convention)."""
        return 1 + self.accepted / self.attempts if self.attempts else 1.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Entry d: of the drafts that reached depth d+1, the share accepted at least so far."""
        counts = zip_longest(self.accepted_by_depth, self.drafted_by_depth, fillvalue=0)
        return [held / reached for held, reached in counts]

    @property
    def accepted_share(self) -> float:
        """Share of the emitted tokens that some drafter had guessed."""
        return self.accepted / self.tokens if self.tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per wall second: of one answer as its caller waited for it, of a sum together."""
        return self.tokens / self.wall_seconds if self.wall_seconds else 0.0

    def record(self, draft: Draft, verification: Verification) -> None:
        """Add one step of this sequence."""
        self.passes += 1
        self.tokens += len(verification.tokens)
        size = draft.size
        self.probes += draft.probes
        if not size:
            return
        accepted = verification.accepted
        self.attempts += 1
        self.drafted += size
        self.accepted += accepted
        _tally(self.drafted_by_depth, draft.depth)
        _tally(self.accepted_by_depth, accepted)
        sources = draft.source[:size]
        for source in dict.fromkeys(sources):
            entry = self.by_source.setdefault(source, SourceStats())
            entry.attempts += 1
            entry.drafted += sources.count(source)
        for node in verification.nodes:
            if node is not None:
                self.by_source[draft.source[node]].accepted += 1
        if verification.nodes[-1] is not None:  # else the walk ended where no guess went on
            behind = {verification.nodes[-1]}
            for node, parent in enumerate(draft.parents[:size]):
                if parent in behind:
                    behind.add(node)
                    self.by_source[sources[node]].unread += 1

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Stats:
        """What `asdict` made plain."""
        sources = {name: SourceStats(**entry) for name, entry in record["by_source"].items()}
        return cls(**record | {"by_source": sources, "seconds": Seconds(**record["seconds"])})

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON, derived ones included."""
        derived = [name for name, member in vars(Stats).items() if isinstance(member, property)]
        record = asdict(self)
        record["seconds"]["other"] = self.seconds.other
        return record | {name: getattr(self, name) for name in derived}


def total(parts: Sequence[Stats]) -> Stats:
    """The sum of several sequences' stats; times add up, first-token time is the mean.

    The wall time of several is the sum of their shares of the passes.
    """
    whole = reduce(_sum, parts, Stats())
    whole.first_token_seconds /= max(1, len(parts))
    if len(parts) > 1:
        whole.wall_seconds = whole.seconds.total
    return whole


def _tally(by_depth: list[int], depth: int) -> None:
    """Count one more draft that reached this depth."""
    by_depth += [0] * (depth - len(by_depth))
    for reached in range(depth):
        by_depth[reached] += 1


def _sum(a: Any, b: Any) -> Any:
    """The sum of two records, entry by entry; the shorter list counts as zeros at its end."""
    if isinstance(a, list):
        return [x + y for x, y in zip_longest(a, b, fillvalue=0)]
    if isinstance(a, dict):
        none = SourceStats()
        return {source: _sum(a.get(source, none), b.get(source, none)) for source in a | b}
    if is_dataclass(a):
        kind: Any = type(a)
        return kind(*(_sum(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)))
    return a + b
