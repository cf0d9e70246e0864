"""The cost of generating a sequence: passes, tokens, drafts and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import reduce
from itertools import zip_longest
from typing import Any, NamedTuple

from draftsmith.core.draft import Draft
from draftsmith.core.verify import Verification

TARGET = "target"
"""Source of tokens that no draft contained."""
PREDICTION = "prediction"
"""Source of nodes that were copied from the request's prediction, by any drafter."""


class Guess(NamedTuple):
    """One node of a draft and whether it was accepted."""

    token: int
    parent: int
    """Index of its parent in the same draft; -1 for the root."""
    source: str
    accepted: bool


def guesses(draft: Draft, verification: Verification) -> tuple[Guess, ...]:
    """Return the nodes of a draft that could be accepted, and whether they were."""
    nodes = zip(draft.tokens[: draft.size], draft.parents, draft.source, strict=False)
    return tuple(Guess(*node, number in verification.nodes) for number, node in enumerate(nodes))


@dataclass(slots=True)
class SourceStats:
    """Statistics of one source: passes with its nodes, nodes drafted, tokens accepted."""

    attempts: int = 0
    drafted: int = 0
    accepted: int = 0
    unread: int = 0
    """Nodes after the token that ended the answer: they were not verified."""

    @property
    def rejected(self) -> int:
        """Number of nodes that verification rejected."""
        return self.drafted - self.accepted - self.unread


@dataclass(slots=True)
class Seconds:
    """Wall time by phase, in seconds; the sequences of a batch share the time of a step equally.

    `prefill` are passes that read a part of a prompt only; the last part is read by the first pass
    that decodes. Stop rules are called during `verify`.
    """

    prefill: float = 0.0
    draft: float = 0.0
    target: float = 0.0
    verify: float = 0.0
    total: float = 0.0

    @property
    def other(self) -> float:
        """Time outside the four phases, such as opening drafters and committing."""
        return max(0.0, self.total - self.prefill - self.draft - self.target - self.verify)


@dataclass(slots=True)
class Stats:
    """Cost of generating one sequence."""

    prompt_tokens: int = 0
    """Tokens of the prompt."""
    reused_tokens: int = 0
    """Prompt positions that were not computed, because an earlier request with the same beginning
    or an earlier turn had computed them."""
    passes: int = 0
    """Target passes that emitted tokens; passes that only read a prompt do not count."""
    tokens: int = 0
    """Tokens of the answer."""
    attempts: int = 0
    """Passes that carried a draft."""
    drafted: int = 0
    """Draft nodes that passes verified."""
    accepted: int = 0
    """Draft nodes that became tokens of the answer."""
    probes: int = 0
    """Probe nodes that rode along in passes."""
    failed_passes: int = 0
    """Passes that failed and were repeated with less: without this answer's draft, or with a
    smaller part of its prompt. A result's notices name the error."""
    drafter_failures: int = 0
    """Number of failures of the drafter. A failure for this answer alone disables the drafter. A
    drafter that is skipped because it delayed other answers counts as a failure, too."""
    drafted_by_depth: list[int] = field(default_factory=list)
    """Entry d: passes with a draft that reached depth d+1."""
    accepted_by_depth: list[int] = field(default_factory=list)
    """Entry d: passes in which at least d+1 tokens were accepted."""
    by_source: dict[str, SourceStats] = field(default_factory=dict)
    """Source → its `attempts`, `drafted`, `accepted`, `rejected` and `unread` nodes."""
    seconds: Seconds = field(default_factory=Seconds)
    """Time by phase: `prefill`, `draft`, `target`, `verify`, `other` and `total`."""
    wall_seconds: float = 0.0
    """Seconds from the call to the last token so far, including waiting. For a sum of several
    answers: the sum of `seconds.total`, so that a shared pass counts once."""
    first_token_seconds: float = 0.0
    """Seconds from the call to the first token, including waiting and prefill."""

    @property
    def tokens_per_pass(self) -> float:
        """Tokens of the answer per pass; plain decoding has 1."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per pass that carried a draft, bonus token included (vLLM's convention)."""
        return 1 + self.accepted / self.attempts if self.attempts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted nodes over drafted ones."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Entry d: of the drafts that reached depth d+1, the share with d+1 accepted tokens."""
        counts = zip_longest(self.accepted_by_depth, self.drafted_by_depth, fillvalue=0)
        return [held / reached for held, reached in counts]

    @property
    def accepted_share(self) -> float:
        """Share of the emitted tokens that a draft contained."""
        return self.accepted / self.tokens if self.tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of `wall_seconds`."""
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
        last = verification.nodes[-1]
        if last is not None:  # the answer ended at a node: its descendants are unread
            descendants = {last}
            for node, parent in enumerate(draft.parents[:size]):
                if parent in descendants:
                    descendants.add(node)
                    self.by_source[sources[node]].unread += 1

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Stats:
        """Create statistics from the dictionary that `dataclasses.asdict` returned."""
        sources = {name: SourceStats(**entry) for name, entry in record["by_source"].items()}
        return cls(**record | {"by_source": sources, "seconds": Seconds(**record["seconds"])})

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON, derived values included."""
        derived = [name for name, member in vars(Stats).items() if isinstance(member, property)]
        record = asdict(self)
        record["seconds"]["other"] = self.seconds.other
        return record | {name: getattr(self, name) for name in derived}


def total(parts: Sequence[Stats]) -> Stats:
    """Return the sum of the statistics of several sequences.

    Times add up; the first-token time is the mean. The wall time of several sequences is the sum
    of their shares of the passes.
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
    """Return the sum of two records, entry by entry; a shorter list is padded with zeros."""
    if isinstance(a, list):
        return [x + y for x, y in zip_longest(a, b, fillvalue=0)]
    if isinstance(a, dict):
        none = SourceStats()
        return {source: _sum(a.get(source, none), b.get(source, none)) for source in a | b}
    if is_dataclass(a):
        kind: Any = type(a)
        return kind(*(_sum(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)))
    return a + b
