"""THE loop: one step for one sequence or a batch, for every drafter and for none.

    draft → one target pass → for each sequence: verify → commit → observe

Between steps a row's cache holds every committed token but its pending ones (normally just the
last). Sequences are settled one by one, so that an error can concern one of them only; an interrupt
ends all sequences of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from draftsmith.compiled import compiling
from draftsmith.core.budget import AutoBudget, FixedBudget, pick, share
from draftsmith.core.cost import PRIOR_SLOPE, CostCurve, on_curve
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Drafter, Outcome
from draftsmith.core.session import PUT_ASIDE, TOGETHER, Session
from draftsmith.core.stats import TARGET, Step, guesses
from draftsmith.core.target import REST, Row, RowOutput, Target, ahead
from draftsmith.core.verify import Verdict, verify, verify_greedy
from draftsmith.errors import DrafterError, DrafterStalled

LEAST_CHUNK = 16
"""Prompt tokens below which a chunk is not halved any more."""

LONGEST_DRAFT = 5.0
"""Seconds that drafting for a pass may take in any case."""
DRAFT_PASSES = 8
"""Passes of the target that it may take beside these: a draft model makes several of its own."""

_NOT_COMPUTED = RowOutput(torch.empty((0, 0), device="cpu"), finite=False)

WITHOUT_DRAFT = "a pass with drafts failed and was repeated without them"
SMALLER = "a pass over a part of the prompt failed and was repeated with a smaller part"


def start(session: Session, target: Target[Any]) -> None:
    """Give a new session its row; nothing is computed yet."""
    if session.row is None:
        session.row = target.open(session.ids, session.needs)
    session.stats.reused_tokens = session.row.cached


def unread(session: Session, target: Target[Any]) -> bool:
    """Whether its pending tokens are taken by passes without a draft, in chunks; else it decodes.

    The pass that takes the last of them gives a token, and the first draft follows from it.
    """
    return session.reading and ahead(target, session.row, session.needs.taps, REST) > 0


def step(
    sessions: Sequence[Session],
    target: Target[Any],
    cost: CostCurve | None = None,
    take: Sequence[int] | None = None,
) -> list[Step]:
    """One target pass for all `sessions` (started, not finished).

    `take`: how many of its pending tokens each one's row takes, at least 1; None: all at once.
    Whose row has some left gains no token, every other at least one, unless its own processor,
    stop rule or drafter's host fails: `Session.error`, `Session.drafter_error`. An error of the
    model ends the last of the sessions, and more where that does not help. Raises nothing but what
    is no Exception (KeyboardInterrupt), after which the sessions cannot go on.
    """
    if not sessions:
        return []
    begin = perf_counter()
    before = [session.generated for session in sessions]
    takes = [len(s.row.pending) for s in sessions] if take is None else [*take]
    whole = [s for s, n in zip(sessions, takes, strict=True) if n == len(s.row.pending)]
    decoding = [session for session in whole if not unread(session, target)]
    usual = all(len(session.row.pending) == 1 for session in sessions)  # no prompt is in the pass
    own = None if cost is None else cost.at(len(sessions), cached(sessions))
    for session in decoding:
        session.open_drafter()
    opened = perf_counter()
    drafts = propose(decoding, sessions, target)
    drafted = perf_counter()
    outputs = forward(sessions, drafts, takes, target)
    choices = greedy_choices(sessions, drafts, outputs)
    if None in choices:
        target.wait()  # the walk would wait anyway; so the pass is timed, not its launch
    passed, judging = perf_counter(), 0.0
    for i, session in enumerate(sessions):
        if session.error is None:
            judging += settle(session, drafts[i], outputs[i], choices[i], takes[i], target)
    if own is not None and usual:
        own.record(sum(map(len, drafts)), passed - drafted)
        _record_draft(sessions, own, drafted - opened)
    end = perf_counter()

    for session in sessions:
        seconds = session.stats.seconds
        seconds.total += (end - begin) / len(sessions)
        if session not in decoding:  # it was a part of its prompt, perhaps the last
            seconds.prefill += (end - begin) / len(sessions)
        else:
            seconds.draft += (drafted - opened) / len(sessions)
            seconds.target += (passed - drafted) / len(sessions)
            seconds.verify += judging / len(sessions)
    give_up(decoding, passed - drafted)
    return [
        Step(tuple(s.ids[s.prompt_length + n :]), tuple(s.sources[n:]))
        for s, n in zip(sessions, before, strict=True)
    ]


def cached(sessions: Sequence[Session]) -> int:
    """Tokens that the caches of these hold together: what a pass over them has to read."""
    return sum(session.row.cached for session in sessions)


def _record_draft(sessions: Sequence[Session], cost: CostCurve, seconds: float) -> None:
    """Book what drafting took, where it was one drafter's doing."""
    drafters = {session.drafter for session in sessions}
    width = max(session.context.budget for session in sessions)
    if len(drafters) == 1 and width:
        cost.record_draft(drafters.pop(), width, seconds)


def propose(
    decoding: Sequence[Session], sessions: Sequence[Session], target: Target[Any]
) -> list[Draft]:
    """Ask each drafter once for all of its sequences; fit the drafts to what the target takes."""
    able = []
    for session in decoding:
        context = session.context
        # The last of `limit` tokens is the target's own, so drafts end one before it.
        context.depth = min(session.limit - session.generated - 1, target.room(session.row))
        drafts_fit = context.depth > 0 and target.shape != "plain"
        able.append(session.budget if drafts_fit else FixedBudget(0))
    tokens = cached(decoding)
    for session, width in zip(decoding, share(able, tokens), strict=True):
        context = session.context
        context.budget, session.waited = width, 0.0
        if context.cost is not None:
            context.cost = context.cost.nearest(len(decoding), tokens)
        if session.needs.taps and width:  # some are computed only when asked for
            taps = target.taps(session.row)
            context.hidden, context.attention = taps.hidden, taps.attention
    groups: dict[int, list[Session]] = {}
    for session in decoding:
        if session.context.budget > 0 and session.state is not None:
            groups.setdefault(id(session.drafter), []).append(session)
    drafts: dict[Session, Draft] = {}
    for members in groups.values():
        begin = perf_counter() - compiling()
        drafts |= ask(members[0].drafter, members, target)
        took = perf_counter() - compiling() - begin
        for session in members:
            session.waited = took
    trim(drafts, len(decoding))
    return [drafts.get(session, EMPTY) for session in sessions]


def trim(drafts: dict[Session, Draft], rows: int) -> None:
    """Leave out the guesses that do not pay in this pass, where drafters say how likely they are.

    Never sampled ones: whether a token stays must not depend on what was drawn.
    """
    budgets, fixed, tokens = dict[Session, AutoBudget](), 0, float(rows)
    for session, draft in drafts.items():
        if not isinstance(session.budget, AutoBudget) or not draft.size:
            fixed += len(draft)
        elif draft.chances is None or draft.proposals or draft.probes:
            fixed += len(draft)
            tokens += session.budget.expected(draft.depth)
        else:
            budgets[session] = session.budget
    if not budgets:
        return
    points = next(iter(budgets.values())).cost.points()
    orders, offers = [], []
    for session in budgets:
        probs = drafts[session].path_probs()
        orders.append(sorted(range(len(probs)), key=probs.__getitem__, reverse=True))
        offers.append([(probs[node], 1) for node in orders[-1]])
    best = pick(offers, tokens, fixed, lambda nodes, _: on_curve(points, nodes, PRIOR_SLOPE))
    for session, order, kept in zip(budgets, orders, best, strict=True):
        drafts[session] = drafts[session].select(sorted(order[:kept]))


def ask(drafter: Drafter, members: Sequence[Session], target: Target[Any]) -> dict[Session, Draft]:
    """One drafter's drafts. Where it fails it is asked for each alone; who fails again goes on
    plainly. One that has taken long by then is not asked again."""
    begin = perf_counter()
    states = [session.state for session in members if session.state is not None]
    try:
        made = drafter.draft(states, [session.context for session in members])
        if len(made) != len(members):
            raise DrafterError(f"{drafter} made {len(made)} drafts for {len(members)} sequences")
    except Exception as error:
        if len(members) == 1 or perf_counter() - begin > LONGEST_DRAFT:
            for session in members:
                session.put_aside(error)
            return {}
        alone = {s: draft for one in members for s, draft in ask(drafter, [one], target).items()}
        if all(session.drafter_error is None for session in members):
            for session in members:
                session.stats.drafter_failures += 1
                session.note(TOGETHER, error)
        return alone
    drafts = {}
    for session, draft in zip(members, made, strict=True):
        try:
            drafts[session] = fit(draft, session, target)
        except Exception as error:
            session.put_aside(error)
    return drafts


def give_up(decoding: Sequence[Session], seconds: float) -> None:
    """Put drafters aside that held up a pass, which itself took so many `seconds`.

    It is not counted what they compiled, nor as long as it took to read their prompts: a draft
    model reads them, too. So none is judged by how fast the machine is. The sequences of the pass
    go on plainly; later ones ask the drafter again (`Stalls`).
    """
    asked = [session for session in decoding if session.context.budget]
    slow = [session for session in asked if session.waited > LONGEST_DRAFT]
    stalled: dict[int, DrafterStalled] = {}
    for session in slow:
        read = sum(s.stats.seconds.prefill for s in slow if s.drafter is session.drafter)
        if session.waited > LONGEST_DRAFT + DRAFT_PASSES * seconds + read:
            if id(session.stalls) not in stalled:
                session.stalls.add()
            stalled[id(session.stalls)] = DrafterStalled(
                f"drafting took {session.waited:.1f} s beside a pass of {seconds:.3f} s"
            )
    for session in asked:
        if id(session.stalls) not in stalled:
            session.stalls.in_a_row = 0
    for session in decoding if stalled else ():
        if (error := stalled.get(id(session.stalls))) is None:
            continue
        if session.drafter_error is None:
            session.put_aside(error)
        elif session.waited:
            error.__cause__ = session.drafter_error
            session.note(PUT_ASIDE, error)
            session.drafter_error = error


def fit(draft: Draft, session: Session, target: Target[Any]) -> Draft:
    """Check a draft, and cut it to the depth and the shape that the target can take."""
    if not draft.tokens:
        return draft
    context = session.context
    draft.check(context.vocab_size, context.budget, len(context.ids))
    if target.shape == "chain" and not draft.is_chain:
        draft = draft.first_branch()
    return draft.clip(context.depth)


def forward(
    sessions: Sequence[Session], drafts: list[Draft], takes: list[int], target: Target[Any]
) -> list[RowOutput]:
    """One pass. An error of the model is nobody's: then again with less, until it succeeds.

    First without drafts, then with smaller chunks of prompts, then without the last session, which
    ends with the error. Empties `drafts` that were given up; a sampled one is followed by plain
    passes of its own, for whether it failed may depend on what was drawn. Each failure is counted
    for the sessions that get less (`Session.pass_failed`).
    """
    outputs = [_NOT_COMPUTED] * len(sessions)
    members = list(range(len(sessions)))
    while members:
        rows = [sessions[i].row for i in members]
        try:
            found = target.forward(rows, [drafts[i] for i in members], [takes[i] for i in members])
        except Exception as error:  # models are other people's code: it may be of any kind
            drafted = [i for i in members if len(drafts[i])]
            for i in drafted:
                sessions[i].pass_failed(WITHOUT_DRAFT, error)
            if drafted:
                members = [i for i in members if not drafts[i].proposals]
                for i in members:
                    drafts[i] = EMPTY
            elif smaller := _smaller(sessions, members, takes, target):
                for session in smaller:
                    session.pass_failed(SMALLER, error)
            else:
                last = sessions[members.pop()]
                last.fail(error)
                target.close(last.row)
                last.row = None
            continue
        for i, output in zip(members, found, strict=True):
            outputs[i] = output
        break
    return outputs


def _smaller(
    sessions: Sequence[Session], members: Sequence[int], takes: list[int], target: Target[Any]
) -> list[Session]:
    """Halve the chunks of a pass; return the sessions that had one."""
    long = [i for i in members if takes[i] > LEAST_CHUNK and target.splits(sessions[i].row)]
    for i in long:
        takes[i] = max(LEAST_CHUNK, takes[i] // 2)
    return [sessions[i] for i in long]


def greedy_choices(
    sessions: Sequence[Session], drafts: Sequence[Draft], outputs: Sequence[RowOutput]
) -> list[Sequence[int] | None]:
    """The arg-max of every row, in one copy to the host for the whole step.

    None for a session whose distribution must see its rows in order.
    """
    choices: list[Sequence[int] | None] = [None] * len(sessions)
    found: list[tuple[int, Tensor]] = []
    for i, (session, draft, output) in enumerate(zip(sessions, drafts, outputs, strict=True)):
        if not output.finite or not session.distribution.greedy or session.distribution.lazy:
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


def settle(
    session: Session,
    draft: Draft,
    output: RowOutput,
    choices: Sequence[int] | None,
    taken: int,
    target: Target[Any],
) -> float:
    """Verify one sequence's draft, keep in its row what it was given, and learn from it.

    Whatever fails is the sequence's own: the processors, stop rules and streamers are. Returns the
    seconds that verifying took.
    """
    begin, row = perf_counter(), session.row
    try:
        if taken < len(row.pending):
            target.commit([row], [()], [()])
            return 0.0
        if output.finite:
            verdict = judge(session, draft, output, choices)
        else:
            if output is not _NOT_COMPUTED:
                session.pass_failed(WITHOUT_DRAFT, FloatingPointError("logits are not finite"))
            output, verdict = judge_plainly(session, draft, row, target)
            draft = EMPTY
        seconds = perf_counter() - begin
        # Of a verdict without a path, all tokens but the last are committed already.
        target.commit([row], [verdict.path], [verdict.tokens[-1 - len(verdict.path) :]])
    except Exception as error:
        session.fail(error)
        session.settle_failed()
        return perf_counter() - begin
    session.reading = False
    learn(session, draft, output, verdict)
    return seconds


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
    if session.drafts is not None:
        session.drafts.append(guesses(draft, verdict))
    if len(draft):  # probes alone cost time, too
        session.budget.record(draft.depth, len(verdict.path), len(draft))
    session.sources += sources(draft, verdict)
    if session.state is not None:
        try:
            session.state.observe(session.context, Outcome(draft, verdict, output))
        except Exception as error:
            session.put_aside(error)


def sources(draft: Draft, verdict: Verdict) -> tuple[str, ...]:
    """Who guessed each emitted token."""
    return tuple(TARGET if node is None else draft.source[node] for node in verdict.nodes)
