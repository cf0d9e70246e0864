"""THE loop: one step for one sequence or a batch, for every drafter and for none.

    draft → one target pass → verify → commit → observe

Between steps a row's cache holds every committed token but its pending ones (normally just the
last). That invariant is what makes a step restartable and a cancelled engine usable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.budget import CostCurve
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Outcome
from draftsmith.core.session import Session
from draftsmith.core.stats import TARGET, Step
from draftsmith.core.target import Row, RowOutput, Target
from draftsmith.core.verify import Verdict, verify, verify_greedy


def start(session: Session, target: Target[Any]) -> None:
    """Give a new session its row and drafter state, and compute its prompt."""
    begin = perf_counter()
    if session.row is None:
        session.row = target.open(session.ids, session.needs)
    session.stats.reused_tokens = session.row.cached
    target.prefill(session.row)
    session.stats.seconds.prefill += perf_counter() - begin
    if session.state is None:
        session.state = session.drafter.open(session.context)
    session.stats.seconds.total += perf_counter() - begin


def step(
    sessions: Sequence[Session], target: Target[Any], cost: CostCurve | None = None
) -> list[Step]:
    """One target pass for all `sessions` (started, not finished); every one gains ≥ 1 token."""
    begin = perf_counter()
    if cost is not None:
        cost.rows = len(sessions)
    rows = [session.row for session in sessions]
    drafts = propose(sessions, target)
    usual = all(len(row.pending) == 1 for row in rows)  # else the pass also carries a prompt
    drafted = perf_counter()
    outputs = target.forward(rows, drafts)
    choices = greedy_choices(sessions, drafts, outputs)
    if None in choices:
        target.wait()  # the walk would wait anyway; so the pass is timed, not its launch
    passed = perf_counter()
    verdicts: list[Verdict] = []
    for i, session in enumerate(sessions):
        if outputs[i].finite:
            verdict = judge(session, drafts[i], outputs[i], choices[i])
        else:
            outputs[i], verdict = judge_plainly(session, drafts[i], rows[i], target)
            drafts[i] = EMPTY
        verdicts.append(verdict)
    verified = perf_counter()
    # Of a verdict without a path, all tokens but the last are committed already.
    tokens = [v.tokens[-1 - len(v.path) :] for v in verdicts]
    target.commit(rows, [v.path for v in verdicts], tokens)
    for session, draft, output, verdict in zip(sessions, drafts, outputs, verdicts, strict=True):
        learn(session, draft, output, verdict)
    if cost is not None and usual:
        cost.record(max(map(len, drafts)), passed - drafted)
    if cost is not None:
        _record_draft(sessions, cost, drafted - begin)
    end = perf_counter()

    for session in sessions:
        seconds = session.stats.seconds
        seconds.draft += (drafted - begin) / len(sessions)
        seconds.target += (passed - drafted) / len(sessions)
        seconds.verify += (verified - passed) / len(sessions)
        seconds.total += (end - begin) / len(sessions)
    return [
        Step(verdict.tokens, sources(draft, verdict))
        for draft, verdict in zip(drafts, verdicts, strict=True)
    ]


def _record_draft(sessions: Sequence[Session], cost: CostCurve, seconds: float) -> None:
    """Book what drafting took, where it was one drafter's doing."""
    drafters = {session.drafter for session in sessions}
    width = max(session.context.budget for session in sessions)
    if len(drafters) == 1 and width:
        cost.record_draft(drafters.pop(), width, seconds)


def propose(sessions: Sequence[Session], target: Target[Any]) -> list[Draft]:
    """Ask each drafter once for all of its sequences; fit the drafts to what the target takes."""
    for session in sessions:
        context = session.context
        # The last of `limit` tokens is the target's own, so drafts end one before it.
        context.depth = min(session.limit - session.generated - 1, target.room(session.row))
        drafts_fit = context.depth > 0 and target.shape != "plain"
        context.budget = session.budget.next() if drafts_fit else 0
        if session.needs.taps and context.budget:  # some are computed only when asked for
            taps = target.taps(session.row)
            context.hidden, context.attention = taps.hidden, taps.attention
    drafts = [EMPTY] * len(sessions)
    wanting = [i for i, session in enumerate(sessions) if session.context.budget > 0]
    for _, group in groupby(wanting, key=lambda i: id(sessions[i].drafter)):
        indices = list(group)
        members = [sessions[i] for i in indices]
        states = [s.state for s in members if s.state is not None]
        made = members[0].drafter.draft(states, [s.context for s in members])
        for i, draft in zip(indices, made, strict=True):
            drafts[i] = fit(draft, sessions[i], target)
    return drafts


def fit(draft: Draft, session: Session, target: Target[Any]) -> Draft:
    """Check a draft, and cut it to the depth and the shape that the target can take."""
    if not draft.tokens:
        return draft
    context = session.context
    draft.check(context.vocab_size, context.budget, len(context.ids))
    if target.shape == "chain" and not draft.is_chain:
        draft = draft.first_branch()
    return draft.clip(context.depth)


def greedy_choices(
    sessions: Sequence[Session], drafts: Sequence[Draft], outputs: Sequence[RowOutput]
) -> list[Sequence[int] | None]:
    """The arg-max of every row, in one copy to the host for the whole step.

    None for a session whose distribution must see its rows in order.
    """
    choices: list[Sequence[int] | None] = [None] * len(sessions)
    found: list[tuple[int, Tensor]] = []
    for i, (session, draft, output) in enumerate(zip(sessions, drafts, outputs, strict=True)):
        if not session.distribution.greedy or session.distribution.lazy:
            continue
        if output.choices is not None:
            choices[i] = output.choices
        else:
            found.append((i, session.distribution.best(output.logits[: 1 + draft.size])))
    if found:
        best = [chosen for _, chosen in found]
        flat: list[int] = (best[0] if len(best) == 1 else torch.cat(best)).tolist()
        for i, chosen in found:
            choices[i], flat = flat[: len(chosen)], flat[len(chosen) :]
    return choices


def judge(
    session: Session, draft: Draft, output: RowOutput, choices: Sequence[int] | None
) -> Verdict:
    """Verify one sequence's draft; the session commits the tokens as they are decided."""
    if choices is not None:
        return verify_greedy(draft, choices, session.emit)
    return verify(
        draft, output.logits, session.distribution, session.sampler, session.prefix, session.emit
    )


def judge_plainly(
    session: Session, draft: Draft, row: Row, target: Target[Any]
) -> tuple[RowOutput, Verdict]:
    """Verify a draft that overflows the model by plain passes, which compute what was accepted.

    So the draft is still followed, as the distribution of its samples wants, and saves nothing.
    """
    rows = _PlainRows(draft, row, target)
    found = verify(draft, rows, session.distribution, session.sampler, session.prefix, session.emit)
    session.stats.passes += len(found.tokens)
    return rows.outputs[0], replace(found, path=(), nodes=(None,) * len(found.tokens))


class _PlainRows:
    """Logits of the root and of accepted nodes, each by the pass that plain decoding makes."""

    def __init__(self, draft: Draft, row: Row, target: Target[Any]) -> None:
        self.draft = draft
        self.row = row
        self.target = target
        self.outputs: list[RowOutput] = []

    def __getitem__(self, place: int) -> Tensor:
        if place:
            self.target.commit([self.row], [()], [self.draft.tokens[place - 1 : place]])
        self.outputs += self.target.forward([self.row], [EMPTY])
        return self.outputs[-1].logits[0]


def learn(session: Session, draft: Draft, output: RowOutput, verdict: Verdict) -> None:
    """Tell statistics, budget and drafter what became of the draft."""
    session.stats.record(draft, verdict)
    session.trace(draft, verdict)
    if len(draft):  # probes alone cost time, too
        session.budget.record(draft.depth, len(verdict.path))
    if session.state is not None:
        session.state.observe(session.context, Outcome(draft, verdict, output))


def sources(draft: Draft, verdict: Verdict) -> tuple[str, ...]:
    """Who guessed each emitted token."""
    return tuple(TARGET if node is None else draft.source[node] for node in verdict.nodes)
