"""Tool calls with arguments as plain text between tags: Qwen3-Coder and GLM."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.server.calls.as_python import CONSTANTS
from draftsmith.server.calls.source import (
    Call,
    NoCall,
    Parser,
    Source,
    called,
    closing,
    must,
    space,
    taken,
    tool,
    until,
)


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a format; white space may precede each of them, except `value_end`.

    Values are not escaped, so a value may contain `value_end` followed by closing tags. A value
    then ends at the last such position before the next call, or before the end of the answer.
    """

    opening: str
    """Before a call; optional if `name` is a tag."""
    name: str
    """Before the name of a tool."""
    name_end: str
    key: str
    """Before the name of a parameter."""
    key_end: str
    value: str
    """Before a value; "" if the value follows `key_end` directly."""
    value_end: str
    closing: tuple[str, ...]
    """After the last value. Only the first of them is required."""
    lines: bool
    """Whether values stand on separate lines; the line breaks around them are removed."""

    def parse(self, source: Source, mark: str) -> Parser[list[Call]]:
        """Parse one call; `mark` is `opening` or `name`."""
        if mark == self.opening:
            yield from space(source)
            yield from must(source, self.name)
        name = yield from tool(source)
        yield from must(source, self.name_end)
        schema = source.tools[name]
        values: dict[str, Any] = {}
        yield from space(source)
        while (key := (yield from self._key(source))) is not None:
            text = yield from self._value(source, {*values, key}, schema)
            values[key] = typed(text, key, schema)
            yield from space(source)
        if not (yield from self._closed(source)):
            raise NoCall
        return [called(name, json.dumps(values, ensure_ascii=False))]

    def _key(self, source: Source) -> Parser[str | None]:
        """Consume the tags and the name before a value; return the name, or None without `key`."""
        if not (yield from taken(source, self.key)):
            return None
        name = yield from until(source, self.key_end)
        if self.value:
            yield from space(source)
            yield from must(source, self.value)
        return name.strip()

    def _closed(self, source: Source) -> Parser[bool]:
        """Consume the closing tags; return False if the first of them does not follow."""
        first, *others = self.closing
        if not (yield from taken(source, first)):
            return False
        for tag in others:
            yield from closing(source, tag)
        return True

    def _value(self, source: Source, seen: set[str], schema: Any) -> Parser[str]:
        """Parse a value and the tag after it; return the text of the value."""
        begin = search = source.at
        last, behind = -1, 0
        while True:
            place = source.text.find(self.value_end, search)
            if last >= 0 and (self._opens(source, behind, place) or (place < 0 and source.ended)):
                break  # no later position can be the end
            if place < 0:
                if source.ended:
                    raise NoCall
                search = max(search, len(source.text) - len(self.value_end) + 1)
                yield
                continue
            source.at = place + len(self.value_end)
            yield from space(source)
            if (yield from self._goes_on(source, seen, schema)):
                last = place
                break
            if (yield from self._closed(source)):
                last, behind = place, source.at
            search = place + 1
        source.at = last + len(self.value_end)
        text = source.text[begin:last]
        return text[1:].removesuffix("\n") if self.lines and text.startswith("\n") else text

    def _goes_on(self, source: Source, seen: set[str], schema: Any) -> Parser[bool]:
        """Return whether another parameter of the tool follows; consume nothing."""
        here = source.at
        try:
            key = yield from self._key(source)
        except NoCall:
            key = None
        source.at = here
        properties = _properties(schema)
        return key is not None and key not in seen and (not properties or key in properties)

    def _opens(self, source: Source, begin: int, end: int) -> bool:
        """Return whether another call begins between `begin` and `end`; -1 is the text's end."""
        names = "|".join(map(re.escape, source.tools))
        first = re.escape(self.opening) + r"\s*" + re.escape(self.name)
        found = re.compile(rf"{first}(?:{names})\s*[<>]").search(source.text, begin)
        return found is not None and (end < 0 or found.start() < end)


def _properties(schema: Any) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def typed(text: str, key: str, schema: Any) -> Any:
    """Return the value of a parameter; it is the text itself if the schema requires a string.

    Other text that is JSON or a Python constant becomes its value, unless that value is a string.
    If the schema also allows strings, it must allow the type of the value, too.
    """
    kinds = _kinds(_properties(schema).get(key), schema)
    if kinds == {"string"} or ("string" in kinds and text != text.strip()):
        return text
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # raises ValueError for NaN
    except (ValueError, RecursionError):
        value = CONSTANTS.get(text.strip(), text)
    kind = "number" if _kind(value) == "integer" and "integer" not in kinds else _kind(value)
    return text if kind == "string" or ("string" in kinds and kind not in kinds) else value


def _kind(value: Any) -> str:
    """Return the name of a value's type in JSON schemas."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array"}
    return names.get(type(value), "object")


def _kinds(schema: Any, root: Any) -> set[str]:
    """Return the types that a schema allows; empty if it does not restrict them."""
    found, seen, waiting = set[str](), set[int](), [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        kind = one.get("type")
        kinds = {k for k in (kind if isinstance(kind, list) else [kind]) if isinstance(k, str)}
        kinds |= {"null"} if kinds and one.get("nullable") is True else set()  # OpenAPI's
        constants = [one["const"]] if "const" in one else one.get("enum")
        if not kinds and isinstance(constants, list):
            kinds = {_kind(constant) for constant in constants}
        found |= kinds
        for name in ("anyOf", "oneOf", "allOf"):
            waiting += part if isinstance(part := one.get(name), list) else []
        if isinstance(reference := one.get("$ref"), str):
            waiting.append(_at(root, reference))
    return found


def _at(root: Any, reference: str) -> Any:
    """Return the part of a schema that a reference names, or None."""
    for name in reference.removeprefix("#").split("/")[1:]:
        root = root.get(name) if isinstance(root, Mapping) else None
    return root
