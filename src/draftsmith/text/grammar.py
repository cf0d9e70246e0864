"""Grammars that an answer must follow: a JSON schema, a regular expression, a Lark grammar.

llguidance (Moskal et al., https://github.com/guidance-ai/llguidance) computes the tokens that may
follow each token. It is used in this file only, and imported when the first grammar is compiled.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.core.drafter import common_prefix
from draftsmith.core.sampling import without
from draftsmith.errors import DraftsmithError, OptionError, extra, first_line
from draftsmith.text.thoughts import ThinkingState
from draftsmith.text.vocab import Vocabulary
from draftsmith.values import shown

KEPT = 64
"""Number of compiled grammars that a model keeps, the most recent ones."""
FEW = 64
"""Maximum number of allowed tokens that are drafted because nothing else may follow."""
DEEPEST = 20_000
"""Maximum depth of a schema, including references: llguidance recurses once per level."""
STACK = 512 << 20
"""Stack size, in bytes, for that recursion; usual stacks overflow at a few hundred levels, which
ends the process."""
_FORCED = 1024
"""Most bytes of a text that must follow, of which tokens are made at once."""
SHORT_ESCAPES = 'nrbtf\\"'
"""JSON escapes with which every character has a single spelling.

llguidance treats the key `\\u0061` as different from a named key `a`, so the schema of `a` would
not apply to it. Without `\\u`, other control characters cannot be written.
"""
_MAKING = threading.Lock()


@dataclass(frozen=True)
class Grammar:
    """A grammar for the whole answer; create it with one of the four methods."""

    kind: Literal["JSON schema", "regular expression", "Lark grammar"]
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise OptionError(f"a {self.kind} must be a text, got {shown(self.text)}")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """Create a grammar for JSON that fits a schema, without white space, with keys in its
        order.

        `true` allows any JSON. Raises OptionError for anything but a schema, and for `false`, which
        no text fits.
        """
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps({} if parsed is True else parsed)
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(f"a JSON schema must be valid JSON: {first_line(error)}") from error
        if not isinstance(parsed, Mapping | bool):
            raise OptionError(f"a JSON schema must be an object or a bool, got {text[:60]}")
        if parsed is False:
            raise OptionError("no text fits the JSON schema `false`")
        return cls("JSON schema", text)

    @classmethod
    def json_object(cls) -> Grammar:
        """Create a grammar for any JSON object, without white space between its parts."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Create a grammar for texts that a regular expression matches as a whole.

        The syntax is that of Rust's regex crate: no look-around, no back-references. Raises
        OptionError if it is no text.
        """
        return cls("regular expression", pattern)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Create a grammar for a context-free language in Lark's syntax; `start` is the whole text.

        Raises OptionError if it is no text.
        """
        return cls("Lark grammar", text)


class Grammars:
    """The grammars of one tokenizer, each compiled once; thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """`vocab_size`: width of the logits."""
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._tokenizers: dict[tuple[int, ...], Any] = {}
        self._compiled = lru_cache(KEPT)(lambda *given: deeply(self._build, *given))
        self._lock = threading.Lock()
        self._compiling: WeakValueDictionary[Any, Any] = WeakValueDictionary()
        """Locks of grammars that are being compiled: other threads wait for them."""

    def compile(self, grammar: Grammar, end_ids: Sequence[int]) -> Compiled:
        """Compile a grammar; the text must be followed by one of `end_ids`.

        The first grammar of a tokenizer takes about half a second, as does a large one. Raises
        OptionError for a grammar that is wrong, too complex or not supported, and if llguidance or
        a fast tokenizer is missing.
        """
        if not isinstance(grammar, Grammar):
            raise OptionError(
                "grammar must be created by Grammar.json_schema, json_object, regex or lark, got "
                f"{grammar!r}"
            )
        key = grammar, tuple(i for i in end_ids if i < self.vocab_size)
        with self._lock:
            compiling = self._compiling.setdefault(key, threading.RLock())
        with compiling:
            return self._compiled(*key)

    def _build(self, grammar: Grammar, ends: tuple[int, ...]) -> Compiled:
        if not ends:
            raise OptionError("a grammar needs a model with an end token, but this model has none")
        library = _library()
        if ends not in self._tokenizers:
            try:
                spelt = _Spelt(Vocabulary.of(self.tokenizer, self.vocab_size), ends[0])
            except DraftsmithError as error:
                raise OptionError(f"grammars cannot be used with this model: {error}") from error
            self._tokenizers[ends] = library.LLTokenizer(
                library.TokenizerWrapper(spelt), n_vocab=self.vocab_size, eos_token=list(ends)
            )
        matcher, options = library.LLMatcher, dict[str, Any](whitespace_flexible=False)
        if grammar.kind == "JSON schema":
            if levels(grammar.text) > DEEPEST:
                raise _refusal(grammar, "it is nested too deeply")
            schema = json.loads(grammar.text)
            if (number := rounded(schema, matcher, self._tokenizers[ends])) is not None:
                raise _refusal(grammar, f"it has the number {number}, which llguidance does not "
                               "keep exactly; use a string")  # fmt: skip
            if admits_more_keys(schema):
                if needs_long_escapes(schema):
                    raise _refusal(grammar, "control characters in a const, an enum or a pattern "
                                   "need objects with additionalProperties: false")  # fmt: skip
                options["json_allowed_escapes"] = SHORT_ESCAPES
        try:
            if grammar.kind == "JSON schema":
                made = matcher.grammar_from_json_schema(grammar.text, overrides=options)
            elif grammar.kind == "regular expression":
                made = matcher.grammar_from_regex(grammar.text)
            else:
                made = matcher.grammar_from_lark(grammar.text)
        except ValueError as error:
            raise _refusal(grammar, str(error)) from error
        # The default limits bound the steps of compiling and of each mask, to seconds at most.
        limits = library.LLParserLimits(verbose_errors=False)
        start = matcher(self._tokenizers[ends], made, log_level=0, limits=limits)
        if not start.is_error():
            start.compute_bitmask()
        if start.is_error() or (start.is_stopped() and not start.is_accepting()):
            raise _refusal(grammar, start.get_error() or "no text fits it")
        return Compiled(grammar, start, self._tokenizers[ends], ends)


@dataclass(frozen=True, eq=False)
class Compiled:
    """A grammar compiled for one tokenizer; serves any number of sequences."""

    grammar: Grammar
    start: Any
    """An LLMatcher that has read nothing; it is only copied."""
    tokenizer: Any
    """The LLTokenizer for which it was compiled."""
    end_ids: tuple[int, ...]


class GrammarState:
    """State of one answer in its grammar; also a processor of its scores.

    It reads each emitted token once. Drafts use copies of it (`scout`).
    """

    def __init__(
        self, compiled: Compiled, prompt_length: int, thinking: ThinkingState | None = None
    ) -> None:
        """`prompt_length`: ids before the answer. `thinking`: thoughts that come before it."""
        self.compiled, self.thinking = compiled, thinking
        self.matcher = compiled.start.deep_copy()
        self.read = prompt_length
        """Number of ids that the matcher has read, including those before the answer."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Return (1, V) scores with -inf for tokens that the grammar forbids.

        If other options forbid all tokens that the grammar allows, the grammar takes precedence.
        Raises OptionError if llguidance's limits are exceeded.
        """
        first = None
        if self.thinking is not None and not self._begun(ids[0, self.thinking.read :].tolist()):
            if self.thinking.thinks:
                return without(scores, self.compiled.end_ids)
            first = self.thinking.begin
        self.matcher.consume_tokens(ids[0, self.read :].tolist())
        self.read = ids.shape[1]
        mask = self.matcher.compute_bitmask()
        if self.matcher.is_error():
            raise _refusal(self.compiled.grammar, self.matcher.get_error())
        allowed = torch.from_numpy(unpacked(mask)[: scores.shape[1]])
        if first is not None:
            allowed[first] = 1
        forbidden = allowed.to(scores.device) == 0
        kept = scores.masked_fill(forbidden, -math.inf)
        if kept.amax() == -math.inf:
            return torch.zeros_like(scores).masked_fill_(forbidden, -math.inf)
        return kept

    def _begun(self, new: Sequence[int]) -> bool:
        """Follow the thoughts by some ids; return whether the answer has begun."""
        assert self.thinking is not None
        begin = self.thinking.follow(new)
        if begin is not None:
            self.read = max(self.read, begin)
        return begin is not None

    def scout(self, ids: Sequence[int]) -> Scout | None:
        """Return a scout for what may follow `ids`, the current sequence; None within thoughts."""
        if self.thinking is not None and not self._begun(ids[self.thinking.read :]):
            return None
        matcher = self.matcher.deep_copy()
        matcher.consume_tokens(list(ids[self.read :]))
        return Scout(matcher, self.compiled)


class Scout:
    """A copy of a sequence's matcher for drafts; it may reach any state or limit."""

    def __init__(self, matcher: Any, compiled: Compiled) -> None:
        self.matcher, self.compiled = matcher, compiled
        self.path: list[int] = []
        """Tokens after the sequence that it has read."""

    def go(self, path: Sequence[int]) -> bool:
        """Read `path` after the sequence; return False, with a part of it read, if it is
        forbidden."""
        same = common_prefix(path, self.path)
        if same < len(self.path):
            self.matcher.rollback(len(self.path) - same)
        read = self.matcher.try_consume_tokens(list(path[same:])) if same < len(path) else 0
        self.path = list(path[: same + read])
        return len(self.path) == len(path) and not self.matcher.is_error()

    def onward(self) -> tuple[list[int], list[int]]:
        """Return the first `FEW` tokens that must follow here, and those that may follow after all.

        Either may be empty, the second one if it has more than `FEW` tokens. If some bytes must
        follow but not certain tokens, tokens that write more than these bytes are left out. At the
        end of the grammar an end token must follow. The scout reads the tokens that must follow.
        """
        ended = bool(self.path) and self.path[-1] in self.compiled.end_ids
        if ended or self.matcher.is_error():
            return [], []
        every = self.matcher.compute_ff_tokens()
        forced = every[:FEW]
        self.go([*self.path, *forced])
        if len(forced) < len(every):
            return forced, []
        if self.matcher.is_stopped():
            return ([] if self.matcher.is_error() else [*forced, self.compiled.end_ids[0]]), []
        mask = self.matcher.compute_bitmask()
        if int.from_bytes(mask, "little").bit_count() > FEW:
            return forced, []
        few = unpacked(mask).nonzero()[0].tolist()
        certain = self.matcher.compute_ff_bytes()
        spelt = self.compiled.tokenizer.decode_bytes
        return forced, [i for i in few if certain.startswith(spelt([i]))] or few


def levels(schema: str) -> int:
    """Return an upper bound of a schema's depth, if no reference is followed twice on a path."""
    level, deep = [json.loads(schema)], 0
    while level := [one for one in level if isinstance(one, dict | list)]:
        deep += 1
        level = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
    return deep * (1 + len(set(re.findall(r'"\$\w*[rR]ef": "(.*?)"', schema))))


_MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords of mappings from names to schemas."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
"""Keywords of numbers."""
_EXPONENT = 22
"""Largest power of ten that is a float64."""
_TOGETHER = 1000
"""Most constants of one grammar; llguidance fails from some ten thousands on."""
_VALUES = ("const", "enum", "default", "examples")
"""Keywords of values that are no schemas."""


def schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas in it; arguments of unknown keywords count as schemas."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            yield one
            for name, part in one.items():
                if name not in _VALUES:
                    named = name in _MAPS and isinstance(part, dict)
                    waiting += part.values() if named else [part]


def admits_more_keys(schema: Any) -> bool:
    """Return whether an object may have several kinds of keys: named, by a pattern, any others."""
    return any(
        bool(one.get("properties"))
        + bool(one.get("patternProperties"))
        + (one.get("additionalProperties") is not False)
        > 1
        for one in schemas(schema)
    )


def constants(schema: Any) -> list[Any]:
    """Return the values of `const` and `enum` in a schema and all schemas in it."""
    return [one[name] for one in schemas(schema) for name in ("const", "enum") if name in one]


def rounded(schema: Any, matcher: Any, tokenizer: Any) -> int | float | None:
    """Return a number in a schema that an answer would have with other digits; None: none.

    `matcher` is the class LLMatcher, which is asked how it writes constants.
    """
    waiting, doubtful = constants(schema), list[int | float]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int | float) and math.isfinite(value) and _is_long(value):
            doubtful.append(value)
    for at in range(0, len(doubtful), _TOGETHER):
        asked = doubtful[at : at + _TOGETHER]
        text, options = json.dumps({"const": asked}), {"whitespace_flexible": False}
        made = matcher.grammar_from_json_schema(text, overrides=options)
        kept = json.loads(matcher(tokenizer, made, log_level=0).compute_ff_bytes())
        wrong = (a for a, b in zip(asked, kept, strict=True) if type(a)(b) != a)
        if (found := next(wrong, None)) is not None:
            return found
    bounds = (one.get(name) for one in schemas(schema) for name in _BOUNDS)
    whole = (value for value in bounds if isinstance(value, int))
    # Larger ones than any integer of 64 bits exclude none of these.
    return next((v for v in whole if abs(v) < (1 << 63) - 1 and int(float(v)) != v), None)


def _is_long(value: int | float) -> bool:
    """Return whether a number may be rounded: above 2**53, or a power of ten that is no float64."""
    _, digits, exponent = Decimal(repr(value + 0)).normalize().as_tuple()
    return int("".join(map(str, digits))) > 1 << 53 or abs(int(exponent)) > _EXPONENT


def needs_long_escapes(schema: Any) -> bool:
    """Return whether a constant or a pattern needs escapes other than `SHORT_ESCAPES`.

    llguidance would read `^a\x1b$` as `^a$`. It reads classes rightly that have another character.
    """
    if _LONG.search(json.dumps(constants(schema))):
        return True
    all_of = list(schemas(schema))
    patterns = [one.get("pattern") for one in all_of]
    for one in all_of:
        named = one.get("patternProperties")
        patterns += named if isinstance(named, dict) else ()
    return any(needs_control(pattern) for pattern in patterns if isinstance(pattern, str))


def needs_control(pattern: str) -> bool:
    """Return whether a character or a class of a pattern has only characters of `_LONE`."""
    members: list[int | None] | None = None  # of the class that was opened
    for atom in _ATOM.finditer(pattern):
        text, digits = atom[0], next(filter(None, atom.groups()), None)
        code = int(digits, 16) if digits else ord(text) if len(text) == 1 else _CODES.get(text)
        if members is None:
            if text == "[":
                members = []  # with "^" as a member if it is negated: it has others, too
            elif code in _LONE:
                return True
        elif text != "]":
            members.append(code)
        elif _lone(members):
            return True
        else:
            members = None
    return False


def _lone(members: Sequence[int | None]) -> bool:
    """Return whether the characters and ranges in a class are all in `_LONE`."""
    found, each = {*members}, zip(members, members[1:], members[2:], strict=False)
    for first, between, last in each:
        if between == ord("-") and first is not None and last is not None:
            found = found - {between} | {*range(first, min(last, 0x80) + 1)}
    return bool(found) and found <= _LONE


_LONG = re.compile(r"(?<!\\)(\\\\)*\\u00([01]|7f)|\x7f")
"""A control character in JSON text."""
_ATOM = re.compile(
    r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\[xuU]\{([0-9a-fA-F]+)\}"
    r"|\\.|.",
    re.DOTALL,
)
"""A character or an escape in a pattern."""
_CODES = {r"\a": 7, r"\v": 11}
_LONE: set[int | None] = {*range(0x20), 0x7F} - {ord(one) for one in "\b\t\n\f\r"}
"""Characters that have no short escape in JSON."""


def deeply(call: Callable[..., Compiled], *given: Any) -> Compiled:
    """Call a function in a thread with a large stack; return its result or raise its error."""
    with ThreadPoolExecutor(1) as thread, _MAKING:
        usual = threading.stack_size(STACK)
        try:
            running = thread.submit(call, *given)  # this starts the thread
        finally:
            threading.stack_size(usual)
    return running.result()


def unpacked(mask: bytes) -> NDArray[np.uint8]:
    """Return (at least V,) 1 for each allowed token, 0 for others."""
    return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")


class _Spelt:
    """A vocabulary for llguidance in which no text spells a special token.

    If llguidance reads a tokenizer's JSON itself, some texts do: it then cannot write
    `<|python_tag|>` in a string if that is a special token, nor `</tool_call>` if that is a token.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, end: int) -> None:
        # Cached, because forced text is encoded again for each token that leads to it.
        self.encode, self.eos_token_id = lru_cache(KEPT)(vocabulary.encode_exactly), end
        names = {i: name.encode() for i, name in vocabulary.special.items()}
        self.tokens = [data or names.get(i, b"") for i, data in enumerate(vocabulary.tokens)]
        self.special_token_ids = sorted(names)

    def __call__(self, text: bytes) -> list[int]:
        # The next token and a draft need no more; a text may be as long as a request.
        return self.encode(text[:_FORCED])


def _library() -> Any:
    """Import llguidance; raise OptionError if it is not installed."""
    with extra("grammar", "a grammar needs llguidance"):
        import llguidance
    return llguidance


def _refusal(grammar: Grammar, reason: str) -> OptionError:
    """Create the error for a grammar that cannot be used."""
    why = " ".join(reason.split())[:200] or "llguidance gives no reason"
    return OptionError(f"this {grammar.kind} cannot be used: {why}; simplify or correct it")
