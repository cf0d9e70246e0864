"""`draftsmith vocab`: what two tokenizers share, and which algorithm suits the pair."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from draftsmith import builtin
from draftsmith.cli.loading import load_tokenizer, read_text, resolve, short, waiting
from draftsmith.cli.options import Json, OptionText
from draftsmith.cli.render import plain_table, plural, visible
from draftsmith.cli.report import print_json, stdout
from draftsmith.errors import LoadError, OptionError

if TYPE_CHECKING:
    from rich.table import Table

    from draftsmith.text.comparison import Comparison, Usage
    from draftsmith.text.vocab import Vocabulary

_SHOWN = 70
"""Characters shown of a piece that a tokenizer changes, from the first difference."""

_SHARES = ("of_target", "of_drafter", "of_target_text", "of_drafter_text")
"""Entries of a `Comparison` that are shares from 0 to 1."""

_LEGEND = (
    "T: the target's tokens, D: the drafter's; in text: of the different tokens in the text. "
    "Injective: number of pieces of 100 characters that encoding and decoding change."
)


def vocab(
    target: Annotated[
        str,
        Parameter(
            name="A",
            help="The target's tokenizer: a hub id, a folder, a GGUF file, a tokenizer.json, or a "
            "name such as smollm2.",
        ),
    ],
    drafter: Annotated[str, Parameter(name="B", help="The drafter's tokenizer.")],
    text: Annotated[
        OptionText | None,
        Parameter(
            help="A text file like those that will be generated; - is standard input.",
            show_default="the demo's",
        ),
    ] = None,
    /,
    *,
    also: Annotated[
        tuple[str, ...],
        Parameter(help="One more tokenizer; every pair is compared. May be given several times."),
    ] = (),
    json_: Json = False,
) -> None:
    """Compare two vocabularies, and say which algorithm suits the pair.

    Only tokenizers are loaded, no weights. Tokens are compared by the bytes that they write.

    Examples

    draftsmith vocab Qwen/Qwen2.5-7B-Instruct HuggingFaceTB/SmolLM2-135M
    draftsmith vocab edit-7m models/llama/tokenizer.json notes.txt
    """
    from draftsmith.core.drafter import common_prefix
    from draftsmith.text.comparison import Comparison, Usage

    sample = "\n".join(builtin.demo()) if text is None else read_text(text)
    if not sample:
        raise OptionError(f"{text} is empty; give a text like those that will be generated")
    usages = {}
    for name in (target, drafter, *also):
        vocabulary = _vocabulary(name)
        with waiting(f"reading {short(name)} …"):
            usages[name] = Usage(vocabulary, sample)
    pairs = permutations(usages, 2) if also else [(target, drafter)]
    tokenizers = {name: _facts(usage) for name, usage in usages.items()}
    found = [_compared(a, b, Comparison(usages[a], usages[b])) for a, b in pairs]
    if json_:
        print_json({"tokenizers": tokenizers, "pairs": found})
        return
    console = stdout()
    console.print(_tokenizers(tokenizers), "", _pairs(found), sep="\n")
    console.print(Text(_LEGEND, "dim"))
    if not also:
        use = Text(f"draft_model(…, algorithm={found[0]['algorithm']!r})", "bold")
        console.print(Text.assemble("\nUse ", use, f": {found[0]['why']}."))
    for name, facts in tokenizers.items():
        for changed in facts["changed"][:1]:  # from the first difference
            at = common_prefix(*changed.values())
            piece, back = (repr(part[at : at + _SHOWN]) for part in changed.values())
            console.print(Text("\n" + visible(f"{_called(name)} changes {piece} into {back}.")))


def _vocabulary(name: str) -> Vocabulary:
    from draftsmith.text.tokenizer import read_bare
    from draftsmith.text.vocab import Vocabulary

    source = resolve(name)
    path = Path(source)
    if path.is_dir() and not (path / "tokenizer_config.json").is_file():
        path = path / "tokenizer.json"
        if not path.is_file():
            raise LoadError(f"{source} has neither tokenizer_config.json nor tokenizer.json")
    if path.is_file() and not builtin.is_gguf(source):
        return Vocabulary.of(read_bare(path))
    return Vocabulary.of(load_tokenizer(name))


def _called(name: str) -> str:
    path = Path(name)
    lone = path.is_file() and not builtin.is_gguf(name)
    return path.resolve().parent.name if lone else short(name)


def _facts(usage: Usage) -> dict[str, Any]:
    from draftsmith.text.comparison import count

    return {
        "tokens": count(usage.vocabulary),
        "special": len(usage.vocabulary.special),
        "longest": usage.vocabulary.longest,
        "tokens_per_character": usage.tokens_per_character,
        "pieces": len(usage.pieces),
        "changed": [{"text": piece, "back": back} for piece, back in usage.changed],
    }


def _compared(target: str, drafter: str, found: Comparison) -> dict[str, Any]:
    algorithm, why = found.advice
    return {
        "target": target,
        "drafter": drafter,
        "shared": found.shared.size,
        "same": found.shared.same,
        **{name: getattr(found, name) for name in _SHARES},
        "algorithm": algorithm,
        "why": why,
    }


def _tokenizers(tokenizers: dict[str, dict[str, Any]]) -> Table:
    heads = ("", "tokens", "special", "longest", "per character", "injective")
    table = plain_table(*heads)
    for name, facts in tokenizers.items():
        changed = len(facts["changed"])
        table.add_row(
            _called(name),
            f"{facts['tokens']:,}",
            f"{facts['special']:,}",
            plural(facts["longest"], "byte"),
            f"{facts['tokens_per_character']:.3f}",
            f"{'no' if changed else 'yes'} ({changed}/{facts['pieces']})",
        )
    return table


def _pairs(found: list[dict[str, Any]]) -> Table:
    heads = ("target ← drafter", "shared", "of T", "of D", "T in text", "D in text", "algorithm")
    table = plain_table(*heads)
    for pair in found:
        name = f"{_called(pair['target'])} ← {_called(pair['drafter'])}"
        shares = (pair[share] for share in _SHARES)
        shown = (f"{share:.3f}" if share < 1 else "1" for share in shares)
        table.add_row(name, f"{pair['shared']:,}", *shown, pair["algorithm"])
    return table
