"""The runner against the bare model: logits of every node, contents of the cache, on every step."""

from __future__ import annotations

import contextlib
import inspect
import random
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from architectures import ALL, CONTEXT, VOCAB, build, prompt
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.errors import DrafterError, OptionError, PromptError
from draftsmith.model.forward import cache_name
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.rows import SequenceRow
from draftsmith.model.runner import Runner
from replica import (
    accept,
    check_cache,
    check_logits,
    contents,
    fresh,
    loaded,
    path_to,
    random_draft,
)

DRAFTS = {"tree": ["tree", "chain", "plain"], "chain": ["chain", "plain"], "plain": ["plain"]}
"""What a target of each shape verifies."""


class Mixture:
    """Rows of random lengths that do something else in every pass: trees, chains, chunks, plain.

    Now and then a row leaves, and another joins.
    """

    def __init__(self, model: LoadedModel, seed: int, rewinds: bool = True) -> None:
        self.rng = random.Random(seed)
        self.runner, self.rewinds = Runner(model), rewinds
        lengths = [1, 2, *(self.rng.randint(3, 60) for _ in range(4))]
        self.ids = [prompt(n, seed=seed + i) for i, n in enumerate(lengths)]
        self.rows = [self.open(ids) for ids in self.ids]

    def open(self, ids: list[int]) -> SequenceRow:
        row = self.runner.open(ids)
        row.rewinds = self.rewinds
        return row

    def step(self) -> list[tuple[list[int], Draft, Tensor]]:
        """One pass; the ids, the draft and the logits of each row that gave some."""
        if self.rng.random() < 0.2:
            place = self.rng.randrange(len(self.rows))
            self.runner.close(self.rows[place])
            self.ids[place] = prompt(self.rng.randint(1, 20), seed=len(self.ids[place]))
            self.rows[place] = self.open(self.ids[place])
        places = self.rng.sample(range(len(self.rows)), self.rng.randint(1, len(self.rows)))
        rows, drafts, take = [self.rows[i] for i in places], [], []
        for row in rows:
            least = 1 if self.runner.splits(row) else len(row.pending)
            take.append(self.rng.randint(least, len(row.pending)))
            drafted = take[-1] == len(row.pending) and self.runner.room(row) > 0
            shape = self.rng.choice(DRAFTS[self.runner.shape])
            drafts.append(random_draft(self.rng, shape if drafted else "plain"))
        outputs = self.runner.forward(rows, drafts, take)
        found, paths, tokens = [], [], []
        for place, row, draft, output in zip(places, rows, drafts, outputs, strict=True):
            path, emitted = accept(self.rng, draft) if not row.is_chunk else ([], [])
            if row.is_chunk:
                assert output.logits.shape == (0, VOCAB)
            else:
                found.append((self.ids[place], draft, output.logits))
            self.ids[place] = self.ids[place] + emitted
            paths.append(path)
            tokens.append(emitted)
        self.runner.commit(rows, paths, tokens)
        return found


SLIDING: dict[str, dict[str, Any]] = {
    "mistral": {},
    "starcoder2": {},
    "mixtral": {"sliding_window": 8},
    "phi3": {"sliding_window": 8},
    "qwen2": {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    "gemma2": {},
    "gemma3_text": {},
    "gemma3n_text": {},
    "cohere2": {},
    "gpt_oss": {},
}
"""One kind of layer, two kinds, capped scores, sinks."""
CASES = [(name, SLIDING.get(name, {}), True) for name in ALL]
CASES += [(name, options, False) for name, options in SLIDING.items()]


@pytest.mark.parametrize(("name", "options", "rewinds"), CASES)
def test_rows_that_join_and_leave(name: str, options: dict[str, Any], rewinds: bool) -> None:
    """Without `rewinds`, layers with a window drop what it has left."""
    if name == "mamba" and version("transformers") < "5":
        pytest.skip("transformers 4 decodes Mamba wrongly after prompts of one or two tokens")
    model = load(build(name, **options))
    mixture, dropped = Mixture(model, seed=5, rewinds=rewinds), 0
    for step in range(20):
        for ids, draft, logits in mixture.step():
            check_logits(model.model, ids, draft, logits)
        if step % 4 < 3:
            continue
        for row, ids in zip(mixture.rows, mixture.ids, strict=True):
            check_cache(mixture.runner, row, ids)
            if row.cached and model.capabilities.packed:
                kept = min(keys.shape[1] for keys, _ in contents(mixture.runner, row))
                dropped = max(dropped, row.cached - kept)
    assert (dropped > 32) is (model.capabilities.packed and not rewinds)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma3_text", "gemma3n_text", "gpt2", "qwen2_moe", "mixtral"]
)
def test_every_row_is_as_it_is_alone(name: str, seed: int) -> None:
    """In float64 to its rounding, whatever shares the pass."""
    live = build(name).double()
    if hasattr(live, "set_experts_implementation"):
        live.set_experts_implementation("eager")  # the other one knows no float64
    model = load(live)
    if not loaded(name).capabilities.packed:
        pytest.skip("; ".join(loaded(name).capabilities.reasons))
    assert model.capabilities.packed
    mixture, compared = Mixture(model, seed), 0
    for _ in range(15):
        for ids, draft, logits in mixture.step():
            for node in range(-1, len(draft)):
                alone = fresh(model.model, ids + [draft.tokens[i] for i in path_to(draft, node)])
                assert (logits[1 + node] - alone).norm() <= 1e-10 * alone.norm()
                compared += 1
    assert compared > 60


@pytest.mark.parametrize("name", ["lfm2", "mamba2"])
def test_replayed_tokens_are_absorbed(name: str) -> None:
    model = loaded(name)
    if model.capabilities.shape != "chain":
        pytest.skip("; ".join(model.capabilities.reasons))
    runner, ids = Runner(model), prompt(10)
    row = runner.open(ids)
    runner.prefill(row)
    seen = []
    for _ in range(12):
        seen.append(room := runner.room(row))
        draft = Draft.chain([3, 4, 5], "test") if room else EMPTY
        output = runner.forward([row], [draft])[0]
        path, new = ([0, 1], [3, 4, 6]) if room else ([], [6])
        check_logits(model.model, ids, draft, output.logits)
        runner.commit([row], [path], [new])
        ids = ids + new
        check_cache(runner, row, ids)
    assert 0 in seen
    assert seen[seen.index(0) + 1] > 0


def test_room_ends_with_the_context() -> None:
    runner = Runner(loaded("gpt2"))
    ids = prompt(CONTEXT - 4)
    row = runner.open(ids)
    assert runner.room(row) == 4
    runner.prefill(row)
    draft = Draft.chain([5, 6, 7, 8], "test")
    output = runner.forward([row], [draft])[0]
    check_logits(runner.loaded.model, ids, draft, output.logits)
    runner.commit([row], [[0, 1, 2, 3]], [[5, 6, 7, 8, 9]])
    assert runner.room(row) == 0


def test_probes_with_positions_of_their_own() -> None:
    """A probe may sit further away than its depth (SDSAT's adaptive tokens)."""
    model, ids = loaded("llama"), prompt(10)
    runner = Runner(model)
    row = runner.open(ids)
    runner.prefill(row)
    moved = Draft((5, 6), (-1, -1), ("test",) * 2, probes=1, depths=(1, 3))
    plain = Draft((5, 6), (-1, -1), ("test",) * 2, probes=1)
    far = runner.forward([row], [moved])[0].logits
    near = runner.forward([row], [plain])[0].logits
    check_logits(model.model, ids, plain, near)
    assert (far[:2] - near[:2]).abs().max() < 1e-5
    assert (far[2] - near[2]).abs().max() > 1e-3


def test_what_a_row_cannot_compute_is_refused() -> None:
    tree, chain = Draft((5, 6), (-1, -1), ("test",) * 2), Draft.chain([5], "test")
    refused: list[tuple[str, Draft, int, type[Exception], str]] = [
        ("bloom", tree, 5, DrafterError, "first_branch"),
        ("mamba", chain, 5, DrafterError, "plainly"),
        ("llama", chain, 2, OptionError, "take=2, but all 5 pending tokens"),
        ("mamba", EMPTY, 2, OptionError, "take=2, but all 5 pending tokens"),
    ]
    for name, draft, take, error, words in refused:
        runner = Runner(loaded(name))
        with pytest.raises(error, match=words):
            runner.forward([runner.open(prompt(5))], [draft], [take])
    with pytest.raises(PromptError, match="at least one"):
        runner.open([])
    with pytest.raises(PromptError, match="close"):
        runner.extend(runner.open([5]), [])


@pytest.mark.parametrize("name", ["llama", "bloom", "lfm2", "mamba2", "mamba"])
@pytest.mark.parametrize("during", ["prefill", "plain", "draft"])
def test_an_interrupted_pass_leaves_no_trace(name: str, during: str) -> None:
    model, ids = loaded(name), prompt(12)
    runner = Runner(model)
    row = runner.open(ids)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if during != "prefill":
        runner.prefill(row)
        runner.commit([row], [[]], [[int(runner.forward([row], [EMPTY])[0].logits[0].argmax())]])
        ids = row.ids + row.pending
    draft = Draft.chain([5, 6], "test") if during == "draft" and runner.room(row) else EMPTY
    handle = model.model.get_output_embeddings().register_forward_pre_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        runner.prefill(row)
        runner.forward([row], [draft])
        pytest.fail("the hook did not interrupt")
    handle.remove()
    runner.prefill(row)
    check_logits(model.model, ids, draft, runner.forward([row], [draft])[0].logits)
    check_cache(runner, row, ids)


# --- what the cache is called, in any version of transformers -------------------------------------

NAMES = ("cache", "cache_params", "past_key_values")


def named(name: str | None) -> type[LlamaForCausalLM]:
    """A Llama whose `forward` calls its cache `name`, as remote code may; None: not named."""
    signature = inspect.signature(LlamaForCausalLM.forward)
    own = cache_name(LlamaForCausalLM.forward)

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        used = {known for known in NAMES if known in options}
        assert used <= {name or own}
        renamed = {own if n in used else n: value for n, value in options.items()}
        return LlamaForCausalLM.forward(self, *args, **renamed)

    parameters = [
        p.replace(name=name or "") if p.name == own and name else p
        for p in signature.parameters.values()
        if p.name != own or name
    ]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return type("Named", (LlamaForCausalLM,), {"forward": forward})


@pytest.mark.parametrize("name", [*NAMES, None])
def test_n1_the_cache_goes_by_the_name_in_the_signature(name: str | None) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model = named(name)(config).eval()
    loaded = load(model)
    assert (loaded.capabilities.shape, loaded.capabilities.packed) == ("tree", True)
    assert loaded.capabilities.position_sizes
    runner, ids = Runner(loaded), prompt(12)
    row = runner.open(ids)
    runner.prefill(row)
    draft = Draft((5, 6, 7), (-1, -1, 0), ("test",) * 3)
    check_logits(model, ids, draft, runner.forward([row], [draft])[0].logits)
