"""Passes of fixed shapes give what packed passes give, and can be recorded and replayed."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_runner import Mixture
from test_taps import check_taps, step

from architectures import TREES, build, prompt
from draftsmith import accelerate
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.target import NO_NEEDS, Needs
from draftsmith.drafters.draft_model.draft_model import DraftModel
from draftsmith.engine.call import Call
from draftsmith.engine.engine import Engine
from draftsmith.engine.memory import need
from draftsmith.errors import OptionError, UnknownName
from draftsmith.model import graphs, static
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.probe import with_store
from draftsmith.model.runner import Runner
from frozen import Frozen, capturing, freeze, unable
from replica import check_cache, check_logits, fresh, loaded
from scripted import oracle
from tiers import slow_after

IDS = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8] * 3
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "seed": 3}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "logit_bias": {5: -1.0}, "logprobs": True}
DRAFTERS = ["none", "auto", "pld_plus", "pld_plus(rank='attention', heads=((0, 1),))"]
FEW = {"llama", "gpt2", "gemma2", "gemma3n_text", "gpt_oss", "mixtral"}
"""Architectures that differ most in what their passes compute."""


def fixed(model: LoadedModel) -> LoadedModel:
    found = with_store(model, "static")
    assert found.store == "static", found.capabilities.reasons
    return found


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(places, width, capacity) of each pass of fixed shape."""
    seen: list[tuple[int, int, int]] = []
    own = graphs.Graphs.run

    def run(self: Any, buffer: Any, shape: graphs.Shape, body: Any) -> Any:
        seen.append((*shape[:2], buffer.capacity))
        return own(self, buffer, shape, body)

    monkeypatch.setattr(graphs.Graphs, "run", run)
    return seen


@pytest.mark.parametrize("name", slow_after(1, sorted(TREES.keys() & FEW)))
def test_replays_answer_as_packed_passes_do(
    name: str, monkeypatch: pytest.MonkeyPatch, shapes: list[tuple[int, int, int]]
) -> None:
    """A replay runs no Python: what a pass depends on must be among its inputs."""
    monkeypatch.setattr(static, "LEAST_SLOTS", 32)
    live = build(name, eos_token_id=None)
    packed = load(live)
    model = fixed(packed)
    made = freeze(monkeypatch, model)
    pair = Engine(packed), Engine(model)
    passes = 0
    for drafter in DRAFTERS:
        for sampling in (GREEDY, SAMPLED, GREEDY | PENALTIES):
            shapes.clear()
            options = {"drafter": drafter, "budget": 8, "max_new_tokens": 16, **sampling}
            one, other = (engine.generate(IDS, **options) for engine in pair)
            assert not other.notices
            assert one.tokens == other.tokens
            # Equal texts have almost equal states, and rounding may decide which is more alike.
            assert one.stats.passes == other.stats.passes or drafter == "pld_plus"
            assert bool(shapes) == (drafter != DRAFTERS[-1])  # recorded attention is packed
            passes += len(shapes)
    assert sum(one.replays for one in made) == passes
    assert 4 < len(made) < passes / 4


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma3_text",
        "gemma3n_text",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt_oss", "gpt2", "mixtral")),
    ],
)
def test_rows_that_come_and_go(
    name: str, monkeypatch: pytest.MonkeyPatch, shapes: list[tuple[int, int, int]]
) -> None:
    """Replayed passes over some rows of a buffer change none of the others."""
    monkeypatch.setattr(static, "LEAST_SLOTS", 16)
    monkeypatch.setattr(static, "MOST_PLACES", 4)
    model = load(build(name))
    mixture = Mixture(fixed(model), seed=5)
    made = freeze(monkeypatch, mixture.runner.loaded)
    shapes.clear()
    for _ in range(60):
        for ids, draft, logits in mixture.step():
            check_logits(model.model, ids, draft, logits)
    for row, ids in zip(mixture.rows, mixture.ids, strict=True):
        check_cache(mixture.runner, row, ids)
        mixture.runner.close(row)
    assert {places for places, *_ in shapes} == {1, 2, 4}
    assert {width for _, width, _ in shapes} >= {1, 4, 8}
    assert {slots for *_, slots in shapes} >= {16, 32, 64}
    assert sum(one.replays for one in made) == len(shapes) > 40
    assert not mixture.runner.store._places  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["llama", "gemma3n_text"])
def test_states_are_recorded_by_replays(
    name: str, monkeypatch: pytest.MonkeyPatch, shapes: list[tuple[int, int, int]]
) -> None:
    """Beside a row that records nothing, and one that records another layer."""
    layers = {} if name == "gemma3n_text" else {"num_hidden_layers": 3}
    model = fixed(load(build(name, **layers)))
    made = freeze(monkeypatch, model)
    runner, rng = Runner(model), random.Random(name)
    several = [Needs(hidden_layers=(1,)), NO_NEEDS, Needs(hidden_layers=(2,))]
    ids = [prompt(12 + i, seed=i) for i in range(3)]
    rows = [runner.open(own, needs) for own, needs in zip(ids, several, strict=True)]
    for row in rows:
        runner.prefill(row)
    shapes.clear()
    for turn in range(9):
        some = slice(None) if turn % 3 else slice(turn // 3, turn // 3 + 1)
        step(runner, rng, rows[some], ids[some])
        for row, own, needs in zip(rows, ids, several, strict=True):
            if needs.taps:
                check_taps(model, runner, row, own, needs)
    assert len(shapes) == 9
    assert sum(one.replays for one in made) >= 9


def test_passes_that_would_be_too_wide_are_packed(
    monkeypatch: pytest.MonkeyPatch, shapes: list[tuple[int, int, int]]
) -> None:
    monkeypatch.setattr(static, "MOST_POSITIONS", 16)
    live = build("llama", eos_token_id=None)
    pair = Engine(live, store="packed"), Engine(live, store="static")
    shapes.clear()
    options = {"drafter": "auto", "budget": 8, "max_new_tokens": 30}
    one, other = (engine.generate([IDS, prompt(30), prompt(9)], **options) for engine in pair)
    assert [r.tokens for r in one] == [r.tokens for r in other]
    assert max(places * width for places, width, _ in shapes) == 16


@pytest.mark.failing_passes
def test_without_memory_for_a_larger_place_a_row_goes_on_in_its_own(
    monkeypatch: pytest.MonkeyPatch, shapes: list[tuple[int, int, int]]
) -> None:
    monkeypatch.setattr(static, "LEAST_SLOTS", 64)
    live, own, asked = build("llama", eos_token_id=None), static.Buffer, list[int]()
    plain = Engine(live, store="packed").generate(IDS, max_new_tokens=60).tokens
    engine = Engine(live, store="static")

    def scarce(parts: Any, capacity: int, places: int) -> Any:
        asked.append(capacity)
        if len(asked) == 1:
            raise torch.OutOfMemoryError("no memory")
        return own(parts, capacity, places)

    monkeypatch.setattr(static, "Buffer", scarce)
    shapes.clear()
    answer = engine.generate(IDS, drafter=oracle(plain), budget=15, max_new_tokens=60)
    assert answer.tokens == plain
    assert (asked, answer.stats.failed_passes) == ([128, 128], 1)
    assert [width for _, width, slots in shapes if slots == 64] == [16, 16, 1]


def test_the_padding_of_absent_rows_spoils_none_of_them() -> None:
    """Padding is token 0, whose state is not finite here."""
    live = build("llama")
    with torch.no_grad():
        live.get_input_embeddings().weight[0] = torch.inf
    runner, ids = Runner(fixed(load(live))), [prompt(12, seed=seed) for seed in range(2)]
    rows = [runner.open(one) for one in ids]
    for row in rows:
        runner.prefill(row)
    for members in ([0, 1], [1], [0]):
        outputs = runner.forward([rows[i] for i in members], [EMPTY] * len(members))
        for i, found in zip(members, outputs, strict=True):
            torch.testing.assert_close(found.logits[-1], fresh(live, ids[i]), atol=1e-5, rtol=0)
            ids[i].append(7)
            runner.commit([rows[i]], [[]], [[7]])


def test_a_row_is_shortened_and_goes_on() -> None:
    model = fixed(loaded("gemma3_text"))
    runner, ids = Runner(model), prompt(60)
    row = runner.open(ids)
    row.rewinds = False
    runner.prefill(row)
    for kept in (40, 12, 0):
        for length in (kept + 5, kept + 9):
            new = [*ids[:kept], *prompt(length - kept, seed=length)]
            assert runner.extend(row, new) >= kept - 1
            (found,) = runner.forward([row], [EMPTY])
            expected = fresh(model.model, new)
            torch.testing.assert_close(found.logits[-1], expected, atol=1e-5, rtol=0)
            runner.commit([row], [()], [[5]])


def test_overflow_of_a_draft_leaves_nothing_behind() -> None:
    live, bad = build("llama"), 5
    with torch.no_grad():
        live.get_input_embeddings().weight[bad] = torch.nan
    model = fixed(load(live))
    runner, ids = Runner(model), [6 if token == bad else token for token in prompt(20)]
    row = runner.open(ids)
    runner.prefill(row)
    (found,) = runner.forward([row], [Draft.chain([7, bad, 8], "test")])
    assert not found.finite
    for draft in (EMPTY, Draft.chain([7, 8], "test")):
        (found,) = runner.forward([row], [draft])
        assert found.finite
        torch.testing.assert_close(found.logits[0], fresh(live, ids), atol=1e-5, rtol=0)


def test_kept_prefixes_chats_and_banned_ids() -> None:
    live = build("llama", eos_token_id=None)
    live.generation_config.suppress_tokens = [7, 9]
    packed = load(live)

    def answers(model: LoadedModel) -> list[Any]:
        engine = Engine(model, drafter="auto", budget=6)
        found = [engine.generate([*IDS, 9, last], max_new_tokens=30) for last in (4, 5, 4)]
        many = engine.generate([IDS, prompt(9), prompt(30)], max_new_tokens=12)
        assert not {7, 9} & {token for one in found for token in one.tokens}
        return [(r.tokens, r.stats.passes, r.stats.reused_tokens) for r in (*found, *many)]

    assert answers(packed) == answers(fixed(packed))


def test_an_idle_row_gives_its_buffer_to_the_next() -> None:
    """So that the next request uses the graphs of the one before."""
    model = fixed(loaded("llama"))
    engine = Engine(model, drafter="none", max_batch=1)
    for seed in range(4):
        engine.generate(prompt(40, seed=seed), max_new_tokens=4)
        assert len(engine.resources.prefixes) == seed + 1
        (buffer,) = model.graphs.free.values()
        assert buffer.capacity == 256


def test_places_without_a_row_count_as_idle() -> None:
    """A row may get a buffer with places for more."""
    model = fixed(load(build("llama", eos_token_id=None)))
    engine = Engine(model, drafter="none", prefixes=0, memory=20_000_000)
    engine.generate([prompt(20, seed) for seed in range(8)], max_new_tokens=3)
    idle = engine.resources.runner.store.idle_bytes()
    call = Call(engine.resources, engine.prepare({"max_new_tokens": 9}).sequences([prompt(20)]))
    with call:
        for _ in range(4):
            call.step()
        assert engine.resources.runner.store.idle_bytes() == 7 * idle // 8 > 0


def test_idle_buffers_count_and_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "LEAST_SLOTS", 16)
    model = fixed(load(build("llama", eos_token_id=None)))
    engine = Engine(model, drafter="none", prefixes=0, memory=20_000_000)
    engine.generate(prompt(200), max_new_tokens=40)
    idle = sum(buffer.nbytes for buffer in model.graphs.free.values())
    assert engine.resources.reserved == idle / 20_000_000 > 0
    small = Engine(model, drafter="none", prefixes=0, memory=idle)
    small.generate(prompt(9), max_new_tokens=2)
    assert small.resources.reserved < 1


def held(engine: Engine, ids: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Most bytes of rows and idle buffers while prompts are answered, and how many are expected."""
    most, expected, own = 0, 0, static.StaticStore.verify

    def verify(store: static.StaticStore, *given: Any) -> Any:
        nonlocal most, expected
        found = own(store, *given)
        free = sum(buffer.nbytes for buffer in store._graphs.free.values())
        most = max(most, store.held() + free)
        expected = max(expected, need(engine.resources.admitted, engine.resources.runner).rows)
        return found

    monkeypatch.setattr(static.StaticStore, "verify", verify)
    # Passes that take no time: how much of a prompt each reads must not depend on the clock.
    monkeypatch.setattr("draftsmith.engine.scheduler.perf_counter", lambda: 0.0)
    engine.generate(ids, max_new_tokens=8)
    return most, expected


@pytest.mark.parametrize(("name", "rows", "length"), [
    ("llama", 1, 1900), ("llama", 4, 1500), ("llama", 16, 20), ("llama", 3, 250),
    ("mistral", 1, 1500),  # of windowed layers rows count whole, as they drop nothing
])  # fmt: skip
def test_memory_of_rows_is_bounded_closely(
    name: str, rows: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = build(name, eos_token_id=None, max_position_embeddings=4096)
    engine = Engine(fixed(load(live)), drafter="none", prefixes=0, memory=1 << 40)
    most, expected = held(engine, [prompt(length, seed) for seed in range(rows)], monkeypatch)
    assert most <= expected < 4 * most


def test_memory_of_a_draft_model_is_that_of_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing(monkeypatch, "cpu")
    live = build("llama", eos_token_id=None)
    engine = Engine(live, drafter=DraftModel(live, tokens=3, algorithm="standard", copies=False))
    store = engine.drafter.runner.store  # type: ignore[attr-defined]
    assert isinstance(store, static.StaticStore)
    call = Call(engine.resources, engine.prepare({"max_new_tokens": 40}).sequences([prompt(40)]))
    with call:
        for _ in range(8):
            call.step()
        assert 0 < store.held() - store.idle_bytes() <= engine.drafter.bytes_for(80)


def test_metrics_are_read_while_rows_come_and_go() -> None:
    model = fixed(load(build("llama", eos_token_id=None)))
    engine = Engine(model, drafter="none", prefixes=0, memory=1 << 40)
    engine.generate(IDS, max_new_tokens=2)

    class Read:
        """Another thread adds a buffer while this one is read."""

        @property
        def idle_bytes(self) -> int:
            model.graphs.buffers.add(added)
            return 1

    first, added = Read(), Read()
    model.graphs.buffers.add(first)
    assert engine.resources.reserved > 0


@pytest.mark.parametrize("nodes", [31, 62, 63, 79])
def test_the_widest_passes(nodes: int, shapes: list[tuple[int, int, int]]) -> None:
    """Their ancestors take the sign bit of an integer, and a second one."""
    runner, ids = Runner(fixed(loaded("llama"))), prompt(100)
    row = runner.open(ids[:17])
    runner.prefill(row)
    shapes.clear()
    (found,) = runner.forward([row], [Draft.chain(ids[17 : 17 + nodes], "test")])
    assert shapes == [(1, min(w for w in static.WIDTHS if w > nodes), 256)]
    for node in {0, 29, 40, 61, 62, 63, nodes} & {*range(nodes + 1)}:
        expected = fresh(runner.loaded.model, ids[: 17 + node])
        torch.testing.assert_close(found.logits[node], expected, atol=1e-5, rtol=0)


# --- graphs ---------------------------------------------------------------------------------------


def test_graphs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    model = fixed(loaded("llama"))
    made = freeze(monkeypatch, model)
    runner, counts = Runner(model), []
    row = runner.open(prompt(20))
    runner.prefill(row)
    for nodes in (0, 1, 0, 3, 0, 1):
        runner.forward([row], [Draft.chain(prompt(nodes), "test") if nodes else EMPTY])
        runner.commit([row], [()], [[5]])
        counts.append(len(made))
        assert model.graphs.count(runner.store._places[row][0]) <= 2  # type: ignore[attr-defined]
    assert counts == [1, 2, 2, 3, 3, 4], "the least recently used one is dropped"


def test_changed_weights_are_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    live = build("llama", eos_token_id=None)
    model = fixed(load(live))
    made = freeze(monkeypatch, model)
    engine = Engine(model, drafter="none", prefixes=0)
    first = engine.generate(IDS, max_new_tokens=8).tokens
    assert engine.generate(IDS, max_new_tokens=8).tokens == first
    assert len(made) == 1
    other = build("llama", scale=0.3)
    for own, new in zip(live.parameters(), other.parameters(), strict=True):
        own.data = new.data  # at another address
    again = engine.generate(IDS, max_new_tokens=8).tokens
    assert len(made) == 2
    assert again == Engine(live, drafter="none").generate(IDS, max_new_tokens=8).tokens != first


def test_hooks_are_called_and_said_to_exclude_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay runs no Python. Hooks that transformers records outputs with do not count."""
    live = build("llama", eos_token_id=None)
    model = fixed(load(live))
    made = freeze(monkeypatch, model)
    engine, options = Engine(model, drafter="none", prefixes=0), {"max_new_tokens": 8}
    before = engine.generate(IDS, **options).tokens
    calls = list[Any]()

    def louder(_: Any, __: Any, output: Any) -> Any:
        calls.append(output)
        return output * 3

    hook = live.model.layers[0].mlp.register_forward_hook(louder)
    found = engine.generate(IDS, **options)
    assert len(calls) == found.stats.passes
    assert found.tokens == Engine(live, drafter="none").generate(IDS, **options).tokens != before
    assert "hooks" in found.notices[-1]
    hook.remove()
    live(torch.tensor([IDS]), output_hidden_states=True)
    replays = sum(one.replays for one in made)
    again = engine.generate(IDS, **options)
    assert (again.tokens, again.notices) == (before, ())
    assert sum(one.replays for one in made) > replays


def test_memory_runs_out_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle buffers and other graphs are freed; the pass runs, and later ones are captured."""
    packed = load(build("llama", eos_token_id=None))
    model = fixed(packed)
    freeze(monkeypatch, model)
    engine = Engine(model, drafter="none", prefixes=0)
    engine.generate(prompt(20), max_new_tokens=4)
    assert model.graphs.free
    lacks = [graphs.MOST_LACKS - 1]

    class Full(Frozen):
        def __init__(self, *given: Any) -> None:
            if lacks[0]:
                lacks[0] -= 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(*given)

    monkeypatch.setattr(graphs, "Captured", Full)
    monkeypatch.setattr(graphs.Graphs, "_end_capture", lambda _: None)
    found = engine.generate([IDS, prompt(20)], max_new_tokens=20)
    assert not lacks[0]
    expected = Engine(packed, drafter="none").generate([IDS, prompt(20)], max_new_tokens=20)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert model.graphs.captures
    assert not engine.notices
    lacks[0] = graphs.MOST_LACKS
    model.graphs._graphs.clear()
    with pytest.warns(UserWarning, match="out of memory"):
        again = engine.generate([IDS, prompt(20)], max_new_tokens=20)
    assert [one.tokens for one in again] == [one.tokens for one in expected]
    assert not model.graphs.captures


def test_a_pass_without_memory_is_repeated_without_idle_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(fixed(load(build("llama", eos_token_id=None))), drafter="none", prefixes=0)
    expected = engine.generate(IDS, max_new_tokens=8).tokens
    free, own = engine.model.graphs.free, engine.model.forward.compute

    def compute(*given: Any) -> Any:
        if free:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(*given)

    assert free
    monkeypatch.setattr(engine.model.forward, "compute", compute)
    found = engine.generate(IDS, max_new_tokens=8)
    assert (found.tokens, found.notices) == (expected, ())


def test_a_self_test_without_memory_keeps_the_other_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    packed = load(build("llama"))
    monkeypatch.setattr(static.StaticStore, "_fixed", full)
    found = with_store(packed, "static")
    assert found.store == "packed"
    assert "out of memory" in found.reasons[-1]


def test_a_failed_capture_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = load(build("llama", eos_token_id=None))
    model = fixed(packed)
    freeze(monkeypatch, model)
    monkeypatch.setattr(graphs, "Captured", unable)
    engine, options = Engine(model, drafter="auto", budget=8), {"max_new_tokens": 20}
    with pytest.warns(UserWarning, match="cannot be captured .operation not permitted on cpu"):
        found = engine.generate(IDS, **options)
    assert found.tokens == Engine(packed).generate(IDS, drafter="auto", budget=8, **options).tokens
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = engine.generate(prompt(20), **options)
    assert len(again.notices) == 1
    assert "operation not permitted" in again.notices[0]
    assert engine.notices == again.notices


# --- options --------------------------------------------------------------------------------------


def test_store_is_an_option() -> None:
    live = build("llama")
    assert load(live).store == Engine(live).model.store == "packed"
    assert load(live, store="static").store == "static"
    engine = Engine.from_pretrained(live, store="static")
    assert engine.model.store == "static"
    assert [*engine.cost.widths] == [width - 1 for width in static.WIDTHS[1:]], (
        "as passes are padded"
    )
    assert Engine(load(live, store="static")).model.store == "static"
    assert Engine(load(live, store="static"), store="packed").model.store == "packed"
    for call in (load, Engine.from_pretrained):
        with pytest.raises(UnknownName, match="Did you mean 'static'"):
            call(live, store="statik")
    with pytest.raises(OptionError, match="exact=True has a store of its own"):
        Engine(live, store="static", exact=True)


@pytest.mark.parametrize("store", [None, "packed", "static"])
def test_graphs_are_the_default_where_they_can_be_captured(
    store: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = build("llama")
    capturing(monkeypatch, "cpu")
    assert Engine(live, store=store).model.store == (store or "static")
    monkeypatch.setattr(graphs, "Captured", unable)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = Engine(live, store=store)
    assert found.model.store == (store or "packed")
    assert len(seen) == len(found.notices) == (store != "packed")
    assert all("operation not permitted" in one for one in found.notices)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.filterwarnings("ignore::draftsmith.integrations.transformers.DraftingNotice")
def test_a_copy_of_an_accelerated_model_has_graphs_of_its_own(
    duplicate: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing(monkeypatch, "cpu")
    model = build("llama", eos_token_id=None)
    ids = torch.tensor([IDS])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **options)
    accelerate(model)
    for _ in range(2):  # before and after a call
        double = duplicate(model)
        assert torch.equal(double.generate(ids, **options), expected)
        with torch.no_grad():
            double.lm_head.weight.copy_(double.lm_head.weight.roll(1, 0))
        assert not torch.equal(double.generate(ids, **options), expected)
        assert torch.equal(model.generate(ids, **options), expected)


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONGROPE = {"original_max_position_embeddings": 32, "rope_scaling": {"type": "longrope"} | FACTORS}


@pytest.mark.parametrize(("make", "reason"), [
    (lambda: build("falcon"), "a cache of its own"),
    (lambda: build("mamba2"), "a cache of its own"),
    (lambda: build("phi3", **LONGROPE), "rotary angles"),
    (lambda: "edit-1m", "prepack=False"),
])  # fmt: skip
def test_other_models_keep_their_store_and_say_why(make: Callable[[], Any], reason: str) -> None:
    engine = Engine(make(), store="static", drafter="none")
    assert engine.model.store == "packed"
    assert engine.notices[-1].startswith("passes of fixed shapes: it")
    assert reason in engine.notices[-1]
    assert engine.generate(IDS, max_new_tokens=3).tokens


def test_a_model_that_disagrees_keeps_its_store() -> None:
    """Here one whose position ids count slots in such a pass."""
    live = build("llama")

    def shift(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if any(isinstance(value, static.StaticPass) for value in kwargs.values()):
            width = kwargs["position_ids"].shape[1]
            kwargs |= {"position_ids": torch.arange(width)[None]}
        return args, kwargs

    live.model.register_forward_pre_hook(shift, with_kwargs=True)
    found = load(live, store="static")
    assert found.capabilities.packed
    assert found.store == "packed"
    assert found.capabilities.reasons[-1].startswith("passes of fixed shapes: logits differ")
