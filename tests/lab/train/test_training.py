"""Whole trainings of a tiny model: what they write, and that stopping them changes nothing."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import tiny
from draftsmith.errors import (
    LoadError,
    OptionError,
    TrainingError,
    UnsupportedError,
    WriteError,
)
from draftsmith.lab.train import curves
from draftsmith.lab.train import run as running
from draftsmith.lab.train.curves import StepLosses
from draftsmith.lab.train.recipe import Options, Recipe, Texts
from draftsmith.lab.train.run import Run
from draftsmith.lab.train.sdsat import train
from draftsmith.lab.train.trainable import open_trainable
from draftsmith.model.adaptive import AdaptiveTokens

RECIPE = Recipe(
    length=24, rows=4, rows_per_pass=4, steps=8, L=3, infill=0, bfloat16=False,
    learning_rate=1e-3, final_learning_rate=2e-4,
)  # fmt: skip
OPTIONS = Options(add_token=True, cpu=True, save_every=4)


DIES = """
import glob, os, signal, sys

checkpoints = lambda: set(glob.glob({out!r} + "/training/step-*"))
old = checkpoints()

def trace(frame, event, arg, left=[{lines}], began=[]):
    if "/draftsmith/lab/train/" in frame.f_code.co_filename:
        if not began and checkpoints() - old:
            began.append(True)
        left[0] -= len(began)
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

sys.settrace(trace)
"""
"""Kills a training after its first new checkpoint and so many further lines of `lab.train`."""


class Killed(BaseException):
    """Nobody catches it, as nobody catches SIGKILL."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings, and two rows that no token has."""
    folder = tmp_path_factory.mktemp("tied")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny.tokenizer()) + 2, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    folder = tmp_path_factory.mktemp("texts")
    rng = random.Random(7)
    words = " ".join(tiny.TEXT).split()
    for name, count in (("code.py", 900), ("held_out.txt", 200)):
        (folder / name).write_text(" ".join(rng.choices(words, k=count)))
    return Texts(paths=[folder / "code.py"], held_out=[folder / "held_out.txt"])


@pytest.fixture(scope="module")
def unbroken(model: Path, texts: Texts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole training of a user whose group may read new files, and no others."""
    folder, before = tmp_path_factory.mktemp("unbroken") / "out", os.umask(0o027)
    try:
        train(str(model), RECIPE, texts, folder, OPTIONS)
    finally:
        os.umask(before)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-6)


def killer(step: int) -> Any:
    def follow(row: StepLosses) -> None:
        if row.step == step:
            raise Killed

    return follow


def test_a_killed_training_ends_as_an_unbroken_one(
    model: Path, texts: Texts, unbroken: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for step in (2, 6):  # before and after the first checkpoint
        with pytest.raises(Killed):
            train(str(model), RECIPE, texts, out, OPTIONS, follow=killer(step))
        assert not (out / "config.json").exists()
    train(str(model), RECIPE, texts, out, OPTIONS)
    assert_same(out, unbroken)
    ours, theirs = (curves.read(folder / "training") for folder in (out, unbroken))
    assert [replace(row, seconds=0) for row in ours] == [replace(r, seconds=0) for r in theirs]


def command(model: Path, texts: Texts, out: Path) -> list[str]:
    """`RECIPE` and `OPTIONS` as a user types them, with a checkpoint after every step."""
    return [
        *("train", "sdsat", "-m", str(model), "-o", str(out)),
        *("--texts", str(texts.paths[0]), "--held-out", str(texts.held_out[0])),
        *("--length", "24", "--rows", "4", "--rows-per-pass", "4", "--steps", "8", "--L", "3"),
        *("--infill", "0", "--float32", "--learning-rate", "1e-3"),
        *("--final-learning-rate", "2e-4", "--add-token", "--cpu", "--save-every", "1"),
        *("--threads", "1"),
    ]


@pytest.mark.slow
def test_sigkill_at_random_moments(
    model: Path, texts: Texts, unbroken: Path, tmp_path: Path
) -> None:
    """The command itself, killed anywhere: in a step, or while a checkpoint is written."""
    out = tmp_path / "out"
    code = f"from draftsmith.cli import main; main({command(model, texts, out)!r})"
    rng = random.Random(7)
    for _ in range(2):
        dies = DIES.format(out=str(out), lines=rng.randrange(1_500))  # a step takes about 720
        killed = subprocess.run([sys.executable, "-c", dies + code])
        assert killed.returncode == -signal.SIGKILL
        assert list(out.glob("training/step-*")), "a checkpoint was lost"
        assert not (out / "config.json").exists(), "too late to kill it"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert_same(out, unbroken)


@pytest.mark.slow
def test_two_processes_do_what_one_does(
    model: Path, texts: Texts, unbroken: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    script = tmp_path / "script.py"
    script.write_text(f"from draftsmith.cli import main; main({command(model, texts, out)!r})")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    done = subprocess.run([*launch, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out loss") == 1, "only one of them reports"
    ours, theirs = weights(out), weights(unbroken)
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-4, atol=1e-5)


def test_what_a_training_writes(unbroken: Path, model: Path) -> None:
    adaptive = AdaptiveTokens.load(str(unbroken))
    assert adaptive is not None
    assert (adaptive.tokens, adaptive.L, adaptive.objective) == ((329,), 3, "improved")
    assert adaptive.recipe == asdict(RECIPE)
    trained = AutoModelForCausalLM.from_pretrained(unbroken)
    assert trained.generation_config.suppress_tokens == [329]
    assert trained.get_input_embeddings().weight.shape[0] == 330
    assert AutoTokenizer.from_pretrained(unbroken).convert_ids_to_tokens(329) == "<|adaptive_0|>"
    inside = {path.name for path in (unbroken / "training").iterdir()}
    assert inside == {"log.csv", "losses.png", "run.json", "measured.json"}
    assert (unbroken / "training" / "losses.png").read_bytes().startswith(b"\x89PNG")
    measured = json.loads((unbroken / "training" / "measured.json").read_text())
    assert measured["before"] != measured["after"]
    assert len(measured["depths"]["accuracy"]) == 12  # half of a sequence
    moved = [
        name
        for name, weight in weights(unbroken).items()
        if "embed" not in name and not torch.equal(weight, weights(model).get(name, weight))
    ]
    assert moved
    files = [path for path in unbroken.iterdir() if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}
    # Earlier transformers know neither these names of tokenizer classes nor `rope_parameters`.
    settings = json.loads((unbroken / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not isinstance(settings.get("extra_special_tokens"), list)
    config = json.loads((unbroken / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == (10_000.0, None)


@pytest.mark.slow
def test_accumulating_gradients_changes_nothing(
    model: Path, texts: Texts, unbroken: Path, tmp_path: Path
) -> None:
    train(str(model), replace(RECIPE, rows_per_pass=1), texts, tmp_path / "out", OPTIONS)
    ours, theirs = weights(tmp_path / "out"), weights(unbroken)
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 4])
def test_tied_embeddings_stay_tied(tied: Path, texts: Texts, tmp_path: Path, lora: int) -> None:
    """The shared table learns the adaptive row; nothing asks for it as an answer."""
    recipe = replace(RECIPE, lora=lora, diverse=True, L=2, steps=3)
    trained = train(str(tied), recipe, texts, tmp_path / "out", Options(cpu=True))
    rows = len(tiny.tokenizer())
    assert trained.tokens == (rows, rows + 1)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert after.config.tie_word_embeddings
    assert after.lm_head.weight is after.model.embed_tokens.weight
    assert after.dtype == torch.bfloat16
    before = AutoModelForCausalLM.from_pretrained(tied, dtype="auto")
    table, old = after.model.embed_tokens.weight, before.model.embed_tokens.weight
    assert not torch.equal(table[rows], table[rows + 1])
    if lora:
        assert torch.equal(table[:rows], old[:rows]), "LoRA leaves all other rows alone"
        linear, was = (m.model.layers[0].mlp.up_proj.weight for m in (after, before))
        assert not torch.equal(linear, was), "adapters are merged"
        assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_a_dtype_that_the_configuration_leaves_out_is_kept(tied: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tied, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    assert (config.pop("dtype", None) or config.pop("torch_dtype")) == "bfloat16"
    (copy / "config.json").write_text(json.dumps(config))
    found = open_trainable(str(copy), 1)
    assert (found.dtype, found.model.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("native", [True, False])
def test_half_precision_is_computed_where_the_processor_does(
    model: Path, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr("draftsmith.lab.train.sdsat.computes_in", lambda *_: native)
    seen = set[torch.dtype]()
    forward = LlamaForCausalLM.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        seen.add(output.logits.dtype)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", watched)
    recipe = replace(RECIPE, steps=1, bfloat16=True)
    train(str(model), recipe, texts, tmp_path / "out", OPTIONS)
    assert seen == {torch.bfloat16 if native else torch.float32}


@pytest.mark.slow
def test_plain_fine_tuning_teaches_no_tokens(model: Path, texts: Texts, tmp_path: Path) -> None:
    recipe = replace(RECIPE, objective="plain", steps=2)
    trained = train(str(model), recipe, texts, tmp_path / "out", OPTIONS)
    assert trained.tokens == ()
    assert trained.depths is None
    assert AdaptiveTokens.load(str(tmp_path / "out")) is None
    assert weights(tmp_path / "out")["model.embed_tokens.weight"].shape[0] == 329


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("tokens", "says"),
    [((7,), "contain token 7"), ((2,), "has a meaning"), ((999,), "there is no token 999")],
)
def test_a_token_that_is_not_free(
    model: Path, texts: Texts, tmp_path: Path, tokens: tuple[int, ...], says: str
) -> None:
    common = tiny.tokenizer()(" the")["input_ids"][-1]
    tokens = (common,) if tokens == (7,) else tokens
    says = f"contain token {common}" if "contain" in says else says
    with pytest.raises(OptionError, match=says):
        train(str(model), RECIPE, texts, tmp_path / "out", Options(tokens=tokens, cpu=True))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "settings", "says"),
    [
        ("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}},
         r"quantized \(gptq\) and cannot be trained"),
        ("generation_config.json", {"do_sample": False, "temperature": 0.5},
         r"generation_config of .* is invalid"),
    ],
)  # fmt: skip
def test_models_that_could_not_be_trained_or_saved(
    model: Path, texts: Texts, tmp_path: Path, file: str, settings: dict[str, Any], says: str
) -> None:
    source = shutil.copytree(model, tmp_path / "odd")
    known = json.loads((source / file).read_text()) if (source / file).exists() else {}
    (source / file).write_text(json.dumps(known | settings))
    with pytest.raises((OptionError, UnsupportedError), match=says):
        train(str(source), RECIPE, texts, tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out").exists()


def test_a_gguf_file_is_not_trained(texts: Texts, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="is a GGUF file, which cannot be trained"):
        train(str(tmp_path / "model.gguf"), RECIPE, texts, tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out").exists()


def test_embeddings_that_are_no_plain_table(
    model: Path, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Packed(torch.nn.Module):
        """Rows in four bits, say."""

    monkeypatch.setattr(LlamaForCausalLM, "get_input_embeddings", lambda _: Packed())
    with pytest.raises(UnsupportedError, match=r"embeddings .* are Packed"):
        train(str(model), RECIPE, texts, tmp_path / "out", OPTIONS)


@pytest.mark.slow
def test_a_full_disk_keeps_what_there_was(model: Path, texts: Texts, tmp_path: Path) -> None:
    """A limit on the size of files stands in for it: the write itself fails."""
    out = tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def follow(row: StepLosses) -> None:
        if row.step == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))

    try:
        with pytest.raises(WriteError, match=r"cannot be written .* give the same command again"):
            train(str(model), RECIPE, texts, out, OPTIONS, follow=follow)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (out / "training").glob("step-*")] == ["step-000004"]


@pytest.mark.slow
def test_a_full_disk_while_the_model_is_written(
    model: Path, texts: Texts, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        full = OSError(28, "No space left on device")
        patch.setattr(AdaptiveTokens, "save", lambda *_: (_ for _ in ()).throw(full))
        with pytest.raises(WriteError, match="No space left on device"):
            train(str(model), RECIPE, texts, out, OPTIONS)
    assert {path.name for path in out.iterdir()} == {"training"}
    assert not (out / "training" / "model.new").exists()
    train(str(model), RECIPE, texts, out, OPTIONS)
    assert_same(out, unbroken)


def test_checkpoints_that_are_not_gone_on_from(
    model: Path, tied: Path, texts: Texts, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(Killed):
        train(str(model), RECIPE, texts, out, OPTIONS, follow=killer(5))
    there = snapshot(out)
    other = replace(RECIPE, L=2)
    with pytest.raises(OptionError, match=r"another training \(L: 3, now 2\)"):
        train(str(model), other, texts, out, OPTIONS)
    with pytest.raises(OptionError, match=r"another training .*weights"):
        train(str(tied), RECIPE, texts, out, OPTIONS)
    more = Texts(paths=[*texts.paths, *texts.held_out])
    with pytest.raises(OptionError, match=r"another training .*text"):
        train(str(model), RECIPE, more, out, OPTIONS)
    with pytest.raises(OptionError, match=r"another training \(held-out text"):
        train(str(model), RECIPE, Texts(paths=texts.paths), out, OPTIONS)
    assert snapshot(out) == there
    os.truncate(out / "training" / "step-000004" / "state.safetensors", 1000)
    with pytest.raises(LoadError, match="step-000004 cannot be read"):
        train(str(model), RECIPE, texts, out, OPTIONS)


def test_scaled_positions_keep_both_names(model: Path, texts: Texts, tmp_path: Path) -> None:
    source = tmp_path / "scaled"
    shutil.copytree(model, source)
    config = json.loads((source / "config.json").read_text())
    scaling = {"rope_type": "linear", "factor": 2.0}
    config.pop("rope_parameters", None)
    config |= {"rope_theta": 5000.0, "rope_scaling": scaling}  # as transformers 4 writes it
    (source / "config.json").write_text(json.dumps(config))
    train(str(source), replace(RECIPE, steps=1), texts, tmp_path / "out", OPTIONS)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["rope_theta"], written["rope_scaling"]) == (5000.0, scaling)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    again = getattr(loaded, "rope_parameters", None) or loaded.rope_scaling
    assert {**again, **scaling} == again


def test_a_diverging_training_stops(model: Path, texts: Texts, tmp_path: Path) -> None:
    wild = replace(RECIPE, learning_rate=1e30, warmup=0.0)
    with pytest.raises(TrainingError, match=r"the loss of step \d+ is (nan|inf): .* diverged"):
        train(str(model), wild, texts, tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_training_that_could_not_store_its_settings_is_begun_again(
    model: Path, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise WriteError("run.json cannot be written") from OSError(28, "No space left on device")

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(running, "write_text", full)
        with pytest.raises(WriteError, match=r"run.json cannot be written \(No space left on dev"):
            train(str(model), RECIPE, texts, out, OPTIONS)
    assert train(str(model), replace(RECIPE, steps=1), texts, out, OPTIONS).steps == 1


def test_a_second_training_of_a_folder_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then it finds the model."""
    run, ended, began = Run(tmp_path / "out"), list[str](), threading.Event()
    own = running.lock

    def locking(file: Any) -> bool:
        began.set()
        return own(file)

    def second() -> None:
        with pytest.raises(OptionError, match="already holds a model"), run.alone():
            ended.append("ran")
        ended.append("refused")

    thread = threading.Thread(target=second)
    with run.alone():
        monkeypatch.setattr(running, "lock", locking)
        thread.start()
        began.wait()
        thread.join(0.2)
        assert thread.is_alive()
        (run.folder / "config.json").write_text("{}")
    thread.join()
    assert ended == ["refused"]


def test_a_checkpoint_stays_if_the_one_before_cannot_be_deleted(
    model: Path, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = running.shutil.rmtree

    def refuses(path: Path, **how: Any) -> None:
        if path.name == "step-000004":
            raise PermissionError(13, "Permission denied")
        own(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(running.shutil, "rmtree", refuses)
        with pytest.raises(WriteError, match="Permission denied"):
            train(str(model), RECIPE, texts, tmp_path / "out", OPTIONS)
    kept = {path.parent.name for path in (tmp_path / "out" / "training").glob("step-*/state.json")}
    assert "step-000008" in kept


def test_folders_of_a_model_are_moved_over_what_a_killed_training_left(tmp_path: Path) -> None:
    """A tokenizer with several chat templates has them in a folder."""
    run = Run(tmp_path / "out")

    def save(folder: Path) -> None:
        (folder / "templates").mkdir()
        (folder / "templates" / "a.jinja").write_text("new")
        (folder / "config.json").write_text("{}")

    with run.alone():
        (run.folder / "templates").mkdir()
        (run.folder / "templates" / "a.jinja").write_text("old")
        run.finish(save, {})
    assert (run.folder / "templates" / "a.jinja").read_text() == "new"


def test_nothing_is_overwritten(model: Path, texts: Texts, unbroken: Path, tmp_path: Path) -> None:
    there = snapshot(unbroken)
    with pytest.raises(OptionError, match="already holds a model"):
        train(str(model), RECIPE, texts, unbroken, OPTIONS)
    assert snapshot(unbroken) == there
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OptionError, match=r"holds something else \(e.g. notes.txt\)"):
        train(str(model), RECIPE, texts, tmp_path, OPTIONS)
    with pytest.raises(OptionError, match="is a file"):
        train(str(model), RECIPE, texts, tmp_path / "notes.txt", OPTIONS)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 2}', '{"format": 1, "tokens": [1, 2], "L": 3, "objective": ""}']
)
def test_a_damaged_file_of_adaptive_tokens(tmp_path: Path, text: str) -> None:
    (tmp_path / "sdsat.json").write_text(text)
    with pytest.raises(LoadError, match="has no valid adaptive tokens"):
        AdaptiveTokens.load(str(tmp_path))
