"""Passes of fixed shapes on a device: nothing in them waits or copies from the host.

On a real one (see `conftest.py`) they are CUDA graphs.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pretended
import pytest
import torch
from both import CUT, GREEDY, IDS, MANY, REAL, SAMPLED, Both, mapped, named, on, same, strictly
from test_waits import ARMS, LONG, PROMPTS, SHORT, engine, per_pass

import tiny
from architectures import TREES, build, prompt
from draftsmith.engine.engine import Engine
from draftsmith.model import graphs
from draftsmith.model.probe import with_store
from tiers import slow_after


def fixed(engine: Engine) -> Engine:
    found = Engine(engine.model, drafter="none", store="static")
    assert found.model.store == "static", found.notices
    return found


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kernels of each pass, which is computed as while a stream is captured."""
    kernels: list[int] = []
    own = graphs.Graphs.run

    def run(self: Any, buffer: Any, shape: graphs.Shape, body: Any) -> Any:
        def counted() -> Any:
            with pretended.capturing(), pretended.counted() as seen:
                found = body()
            kernels.append(seen.kernels.total())
            return found

        return own(self, buffer, shape, counted)

    monkeypatch.setattr(graphs.Graphs, "run", run)
    return kernels


WAITING = {"deepseek_v3", "gemma3n_text", "mixtral"} if version("transformers") < "5" else set()
"""Models that transformers cannot capture: their experts wait, or they copy from the host."""


def built(name: str) -> Any:
    model = build(name, eos_token_id=None)
    if hasattr(model, "set_experts_implementation"):
        # A CPU's kernel of "grouped_mm" reads numbers of tokens on the host; CUDA's does not.
        model.set_experts_implementation("batched_mm")
    return model


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("name", sorted(TREES))
def test_nothing_waits_while_a_pass_is_captured(
    name: str, device: str, captured: list[int]
) -> None:
    if name in WAITING:
        assert "is capturing" in Engine(on(device, built(name)), store="static").notices[-1]
        return
    found = fixed(Engine(on(device, built(name))))
    for sampling in (GREEDY, SAMPLED):
        captured.clear()
        answer = found.generate(IDS, drafter="auto", budget=8, max_new_tokens=20, **sampling)
        assert not answer.notices
        prompts = 1 if sampling is GREEDY else 0  # the first pass of a prompt has no fixed shape
        assert len(captured) == answer.stats.passes - prompts


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "mixtral"])
def test_every_architecture(name: str, device: str) -> None:
    """The CPU's tokens; on a real device, by graphs."""
    model = built(name)
    cpu, found = Engine(model), fixed(Engine(on(device, model)))
    for drafter in ("none", "auto"):
        options = {"drafter": drafter, "max_new_tokens": 40, "budget": 8}
        same(cpu.generate(IDS, **options), found.generate(IDS, **options))
    if name in WAITING and REAL:
        assert "cannot be captured" in found.notices[-1]
        return
    assert not found.notices
    assert found.model.graphs.captures == REAL.startswith("cuda")


@pytest.mark.skipif(not REAL.startswith("cuda"), reason="needs DRAFTSMITH_TEST_DEVICE=cuda:0")
def test_after_a_failed_capture_everything_goes_on(device: str) -> None:
    model = built("llama")

    def wait(_: Any, args: Any) -> None:
        assert float(args[0].sum()) == float(args[0].sum())

    there = on(device, model)
    there.model.layers[1].mlp.register_forward_pre_hook(wait)
    with pytest.warns(UserWarning, match="cannot be captured"):
        found = Engine(there, store="static")
    options = {"drafter": "auto", "max_new_tokens": 14, "budget": 8}
    same(Engine(model).generate(IDS, **options), found.generate(IDS, **options))
    found.generate(IDS, temperature=0.8, max_new_tokens=8)
    torch.rand(3, device=device)
    assert "cannot be captured" in found.notices[-1]


@pytest.mark.parametrize(
    "drafter", slow_after(1, ["auto", "none", "pld_plus", "spectra(N=3, W=4, G=4)", "sdsat(k=3)"])
)
def test_every_drafter(engines: Both, folder: Path, drafter: str) -> None:
    both = Both(engines.cpu, fixed(engines.device), engines._known)
    options = {"drafter": named(drafter, folder), "max_new_tokens": 14, "budget": 8}
    with strictly():
        both.generate(IDS, **options, **GREEDY)
        both.generate(IDS, **options, **SAMPLED)
        both.generate(MANY, **options, **GREEDY)
        both.generate(MANY, **options, **CUT)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("arm", slow_after(1, reversed(ARMS)))
def test_a_greedy_pass_waits_once(device: str, arm: str, rows: int) -> None:
    ids = IDS if rows == 1 else PROMPTS
    passes, waits = per_pass(fixed(engine(device, 2)), ids, **ARMS[arm])
    assert {line.split(":")[0] for _, line in waits} == {"model/static.py"}
    assert waits.total() == passes


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("arm", ARMS)
def test_a_sampled_pass_waits_once_more(device: str, arm: str, rows: int) -> None:
    """For the tokens of all rows, which are drawn after the graph."""
    same_length = [prompt(20, i) for i in range(rows)]
    passes, waits = per_pass(fixed(engine(device, 2)), same_length, **ARMS[arm], **CUT)
    files = [line.split(":")[0] for _, line in waits.elements()]
    assert files.count("model/static.py") == files.count("core/readout.py")
    assert set(files) == {"model/static.py", "core/readout.py"}
    assert waits.total() >= 2 * passes


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("rows", slow_after(1, [1, 8]))
@pytest.mark.parametrize("arm", slow_after(1, ["a drafted tree", "plain"]))
def test_kernels_of_a_pass_are_bounded(
    device: str, arm: str, rows: int, captured: list[int]
) -> None:
    """At most 60 + 38 L for any number of rows, all of them in the graph."""
    ids = IDS if rows == 1 else PROMPTS
    for layers in (2, 4):
        found = fixed(engine(device, layers))
        found.generate(ids, max_new_tokens=SHORT, **ARMS[arm])
        captured.clear()
        found.generate(ids, max_new_tokens=LONG, **ARMS[arm])
        assert max(captured) <= 60 + 38 * layers, (layers, max(captured))


def test_a_device_map_keeps_its_store(device: str, second: str) -> None:
    model = mapped(build("llama"), device, second)
    found = with_store(Engine(model).model, "static")
    assert found.store == "packed"
    assert found.reasons[-1].endswith("its weights are on several devices")


@pytest.mark.skipif(REAL not in ("", "cuda:0"), reason="only CUDA has graphs")
def test_graphs_are_the_default(graphed: str, folder: Path) -> None:
    cpu = Engine.from_pretrained(folder, device="cpu")
    for there in (
        Engine.from_pretrained(folder, device=graphed),
        Engine.from_pretrained(on(graphed, tiny.model())),
    ):
        assert there.model.store == "static", there.notices
        assert there.model.graphs.captures
        for options in (GREEDY, CUT):
            for ids in (IDS, MANY):
                asked = {"max_new_tokens": 20, "budget": 8, **options}
                same(cpu.generate(ids, **asked), there.generate(ids, **asked))
