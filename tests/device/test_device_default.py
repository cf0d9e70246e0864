"""D8: a GPU that is there is used by default and named, and weights go straight to it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pretended
import pytest
import torch
import transformers
from both import GREEDY, IDS, Both, default_device, same

import tiny
from command import call, fails
from draftsmith import accelerate
from draftsmith.cli.doctor import machine
from draftsmith.engine.engine import Engine
from draftsmith.errors import LoadError, OptionError
from draftsmith.model.load import load


def test_d8_a_gpu_that_is_there_is_used(there: str, folder: Path, engines: Both) -> None:
    engine = Engine.from_pretrained(folder)
    assert engine.model.device == torch.device(there)
    options = {"drafter": "auto", "max_new_tokens": 12, "budget": 6, **GREEDY}
    same(engines.expected(IDS, options), engine.generate(IDS, **options))
    assert load(folder).device == torch.device(there)


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("options", [{"device": "cpu"}, {"device_map": "cpu"}, {"exact": True}])
def test_d8_the_cpu_is_used_where_it_is_asked_for(
    folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`exact` asks for it: no other device can be."""
    monkeypatch.setattr("draftsmith.engine.engine.exactly", lambda model: model)  # takes seconds
    assert Engine.from_pretrained(folder, **options).model.device.type == "cpu"


def test_d8_without_a_gpu_the_cpu_is_used(device: str, folder: Path) -> None:
    assert load(folder).device.type == "cpu"
    assert load(folder, device=device).device == torch.device(device)


def test_d8_the_callers_default_device_comes_first(there: str, folder: Path) -> None:
    with default_device("pretend:1"):
        assert load(folder).device == torch.device("pretend:1")
        assert load(folder, device=there).device == torch.device(there)
        assert load(folder, device="cpu").device.type == "cpu"


@pytest.mark.slow
def test_d8_live_models_and_draft_models_stay_where_they_are(there: str, folder: Path) -> None:
    model = tiny.model()
    with accelerate(model):
        assert model.device.type == "cpu"
    assert load(model).device.type == "cpu"
    for place in ("cpu", there, "pretend:1"):
        engine = Engine.from_pretrained(
            folder, device=place, drafter=f"draft_model(model={str(folder)!r}, tokens=2)"
        )
        drafter: Any = engine.drafter
        assert drafter.runner.loaded.device == torch.device(place)


@pytest.mark.slow
def test_d8_weights_go_straight_to_the_device(there: str, folder: Path) -> None:
    """While the first one is copied there, the host has none of them."""

    def on_host() -> int:
        found = (one for one in gc.get_objects() if type(one) is torch.nn.Parameter)
        return sum(one.device.type == "cpu" for one in found)

    gc.collect()
    before, during = on_host(), list[int]()

    def look(why: str) -> None:
        if why == "copy from the host" and len(during) < 3:  # the weights come first
            during.append(on_host())

    with pretended.counted(look):
        loaded = load(folder)
    assert {weight.device for weight in loaded.model.parameters()} == {torch.device(there)}
    assert during
    assert max(during) <= before


@pytest.mark.slow
def test_d8_commands_name_it_in_their_first_line(there: str, folder: Path) -> None:
    asked = ["run", "hello", "-m", folder, "--max-new-tokens", 4]
    ran = call(*asked)
    assert ran.exit_code == 0, ran.output
    named = f"note: running on {there} (Pretended accelerator 0); --device cpu runs on the CPU"
    assert ran.stderr.splitlines()[0] == named
    for place in ("cpu", there):  # the caller knows
        assert "running on" not in call(*asked, "--device", place).stderr
    told = machine(load(folder))  # as `doctor` shows it
    assert (told["device"], told["name"]) == (there, f"{there} (Pretended accelerator 0)")
    assert told["memory_bytes"] == 1 << 34


def test_d8_a_gpu_that_cannot_be_used_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs elsewhere without a word."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    with pytest.raises(OptionError, match=r"device='xpu' cannot be used here .*use device='cpu'"):
        load(folder)
    assert load(folder, device="cpu").device.type == "cpu"
    assert "use --device='cpu'" in fails(2, "run", "hello", "-m", folder)


def test_d8_a_model_that_does_not_fit_is_reported(
    there: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(LoadError, match=f"does not fit on {there}.*device='cpu'"):
        load(folder, device=there)


def test_the_first_pass_of_a_width_is_no_price(device: str, folder: Path) -> None:
    """The device loads its kernels for it. The first token comes with the prompt."""
    options = {"drafter": "none", "max_new_tokens": 2, **GREEDY}
    for place, known in (("cpu", [True, True]), (device, [False, True])):
        engine = Engine.from_pretrained(folder, device=place)
        for expected in known:
            engine.generate(IDS, **options)
            assert engine.cost.at(1).knows_plain == expected


def test_d8_memory_is_the_devices_own(there: str, folder: Path) -> None:
    """Not the host's: what a request may hold follows from it."""
    engine = Engine.from_pretrained(folder)
    assert engine.model.device == torch.device(there)
    assert engine.resources.memory == int(0.75 * (1 << 33))
