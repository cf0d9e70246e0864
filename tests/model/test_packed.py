"""Packed passes: every row as if it were alone, and nothing spent on its neighbours."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_runner import Mixture
from torch import Tensor

from architectures import build, prompt
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner
from replica import accept, check_cache, check_logits, loaded, random_draft


def packing(name: str) -> LoadedModel:
    model = loaded(name)
    if not model.capabilities.packed:
        pytest.skip("; ".join(model.capabilities.reasons))
    return model


# --- what is computed -----------------------------------------------------------------------------


@contextmanager
def head_of(model: Any) -> Iterator[list[int]]:
    """Positions that the head projects, pass by pass."""
    seen: list[int] = []

    def note(_: Any, args: tuple[Tensor]) -> None:
        seen.append(args[0].shape[1])

    handle = model.get_output_embeddings().register_forward_pre_hook(note)
    yield seen
    handle.remove()


def started(runner: Runner, *lengths: int) -> list[Any]:
    rows = [runner.open(prompt(n, seed=n)) for n in lengths]
    for row in rows:
        runner.prefill(row)
    return rows


@pytest.mark.parametrize("picks", [True, False])
def test_the_head_projects_only_what_is_needed(picks: bool) -> None:
    model = load(build("llama"))
    assert model.forward.picks
    model.forward.picks = picks  # False: as models whose `logits_to_keep` is a number only
    runner = Runner(model)
    rows = [*started(runner, 9, 30), runner.open(prompt(50))]
    drafts = [Draft.chain([5, 6, 7], "test"), EMPTY, EMPTY]
    with head_of(model.model) as seen:
        outputs = runner.forward(rows, drafts, [1, 1, 40])
        assert [len(output.logits) for output in outputs] == [4, 1, 0]
        turned = runner.forward(rows[::-1], drafts[::-1], [40, 1, 1])
        runner.forward(rows[2:], drafts[2:], [40])
    assert seen == ([5, 5, 1] if picks else [45, 5, 1])
    for one, other in zip(outputs, turned[::-1], strict=True):
        torch.testing.assert_close(one.logits, other.logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma2", "gpt_oss"])
def test_rows_of_equal_length_are_as_they_are_alone(name: str) -> None:
    """While they share buffers and calls of attention, and after one has left."""
    runner, ids = Runner(packing(name)), [prompt(20, seed=i) for i in range(10)]
    rows = [runner.open(own) for own in ids]
    for row in rows:
        runner.prefill(row)
    for turn in range(4):
        drafts = [EMPTY] * len(rows)
        if turn == 2:
            drafts[3] = Draft.chain([5], "test")
        outputs = runner.forward(rows, drafts)
        runner.commit(rows, [()] * len(rows), [[7]] * len(rows))
        for row, own, draft, output in zip(rows, ids, drafts, outputs, strict=True):
            check_logits(runner.loaded.model, own, draft, output.logits)
            own.append(7)
            check_cache(runner, row, own)
        if turn == 2:
            runner.close(rows.pop(5))
            del ids[5]


# --- memory ---------------------------------------------------------------------------------------


def tensor_bytes() -> int:
    gc.collect()
    own = (Tensor, torch.nn.Parameter)  # torch.compile may have left fake ones
    tensors = (one for one in gc.get_objects() if type(one) in own)
    stored = (t for t in tensors if t.layout == torch.strided and t.device.type == "cpu")
    return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in stored}.values())


def test_rows_that_come_and_go_leave_nothing() -> None:
    mixture = Mixture(packing("gemma3_text"), seed=0, rewinds=False)
    before = tensor_bytes()
    for _ in range(60):
        mixture.step()
    for row in mixture.rows:
        mixture.runner.close(row)
    assert mixture.runner.store.held() == 0
    del mixture, row
    assert tensor_bytes() <= before


def test_rows_of_very_different_lengths_take_what_they_need() -> None:
    """At most a tenth more than their tokens, and 64 slots a row, while they draft and grow."""
    runner, rng = Runner(packing("llama")), random.Random(1)
    runner.chunk = 16
    memory: Any = runner.store
    rows = started(runner, 1, 2, 9, 30, 77, 120, 160, 190)
    position = 2 * 2 * 2 * 16 * 4  # two layers of two heads' keys and values of 16 floats
    for _ in range(25):
        drafts = [random_draft(rng, "tree", most=12) for _ in rows]
        runner.forward(rows, drafts)
        accepted = [accept(rng, draft) for draft in drafts]
        runner.commit(rows, [path for path, _ in accepted], [new for _, new in accepted])
        tokens = sum(len(row.ids) + len(row.pending) for row in rows)
        assert memory.held() <= position * (1.1 * tokens + 64 * len(rows))
