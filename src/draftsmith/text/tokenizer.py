"""Between text and ids: prompts, chat templates, streaming text, stop strings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from draftsmith.core.drafter import common_prefix
from draftsmith.core.session import Session
from draftsmith.errors import LoadError, OptionError, PromptError
from draftsmith.text.spelling import FALLBACK
from draftsmith.values import integers, listed, shown, token_ids

Message = Mapping[str, Any]
NO_TOKENIZER = (
    "this model has no tokenizer, so {what}. Pass tokenizer=… when loading it, or give token ids"
)
OPENING = ("continue_final_message", "add_generation_prompt")
"""Variables of a chat template that say where the assistant begins, as transformers names them."""


def read_bare(path: Path) -> Tokenizer:
    """The tokenizer that a lone tokenizer.json describes; raises LoadError."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers, which is written in Rust, raises nothing more special
        raise LoadError(f"{path} cannot be read as a tokenizer: {error}") from error


def as_batch(prompt: Any) -> tuple[list[Any], bool]:
    """One or many prompts as a list, and whether there were many.

    Tensors, arrays and what a tokenizer returns become lists of ids, without the padding that their
    attention mask hides; a tensor of one row is one prompt. Raises PromptError for a mask with
    gaps.
    """
    mask = None
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        prompt, mask = prompt["input_ids"], prompt.get("attention_mask")
    rows, tensor = listed(prompt), hasattr(prompt, "tolist")
    if mask is not None:
        rows = _shown(rows, listed(mask))
    if tensor and isinstance(rows, list) and len(rows) == 1 and isinstance(rows[0], list):
        rows = rows[0]
    single = isinstance(rows, str) or _are_ids(rows) or _are_messages(rows)
    if single or not isinstance(rows, Sequence) or isinstance(rows, bytes) or not len(rows):
        return [rows], False
    return list(rows), True


def _shown(ids: Any, mask: Any) -> list[Any]:
    """The ids of one or many rows that their attention mask shows."""
    if ids and isinstance(ids[0], list):
        return [_shown(*row) for row in zip(ids, mask, strict=True)]
    places = [place for place, seen in enumerate(mask) if seen]
    if places and places[-1] - places[0] >= len(places):
        raise PromptError("the attention mask hides more than padding; leave the hidden ids out")
    return [ids[place] for place in places]


def _are_ids(prompt: Any) -> bool:
    return _is_list(prompt) and integers(prompt) is not None


def _are_messages(prompt: Any) -> bool:
    return _is_list(prompt) and all(isinstance(item, Mapping) for item in prompt)


def _is_list(prompt: Any) -> bool:
    some = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray)
    return some and len(prompt) > 0


def encode_prompt(tokenizer: Any, prompt: Any, template: Mapping[str, Any]) -> list[int]:
    """Token ids of one prompt of any kind; `template` are the chat template's extra variables."""
    (one, *_), many = as_batch(prompt)
    if isinstance(one, Sequence) and not len(one):
        raise PromptError("the prompt is empty; give a text, token ids, or messages")
    if isinstance(one, str) and not many:
        return encode(tokenizer, one, special=True)
    if _are_ids(one) and not many:
        return token_ids("a prompt", one, error=PromptError)
    if _are_messages(one) and not many:
        return render_chat(tokenizer, one, template)
    raise PromptError(
        f"a prompt is a text, token ids, or a list of messages, not "
        f"{'several prompts' if many else type(one).__name__}"
    )


def encode(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """Token ids of a text; `special` adds what the tokenizer adds by itself, such as <s>.

    Raises PromptError for half of a surrogate pair, which no tokenizer takes.
    """
    if tokenizer is None:
        raise LoadError(NO_TOKENIZER.format(what="text cannot be turned into tokens"))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):x}"
        raise PromptError(
            f"a text must hold whole characters, got {half}, half of a surrogate pair, "
            f"at {error.start}"
        ) from None
    ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    return ids


def opening(tokenizer: Any) -> tuple[int, ...]:
    """What the tokenizer puts before every text by itself: `<s>`, or nothing."""
    first = tokenizer.bos_token_id
    return (first,) if tokenizer("a")["input_ids"][0] == first is not None else ()


def continues(messages: Any, template: Mapping[str, Any]) -> bool:
    """Return whether a chat's last message is continued, rather than answered.

    It is where it is the assistant's and `template` says `continue_final_message=True` or
    `add_generation_prompt=False`. Raises OptionError for what contradicts itself.
    """
    goes_on, begins = (template.get(name) for name in OPENING)
    for name in OPENING:
        if not isinstance(template.get(name), bool | None):
            raise OptionError(f"{name} must be true or false, got {template[name]!r:.100}")
    if goes_on and begins:
        raise OptionError(
            "continue_final_message=True continues the last message and add_generation_prompt=True "
            "begins another one; leave one of them out"
        )
    last = messages[-1] if _are_messages(messages) else {}
    if last.get("role") != "assistant":
        if goes_on:
            raise OptionError(
                "continue_final_message=True needs a last message of the role 'assistant', "
                f"got {last.get('role')!r:.100}; add one with the text to continue"
            )
        return False
    if goes_on is False and begins is False:
        raise OptionError(
            "continue_final_message=False and add_generation_prompt=False leave nothing to write "
            "behind an assistant's message; set one of them to true"
        )
    if begins is not False and not goes_on:
        return False
    if last.get("tool_calls"):
        raise OptionError(
            "continue_final_message=True needs a last message without tool calls; add their "
            "results, or leave the calls out"
        )
    return True


def render_chat(
    tokenizer: Any, messages: Sequence[Message], template: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a chat in the model's own template, ready for the assistant to answer.

    `template`: variables of the template. A last message may be left open (`continues`): then its
    text ends the ids as it is, white space included. Raises PromptError, and OptionError for
    variables that contradict each other.
    """
    if tokenizer is None:
        raise LoadError(NO_TOKENIZER.format(what="messages cannot be rendered"))
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            "this model's tokenizer has no chat template, so messages cannot be rendered; "
            "give a text instead"
        )
    for message in messages:
        if "role" not in message or "content" not in message:
            raise PromptError(f"a message needs 'role' and 'content', not {sorted(message)}")
        _check_message(message)
    given = dict(template or {})
    if continues(messages, given):
        return encode(tokenizer, _left_open(tokenizer, messages, given))
    begins = given.get("add_generation_prompt") is not False
    # The template writes its special tokens itself; the tokenizer must not add them again.
    return encode(tokenizer, _rendered(tokenizer, messages, given, begins))


def _check_message(message: Message) -> None:
    """Raise PromptError for a role or a content that a template would write as it prints."""
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


def shows_role(tokenizer: Any, role: str) -> bool:
    """Return whether a chat template takes a first message of a role and shows its text."""
    asked = [{"role": role, "content": "SHOWN"}, {"role": "user", "content": "hello"}]
    try:
        return "SHOWN" in _rendered(tokenizer, asked, {}, True)
    except PromptError:
        return False


def _left_open(tokenizer: Any, messages: Sequence[Message], template: Mapping[str, Any]) -> str:
    """A chat up to the end of its last message's text.

    Templates trim texts, so another word is rendered in its place.
    """
    *before, last = messages
    if not isinstance(last["content"], str):
        raise PromptError("a message that is continued needs a text, not parts")
    word, all_texts = "CONTINUED", repr(messages)
    while word in all_texts:
        word += "D"
    text = _rendered(tokenizer, [*before, {**last, "content": word}], template, False)
    head, found, _ = text.rpartition(word)
    if not found:
        raise PromptError(
            "the model's chat template does not show the last message as it is, so it cannot be "
            "continued; end the messages with one of the user"
        )
    return head + last["content"]


def _rendered(
    tokenizer: Any, messages: Sequence[Message], template: Mapping[str, Any], begins: bool
) -> str:
    """A chat as its template writes it; `begins`: with the beginning of an answer."""
    given = {name: value for name, value in template.items() if name not in OPENING}
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=begins, **given
        )
    except Exception as error:
        # Templates are programs of the model's author: they refuse roles, orders, and more.
        raise PromptError(f"the model's chat template refused the messages: {error}") from error
    return text


def split_stops(tokenizer: Any, stop: Sequence[str]) -> tuple[list[str], list[int]]:
    """Stop strings to look for in the text, and ids of those that are special tokens.

    Special tokens never show in the text, so they are recognised by their id. Raises OptionError
    for a string that only contains one: it could never match.
    """
    if not stop or tokenizer is None:
        return list(stop), []
    added = tokenizer.get_added_vocab().items()
    special = {token: i for token, i in added if _hidden(tokenizer, i)}
    strings = [s for s in stop if s not in special]
    for string in strings:
        inside = next((t for t in special if t in string), None)
        if inside is not None:
            raise OptionError(
                f"stop={string!r} contains the special token {inside!r}, which no text shows; "
                f"stop at {inside!r} alone, or at the text before it"
            )
    return strings, [special[s] for s in stop if s in special]


def _hidden(tokenizer: Any, token: int) -> bool:
    """Whether an added token is left out of decoded text."""
    return decode(tokenizer, [token]) == ""


UNFINISHED = 3
"""Tokens that the bytes of an unfinished character take at most."""

MOST_HELD = 16
"""Tokens held back where there seems to be no place between two of them that parts no character."""

REACH = 64
"""Tokens at a text's end among which there should be one that writes whole characters."""


class StreamDecoder:
    """Text of a growing list of ids, piece by piece, holding back unfinished characters.

    Decodes a short window only, so a token costs the same however long the answer is. Bytes that
    become no character are U+FFFD, given out a few tokens later. `special` shows special tokens.
    """

    def __init__(
        self, tokenizer: Any, *, special: bool = False, behind: Sequence[int] = ()
    ) -> None:
        """`behind`: what the ids follow, as for `decode`."""
        if tokenizer is None:
            raise LoadError(NO_TOKENIZER.format(what="tokens cannot be turned into text"))
        self.tokenizer = tokenizer
        self.special = special
        self._given = list(behind)
        """The last ids whose text was given out: some ids are written otherwise at a beginning."""
        self._held: list[int] = []
        self._text = ""
        """Of those held."""
        self._length = 0
        """Characters given out."""
        self.start = 0
        """Where the last token's own text begins, in characters of the whole text."""
        self.silent = False
        """Whether the last token never writes anything."""

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        held = [*self._held, token]
        text = self._behind(held)
        self.start = self._length + self._before_last(held, text)
        self.silent = text == self._text and not self._decode([token, token])
        if self.silent:
            return ""
        self._held, self._text = held, text
        if text and not text.endswith("\ufffd"):
            return self._give(len(held))
        if len(held) <= UNFINISHED:
            return ""
        # Too many tokens for one character, so some bytes are none. What two parts write that are
        # decoded alone is the whole text only if no character is cut between them.
        for count in range(1, len(held)):
            if self._behind(held[:count]) + self._decode(held[count:]) == text:
                return self._give(count)
        return self._give(len(held)) if len(held) >= MOST_HELD else ""

    def _before_last(self, held: Sequence[int], text: str) -> int:
        """Characters of what `held` write, `text`, that end before the last token.

        Bytes that are no character are characters of their own. A token in the midst of one that
        is unfinished has its beginning for a place.
        """
        before = self._text
        if text.endswith("\ufffd") and (data := fallback_bytes(self.tokenizer, held)):
            # Where bytes are tokens, a decoder shows each of an unfinished character for itself.
            before, text = data[:-1].decode(errors="replace"), data.decode(errors="replace")
        unfinished = text.endswith("\ufffd")
        return min(common_prefix(before, text), len(text) - unfinished)

    def unfinished(self) -> str:
        """What is left at the end, unfinished characters as U+FFFD."""
        return self._text

    def _give(self, count: int) -> str:
        """The text of the first `count` held ids, which are held no longer."""
        text = self._behind(self._held[:count])
        self._length += len(text)
        self._given, self._held = self._held[:count], self._held[count:]
        self._text = self._behind(self._held)
        return text

    def _behind(self, ids: Sequence[int]) -> str:
        """What `ids` write behind those given out."""
        return decode(self.tokenizer, ids, special=self.special, behind=self._given)

    def _decode(self, ids: Sequence[int]) -> str:
        return decode(self.tokenizer, ids, special=self.special)


def fallback_bytes(tokenizer: Any, ids: Sequence[int]) -> bytes:
    """Return the bytes of tokens that are one byte each (`<0x0A>`); empty if one is not."""
    named = getattr(tokenizer, "convert_ids_to_tokens", None)  # some only decode
    if named is None:
        return b""
    names = [FALLBACK.fullmatch(name or "") for name in named(list(ids))]
    return bytes(int(name[1], 16) for name in names if name) if all(names) else b""


def token_texts(
    tokenizer: Any, ids: Sequence[int], *, special: bool = False, behind: Sequence[int] = ()
) -> list[str]:
    """The text that each id adds, "" for one that only begins a character; joined, the whole text.

    `special` shows special tokens too; `behind`: what the ids follow, as for `decode`. Raises
    LoadError without a tokenizer.
    """
    decoder = StreamDecoder(tokenizer, special=special, behind=behind)
    texts = [decoder.push(token) for token in ids]
    if texts:
        texts[-1] += decoder.unfinished()
    return texts


def decode(
    tokenizer: Any, ids: Sequence[int], *, special: bool = False, behind: Sequence[int] = ()
) -> str:
    """Text of `ids` exactly as the model wrote it; without special tokens, unless `special`.

    `behind` stands before them and is no part of the text: SentencePiece's kind of tokenizer drops
    the space before the first word of all.
    """
    text: str = tokenizer.decode(
        [*behind, *ids], skip_special_tokens=not special, clean_up_tokenization_spaces=False
    )
    return text[len(decode(tokenizer, behind, special=special)) :] if behind else text


def last_written(tokenizer: Any, ids: Sequence[int]) -> tuple[int, ...]:
    """The last of some ids that writes whole characters by itself; empty if none does.

    What goes on a text is decoded `behind` it.
    """
    for token in reversed(ids[-REACH:]):
        # Bytes of a character would become one with the bytes that follow, special tokens show
        # nothing, and a bare space would itself be dropped at the beginning.
        text = decode(tokenizer, [token])
        if text and "\ufffd" not in text:
            return (token,)
    return ()


class TextStream:
    """The answer's text as it grows, ended by stop strings; also the stop rule for them.

    Text that might turn out to be the beginning of a stop string is held back.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), *, behind: Sequence[int] = ()
    ) -> None:
        """`behind`: what the answer follows, as for `decode`."""
        self._decoder = StreamDecoder(tokenizer, behind=behind)
        self._stop = tuple(stop)
        self._held = ""
        self._ready: list[str] = []
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self.starts: list[int] = []
        """Where each token's own text begins, also where it is released later."""
        self.apart: Collection[int] = ()
        """Special tokens that part the text: no stop string goes on behind one."""

    def __call__(self, session: Session, _scores: Tensor | None, /) -> str | None:
        """Stop rule: take the newest token; `stop` when a stop string is complete."""
        token = session.ids[-1]
        text = self._release(self._decoder.push(token))
        self.starts.append(self._decoder.start)
        if token in self.apart:
            text, self._held = text + self._held, ""
        self._ready.append(text)
        return None if self.stopped is None else "stop"

    def take(self) -> list[str]:
        """Text released by each token since the last call, in order."""
        ready, self._ready = self._ready, []
        return ready

    @property
    def silent(self) -> bool:
        """Whether the newest token never writes anything, as one that ends an answer."""
        return self._decoder.silent

    def held(self) -> str:
        """What is still held back; all that is left to show when nothing more will come."""
        return "" if self.stopped is not None else self._held + self._decoder.unfinished()

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
    """Length of the longest end of `text` that `stop` begins with."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
