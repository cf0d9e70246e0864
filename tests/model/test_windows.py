"""Sliding windows: equal to the bare model, reading little and keeping little."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import pytest
import torch
import transformers

from architectures import build, prompt
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.reading import finite
from draftsmith.core.target import Needs
from draftsmith.drafters.registry import parse
from draftsmith.engine.engine import Engine
from draftsmith.integrations.transformers import accelerate
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.packed import PackedPass
from draftsmith.model.runner import Runner
from replica import accept, check_cache, check_logits, check_step, random_draft

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


@pytest.mark.parametrize(
    "name",
    ["mistral", "gemma3_text", "gpt_oss", "qwen2"],
)
@pytest.mark.parametrize("rewinds", [True, False], ids=["keeps", "drops"])
def test_ragged_rows_that_join_and_leave(name: str, rewinds: bool) -> None:
    """A short row beside one of many windows, each with its own dropped keys; a long path."""
    model, rng = loaded(name), random.Random(name)
    runner = Runner(model, chunk=11, rewinds=rewinds)
    ids = {i: prompt(n, seed=i) for i, n in enumerate((70, 5, 31, 14))}
    rows: dict[int, Any] = {}
    for step in range(9):
        if step in ids:
            rows[step] = runner.open(ids[step])
            runner.prefill(rows[step])
        if step == 6:
            runner.close(rows.pop(0))
        here = list(rows)
        rng.shuffle(here)
        drafts = {i: random_draft(rng, "tree", most=10) for i in here}
        check_step(runner, rng, rows, ids, drafts)
    assert (dropped(runner, rows[2]) > 0) is not rewinds


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


def test_little_more_is_allocated_than_needed() -> None:
    runner: Any = Runner(load(build("llama")))
    rows = [runner.open(prompt(135, seed=i)) for i in range(9)]
    for row in rows:
        runner.prefill(row)
    runner.forward(rows, [EMPTY] * 9)
    need = 9 * 135 * 2 * 2 * 16 * 4
    assert all(need <= size <= 1.5 * need for size in held(runner))


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


def test_a_row_in_the_place_of_one_that_dropped_keys() -> None:
    model = loaded("mistral")
    runner = Runner(model, chunk=16, rewinds=False)
    for ids in (prompt(60), prompt(9, seed=3), [5]):
        row = runner.open(ids)
        runner.prefill(row)
        check_logits(model.model, ids, EMPTY, runner.forward([row], [EMPTY])[0].logits)
        check_cache(runner, row, ids)
        runner.close(row)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_a_token_that_overflows_behind_dropped_keys(name: str) -> None:
    """Nothing is cleared: the next pass writes whatever it will read."""
    model, bad = loaded(name), 5
    embeddings = model.model.get_input_embeddings()
    model.model.set_output_embeddings(copy.deepcopy(model.model.get_output_embeddings()))
    model.model.get_output_embeddings().weight = torch.nn.Parameter(embeddings.weight.clone())
    with torch.no_grad():
        embeddings.weight[bad] = torch.nan
    ids = [i for i in prompt(70) if i != bad]
    runner: Any = Runner(model, chunk=16, rewinds=False)
    row = runner.open(ids)
    runner.prefill(row)
    assert dropped(runner, row)
    [output] = runner.forward([row], [Draft.chain([6, bad, 7], "test")])
    assert not finite([output.logits]).all()
    for buffer in (b for pair in runner._store.contents(row) for b in pair):
        assert buffer.isfinite().all()
    draft = Draft.chain([6, 8, 9, 7], "test")
    check_logits(model.model, ids, draft, runner.forward([row], [draft])[0].logits)


HEADS = ((0, 1), (1, 0), (1, 3), (0, 0))


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("lengths", [(40,), (40, 9, 23)], ids=["alone", "ragged"])
def test_attention_rows_of_what_is_read(name: str, lengths: tuple[int, ...]) -> None:
    """Positions before the view get no weight; all others what eager attention gives them."""
    model, rng, needs = loaded(name), random.Random(name), Needs((1,), HEADS)
    eager = build(name, "eager", **SLIDING[name])
    runner = Runner(model, chunk=11, rewinds=False)
    ids = [prompt(n, seed=n) for n in lengths]
    rows = [runner.open(one, needs) for one in ids]
    for row in rows:
        runner.prefill(row)
    for step in range(8):
        drafts = [random_draft(rng, "tree" if step % 2 else "plain", most=9) for _ in rows]
        runner.forward(rows, drafts)
        accepted = [accept(rng, draft) for draft in drafts]
        runner.commit(rows, [path for path, _ in accepted], [new for _, new in accepted])
        for row, own, (_, emitted) in zip(rows, ids, accepted, strict=True):
            own += emitted
            with torch.inference_mode():
                found = eager(torch.tensor([own[:-1]]), output_attentions=True).attentions
            wanted = torch.stack([found[layer][0, head, -1] for layer, head in HEADS])
            taps = runner.taps(row)
            assert taps.attention is not None
            for positions in (torch.arange(len(own) - 1), torch.arange(len(own) - 2, -1, -3)):
                seen = taps.attention(positions)
                torch.testing.assert_close(seen, wanted[:, positions], rtol=0, atol=1e-5)
    assert dropped(runner, rows[0]) > 0


@pytest.mark.parametrize("name", [*SLIDING])
def test_long_answers_are_transformers_own(name: str) -> None:
    model = build(name, **SLIDING[name])
    model.generation_config.eos_token_id = None
    ids = prompt(30) * 2
    tensor = torch.tensor([ids])
    own = model.generate(tensor, max_new_tokens=120, do_sample=False)
    engine = Engine.from_pretrained(model, drafter=parse("prompt_lookup"), budget=6)
    batch = [ids, ids[:40], ids[:7]]
    results = engine.generate(batch, max_new_tokens=120, temperature=0.0)
    assert results[0].tokens == own[0, 60:].tolist()
    assert results[0].stats.accepted > 0
    for one, result in zip(batch[1:], results[1:], strict=True):
        alone = model.generate(torch.tensor([one]), max_new_tokens=120, do_sample=False)
        assert result.tokens == alone[0, len(one) :].tolist()
    with accelerate(model, "prompt_lookup", budget=6):
        again = model.generate(tensor, max_new_tokens=120, do_sample=False)
    assert torch.equal(again, own)
