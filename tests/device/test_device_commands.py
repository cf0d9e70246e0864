"""Commands on a device like MPS: late copies, no float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from benchmarks import gpu, shared
from pretended import like_mps

import tiny
from command import call
from tiers import slow_after


@pytest.fixture
def files(folder: Path, tmp_path: Path, kept: Path) -> dict[str, Path]:  # noqa: ARG001
    """A model, prompts, texts, a place for results, and a cache folder of the test's own."""
    prompts, texts, others = (tmp_path / n for n in ("prompts.jsonl", "texts.txt", "others.txt"))
    asks = ["the quick brown fox jumps over the quick brown", "hello world hello world"]
    prompts.write_text("".join(json.dumps({"prompt": ask}) + "\n" for ask in asks))
    texts.write_text("\n".join(tiny.TEXT * 4))
    others.write_text("brown dog return hello tokenizer " * 40)
    out = tmp_path / "out"
    return {"model": folder, "prompts": prompts, "texts": texts, "others": others, "out": out}


COMMANDS = {
    "run": "run hello -m {model} --max-new-tokens 8",
    "doctor": "doctor {model}",
    "demo": "demo -m {model} --max-new-tokens 8",
    "corpus build": "corpus build -m {model} --texts {texts} -o {out} --piece 16 --keep 9",
    "tune pld-plus": "tune pld-plus {model} {prompts} --max-new-tokens 12",
    "tune copyspec": "tune copyspec {model} {prompts} --max-new-tokens 12",
    "tune auto": "tune auto {model}",
    "bench cost": "bench cost {model} -o {out} --positions 1 --positions 4 --contexts 16",
    "bench run": "bench run {prompts} -m {model} -a none -a auto --max-new-tokens 8 -o {out}",
}


@pytest.mark.parametrize("command", slow_after(4, COMMANDS))
def test_a_command(files: dict[str, Path], device: str, command: str) -> None:
    with like_mps():
        ran = call(*COMMANDS[command].format(**files).split(), "--device", device)
    assert ran.exit_code == 0, ran.output
    assert "fail" not in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "bench run"])
def test_a_command_where_passes_are_graphs(
    files: dict[str, Path], graphed: str, command: str
) -> None:
    ran = call(*COMMANDS[command].format(**files).split(), "--device", graphed)
    assert ran.exit_code == 0, ran.output
    assert "graph" not in ran.stderr


@pytest.mark.slow
def test_d4_training(files: dict[str, Path], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Mac, where accelerate finds the device by itself."""

    class There(accelerate.Accelerator):
        @property
        def device(self) -> Any:
            return torch.device("cpu" if self._cpu else device)

        def __init__(self, cpu: bool, **options: Any) -> None:
            self._cpu = cpu
            super().__init__(cpu=True, **options)

    monkeypatch.setattr(accelerate, "Accelerator", There)
    command = "train sdsat -m {model} --texts {texts} --held-out {others} --infill 0 --add-token"
    options = ["--length", "28", "--rows", "2", "--steps", "2", "--json", "-o"]
    found = []
    for place, more in (("cpu", ["--cpu"]), ("there", [])):
        where = files["out"] / place
        with like_mps():
            ran = call(*command.format(**files).split(), *options, where, *more)
        assert ran.exit_code == 0, ran.output
        found.append(json.loads(ran.stdout))
    for name in ("before", "after"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-2)  # bfloat16


@pytest.mark.slow
def test_the_benchmark_of_a_device_runs(there: str, tmp_path: Path) -> None:
    words = ["--quick", "--threads", "1", "--widths", "1", "4", "-o", str(tmp_path)]
    assert not shared.run(gpu.parser(), gpu.measure, words)
    found = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    for line in (
        f"| device | {there.split(':')[0]} (Pretended accelerator 0) |",
        "| toy, float32, packed | 8 of 8 | 12 of 12 | none |",
        "| toy, float32, static | 12 of 12 | 16 of 16 | none |",
        "## toy, bfloat16: passes after 256 tokens", "| packed | 1 | 4 |", "| static | 2 | 4 |",
        "## toy: 2 of 2 answers", "| `auto` |", "| `auto static` |", "| `hf:static` |",
    ):  # fmt: skip
        assert line in found
    before = (tmp_path / "gpu.jsonl").read_bytes()
    assert not shared.run(gpu.parser(), gpu.measure, words)  # nothing is left to do
    assert (tmp_path / "gpu.jsonl").read_bytes() == before
