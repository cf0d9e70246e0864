"""What a dataclass declares, read from its source: to import it may take seconds of torch."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

REQUIRED = "(required)"
"""The default of a field that has none."""


@dataclass(frozen=True)
class Field:
    """One field: its type and its default as they are written."""

    name: str
    type: str
    default: str
    help: str
    """The docstring below it."""


@dataclass(frozen=True)
class Declared:
    """A class: its docstring, its fields in order, and the plain values of its class variables."""

    doc: str
    fields: tuple[Field, ...]
    constants: dict[str, Any]


@cache
def declared(where: str) -> Declared:
    """What the class `package.module:Class` declares in its own body."""
    module, name = where.split(":")
    spec = find_spec(module)
    assert spec is not None, f"there is no module {module}"
    assert spec.origin is not None, f"{module} has no source"
    body = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    found = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    fields, constants = [], {}
    for node, after in zip(found.body, [*found.body[1:], ast.Pass()], strict=True):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        type_, name = ast.unparse(node.annotation), node.target.id
        if not type_.startswith("ClassVar"):
            default = REQUIRED if node.value is None else ast.unparse(node.value)
            fields.append(Field(name, type_, default, _text(after)))
        elif isinstance(node.value, ast.Constant):
            constants[name] = node.value.value
    return Declared(ast.get_docstring(found) or "", tuple(fields), constants)


def _text(node: ast.stmt) -> str:
    """The docstring that a statement is, on one line; nothing if it is none."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return ""
    return " ".join(str(node.value.value).split())
