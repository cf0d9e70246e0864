"""Grammars that an answer must follow: a JSON schema, a regular expression, a Lark grammar.

llguidance (Moskal et al., https://github.com/guidance-ai/llguidance) says after each token which
may come next. Everything that knows it is here; it is imported where a grammar is compiled.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.core.drafter import common_prefix
from draftsmith.core.sampling import without
from draftsmith.errors import DraftsmithError, OptionError, first_line
from draftsmith.text.thoughts import ThinkingState
from draftsmith.text.vocab import Vocabulary

KEPT = 64
"""Compiled grammars that a model keeps, the latest."""
FEW = 64
"""Tokens that are few enough to be drafted because nothing else may come."""
DEEPEST = 20_000
"""Levels of a schema, references followed, that are read: llguidance calls itself for each."""
STACK = 512 << 20
"""Bytes of address space for that: those that threads have end the process at some hundred."""
SHORT_ESCAPES = 'nrbtf\\"'
"""Escapes in JSON by which every character has one spelling.

llguidance takes a key for another one than a named `a` if it is spelled `\\u0061`, and so lets it
past the schema of `a`. Without `\\u` the other control characters cannot be written.
"""
_MAKING = threading.Lock()


@dataclass(frozen=True)
class Grammar:
    """What an answer must be, from its first token to its end; one of the four methods makes it."""

    kind: Literal["JSON schema", "regular expression", "Lark grammar"]
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """JSON without any white space between its parts that fits a schema, keys in its order.

        Raises OptionError for what is no JSON object, `true` or `false`.
        """
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(parsed)
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(f"a JSON schema must be JSON: {first_line(error)}") from error
        if not isinstance(parsed, Mapping | bool):
            raise OptionError(f"a JSON schema must be an object, or true; not {text[:60]}")
        return cls("JSON schema", text)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object, without white space between its parts."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that a regular expression matches from its beginning to its end.

        In the syntax of Rust's regex crate: no look-around, no references back.
        """
        return cls("regular expression", pattern)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A text of a context-free language, in the syntax of Lark; its rule `start` is all."""
        return cls("Lark grammar", text)


class Grammars:
    """The grammars of one tokenizer, each compiled once; any thread may ask."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """`vocab_size`: the width of the logits."""
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._tokenizers: dict[tuple[int, ...], Any] = {}
        self._compiled: dict[tuple[Grammar, tuple[int, ...]], Compiled] = {}

    def compile(self, grammar: Grammar, end_ids: Sequence[int]) -> Compiled:
        """A grammar whose text is followed by one of `end_ids`.

        The first one of a tokenizer takes about half a second, large ones take as long. Raises
        OptionError for one that is wrong, too complex or not supported, and where llguidance or a
        fast tokenizer is missing.
        """
        if not isinstance(grammar, Grammar):
            raise OptionError(
                f"grammar={grammar!r} cannot work; it must be made by Grammar.json_schema, "
                "json_object, regex or lark"
            )
        ends = tuple(i for i in end_ids if i < self.vocab_size)
        found = self._compiled.pop((grammar, ends), None) or deeply(self._build, grammar, ends)
        self._compiled[grammar, ends] = found
        for oldest in list(self._compiled)[:-KEPT]:
            self._compiled.pop(oldest, None)
        return found

    def _build(self, grammar: Grammar, ends: tuple[int, ...]) -> Compiled:
        if not ends:
            raise OptionError("a grammar needs a model with an end token, which this one has not")
        library = _library()
        if ends not in self._tokenizers:
            try:
                spelt = _Spelt(Vocabulary.of(self.tokenizer, self.vocab_size), ends[0])
            except DraftsmithError as error:
                raise OptionError(f"a grammar cannot be followed: {error}") from error
            self._tokenizers[ends] = library.LLTokenizer(
                library.TokenizerWrapper(spelt), n_vocab=self.vocab_size, eos_token=list(ends)
            )
        matcher, options = library.LLMatcher, dict[str, Any](whitespace_flexible=False)
        if grammar.kind == "JSON schema":
            if levels(grammar.text) > DEEPEST:
                raise _refusal(grammar, "it goes too deep")
            schema = json.loads(grammar.text)
            if admits_more_keys(schema):
                if needs_long_escapes(schema):
                    raise _refusal(grammar, "control characters in a const or an enum need objects "
                                   "with additionalProperties: false")  # fmt: skip
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
        # Its usual limits bound the steps of building and of each mask: seconds at the most.
        limits = library.LLParserLimits(verbose_errors=False)
        start = matcher(self._tokenizers[ends], made, log_level=0, limits=limits)
        if not start.is_error():
            start.compute_bitmask()
        if start.is_error() or (start.is_stopped() and not start.is_accepting()):
            raise _refusal(grammar, start.get_error() or "no text fits it")
        return Compiled(grammar, start, self._tokenizers[ends], ends)


@dataclass(frozen=True, eq=False)
class Compiled:
    """A grammar, ready for one tokenizer; serves any number of sequences."""

    grammar: Grammar
    start: Any
    """An LLMatcher that has read nothing; only copied."""
    tokenizer: Any
    """The LLTokenizer that it was compiled for."""
    end_ids: tuple[int, ...]

    def state(self, prompt_length: int, thinking: ThinkingState | None = None) -> GrammarState:
        """For a sequence whose answer begins behind so many ids, or after thoughts."""
        return GrammarState(self, prompt_length, thinking)


class GrammarState:
    """Where one sequence's answer stands in its grammar; a processor of its scores.

    It reads what was emitted, each token once. What may be drafted is asked of copies (`scout`).
    """

    def __init__(
        self, compiled: Compiled, prompt_length: int, thinking: ThinkingState | None = None
    ) -> None:
        """`thinking`: the thoughts before the answer, which may have any text but an end."""
        self.compiled, self.thinking = compiled, thinking
        self.matcher = compiled.start.deep_copy()
        self.read = prompt_length
        """Ids of the sequence that the matcher has read, or that lie before the answer."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """(1, V) the scores with -inf wherever the grammar allows no token.

        Where other options forbid all that it allows, the grammar has the last word. Raises
        OptionError where the text cannot go on within llguidance's limits.
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
        """Let the thoughts go on by some ids; return whether the answer has begun."""
        assert self.thinking is not None
        begin = self.thinking.follow(new)
        if begin is not None:
            self.read = max(self.read, begin)
        return begin is not None

    def scout(self, ids: Sequence[int]) -> Scout | None:
        """What may follow `ids`, the sequence as it stands now; None: anything, in thoughts."""
        if self.thinking is not None and not self._begun(ids[self.thinking.read :]):
            return None
        matcher = self.matcher.deep_copy()
        matcher.consume_tokens(list(ids[self.read :]))
        return Scout(matcher, self.compiled)


class Scout:
    """A copy of a sequence's matcher, which drafts may lead anywhere and into any limit."""

    def __init__(self, matcher: Any, compiled: Compiled) -> None:
        self.matcher, self.compiled = matcher, compiled
        self.path: list[int] = []
        """Tokens behind the sequence that it has read."""

    def go(self, path: Sequence[int]) -> bool:
        """Go to where `path` behind the sequence leads; False, staying near, if it is forbidden."""
        same = common_prefix(path, self.path)
        if same < len(self.path):
            self.matcher.rollback(len(self.path) - same)
        read = self.matcher.try_consume_tokens(list(path[same:])) if same < len(path) else 0
        self.path = list(path[: same + read])
        return len(self.path) == len(path) and not self.matcher.is_error()

    def onward(self) -> tuple[list[int], list[int]]:
        """The tokens that must follow here, one after the other, and those that may come then.

        Both may be empty: the latter where they are more than `FEW`. Where bytes are certain and
        tokens are not, those that write more than these bytes are left out. Where all is said an
        end token must follow. The path goes on with what must follow.
        """
        ended = bool(self.path) and self.path[-1] in self.compiled.end_ids
        if ended or self.matcher.is_error():
            return [], []
        forced = self.matcher.compute_ff_tokens()
        self.go([*self.path, *forced])
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
    """At least as many as a schema has, where no reference is followed twice on a way down."""
    level, deep = [json.loads(schema)], 0
    while level := [one for one in level if isinstance(one, dict | list)]:
        deep += 1
        level = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
    return deep * (1 + len(set(re.findall(r'"\$\w*[rR]ef": "(.*?)"', schema))))


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects in a schema."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()


def admits_more_keys(schema: Any) -> bool:
    """Whether some object may have keys of several kinds: named ones, by a pattern, any others."""
    return any(
        bool(one.get("properties"))
        + bool(one.get("patternProperties"))
        + (one.get("additionalProperties") is not False)
        > 1
        for one in parts(schema)
    )


def needs_long_escapes(schema: Any) -> bool:
    """Whether a constant has characters that only `SHORT_ESCAPES` and `\\u` can write."""
    constants = [one.get(name) for one in parts(schema) for name in ("const", "enum")]
    return _LONG.search(json.dumps(constants)) is not None


_LONG = re.compile(r"(?<!\\)(\\\\)*\\u00([01]|7f)|\x7f")


def deeply(call: Callable[..., Compiled], *given: Any) -> Compiled:
    """What a call gives, made on a stack of its own; raises what it raises."""
    with ThreadPoolExecutor(1) as thread, _MAKING:
        usual = threading.stack_size(STACK)
        try:
            going = thread.submit(call, *given)  # which starts the thread
        finally:
            threading.stack_size(usual)
    return going.result()


def unpacked(mask: bytes) -> NDArray[np.uint8]:
    """(at least V,) 1 for each token that is allowed."""
    return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")


class _Spelt:
    """A vocabulary as llguidance reads one, in which no text spells a special token.

    What llguidance reads by itself from a tokenizer's JSON does: it cannot write `<|python_tag|>`
    in a string where that is a special token, nor `</tool_call>` where that is a token at all.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, end: int) -> None:
        # What is forced is asked for again with every token that comes nearer to it.
        self.encode, self.eos_token_id = lru_cache(KEPT)(vocabulary.encode_known), end
        names = {i: name.encode() for i, name in vocabulary.special.items()}
        self.tokens = [data or names.get(i, b"") for i, data in enumerate(vocabulary.tokens)]
        self.special_token_ids = sorted(names)

    def __call__(self, text: bytes) -> list[int]:
        return self.encode(text)


def _library() -> Any:
    """llguidance; raises OptionError if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise OptionError(
            f"a grammar needs llguidance, which cannot be imported ({error}); "
            "pip install 'draftsmith[grammar]'"
        ) from error
    return llguidance


def _refusal(grammar: Grammar, said: str) -> OptionError:
    """That this grammar cannot be followed, and why."""
    why = " ".join(said.split())[:200] or "llguidance gives no reason"
    return OptionError(f"this {grammar.kind} cannot be followed: {why}; simplify or mend it")
