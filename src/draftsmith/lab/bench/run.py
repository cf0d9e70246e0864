"""Live runs: every arm answers every prompt in turn; each answer is timed and stored at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import torch

from draftsmith.core.sampling import SamplingParams
from draftsmith.engine.request import encode, end_ids
from draftsmith.errors import DraftsmithError, LoadError, OptionError, PromptError, UnsupportedError
from draftsmith.lab.bench.answer import Answer, Ask, Dictated
from draftsmith.lab.bench.arms import Arm
from draftsmith.lab.bench.generations import RECORDED, Generation, ResultFile
from draftsmith.lab.bench.machine import load_per_core, peak_bytes, reset_peak
from draftsmith.lab.bench.records import Record
from draftsmith.model.agreement import first_difference, top_two_gap
from draftsmith.model.loaded import LoadedModel
from draftsmith.text import tokenizer as text

T = TypeVar("T")
DEFAULT_LIMIT = 256
WARMUP_TOKENS = 64
PLAIN = ("none()", "transformers.generate()")
"""Drafters that decode plainly, in order of preference."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Model, arms and prompts of a measurement."""

    model: LoadedModel
    arms: Sequence[Arm]
    records: Sequence[Record]
    sampling: SamplingParams
    runs: int = 1
    warmup: int = 1
    """Prompts that every arm answers in part before the measurement."""
    max_new_tokens: int | None = None
    """None: the record's limit, else 256."""
    dictate: bool = False
    """Whether every arm must give the record's answer, so that rounding cannot separate them."""

    def __post_init__(self) -> None:
        if self.sampling.seed is not None:
            replace(self.sampling, seed=self.sampling.seed + self.runs - 1)  # checks it now
        counts = Counter(record.id for record in self.records)
        twice = next((name for name, count in counts.items() if count > 1), None)
        if twice is not None:
            raise OptionError(
                f"two records have the id {twice!r}, which must identify results; give every "
                "record its own id"
            )

    @property
    def baseline(self) -> Arm:
        """The arm that decodes plainly, else the first."""
        by_drafter = {arm.drafter: arm for arm in reversed(self.arms)}
        return next((by_drafter[d] for d in PLAIN if d in by_drafter), self.arms[0])

    @property
    def size(self) -> int:
        return self.runs * len(self.records) * len(self.arms)


def measure(
    plan: RunPlan, file: ResultFile, advance: Callable[[int], None] = lambda _: None
) -> list[str]:
    """Generate the answers that `file` does not have; returns a line per prompt that failed.

    Raises LoadError if no prompt can be used, and what an arm raises; `file` keeps what was
    measured until then.
    """
    known, device = {row.key for row in file.rows}, plan.model.device
    written = {(r.run, r.id): r.text for r in file.rows if r.arm == plan.baseline.name}
    wrong: list[str] = []
    missing = plan.size - len(known)
    advance(len(known))
    if missing:
        warm_up(plan)
    for run in range(plan.runs):
        for number, record in enumerate(plan.records):
            try:
                ask = asked(plan, filled(record, run, written, plan.records), run)
            except PromptError as error:
                if not run:
                    wrong.append(f"{record.id}: {error}")
                advance(len(plan.arms))
                continue
            for arm in in_turn(plan.arms, run + number):
                if (run, record.id, arm.name) in known:
                    continue
                fresh = reset_peak(device)
                began, load = datetime.now(UTC), load_per_core()
                answer = answered(arm, ask)
                row = _row(plan, record, run, arm, ask, answer)
                # A peak that cannot be reset belongs to the whole process, so it is not recorded.
                row.settings = file.settings
                row.peak_bytes = peak_bytes(device) if fresh else None
                row.began, row.load = began.isoformat(timespec="seconds"), load
                file.add(row)
                if arm is plan.baseline:
                    written[run, record.id] = row.text
                advance(1)
    if not file.rows:
        raise LoadError(f"no prompt could be used; the first: {wrong[0]}")
    if compare(plan, file.rows):
        file.rewrite()
    return wrong


def in_turn(arms: Sequence[T], turn: int) -> list[T]:
    """Rotate the arms, so that none always goes first."""
    first = turn % len(arms)
    return [*arms[first:], *arms[:first]]


def warm_up(plan: RunPlan) -> None:
    """Let every arm begin to answer the first prompts."""
    left = plan.warmup
    for record in plan.records:
        if not left:
            return
        try:
            ask = asked(plan, record, 0)
        except PromptError:  # it is reported in its turn
            continue
        left -= 1
        for arm in plan.arms:
            answered(arm, replace(ask, limit=min(ask.limit, WARMUP_TOKENS)))


def answered(arm: Arm, ask: Ask) -> Answer:
    """Return one answer; raises UnsupportedError if transformers refuses this model."""
    try:
        answer = arm.answer(ask)
    except (DraftsmithError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UnsupportedError(f"{arm.name} cannot answer with this model: {reason}") from error
    if ask.dictated and answer.tokens != [*ask.dictated.answer[: ask.limit]]:
        why = (
            "generation_config forbids a token or ends it sooner; change it, or leave out --dictate"
        )
        raise UnsupportedError(f"{arm.name} did not give a dictated answer: {why}")
    return answer


def filled(
    record: Record, run: int, written: dict[tuple[int, str], str], records: Sequence[Record]
) -> Record:
    """Fill in the answers of earlier turns: the baseline's, for every arm."""
    if all(message["content"] is not None for message in record.messages):
        return record
    before = [r for r in records if r.conversation == record.conversation and r.turn < record.turn]
    answers = [written[run, r.id] for r in before if (run, r.id) in written]
    if len(answers) < len(before):
        return record
    waiting, messages = iter(answers), map(dict, record.messages)
    chat = (m if m["content"] is not None else m | {"content": next(waiting)} for m in messages)
    return replace(record, messages=tuple(chat))


def asked(plan: RunPlan, record: Record, run: int) -> Ask:
    ids = encoded(plan.model, record)
    limits = plan.max_new_tokens, record.max_new_tokens, DEFAULT_LIMIT
    limit = next(limit for limit in limits if limit is not None)
    if plan.model.context_length is not None:
        limit = min(limit, plan.model.context_length - len(ids))
    if limit < 1:
        raise PromptError("its limit leaves no token to generate")
    seed = plan.sampling.seed
    sampling = replace(plan.sampling, seed=None if seed is None else seed + run)
    if not plan.dictate:
        return Ask(ids, limit, sampling)
    model, answer = plan.model, record.output_ids or ()
    if not answer and record.output is not None:
        answer = (*text.encode(model.tokenizer, record.output), *end_ids(model)[:1])
    if not answer:
        raise PromptError("the record has no answer that could be dictated")
    if set(answer[:-1]) & set(end_ids(model)):
        raise PromptError("the answer has an end token before its end")
    if max(answer) >= model.vocab_size:
        raise PromptError(f"token id {max(answer)} of the answer is not in this model's vocabulary")
    return Ask(ids, min(limit, len(answer)), sampling, Dictated(len(ids), answer))


def encoded(model: LoadedModel, record: Record) -> list[int]:
    """Return a record's prompt in the model's tokens; raises PromptError if it does not fit."""
    if any(message["content"] is None for message in record.messages):
        raise PromptError("an earlier turn of this conversation has no answer")
    asked: Any = record.prompt
    if record.prompt_ids is not None:
        asked = list(record.prompt_ids)
    elif record.messages:
        asked = list(record.messages)
    return encode(model, asked)


def _row(plan: RunPlan, record: Record, run: int, arm: Arm, ask: Ask, answer: Answer) -> Generation:
    tokenizer = plan.model.tokenizer
    stats = answer.stats.as_dict() if answer.stats is not None else {}
    recorded = {name: stats[name] for name in RECORDED if name in stats}
    recorded.setdefault("accepted", len(answer.tokens) - answer.passes)
    return Generation(
        id=record.id,
        suite=record.suite,
        category=record.category,
        turn=record.turn,
        run=run,
        arm=arm.name,
        drafter=arm.drafter,
        budget=arm.budget,
        seed=ask.sampling.seed,
        prompt_ids=list(ask.ids),
        output_ids=answer.tokens,
        text=text.decode(tokenizer, answer.tokens) if tokenizer is not None else "",
        finish_reason=answer.finish_reason,
        max_new_tokens=ask.limit,
        seconds=answer.seconds,
        first_token_seconds=answer.first_token_seconds,
        peak_bytes=None,
        passes=answer.passes,
        reference=record.reference if record.reference is not None else record.output,
        phases=stats.get("seconds"),
        **recorded,
    )


def compare(plan: RunPlan, rows: Sequence[Generation]) -> bool:
    """Add to the rows where they differ from plain decoding; returns whether anything changed."""
    plain = {(r.run, r.id): r for r in rows if r.arm == plan.baseline.name}
    greedy = plan.sampling.temperature == 0
    # With a temperature, only arms that draw like plain decoding can be compared by token.
    seeded = plan.baseline.seeded or plan.baseline.drafter in PLAIN
    fair = {arm.name for arm in plan.arms if greedy or (seeded and arm.seeded)}
    fair -= {plan.baseline.name}
    gaps: dict[tuple[str, int], float] = {}
    added = False
    for row in rows:
        other = plain.get((row.run, row.id))
        if row.compared or other is None or row.arm not in fair:
            continue
        row.compared = added = True
        at = row.divergence = first_difference(row.output_ids, other.output_ids)
        if at is not None and greedy:
            if (row.id, at) not in gaps:
                ids = [*other.prompt_ids, *other.output_ids[:at]]
                gaps[row.id, at] = top_two_gap(plan.model, ids)
            row.gap = gaps[row.id, at]
    return added
