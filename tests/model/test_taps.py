"""Taps against transformers' own `output_hidden_states` and eager `output_attentions`."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from architectures import ALL, TREES, build, prompt
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.target import Needs
from draftsmith.errors import OptionError, UnsupportedError
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner
from replica import accept, check_cache, check_logits, contents, loaded, random_draft

TOLERANCE = 1e-5
HEADS = ((0, 1), (1, 0), (1, 3), (0, 0))
"""Not in order, and not all heads of a group."""
CAN_ATTEND = [*TREES]
"""The others do not run as our attention function."""


def reference(model: LoadedModel, ids: list[int], attentions: bool = False) -> Any:
    """The bare model over all ids at once, without a cache of ours; eager for attentions."""
    bare = model.model
    if attentions:
        bare = copy.deepcopy(bare)
        bare.set_attn_implementation("eager")
    with torch.inference_mode():
        return bare(
            torch.tensor([ids]),
            output_hidden_states=True,
            output_attentions=attentions,
            use_cache=True,
        )


def check_taps(model: LoadedModel, runner: Runner, row: Any, ids: list[int], needs: Needs) -> None:
    """Hidden rows and the attention row equal the bare model's, for every id but the last."""
    taps, states = runner.taps(row), len(ids) - 1
    expected = reference(model, ids[:states], bool(needs.attention_heads))
    if needs.hidden_layers:
        assert taps.hidden is not None
        # Mamba 2 does not list the embeddings before its blocks.
        first = 0 if model.config.model_type == "mamba2" else 1
        wanted = expected.hidden_states[needs.hidden_layers[0] - 1 + first]
        if wanted.dim() == 4:  # Gemma 3n lists all of its streams
            wanted = wanted[model.config.altup_active_idx]
        wanted = wanted[0]
        torch.testing.assert_close(taps.hidden, wanted, rtol=0, atol=TOLERANCE)
    if needs.attention_heads:
        assert taps.attention is not None
        rows = [expected.attentions[layer][0, head, -1] for layer, head in needs.attention_heads]
        wanted = torch.stack(rows)
        for positions in (torch.arange(states), torch.arange(states - 1, -1, -3)):
            found = taps.attention(positions)
            torch.testing.assert_close(found, wanted[:, positions], rtol=0, atol=TOLERANCE)


def needs_for(name: str) -> Needs:
    return Needs(hidden_layers=(1,), attention_heads=HEADS if name in CAN_ATTEND else ())


def step(
    runner: Runner, rng: random.Random, rows: list[Any], ids: list[list[int]]
) -> tuple[list[Draft], list[Any]]:
    """One pass with random drafts and random acceptance; `ids` grow."""
    shapes = [runner.shape if runner.room(row) else "plain" for row in rows]
    drafts = [random_draft(rng, shape, most=6) for shape in shapes]
    outputs = runner.forward(rows, drafts)
    accepted = [accept(rng, draft) for draft in drafts]
    runner.commit(rows, [path for path, _ in accepted], [new for _, new in accepted])
    for own, (_, emitted) in zip(ids, accepted, strict=True):
        own += emitted
    return drafts, outputs


@pytest.mark.parametrize("name", ALL)
def test_prompt_accepted_and_rejected_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In buffers that grow."""
    monkeypatch.setattr("draftsmith.model.taps._FIRST_ROWS", 16)
    model = loaded(name)
    if model.capabilities.shape == "plain":
        pytest.skip("nothing is drafted, so nothing is recorded")
    needs = needs_for(name)
    runner, rng, ids = Runner(model), random.Random(name), prompt(17)
    runner.chunk = 7
    row = runner.open(ids, needs)
    assert runner.taps(row).hidden is None
    runner.prefill(row)
    check_taps(model, runner, row, ids, needs)
    for _ in range(5):
        step(runner, rng, [row], [ids])
        check_taps(model, runner, row, ids, needs)
        if model.capabilities.cache in ("packed", "own"):
            check_cache(runner, row, ids)


@pytest.mark.parametrize("rewinds", [True, False], ids=["keeps", "drops"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "qwen3", "deepseek_v3"])
def test_ragged_rows(name: str, rewinds: bool) -> None:
    """Three rows of one pass, each with needs of its own, one of them with none.

    Positions that a window has dropped get no weight.
    """
    if name not in CAN_ATTEND:
        pytest.skip("its attention is not ours in this version")
    model, rng = loaded(name), random.Random(name)
    runner: Any = Runner(model)
    runner.chunk = 11
    needs = [
        Needs(hidden_layers=(1,), attention_heads=HEADS),
        Needs(),
        Needs(attention_heads=HEADS[:1]),
    ]
    ids = [prompt(n, seed=n) for n in (40, 5, 11)]
    rows = [runner.open(own, need) for own, need in zip(ids, needs, strict=True)]
    for row in rows:
        row.rewinds = rewinds
        runner.prefill(row)
    for _ in range(5):
        step(runner, rng, rows, ids)
        for row, own, need in zip(rows, ids, needs, strict=True):
            check_taps(model, runner, row, own, need)
    kept = min(keys.shape[1] for keys, _ in contents(runner, rows[0]))
    assert (kept < rows[0].cached) == (model.capabilities.windows and not rewinds)
    runner.close(rows.pop(0))
    step(runner, rng, rows, ids[1:])
    check_taps(model, runner, rows[1], ids[2], needs[2])


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma3_text", "bloom", "lfm2", "mamba2", "mamba"]
)
def test_a_changed_conversation(name: str) -> None:
    """After `extend`, logits, cache and taps are those of the new ids."""
    model = loaded(name)
    needs = Needs() if model.capabilities.shape == "plain" else needs_for(name)
    runner, ids = Runner(model), prompt(20)
    row = runner.open(ids)  # the first turn had another drafter: nothing was recorded
    runner.prefill(row)
    runner.forward([row], [EMPTY])
    runner.commit([row], [[]], [[7]])
    assert runner.taps(row).hidden is None
    cuts = model.capabilities.cache in ("packed", "own")
    for new in (
        [*ids, 7, 8, 9],  # a continuation
        [*ids[:10], 50, 51],  # another branch
        [*ids[:10], 50, 51],  # nothing new
        ids[:6],  # a shorter one, all of it cached
        prompt(8, seed=9),  # nothing in common
    ):
        kept = runner.extend(row, new, needs)
        assert kept == row.cached <= len(new) - 1
        assert row.ids == new[:kept] or not cuts
        runner.prefill(row)
        check_taps(model, runner, row, new, needs)
        check_logits(model.model, new, EMPTY, runner.forward([row], [EMPTY])[0].logits)
        runner.commit([row], [[]], [[5]])
        check_cache(runner, row, [*new, 5])
        check_taps(model, runner, row, [*new, 5], needs)
    reused = runner.extend(row, [*new, 5, 6], needs)
    assert reused == (len(new) if cuts else row.cached)
    assert runner.extend(row, [*new, 5, 6, 7]) >= 0  # and one without needs keeps what there is
    assert row.taps is None


def test_refusals_say_why() -> None:
    with pytest.raises(UnsupportedError, match=r"runs with 'sdpa' .*trees and.*hidden states"):
        Runner(loaded("falcon")).open([5], Needs(attention_heads=HEADS))
    with pytest.raises(OptionError, match=r"layer=3, but .* has layers 1…2"):
        Runner(loaded("llama")).open([5], Needs(hidden_layers=(3,)))
    with pytest.raises(OptionError, match=r"head \(0, 4\) does not exist"):
        Runner(loaded("llama")).open([5], Needs(attention_heads=((0, 4),)))


def test_a_compiled_model_is_looked_into_as_it_was_before() -> None:
    """Compiled blocks call no hooks. Loading would compile a dozen shapes, so that is left out."""
    plain, ids, needs = loaded("llama"), prompt(12), Needs((1,), HEADS)
    compiled = torch.compile(plain.model, backend="eager")
    runner, rng = Runner(replace(plain, model=compiled)), random.Random(1)
    row = runner.open(ids, needs)
    runner.prefill(row)
    check_taps(plain, runner, row, ids, needs)
    for _ in range(3):
        step(runner, rng, [row], [ids])
        check_taps(plain, runner, row, ids, needs)


def test_a_compiled_part_cannot_be_looked_into() -> None:
    model = load(build("llama"))
    block = model.blocks[0]
    block._compiled_call_impl = block.forward  # as block.compile() would
    row = Runner(model).open(prompt(12), Needs(hidden_layers=(1,)))
    with pytest.raises(UnsupportedError, match=r"layer 1 of LlamaDecoderLayer.* compiled"):
        Runner(model).prefill(row)


def test_the_blocks_are_those_near_the_word_embeddings() -> None:
    """A vision tower may have as many, and stand nearer the top."""
    model = build("llama")
    model.tower = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)])
    assert load(model).blocks is model.model.layers
