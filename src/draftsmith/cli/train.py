"""`draftsmith train`: teach a model to draft for itself."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from draftsmith.cli.loading import quiet, resolve
from draftsmith.cli.options import Json, NewFolder, Threads, grouped
from draftsmith.cli.progress import bar, progress
from draftsmith.cli.render import plain_table
from draftsmith.cli.report import note, stdout

if TYPE_CHECKING:
    from draftsmith.train.curves import Row
    from draftsmith.train.recipe import Recipe
    from draftsmith.train.sdsat import Trained

train = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Teach a model to draft for itself (needs the extra `train`).",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_TOKENS = "Adaptive tokens"
_STEPS = "Steps"
_RATE = "Learning"


@train.callback()
def _group() -> None:
    """Keeps the command's name, also while it is the only one."""


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """The settings of a training; the names are `train.recipe.Recipe`'s."""

    objective: Annotated[
        str,
        typer.Option(
            rich_help_panel=_TOKENS, metavar="NAME",
            help="improved (equation 9), basic (equation 8), or plain: none, to compare with.",
        ),
    ] = "improved"  # fmt: skip
    window: Annotated[
        int,
        typer.Option(
            "--L", rich_help_panel=_TOKENS, metavar="N", min=1, help="The longest window of them."
        ),
    ] = 5  # fmt: skip
    diverse: Annotated[
        bool,
        typer.Option(
            "--diverse", rich_help_panel=_TOKENS,
            help="One for each depth (appendix B), not one for all; then k < L when decoding.",
        ),
    ] = False  # fmt: skip
    share: Annotated[
        float,
        typer.Option(rich_help_panel=_TOKENS, metavar="X", help="Share of positions they take."),
    ] = 0.1
    share_of: Annotated[
        str,
        typer.Option(
            rich_help_panel=_TOKENS, metavar="WHAT",
            help="What the share counts: replaced positions, or positions where windows begin.",
        ),
    ] = "replaced"  # fmt: skip
    w: Annotated[
        float,
        typer.Option("--w", rich_help_panel=_TOKENS, metavar="X", help="Their weight in the loss."),
    ] = 1.0
    infill: Annotated[
        float,
        typer.Option(
            rich_help_panel=_STEPS, metavar="X",
            help="Share of code rearranged as prefix, suffix, middle; 0 for none.",
        ),
    ] = 0.5  # fmt: skip
    length: Annotated[
        int, typer.Option(rich_help_panel=_STEPS, metavar="N", help="Tokens of a sequence.")
    ] = 1024
    rows: Annotated[
        int, typer.Option(rich_help_panel=_STEPS, metavar="N", help="Sequences of a step.")
    ] = 8
    rows_per_pass: Annotated[
        int,
        typer.Option(
            rich_help_panel=_STEPS, metavar="N",
            help="Sequences of a forward pass; fewer accumulate their gradients.",
        ),
    ] = 8  # fmt: skip
    steps: Annotated[int, typer.Option(rich_help_panel=_STEPS, metavar="N", min=1)] = 2000
    learning_rate: Annotated[
        float, typer.Option(rich_help_panel=_RATE, metavar="X", help="The highest.")
    ] = 5e-5
    final_learning_rate: Annotated[float, typer.Option(rich_help_panel=_RATE, metavar="X")] = 1e-5
    token_rate: Annotated[
        float,
        typer.Option(
            rich_help_panel=_RATE, metavar="X",
            help="How many times as fast the rows of adaptive tokens learn.",
        ),
    ] = 1.0  # fmt: skip
    warmup: Annotated[
        float,
        typer.Option(
            rich_help_panel=_RATE, metavar="X", help="Share of the steps until the highest."
        ),
    ] = 0.2  # fmt: skip
    weight_decay: Annotated[
        float, typer.Option(rich_help_panel=_RATE, metavar="X", help="Of matrices.")
    ] = 0.1
    clip: Annotated[
        float, typer.Option(rich_help_panel=_RATE, metavar="X", help="Largest norm of a gradient.")
    ] = 1.0
    lora: Annotated[
        int,
        typer.Option(
            rich_help_panel=_RATE, metavar="N", help="Rank of LoRA; 0 trains all weights."
        ),
    ] = 0  # fmt: skip
    bfloat16: Annotated[
        bool,
        typer.Option(
            "--bfloat16/--float32", rich_help_panel=_RATE, help="What passes compute in."
        ),
    ] = True  # fmt: skip
    seed: Annotated[int, typer.Option(rich_help_panel=_RATE, metavar="N")] = 0

    def recipe(self) -> Recipe:
        """Checked; raises OptionError."""
        from draftsmith.train.recipe import Recipe

        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return Recipe(L=given.pop("window"), **given)


def sdsat(
    texts: Annotated[
        list[Path],
        typer.Option(
            "--texts", metavar="PATH", show_default=False,
            help="A file (.jsonl, else plain text; also .gz, .xz), or a folder of such and of "
            "source files; may be given several times.",
        ),
    ],
    output: NewFolder,
    options: RecipeOptions,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="MODEL", show_default="built-in",
            help="A Hugging Face hub id or a folder; its weights are not changed.",
        ),
    ] = None,
    prose: Annotated[
        list[Path] | None,
        typer.Option(
            "--prose", metavar="PATH",
            help="The same for texts that are no code, such as chats: never rearranged.",
        ),
    ] = None,
    held_out: Annotated[
        list[Path] | None,
        typer.Option(
            "--held-out", metavar="PATH",
            help="Its text is taken out of the training texts, and measured on.",
        ),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            "--field", metavar="NAME", show_default="text",
            help="Of JSON lines: what to read; several are joined by line breaks.",
        ),
    ] = None,
    token: Annotated[
        list[int] | None,
        typer.Option(
            "--token", rich_help_panel=_TOKENS, metavar="ID", show_default="a free one",
            help="Its id; with --diverse once for each.",
        ),
    ] = None,
    add_token: Annotated[
        bool,
        typer.Option(
            "--add-token", rich_help_panel=_TOKENS, help="Add it to the vocabulary instead."
        ),
    ] = False,
    save_every: Annotated[
        int, typer.Option(metavar="N", min=1, help="Steps between checkpoints.")
    ] = 100,
    measure_every: Annotated[
        int, typer.Option(metavar="N", min=0, help="Steps between held-out losses; 0: at the end.")
    ] = 0,
    cpu: Annotated[bool, typer.Option("--cpu", help="Stay on the CPU.")] = False,
    threads: Threads = None,
    json_: Json = False,
) -> None:  # fmt: skip
    """Train a model with semantic adaptive tokens (SDSAT). Goes on if interrupted.

    Run it under accelerate launch or torchrun for several devices. The folder holds the trained
    model, the curves in training/, and in sdsat.json what decoding must know.

    [bold]Example[/bold]

    draftsmith train sdsat -m Qwen/Qwen2.5-Coder-0.5B --texts src/ --held-out tests/ -o drafting
    """
    recipe = options.recipe()
    with quiet():
        import torch

        from draftsmith.train.sdsat import Options, describe
        from draftsmith.train.sdsat import train as run
        from draftsmith.train.texts import Texts

        if threads is not None:
            torch.set_num_threads(threads)
        chosen = Texts(
            paths=texts, prose=prose or (), held_out=held_out or (),
            fields=tuple(field or Texts.fields),
        )  # fmt: skip
        how = Options(
            tokens=tuple(token or ()), add_token=add_token, cpu=cpu,
            save_every=save_every, measure_every=measure_every,
        )  # fmt: skip
        try:
            with following(recipe.steps, save_every) as follow:
                trained = run(resolve(model), recipe, chosen, output, how, bar, follow)
        except KeyboardInterrupt:
            note("give the same command again to go on from the newest checkpoint")
            raise
        from accelerate import PartialState

        from draftsmith.model.load import read_tokenizer

        if not PartialState().is_main_process:
            return
        tokens = describe(trained.tokens, read_tokenizer(str(output), {}))
    if json_:
        typer.echo(json.dumps(asdict(trained) | {"folder": str(output)}))
    else:
        show(trained, tokens)


@contextlib.contextmanager
def following(steps: int, every: int) -> Iterator[Callable[[Row], None]]:
    """The newest losses beside a bar if somebody is watching, else a line now and then."""
    with progress("training", "losses") as shown:
        number = shown.add_task("training", total=steps, losses="", visible=False)

        def follow(row: Row) -> None:
            shown.update(number, completed=row.step, losses=losses(row), visible=True)
            if shown.disable and (row.step % every == 0 or row.step == steps):
                note(f"step {row.step} of {steps}, {row.tokens:,} tokens: {losses(row)}")

        yield follow


def losses(row: Row) -> str:
    """What a person follows, in nats."""
    named = {"standard": row.standard, "adaptive": row.adaptive, "held-out": row.held_out}
    return ", ".join(f"{name} {value:.3f}" for name, value in named.items() if value is not None)


def show(trained: Trained, tokens: str) -> None:
    """What came out, for a person."""
    table = plain_table()
    table.add_row(Text("model", "bold"), Text(str(trained.folder)))
    if tokens:
        table.add_row(Text("adaptive", "bold"), Text(tokens))
    if trained.before is not None and trained.after is not None:
        table.add_row(
            Text("held-out loss", "bold"), Text(f"{trained.before:.4f} → {trained.after:.4f}")
        )
    if trained.depths is not None:
        accuracy = " ".join(f"{share:.2f}" for share in trained.depths.accuracy)
        accepted = " ".join(f"{count:.2f}" for count in trained.depths.accepted)
        table.add_row(Text("right by depth", "bold"), Text(accuracy))
        table.add_row(Text("accepted by k", "bold"), Text(accepted))
    stdout().print(table)


train.command()(grouped(sdsat))
