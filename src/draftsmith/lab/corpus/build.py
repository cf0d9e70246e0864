"""Builds a corpus: read and cut texts, rank the pieces by the target, index the best.

Results stay in the folder `building` of the corpus until it is complete. A build that was killed
resumes there and ends with the same bytes as an uninterrupted one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftsmith.drafters.corpus import files
from draftsmith.drafters.corpus.files import Header
from draftsmith.errors import OptionError
from draftsmith.lab.corpus.index import write_index
from draftsmith.lab.corpus.perplexity import log_likelihoods, passes, perplexities
from draftsmith.lab.corpus.pieces import Pieces, read_pieces
from draftsmith.lab.corpus.plan import CorpusPlan
from draftsmith.lab.corpus.suffixes import sorter
from draftsmith.lab.corpus.texts import find
from draftsmith.lab.fingerprint import fingerprint
from draftsmith.lab.lines import JsonLines
from draftsmith.model.loaded import LoadedModel
from draftsmith.storage import digest, lock, write_text, writing
from draftsmith.text import vocab
from draftsmith.text.tokenizer import opening

_LOCK = "lock"
"""Name of the first file of a build, in its folder `BUILDING`."""

Show = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows progress: (title, total) → context with a function that adds finished items."""


def unseen(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:  # noqa: ARG001
    """Show nothing."""
    return nullcontext(lambda _: None)


def build(
    plan: CorpusPlan,
    folder: Path,
    tokenizer: Any,
    model: LoadedModel | None,
    name: str,
    show: Show = unseen,
) -> Header:
    """Build the corpus of a model in `folder`, resuming an earlier build there.

    `model` may be None if nothing is ranked. `name` is the model's name in the header. Raises
    LoadError for texts that cannot be read; OptionError if `folder` contains something else or
    another build, or if the sorter is not installed. All errors are raised before the model runs.
    """
    sorter()  # fail before hours of ranking
    if plan.keep is not None and model is None:
        raise OptionError("ranking pieces needs a model; give one, or keep=None")
    vocabulary_print = vocab.fingerprint(tokenizer)
    done = _finished(folder, plan, vocabulary_print, name)
    if done is not None:
        return done
    skipped: list[Path] = []
    own = folder.resolve()
    texts = find(plan.texts, skip=skipped.append)
    found = tuple(path for path in texts if own not in path.resolve().parents)
    workshop = folder / files.BUILDING
    with writing(workshop):
        workshop.mkdir(parents=True, exist_ok=True)
        held = (workshop / _LOCK).open("ab")
    with held:
        lock(held)  # another process may be building here, and end with this corpus
        header = _finished(folder, plan, vocabulary_print, name)
        if header is None:
            note, key = workshop / "key", _key(plan, found, tokenizer, model)
            _check_begun(note, key)
            with show("reading texts", len(found)) as advance:
                pieces = read_pieces(found, plan.fields, plan.piece, tokenizer, advance)
            write_text(note, key)  # only now: nothing was computed for texts that cannot be read
            chosen, facts = np.arange(len(pieces), dtype=np.int64), dict[str, float]()
            if plan.keep is not None and model is not None:
                journal = workshop / "scores.jsonl"
                ranks = score(pieces, model, opening(tokenizer), journal, show)
                chosen, facts = lowest(ranks, plan.keep)
            read = dict(pieces.facts)
            if skipped:
                read["skipped as no regular file"] = len(skipped)
            with show("sorting", 1) as advance:
                header = write_index(
                    folder,
                    pieces.joined(chosen),
                    vocabulary=vocabulary_print,
                    examples=len(chosen),
                    model=name,
                    settings=plan.settings() | {"read": read, "pieces": len(pieces)},
                    perplexity=facts,
                )
                advance(1)
    shutil.rmtree(workshop, ignore_errors=True)
    return header


def _key(plan: CorpusPlan, texts: Sequence[Path], tokenizer: Any, model: LoadedModel | None) -> str:
    """Return a key of everything that decides what is computed."""
    stats = [(str(path.resolve()), path.stat()) for path in texts]
    sizes = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    scored = model and [fingerprint(model), str(model.dtype), model.device.type, opening(tokenizer)]
    return digest([sizes, plan.fields, plan.piece, vocab.fingerprint(tokenizer), scored])


def _check_begun(note: Path, key: str) -> None:
    """Raise OptionError if another build began beside this note."""
    if note.is_file() and note.read_bytes() != key.encode():
        raise OptionError(
            f"{note.parent} holds the beginning of another build: the texts, their fields, "
            "--piece, the tokenizer, the model or its dtype differ; give another folder, or delete "
            "this one"
        )


def lowest(ranks: NDArray[np.float64], keep: int) -> tuple[NDArray[np.int64], dict[str, float]]:
    """Return the `keep` pieces of lowest perplexity, in the order of the texts, and figures.

    Equal ones are kept in the order of the texts.
    """
    chosen = np.sort(np.argsort(ranks, kind="stable")[:keep])
    facts = {
        "lowest": float(ranks.min()),
        "highest kept": float(ranks[chosen].max()),
        "highest": float(ranks.max()),
    }
    return chosen, facts


def _finished(folder: Path, plan: CorpusPlan, vocabulary_print: str, name: str) -> Header | None:
    """Return the header if this corpus is complete; None if the folder is free for it."""
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"{folder} is a file; give a folder")
    if not (folder / files.HEADER).exists():
        begun = not folder.exists() or _begun(folder)
        foreign = [] if begun else [path.name for path in folder.iterdir()]
        if foreign:
            raise OptionError(
                f"{folder} already holds something else (e.g. {min(foreign)}); give a new folder"
            )
        return None
    header = Header.load(folder)
    built = header.settings | {"model": header.model, "vocabulary": header.vocabulary}
    asked = plan.settings() | {"model": name, "vocabulary": vocabulary_print}
    other = ", ".join(f"{k} {built.get(k)}, now {v}" for k, v in asked.items() if built.get(k) != v)
    if other:
        raise OptionError(
            f"{folder} already holds another corpus ({other}); give another folder, or delete this "
            "one"
        )
    if _begun(folder):  # killed while deleting it
        shutil.rmtree(folder / files.BUILDING, ignore_errors=True)
    return header


def _begun(folder: Path) -> bool:
    """Whether a build has begun in the folder, which may hold another one's folder of that name."""
    workshop = folder / files.BUILDING
    return (workshop / _LOCK).is_file() or (workshop.is_dir() and not any(workshop.iterdir()))


def score(
    pieces: Pieces,
    model: LoadedModel,
    before: tuple[int, ...],
    journal: Path,
    show: Show = unseen,
) -> NDArray[np.float64]:
    """(P,) the target's perplexity of each piece. Passes in the journal are not repeated.

    The journal has a line for each pass, written to disk before the next pass. After a power
    failure, lines after the last complete one are dropped. Raises OptionError if a piece does not
    fit into the model's context.
    """
    lengths = pieces.lengths
    longest, room = int(lengths.max()) + len(before), model.context_length
    if room is not None and longest > room:
        raise OptionError(
            f"a piece has {longest} tokens, but the context of {model.name} is {room}; give "
            f"--piece with at most {room - len(before)}"
        )
    turns = passes(model, lengths)
    sums = np.empty(len(pieces))
    known: list[NDArray[np.float64]] = []

    def recall(entry: dict[str, Any]) -> None:
        number, found = len(known), np.array(entry["log_p"], dtype=float)
        if entry["pass"] != number or number == len(turns):
            raise ValueError("not the next pass")
        if found.shape != turns[number].shape or not np.isfinite(found).all():
            raise ValueError("not a number for each piece")
        known.append(found)

    lines = JsonLines(journal, recall, begins='{"pass"', hint=None)
    with show("ranking", len(pieces)) as advance:
        for number, rows in enumerate(turns):
            if number == len(known):
                found = log_likelihoods(model, (pieces[row] for row in rows), before)
                lines.add({"pass": number, "log_p": found})
                known.append(np.array(found))
            sums[rows] = known[number]
            advance(len(rows))
    return perplexities(sums, lengths, before)
