"""Drafters by name: `copyspec(gamma=3, block=10)` → a configured `Drafter`; `a+b` cascades.

The built-in drafters are registered through the same entry points (`draftsmith.drafters`) as
anybody else's.
"""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from draftsmith.core.drafter import Drafter
from draftsmith.errors import LoadError, OptionError, UnknownName
from draftsmith.values import shown

GROUP = "draftsmith.drafters"


@cache
def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def names() -> list[str]:
    """Names of all installed drafters."""
    return sorted(_entries())


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
    """A configured drafter from what one types: `copyspec`, `copyspec(gamma=3)`, `copyspec+auto`.

    `a+b` is short for `cascade(a, b)`; text needs no quotes unless it has one of `'"()[]{},=`.
    Raises UnknownName with a suggestion, or OptionError.
    """
    if isinstance(spec, Drafter):
        return spec
    if not isinstance(spec, str):
        made = isinstance(spec, type) and issubclass(spec, Drafter)
        hint = f"; make one: {spec.__name__}(…)" if made else ""
        raise OptionError(
            f"drafter must be text such as 'copyspec(gamma=3)', or a Drafter, got "
            f"{shown(spec)}{hint}"
        )
    try:
        node = ast.parse(_quoted(spec.strip()), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise OptionError(f"drafter {spec!r} cannot be read; {_LIKE}") from error
    return _drafter(node, spec)


_STRING = re.compile(r"""('[^']*'|"[^"]*")""")
_BARE = re.compile(r"""(?<==)\s*([^\s'"()\[\]{},=][^'"()\[\]{},=]*?)\s*(?=[,)])""")


def _quoted(spec: str) -> str:
    """The spec with quotes around values that are neither plain values nor quoted already."""
    parts = _STRING.split(spec)
    parts[::2] = [_BARE.sub(lambda found: _literal(found[1]), part) for part in parts[::2]]
    return "".join(parts)


def _literal(value: str) -> str:
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return repr(value)
    return value


_LIKE = "write it like copyspec, copyspec(gamma=3, block=10) or copyspec+auto"


def _drafter(node: ast.expr, spec: str) -> Drafter:
    """The drafter that `node`, a part of `spec`, stands for."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        name, positional, keywords = "cascade", _summands(node), []
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name, positional, keywords = node.func.id, node.args, node.keywords
    elif isinstance(node, ast.Name):
        name, positional, keywords = node.id, [], []
    # `None` is a keyword to Python but a drafter's name to anybody else.
    elif isinstance(node, ast.Constant) and node.value is None:
        name, positional, keywords = "none", [], []
    else:
        raise OptionError(f"drafter {spec!r} cannot be read; {_LIKE}")
    cls = lookup(name)
    known = [f.name for f in fields(cls)]
    options = dict(_option(keyword, spec) for keyword in keywords)
    for option in options:
        if option not in known:
            raise UnknownName(f"option of {name}", option, known)
    if positional:
        if "drafters" not in known:
            raise OptionError(
                f"drafter {spec!r}: name the options, as in {name}({known[0]}=…)"
                if known
                else f"drafter {spec!r}: {name} has no options"
            )
        if "drafters" in options:
            raise OptionError(f"drafter {spec!r}: {name}'s drafters are there twice; {_LIKE}")
        options["drafters"] = tuple(_drafter(part, spec) for part in positional)
    for field in fields(cls):  # so that `false`, a text, does not count as true
        value = options.get(field.name)
        if field.type in (bool, "bool") and str(value).lower() in ("true", "false"):
            options[field.name] = str(value).lower() == "true"
    try:
        return cls(**options)
    except TypeError as error:
        raise OptionError(f"{spec!r}: {error}") from error


def _summands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_summands(node.left), *_summands(node.right)]
    return [node]


def _option(keyword: ast.keyword, spec: str) -> tuple[str, Any]:
    if keyword.arg is None:
        raise OptionError(f"drafter {spec!r}: ** is not understood; {_LIKE}")
    if isinstance(keyword.value, ast.Call):  # a drafter inside another, as in auto(head=mtp())
        return keyword.arg, _drafter(keyword.value, spec)
    try:
        return keyword.arg, ast.literal_eval(keyword.value)
    except ValueError:
        raise OptionError(
            f"drafter {spec!r}: the value of {keyword.arg} is not a plain value; {_LIKE}"
        ) from None
