"""Completion of commands and options in a shell."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import App, Parameter

FLAGS = ("--install-completion", "--show-completion")

Shell = Annotated[
    Literal["bash", "zsh", "fish", "powershell"] | None,
    Parameter(help="The shell, instead of the one that runs this."),
]


def register(app: App) -> None:
    """Add `--install-completion` and `--show-completion`."""

    def install(shell: Shell = None) -> None:
        """Install completion for a shell."""
        print(f"completion is in {app.install_completion(shell=shell)}; start a new shell")

    def show(shell: Shell = None) -> None:
        """Print the script that completes commands and options."""
        from cyclopts.completion.detect import detect_shell

        print(app.generate_completion(shell=shell or detect_shell()))

    for function, name in zip((install, show), FLAGS, strict=True):
        app.command(function, name=name)
