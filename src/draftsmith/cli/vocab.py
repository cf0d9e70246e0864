"""`draftsmith vocab`: what two tokenizers share, and which algorithm suits the pair."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text

from draftsmith import builtin
from draftsmith.cli.loading import load_tokenizer, quiet, resolve, short, waiting
from draftsmith.cli.options import Json
from draftsmith.cli.reading import read_text
from draftsmith.cli.render import plain_table, visible
from draftsmith.cli.report import print_json, stdout
from draftsmith.errors import LoadError, OptionError

if TYPE_CHECKING:
    from rich.table import Table

    from draftsmith.text.comparison import Comparison, Usage
    from draftsmith.text.vocab import Vocabulary

_SHOWN = 70
"""Characters of a piece that a tokenizer changes, from the first that differs."""

_SHARES = ("of_target", "of_drafter", "of_target_text", "of_drafter_text")
"""What a `Comparison` tells in numbers from 0 to 1."""

_LEGEND = (
    "T: the target's tokens, D: the drafter's; in text: of the different ones that the text takes. "
    "Injective: how many pieces of 100 characters do not survive encoding and decoding."
)


@dataclass(frozen=True, kw_only=True)
class VocabOptions:
    """Whose tokenizers are compared, and on which text."""

    spelt: ClassVar[dict[str, str]] = {
        "target": "A",
        "drafter": "B",
        "text": "TEXT",
        "model": "--model -m A",
        "also": "--also C",
    }

    target: str | None = None
    """The target's tokenizer: a hub id, a folder, a tokenizer.json, or a built-in model's name."""
    drafter: str | None = None
    """The drafter's."""
    text: str | None = None
    """A text file like those that will be generated, the demo's by default; - is standard input."""
    model: str | None = None
    """The target, instead of A."""
    also: tuple[str, ...] = ()
    """One more tokenizer; every pair is compared."""


def vocab(chosen: VocabOptions, json_: Json = False) -> None:
    """Compare the vocabularies of a target and a drafter, and say which algorithm suits them.

    Only tokenizers are loaded, no weights. Tokens are compared by the bytes that they write.

    [bold]Examples[/bold]

    draftsmith vocab Qwen/Qwen2.5-7B-Instruct HuggingFaceTB/SmolLM2-135M

    draftsmith vocab edit-7m models/llama/tokenizer.json notes.txt
    """
    from draftsmith.text.comparison import Comparison, Usage

    places = (chosen.model, chosen.target, chosen.drafter, chosen.text)
    named = [name for name in places if name is not None]
    if not 2 <= len(named) <= 3:
        raise OptionError("two tokenizers are compared: give A and B, and a TEXT if you like")
    target, drafter, *paths = named
    sample = _sample(paths[0]) if paths else "\n".join(builtin.demo())
    usages = {}
    for name in (target, drafter, *chosen.also):
        vocabulary = _vocabulary(name)
        with waiting(f"reading {short(name)} …"), quiet():
            usages[name] = Usage(vocabulary, sample)
    pairs = permutations(usages, 2) if chosen.also else [(target, drafter)]
    found = {(a, b): Comparison(usages[a], usages[b]) for a, b in pairs}
    if json_:
        print_json(_as_json(usages, found))
        return
    console = stdout()
    console.print(_tokenizers(usages), "", _pairs(found), sep="\n")
    console.print(Text(_LEGEND, "dim"))
    if not chosen.also:
        algorithm, why = found[target, drafter].advice
        use = Text(f"draft_model(…, algorithm={algorithm!r})", "bold")
        console.print(Text.assemble("\nUse ", use, f": {why}."))
    for name, usage in usages.items():
        if usage.changed:
            example = f"{_called(name)} changes {_example(*usage.changed[0])}."
            console.print(Text("\n" + visible(example)))


def _sample(path: str) -> str:
    text = read_text(path)
    if not text:
        raise OptionError(f"{path} is empty; give a text like those that will be generated")
    return text


def _vocabulary(name: str) -> Vocabulary:
    from draftsmith.text.vocab import Vocabulary

    source = resolve(name)
    path = Path(source).expanduser()
    if path.is_dir() and not (path / "tokenizer_config.json").is_file():
        path = path / "tokenizer.json"
        if not path.is_file():
            raise LoadError(f"{source} has neither tokenizer_config.json nor tokenizer.json")
    if path.is_file():
        return Vocabulary.of(_file(path))
    return Vocabulary.of(load_tokenizer(name))


def _file(path: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises nothing more special.
        raise LoadError(f"{path} cannot be read as a tokenizer: {error}") from error


def _called(name: str) -> str:
    path = Path(name)
    return path.resolve().parent.name if path.is_file() else short(name)


def _tokenizers(usages: dict[str, Usage]) -> Table:
    from draftsmith.text.comparison import count

    heads = ("", "tokens", "special", "longest", "per character", "injective")
    table = plain_table(*heads, header=True)
    for name, usage in usages.items():
        v, changed = usage.vocabulary, len(usage.changed)
        table.add_row(
            _called(name),
            f"{count(v):,}",
            f"{len(v.special):,}",
            f"{v.longest} bytes" if v.longest > 1 else "1 byte",
            f"{usage.tokens_per_character:.3f}",
            f"no ({changed}/{len(usage.pieces)})" if changed else f"yes (0/{len(usage.pieces)})",
        )
    return table


def _pairs(found: dict[tuple[str, str], Comparison]) -> Table:
    heads = ("target ← drafter", "shared", "of T", "of D", "T in text", "D in text", "algorithm")
    table = plain_table(*heads, header=True)
    for (target, drafter), c in found.items():
        table.add_row(
            f"{_called(target)} ← {_called(drafter)}",
            f"{c.shared.size:,}",
            *(_share(getattr(c, name)) for name in _SHARES),
            c.advice[0],
        )
    return table


def _share(value: float) -> str:
    return f"{value:.3f}" if value < 1 else "1"


def _example(piece: str, back: str) -> str:
    """A piece and what becomes of it, from the first character that differs."""
    pairs = enumerate(zip(piece, back, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(piece), len(back)))
    part = slice(at, at + _SHOWN)
    return f"{piece[part]!r} into {back[part]!r}"


def _as_json(usages: dict[str, Usage], found: dict[tuple[str, str], Comparison]) -> dict[str, Any]:
    from draftsmith.text.comparison import count

    return {
        "tokenizers": {
            name: {
                "tokens": count(usage.vocabulary),
                "special": len(usage.vocabulary.special),
                "longest": usage.vocabulary.longest,
                "tokens_per_character": usage.tokens_per_character,
                "pieces": len(usage.pieces),
                "changed": [{"text": piece, "back": back} for piece, back in usage.changed],
            }
            for name, usage in usages.items()
        },
        "pairs": [
            {
                "target": target,
                "drafter": drafter,
                "shared": c.shared.size,
                "same": c.shared.same,
                **{name: getattr(c, name) for name in _SHARES},
                "algorithm": c.advice[0],
                "why": c.advice[1],
            }
            for (target, drafter), c in found.items()
        ],
    }
