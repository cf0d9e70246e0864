"""THE loop: one step for one sequence or a batch, for every drafter and for none.

    draft → one target pass → for each sequence: verify → commit → observe

Between steps a row's cache holds every committed token but its pending ones (normally just the
last). Sequences are settled one by one, so that an error can concern one of them only; an interrupt
ends all sequences of the pass.
"""

from __future__ import annotations

from collections import abc
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
from draftsmith.core.sequence import PUT_ASIDE, TOGETHER, Sequence
from draftsmith.core.stats import TARGET, Step, guesses
from draftsmith.core.target import REST, Row, RowOutput, Target, ahead
from draftsmith.core.verify import Verification, verify, verify_greedy
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


def start(sequence: Sequence, target: Target[Any]) -> None:
    """Give a new sequence its row; nothing is computed yet."""
    if sequence.row is None:
        sequence.row = target.open(sequence.ids, sequence.needs)
    sequence.stats.reused_tokens = sequence.row.cached


def unread(sequence: Sequence, target: Target[Any]) -> bool:
    """Whether its pending tokens are taken by passes without a draft, in chunks; else it decodes.

    The pass that takes the last of them gives a token, and the first draft follows from it.
    """
    return sequence.reading and ahead(target, sequence.row, sequence.needs.taps, REST) > 0


def step(
    sequences: abc.Sequence[Sequence],
    target: Target[Any],
    cost: CostCurve | None = None,
    take: abc.Sequence[int] | None = None,
) -> list[Step]:
    """One target pass for all `sequences` (started, not finished).

    `take`: how many of its pending tokens each one's row takes, at least 1; None: all at once.
    Whose row has some left gains no token, every other at least one, unless its own processor,
    stop rule or drafter's host fails: `Sequence.error`, `Sequence.drafter_error`. An error of the
    model ends the last of the sequences, and more where that does not help. Raises nothing but what
    is no Exception (KeyboardInterrupt), after which the sequences cannot go on.
    """
    if not sequences:
        return []
    begin = perf_counter()
    before = [sequence.generated for sequence in sequences]
    takes = [len(s.row.pending) for s in sequences] if take is None else [*take]
    whole = [s for s, n in zip(sequences, takes, strict=True) if n == len(s.row.pending)]
    decoding = [sequence for sequence in whole if not unread(sequence, target)]
    usual = all(
        len(sequence.row.pending) == 1 for sequence in sequences
    )  # no prompt is in the pass
    own = None if cost is None else cost.at(len(sequences), cached(sequences))
    for sequence in decoding:
        sequence.open_drafter()
    opened = perf_counter()
    drafts = propose(decoding, sequences, target)
    drafted = perf_counter()
    outputs = forward(sequences, drafts, takes, target)
    choices = greedy_choices(sequences, drafts, outputs)
    if None in choices:
        target.wait()  # the walk would wait anyway; so the pass is timed, not its launch
    passed, judging = perf_counter(), 0.0
    for i, sequence in enumerate(sequences):
        if sequence.error is None:
            judging += settle(sequence, drafts[i], outputs[i], choices[i], takes[i], target)
    if own is not None and usual:
        own.record(sum(map(len, drafts)), passed - drafted)
        _record_draft(sequences, own, drafted - opened)
    end = perf_counter()

    for sequence in sequences:
        seconds = sequence.stats.seconds
        seconds.total += (end - begin) / len(sequences)
        if sequence not in decoding:  # it was a part of its prompt, perhaps the last
            seconds.prefill += (end - begin) / len(sequences)
        else:
            seconds.draft += (drafted - opened) / len(sequences)
            seconds.target += (passed - drafted) / len(sequences)
            seconds.verify += judging / len(sequences)
    give_up(decoding, passed - drafted)
    return [
        Step(tuple(s.ids[s.prompt_length + n :]), tuple(s.sources[n:]))
        for s, n in zip(sequences, before, strict=True)
    ]


def cached(sequences: abc.Sequence[Sequence]) -> int:
    """Tokens that the caches of these hold together: what a pass over them has to read."""
    return sum(sequence.row.cached for sequence in sequences)


def _record_draft(sequences: abc.Sequence[Sequence], cost: CostCurve, seconds: float) -> None:
    """Book what drafting took, where it was one drafter's doing."""
    drafters = {sequence.drafter for sequence in sequences}
    width = max(sequence.context.budget for sequence in sequences)
    if len(drafters) == 1 and width:
        cost.record_draft(drafters.pop(), width, seconds)


def propose(
    decoding: abc.Sequence[Sequence], sequences: abc.Sequence[Sequence], target: Target[Any]
) -> list[Draft]:
    """Ask each drafter once for all of its sequences; fit the drafts to what the target takes."""
    able = []
    for sequence in decoding:
        context = sequence.context
        # The last of `limit` tokens is the target's own, so drafts end one before it.
        context.depth = min(sequence.limit - sequence.generated - 1, target.room(sequence.row))
        drafts_fit = context.depth > 0 and target.shape != "plain"
        able.append(sequence.budget if drafts_fit else FixedBudget(0))
    tokens = cached(decoding)
    for sequence, width in zip(decoding, share(able, tokens), strict=True):
        context = sequence.context
        context.budget, sequence.waited = width, 0.0
        if context.cost is not None:
            context.cost = context.cost.nearest(len(decoding), tokens)
        if sequence.needs.taps and width:  # some are computed only when asked for
            taps = target.taps(sequence.row)
            context.hidden, context.attention = taps.hidden, taps.attention
    groups: dict[int, list[Sequence]] = {}
    for sequence in decoding:
        if sequence.context.budget > 0 and sequence.state is not None:
            groups.setdefault(id(sequence.drafter), []).append(sequence)
    drafts: dict[Sequence, Draft] = {}
    for members in groups.values():
        begin = perf_counter() - compiling()
        drafts |= ask(members[0].drafter, members, target)
        took = perf_counter() - compiling() - begin
        for sequence in members:
            sequence.waited = took
    trim(drafts, len(decoding))
    return [drafts.get(sequence, EMPTY) for sequence in sequences]


def trim(drafts: dict[Sequence, Draft], rows: int) -> None:
    """Leave out the guesses that do not pay in this pass, where drafters say how likely they are.

    Never sampled ones: whether a token stays must not depend on what was drawn.
    """
    budgets, fixed, tokens = dict[Sequence, AutoBudget](), 0, float(rows)
    for sequence, draft in drafts.items():
        if not isinstance(sequence.budget, AutoBudget) or not draft.size:
            fixed += len(draft)
        elif draft.chances is None or draft.proposals or draft.probes:
            fixed += len(draft)
            tokens += sequence.budget.expected(draft.depth)
        else:
            budgets[sequence] = sequence.budget
    if not budgets:
        return
    points = next(iter(budgets.values())).cost.points()
    orders, offers = [], []
    for sequence in budgets:
        probs = drafts[sequence].path_probs()
        orders.append(sorted(range(len(probs)), key=probs.__getitem__, reverse=True))
        offers.append([(probs[node], 1) for node in orders[-1]])
    best = pick(offers, tokens, fixed, lambda nodes, _: on_curve(points, nodes, PRIOR_SLOPE))
    for sequence, order, kept in zip(budgets, orders, best, strict=True):
        drafts[sequence] = drafts[sequence].select(sorted(order[:kept]))


def ask(
    drafter: Drafter, members: abc.Sequence[Sequence], target: Target[Any]
) -> dict[Sequence, Draft]:
    """One drafter's drafts. Where it fails it is asked for each alone; who fails again goes on
    plainly. One that has taken long by then is not asked again."""
    begin = perf_counter()
    states = [sequence.state for sequence in members if sequence.state is not None]
    try:
        made = drafter.draft(states, [sequence.context for sequence in members])
        if len(made) != len(members):
            raise DrafterError(f"{drafter} made {len(made)} drafts for {len(members)} sequences")
    except Exception as error:
        if len(members) == 1 or perf_counter() - begin > LONGEST_DRAFT:
            for sequence in members:
                sequence.put_aside(error)
            return {}
        alone = {s: draft for one in members for s, draft in ask(drafter, [one], target).items()}
        if all(sequence.drafter_error is None for sequence in members):
            for sequence in members:
                sequence.stats.drafter_failures += 1
                sequence.note(TOGETHER, error)
        return alone
    drafts = {}
    for sequence, draft in zip(members, made, strict=True):
        try:
            drafts[sequence] = fit(draft, sequence, target)
        except Exception as error:
            sequence.put_aside(error)
    return drafts


def give_up(decoding: abc.Sequence[Sequence], seconds: float) -> None:
    """Put drafters aside that held up a pass, which itself took so many `seconds`.

    It is not counted what they compiled, nor as long as it took to read their prompts: a draft
    model reads them, too. So none is judged by how fast the machine is. The sequences of the pass
    go on plainly; later ones ask the drafter again (`Stalls`).
    """
    asked = [sequence for sequence in decoding if sequence.context.budget]
    slow = [sequence for sequence in asked if sequence.waited > LONGEST_DRAFT]
    stalled: dict[int, DrafterStalled] = {}
    for sequence in slow:
        read = sum(s.stats.seconds.prefill for s in slow if s.drafter is sequence.drafter)
        if sequence.waited > LONGEST_DRAFT + DRAFT_PASSES * seconds + read:
            if id(sequence.stalls) not in stalled:
                sequence.stalls.add()
            stalled[id(sequence.stalls)] = DrafterStalled(
                f"drafting took {sequence.waited:.1f} s beside a pass of {seconds:.3f} s"
            )
    for sequence in asked:
        if id(sequence.stalls) not in stalled:
            sequence.stalls.in_a_row = 0
    for sequence in decoding if stalled else ():
        if (error := stalled.get(id(sequence.stalls))) is None:
            continue
        if sequence.drafter_error is None:
            sequence.put_aside(error)
        elif sequence.waited:
            error.__cause__ = sequence.drafter_error
            sequence.note(PUT_ASIDE, error)
            sequence.drafter_error = error


def fit(draft: Draft, sequence: Sequence, target: Target[Any]) -> Draft:
    """Check a draft, and cut it to the depth and the shape that the target can take."""
    if not draft.tokens:
        return draft
    context = sequence.context
    draft.check(context.vocab_size, context.budget, len(context.ids))
    if target.shape == "chain" and not draft.is_chain:
        draft = draft.first_branch()
    return draft.clip(context.depth)


def forward(
    sequences: abc.Sequence[Sequence], drafts: list[Draft], takes: list[int], target: Target[Any]
) -> list[RowOutput]:
    """One pass. An error of the model is nobody's: then again with less, until it succeeds.

    First without drafts, then with smaller chunks of prompts, then without the last sequence, which
    ends with the error. Empties `drafts` that were given up; a sampled one is followed by plain
    passes of its own, for whether it failed may depend on what was drawn. Each failure is counted
    for the sequences that get less (`Sequence.pass_failed`).
    """
    outputs = [_NOT_COMPUTED] * len(sequences)
    members = list(range(len(sequences)))
    while members:
        rows = [sequences[i].row for i in members]
        try:
            found = target.forward(rows, [drafts[i] for i in members], [takes[i] for i in members])
        except Exception as error:  # models are other people's code: it may be of any kind
            drafted = [i for i in members if len(drafts[i])]
            for i in drafted:
                sequences[i].pass_failed(WITHOUT_DRAFT, error)
            if drafted:
                members = [i for i in members if not drafts[i].proposals]
                for i in members:
                    drafts[i] = EMPTY
            elif smaller := _smaller(sequences, members, takes, target):
                for sequence in smaller:
                    sequence.pass_failed(SMALLER, error)
            else:
                last = sequences[members.pop()]
                last.fail(error)
                target.close(last.row)
                last.row = None
            continue
        for i, output in zip(members, found, strict=True):
            outputs[i] = output
        break
    return outputs


def _smaller(
    sequences: abc.Sequence[Sequence],
    members: abc.Sequence[int],
    takes: list[int],
    target: Target[Any],
) -> list[Sequence]:
    """Halve the chunks of a pass; return the sequences that had one."""
    long = [i for i in members if takes[i] > LEAST_CHUNK and target.splits(sequences[i].row)]
    for i in long:
        takes[i] = max(LEAST_CHUNK, takes[i] // 2)
    return [sequences[i] for i in long]


def greedy_choices(
    sequences: abc.Sequence[Sequence], drafts: abc.Sequence[Draft], outputs: abc.Sequence[RowOutput]
) -> list[abc.Sequence[int] | None]:
    """The arg-max of every row, in one copy to the host for the whole step.

    None for a sequence whose distribution must see its rows in order.
    """
    choices: list[abc.Sequence[int] | None] = [None] * len(sequences)
    found: list[tuple[int, Tensor]] = []
    for i, (sequence, draft, output) in enumerate(zip(sequences, drafts, outputs, strict=True)):
        if not output.finite or not sequence.distribution.greedy or sequence.distribution.lazy:
            continue
        if output.choices is not None:
            choices[i] = output.choices
        else:
            found.append((i, sequence.distribution.best(output.logits[: 1 + draft.size])))
    if found:
        best = [chosen for _, chosen in found]
        flat: list[int] = (best[0] if len(best) == 1 else torch.cat(best)).tolist()
        for i, chosen in found:
            choices[i], flat = flat[: len(chosen)], flat[len(chosen) :]
    return choices


def settle(
    sequence: Sequence,
    draft: Draft,
    output: RowOutput,
    choices: abc.Sequence[int] | None,
    taken: int,
    target: Target[Any],
) -> float:
    """Verify one sequence's draft, keep in its row what it was given, and learn from it.

    Whatever fails is the sequence's own: the processors, stop rules and streamers are. Returns the
    seconds that verifying took.
    """
    begin, row = perf_counter(), sequence.row
    try:
        if taken < len(row.pending):
            target.commit([row], [()], [()])
            return 0.0
        if output.finite:
            verification = judge(sequence, draft, output, choices)
        else:
            if output is not _NOT_COMPUTED:
                sequence.pass_failed(WITHOUT_DRAFT, FloatingPointError("logits are not finite"))
            output, verification = judge_plainly(sequence, draft, row, target)
            draft = EMPTY
        seconds = perf_counter() - begin
        # Of a verification without a path, all tokens but the last are committed already.
        target.commit(
            [row], [verification.path], [verification.tokens[-1 - len(verification.path) :]]
        )
    except Exception as error:
        sequence.fail(error)
        sequence.settle_failed()
        return perf_counter() - begin
    sequence.reading = False
    learn(sequence, draft, output, verification)
    return seconds


def judge(
    sequence: Sequence, draft: Draft, output: RowOutput, choices: abc.Sequence[int] | None
) -> Verification:
    """Verify one sequence's draft; the sequence commits the tokens as they are decided."""
    if choices is not None:
        return verify_greedy(draft, choices, sequence.emit)
    return verify(
        draft,
        output.logits,
        sequence.distribution,
        sequence.sampler,
        sequence.prefix,
        sequence.emit,
    )


def judge_plainly(
    sequence: Sequence, draft: Draft, row: Row, target: Target[Any]
) -> tuple[RowOutput, Verification]:
    """Verify a draft that overflows the model by plain passes, which compute what was accepted.

    So the draft is still followed, as the distribution of its samples wants, and saves nothing.
    """
    rows = _PlainRows(draft, row, target)
    found = verify(
        draft, rows, sequence.distribution, sequence.sampler, sequence.prefix, sequence.emit
    )
    sequence.stats.passes += len(found.tokens)
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


def learn(sequence: Sequence, draft: Draft, output: RowOutput, verification: Verification) -> None:
    """Tell statistics, budget and drafter what became of the draft."""
    sequence.stats.record(draft, verification)
    sequence.trace(draft, verification)
    if sequence.drafts is not None:
        sequence.drafts.append(guesses(draft, verification))
    if len(draft):  # probes alone cost time, too
        sequence.budget.record(draft.depth, len(verification.path), len(draft))
    sequence.sources += sources(draft, verification)
    if sequence.state is not None:
        try:
            sequence.state.observe(sequence.context, Outcome(draft, verification, output))
        except Exception as error:
            sequence.put_aside(error)


def sources(draft: Draft, verification: Verification) -> tuple[str, ...]:
    """Who guessed each emitted token."""
    return tuple(TARGET if node is None else draft.source[node] for node in verification.nodes)
