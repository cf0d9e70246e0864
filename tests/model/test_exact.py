"""Exact passes: a row comes out alike to the bit, whatever its pass is like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from architectures import build, prompt
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.engine.engine import Engine
from draftsmith.errors import OptionError, UnsupportedError
from draftsmith.integrations.transformers import accelerate
from draftsmith.model.exact import widths
from draftsmith.model.exact.find import exactly
from draftsmith.model.exact.kernel import attend
from draftsmith.model.exact.widths import ROWS, Pieces, Widths, watched
from draftsmith.model.load import load
from draftsmith.model.runner import Runner
from scripted import random_trees
from test_lossless import random_prompts

ARCHITECTURES = ("llama", "qwen3", "gemma3_text", "gpt2")
DRAFTERS = ("auto", "longest_match")
LONG = 500
MIXED = "not given a row for every position|cannot share passes"
"""Transformers 4 computes experts in a way that cannot even be packed."""


def model(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    context = {"n_positions": 1024} if name == "gpt2" else {"max_position_embeddings": 1024}
    return build(name, **context).to(dtype)


def engine(name: str, **options: Any) -> Engine:
    return Engine.from_pretrained(model(name), exact=True, **options)


# --- the kernel -----------------------------------------------------------------------------------


class Case:
    """Random queries, and which slots each of them sees."""

    def __init__(self, seed: int, heads: tuple[int, int], widths: tuple[int, int]) -> None:
        self.random = np.random.default_rng(seed)
        (h, k), (d, w), self.room = heads, widths, 333
        self.keys = self.random.standard_normal((k, d, self.room), np.float32)
        self.values = self.random.standard_normal((k, self.room, w), np.float32)
        self.q = self.random.standard_normal((9, h, d), np.float32)
        self.lows = self.random.integers(0, 40, 9)
        self.highs = self.random.integers(200, 290, 9)
        self.further = [
            sorted(self.random.choice(range(high, self.room), count, replace=False).tolist())
            for high, count in zip(self.highs, range(9), strict=True)
        ]
        self.cap, self.sinks = np.float32(0), np.zeros(0, np.float32)

    def attention(self, queries: list[int], keys: Any = None) -> np.ndarray[Any, Any]:
        """Of these queries in one call."""
        keys = self.keys if keys is None else keys
        starts = np.cumsum([0, *(len(self.further[i]) for i in queries)])
        slots = np.array([slot for i in queries for slot in self.further[i]], np.int64)
        out = np.zeros((len(queries), self.q.shape[1], self.values.shape[2]), np.float32)
        bits = keys.view(np.uint32), self.values.view(np.uint32)
        seen = self.lows[queries], self.highs[queries], starts, slots
        attend(self.q[queries], *bits, 0, *seen, np.float32(0.3), self.cap, self.sinks, out)
        return out

    def expected(self, i: int) -> np.ndarray[Any, Any]:
        """(H, W) of one query, in float64."""
        slots = [*range(self.lows[i], self.highs[i]), *self.further[i]]
        groups, found = self.q.shape[1] // len(self.keys), []
        for head, q in enumerate(self.q[i].astype(np.float64)):
            scores = q @ self.keys[head // groups][:, slots].astype(np.float64) * 0.3
            if self.cap:
                scores = np.tanh(scores / self.cap) * self.cap
            sinks = self.sinks[head : head + 1].astype(np.float64)
            weights = np.exp(np.concatenate([scores, sinks]) - scores.max())
            weights = (weights / weights.sum())[: len(scores)]
            found.append(weights @ self.values[head // groups][slots].astype(np.float64))
        return np.array(found)


@pytest.mark.parametrize("widths", [(64, 64), (16, 16), (20, 12)])
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (4, 1)])
def test_the_kernel_attends_under_its_mask(heads: tuple[int, int], widths: tuple[int, int]) -> None:
    case = Case(0, heads, widths)
    for cap, sinks in ((0, 0), (2, 0), (0, heads[0])):
        case.cap = np.float32(cap)
        case.sinks = np.linspace(-1, 1, sinks, dtype=np.float32)
        together = case.attention(list(range(9)))
        for i in range(9):
            np.testing.assert_allclose(together[i], case.expected(i), rtol=2e-5, atol=2e-5)
            assert np.array_equal(case.attention([i])[0], together[i])
        assert np.array_equal(case.attention([7, 2, 5]), together[[7, 2, 5]])


def test_what_overflows_is_not_hidden() -> None:
    case = Case(2, (4, 2), (16, 16))
    case.keys[0, :, 100] = np.nan
    found = case.attention([0])[0]
    assert np.isnan(found[:2]).all()
    assert np.isfinite(found[2:]).all()


# --- the self-test --------------------------------------------------------------------------------


class Odd(nn.Module):
    """Linear, but otherwise at some widths."""

    def __init__(self, bad: set[int]) -> None:
        super().__init__()
        self.weight, self.bad = nn.Parameter(torch.eye(8)), bad

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * (1 + (x.shape[-2] in self.bad) * 1e-6)


def widths_of(part: nn.Module) -> Widths:
    model = nn.Sequential(part)
    with torch.no_grad():
        return Widths(watched(model, lambda: model(torch.randn(1, ROWS, 8))))


def test_passes_are_filled_up_to_widths_that_agree() -> None:
    widths = widths_of(Odd({1, 3, 6, 7}))
    assert [widths.at_least(n) for n in (1, 2, 3, 5, 6, 8, 64, 65, 200)] == [
        2, 2, 4, 5, 8, 8, 64, 128, 256,
    ]  # fmt: skip
    assert "1, 3, 6, 7" in widths.explain()


@pytest.mark.parametrize("bad", [{1, 2, 3, 4}, set(range(1, 65)) - {16}, {64}])
def test_who_agrees_at_too_few_widths_is_refused_by_name(bad: set[int]) -> None:
    with pytest.raises(UnsupportedError, match=r"Odd 8×8 computes other bits in passes of"):
        widths_of(Odd(bad))


def test_a_width_beyond_is_tried_when_it_is_wanted() -> None:
    widths = widths_of(Odd({128}))
    with pytest.raises(UnsupportedError, match="Odd 8×8 computes other bits in passes of 128"):
        widths.at_least(100)


@pytest.mark.slow
def test_models_that_cannot_say_why() -> None:
    with pytest.raises(UnsupportedError, match="cannot share passes"):
        Engine.from_pretrained(build("qwen3_next"), exact=True)
    with pytest.raises(UnsupportedError, match=r"is in float64; exact attention supports bfloat16"):
        Engine.from_pretrained(model("llama", torch.float64), exact=True)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(OptionError, match="does not work under autocast"),
    ):
        engine("llama").generate([1, 2, 3], max_new_tokens=2)


# --- passes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "gemma2", "gemma3n_text", "mistral"])
def test_logits_are_those_of_plain_steps(name: str, dtype: torch.dtype) -> None:
    """In trees, in chunks, beside others, in a copy of a row: to the bit."""
    loaded = load(model(name, dtype))
    if name not in ARCHITECTURES and not loaded.capabilities.packed:
        pytest.skip(loaded.capabilities.reasons[-1])
    try:
        loaded = exactly(loaded)
    except UnsupportedError as error:
        if dtype == torch.float32 and "on this processor" in str(error):
            pytest.skip(str(error))  # its kernels for few rows differ
        raise
    ids = prompt(60)
    plain = Runner(loaded)
    row, expected = plain.open(ids[:1]), []
    for next_id in [*ids[1:], 0]:
        expected.append(plain.forward([row], [EMPTY])[0].logits[0])
        plain.commit([row], [()], [[next_id]])
    runner = Runner(loaded)
    ours, beside = runner.open(ids[:30]), runner.open(prompt(70, 5))
    for taken in (7, 1, 12):
        runner.forward([beside, ours], [EMPTY, EMPTY], [taken + 1, taken])
        runner.commit([beside, ours], [(), ()], [(), ()])
    # The right path is not first: 1, 3, 4, 6.
    nodes = [9, ids[30], 8, ids[31], ids[32], 7, ids[33]]
    tree = Draft(tuple(nodes), (-1, -1, 1, 1, 3, 4, 4), ("test",) * 7)
    output = runner.forward([beside, ours], [Draft.chain([5] * 40, "test"), tree], [47, 10])[1]
    for place, position in ((0, 29), (2, 30), (4, 31), (5, 32), (7, 33)):
        assert torch.equal(output.logits[place], expected[position])
    runner.commit([beside, ours], [(), (1, 3, 4, 6)], [[3], [*ids[30:34], ids[34]]])
    twin = runner.open(ids)
    runner.copy(ours, twin, 33)
    chain = Draft.chain(ids[35:50], "test")
    first, second = runner.forward([ours, twin], [chain, EMPTY], [1, len(twin.pending)])
    assert torch.equal(first.logits, torch.stack(expected[34:50]))
    assert torch.equal(second.logits[0], expected[-1])


@torch.library.custom_op("test_exact::linear", mutates_args=())
def changing(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product whose kernel in bfloat16 is another one for more than eight rows."""
    another = x.dtype == torch.bfloat16 and x.shape[-2] > 8
    more = torch.finfo(torch.bfloat16).eps if another else 0
    return linear(x, weight, bias) * (1 + more)


@pytest.mark.slow
def test_products_of_many_rows_are_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.functional, "linear", torch.ops.test_exact.linear.default)
    monkeypatch.setattr(widths, "_GROUP", 8)
    live = model("llama")
    with pytest.raises(UnsupportedError, match=r"other bits in passes of .*9, 10, 11"):
        Engine.from_pretrained(live, exact=True)
    monkeypatch.setitem(widths.PRODUCTS, torch.ops.test_exact.linear.default, 0)
    ours = Engine.from_pretrained(live, exact=True)
    assert ours.model.exact is not None
    assert ours.model.exact.most == 8
    assert "products take up to 8 rows" in ours.model.exact.explain()
    wrong, accepted = differing(
        ours, [*random_prompts(90, 2), prompt(LONG, 3)], 12, temperature=0.0
    )
    assert not wrong
    assert accepted


def test_a_pass_of_many_values_tells_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.functional, "linear", torch.ops.test_exact.linear.default)
    monkeypatch.setattr(widths, "_GROUP", 8)
    monkeypatch.setattr(widths, "_MANY", 1)
    with pytest.raises(UnsupportedError, match=r"other bits in passes of 9, 10, 11"):
        Engine.from_pretrained(model("llama"), exact=True)


def test_a_part_of_many_values_is_tested_in_wide_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wider than the expected rows, as those of a long prompt."""
    monkeypatch.setattr(widths, "_MANY", 1)
    engine = Engine.from_pretrained(model("llama"), exact=True)
    result = engine.generate(prompt(3 * widths.ROWS), max_new_tokens=2)
    assert result.stats.failed_passes == 0
    assert engine.model.exact is not None
    assert any(width > widths.ROWS for width in engine.model.exact._known)


def test_pieces_give_the_same_product() -> None:
    x, weight, bias = torch.randn(1, 21, 6), torch.randn(4, 6), torch.randn(4)
    expected = x @ weight.T + bias
    with Pieces(8):
        torch.testing.assert_close(linear(x, weight, bias=bias), expected)
        torch.testing.assert_close(torch.addmm(bias, x[0], weight.T), expected[0])


def differing(engine: Engine, texts: list[Any], length: int, **sampling: Any) -> tuple[int, int]:
    """Answers that differ from plain ones, and tokens accepted, over all ways to ask."""
    options = {"max_new_tokens": length} | sampling
    plain = [engine.generate(ids, drafter="none", **options) for ids in texts]
    wrong = accepted = 0
    for drafter in (*DRAFTERS, random_trees(0, nodes=12, near=plain[0].tokens)):
        results = [engine.generate(ids, drafter=drafter, budget=16, **options) for ids in texts]
        results += engine.generate(texts, drafter=drafter, budget=16, **options)
        assert all(result.exact for result in results)
        wrong += sum(r.tokens != p.tokens for r, p in zip(results, plain * 2, strict=True))
        accepted += sum(result.stats.accepted for result in results)
    return wrong, accepted


def test_another_default_dtype_changes_nothing() -> None:
    text, options, built = random_prompts(90, 4)[3], {"max_new_tokens": 16}, model("llama")
    expected = Engine(built, exact=True, drafter="none").generate(text, **options)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        found = Engine(built, exact=True).generate(text, **options)
    finally:
        torch.set_default_dtype(before)
    assert found.exact
    assert found.tokens == expected.tokens


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_answers_in_half_precision_are_plain_ones(name: str) -> None:
    ours = engine(name)
    texts = [*random_prompts(90, 4), prompt(LONG, 3)]
    for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95, "seed": 3}):
        wrong, accepted = differing(ours, texts, 16, **sampling)
        assert not wrong
        assert accepted


def test_nodes_with_positions_of_their_own_stay_within_a_window() -> None:
    """Those of `lookahead` leave out positions; none may be left without anything to see."""
    windowed = build("mistral", scale=0.15, sliding_window=8).to(torch.bfloat16)
    ours = Engine(windowed, exact=True)
    ids = prompt(30, seed=1) * 2
    plain = ours.generate(ids, drafter="none", max_new_tokens=30)
    found = ours.generate(ids, drafter="lookahead", budget=9, max_new_tokens=30)
    assert found.tokens == plain.tokens
    assert found.stats.failed_passes == 0


@pytest.mark.slow
def test_prefixes_and_threads_change_nothing() -> None:
    """The second request of each pair finds most of its prompt computed."""
    text = prompt(LONG, 4)
    options = {"max_new_tokens": 8, "temperature": 0.0}
    fresh = engine("qwen3", prefixes=0)
    kept = engine("qwen3", prefixes=4)
    for end in (LONG, LONG - 30, LONG - 7):
        expected = fresh.generate(text[:end], drafter="none", **options).tokens
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(2)
            found = kept.generate([*text[:end]], **options)
        finally:
            torch.set_num_threads(threads)
        assert found.tokens == expected
    assert found.stats.reused_tokens > LONG - 40


def test_accelerate_answers_exactly_or_not_at_all() -> None:
    live = model("llama")
    ids = torch.tensor([random_prompts(90, 4)[3]])
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    with accelerate(live, "none", exact=True):
        expected = live.generate(ids, **options)
    with accelerate(live, exact=True) as handle:
        assert torch.equal(live.generate(ids, **options), expected)
        assert handle.stats is not None
        with pytest.raises(UnsupportedError, match="cannot be accelerated"):
            live.generate(ids, **options, num_beams=2)
    with pytest.raises(UnsupportedError, match=MIXED):
        accelerate(model("qwen2_moe"), exact=True)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "temperatures"), [("bfloat16", (0.0, 0.7)), ("float32", (0.7,))])
def test_the_real_model_answers_exactly(
    smollm2: str, dtype: str, temperatures: tuple[float, ...], shared_data: Path
) -> None:
    ours = Engine.from_pretrained(smollm2, dtype=dtype, exact=True)
    lines = (shared_data / "prompts" / "spec_bench.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line) for line in lines]
    # docs/lab-notes tells of 48.
    texts = [one["turns"][0] for one in asked[:: len(asked) // 2]][:2]
    encoded = [ours.prepare({}).encode([{"role": "user", "content": t}])[:40] for t in texts]
    for temperature in temperatures:
        wrong, accepted = differing(ours, encoded, 8, temperature=temperature, seed=5)
        assert not wrong
        assert accepted
