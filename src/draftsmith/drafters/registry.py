"""Drafters by name: `copyspec(gamma=3, block=10)` → a configured `Drafter`.

The built-in drafters are registered through the same entry points (`draftsmith.drafters`) as
anybody else's.
"""

from __future__ import annotations

import ast
from dataclasses import MISSING, Field, fields
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from draftsmith.core.drafter import Drafter
from draftsmith.errors import LoadError, OptionError, UnknownName

GROUP = "draftsmith.drafters"


@cache
def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def names() -> list[str]:
    """Names of all installed drafters."""
    return sorted(_entries())


def bare_names() -> list[str]:
    """Names of the installed drafters that can be used without giving any option."""
    return [name for name in names() if not any(map(_required, fields(lookup(name))))]


def _required(option: Field[Any]) -> bool:
    return option.default is MISSING and option.default_factory is MISSING


def lookup(name: str) -> type[Drafter]:
    """The drafter class called `name`; raises UnknownName with a suggestion."""
    entry = _entries().get(name)
    if entry is None:
        raise UnknownName("drafter", name, names())
    try:
        cls = entry.load()
    except Exception as error:
        raise LoadError(f"drafter {name!r} ({entry.value}) cannot be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Drafter)):
        raise LoadError(f"drafter {name!r}: {entry.value} is not a subclass of Drafter")
    return cls


def parse(spec: str | Drafter) -> Drafter:
    """A configured drafter from what one types, e.g. `copyspec` or `copyspec(gamma=3)`."""
    if isinstance(spec, Drafter):
        return spec
    name, options = _split(spec)
    cls = lookup(name)
    known = [f.name for f in fields(cls)]
    for option in options:
        if option not in known:
            raise UnknownName(f"option of {name}", option, known)
    try:
        return cls(**options)
    except TypeError as error:
        raise OptionError(f"{spec!r}: {error}") from error


def _split(spec: str) -> tuple[str, dict[str, Any]]:
    wanted = "write it like copyspec or copyspec(gamma=3, block=10)"
    try:
        node = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise OptionError(f"drafter {spec!r} cannot be read; {wanted}") from error
    if isinstance(node, ast.Name):
        return node.id, {}
    # `None` is a keyword to Python but a drafter's name to anybody else.
    if isinstance(node, ast.Constant) and node.value is None:
        return "none", {}
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise OptionError(f"drafter {spec!r} cannot be read; {wanted}")
    if node.args:
        raise OptionError(f"drafter {spec!r}: name the options; {wanted}")
    options: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise OptionError(f"drafter {spec!r}: ** is not understood; {wanted}")
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            # A bare word is a string: match=last.
            if not isinstance(keyword.value, ast.Name):
                raise OptionError(
                    f"drafter {spec!r}: the value of {keyword.arg} is not a plain value; {wanted}"
                ) from None
            options[keyword.arg] = keyword.value.id
    return node.func.id, options
