"""AnswerCache: earlier answers, and what was learned from them, for later requests.

Each salt has its own answers. An answer is indexed when its request has ended. Once a third of the
memory is in use, new answers are also added to the young index of their salt. At the limit the
young indexes replace the old ones. So the oldest answers of all salts are dropped, and no request
waits for more than its own answer to be indexed twice.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialize

from draftsmith.core.target import ModelFacts
from draftsmith.drafters.context_index import ContextIndex, new_index, with_ids
from draftsmith.drafters.mixer import MAX_COUNT, MAX_WEIGHT, MIN_PROB, Mixer, new_mixer
from draftsmith.drafters.mixer_prior import as_tensors, checked, prior
from draftsmith.drafters.tree_search import index_ids
from draftsmith.errors import LoadError, OptionError
from draftsmith.storage import check_writable, digest, reading, write_chunks

MIN_BYTES = 1_000_000
"""Smallest useful size of a cache, in bytes."""
LEADING = 8
"""Number of ids at the end of the prompt that are stored with an answer, as context."""
BYTES_PER_TOKEN = 2000
"""The cache's size divided by this is the maximum length of an answer; only its end is kept."""
ENTRY_BYTES = 150
"""Size of an entry in the list of answers, without its ids."""
FORMAT, VERSION = "draftsmith answers", "1"


class Answer(NamedTuple):
    """A stored answer."""

    salt: str
    """Digest of its request's salt."""
    ids: Any
    """(T,) int32: the end of the prompt, and the answer."""
    prompt_length: int
    """Number of ids that belong to the prompt."""

    @property
    def nbytes(self) -> int:
        """Size of the entry in the list of answers."""
        return ENTRY_BYTES + int(self.ids.nbytes)


class Answers:
    """Answers and mixer that the requests of one salt share.

    Running requests read them here and copy no answers, so deleted answers are gone for them, too.
    """

    def __init__(self, cache: AnswerCache, salt: str) -> None:
        self.cache, self.salt = cache, salt
        self.forget()
        self.forgotten = False

    def forget(self) -> None:
        """Delete all answers and what was learned from them, for running requests, too."""
        self.index, self.young = new_index(), new_index()
        self.mixer = prior(2)
        """Mixer that requests begin with, never changed: what one learns is the difference."""
        self.forgotten = True

    @property
    def nbytes(self) -> int:
        """Size of the indexes and the mixer."""
        return self.index.nbytes + self.young.nbytes + self.mixer.nbytes

    def add(self, ids: Sequence[int], prompt_length: int, start: Mixer, learned: Mixer) -> None:
        """Add the answer of a request that began with the mixer `start`."""
        if self.cache.lock._is_owned():  # type: ignore[attr-defined]
            return  # garbage collection has ended an abandoned request during this work
        with self.cache.lock:
            if not self.forgotten and len(ids) > prompt_length:
                self.mixer = merged(self.mixer, start, learned)
                kept = ids[max(0, prompt_length - LEADING) :]
                self.cache.add(self, kept, len(ids) - prompt_length)


class AnswerCache:
    """Earlier answers of one model's requests, by salt, within a limit of bytes."""

    def __init__(self, most: int, model: ModelFacts, path: Path | None = None) -> None:
        """`most`: maximum bytes. `path`: file that is loaded now; `save` and `forget` write it.

        Raises OptionError if `most` is too small; LoadError if the file is damaged, too large, or
        from a model with another tokenizer; WriteError if the file cannot be written.
        """
        if most < MIN_BYTES:
            raise OptionError(f"answers must be 0 or >= {MIN_BYTES:,} (bytes), got {most:,}")
        self.most, self.model, self.path = most, model, path
        self.lock = threading.RLock()
        """Held while indexes are read or written, never while waiting for something else."""
        self._writing = threading.Lock()
        """Held from taking a snapshot until it is in the file; acquired before `lock`."""
        self.nbytes = 0
        self._open: WeakValueDictionary[str, Answers] = WeakValueDictionary()
        self._kept: dict[str, Answers] = {}
        """Salts with answers."""
        self._list: list[Answer] = []
        """All answers, in the order in which they ended."""
        self._young: int | None = None
        """Position in the list where the young indexes begin."""
        if path is not None:
            check_writable(path)
            if path.exists():
                self._load(path)

    def __repr__(self) -> str:
        return f"AnswerCache({self.count} answers, {self.nbytes:,} of {self.most:,} bytes)"

    @property
    def count(self) -> int:
        """Number of answers."""
        return len(self._list)

    def of(self, salt: str) -> Answers:
        """Return the answers and the mixer that requests of a salt share."""
        name = digest(salt)
        with self.lock:
            answers = self._open.get(name)
            if answers is None:
                answers = self._open[name] = Answers(self, name)
            return answers

    def forget(self, salt: str | None = None) -> None:
        """Delete what is known of a salt, or of all salts, in memory and on disk.

        Running requests of the salt no longer draft from them, and add nothing. Raises WriteError
        if the file cannot be written; the answers in memory are then deleted nevertheless.
        """
        with self.lock:
            names = list(self._open) if salt is None else [digest(salt)]
            for name in names:
                answers = self._open.pop(name, None)
                self._kept.pop(name, None)
                if answers is not None:
                    answers.forget()
            before = len(self._list) if self._young is None else self._young
            before = sum(answer.salt not in names for answer in self._list[:before])
            self._list = [answer for answer in self._list if answer.salt not in names]
            self._young = None if self._young is None else before
            self._count()
        if self.path is not None:
            self.save()

    def add(self, answers: Answers, ids: Sequence[int], emitted: int) -> None:
        """Add ids that end with an answer of `emitted` tokens; at the limit drop the oldest."""
        kept = np.array(ids[-(self.most // BYTES_PER_TOKEN) :], np.int32)
        answer = Answer(answers.salt, kept, max(0, len(kept) - emitted))
        before = answers.nbytes if answers.salt in self._kept else 0
        # After an interrupt between any two lines the parts of each index are consistent.
        answers.index = with_ids(answers.index, answers.index.length, kept, 0)
        index_answer(answers.index, answer)
        if self._young is not None:
            answers.young = with_ids(answers.young, answers.young.length, kept, 0)
            index_answer(answers.young, answer)
        self._kept[answers.salt] = answers
        self._list.append(answer)
        self.nbytes += answers.nbytes - before + answer.nbytes
        while self.nbytes > self.most:
            self._drop_oldest()
        if self._young is None and self.nbytes > self.most // 3:
            self._young = len(self._list)

    def _drop_oldest(self) -> None:
        """Drop all answers that are older than the young indexes."""
        self._list = self._list[len(self._list) if self._young is None else self._young :]
        self._young = None
        for answers in self._kept.values():
            answers.index, answers.young = answers.young, new_index()
        self._kept = {name: one for name, one in self._kept.items() if one.index.length}
        self._count()

    def _count(self) -> None:
        shared = sum(answers.nbytes for answers in self._kept.values())
        self.nbytes = shared + sum(answer.nbytes for answer in self._list)

    def save(self) -> None:
        """Write the file atomically; raise WriteError, or OptionError if there is no file."""
        if self.path is None:
            raise OptionError("there is no file to save answers to; set answers_file=")
        with self._writing:
            with self.lock:
                salts = list(self._kept)
                places = {salt: place for place, salt in enumerate(salts)}
                rows = [(places[one.salt], len(one.ids), one.prompt_length) for one in self._list]
                tensors = {
                    "ids": np.concatenate(
                        [*(one.ids for one in self._list), np.zeros(0, np.int32)]
                    ),
                    "answers": np.array(rows, np.int64).reshape(-1, 3),
                }
                for salt, place in places.items():
                    tensors |= as_tensors(str(place), self._kept[salt].mixer)
            header = {
                "format": FORMAT,
                "version": VERSION,
                "vocab_size": str(self.model.vocab_size),
                "vocabulary": self.model.vocabulary() or "",
                "salts": json.dumps(salts),
            }
            header["sum"] = checksum(header, tensors)
            write_chunks(self.path, [serialize(tensors, header)])

    def _load(self, path: Path) -> None:
        """Load what `save` wrote; raise LoadError for any other file."""
        hint = "use another file, or delete it"
        with reading(path):
            size = path.stat().st_size
        if size > self.most:
            raise LoadError(f"{path} has {size:,} bytes, more than answers={self.most:,}; {hint}")
        try:
            with safe_open(path, framework="np") as file:
                header = dict(file.metadata() or {})
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if header.get("format") != FORMAT:
                raise ValueError("it has another format")
            if header.get("version") != VERSION:
                raise ValueError(f"its version is {header.get('version')}, not {VERSION}")
            if header.pop("sum", None) != checksum(header, tensors):
                raise ValueError("its checksum is wrong")
            ours = str(self.model.vocab_size), self.model.vocabulary() or ""
            if (header["vocab_size"], header["vocabulary"]) != ours:
                raise ValueError("it was written for a model with another vocabulary")
            self._take(json.loads(header["salts"]), tensors)
        except (OSError, SafetensorError, LookupError, ValueError, TypeError) as error:
            raise LoadError(f"{path} has no answers for this model: {error}; {hint}") from error

    def _take(self, salts: Sequence[str], tensors: Mapping[str, Any]) -> None:
        """Add stored answers; raise LookupError, TypeError or ValueError for invalid ones."""
        ids, rows = tensors["ids"], tensors["answers"]
        if (ids.dtype, ids.ndim, rows.dtype, rows.shape[1:]) != (np.int32, 1, np.int64, (3,)):
            raise ValueError("its answers have wrong types or shapes")
        strings = isinstance(salts, list) and all(isinstance(salt, str) for salt in salts)
        if not strings or len({*salts}) < len(salts):
            raise ValueError("its salts are not distinct strings")
        if ((ids < 0) | (ids >= self.model.vocab_size)).any():
            raise ValueError("it has token ids that the model does not have")
        if (rows < 0).any() or (rows[:, 2] > rows[:, 1]).any() or rows[:, 1].sum() != len(ids):
            raise ValueError("its answers have wrong lengths")
        found = [Answers(self, salt) for salt in salts]
        for place, answers in enumerate(found):
            answers.mixer = checked(tensors, str(place), new_mixer(2))
            self._open[answers.salt] = answers
        end = 0
        for place, length, prompt_length in rows.tolist():
            start, end = end, end + length
            self.add(found[place], ids[start:end], length - prompt_length)


def index_answer(index: ContextIndex, answer: Answer) -> None:
    """Index an answer after its ids were added to the arrays of `index`."""
    start = index.length
    index_ids(index, start + len(answer.ids), start + answer.prompt_length, start)


def merged(mixer: Mixer, start: Mixer, learned: Mixer) -> Mixer:
    """Return `mixer` plus the changes of a request that began with `start`, within the bounds.

    So the changes of concurrent requests all count, in any order.
    """
    if mixer is start:
        return learned.copy()
    cells = mixer.cells.copy()
    for name in ("prob", "count"):
        cells[name] = mixer.cells[name] + learned.cells[name] - start.cells[name]
    cells["prob"] = prob = cells["prob"].clip(MIN_PROB, 1 - MIN_PROB)
    cells["count"] = cells["count"].clip(0, MAX_COUNT)
    cells["logit"] = np.log(prob / (1 - prob))
    weights = mixer.weights + learned.weights - start.weights
    return Mixer(cells, weights.clip(-MAX_WEIGHT, MAX_WEIGHT))


def checksum(header: Mapping[str, str], tensors: Mapping[str, Any]) -> str:
    """Return the checksum of a file's content."""
    total = zlib.crc32(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].tobytes(), total)
    return f"{total:08x}"
