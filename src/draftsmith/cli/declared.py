"""What a dataclass declares, read from its source: to import it may take seconds of torch."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

REQUIRED = "(required)"
"""The default of a field that has none."""


class Field(NamedTuple):
    """One field: its type and its default as they are written."""

    name: str
    type: str
    default: str
    help: str
    """The docstring below it."""


class Declared(NamedTuple):
    """A class: its docstring, its fields in order, and the texts of its class variables."""

    doc: str
    fields: tuple[Field, ...]
    constants: Mapping[str, str]


@cache
def declared(where: str) -> Declared:
    """What the class `package.module:Class` declares in its own body."""
    module, wanted = where.split(":")
    classes = (node for node in _body(module) if isinstance(node, ast.ClassDef))
    found = next(node for node in classes if node.name == wanted)
    fields, constants = [], {}
    for node, after in zip(found.body, [*found.body[1:], ast.Pass()], strict=True):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        annotation, name, value = ast.unparse(node.annotation), node.target.id, node.value
        if annotation.startswith("ClassVar"):
            constants[name] = _text(value)
            continue
        text = _text(after)
        if isinstance(value, ast.Call) and len(value.args) > 1:  # setting(5, "So many.")
            text, value = _text(value.args[1]), value.args[0]
        if isinstance(value, ast.Name):
            value = _constant(module, value.id)
        fields.append(Field(name, annotation, ast.unparse(value) if value else REQUIRED, text))
    return Declared(ast.get_docstring(found) or "", tuple(fields), constants)


@cache
def _body(module: str) -> list[ast.stmt]:
    spec = find_spec(module)
    assert spec is not None, f"there is no module {module}"
    return ast.parse(Path(spec.origin or "").read_text(encoding="utf-8")).body


def _constant(module: str, name: str) -> ast.expr:
    """The value that a name has in a module, which may have imported it."""
    for node in _body(module):
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            return _constant(node.module or "", name)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return node.value
    raise LookupError(f"{module} has no constant {name}")


def _text(node: ast.AST | None) -> str:
    """The text that a constant or a docstring is, on one line; nothing if it is none."""
    value = node.value if isinstance(node, ast.Expr) else node
    return " ".join(str(value.value).split()) if isinstance(value, ast.Constant) else ""
