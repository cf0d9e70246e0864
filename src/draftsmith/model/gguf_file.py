"""Header of a GGUF file: metadata and tensors, checked against the file's size before use.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.errors import LoadError, extra, first_line
from draftsmith.storage import reading

_VERSIONS = (2, 3)
_ARRAY = 9
_LONGEST_ARRAY = 1 << 23
"""Most elements of a metadata array. Real vocabularies have a few hundred thousand."""

_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "</s>",
    "<end_of_turn>", "<turn|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", "<eos>",
    "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|return|>", "<|call|>", "<|calls|>",
    "<|flush|>", "<|tool_response>",
)  # fmt: skip
"""Tokens that end an answer in llama.cpp even if no metadata names them, whatever their type."""
_INFILLING = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Names of ids that end an answer, too → their tokens where no metadata names them."""


@dataclass(frozen=True)
class File:
    """Header of a GGUF file."""

    path: Path
    values: dict[str, Any]
    """Metadata by key."""
    tensors: dict[str, Any]
    """`gguf.ReaderTensor` by name."""

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", ""))

    @property
    def parameters(self) -> int:
        return sum(int(tensor.n_elements) for tensor in self.tensors.values())

    @property
    def adds_bos(self) -> bool:
        """Whether texts begin with the beginning-of-sequence token."""
        # Default of llama.cpp for SentencePiece models.
        spm = self.values.get("tokenizer.ggml.model") == "llama"
        return bool(self.values.get("tokenizer.ggml.add_bos_token", spm))

    @property
    def end_ids(self) -> list[int]:
        """Ids that end an answer, the file's end-of-sequence id first."""
        tokens = self.values.get("tokenizer.ggml.tokens", [])
        searched = {*_ENDS, "<|plamo:eos|>", *itertools.chain(*_INFILLING.values())}
        found = {token: i for i, token in enumerate(tokens) if token in searched}
        ids = [self._id(name) for name in ("eos", "eot", "eom")]
        for name, texts in _INFILLING.items():
            by_text = next((found[text] for text in texts if text in found), None)
            ids.append(by_text if (named := self._id(name)) is None else named)
        harmony = {"<|return|>", "<|flush|>"} & {*found} and {"<|call|>", "<|calls|>"} & {*found}
        within = {"<|end|>"} if harmony else set()  # they are part of an answer
        within |= {"</s>"} if {"<|tool_response>", "<|plamo:eos|>"} & {*found} else set()
        ids += [i for token, i in found.items() if token in _ENDS and token not in within]
        return list(dict.fromkeys(i for i in ids if i is not None and i < len(tokens)))

    def named(self, name: str) -> str | None:
        """Return the token with this role in the metadata; None if there is none."""
        place, tokens = self._id(name), self.values.get("tokenizer.ggml.tokens") or ()
        return None if place is None or place >= len(tokens) else str(tokens[place])

    def _id(self, name: str) -> int | None:
        """Return the id of a token that the metadata names; None if it does not."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.values.get(key)
        if value is not None and (not isinstance(value, int) or value < 0):
            raise LoadError(f"{self.path.name}: {key} must be a token id, got {value!r:.100}")
        return value

    def numbers(self, name: str) -> list[float] | None:
        """Values of a tensor; None if the file has no tensor of that name."""
        if (tensor := self.tensors.get(name)) is None:
            return None
        values: list[float] = package().quants.dequantize(tensor.data, tensor.tensor_type).tolist()
        return values


def package() -> Any:
    """Return the `gguf` package; raises LoadError if it or a dependency is not installed."""
    with extra("gguf", "GGUF files need gguf and accelerate", LoadError):
        import accelerate  # noqa: F401  transformers asks for it
        import gguf
        import gguf.quants
    return gguf


def read_file(path: Path) -> File:
    """Read the header of a GGUF file.

    Raises LoadError for a file that is damaged, cut off, one part of several, or in a quantization
    that cannot be dequantized.
    """
    gguf = package()
    with reading(path), path.open("rb") as file:
        start = file.read(8)
    if start[:4] != b"GGUF":
        raise LoadError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
    version = int.from_bytes(start[4:], "little")
    if len(start) == 8 and version not in _VERSIONS:
        raise LoadError(
            f"{path} has GGUF version {version}; versions 2 and 3 can be read, little-endian"
        )

    class Bounded(gguf.GGUFReader):  # type: ignore[misc, name-defined]
        """`GGUFReader` that reads nothing after the end of the file."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **by_name: Any) -> Any:
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data):
                raise LoadError(
                    f"{path} is cut off or damaged: its header announces {end:,} bytes or more, "
                    f"the file has {len(self.data):,}; download it again"
                )
            return super()._get(offset, dtype, count, *order, **by_name)

        def _get_field_parts(self, offset: int, kind: int) -> Any:
            if kind == _ARRAY and (length := self._get(offset + 4, np.uint64)[0]) > _LONGEST_ARRAY:
                raise LoadError(f"{path} is damaged: it announces an array of {length:,} values")
            return super()._get_field_parts(offset, kind)

    try:
        with reading(path):
            reader = Bounded(path)
        values = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise LoadError(
            f"{path} is damaged, or newer than the installed gguf package: {first_line(error)}"
        ) from error
    parts = values.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise LoadError(
            f"{path} is one of {parts} parts of a model; merge them first: "
            "llama-gguf-split --merge FIRST_PART MERGED.gguf"
        )
    for name, kind in {name: tensor.tensor_type for name, tensor in tensors.items()}.items():
        _check_kind(gguf, path, name, kind)
    return File(path, values, tensors)


def _check_kind(gguf: Any, path: Path, name: str, kind: Any) -> None:
    _, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError as error:
        raise LoadError(
            f"{path} has the quantization type {kind.name} (tensor {name!r}), which the installed "
            "gguf package cannot dequantize; take a file with another quantization, e.g. Q8_0 or "
            "Q4_K_M"
        ) from error
