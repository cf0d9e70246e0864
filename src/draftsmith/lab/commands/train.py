"""`draftsmith train`: teach a model to draft for itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from draftsmith import builtin
from draftsmith.cli.commands import HELP
from draftsmith.cli.loading import bar, progress, resolve, set_threads
from draftsmith.cli.options import Count, Json, NewFolder
from draftsmith.cli.render import facts_table
from draftsmith.cli.report import note, print_json, stdout
from draftsmith.lab.train.recipe import Options, Recipe, Texts

if TYPE_CHECKING:
    from draftsmith.lab.train.curves import StepLosses
    from draftsmith.lab.train.sdsat import Trained


def sdsat(
    *,
    texts: Texts,
    output: NewFolder,
    recipe: Recipe = Recipe(),
    options: Options = Options(),
    model: Annotated[
        str, Parameter(alias="-m", help="A hub id, a folder or a name.")
    ] = builtin.DEFAULT,
    threads: Annotated[Count | None, Parameter(help="CPU threads.")] = None,
    json_: Json = False,
) -> None:
    """Train a model with semantic adaptive tokens (SDSAT). Goes on if interrupted.

    Run it under accelerate launch or torchrun for several devices. The folder holds the trained
    model, the curves in training/, and in sdsat.json what decoding must know.

    Example

    draftsmith train sdsat -m Qwen/Qwen2.5-Coder-0.5B --texts src/ --held-out tests/ -o drafting
    """
    from draftsmith.lab.train.sdsat import train as run

    set_threads(threads)
    try:
        with following(recipe.steps, options.save_every) as follow:
            trained = run(resolve(model), recipe, texts, output, options, bar, follow)
    except KeyboardInterrupt:
        note("give the same command again to go on from the newest checkpoint")
        raise
    from accelerate import PartialState

    from draftsmith.model.load import read_tokenizer

    if not PartialState().is_main_process:
        return
    names = read_tokenizer(str(output), {}).convert_ids_to_tokens(list(trained.tokens))
    tokens = ", ".join(
        f"{i} {name or ''}".rstrip() for i, name in zip(trained.tokens, names, strict=True)
    )
    if json_:
        print_json(asdict(trained) | {"folder": str(output)})
    else:
        show(trained, tokens)


@contextlib.contextmanager
def following(steps: int, every: int) -> Iterator[Callable[[StepLosses], None]]:
    """The newest losses in nats beside a bar if somebody is watching, else a line now and then."""
    with progress() as shown:
        number = shown.add_task("training", total=steps, visible=False)

        def follow(row: StepLosses) -> None:
            named = {"standard": row.standard, "adaptive": row.adaptive, "held-out": row.held_out}
            losses = ", ".join(f"{k} {loss:.3f}" for k, loss in named.items() if loss is not None)
            told = f"training: {losses}"
            shown.update(number, completed=row.step, description=told, visible=True)
            if shown.disable and (row.step % every == 0 or row.step == steps):
                note(f"step {row.step} of {steps}, {row.tokens:,} tokens: {losses}")

        yield follow


def show(trained: Trained, tokens: str) -> None:
    """What came out, for a person."""
    facts = {"model": str(trained.folder)}
    if tokens:
        facts["adaptive"] = tokens
    if trained.before is not None and trained.after is not None:
        facts["held-out loss"] = f"{trained.before:.4f} → {trained.after:.4f}"
    if trained.depths is not None:
        facts["right by depth"] = " ".join(f"{share:.2f}" for share in trained.depths.accuracy)
        facts["accepted by k"] = " ".join(f"{count:.2f}" for count in trained.depths.accepted)
    stdout().print(facts_table(facts))


app = App(name="train", help=HELP["train"])
app.command(sdsat)
