"""GGUF files: the same weights as gguf dequantizes, kept once and whole, or refused in words."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tests import gguf_files, tiny
from transformers import AutoModelForCausalLM

from draftsmith import Engine, builtin
from draftsmith.errors import LoadError, WriteError
from draftsmith.model import gguf as ours
from draftsmith.model.gguf_file import read_file
from draftsmith.model.load import load, read_tokenizer

WIDTHS = {Kind.Q4_1: 64, Kind.Q8_0: 64, Kind.F16: 64, Kind.Q4_K: 256}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    gguf_files.write(path, gguf_files.model(), Kind.Q8_0)
    return path


@pytest.fixture(autouse=True)
def cache(kept: Path) -> Path:
    return kept / "gguf"


def nothing_in(cache: Path) -> bool:
    return not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize("kind", WIDTHS, ids=lambda kind: kind.name)
def test_weights_are_what_gguf_dequantizes(kind: Kind, tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "m.gguf"
    expected = gguf_files.write(path, gguf_files.model(WIDTHS[kind]), kind)
    loaded = load(path, dtype="float32")
    state = loaded.model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    assert [p.name[:2] for p in cache.iterdir()] == ["m-"]


def test_answers_tokens_and_template_are_those_of_the_file(file: Path) -> None:
    engine = Engine.from_pretrained(file, dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    read, made = engine.model.tokenizer, tiny.tokenizer()
    ids = read("the quick brown fox")["input_ids"]
    assert ids == made("the quick brown fox")["input_ids"]
    assert read.chat_template == made.chat_template
    out = theirs.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)
    assert engine.generate(ids, max_new_tokens=24).tokens == out[0, len(ids) :].tolist()
    assert engine.model.name == str(file)


SPOILT: dict[str, tuple[str, Callable[[bytes], bytes] | None]] = {
    "cut": ("model.safetensors", lambda c: c[:-8]),
    "changed": ("model.safetensors", lambda c: c[:-1] + bytes([c[-1] ^ 1])),
    "unsealed": ("complete.json", None),
    "of another version": (
        "complete.json", lambda c: json.dumps(json.loads(c) | {"format": 0}).encode()
    ),
    "without its config": ("config.json", None),
    "without its tokenizer": ("tokenizer.json", None),
}  # fmt: skip
"""Which file of a converted copy has changed, and how; None: it is gone."""


@pytest.mark.parametrize("spoilt", SPOILT)
def test_a_spoilt_copy_is_made_anew(file: Path, spoilt: str) -> None:
    folder, (name, change) = ours.converted(file), SPOILT[spoilt]
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    if change is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(change(good[name]))
    assert ours.converted(file) == folder
    seal = json.loads((folder / "complete.json").read_bytes())
    assert seal["format"] == ours.FORMAT
    for path in folder.iterdir():
        assert path.name == "complete.json" or path.read_bytes() == good[path.name]
    assert {path.name for path in folder.iterdir()} == good.keys()


def test_a_file_is_converted_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ours.converted(file)
    monkeypatch.setattr(ours, "_read", lambda *_: pytest.fail("converted again"))
    assert ours.converted(file) == folder


def in_first_tensor(content: bytes, offset: int, value: bytes) -> bytes:
    """Write a value after the name of the first tensor: its size at 4, its type at 20."""
    at = content.index(b"token_embd.weight") + len("token_embd.weight") + offset
    return content[:at] + value + content[at + len(value) :]


KEY = b"general.endless"
ENDLESS = struct.pack("<QQ", 1, len(KEY)) + KEY + struct.pack("<IIQ", 9, 0, 1 << 60)
"""A header with one value, an array of 2^60 elements."""
HUGE, UNKNOWN = struct.pack("<Q", 10**11 // 32 * 32), struct.pack("<I", 250)


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "half": (lambda c: c[: len(c) // 2], "is cut off"),
    "header": (lambda c: c[:100], "cut off or damaged"),
    "two bytes": (lambda c: c[:2], "not a GGUF file"),
    "empty": (lambda _: b"", "not a GGUF file"),
    "magic": (lambda c: b"GGML" + c[4:], "not a GGUF file"),
    "version": (lambda c: c[:4] + b"\x09\0\0\0" + c[8:], "GGUF version 9"),
    "many tensors": (lambda c: c[:8] + struct.pack("<Q", 1 << 60) + c[16:], "cut off or damaged"),
    "100 GB": (lambda c: in_first_tensor(c, 4, HUGE), "is cut off"),
    "quantization": (
        lambda c: in_first_tensor(c, 20, UNKNOWN), r"250\)? is not a valid GGMLQuantizationType"
    ),
    "endless array": (lambda c: c[:16] + ENDLESS, "damaged: it announces an array of 1,152,9"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused(file: Path, damage: str, cache: Path) -> None:
    change, words = DAMAGES[damage]
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(LoadError, match=words):
        load(file)
    assert nothing_in(cache)


def test_g1_no_header_breaks_the_reader(file: Path) -> None:
    """Bytes of the header that anybody may have written: read, or refused as any other file."""
    good, dice = file.read_bytes(), random.Random(0)
    for _ in range(30):
        content = bytearray(good)
        for _ in range(dice.choice([1, 1, 3])):
            content[dice.randrange(4, 900)] = dice.choice([0, 1, 8, 9, 255, dice.randrange(256)])
        file.write_bytes(content)
        with suppress(LoadError):
            found = read_file(file)
            assert all(0 <= i < 400 for i in found.end_ids)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_package_that_is_missing_is_named(
    file: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(LoadError, match=rf"be imported \(.*{package}.*draftsmith\[gguf\]"):
        load(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"there is no file .*nothing\.gguf"):
        load(tmp_path / "nothing.gguf")


@pytest.mark.parametrize(("options", "words"), [
    ({"architecture": "rwkv6"}, r"cannot read other\.gguf \(architecture rwkv6\)"),
    ({"without": "layers.1."}, r"other\.gguf lacks 9 of .* \(model\.\S+ first\)"),
    ({"without": "model.norm.weight"}, r"other\.gguf lacks 1 of .* \(model\.\S+ first\)"),
    ({"parts": 3}, r"one of 3 parts .* llama-gguf-split --merge"),
])  # fmt: skip
def test_files_that_are_no_whole_model_are_refused(
    options: dict[str, Any], words: str, tmp_path: Path, cache: Path
) -> None:
    path = tmp_path / "other.gguf"
    gguf_files.write(path, gguf_files.model(), Kind.Q8_0, **options)
    with pytest.raises(LoadError, match=words):
        load(path)
    assert nothing_in(cache)


def test_a_merged_file_is_read(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "m.gguf", gguf_files.model(), Kind.Q8_0, parts=0)
    load(tmp_path / "m.gguf")


def test_a_cache_folder_that_cannot_be_written(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("a file where a folder is wanted")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "taken"))
    with pytest.raises(WriteError, match=r"cannot be written to .* set DRAFTSMITH_CACHE"):
        load(file)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder_it_an_error_says_what_to_set(file: Path) -> None:
    with pytest.raises(WriteError, match=r"no home folder .* set DRAFTSMITH_CACHE"):
        load(file)


def test_a_disk_that_is_full_or_will_be_keeps_nothing(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ours.shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
        with pytest.raises(WriteError, match=r"needs 0\.\d MB in .*, where 0\.1 MB are free"):
            load(file)
    monkeypatch.setattr(ours, "_seal", full)
    with pytest.raises(WriteError, match="No space left on device"):
        load(file)
    assert nothing_in(cache)


def test_smollm2_is_the_registrys_package_or_the_hubs_model(
    tiny_smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert builtin.resolve("smollm2") == str(tiny_smollm2)
    assert load("smollm2").vocab_size == gguf_files.model().config.vocab_size
    assert read_tokenizer("smollm2", {})("hello world")["input_ids"]
    monkeypatch.setattr(builtin, "find_spec", lambda _: None)
    assert builtin.resolve("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.slow
def test_two_processes_at_once_give_one_good_folder(file: Path, cache: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from draftsmith.model import gguf;"
        "print(gguf.converted(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(file)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [process.communicate(timeout=3600) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert told[0][0] == told[1][0]
    assert [str(p) for p in cache.iterdir()] == [told[0][0].strip()]
    assert ours._whole(Path(told[0][0].strip()))


def test_what_a_killed_conversion_left_is_removed(file: Path, cache: Path) -> None:
    left = cache / ".new-killed"
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    ours.converted(file)
    assert not left.exists()
