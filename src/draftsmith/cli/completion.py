"""Completion of commands and options in a shell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

from cyclopts import App, Parameter

from draftsmith.errors import LoadError, OptionError, WriteError

FLAGS = ("--install-completion", "--show-completion")

Shell = Annotated[
    Literal["bash", "zsh", "fish", "powershell"] | None,
    Parameter(help="The shell, instead of the one that runs this."),
]


@contextmanager
def _explained() -> Iterator[None]:
    """Convert errors of making and writing a script, for which all commands are imported."""
    from cyclopts.completion.detect import ShellDetectionError

    try:
        yield
    except ShellDetectionError as error:
        raise OptionError(
            "this shell is not known: name bash, zsh, fish or powershell, as in "
            "--show-completion bash"
        ) from error
    except ImportError as error:
        raise LoadError(f"a command cannot be completed: {error}") from error
    except OSError as error:
        raise WriteError(f"the script cannot be written: {error}") from error


def register(app: App) -> None:
    """Add `--install-completion` and `--show-completion`."""

    def install(shell: Shell = None) -> None:
        """Install completion for a shell."""
        with _explained():
            print(f"completion is in {app.install_completion(shell=shell)}; start a new shell")

    def show(shell: Shell = None) -> None:
        """Print the script that completes commands and options."""
        from cyclopts.completion.detect import detect_shell

        with _explained():
            print(app.generate_completion(shell=shell or detect_shell()))

    for function, name in zip((install, show), FLAGS, strict=True):
        app.command(function, name=name)
