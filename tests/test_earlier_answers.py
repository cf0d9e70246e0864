"""Earlier answers in the engine: they change drafts and never tokens, and stay with their salt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import tiny
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context, Drafter
from draftsmith.core.stats import Stats
from draftsmith.drafters.auto import EARLIER
from draftsmith.engine.engine import Engine
from draftsmith.errors import GenerationInterrupted, LoadError, OptionError
from draftsmith.model.load import load
from faults import Raises
from scripted import altered

MODEL = load(tiny.model(), tiny.tokenizer())
PROMPTS = [[5, 6, 7, 8, 9, 10 + i] for i in range(4)]
BYTES = 2_000_000


def engine(**options: Any) -> Engine:
    return Engine(MODEL, budget=12, **options)


def remembering(**options: Any) -> Engine:
    return engine(answers=BYTES, **options)


def count(one: Engine) -> int:
    assert one.answers is not None
    return one.answers.count


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}])
def test_tokens_are_those_of_an_engine_without_memory(options: dict[str, Any]) -> None:
    plain, memory = engine(), remembering()
    assert plain.answers is None
    options = options | {"max_new_tokens": 24}
    drafted = set[str]()
    for prompt in PROMPTS:
        expected = plain.generate(prompt, **options)
        for _ in range(2):
            got = memory.generate(prompt, **options)
            assert got.tokens == expected.tokens
            drafted |= {*got.stats.by_source}
        assert EARLIER not in plain.generate(prompt, **options).stats.by_source
    assert count(memory) == 2 * len(PROMPTS)
    assert EARLIER in drafted
    both, apart = (one.generate(PROMPTS, **options) for one in (memory, plain))
    assert [r.tokens for r in both] == [r.tokens for r in apart]


def test_an_answer_given_before_takes_fewer_passes_and_points_nowhere() -> None:
    memory = remembering()
    first = memory.generate(PROMPTS[0], max_new_tokens=40)
    again = memory.generate(PROMPTS[0], max_new_tokens=40)
    assert again.tokens == first.tokens
    assert again.stats.passes < first.stats.passes
    named = [at for at, source in enumerate(again.sources) if source == EARLIER]
    assert named
    assert all(again.origins[at] is None for at in named)


def test_salts_are_apart_and_can_be_forgotten() -> None:
    memory = remembering()

    def ask(salt: str) -> Stats:
        return memory.generate(PROMPTS[0], max_new_tokens=40, cache_salt=salt).stats

    fresh, other = ask("a"), ask("b")
    assert (other.passes, other.drafted) == (fresh.passes, fresh.drafted)
    assert EARLIER not in other.by_source
    assert ask("a").passes < fresh.passes
    assert memory.answers is not None
    memory.answers.forget("a")
    after = ask("a")
    assert (after.passes, after.drafted) == (fresh.passes, fresh.drafted)
    assert count(memory) == 2


def test_what_was_cancelled_is_remembered_as_far_as_it_came() -> None:
    memory = remembering(drafter="copyspec+auto")
    stream = memory.stream(PROMPTS[0], max_new_tokens=60)
    for _ in range(8):
        next(stream)
    stream.close()
    assert memory.answers is not None
    assert [*memory.answers._list[0].ids] == [*PROMPTS[0], *stream.result.tokens]


def test_what_failed_is_not_remembered() -> None:
    memory = remembering()
    fails = Raises(RuntimeError("no"), 15)
    with pytest.raises(GenerationInterrupted):
        memory.generate(PROMPTS[0], max_new_tokens=60, processors=fails)
    assert count(memory) == 0
    memory.generate(PROMPTS[0], max_new_tokens=60)
    assert count(memory) == 1


def ending(end: Callable[[Context], None]) -> Drafter:
    """Calls `end` when the answer ends."""
    return altered(lambda ctx: Draft.chain(ctx.ids[-2:], "ending"), end=end)


def test_a_cancellation_waits_for_no_answer_to_be_remembered() -> None:
    """Its caller may hold what that waits for."""
    waited = []

    def asks(_ctx: Context) -> None:
        other = threading.Thread(target=stream.close, daemon=True)
        other.start()
        other.join(30)
        waited.append(other.is_alive())

    one = engine(drafter=ending(asks))
    stream = one.stream(PROMPTS[1], drafter="none")
    next(stream)
    one.generate(PROMPTS[0], max_new_tokens=5)
    assert waited == [False]


def test_an_interrupt_while_an_answer_joins_leaves_an_engine_that_works() -> None:
    one, interrupts = engine(), Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        one.generate(PROMPTS[0], max_new_tokens=5, drafter=ending(interrupts))
    other = threading.Thread(target=one.generate, args=(PROMPTS[1],), daemon=True)
    other.start()
    other.join(60)
    assert not other.is_alive()
    assert not one.resources.admitted


def test_a_drafter_that_fails_at_the_end_costs_no_answer() -> None:
    def fails(ctx: Context) -> None:
        raise RuntimeError(f"after {len(ctx.ids)}")

    plain = engine(drafter="none").generate(PROMPTS[0], max_new_tokens=20)
    got = engine(drafter=ending(fails)).generate(PROMPTS[0], max_new_tokens=20)
    assert got.tokens == plain.tokens
    assert got.stats.drafter_failures == 1
    assert any("after 26" in notice for notice in got.notices)


def test_a_file_carries_answers_from_one_engine_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "answers.safetensors"
    first = remembering(answers_file=path)
    fresh = first.generate(PROMPTS[0], max_new_tokens=60).stats
    assert not path.exists(), "nothing is written while it answers"
    first.close()
    second = remembering(answers_file=str(path))
    assert second.generate(PROMPTS[0], max_new_tokens=60).stats.passes < fresh.passes
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(LoadError, match="use another file, or delete it"):
        remembering(answers_file=path)
    second.close()
    assert count(remembering(answers_file=path)) == 2, "what was in memory is not lost"
    engine().close()
    with pytest.raises(OptionError, match="answers="):
        engine(answers_file=path)


# -------------------------------------------------------------------------------------- chats


def test_a_chat_drafts_from_an_answer_that_left_its_history() -> None:
    chat = engine().chat(max_new_tokens=60)
    fresh = chat.send("hello world")
    chat.messages.clear()
    again = chat.send("hello world")
    assert again.tokens == fresh.tokens
    assert again.stats.passes < fresh.stats.passes
    assert EARLIER in again.sources


def test_chats_are_apart_and_a_reset_forgets() -> None:
    one = engine()
    chat, other = one.chat(max_new_tokens=60), one.chat(max_new_tokens=60)
    fresh = chat.send("hello world").stats
    assert other.send("hello world").stats.passes == fresh.passes
    chat.reset()
    again = chat.send("hello world").stats
    assert (again.passes, again.drafted) == (fresh.passes, fresh.drafted)


@pytest.mark.parametrize("made", [engine, remembering], ids=["its own memory", "the engine's"])
def test_a_turn_with_another_salt_begins_anew(made: Callable[[], Engine]) -> None:
    chat = made().chat(max_new_tokens=40)

    def ask(salt: str) -> Stats:
        chat.messages.clear()
        return chat.send("hello world", cache_salt=salt).stats

    fresh, other = ask("a"), ask("b")
    assert (other.passes, other.drafted) == (fresh.passes, fresh.drafted)
    assert EARLIER not in other.by_source
    assert ask("a").passes < fresh.passes
