"""Turn the corpora into token rows: `python prepare.py --corpora FOLDER --out FOLDER`.

Writes the tokenizer, then one file per kind of row. `held_*` files have the 1% for the held-out
loss. Repositories in `common.MEASURED_REPOS` are in none of them.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import NamedTuple

import numpy as np
import synth
from common import ASSISTANT, END, FILE, ID, TEXT_END, USER, is_held_out, read_rows
from numpy.typing import NDArray
from rows import CHANGED, COPIED, PROMPT, SKIPPED, save
from tokenizer import train_tokenizer
from tokenizers import Encoding, Tokenizer

SEED = 1
CONTEXT = 4096  # most tokens of a row
Spans = list[tuple[int, int]]
WORD = re.compile(r"\w+|\s+|[^\w\s]")
Made = tuple[list[int], NDArray[np.uint8], bool]  # ids, their classes, whether they are held out


class Edit(NamedTuple):
    """The prompt, the file before and after; or a question, None, and the answer."""

    prompt: str
    before: str | None
    after: str
    held: bool


def write(out: Path, name: str, made: Iterable[Made]) -> None:
    """Write rows; held-out ones to a separate file."""
    kept: dict[str, list[tuple[list[int], NDArray[np.uint8]]]] = defaultdict(list)
    for ids, classes, held in made:
        kept[f"held_{name}" if held else name].append((ids, classes))
    for full, rows in kept.items():
        tokens = save(out / f"{full}.npz", rows)
        print(f"{full}: {len(rows)} rows, {tokens / 1e6:.2f}M tokens", flush=True)


def texts(corpora: Path, tokenizer: Tokenizer) -> Iterator[Made]:
    """Yield documents and code as they are, each ended by the end-of-text marker."""
    documents = [*read_rows(corpora, "docs"), *read_rows(corpora, "code")]
    random.Random(SEED).shuffle(documents)
    for row in documents:
        code = tokenizer.encode(row["text"], add_special_tokens=False)
        ids = [*code.ids, ID[TEXT_END]]
        yield ids, np.full(len(ids), PROMPT, dtype=np.uint8), is_held_out(row)


def lines_of(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def changed_spans(
    before: str, after: str, cut: Callable[[str], list[str]] = lines_of, offset: int = 0
) -> Spans:
    """Return the parts of `after`, in characters, that are not copied from `before`.

    By lines; within replaced ones by words, if they are few enough. A deletion changes nothing in
    `after`, so the character after it counts as changed: there a copying model must jump.
    """
    old, new = cut(before), cut(after)
    if cut is not lines_of and len(old) * len(new) > 250_000:
        return [(offset, offset + len(after))]
    places = np.cumsum([offset, *map(len, new)]).tolist()
    spans: Spans = []
    for tag, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "replace" and cut is lines_of:
            replaced = "".join(old[a:b]), "".join(new[c:d])
            spans += changed_spans(*replaced, WORD.findall, places[c])
        elif tag != "equal":
            spans.append((places[c], places[c] + 1 if tag == "delete" else places[d]))
    return spans


def classes_of(answer: Encoding, spans: Spans) -> NDArray[np.uint8]:
    """Return whether each token of an answer is copied or changed."""
    classes = np.full(len(answer.ids), COPIED, dtype=np.uint8)
    starts, ends = np.array(answer.offsets or [(0, 0)]).T
    for start, end in spans:
        first, last = np.searchsorted(ends, start, "right"), np.searchsorted(starts, end, "left")
        classes[first:last] = CHANGED
    return classes


def answered(edits: Iterable[Edit], tokenizer: Tokenizer) -> Iterator[Made]:
    """Yield edits and questions in the chat template, if they fit."""
    for edit in edits:
        # Avoids encoding texts that cannot fit: few have six characters per token.
        too_long = len(edit.before or "") + len(edit.after) > 6 * CONTEXT
        if edit.before == edit.after or too_long:
            continue
        prompt, before, after = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in (edit.prompt, edit.before or "", edit.after)
        )
        file = [] if edit.before is None else [ID[FILE]]
        asked = [ID[USER], *prompt.ids, *file, *before.ids, ID[END], ID[ASSISTANT], *file]
        ids = [*asked, *after.ids, ID[END]]
        if len(ids) > CONTEXT:
            continue
        # Including the end, so that the model learns when to stop.
        classes = np.full(len(ids), CHANGED, dtype=np.uint8)
        if edit.before is None:
            classes[: len(asked)] = PROMPT
        else:
            classes[: len(asked)] = SKIPPED
            classes[len(asked) : -1] = classes_of(after, changed_spans(edit.before, edit.after))
        yield ids, classes, edit.held


def commits(corpora: Path) -> Iterator[Edit]:
    """Yield commits as they are."""
    for row in read_rows(corpora, "edits"):
        message = re.sub(r"\n*--HG--.*", "", row["message"], flags=re.DOTALL).strip()[:1000]
        before, after = row["before"], row["after"]
        if before != after and message and FILE not in before + after:
            yield Edit(f"{row['path']}: {message}\n", before, after, is_held_out(row))


def hunks(corpora: Path) -> Iterator[Edit]:
    """Yield windows of both files around one change: short rows from long files."""
    rng = random.Random(SEED)
    for edit in commits(corpora):
        old, new = lines_of(edit.before or ""), lines_of(edit.after)
        if len(edit.before or "") + len(edit.after) >= 80_000:
            continue
        codes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        places = [i for i, code in enumerate(codes) if code[0] != "equal"]
        at = rng.choice(places)
        _, a, b, c, d = codes[at]
        reach = int(4 * 16 ** rng.random())
        up = min(rng.randrange(reach + 1), codes[at - 1][2] - codes[at - 1][1]) if at else 0
        down = min(reach, codes[at + 1][2] - codes[at + 1][1]) if at + 1 < len(codes) else 0
        before, after = "".join(old[a - up : b + down]), "".join(new[c - up : d + down])
        yield edit._replace(before=before, after=after)


def made(corpora: Path, count: int) -> Iterator[Edit]:
    """Yield program-made edits of code and documents."""
    rng = random.Random(SEED)
    code, documents = (
        [row for row in read_rows(corpora, folder) if 200 < len(row["text"]) < 200_000]
        for folder in ("code", "docs")
    )
    samples = (rng.sample(code, len(code) // 4), rng.sample(documents, len(documents) // 8))
    maker = synth.Maker(rng, *([row["text"] for row in rows] for rows in samples))
    for _ in range(count):
        files = code if rng.random() < 0.85 else documents
        row = rng.choice(files)
        edit = maker.make(synth.window(rng, row["text"]), files is code)
        if edit is not None:
            message, before, after = edit
            # A path is not part of the instruction, and people write short ones.
            path = row["path"] if rng.random() < 0.5 else row["path"].rsplit("/", 1)[-1]
            yield Edit(f"{path}: {message}\n", before, after, is_held_out(row))


def questions(corpora: Path) -> Iterator[Edit]:
    """Yield questions with answers from their text."""
    for row in read_rows(corpora, "instruct"):
        prompt, answer = row["prompt"], row["completion"].strip()
        if prompt.strip() and answer:
            yield Edit(prompt, None, answer, is_held_out(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--synth", type=int, default=40_000, help="program-made edits to try")
    args = parser.parse_args()
    corpora = args.corpora
    tokenizer = train_tokenizer(corpora, args.vocab)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"))
    # Text may contain a marker's name; only ids written by this recipe are markers.
    tokenizer.encode_special_tokens = True
    write(args.out, "text", texts(corpora, tokenizer))
    for name, edits in (
        ("instruct", questions(corpora)),
        ("synth", made(corpora, args.synth)),
        ("hunks", hunks(corpora)),
        ("edits", commits(corpora)),
    ):
        write(args.out, name, answered(edits, tokenizer))


if __name__ == "__main__":
    main()
