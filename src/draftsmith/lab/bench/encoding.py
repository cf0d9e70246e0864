"""Encodes a record as the ids of its prompt and its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

from draftsmith import builtin
from draftsmith.core.target import ModelFacts
from draftsmith.errors import LoadError, OptionError, PromptError, UnknownName, first_line
from draftsmith.lab.bench.records import Message, Record
from draftsmith.lab.bench.templates import TEMPLATES, Piece, Template
from draftsmith.storage import digest, expanded
from draftsmith.text.tokenizer import encode, read_bare, render_chat
from draftsmith.text.vocab import fingerprint

_UNKNOWN = 1 << 24
"""Least number of ids of a vocabulary of which only some ids are known."""
_CHECKED = 20
"""Number of records with answers that are encoded and decoded, to detect a wrong tokenizer."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A record in ids. The answer includes the token that ended it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Encoder:
    """A tokenizer with its chat template."""

    encode: Callable[[str, bool], list[int]]
    """Encode a text; True adds the tokenizer's special tokens."""
    decode: Callable[[list[int]], str]
    chat: Callable[[Sequence[Message]], Sequence[Piece]]
    """Render a chat up to the beginning of the assistant's answer."""
    end: Sequence[Piece]
    """Tokens that end an answer."""
    vocab_size: int
    vocabulary: str
    """Fingerprint of the tokenizer and its template."""
    fingerprint: str | None = None
    """Fingerprint of its vocabulary (`text.vocab`); None if it is unknown."""

    def prompt(self, record: Record) -> tuple[int, ...]:
        """Return the ids of the prompt."""
        if record.messages:
            return tuple(self._ids(self.chat(record.messages)))
        return tuple(self.encode(record.prompt or "", True))

    def answer(self, record: Record) -> tuple[int, ...]:
        """Return the ids of the answer, including the end of the turn."""
        return (*self.encode(record.output or "", False), *self._ids(self.end))

    def _ids(self, pieces: Sequence[Piece]) -> Iterator[int]:
        for piece in pieces:
            yield from [piece] if isinstance(piece, int) else self.encode(piece, False)


@dataclass(frozen=True, slots=True)
class Encoding:
    """Chooses a record's tokenizer: its own by name, from one of `folders`, or the given one."""

    folders: tuple[Path, ...] = ()
    tokenizer: str | None = None
    """A folder or a name, for records that name none or the same."""
    template: str | None = None

    def __call__(self, record: Record) -> Encoded:
        """Return the ids of a record; raises LoadError, OptionError or PromptError."""
        prompt, answer = record.prompt_ids, record.output_ids
        encoder = self._encoder(record)
        if encoder is not None:
            prompt = encoder.prompt(record) if prompt is None else prompt
            answer = encoder.answer(record) if answer is None else answer
        if not prompt or not answer:
            what = "prompt" if not prompt else "output"
            raise PromptError(f"record {record.id}: the {what} has no tokens")
        largest = max(*prompt, *answer)
        vocab_size = encoder.vocab_size if encoder else max(largest + 1, _UNKNOWN)
        if largest >= vocab_size:
            raise OptionError(
                f"record {record.id} has token id {largest}, but the tokenizer {self._name(record)}"
                f" has {vocab_size} ids: it is not the one that the record was made with"
            )
        return Encoded(prompt, answer, vocab_size)

    def vocabulary(self, record: Record) -> str | None:
        """Return the fingerprint of the record's tokenizer; None if it needs none."""
        encoder = self._encoder(record)
        return None if encoder is None else encoder.vocabulary

    def facts(self, record: Record) -> ModelFacts:
        """Return what is known of the model that answered: its vocabulary."""
        encoder = self._encoder(record)
        return ModelFacts(0, 0, vocabulary=lambda: None if encoder is None else encoder.fingerprint)

    def check(self, records: Iterable[Record]) -> None:
        """Raise OptionError if most answers change when they are encoded and decoded.

        A tokenizer that changes them (by lower-casing, or dropping line breaks) cannot have written
        them. The right one may change some, too, such as broken characters.
        """
        read = [r for r in islice(records, _CHECKED) if r.output and r.output_ids is None]
        lost = [r for r in read if not self._survives(r)]
        if 2 * len(lost) > len(read):
            first = lost[0]
            raise OptionError(
                f"the tokenizer {self._name(first)} changes texts (e.g. the output of record "
                f"{first.id}), so it is not the one of the model that answered"
            )

    def _survives(self, record: Record) -> bool:
        """Whether the output is unchanged by encoding and decoding, except spaces at its ends."""
        encoder, text = self._encoder(record), record.output or ""
        return (
            encoder is None or encoder.decode(encoder.encode(text, False)).strip() == text.strip()
        )

    def _name(self, record: Record) -> str | None:
        given, own = self.tokenizer, record.tokenizer
        if given and own and Path(given).name != Path(own).name:
            raise OptionError(
                f"record {record.id} was made with the tokenizer {own}, not {given}; leave out "
                "--tokenizer, or give the one of that name"
            )
        return given or own

    def _encoder(self, record: Record) -> Encoder | None:
        name = self._name(record)
        if name is not None:
            return _load(name, self.folders, self.template)
        if record.prompt_ids is not None and record.output_ids is not None:
            return None
        raise OptionError(
            f"record {record.id} does not name its model's tokenizer; give --tokenizer with a "
            "model's folder or hub id, or a name such as qwen2"
        )


@lru_cache(maxsize=8)
def _load(name: str, folders: tuple[Path, ...], template: str | None) -> Encoder:
    """Load the tokenizer `name` from one of the folders, or that of the model with this name."""
    if template is not None and template not in TEMPLATES:
        raise UnknownName("template", template, TEMPLATES)
    places = [expanded(name), *(folder / name for folder in folders)]
    folder = next((place for place in places if place.is_dir()), None)
    if folder is not None and not (folder / "tokenizer_config.json").is_file():
        return _bare(folder, TEMPLATES.get(template or folder.name))
    source = builtin.resolve(name) if folder is None else str(folder)
    try:
        return _own(source, TEMPLATES[template] if template else None)
    except LoadError as error:
        if Path(source).exists() or "/" in name:
            raise
        known = sorted({p.name for f in folders if f.is_dir() for p in f.iterdir() if p.is_dir()})
        listed = f" (there: {', '.join(known)})" if known else ""
        searched = ", ".join(map(str, folders)) or "any folder"
        raise LoadError(
            f"there is no tokenizer {name!r} in {searched}{listed}, and no model of that "
            f"name ({first_line(error)}); give --tokenizer with a model's folder or hub id, or put "
            "its folder into tokenizers/ beside the records"
        ) from error


def _bare(folder: Path, template: Template | None) -> Encoder:
    """Load a lone tokenizer.json, with one of our templates."""
    tokenizer = read_bare(folder / "tokenizer.json")

    def no_chat(_: Sequence[Message]) -> Sequence[Piece]:
        raise OptionError(
            f"the tokenizer {folder.name} has no chat template; give --template "
            f"({', '.join(TEMPLATES)}), or --tokenizer with the model's own folder"
        )

    vocab_size = tokenizer.get_vocab_size()
    return Encoder(
        encode=lambda text, special: tokenizer.encode(text, add_special_tokens=special).ids,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        chat=no_chat if template is None else template.render,
        end=[] if template is None else [template.end],
        vocab_size=vocab_size if template is None else max(vocab_size, template.vocab_size),
        vocabulary=digest([tokenizer.to_str()]),
    )


def _own(source: str, template: Template | None) -> Encoder:
    """Load a model's own tokenizer and chat template, as the engine uses them."""
    # Imported here, because transformers takes seconds and bare files do not need it.
    from draftsmith.model.load import read_tokenizer

    tokenizer = read_tokenizer(source, {})
    end, backend = tokenizer.eos_token_id, getattr(tokenizer, "backend_tokenizer", None)
    return Encoder(
        encode=lambda content, special: encode(tokenizer, content, special=special),
        decode=lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False),
        chat=partial(render_chat, tokenizer) if template is None else template.render,
        end=[] if end is None else [end],
        vocab_size=len(tokenizer),
        fingerprint=fingerprint(tokenizer),
        vocabulary=digest(
            [
                fingerprint(tokenizer) if backend is None else backend.to_str(),
                str(tokenizer.chat_template),
                end,
            ]
        ),
    )
