"""`draftsmith train`: teach a model to draft for itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftsmith import builtin
from draftsmith.cli.commands import HELP, group
from draftsmith.cli.loading import bar, progress, resolve, set_threads
from draftsmith.cli.options import Fields, Given, Json, NewFolder
from draftsmith.cli.render import facts_table
from draftsmith.cli.report import note, print_json, stdout

if TYPE_CHECKING:
    from draftsmith.lab.train.curves import StepLosses
    from draftsmith.lab.train.eagle3 import HeadStep
    from draftsmith.lab.train.sdsat import Trained

RecipeOptions = Annotated[
    Given,
    Fields(
        "draftsmith.lab.train.recipe:Recipe",
        {
            "Adaptive tokens": "objective L diverse share share_of w",
            "Steps": "infill length rows rows_per_pass steps",
            "Learning": (
                "learning_rate final_learning_rate token_rate warmup weight_decay clip lora "
                "bfloat16 seed"
            ),
        },
        {"bfloat16": "--bfloat16/--float32"},
    ),
]
TextOptions = Annotated[
    Given,
    Fields(
        "draftsmith.lab.train.texts:Texts",
        {"Texts": "paths prose held_out fields"},
        {"paths": "--texts", "fields": "--field NAME"},
    ),
]
RunOptions = Annotated[
    Given,
    Fields(
        "draftsmith.lab.train.sdsat:Options",
        {"Adaptive tokens": "tokens add_token", "Steps": "save_every measure_every cpu"},
        {"tokens": "--token ID"},
    ),
]


def sdsat(
    texts: TextOptions,
    output: NewFolder,
    recipe: RecipeOptions,
    options: RunOptions,
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="MODEL", help="A hub id, a folder or a name.")
    ] = builtin.DEFAULT,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, help="CPU threads.")] = None,
    json_: Json = False,
) -> None:
    """Train a model with semantic adaptive tokens (SDSAT). Goes on if interrupted.

    Run it under accelerate launch or torchrun for several devices. The folder holds the trained
    model, the curves in training/, and in sdsat.json what decoding must know.

    [bold]Example[/bold]

    draftsmith train sdsat -m Qwen/Qwen2.5-Coder-0.5B --texts src/ --held-out tests/ -o drafting
    """
    from draftsmith.lab.train.recipe import Recipe

    plan = Recipe(**recipe)
    from draftsmith.lab.train.sdsat import Options
    from draftsmith.lab.train.sdsat import train as run
    from draftsmith.lab.train.texts import Texts

    set_threads(threads)
    how = Options(**options)
    try:
        with following(plan.steps, how.save_every) as follow:
            trained = run(resolve(model), plan, Texts(**texts), output, how, bar, follow)
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


HeadOptions = Annotated[
    Given,
    Fields(
        "draftsmith.lab.train.eagle3:HeadRecipe",
        {
            "Head": "vocabulary layers",
            "Steps": "unrolled decay length rows steps",
            "Learning": "learning_rate warmup clip seed",
        },
        {"layers": "--layer N"},
    ),
]


def eagle3(
    texts: TextOptions,
    output: NewFolder,
    recipe: HeadOptions,
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="MODEL", help="A hub id, a folder or a name.")
    ] = builtin.DEFAULT,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, help="CPU threads.")] = None,
    json_: Json = False,
) -> None:
    """Train an EAGLE-3 head for a model, which stays as it is. Goes on if interrupted.

    The folder holds the head in the speculators format, and the curves in training/.

    [bold]Example[/bold]

    draftsmith train eagle3 -m smollm2 --texts answers.jsonl --held-out test.jsonl -o head
    """
    from draftsmith.lab.train.eagle3 import HeadRecipe
    from draftsmith.lab.train.eagle3 import train as run
    from draftsmith.lab.train.texts import Texts

    plan = HeadRecipe(**recipe)
    set_threads(threads)
    try:
        with progress() as shown:
            number = shown.add_task("training", total=plan.steps, visible=False)

            def follow(row: HeadStep) -> None:
                told = f"loss {row.loss:.3f}, right {row.right:.2f} … {row.right_at_last:.2f}"
                shown.update(number, completed=row.step, description=told, visible=True)
                if shown.disable and (row.step % save_every == 0 or row.step == plan.steps):
                    note(f"step {row.step} of {plan.steps}, {row.tokens:,} tokens: {told}")

            trained = run(resolve(model), plan, Texts(**texts), output, save_every, bar, follow)
    except KeyboardInterrupt:
        note("give the same command again to go on from the newest checkpoint")
        raise
    if json_:
        print_json(asdict(trained) | {"folder": str(output)})
        return
    facts = {"head": str(trained.folder), "tokens": f"{trained.tokens:,}"}
    if trained.right is not None:
        facts["right by depth"] = " ".join(f"{share:.2f}" for share in trained.right)
    stdout().print(facts_table(facts))


def unpickle(
    folder: Annotated[Path, typer.Argument(help="A folder with pytorch_model.bin or model.bin.")],
) -> None:
    """Save the tensors of a pickled head as model.safetensors, beside the pickle.

    Only tensors are read, no code is run (torch.load with weights_only=True).

    [bold]Example[/bold]

    draftsmith train unpickle EAGLE3-Vicuna1.3-13B
    """
    from draftsmith.lab.train.unpickle import unpickle as run

    stdout().print(str(run(folder)))


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


app = group(HELP["train"], sdsat, eagle3, unpickle)
