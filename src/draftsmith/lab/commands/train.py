"""`draftsmith train`: teach a model to draft for itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from draftsmith import builtin
from draftsmith.cli.commands import HELP
from draftsmith.cli.loading import bar, progress, resolve, set_threads
from draftsmith.cli.options import Count, Json, NewFolder
from draftsmith.cli.render import facts_table
from draftsmith.cli.report import note, print_json, stdout
from draftsmith.lab.train.recipe import HeadRecipe, Options, Recipe, Texts

if TYPE_CHECKING:
    from draftsmith.lab.train.curves import StepLosses
    from draftsmith.lab.train.eagle3 import HeadStep
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
    """Train a model with semantic adaptive tokens (SDSAT). Resumes if interrupted.

    Run it under accelerate launch or torchrun for several devices. The folder gets the trained
    model, curves in training/, and the settings for decoding in sdsat.json.

    Example

    draftsmith train sdsat -m Qwen/Qwen2.5-Coder-0.5B --texts src/ --held-out tests/ -o drafting
    """
    from draftsmith.lab.train.sdsat import train as run

    def losses(row: StepLosses) -> str:
        named = {"standard": row.standard, "adaptive": row.adaptive, "held-out": row.held_out}
        return ", ".join(f"{k} {loss:.3f}" for k, loss in named.items() if loss is not None)

    set_threads(threads)
    with following(recipe.steps, options.save_every, losses) as follow:
        trained = run(resolve(model), recipe, texts, output, options, bar, follow)
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


def eagle3(
    *,
    texts: Texts,
    output: NewFolder,
    recipe: HeadRecipe = HeadRecipe(),
    model: Annotated[
        str, Parameter(alias="-m", help="A hub id, a folder or a name.")
    ] = builtin.DEFAULT,
    save_every: Annotated[Count, Parameter(help="Steps between checkpoints.")] = 100,
    threads: Annotated[Count | None, Parameter(help="CPU threads.")] = None,
    json_: Json = False,
) -> None:
    """Train an EAGLE-3 head for a model, which is not changed. Resumes if interrupted.

    The folder gets the head in the speculators format, and the curves in training/.

    Example

    draftsmith train eagle3 -m smollm2 --texts answers.jsonl --held-out test.jsonl -o head
    """
    from draftsmith.lab.train.eagle3 import train as run

    def right(row: HeadStep) -> str:
        return f"loss {row.loss:.3f}, right {row.right:.2f} … {row.right_at_last:.2f}"

    set_threads(threads)
    with following(recipe.steps, save_every, right) as follow:
        trained = run(resolve(model), recipe, texts, output, save_every, bar, follow)
    if json_:
        print_json(asdict(trained) | {"folder": str(output)})
        return
    facts = {"head": str(trained.folder), "tokens": f"{trained.tokens:,}"}
    if trained.right is not None:
        facts["right by depth"] = " ".join(f"{share:.2f}" for share in trained.right)
    stdout().print(facts_table(facts))


def unpickle(
    folder: Annotated[Path, Parameter(help="A folder with pytorch_model.bin or model.bin.")], /
) -> None:
    """Save the tensors of a pickled head as model.safetensors, beside the pickle.

    Only tensors are read, no code is run (torch.load with weights_only=True).

    Example

    draftsmith train unpickle EAGLE3-Vicuna1.3-13B
    """
    from draftsmith.lab.train.unpickle import unpickle as run

    stdout().print(str(run(folder)))


@contextlib.contextmanager
def following(
    steps: int, every: int, figures: Callable[[Any], str]
) -> Iterator[Callable[[Any], None]]:
    """Show the newest figures next to a progress bar; without a terminal, print lines."""
    with progress() as shown:
        number = shown.add_task("training", total=steps, visible=False)

        def follow(row: StepLosses | HeadStep) -> None:
            line = figures(row)
            shown.update(number, completed=row.step, description=f"training: {line}", visible=True)
            if shown.disable and (row.step % every == 0 or row.step == steps):
                note(f"step {row.step} of {steps}, {row.tokens:,} tokens: {line}")

        try:
            yield follow
        except KeyboardInterrupt:
            note("give the same command again to resume from the newest checkpoint")
            raise


def show(trained: Trained, tokens: str) -> None:
    """Print the results."""
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
for command in (sdsat, eagle3, unpickle):
    app.command(command)
