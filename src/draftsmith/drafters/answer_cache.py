"""AnswerCache: earlier answers, and what was learned from them, for the requests that follow.

Each salt has its own answers. An answer is indexed when its request has ended. Once a third of the
bytes is taken, it also joins the young index of its salt. At the bound the young indexes take the
place of the old ones, so the oldest answers go, of whatever salt, and no request waits for more
than its own answer to be indexed twice.
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
from draftsmith.drafters.mixer import MAX_COUNT, MAX_WEIGHT, MIN_PROB, Mixer
from draftsmith.drafters.mixer_prior import as_tensors, checked, prior
from draftsmith.drafters.tree_search import index_ids
from draftsmith.errors import LoadError, OptionError
from draftsmith.storage import check_writable, digest, reading, write_chunks

MIN_BYTES = 1_000_000
"""Bytes below which a cache would hold next to nothing."""
LEADING = 8
"""Ids of a prompt's end that an answer's first tokens are kept with."""
BYTES_PER_TOKEN = 2000
"""Bytes of the bound for each token of one answer: of a longer one the end is kept."""
ENTRY_BYTES = 150
"""Bytes of an answer in the list, beside its ids."""
FORMAT, VERSION = "draftsmith answers", "1"


class Answer(NamedTuple):
    """An answer as it is kept."""

    salt: str
    """Digest of its request's salt."""
    ids: Any
    """(T,) int32: the end of its prompt, and the answer."""
    quiet: int
    """How many of them belong to the prompt."""

    @property
    def nbytes(self) -> int:
        """Bytes in the list of answers."""
        return ENTRY_BYTES + int(self.ids.nbytes)


class Answers:
    """What the requests of one salt share.

    Running requests read it here and copy no answers, so what is deleted is gone for them, too.
    """

    def __init__(self, cache: AnswerCache, salt: str) -> None:
        self.cache, self.salt = cache, salt
        self.forget()
        self.forgotten = False

    def forget(self) -> None:
        """Forget all answers and all that was learned, by running requests, too."""
        self.index, self.young = new_index(), new_index()
        self.mixer = prior(2)
        """What requests begin with; never written to, so a request's changes are the difference."""
        self.forgotten = True

    @property
    def nbytes(self) -> int:
        """Bytes of indexes and mixer."""
        return self.index.nbytes + self.young.nbytes + self.mixer.nbytes

    def add(self, ids: Sequence[int], prompt_length: int, start: Mixer, learned: Mixer) -> None:
        """Add the answer of a request that began with the mixer `start`."""
        if self.cache.lock._is_owned():  # type: ignore[attr-defined]
            return  # an abandoned request, ended by a garbage collection in the midst of this work
        with self.cache.lock:
            if not self.forgotten and len(ids) > prompt_length:
                self.mixer = merged(self.mixer, start, learned)
                kept = ids[max(0, prompt_length - LEADING) :]
                self.cache.add(self, kept, len(ids) - prompt_length)


class AnswerCache:
    """Earlier answers of one model's requests, by salt, within a number of bytes."""

    def __init__(self, most: int, model: ModelFacts, path: Path | None = None) -> None:
        """`most`: bytes. `path`: a file that is read now, and written by `save` and `forget`.

        Raises OptionError for too few bytes, LoadError for a file that is not of this model's
        tokenizer, damaged, or larger than the bound, WriteError for one that cannot be written.
        """
        if most < MIN_BYTES:
            raise OptionError(f"answers must be 0 or at least {MIN_BYTES:,} (bytes), got {most:,}")
        self.most, self.model, self.path = most, model, path
        self.lock = threading.RLock()
        """Held while indexes are read or written, and while nothing is waited for."""
        self._writing = threading.Lock()
        """Held from the snapshot until it is in the file; taken before `lock` where both are."""
        self.nbytes = 0
        self._open: WeakValueDictionary[str, Answers] = WeakValueDictionary()
        self._kept: dict[str, Answers] = {}
        """Those that hold answers."""
        self._list: list[Answer] = []
        """In the order in which they ended."""
        self._young: int | None = None
        """Where in the list the young indexes begin."""
        if path is not None:
            check_writable(path)
            if path.exists():
                self._load(path)

    def __repr__(self) -> str:
        return f"AnswerCache({self.count} answers, {self.nbytes:,} of {self.most:,} bytes)"

    @property
    def count(self) -> int:
        """Answers that it holds."""
        return len(self._list)

    def of(self, salt: str) -> Answers:
        """Return what the requests of a salt share."""
        name = digest(salt)
        with self.lock:
            answers = self._open.get(name)
            if answers is None:
                answers = self._open[name] = Answers(self, name)
            return answers

    def forget(self, salt: str | None = None) -> None:
        """Delete a salt's answers and what was learned from them, or all: in memory, then on disk.

        Running requests of the salt draft from them no more, and add nothing. Raises WriteError if
        the file cannot be written; what is in memory is deleted then.
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
        """Keep ids that end with an answer of `emitted` tokens; at the bound the oldest go."""
        kept = np.array(ids[-(self.most // BYTES_PER_TOKEN) :], np.int32)
        answer = Answer(answers.salt, kept, max(0, len(kept) - emitted))
        before = answers.nbytes if answers.salt in self._kept else 0
        # An interrupt between any two lines leaves indexes whose parts fit each other.
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
        """Forget what is older than the young indexes."""
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
        """Write the file, whole or not at all; raises WriteError, or OptionError without a file."""
        if self.path is None:
            raise OptionError("there is no file to save answers to; give answers_file=")
        with self._writing:
            with self.lock:
                salts = list(self._kept)
                places = {salt: place for place, salt in enumerate(salts)}
                rows = [(places[one.salt], len(one.ids), one.quiet) for one in self._list]
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
        """Take over what `save` wrote; raises LoadError for anything else."""
        hint = "give another file, or delete it"
        with reading(path):
            size = path.stat().st_size
        if size > self.most:
            raise LoadError(f"{path} has {size:,} bytes, more than answers={self.most:,}; {hint}")
        try:
            with safe_open(path, framework="np") as file:
                header = dict(file.metadata() or {})
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if header.get("format") != FORMAT:
                raise ValueError("it holds something else")
            if header.get("version") != VERSION:
                raise ValueError(f"its version is {header.get('version')}, not {VERSION}")
            if header.pop("sum", None) != checksum(header, tensors):
                raise ValueError("its checksum does not fit")
            ours = str(self.model.vocab_size), self.model.vocabulary() or ""
            if (header["vocab_size"], header["vocabulary"]) != ours:
                raise ValueError("it was written for a model with another vocabulary")
            self._take(json.loads(header["salts"]), tensors)
        except (OSError, SafetensorError, LookupError, ValueError, TypeError) as error:
            raise LoadError(f"{path} holds no answers for this model: {error}; {hint}") from error

    def _take(self, salts: Sequence[str], tensors: Mapping[str, Any]) -> None:
        """Raises LookupError, TypeError or ValueError for what was not written by `save`."""
        ids, rows = tensors["ids"], tensors["answers"]
        if (ids.dtype, ids.ndim, rows.dtype, rows.shape[1:]) != (np.int32, 1, np.int64, (3,)):
            raise ValueError("its answers have impossible types or shapes")
        strings = isinstance(salts, list) and all(isinstance(salt, str) for salt in salts)
        if not strings or len({*salts}) < len(salts):
            raise ValueError("its salts are not different strings")
        if ((ids < 0) | (ids >= self.model.vocab_size)).any():
            raise ValueError("it has token ids that the model does not have")
        if (rows < 0).any() or (rows[:, 2] > rows[:, 1]).any() or rows[:, 1].sum() != len(ids):
            raise ValueError("its answers have impossible lengths")
        found = [Answers(self, salt) for salt in salts]
        for place, answers in enumerate(found):
            answers.mixer = checked(tensors, str(place), 2)
            self._open[answers.salt] = answers
        end = 0
        for place, length, quiet in rows.tolist():
            start, end = end, end + length
            self.add(found[place], ids[start:end], length - quiet)


def index_answer(index: ContextIndex, answer: Answer) -> None:
    """Index an answer whose ids are in `index` already."""
    start = index.length
    index_ids(index, start + len(answer.ids), start + answer.quiet, start)


def merged(mixer: Mixer, start: Mixer, learned: Mixer) -> Mixer:
    """Return `mixer` plus what a request learned that began with `start`, within the bounds.

    So the changes of requests at the same time all count, in whatever order they end.
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
    """Return the checksum of all that a file holds."""
    total = zlib.crc32(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].tobytes(), total)
    return f"{total:08x}"
