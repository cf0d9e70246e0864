"""The `draftsmith` command. Torch and transformers are imported only when a model is needed."""

from __future__ import annotations

import io
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from cyclopts import App, CycloptsError, MissingArgumentError, ValidationError
from cyclopts.exceptions import UnusedCliTokensError

from draftsmith.cli.commands import application
from draftsmith.cli.report import BAD_INPUT, ending, show_error
from draftsmith.errors import OptionError


def call(words: Sequence[str]) -> int:
    """Run a command line; return its exit code."""
    app = None
    try:
        app = application(words)
        command, given, _ = app.parse_args(words, print_error=False, exit_on_error=False)
        return command(*given.args, **given.kwargs) or 0
    except CycloptsError as error:
        show_error(_explained(error))
        return BAD_INPUT
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, OptionError) and app is not None:
            error.args = (_as_typed(str(error), app, words),)
        return ending(error)


def _explained(error: CycloptsError) -> str:
    """Return what was wrong on a command line, beginning with the name of an option."""
    argument, error.verbose = error.argument, False
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected argument {(error.unused_tokens or [''])[0]!r}; see --help"
    label = "" if argument is None else argument.name.lstrip("-").upper()
    if isinstance(error, MissingArgumentError) and argument is not None and not error.keyword:
        return f"{argument.name if argument.index is None else label} is missing; see --help"
    if isinstance(error, ValidationError) and argument is not None:
        token = argument.tokens[0]
        where = "" if token.source == "cli" else f" in {token.source}"
        return f"{token.keyword or label}{where} {error.exception_message}"
    text = str(error)
    return text[:1].lower() + text[1:]


def _as_typed(message: str, app: App, words: Sequence[str]) -> str:
    """Return a message with the options' names as they are typed: --top-k, not top_k."""
    command = app.parse_commands(words)[1][-1]
    for argument in command.assemble_argument_collection() if command.default_command else ():
        if not argument.name.startswith("-"):  # a group of options, or a positional argument
            continue
        name = argument.field_info.name
        # A drafter's option stands in parentheses, after the drafter's name and a colon, or after
        # "needs".
        pattern = rf"((?<![\w(-])(?<!: )(?<!needs ){name}(?==)|\A{name}(?= must))"
        message = re.sub(pattern, argument.name, message)
    return message


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with a code of `report.py`, or 0."""
    # Libraries' advice is for programmers; set the variables to get it.
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # torch then asks for huge pages for its weights: a pass in float32 takes 8 % less time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    # A service manager may have closed them; then there is no input and no reader.
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # A character that cannot be read or shown must not end a chat or an answer.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    # What goes into a file or a pipe is not damaged for a locale that lacks its characters.
    kept = sys.stdout.isatty() or "PYTHONIOENCODING" in os.environ
    if isinstance(sys.stdout, io.TextIOWrapper) and not kept:
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    sys.exit(call(sys.argv[1:] if words is None else words))
