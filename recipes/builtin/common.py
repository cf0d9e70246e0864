"""What all steps of the recipe share: the vocabulary's special tokens and the corpora.

The order of the special tokens decides their ids, which are in every prepared row and every trained
embedding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.storage import open_text

NAMES = "pad endoftext user assistant system end file fim_prefix fim_suffix fim_middle"
NAMED = [f"<|{name}|>" for name in NAMES.split()]
PAD, TEXT_END, USER, ASSISTANT, _, END, FILE, FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE = NAMED
SPECIALS = [*NAMED, *(f"<|reserved_{i}|>" for i in range(32))]
ID = {token: number for number, token in enumerate(SPECIALS)}

# Never trained on, so that edits of these repositories measure the model.
MEASURED_REPOS = frozenset({"pallets/flask", "TheAlgorithms/Python"})


def is_held_out(row: dict[str, Any]) -> bool:
    """Whether a row is held out: one in a hundred, chosen by its name."""
    name = row["prompt"] if "prompt" in row else f"{row['repo']}\x00{row['path']}"
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 == 0


def read_rows(corpora: Path, folder: str, *, measured: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the rows of one corpus folder, without the measured repositories or only those.

    A row's own `repo` takes precedence over the file name.
    """
    for path in sorted((corpora / folder).glob("*.jsonl.xz")):
        with open_text(path) as lines:
            for row in map(json.loads, lines):
                repo = row.get("repo", path.name.removesuffix(".jsonl.xz").replace("+", "/", 1))
                if (repo in MEASURED_REPOS) == measured:
                    yield row
