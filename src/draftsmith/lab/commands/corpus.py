"""`draftsmith corpus`: texts for the drafters that look things up."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.text import Text

from draftsmith import builtin
from draftsmith.cli.commands import HELP
from draftsmith.cli.loading import bar, load_model, load_tokenizer
from draftsmith.cli.options import Count, Json, MachineOptions, NewFolder
from draftsmith.cli.render import facts_table, plain_table, plural, visible
from draftsmith.cli.report import note, print_json, stdout
from draftsmith.lab.corpus.plan import CorpusPlan

if TYPE_CHECKING:
    from draftsmith.drafters.corpus.files import Header

Folder = Annotated[Path, Parameter(help="A folder made by corpus build.")]


def build(
    *,
    plan: CorpusPlan,
    output: NewFolder,
    machine: MachineOptions = MachineOptions(),
    json_: Json = False,
) -> None:
    """Build a corpus of the texts that a model finds least surprising. Goes on if interrupted.

    Examples

    draftsmith corpus build -m Qwen/Qwen2.5-0.5B-Instruct --texts chats.jsonl -o chats.corpus
    draftsmith run -m Qwen/Qwen2.5-0.5B-Instruct -d "retrieval(corpus='chats.corpus')" "Hello"
    """
    from draftsmith.drafters.corpus.files import HEADER
    from draftsmith.lab.corpus.build import build as make

    loaded = None if plan.keep is None else load_model(machine)
    tokenizer = load_tokenizer(machine.model) if loaded is None else loaded.tokenizer
    there = (output / HEADER).exists()
    try:
        header = make(plan, output, tokenizer, loaded, machine.model or builtin.default(), bar)
    except KeyboardInterrupt:
        note("give the same command again to go on where it stopped")
        raise
    if there:
        note(f"{output} was built before; delete it to build it again")
    _show(output, header, json_)


def info(folder: Folder, /, *, json_: Json = False) -> None:
    """Say what a corpus holds and how it was built, once its checksums were found to be right.

    Example

    draftsmith corpus info chats.corpus
    """
    from draftsmith.drafters.corpus.datastore import Datastore

    _show(folder, Datastore.open(folder).header, json_)


def query(
    folder: Folder,
    text: Annotated[str, Parameter(help="What is looked up: its last tokens.")],
    /,
    *,
    model: Annotated[
        str | None,
        Parameter(
            alias="-m",
            show_default="the corpus's",
            help="The model of the tokenizer: a Hugging Face hub id or a folder.",
        ),
    ] = None,
    most: Annotated[Count, Parameter(help="Continuations to show, best first.")] = 8,
    json_: Json = False,
) -> None:
    """Show what followed the end of a text in a corpus.

    Example

    draftsmith corpus query chats.corpus "How can I"
    """
    from draftsmith.drafters.corpus.datastore import Datastore

    store = Datastore.open(folder, verify=False)
    from draftsmith.text.tokenizer import decode, encode
    from draftsmith.text.vocab import fingerprint

    tokenizer = load_tokenizer(model or store.header.model)
    store.header.check_vocabulary(fingerprint(tokenizer), folder)
    ids = encode(tokenizer, text)
    match = store.find(ids)
    found: dict[str, Any]
    if match is None:
        found = {"matched": "", "tokens": 0, "occurrences": 0, "counted": 0, "continuations": []}
    else:
        trie = store.trie(match)
        found = {
            "matched": decode(tokenizer, ids[-match.length :]),
            "tokens": match.length,
            "occurrences": match.count,
            "counted": len(trie.paths),
            "continuations": [
                {
                    "text": decode(tokenizer, trie.tokens[path].tolist()),
                    "begin": int(trie.weights[path[0]]),
                    "whole": int(trie.weights[path[-1]]),
                }
                for path in trie.best(most)
            ],
        }
    if json_:
        print_json(found)
        return
    if match is None:
        stdout().print("nothing in the corpus ends like this text")
        return
    table = plain_table("continuation", "begin so", "go on so", header=True)
    for one in found["continuations"]:
        table.add_row(Text(visible(repr(one["text"]))), str(one["begin"]), str(one["whole"]))
    tokens, times = plural(match.length, "token"), plural(match.count, "time")
    title = f"{found['matched']!r} ({tokens}) occurs {times}, {found['counted']} counted"
    stdout().print(Text(title, "italic"), table, sep="\n")


def _show(folder: Path, header: Header, json_: bool) -> None:
    if json_:
        print_json(asdict(header))
        return
    ranked, made = header.perplexity, header.settings
    perplexity = ", ".join(f"{name} {value:.2f}" for name, value in ranked.items())
    facts = {
        "corpus": str(folder),
        "for": f"{header.model}, vocabulary {header.vocabulary[:12]}",
        "holds": f"{header.tokens:,} tokens, {8 * header.tokens / 1e6:,.1f} MB",
        "kept": f"{header.examples:,} of {made.get('pieces', header.examples):,} pieces",
        "perplexity": perplexity or "not ranked",
        "read": ", ".join(f"{value:,} {name}" for name, value in made.get("read", {}).items()),
    }
    stdout().print(facts_table(facts))


app = App(name="corpus", help=HELP["corpus"])
for command in (build, info, query):
    app.command(command)
