"""The page at `/docs`: every endpoint with its fields, from the OpenAPI description."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from draftsmith import html

_STYLE = """
main { max-width: 860px; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; margin: 8px 0; }
th, td { text-align: left; vertical-align: top; padding: 4px 12px 4px 0; }
td, th { border-bottom: 1px solid var(--rule); overflow-wrap: anywhere; }
"""


def page(described: Mapping[str, Any], model: str) -> str:
    """Return the page for an OpenAPI description; it loads no other files."""
    parts = [
        "<h1>draftsmith</h1>",
        f'<p class="note">{escape(model)}. The endpoints and the fields of their requests; '
        '<a href="openapi.json">openapi.json</a> has the same for programs, and '
        '<a href="./">the page</a> is for trying it.</p>',
    ]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(operation.get('description', ''))}</p>")
            parts += _fields(operation, described["components"]["schemas"])
    return html.page("draftsmith: endpoints", "\n".join(parts), _STYLE)


def _fields(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of request fields; empty if requests have no body."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return []
    body = schemas[content["schema"]["$ref"].rpartition("/")[2]]
    rows = []
    for name, schema in body["properties"].items():
        usual = "required" if name in body.get("required", ()) else repr(schema.get("default"))
        usual = {"None": "", "True": "true", "False": "false"}.get(usual, usual)
        cells = f"<code>{escape(name)}</code>", escape(_kind(schema)), escape(usual)
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "<tr><th>field</th><th>type</th><th>default</th></tr>"
    return [f"<table>{head}", *rows, "</table>"]


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a short description of a field's type."""
    if "anyOf" in schema:
        kinds = dict.fromkeys(map(_kind, schema["anyOf"]))
        return " or ".join(kind for kind in kinds if kind != "null")
    if "enum" in schema or "const" in schema:
        return " or ".join(map(repr, schema.get("enum", [schema.get("const")])))
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    kind = str(schema.get("type", "any"))
    return f"list of {_kind(schema.get('items', {}))}" if kind == "array" else kind
