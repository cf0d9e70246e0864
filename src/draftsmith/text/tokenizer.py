"""Conversion between text and ids: prompts, chat templates, streaming text, stop strings."""

from __future__ import annotations

import inspect
from collections import abc
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from draftsmith.core.drafter import common_prefix
from draftsmith.core.sequence import Sequence
from draftsmith.errors import LoadError, OptionError, PromptError
from draftsmith.text.spelling import FALLBACK
from draftsmith.values import integers, listed, shown, token_ids

Message = Mapping[str, Any]
NO_TOKENIZER = (
    "this model has no tokenizer, so {what}. Pass tokenizer=… when loading it, or use token ids"
)
OPENING = ("continue_final_message", "add_generation_prompt")
"""Variables of a chat template that determine where the answer begins, named as in transformers."""


def read_bare(path: Path) -> Tokenizer:
    """Load a tokenizer from a tokenizer.json alone; raises LoadError."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers, written in Rust, raises plain Exceptions
        raise LoadError(f"{path} cannot be read as a tokenizer: {error}") from error


def as_batch(prompt: Any) -> tuple[list[Any], bool]:
    """Return one or many prompts as a list, and whether there were many.

    Tensors, arrays and results of a tokenizer become lists of ids, without padding that their
    attention mask hides. A tensor of one row is one prompt. Raises PromptError for a mask with
    gaps or of another shape.
    """
    mask = None
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        prompt, mask = prompt["input_ids"], prompt.get("attention_mask")
    rows, tensor = listed(prompt), hasattr(prompt, "tolist")
    if mask is not None:
        mask = listed(mask)
        if _lengths(rows) != _lengths(mask):
            raise PromptError(
                "attention_mask must have as many values as input_ids, "
                f"{shown(_lengths(rows))}, got {shown(_lengths(mask))}"
            )
        rows = _shown(rows, mask)
    if tensor and isinstance(rows, list) and len(rows) == 1 and isinstance(rows[0], list):
        rows = rows[0]
    single = isinstance(rows, str) or _are_ids(rows) or _are_messages(rows)
    if single or not isinstance(rows, abc.Sequence) or isinstance(rows, bytes) or not len(rows):
        return [rows], False
    return list(rows), True


def _lengths(rows: Any) -> Any:
    """Return the length of a row, or a list with the length of each of several rows."""
    if not isinstance(rows, list):
        return rows
    return [_lengths(row) for row in rows] if rows and isinstance(rows[0], list) else len(rows)


def _shown(ids: Any, mask: Any) -> list[Any]:
    """Return the ids that the attention mask shows, for one or many rows."""
    if ids and isinstance(ids[0], list):
        return [_shown(*row) for row in zip(ids, mask, strict=True)]
    places = [place for place, seen in enumerate(mask) if seen]
    if places and places[-1] - places[0] >= len(places):
        raise PromptError("the attention mask hides more than padding; remove the hidden ids")
    return [ids[place] for place in places]


def _are_ids(prompt: Any) -> bool:
    return _is_list(prompt) and integers(prompt) is not None


def _are_messages(prompt: Any) -> bool:
    return _is_list(prompt) and all(isinstance(item, Mapping) for item in prompt)


def _is_list(prompt: Any) -> bool:
    some = isinstance(prompt, abc.Sequence) and not isinstance(prompt, str | bytes | bytearray)
    return some and len(prompt) > 0


def encode_prompt(tokenizer: Any, prompt: Any, template: Mapping[str, Any]) -> list[int]:
    """Return the ids of one prompt of any kind; `template`: more variables of the chat template."""
    (one, *_), many = as_batch(prompt)
    if isinstance(one, abc.Sequence) and not len(one):
        raise PromptError("the prompt is empty; pass a text, token ids, or messages")
    if isinstance(one, str) and not many:
        return encode(tokenizer, one, special=True)
    if _are_ids(one) and not many:
        return token_ids("a prompt", one, error=PromptError)
    if _are_messages(one) and not many:
        return render_chat(tokenizer, one, template)
    raise PromptError(
        f"a prompt must be a text, token ids, or a list of messages, got "
        f"{'several prompts' if many else type(one).__name__}"
    )


def encode(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """Return the ids of a text; `special` adds the tokenizer's own tokens, such as <s>.

    Raises PromptError for an unpaired surrogate, which no tokenizer accepts.
    """
    if tokenizer is None:
        raise LoadError(NO_TOKENIZER.format(what="text cannot be turned into tokens"))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):x}"
        raise PromptError(
            f"a text must have whole characters, got {half}, half of a surrogate pair, "
            f"at {error.start}"
        ) from None
    ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    return ids


def predicted(tokenizer: Any, prediction: Any, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of a prediction, a text or ids, without ids that the model lacks."""
    if isinstance(prediction, str):
        ids = encode(tokenizer, prediction)
    else:
        ids = token_ids("prediction", prediction, what="a text or token ids")
    return tuple(i for i in ids if 0 <= i < vocab_size)


def opening(tokenizer: Any) -> tuple[int, ...]:
    """Return the token that the tokenizer puts before every text (`<s>`), or nothing."""
    first = tokenizer.bos_token_id
    return (first,) if first is not None and tokenizer("a")["input_ids"][:1] == [first] else ()


def continues(messages: Any, template: Mapping[str, Any]) -> bool:
    """Return whether a chat's last message is continued, not answered.

    It is continued if it is the assistant's and `template` has `continue_final_message=True` or
    `add_generation_prompt=False`. Raises OptionError for contradictory variables.
    """
    goes_on, begins = (template.get(name) for name in OPENING)
    for name in OPENING:
        if not isinstance(template.get(name), bool | None):
            raise OptionError(f"{name} must be true or false, got {template[name]!r:.100}")
    if goes_on and begins:
        raise OptionError(
            "continue_final_message=True continues the last message, add_generation_prompt=True "
            "begins a new one; remove one of them"
        )
    last = messages[-1] if _are_messages(messages) else {}
    if last.get("role") != "assistant":
        if goes_on:
            raise OptionError(
                "continue_final_message=True needs a last message with the role 'assistant', "
                f"got {last.get('role')!r:.100}; add one with the text to continue"
            )
        return False
    if goes_on is False and begins is False:
        raise OptionError(
            "continue_final_message=False and add_generation_prompt=False leave nothing to write "
            "after an assistant's message; set one of them to true"
        )
    if begins is not False and not goes_on:
        return False
    if last.get("tool_calls"):
        raise OptionError(
            "continue_final_message=True needs a last message without tool calls; add their "
            "results, or remove the calls"
        )
    return True


def render_chat(
    tokenizer: Any, messages: abc.Sequence[Message], template: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the ids of a chat in the model's template, ready for the assistant to answer.

    `template`: variables of the template. If the last message is continued (`continues`), its text
    is the end of the ids, including white space. Raises PromptError, and OptionError for
    contradictory variables.
    """
    if tokenizer is None:
        raise LoadError(NO_TOKENIZER.format(what="messages cannot be rendered"))
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            "this model's tokenizer has no chat template, so messages cannot be rendered; "
            "pass a text instead"
        )
    for message in messages:
        if "role" not in message or "content" not in message:
            raise PromptError(f"a message must have 'role' and 'content', got {sorted(message)}")
        _check_message(message)
    if any(isinstance(message["content"], list) for message in messages):
        messages = _with_texts(tokenizer, messages)
    given = dict(template or {})
    ours = reserved(tokenizer)
    if wrong := [name for name in given if not isinstance(name, str) or name in ours]:
        raise OptionError(f"chat_template_kwargs must not set {shown(wrong[0])}")
    if continues(messages, given):
        return encode(tokenizer, _left_open(tokenizer, messages, given))
    begins = given.get("add_generation_prompt") is not False
    # The template writes its special tokens itself; the tokenizer must not add them again.
    return encode(tokenizer, _rendered(tokenizer, messages, given, begins))


def reserved(tokenizer: Any) -> set[str]:
    """Return names that no variable of a chat template can have.

    These are the arguments of `apply_chat_template` except those that templates read, and what it
    gives every template itself.
    """
    apply: Any = getattr(tokenizer, "apply_chat_template", lambda: None)
    read = {"tools", "documents", "chat_template", *OPENING}
    return {"self", "messages", *inspect.signature(apply).parameters} - read


def _check_message(message: Message) -> None:
    """Raise PromptError for a role or a content that a template would write as its `repr`."""
    role, content = message["role"], message["content"]
    if not isinstance(role, str):
        raise PromptError(f"the role of a message must be a text, got {shown(role)}")
    parts = isinstance(content, list) and all(
        isinstance(part, Mapping) and "type" in part for part in content
    )
    calls = content is None and message.get("tool_calls")
    if not (isinstance(content, str) or parts or calls):
        raise PromptError(
            f"the content of a message must be a text, or a list of parts with a 'type', "
            f"got {shown(content)}"
        )


def _with_texts(tokenizer: Any, messages: abc.Sequence[Message]) -> abc.Sequence[Message]:
    """Return the messages with texts for lists of parts, unless the template reads such lists.

    Raises PromptError for a list that is not of texts alone.
    """
    shown = sample(
        tokenizer, [{"role": "user", "content": [{"type": "text", "text": "SHOWN"}]}], {}
    )
    if "SHOWN" in shown and "'type'" not in shown:
        return messages
    made = []
    for message in messages:
        parts = message["content"]
        if isinstance(parts, list):
            if not all(isinstance(part.get("text"), str) for part in parts):
                raise PromptError("this model's chat template takes no parts other than texts")
            message = {**message, "content": "\n".join(part["text"] for part in parts)}
        made.append(message)
    return made


def sample(tokenizer: Any, messages: abc.Sequence[Message], template: Mapping[str, Any]) -> str:
    """Return a chat in the model's template; "" if the template refuses it."""
    try:
        return _rendered(tokenizer, messages, template, True)
    except PromptError:
        return ""


def _left_open(tokenizer: Any, messages: abc.Sequence[Message], template: Mapping[str, Any]) -> str:
    """Return a rendered chat up to the end of its last message's text.

    Templates trim texts, and look for thoughts in them. So a placeholder is rendered after the
    text, or, if the template then shows another text, instead of it.
    """
    *before, last = messages
    if not isinstance(last["content"], str):
        raise PromptError("a message that is continued must have a text as content, got parts")
    word, all_texts = "CONTINUED", repr(messages)
    while word in all_texts:
        word += "D"
    said = last["content"]
    text = _rendered(tokenizer, [*before, {**last, "content": said + word}], template, False)
    if (whole := text.rpartition(word)[0]).endswith(said):
        return whole
    text = _rendered(tokenizer, [*before, {**last, "content": word}], template, False)
    head, found, _ = text.rpartition(word)
    if not found:
        raise PromptError(
            "the model's chat template does not show the last message unchanged, so it cannot be "
            "continued; end the messages with one of the user"
        )
    return head + last["content"]


def _rendered(
    tokenizer: Any, messages: abc.Sequence[Message], template: Mapping[str, Any], begins: bool
) -> str:
    """Return a chat rendered by its template; `begins`: with the beginning of an answer."""
    given = {name: value for name, value in template.items() if name not in OPENING}
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=begins, **given
        )
    except Exception as error:
        # Templates are programs of the model's author; they may refuse roles, orders and more.
        raise PromptError(f"the model's chat template refused the messages: {error}") from error
    return text


def split_stops(tokenizer: Any, stop: abc.Sequence[str]) -> tuple[list[str], list[int]]:
    """Return stop strings to search in the text, and ids of those that are special tokens.

    Special tokens never appear in the text, so they are found by their id. Raises OptionError for
    a string that contains one and more text: it could never match.
    """
    if not stop or tokenizer is None:
        return list(stop), []
    added = tokenizer.get_added_vocab().items()
    found = {token: i for token, i in added if any(token in string for string in stop)}
    special = {token: i for token, i in found.items() if decode(tokenizer, [i]) == ""}
    strings = [s for s in stop if s not in special]
    for string in strings:
        inside = next((t for t in special if t in string), None)
        if inside is not None:
            raise OptionError(
                f"stop={string!r} contains the special token {inside!r}, which no text shows; "
                f"use {inside!r} alone, or the text before it"
            )
    return strings, [special[s] for s in stop if s in special]


UNFINISHED = 3
"""Maximum number of tokens for the bytes of an unfinished character."""

MOST_HELD = 16
"""Number of tokens that are held back if every cut between them seems to split a character."""

REACH = 64
"""Number of last tokens among which one should write whole characters."""


class StreamDecoder:
    """Decodes a growing list of ids piece by piece, holding back unfinished characters.

    It decodes a short window only, so the cost of a token does not depend on the length of the
    answer. Bytes that become no character are released as U+FFFD a few tokens later. `special`
    shows special tokens.
    """

    def __init__(
        self, tokenizer: Any, *, special: bool = False, preceding: abc.Sequence[int] = ()
    ) -> None:
        """`preceding`: ids before the first one, as for `decode`."""
        if tokenizer is None:
            raise LoadError(NO_TOKENIZER.format(what="tokens cannot be turned into text"))
        self.tokenizer = tokenizer
        self.special = special
        self._given = list(preceding)
        """Last ids with released text: some ids are written differently at the beginning of a text.
        """
        self._held: list[int] = []
        self.unfinished = ""
        """Text of the ids that are held back, with unfinished characters as U+FFFD."""
        self._length = 0
        """Number of released characters."""
        self.start = 0
        """Position in the whole text, in characters, where the last token's own text begins."""
        self.silent = False
        """Whether the last token never writes anything."""

    def push(self, token: int) -> str:
        """Add a token; return the text that it completes, "" while a character is unfinished."""
        held = [*self._held, token]
        text = self._behind(held)
        self.start = self._length + self._before_last(held, text)
        self.silent = text == self.unfinished and not self._decode([token, token])
        if self.silent:
            return ""
        self._held, self.unfinished = held, text
        if text and not text.endswith("\ufffd"):
            return self._give(len(held))
        if len(held) <= UNFINISHED:
            return ""
        # Too many tokens for one character, so some bytes are invalid. Two parts that are decoded
        # separately give the whole text only if no character is cut between them.
        for count in range(1, len(held)):
            if self._behind(held[:count]) + self._decode(held[count:]) == text:
                return self._give(count)
        return self._give(len(held)) if len(held) >= MOST_HELD else ""

    def _before_last(self, held: abc.Sequence[int], text: str) -> int:
        """Return the number of characters of `text`, written by `held`, before the last token.

        Each invalid byte counts as a character. A token inside an unfinished character has the
        beginning of that character as its position.
        """
        before = self.unfinished
        if text.endswith("\ufffd") and (data := fallback_bytes(self.tokenizer, held)):
            # For byte tokens, a decoder shows each byte of an unfinished character separately.
            before, text = data[:-1].decode(errors="replace"), data.decode(errors="replace")
        unfinished = text.endswith("\ufffd")
        return min(common_prefix(before, text), len(text) - unfinished)

    def _give(self, count: int) -> str:
        """Release the first `count` ids that are held back; return their text."""
        text = self._behind(self._held[:count])
        self._length += len(text)
        self._given, self._held = self._held[:count], self._held[count:]
        self.unfinished = self._behind(self._held)
        return text

    def _behind(self, ids: abc.Sequence[int]) -> str:
        """Return what `ids` write after the released ids."""
        text = decode(self.tokenizer, ids, special=self.special, preceding=self._given)
        # With byte tokens, an unfinished character makes the finished ones before it invalid, too.
        if "\ufffd" in text and fallback_bytes(self.tokenizer, [*self._given[-1:], *ids[:1]]):
            return self._decode(ids)
        return text

    def _decode(self, ids: abc.Sequence[int]) -> str:
        return decode(self.tokenizer, ids, special=self.special)


def fallback_bytes(tokenizer: Any, ids: abc.Sequence[int]) -> bytes:
    """Return the bytes of tokens that are one byte each (`<0x0A>`); empty if one is not."""
    named = getattr(tokenizer, "convert_ids_to_tokens", None)  # some tokenizers only decode
    if named is None:
        return b""
    names = [FALLBACK.fullmatch(name or "") for name in named(list(ids))]
    return bytes(int(name[1], 16) for name in names if name) if all(names) else b""


def token_texts(
    tokenizer: Any,
    ids: abc.Sequence[int],
    *,
    special: bool = False,
    preceding: abc.Sequence[int] = (),
) -> list[str]:
    """Return the text that each id adds, "" if it only begins a character; joined, the whole text.

    `special` shows special tokens; `preceding`: ids before the first one, as for `decode`. Raises
    LoadError without a tokenizer.
    """
    decoder = StreamDecoder(tokenizer, special=special, preceding=preceding)
    texts = [decoder.push(token) for token in ids]
    if texts:
        texts[-1] += decoder.unfinished
    return texts


def decode(
    tokenizer: Any,
    ids: abc.Sequence[int],
    *,
    special: bool = False,
    preceding: abc.Sequence[int] = (),
) -> str:
    """Return the text of `ids` exactly as the model wrote it, without special tokens by default.

    `preceding` are ids before `ids` that are not part of the text: tokenizers like SentencePiece
    drop the space before the first word of a text.
    """
    text: str = tokenizer.decode(
        [*preceding, *ids], skip_special_tokens=not special, clean_up_tokenization_spaces=False
    )
    return text[len(decode(tokenizer, preceding, special=special)) :] if preceding else text


def last_written(tokenizer: Any, ids: abc.Sequence[int]) -> tuple[int, ...]:
    """Return the last of `ids` that writes whole characters by itself; empty if none does.

    Text that continues them is decoded `preceding` it.
    """
    for token in reversed(ids[-REACH:]):
        # Bytes of a character could combine with following bytes, special tokens show nothing, and
        # a space alone would be dropped at the beginning.
        text = decode(tokenizer, [token])
        if text and "\ufffd" not in text:
            return (token,)
    return ()


class TextStream:
    """Text of a growing answer, ended by stop strings; also the stop rule for them.

    Text that may be the beginning of a stop string is held back.
    """

    def __init__(
        self, tokenizer: Any, stop: abc.Sequence[str] = (), *, preceding: abc.Sequence[int] = ()
    ) -> None:
        """`preceding`: ids before the answer, as for `decode`."""
        self._decoder = StreamDecoder(tokenizer, preceding=preceding)
        self._stop = tuple(stop)
        self._held = ""
        self._ready: list[str] = []
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self.starts: list[int] = []
        """Position where each token's own text begins, even if it is released later."""
        self.apart: Collection[int] = ()
        """Special tokens that separate the text: no stop string spans one."""

    def __call__(self, sequence: Sequence, _scores: Tensor | None, /) -> str | None:
        """Add the last token of the sequence; return `stop` if a stop string is complete."""
        token = sequence.ids[-1]
        text = self._release(self._decoder.push(token))
        self.starts.append(self._decoder.start)
        if token in self.apart:
            text, self._held = text + self._held, ""
        self._ready.append(text)
        return None if self.stopped is None else "stop"

    def take(self) -> list[str]:
        """Return the text released by each token since the last call, in order."""
        ready, self._ready = self._ready, []
        return ready

    @property
    def silent(self) -> bool:
        """Whether the last token never writes anything, such as an end-of-sequence token."""
        return self._decoder.silent

    def held(self) -> str:
        """Return the text that is held back, to show it if nothing follows."""
        return "" if self.stopped is not None else self._held + self._decoder.unfinished

    def _release(self, piece: str) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + piece
        cuts = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if cuts:
            (end, self.stopped), self._held = min(cuts), ""
            return text[:end]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
