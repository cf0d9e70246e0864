"""The `draftsmith` command. Torch and transformers are imported only when a model is needed."""

from __future__ import annotations

import io
import os
import sys
import warnings
from typing import Annotated, Any

import typer

import draftsmith
from draftsmith.cli.commands import known
from draftsmith.cli.report import Reporting


class Commands(Reporting):
    """All installed commands, of which only the one that is called is imported."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": known()})


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"draftsmith {draftsmith.__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Speculative decoding for Hugging Face models: faster answers, the same answers.

    [bold]Start with[/bold]  draftsmith demo
    """


def main(args: list[str] | None = None) -> Any:
    """Run the command line; exits with 0, 1 (generation failed), 2 (bad input), 130 (Ctrl-C) or 141
    (nobody reads any more).
    """
    # Libraries' advice is for programmers; whoever sets the variables still gets it.
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    # A service manager may have closed them; then nobody reads and nothing comes.
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # A character that nobody can read or show must not end a chat or an answer.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    # What goes into a file or a pipe is not damaged for a locale that lacks its characters.
    kept = sys.stdout.isatty() or "PYTHONIOENCODING" in os.environ
    if isinstance(sys.stdout, io.TextIOWrapper) and not kept:
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    return app(args, prog_name="draftsmith")
