"""Schemas of the benchmark of structured output: bounded, and never loosened."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.schemas import Unfit, bounded

ROOT = {
    "definitions": {
        "name": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 9, "title": "A name"},
        "loop": {"properties": {"a": {"$ref": "#/definitions/loop"}, "b": {"type": "null"}}},
    }
}


def test_it_adds_bounds_and_keeps_rules() -> None:
    schema = {
        "title": "Thing",
        "properties": {
            "name": {"$ref": "#/definitions/name"},
            "note": {"type": "string", "minLength": 20},
            "size": {"type": "number", "minimum": 3},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1},
            "on": {"type": "boolean", "default": True},
        },
        "required": ["name"],
    }
    assert bounded(schema, ROOT) == {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 9},
            "note": {"type": "string", "minLength": 20, "maxLength": 20},
            "size": {"type": "integer", "minimum": 3, "maximum": 99_999},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
            "on": {"type": "boolean"},
        },
        "required": ["name", "note", "size", "tags", "on"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {}}},
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]},
        {"type": "string", "not": {"const": "a"}},
        {"type": "number", "minimum": 0.5},
        {"$ref": "#/definitions/loop"},
        {"$ref": "other.json"},
        {"type": "array", "minItems": 2},
        True,
    ],
    ids=str,
)
def test_what_bounds_alone_do_not_fit_is_left_out(schema: Any) -> None:
    with pytest.raises(Unfit):
        bounded(schema, ROOT)
