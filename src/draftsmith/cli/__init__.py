"""The `draftsmith` command. Torch and transformers are imported only when a model is needed."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer

import draftsmith
from draftsmith.cli import (
    bench,
    bench_report,
    bench_run,
    chat,
    corpus,
    demo,
    doctor,
    drafters,
    run,
    serve,
    train,
    tune,
    vocab,
)
from draftsmith.cli.options import grouped
from draftsmith.cli.report import Reporting

app = typer.Typer(
    cls=Reporting,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add(to: typer.Typer, *commands: Callable[..., None]) -> None:
    for command in commands:
        to.command()(grouped(command))


def _group(name: str, about: str, *commands: Callable[..., None]) -> None:
    group = typer.Typer(help=about, no_args_is_help=True)
    _add(group, *commands)
    app.add_typer(group, name=name)


_add(app, demo.demo, run.run, chat.chat, serve.serve)
_add(app, drafters.drafters, vocab.vocab, doctor.doctor)
_group(
    "bench",
    "Measure what drafters save: on recorded answers, and on this machine.",
    *(bench.replay, bench.cost, bench.estimate, bench_run.run, bench_report.report),
)
_group(
    "corpus",
    "Build and look into corpora: what the drafters retrieval and spectra look up.",
    *(corpus.build, corpus.info, corpus.query),
)
_group("train", "Teach a model to draft for itself (needs the extra `train`).", train.sdsat)
_group(
    "tune",
    "Find the settings of a drafter that suit a model.",
    *(tune.pld_plus, tune.copyspec, tune.auto),
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
