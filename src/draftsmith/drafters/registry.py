"""Drafters by name: `copyspec(gamma=3, block=10)` → a configured `Drafter`; `a+b` is a cascade.

The built-in drafters use the same entry points (`draftsmith.drafters`) as those of other packages.
"""

from __future__ import annotations

import ast
import re
from dataclasses import MISSING, fields
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
    """Return the names of all installed drafters."""
    return sorted(_entries())


def lookup(name: str) -> type[Drafter]:
    """Return the drafter class `name`; raise UnknownName with a suggestion."""
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
    """Create a drafter from a specification: `copyspec`, `copyspec(gamma=3)`, `copyspec+auto`.

    `a+b` is short for `cascade(a, b)`. Strings need quotes only if they contain one of
    `'"()[]{},=`. Raises UnknownName with a suggestion, or OptionError.
    """
    if isinstance(spec, Drafter):
        try:
            hash(spec)
        except TypeError as error:
            raise OptionError(
                f"{type(spec).__name__} has an option that cannot be compared ({error}); give it a "
                "tuple, or a class with eq=False"
            ) from None
        return spec
    if not isinstance(spec, str):
        made = isinstance(spec, type) and issubclass(spec, Drafter)
        hint = f"; create one: {spec.__name__}(…)" if made else ""
        raise OptionError(
            f"drafter must be text such as 'copyspec(gamma=3)', or a Drafter, got "
            f"{shown(spec)}{hint}"
        )
    try:
        node = ast.parse(_quoted(spec.strip()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise OptionError(f"drafter {shown(spec)} cannot be parsed; {_LIKE}") from error
    return parse(_drafter(node, spec))


_STRING = re.compile(r"""('[^']*'|"[^"]*")""")
_BARE = re.compile(r"""(?<==)\s*([^\s'"()\[\]{},=][^'"()\[\]{},=]*?)\s*(?=[,)])""")


def _quoted(spec: str) -> str:
    """Quote the values in a specification that are neither literals nor quoted."""
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
    """Create the drafter for `node`, a part of `spec`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        name, positional, keywords = "cascade", _summands(node), []
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name, positional, keywords = node.func.id, node.args, node.keywords
    elif isinstance(node, ast.Name):
        name, positional, keywords = node.id, [], []
    # Python parses `None` as a constant, but here it is the name of a drafter.
    elif isinstance(node, ast.Constant) and node.value is None:
        name, positional, keywords = "none", [], []
    else:
        raise OptionError(f"drafter {spec!r} cannot be parsed; {_LIKE}")
    cls = lookup(name)
    known = [f.name for f in fields(cls)]
    options = dict(_option(keyword, spec) for keyword in keywords)
    if len(options) < len(keywords):
        raise OptionError(f"drafter {spec!r}: {name} has an option twice")
    for option in options:
        if option not in known:
            raise UnknownName(f"option of {name}", option, known)
    if positional:
        if "drafters" not in known:
            raise OptionError(
                f"drafter {spec!r}: options need names, as in {name}({known[0]}=…)"
                if known
                else f"drafter {spec!r}: {name} has no options"
            )
        if "drafters" in options:
            raise OptionError(f"drafter {spec!r}: {name} has its drafters twice; {_LIKE}")
        options["drafters"] = tuple(_drafter(part, spec) for part in positional)
    given = [f for f in fields(cls) if f.init]
    needed = [f.name for f in given if f.default is f.default_factory is MISSING]
    if missing := [option for option in needed if option not in options]:
        listed = ", ".join(f"{option}=…" for option in missing)
        like = "write it like copyspec+auto" if name == "cascade" else f"write {name}({listed})"
        raise OptionError(f"drafter {spec!r}: {name} needs {listed}; {like}")
    for field in fields(cls):  # so that the string `false` does not count as true
        value = options.get(field.name)
        if field.type in (bool, "bool") and str(value).lower() in ("true", "false"):
            options[field.name] = str(value).lower() == "true"
    try:
        return cls(**options)
    except TypeError as error:
        raise OptionError(f"{spec!r}: {error}") from error


def _summands(node: ast.expr) -> list[ast.expr]:
    found: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        found = [*_summands(node.right), *found]
        node = node.left
    return [node, *found]


def _option(keyword: ast.keyword, spec: str) -> tuple[str, Any]:
    if keyword.arg is None:
        raise OptionError(f"drafter {spec!r}: ** is not allowed; {_LIKE}")
    if isinstance(keyword.value, ast.Call):  # a drafter inside another, as in auto(head=mtp())
        return keyword.arg, _drafter(keyword.value, spec)
    try:
        return keyword.arg, ast.literal_eval(keyword.value)
    except (ValueError, TypeError):  # TypeError: a list as a key
        raise OptionError(
            f"drafter {spec!r}: the value of {keyword.arg} must be a literal; {_LIKE}"
        ) from None
