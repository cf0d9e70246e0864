"""Memory: earlier answers, and what was learnt of them, for the requests that come after.

Every salt has its own. An answer is indexed when its request has ended; once a third of the bytes
are taken, it also joins a young bank of its salt. At the bound the young banks take the place of
the old ones: so the oldest answers go, of whatever salt, and no request ever waits for more than
its own answer to be indexed twice.
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
from draftsmith.drafters.mixture.belief import CASES, CHANCE, HEAVY, LOGIT, RARE, VALUES, Belief
from draftsmith.drafters.mixture.candidates import new_work
from draftsmith.drafters.mixture.compiled import floats, size_of
from draftsmith.drafters.mixture.contexts import LENGTH, ORDERS, Bank, new_bank, put
from draftsmith.drafters.mixture.grow import NOTHING, advance
from draftsmith.drafters.mixture.prior import as_tensors, checked, copied, prior, untaught
from draftsmith.errors import LoadError, OptionError
from draftsmith.storage import check_writable, digest, reading, write_chunks

LEAST = 1_000_000
"""Bytes below which a memory would hold next to nothing."""
LEADING = 8
"""Ids of a prompt's end that an answer's first tokens are remembered after."""
PER_TOKEN = 2000
"""Bytes of the bound for each token of one answer: of a longer one the end is remembered."""
LISTED = 150
"""Bytes of an answer in the list, beside its ids."""
MEMORY = 255.0
"""Most cases of a belief's cell."""
FORMAT, VERSION = "draftsmith answers", "1"


class Answer(NamedTuple):
    """An answer as it is remembered."""

    salt: str
    """Digest of its request's salt."""
    ids: Any
    """Token ids: the end of its prompt, and the answer."""
    quiet: int
    """How many are of the prompt."""


class Answers:
    """What the requests of one salt remember.

    Open requests read it here and copy no answers, so what is deleted is gone for them, too.
    """

    def __init__(self, memory: Memory, salt: str) -> None:
        self.memory, self.salt = memory, salt
        self.forget()
        self.forgotten = False

    def forget(self) -> None:
        """Forget all answers and all that was learnt; what open requests learnt is lost, too."""
        self.bank, self.young = new_bank(), new_bank()
        self.belief = prior(2)
        """What requests begin with; never written to, so it tells what they have learnt since."""
        self.forgotten = True

    @property
    def nbytes(self) -> int:
        """Bytes of banks and learnt weights."""
        return sum(map(size_of, (*self.bank, *self.young, *self.belief)))

    def join(self, ids: Sequence[int], prompt_length: int, start: Belief, learnt: Belief) -> None:
        """An answer ended, whose request had begun with the belief `start`."""
        if self.memory.lock._is_owned():  # type: ignore[attr-defined]
            return  # an abandoned one, ended by a collection of garbage in the midst of this work
        with self.memory.lock:
            if not self.forgotten and len(ids) > prompt_length:
                self.belief = merged(self.belief, start, learnt)
                self.memory.add(
                    self, ids[max(0, prompt_length - LEADING) :], len(ids) - prompt_length
                )


class Memory:
    """The earlier answers of one model's requests, by salt, in at most so many bytes."""

    def __init__(self, most: int, model: ModelFacts, path: Path | None = None) -> None:
        """`most`: bytes. `path`: a file that is read now, and written by `save` and `forget`.

        Raises OptionError for too few bytes, LoadError for a file that is not of this model's
        tokenizer, damaged, or larger than the bound, WriteError for one that cannot be written.
        """
        if most < LEAST:
            raise OptionError(f"answers must be 0 or at least {LEAST:,} (bytes), got {most:,}")
        self.most, self.model, self.path = most, model, path
        self.lock = threading.RLock()
        """Held while banks are read or written, and while nothing is waited for."""
        self._writing = threading.Lock()
        """Held from the snapshot until it is in the file; whoever takes both takes it first."""
        self.nbytes = 0
        self._open: WeakValueDictionary[str, Answers] = WeakValueDictionary()
        self._kept: dict[str, Answers] = {}
        """Those that hold answers."""
        self._list: list[Answer] = []
        """In the order in which they ended."""
        self._young: int | None = None
        """Where in the list the young banks begin."""
        if path is not None:
            check_writable(path)
            if path.exists():
                self._load(path)

    def __repr__(self) -> str:
        return f"Memory({self.count} answers, {self.nbytes:,} of {self.most:,} bytes)"

    @property
    def count(self) -> int:
        """Answers that it holds."""
        return len(self._list)

    def of(self, salt: str) -> Answers:
        """What the requests of a salt share."""
        name = digest(salt)
        with self.lock:
            answers = self._open.get(name)
            if answers is None:
                answers = self._open[name] = Answers(self, name)
            return answers

    def forget(self, salt: str | None = None) -> None:
        """Delete a salt's answers and what was learnt of them, or all: in memory, then in the file.

        Open requests of it draft from them no more, and join nothing. Raises WriteError where the
        file cannot be written; what is in memory is deleted then.
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

    def add(self, answers: Answers, ids: Sequence[int], told: int) -> None:
        """Remember ids that end with an answer of `told` tokens; the oldest go where it is full."""
        kept = np.array(ids[-(self.most // PER_TOKEN) :], np.int32)
        answer = Answer(answers.salt, kept, max(0, len(kept) - told))
        before = answers.nbytes if answers.salt in self._kept else 0
        # An interrupt between any two lines leaves banks whose parts fit each other.
        answers.bank = behind(answers.bank, answer)
        remember(answers.bank, answer)
        if self._young is not None:
            answers.young = behind(answers.young, answer)
            remember(answers.young, answer)
        self._kept[answers.salt] = answers
        self._list.append(answer)
        self.nbytes += answers.nbytes - before + _listed(answer)
        while self.nbytes > self.most:
            self._age()
        if self._young is None and self.nbytes > self.most // 3:
            self._young = len(self._list)

    def _age(self) -> None:
        """Forget what is older than the young banks."""
        self._list = self._list[len(self._list) if self._young is None else self._young :]
        self._young = None
        for answers in self._kept.values():
            answers.bank, answers.young = answers.young, new_bank()
        self._kept = {name: one for name, one in self._kept.items() if one.bank.marks[LENGTH]}
        self._count()

    def _count(self) -> None:
        banks = sum(answers.nbytes for answers in self._kept.values())
        self.nbytes = banks + sum(map(_listed, self._list))

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
                    tensors |= as_tensors(str(place), self._kept[salt].belief)
            header = {
                "format": FORMAT,
                "version": VERSION,
                "vocab_size": str(self.model.vocab_size),
                "vocabulary": self.model.vocabulary() or "",
                "salts": json.dumps(salts),
            }
            header["sum"] = _sum(header, tensors)
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
            if header.pop("sum", None) != _sum(header, tensors):
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
            raise ValueError("it has token ids that the model has not")
        if (rows < 0).any() or (rows[:, 2] > rows[:, 1]).any() or rows[:, 1].sum() != len(ids):
            raise ValueError("its answers have impossible lengths")
        found = [Answers(self, salt) for salt in salts]
        for place, answers in enumerate(found):
            answers.belief = checked(tensors, str(place), 2)
            self._open[answers.salt] = answers
        end = 0
        for place, length, quiet in rows.tolist():
            start, end = end, end + length
            self.add(found[place], ids[start:end], length - quiet)


def behind(bank: Bank, answer: Answer) -> Bank:
    """The bank with one more answer, to be indexed."""
    return put(bank, int(bank.marks[LENGTH]), answer.ids.tolist(), 0)


def remember(bank: Bank, answer: Answer) -> None:
    """Index an answer that was put behind the others."""
    start = int(bank.marks[LENGTH])
    end, quiet = start + len(answer.ids), start + answer.quiet
    advance(
        bank, end, quiet, start, end, NONE, NO_BELIEF, WORK, 0.0, 1.0, 1.0, NOTHING
    )  # fmt: skip


NONE, NO_BELIEF, WORK = new_bank(), untaught(1), new_work(ORDERS)
"""For what reads and drafts nothing."""


def merged(belief: Belief, start: Belief, learnt: Belief) -> Belief:
    """`belief` with what a request learnt that began with `start`: its changes are added, and what
    leaves the bounds is clipped.

    So requests at the same time count all, in whatever order they end, but for what is clipped.
    """
    if belief is start:
        return copied(learnt)
    cells = (np.array(belief.cells) + learnt.cells - start.cells).reshape(-1, VALUES)
    cells[:, CHANCE] = chance = cells[:, CHANCE].clip(RARE, 1 - RARE)
    cells[:, CASES] = cells[:, CASES].clip(0, MEMORY)
    cells[:, LOGIT] = np.log(chance / (1 - chance))
    weights = np.array(belief.weights) + learnt.weights - start.weights
    return Belief(floats(cells.ravel()), floats(weights.clip(-HEAVY, HEAVY)))


def _listed(answer: Answer) -> int:
    return LISTED + int(answer.ids.nbytes)


def _sum(header: Mapping[str, str], tensors: Mapping[str, Any]) -> str:
    """Checksum of all that a file says."""
    total = zlib.crc32(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].tobytes(), total)
    return f"{total:08x}"
