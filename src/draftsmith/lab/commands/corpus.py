"""`draftsmith corpus`: texts for drafters that look up continuations."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from draftsmith import builtin
from draftsmith.cli.commands import HELP
from draftsmith.cli.loading import bar, load_model, load_tokenizer
from draftsmith.cli.options import Json, MachineOptions, NewFolder
from draftsmith.cli.render import facts_table
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
    """Build a corpus of the texts with the lowest perplexity under a model. Resumes if interrupted.

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
        note("give the same command again to resume")
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
for command in (build, info):
    app.command(command)
