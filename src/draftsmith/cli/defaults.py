"""Defaults of options that the user keeps in a file, config.toml: a table for each command."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from cyclopts import App, ArgumentCollection, config

from draftsmith.errors import DraftsmithError, LoadError, UnknownName


def path() -> str:
    """Return the file's name; an empty one where there is no home folder."""
    from draftsmith.storage import config_folder

    try:
        return str(config_folder() / "config.toml")
    except DraftsmithError:
        return ""


def read(commands: Collection[str]) -> dict[str, Any]:
    """Return what the file holds, nothing where there is no file.

    Raises LoadError, and UnknownName for a table of no command.
    """
    file = path()
    if not os.path.exists(file):
        return {}
    import tomllib

    try:
        with open(file, encoding="utf-8-sig") as opened:
            data = tomllib.loads(opened.read())
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"cannot read {file}: {error}") from error
    for name in data:
        if name not in commands:
            raise UnknownName(f"command in {file}", name, commands)
    return data


def table(data: Mapping[str, Any], words: Iterable[str]) -> Mapping[str, Any]:
    """Return the table [bench.run] for the words bench, run; raises LoadError if it is none."""
    for word in words:
        data = data.get(word, {})
        if not isinstance(data, Mapping):
            raise LoadError(f"{word} in {path()} must be a table of options: [{word}]")
    return data


def check_commands(app: App, word: str, names: Iterable[str]) -> None:
    """Raise UnknownName for one of the names in the group `word` that is none of its commands."""
    known = [name for name in app if not name.startswith("-")]
    for name in names:
        if name not in known:
            raise UnknownName(f"command of {word} in {path()}", name, known)


def fill(
    root: App | None,
    commands: Collection[str],
    app: App,
    words: tuple[str, ...],
    arguments: ArgumentCollection,
) -> None:
    """Give options that were not typed the values of the file.

    `root`: the whole command line, to check the names of commands; None: they are known.

    Raises UnknownName or LoadError for what the file cannot mean.
    """
    data = read(commands)
    if root is not None and len(words) > 1:
        check_commands(root[words[0]], words[0], table(data, words[:1]))
    given = table(data, words)
    names = {name[2:] for one in arguments for name in one.positives if name.startswith("--")}
    for name in given:
        if name.replace("_", "-") not in names and name not in app:
            raise UnknownName(f"option of {' '.join(words)} in {path()}", name, names)
    for one in arguments:
        same = [name for name in given if f"--{name.replace('_', '-')}" in one.names]
        if len(same) > 1:
            raise LoadError(f"{' and '.join(same)} in {path()} are one option; keep one of them")
    source = f"{path()}, table {'.'.join(words)}"
    config.Dict(dict(given), use_commands_as_keys=False, source=source)(app, words, arguments)
