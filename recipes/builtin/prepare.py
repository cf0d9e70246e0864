"""Turn the corpora into token rows: `python prepare.py --corpora FOLDER --out FOLDER`.

Writes the tokenizer, then one store per kind of row. `held_*` stores hold the 1% kept for the
held-out loss. Repositories in `common.MEASURED_REPOS` are in none of them.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import common
from store import PROMPT, Writer
from tokenizer import save_tokenizer, train_tokenizer


def report(name: str, rows: int, tokens: int, since: float) -> None:
    print(f"{name}: {rows} rows, {tokens / 1e6:.2f}M tokens, {time.time() - since:.0f}s", flush=True)


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
            part, tokenizer.encode_batch_fast([text for text, _ in part]), strict=True
        ):
            ids = [*code.ids, end]
            stores[held].add(ids, np.full(len(ids), PROMPT, dtype=np.uint8))
    for held, store in stores.items():
        name = "held_text" if held else "text"
        report(name, len(store.ids), store.save(out, name), since)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    since = time.time()
    tokenizer = train_tokenizer(args.corpora, args.vocab)
    save_tokenizer(tokenizer, args.out / "tokenizer", args.context)
    print(f"tokenizer: {tokenizer.get_vocab_size()} ids, {time.time() - since:.0f}s", flush=True)
    prepare_text(args.corpora, args.out, tokenizer, args.seed)


if __name__ == "__main__":
    main()
