"""Sliding windows: equal to the bare model, reading little and keeping little."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import transformers

from architectures import build, prompt
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.packed import PackedPass
from draftsmith.model.runner import Runner
from replica import accept, check_cache, check_logits, random_draft

WINDOW = 8
SLIDING: dict[str, dict[str, Any]] = {
    "mistral": {},
    "starcoder2": {},
    "mixtral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "qwen2": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "gemma2": {},
    "gemma3_text": {},
    "cohere2": {},
    "gpt_oss": {},
}
"""One kind of layer, two kinds, capped scores, sinks."""
if transformers.__version__.startswith("4."):
    del SLIDING["gemma2"]  # its attention there is a class of its own


def loaded(name: str) -> LoadedModel:
    return load(build(name, **SLIDING[name]))


def dropped(runner: Any, row: Any) -> int:
    """The most positions that a layer has dropped."""
    kept = (keys.shape[1] for keys, _ in runner._store.contents(row))
    return int(row.cached) - min(kept)


@pytest.mark.parametrize("name", SLIDING)
@pytest.mark.parametrize("rewinds", [True, False], ids=["keeps", "drops"])
def test_many_windows_of_chains_and_trees(name: str, rewinds: bool) -> None:
    model = loaded(name)
    assert model.capabilities.shape == "tree"
    runner, rng, ids = Runner(model, chunk=11, rewinds=rewinds), random.Random(name), prompt(45)
    row = runner.open(ids)
    runner.prefill(row)
    for step in range(12):
        draft = random_draft(rng, ("tree", "chain", "plain")[step % 3], most=12)
        output = runner.forward([row], [draft])[0]
        check_logits(model.model, ids, draft, output.logits)
        path, emitted = accept(rng, draft)
        runner.commit([row], [path], [emitted])
        ids = ids + emitted
        check_cache(runner, row, ids)
    assert (dropped(runner, row) > 4 * WINDOW) is not rewinds


def read_by_layer(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Filled with the slots that each layer of a pass is given."""
    read: dict[int, int] = {}
    own = PackedPass.update

    def update(self: Any, keys: Any, values: Any, layer: int, *rest: Any, **more: Any) -> Any:
        found = own(self, keys, values, layer, *rest, **more)
        read[layer] = found[0].packed.keys[0].shape[2]  # type: ignore[attr-defined]
        return found

    monkeypatch.setattr(PackedPass, "update", update)
    return read


@pytest.mark.parametrize("rewinds", [True, False], ids=["keeps", "drops"])
def test_no_more_is_read_than_the_windows_of_the_pass(
    rewinds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(loaded("gemma3_text"), chunk=20, rewinds=rewinds)
    read, ids = read_by_layer(monkeypatch), prompt(161)
    row = runner.open(ids)
    runner.prefill(row)
    assert read == {0: WINDOW - 1 + 20, 1: 160}  # the last chunk
    runner.forward([row], [EMPTY])
    assert read == {0: WINDOW, 1: 161}
    runner.forward([row], [Draft.chain([5, 6, 7], "test")])
    assert read == {0: WINDOW + 3, 1: 164}


def held(runner: Any) -> list[int]:
    """Bytes of keys and values that each layer has allocated."""
    memory = runner._store
    found: Counter[int] = Counter()
    for slots in (slots for row in memory._rows for slots in row.state):
        size = slots.keys[0].nbytes + slots.values[0].nbytes
        found.update(dict.fromkeys(slots.layers, size // len(slots.layers)))
    assert memory.held() == found.total()
    return [found[layer] for layer in sorted(found)]


def test_what_nobody_will_see_again_takes_no_memory() -> None:
    model = loaded("gemma3_text")
    slots = {}
    for rewinds in (True, False):
        runner = Runner(model, chunk=16, rewinds=rewinds)
        rows = [runner.open(prompt(160, seed=i)) for i in range(2)]
        for row in rows:
            runner.prefill(row)
        for _ in range(20):
            runner.forward(rows, [Draft.chain([5], "test")] * 2)
            runner.commit(rows, [[0]] * 2, [[5, 6]] * 2)
        position = 2 * 2 * 2 * 16 * 4  # two rows of two heads' keys and values of 16 floats
        slots[rewinds] = [size // position for size in held(runner)]
    assert slots[True][0] == slots[True][1] == slots[False][1]
    assert 200 <= slots[True][0] <= 1.25 * 201
    assert slots[False][0] <= 1.25 * (WINDOW + WINDOW / 2 + 16)


def test_a_row_that_dropped_keys_is_cut_back_as_far_as_they_reach() -> None:
    model = loaded("gemma3_text")
    runner, ids = Runner(model, chunk=16, rewinds=False), prompt(60)
    row: Any = runner.open(ids)
    runner.prefill(row)
    gone = dropped(runner, row)
    assert 0 < gone < 59 - 10
    near, far = [*ids[: gone + 10], 50], [*ids[:gone], 51]
    for new, kept in ((near, gone + 10), (far, 0)):
        assert runner.extend(row, new) == kept
        runner.prefill(row)
        check_logits(model.model, new, EMPTY, runner.forward([row], [EMPTY])[0].logits)
        check_cache(runner, row, new)
