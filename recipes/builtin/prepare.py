"""Turn the corpora into token rows: `python prepare.py --corpora FOLDER --out FOLDER`.

Writes the tokenizer, then one store per kind of row. `held_*` stores hold the 1% kept for the
held-out loss. Repositories in `common.MEASURED_REPOS` are in none of them.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Iterable
from difflib import SequenceMatcher
from pathlib import Path

import common
import numpy as np
import synth
from numpy.typing import NDArray
from store import CHANGED, COPIED, PROMPT, SKIPPED, Writer
from tokenizer import save_tokenizer, train_tokenizer
from tokenizers import Encoding, Tokenizer

Spans = list[tuple[int, int]]


def report(name: str, rows: int, tokens: int, since: float) -> None:
    print(
        f"{name}: {rows} rows, {tokens / 1e6:.2f}M tokens, {time.time() - since:.0f}s", flush=True
    )


def prepare_text(corpora: Path, out: Path, tokenizer: Tokenizer, seed: int) -> None:
    """Documents and code as they are, each ended by the end-of-text marker."""
    since = time.time()
    documents = [
        (row["text"], common.is_held_out(row["repo"], row["path"]))
        for folder in ("docs", "code")
        for row in common.read_rows(corpora, folder)
    ]
    random.Random(seed).shuffle(documents)
    end = tokenizer.token_to_id(common.TEXT_END)
    stores = {False: Writer(), True: Writer()}
    for start in range(0, len(documents), 256):
        part = documents[start : start + 256]
        for (_, held), code in zip(
            part,
            tokenizer.encode_batch_fast([text for text, _ in part], add_special_tokens=False),
            strict=True,
        ):
            ids = [*code.ids, end]
            stores[held].add(ids, np.full(len(ids), PROMPT, dtype=np.uint8))
    for held, store in stores.items():
        name = "held_text" if held else "text"
        report(name, len(store.ids), store.save(out, name), since)


def changed_spans(before: str, after: str) -> Spans:
    """The parts of `after`, in characters, that are not copied from `before`.

    A deletion changes nothing in `after`, so the character that follows it stands for it: that is
    where a model that copies has to jump.
    """
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    places = [0]
    for line in new:
        places.append(places[-1] + len(line))
    spans: Spans = []
    for tag, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "delete":
            spans.append((places[c], places[c] + 1))
        elif tag == "insert":
            spans.append((places[c], places[d]))
        elif tag == "replace":
            spans += inner_spans("".join(old[a:b]), "".join(new[c:d]), places[c])
    return spans


def inner_spans(before: str, after: str, offset: int) -> Spans:
    """Like `changed_spans` within replaced lines, word by word where they are few enough."""
    old, new = (re.findall(r"\w+|\s+|[^\w\s]", text) for text in (before, after))
    if len(old) * len(new) > 250_000:
        return [(offset, offset + len(after))]
    places = [offset]
    for word in new:
        places.append(places[-1] + len(word))
    return [
        (places[c], places[d] if tag != "delete" else places[c] + 1)
        for tag, _, _, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        if tag != "equal"
    ]


def classes_of(answer: Encoding, spans: Spans) -> NDArray[np.uint8]:
    """Copied or changed, for each token of an answer."""
    classes = np.full(len(answer.ids), COPIED, dtype=np.uint8)
    ends = np.array([end for _, end in answer.offsets])
    starts = np.array([start for start, _ in answer.offsets])
    for start, end in spans:
        classes[np.searchsorted(ends, start, "right") : np.searchsorted(starts, end, "left")] = (
            CHANGED
        )
    return classes


class EditWriter:
    """Renders edits with the chat template, in batches because encoding is faster so."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self.tokenizer = tokenizer
        self.context = context
        self.id = {token: tokenizer.token_to_id(token) for token in common.SPECIALS}
        self.waiting: list[tuple[str, str, str, bool]] = []
        self.stores = {False: Writer(), True: Writer()}

    def add(self, prompt: str, before: str, after: str, held: bool) -> None:
        # Two characters a token is less than any text takes: spares encoding what cannot fit.
        if len(before) + len(after) > 6 * self.context or before == after:
            return
        self.waiting.append((prompt, before, after, held))
        if len(self.waiting) == 256:
            self.flush()

    def flush(self) -> None:
        if not self.waiting:
            return
        prompts = self.tokenizer.encode_batch_fast(
            [row[0] for row in self.waiting], add_special_tokens=False
        )
        befores = self.tokenizer.encode_batch_fast(
            [row[1] for row in self.waiting], add_special_tokens=False
        )
        afters = self.tokenizer.encode_batch(
            [row[2] for row in self.waiting], add_special_tokens=False
        )
        for row, prompt, before, after in zip(self.waiting, prompts, befores, afters, strict=True):
            ids = [self.id[common.USER], *prompt.ids, self.id[common.FILE], *before.ids]
            ids += [self.id[common.END], self.id[common.ASSISTANT], self.id[common.FILE]]
            asked = len(ids)
            ids += [*after.ids, self.id[common.END]]
            if len(ids) > self.context:
                continue
            classes = np.full(len(ids), SKIPPED, dtype=np.uint8)
            classes[asked:-1] = classes_of(after, changed_spans(row[1], row[2]))
            classes[-1] = CHANGED  # knowing when to stop is no copying
            self.stores[row[3]].add(ids, classes)
        self.waiting.clear()

    def save(self, out: Path, name: str, since: float) -> None:
        self.flush()
        for held, store in self.stores.items():
            if store.ids:
                full = f"held_{name}" if held else name
                report(full, len(store.ids), store.save(out, full), since)


def pieces(rng: random.Random, before: str, after: str) -> Iterable[tuple[str, str]]:
    """Windows of both files around one change: short rows from long files."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    codes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    places = [i for i, code in enumerate(codes) if code[0] != "equal"]
    if not places:
        return
    at = rng.choice(places)
    _, a, b, c, d = codes[at]
    reach = int(4 * 16 ** rng.random())
    up = rng.randrange(reach + 1) if at else 0
    up = min(up, codes[at - 1][2] - codes[at - 1][1]) if at else 0
    down = 0
    if at + 1 < len(codes):
        down = min(reach, codes[at + 1][2] - codes[at + 1][1])
    yield "".join(old[a - up : b + down]), "".join(new[c - up : d + down])


def prepare_edits(corpora: Path, out: Path, tokenizer: Tokenizer, context: int, seed: int) -> None:
    """Commits as they are, and windows of them around a change."""
    since = time.time()
    rng = random.Random(seed)
    whole, cut = EditWriter(tokenizer, context), EditWriter(tokenizer, context)
    for row in common.read_rows(corpora, "edits"):
        held = common.is_held_out(row["repo"], row["path"])
        message = re.sub(r"\n*--HG--.*", "", row["message"], flags=re.DOTALL).strip()[:1000]
        before, after = row["before"], row["after"]
        if before == after or not message or common.FILE in before + after:
            continue
        prompt = f"{row['path']}: {message}\n"
        whole.add(prompt, before, after, held)
        if len(before) + len(after) < 80_000:
            for old, new in pieces(rng, before, after):
                cut.add(prompt, old, new, held)
    whole.save(out, "edits", since)
    cut.save(out, "hunks", since)


def prepare_synth(
    corpora: Path, out: Path, tokenizer: Tokenizer, context: int, seed: int, count: int
) -> None:
    """Edits made by program from code and documents."""
    since = time.time()
    rng = random.Random(seed)
    files = [
        (row["path"], row["text"], folder == "code", common.is_held_out(row["repo"], row["path"]))
        for folder in ("code", "docs")
        for row in common.read_rows(corpora, folder)
        if 200 < len(row["text"]) < 200_000
    ]
    code = [file for file in files if file[2]]
    documents = [file for file in files if not file[2]]
    names = sorted({n for f in rng.sample(code, len(code) // 4) for n in synth.NAME.findall(f[1])})
    words = sorted(
        {w for f in rng.sample(documents, len(documents) // 8) for w in synth.WORD.findall(f[1])}
    )
    maker = synth.Maker(rng, names, words)
    writer = EditWriter(tokenizer, context)
    for _ in range(count):
        path, text, is_code, held = rng.choice(code if rng.random() < 0.85 else documents)
        edit = maker.make(synth.window(rng, text), is_code)
        if edit is not None:
            message, before, after = edit
            # A path is no part of the instruction, and short ones are what people write.
            shown = path if rng.random() < 0.5 else path.rsplit("/", 1)[-1]
            writer.add(f"{shown}: {message}\n", before, after, held)
    writer.save(out, "synth", since)


def prepare_instruct(corpora: Path, out: Path, tokenizer: Tokenizer, context: int) -> None:
    """Questions answered from the text they come with."""
    since = time.time()
    id_of = {token: tokenizer.token_to_id(token) for token in common.SPECIALS}
    stores = {False: Writer(), True: Writer()}
    rows = [
        row
        for row in common.read_rows(corpora, "instruct")
        if row["prompt"].strip() and row["completion"].strip()
    ]
    for start in range(0, len(rows), 256):
        part = rows[start : start + 256]
        prompts = tokenizer.encode_batch_fast(
            [row["prompt"] for row in part], add_special_tokens=False
        )
        answers = tokenizer.encode_batch_fast(
            [row["completion"].strip() for row in part], add_special_tokens=False
        )
        for row, prompt, answer in zip(part, prompts, answers, strict=True):
            ids = [id_of[common.USER], *prompt.ids, id_of[common.END], id_of[common.ASSISTANT]]
            asked = len(ids)
            ids += [*answer.ids, id_of[common.END]]
            if len(ids) <= context:
                classes = np.full(len(ids), PROMPT, dtype=np.uint8)
                classes[asked:] = CHANGED
                stores[common.is_held_out(row["prompt"])].add(ids, classes)
    for held, store in stores.items():
        name = "held_instruct" if held else "instruct"
        report(name, len(store.ids), store.save(out, name), since)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--synth", type=int, default=40_000, help="program-made edits to try")
    parser.add_argument(
        "--only", nargs="*", default=["tokenizer", "text", "edits", "synth", "instruct"]
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    since = time.time()
    if "tokenizer" in args.only:
        tokenizer = train_tokenizer(args.corpora, args.vocab)
        save_tokenizer(tokenizer, args.out / "tokenizer", args.context)
        report("tokenizer", tokenizer.get_vocab_size(), 0, since)
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer" / "tokenizer.json"))
    # Text may show a marker's name; only what this recipe writes as an id is a marker.
    tokenizer.encode_special_tokens = True
    if "text" in args.only:
        prepare_text(args.corpora, args.out, tokenizer, args.seed)
    if "instruct" in args.only:
        prepare_instruct(args.corpora, args.out, tokenizer, args.context)
    if "synth" in args.only:
        prepare_synth(args.corpora, args.out, tokenizer, args.context, args.seed, args.synth)
    if "edits" in args.only:
        prepare_edits(args.corpora, args.out, tokenizer, args.context, args.seed)


if __name__ == "__main__":
    main()
