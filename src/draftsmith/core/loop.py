"""THE loop: one step for one sequence or a batch, with any drafter or none.

    draft → one target pass → for each sequence: verify → commit → observe

Between steps, the cache of a row holds every committed token except its pending ones (normally only
the last token). Sequences are verified and committed one by one, so an error ends one sequence
only. An interrupt ends all sequences of the pass.
"""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from draftsmith.compiled import compiling
from draftsmith.core.budget import AutoBudget, Budget, FixedBudget, pick, share
from draftsmith.core.cost import PRIOR_SLOPE, CostCurve, on_curve
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Drafter, Outcome
from draftsmith.core.readout import read
from draftsmith.core.sequence import DRAFTER_FAILED, TOGETHER, Sequence, without_frames
from draftsmith.core.stats import TARGET, guesses
from draftsmith.core.target import MOST_BESIDE_DRAFT, Row, RowOutput, Target, ahead
from draftsmith.core.verify import Verification, verify, verify_choices
from draftsmith.errors import DrafterError, DrafterStalled

LEAST_CHUNK = 16
"""Smallest size, in tokens, to which a chunk of a prompt is halved."""

LONGEST_DRAFT = 5.0
"""Seconds that drafting for one pass may always take."""
DRAFT_PASSES = 8
"""Target passes that drafting may take in addition: a draft model runs several passes itself."""

WITHOUT_DRAFT = "a pass with drafts failed and was repeated without them"
SMALLER = "a pass over a part of the prompt failed and was repeated with a smaller part"


def start(sequence: Sequence, target: Target[Any]) -> None:
    """Open a row for a new sequence, without computing anything."""
    sequence.row = target.open(sequence.ids, sequence.needs)


def unread(sequence: Sequence, target: Target[Any]) -> bool:
    """Return whether passes without a draft must read more of the prompt before drafting starts.

    The pass that reads the last pending token emits a token. The first draft continues after it.
    """
    row, whole = sequence.row, sequence.needs.taps
    return not sequence.generated and ahead(target, row, whole, MOST_BESIDE_DRAFT) > 0


@torch.no_grad()
def step(
    sequences: abc.Sequence[Sequence],
    target: Target[Any],
    cost: CostCurve | None = None,
    take: abc.Sequence[int] | None = None,
) -> None:
    """Run one target pass for all `sequences`, which are started and not finished.

    `take` is the number of pending tokens (at least 1) that the pass reads for each sequence; None
    reads all. Sequences with pending tokens left emit nothing. All others emit at least one token,
    unless they fail. `Sequence.error` is set if a processor or stop rule fails, `drafter_error` if
    the drafter fails. After an error of the model the pass is repeated with less; if nothing helps,
    the last sequence ends with the error (see `forward`).

    Errors of drafters, processors and stop rules are kept, not raised. After a KeyboardInterrupt
    the sequences cannot continue.
    """
    if not sequences:
        return
    begin = perf_counter()
    takes = [len(s.row.pending) for s in sequences] if take is None else [*take]
    whole = [s for s, n in zip(sequences, takes, strict=True) if n == len(s.row.pending)]
    decoding = [sequence for sequence in whole if not unread(sequence, target)]
    no_prompts = all(len(sequence.row.pending) == 1 for sequence in sequences)
    curve = None if cost is None else cost.at(len(sequences), cached(sequences))
    for sequence in decoding:
        sequence.open_drafter()
    opened = perf_counter()
    drafts = propose(decoding, sequences, target)
    drafted = perf_counter()
    failures = sum(sequence.stats.failed_passes for sequence in sequences)
    outputs = forward(sequences, drafts, takes, target)
    whole_pass = failures == sum(sequence.stats.failed_passes for sequence in sequences)
    passed, judging = perf_counter(), 0.0
    for i, sequence in enumerate(sequences):
        if sequence.error is None:
            judging += settle(sequence, drafts[i], outputs[i], takes[i], target)
    if curve is not None and no_prompts and whole_pass:
        curve.record(sum(map(len, drafts)), passed - drafted)
        _record_draft(sequences, curve, drafted - opened)
    end = perf_counter()

    for sequence in sequences:
        seconds = sequence.stats.seconds
        seconds.total += (end - begin) / len(sequences)
        if sequence not in decoding:  # the pass read a part of its prompt
            seconds.prefill += (end - begin) / len(sequences)
        else:
            seconds.draft += (drafted - opened) / len(sequences)
            seconds.target += (passed - drafted) / len(sequences)
            seconds.verify += judging / len(sequences)
    give_up(decoding, passed - drafted)


def cached(sequences: abc.Sequence[Sequence]) -> int:
    """Return the number of tokens in the caches of all `sequences`."""
    return sum(sequence.row.cached for sequence in sequences)


def _record_draft(sequences: abc.Sequence[Sequence], cost: CostCurve, seconds: float) -> None:
    """Record the time of drafting, if a single drafter served all sequences."""
    drafters = {sequence.drafter for sequence in sequences}
    width = max(sequence.context.budget for sequence in sequences)
    if len(drafters) == 1 and width:
        cost.record_draft(drafters.pop(), width, seconds)


def propose(
    decoding: abc.Sequence[Sequence], sequences: abc.Sequence[Sequence], target: Target[Any]
) -> list[Draft]:
    """Call each drafter once for all of its sequences; fit the drafts to what the target takes.

    Returns one draft per sequence of `sequences`; those that are not in `decoding` get `EMPTY`.
    """
    budgets: list[Budget] = []
    for sequence in decoding:
        context = sequence.context
        # The target emits the last of `limit` tokens itself, so drafts end one token earlier.
        context.depth = min(sequence.limit - sequence.generated - 1, target.room(sequence.row))
        drafts_fit = context.depth > 0 and target.shape != "plain"
        budgets.append(sequence.budget if drafts_fit else FixedBudget(0))
    tokens = cached(decoding)
    for sequence, width in zip(decoding, share(budgets, tokens), strict=True):
        context = sequence.context
        context.budget, context.cost, sequence.drafting_seconds = width, sequence.budget.cost, 0.0
        if sequence.needs.taps and width:  # some taps are computed only when they are read
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
            sequence.drafting_seconds = took
    trim(drafts, len(decoding))
    return [drafts.get(sequence, EMPTY) for sequence in sequences]


def trim(drafts: dict[Sequence, Draft], rows: int) -> None:
    """Remove guesses that do not pay in this pass, from drafts that have `chances`.

    Sampled nodes are never removed: whether a node stays must not depend on what was drawn.
    `rows` is the number of sequences that decode in the pass.
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
    """Return the drafts of one drafter for its sequences.

    If the drafter fails for several sequences, it is called for each sequence alone, unless it took
    more than `LONGEST_DRAFT` seconds. A sequence for which it fails again decodes plainly.
    """
    begin = perf_counter()
    states = [sequence.state for sequence in members if sequence.state is not None]
    try:
        made = drafter.draft(states, [sequence.context for sequence in members])
        if len(made) != len(members):
            raise DrafterError(f"{drafter} made {len(made)} drafts for {len(members)} sequences")
    except Exception as error:
        if len(members) == 1 or perf_counter() - begin > LONGEST_DRAFT:
            for sequence in members:
                sequence.disable_drafter(error)
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
            sequence.disable_drafter(error)
    return drafts


def give_up(decoding: abc.Sequence[Sequence], seconds: float) -> None:
    """Disable drafters that delayed a pass too long; the pass itself took `seconds`.

    Time for compilation does not count, and the limit grows with the time of the pass and of
    reading the prompts (a draft model reads them, too), so it does not depend on the machine's
    speed. The sequences of the pass decode plainly from here on. Later sequences use the drafter
    again (`Stalls`).
    """
    groups: dict[int, list[Sequence]] = {}
    for sequence in decoding:
        groups.setdefault(id(sequence.stalls), []).append(sequence)
    for members in groups.values():
        stalls, called = members[0].stalls, [one for one in members if one.context.budget]
        waited = max((one.drafting_seconds for one in called), default=0.0)
        read = sum(one.stats.seconds.prefill for one in called)
        if waited <= LONGEST_DRAFT + DRAFT_PASSES * seconds + read:
            stalls.in_a_row = 0 if called else stalls.in_a_row
            continue
        stalls.add()
        for sequence in members:
            error = DrafterStalled(f"drafting took {waited:.1f} s for a pass of {seconds:.3f} s")
            if sequence.drafter_error is None:
                sequence.disable_drafter(error)
            elif sequence.drafting_seconds:
                error.__cause__ = sequence.drafter_error
                sequence.note(DRAFTER_FAILED, error)
                sequence.drafter_error = error


def fit(draft: Draft, sequence: Sequence, target: Target[Any]) -> Draft:
    """Check a draft and cut it to the depth and the shape that the target can take."""
    if not draft.tokens and not draft.proposals:
        return draft
    context = sequence.context
    draft.check(context.vocab_size, context.budget, len(context.ids))
    if target.shape == "chain" and not draft.is_chain:
        draft = draft.first_branch()
    return draft.clip(context.depth)


def forward(
    sequences: abc.Sequence[Sequence], drafts: list[Draft], takes: list[int], target: Target[Any]
) -> list[RowOutput | None]:
    """Run one target pass and read it. After an error, repeat it with less until it succeeds.

    The repetitions leave out, in this order: the drafts, half of each chunk of a prompt, the last
    sequence. A sequence that is left out ends with the error. Drafts that are left out become
    `EMPTY` in `drafts`. Sequences with a sampled draft leave the shared pass and verify their draft
    by plain passes (`judge_plainly`), because whether the pass fails may depend on what was drawn.
    Each failure is counted in the sequences that get less (`Sequence.pass_failed`). Sequences that
    are not in the pass have the output None.
    """
    outputs: list[RowOutput | None] = [None] * len(sequences)
    members = list(range(len(sequences)))
    while members:
        rows = [sequences[i].row for i in members]
        try:
            own = [drafts[i] for i in members]
            found = target.forward(rows, own, [takes[i] for i in members])
            found = read([sequences[i] for i in members], own, found)
        except Exception as error:  # a model's code may raise any error
            drafted = [i for i in members if len(drafts[i])]
            chunked = [i for i in members if takes[i] > LEAST_CHUNK]
            for i in drafted:
                sequences[i].pass_failed(WITHOUT_DRAFT, error)
            if drafted:
                members = [i for i in members if not drafts[i].proposals]
                for i in members:
                    drafts[i] = EMPTY
            elif long := [i for i in chunked if target.splits(sequences[i].row)]:
                for i in long:
                    takes[i] = max(LEAST_CHUNK, takes[i] // 2)
                    sequences[i].pass_failed(SMALLER, error)
            else:
                last = sequences[members.pop()]
                last.fail(without_frames(error))  # else what it holds is missing for the others
                target.close(last.row)
                last.row = None
            continue
        for i, output in zip(members, found, strict=True):
            outputs[i] = output
        break
    return outputs


def settle(
    sequence: Sequence,
    draft: Draft,
    output: RowOutput | None,
    taken: int,
    target: Target[Any],
) -> float:
    """Verify and commit the draft of one sequence; return the seconds that verification took.

    Errors of its processors, stop rules and streamers end this sequence only.
    """
    begin, row = perf_counter(), sequence.row
    try:
        if taken < len(row.pending):
            target.commit([row], [()], [()])
            return 0.0
        if output is not None and output.finite:
            verification = judge(sequence, draft, output)
        else:
            if output is not None:
                sequence.pass_failed(WITHOUT_DRAFT, FloatingPointError("logits are not finite"))
            output, verification = judge_plainly(sequence, draft, row, target)
            draft = EMPTY
        seconds = perf_counter() - begin
        # Without a path, all tokens of the verification but the last are already in the cache.
        path = verification.path
        target.commit([row], [path], [verification.tokens[-1 - len(path) :]])
    except Exception as error:
        sequence.stats.drafter_failures += isinstance(error, DrafterError)
        sequence.fail(error)
        sequence.settle_failed()
        return perf_counter() - begin
    learn(sequence, draft, output, verification)
    return seconds


def judge(sequence: Sequence, draft: Draft, output: RowOutput) -> Verification:
    """Verify the draft of one sequence; `sequence.emit` commits each token as it is decided."""
    if output.choices is not None:
        found = verify_choices(draft, output.choices, sequence.emit)
        if not sequence.distribution.greedy:
            sequence.sampler.skip(len(found.tokens))
        return found
    return verify(
        draft,
        output.logits.__getitem__,
        sequence.distribution,
        sequence.sampler,
        sequence.prefix,
        sequence.emit,
    )


def judge_plainly(
    sequence: Sequence, draft: Draft, row: Row, target: Target[Any]
) -> tuple[RowOutput, Verification]:
    """Verify a draft that the model cannot compute, with one plain pass per emitted token.

    This keeps the distribution of sampled drafts exact. It saves no time.
    """
    outputs: list[RowOutput] = []

    def compute(place: int) -> Tensor:
        """Return the logits after the root, or after the node that was just accepted."""
        if place:
            target.commit([row], [()], [draft.tokens[place - 1 : place]])
        outputs.extend(target.forward([row], [EMPTY]))
        return outputs[-1].logits[0]

    found = verify(
        draft, compute, sequence.distribution, sequence.sampler, sequence.prefix, sequence.emit
    )
    sequence.stats.passes += len(found.tokens) - 1  # `learn` counts one
    return outputs[0], replace(found, path=(), nodes=(None,) * len(found.tokens))


def learn(sequence: Sequence, draft: Draft, output: RowOutput, verification: Verification) -> None:
    """Update the statistics, the budget and the drafter with the outcome of the draft."""
    sequence.stats.record(draft, verification)
    if sequence.drafts is not None:
        sequence.drafts.append(guesses(draft, verification))
    if len(draft):  # a draft of probes alone counts, because it costs time
        sequence.budget.record(draft.depth, len(verification.path), len(draft))
    for node in verification.nodes:
        origin = -1 if node is None or draft.origins is None else draft.origins[node]
        sequence.origins.append(None if origin < 0 else origin)
        sequence.sources.append(TARGET if node is None else draft.source[node])
    if sequence.state is not None:
        try:
            sequence.state.observe(sequence.context, Outcome(draft, verification, output))
        except Exception as error:
            sequence.disable_drafter(error)
