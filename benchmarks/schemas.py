"""Bounded JSON schemas: parts of the documents of SchemaStore, made stricter but never looser.

A schema is bounded by adding to it, so that its answers end. All properties are required and no
others allowed, as in OpenAI's strict mode. Strings have at most 16 characters and arrays at most
two items, unless they must have more. Numbers are integers of at most five digits. Parts with any
other keyword are left out.
"""

from __future__ import annotations

import json
import pickletools
import sqlite3
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith import Engine, Grammar
from draftsmith.errors import OptionError

LETTERS, ITEMS, NUMBER, DEEPEST = 16, 2, 99_999, 3
TELLING = {
    "title", "description", "default", "examples", "$comment", "format", "markdownDescription",
    "enumDescriptions", "markdownEnumDescriptions", "deprecated", "readOnly", "writeOnly", "$id",
    "id", "$schema", "definitions", "$defs", "deprecationMessage", "defaultSnippets", "example",
}  # fmt: skip
"""Keywords without effect on validity; `bounded` knows all others that may occur."""


class Unfit(Exception):
    """This part of a schema cannot be bounded by adding to it."""


def bounded(schema: Any, root: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Return a schema for a finite number of texts, all of them valid in `schema`; raises Unfit."""
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        raise Unfit
    rules = {name: value for name, value in schema.items() if name not in TELLING}
    if set(rules) == {"$ref"}:
        return bounded(resolved(rules["$ref"], root), root, depth + 1)
    if set(rules) == {"anyOf"}:
        return {"anyOf": [bounded(one, root, depth + 1) for one in rules["anyOf"]]}
    kind = rules.pop("type", None)
    if not kind and "properties" in rules:
        kind = "object"
    if rules.keys() <= {"enum"} and "enum" in rules and len(json.dumps(rules["enum"])) < 1000:
        return rules if kind is None else {"type": kind, **rules}
    if set(rules) == {"const"}:
        return rules
    if kind in ("boolean", "null") and not rules:
        return {"type": kind}
    if kind == "string" and rules.keys() <= {"minLength", "maxLength", "pattern"}:
        most = max(LETTERS, rules.get("minLength", 0))
        return {"type": kind, **rules, "maxLength": min(most, rules.get("maxLength", most))}
    if kind in ("integer", "number") and rules.keys() <= {"minimum", "maximum"}:
        least, most = rules.get("minimum", 0), rules.get("maximum", NUMBER)
        if int(least) != least or int(most) != most or least > most:
            raise Unfit
        return {"type": "integer", "minimum": int(least), "maximum": int(most)}
    if kind == "array" and "items" in rules and rules.keys() <= {"items", "minItems", "maxItems"}:
        most = max(ITEMS, rules.get("minItems", 0))
        items = bounded(rules["items"], root, depth + 1)
        return {"type": kind, **rules, "items": items,
                "maxItems": min(most, rules.get("maxItems", most))}  # fmt: skip
    known = {"properties", "required", "additionalProperties"}
    if kind == "object" and "properties" in rules and rules.keys() <= known:
        named = rules["properties"]
        if not 1 <= len(named) <= 6 or not {*rules.get("required", ())} <= {*named}:
            raise Unfit
        inner = {name: bounded(one, root, depth + 1) for name, one in named.items()}
        return {"type": kind, "properties": inner, "required": [*named],
                "additionalProperties": False}  # fmt: skip
    raise Unfit


def resolved(pointer: str, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference within the document."""
    at: Any = root
    if not pointer.startswith("#/"):
        raise Unfit
    for name in pointer[2:].split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(at, Mapping) or name not in at:
            raise Unfit
        at = at[name]
    return at


def parts(schema: Any, name: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every object with two properties or more in a document, with its name there."""
    if isinstance(schema, Mapping):
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and len(properties) > 1:
            yield str(schema.get("title") or name), schema
        for key, value in schema.items():
            yield from parts(value, name if key in ("items", "properties") else key)
    elif isinstance(schema, list):
        for value in schema:
            yield from parts(value, name)


def documents(path: Path) -> Iterator[Any]:
    """Yield the responses that the package cached, without unpickling: the longest bytes."""
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    for (kept,) in database.execute("SELECT value FROM responses"):
        pieces = [piece for _, piece, _ in pickletools.genops(kept) if isinstance(piece, bytes)]
        try:
            yield json.loads(max(pieces, key=len))
        except ValueError:
            continue


class Question(NamedTuple):
    """A bounded schema, its grammar, and its prompt."""

    schema: dict[str, Any]
    grammar: Grammar
    prompt: str


def questions(path: Path, engine: Engine) -> Iterator[tuple[str, Question]]:
    """Yield for each document, by its hash, the first schema that can be bounded and compiled."""
    ends = [int(engine.model.tokenizer.eos_token_id)]
    for document in documents(path):
        own: dict[str, Question] = {}
        for name, part in parts(document):
            try:
                schema = bounded(part, document)
            except Unfit:
                continue
            about = " ".join(str(part.get("description", "")).split())[:300]
            prompt = f"Write an example of this as JSON: {name or 'a configuration'}. {about}"
            grammar = Grammar.json_schema(schema)
            key = sha256(grammar.text.encode()).hexdigest()
            own.setdefault(key, Question(schema, grammar, prompt.strip()))
        for key in sorted(own):
            try:
                engine.model.grammars.compile(own[key].grammar, ends)
            except OptionError:
                continue
            yield key, own[key]
            break
