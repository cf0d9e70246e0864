"""Tool calls and text in channels: the harmony format of gpt-oss.

An answer is a list of messages: a header with a channel, `<|message|>`, text, and a closing tag.
"""

from __future__ import annotations

import re

from draftsmith.server.calls.as_json import given
from draftsmith.server.calls.source import (
    Call,
    NoCall,
    Parser,
    Source,
    closing,
    finished,
    must,
    space,
    taken,
    text_until,
)

START, CHANNEL, CONSTRAIN, BODY = (
    "<|start|>assistant",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
)
FINAL = f"{CHANNEL}final{BODY}"
CLOSING = ("<|end|>", "<|call|>", "<|return|>")
_HEADER = re.compile(r"[^<\n]*(?:<\|channel\|>[^<\n]*)?(?:<\|constrain\|>[^<\n]*)?")
_RECIPIENT = re.compile(r"to=functions\.([\w.:/-]+)")


def channels(source: Source, mark: str) -> Parser[list[Call]]:
    """Parse one message: a call if its header names a function, else text or reasoning."""
    begin = source.at
    if not mark:
        yield from must(source, "to=")
    while (end := source.text.find(BODY, begin)) < 0:
        header, _, tag = source.text[begin:].rpartition("<")
        whole = _HEADER.fullmatch(source.text[begin:])
        cut = any(other.startswith("<" + tag) for other in (CHANNEL, CONSTRAIN, BODY))
        if source.ended or not (whole or (cut and _HEADER.fullmatch(header))):
            raise NoCall
        yield
    header = source.text[begin:end]
    if not _HEADER.fullmatch(header) or (mark != CHANNEL and CHANNEL not in header):
        raise NoCall
    source.at = end + len(BODY)
    recipient = _RECIPIENT.search(header)
    if recipient is not None and recipient[1] in source.tools:
        try:
            yield from space(source)
            source.streams = True  # even without a mark: the header names a function
            calls = yield from given(source, recipient[1])
            if not (yield from closing(source, *CLOSING)):
                yield from finished(source)
            return calls
        except NoCall:
            if source.called > begin:
                raise
            source.at = begin - len(mark)
            source.tell(end + len(BODY))
    source.thinking = "analysis" in header
    yield from _text(source, thought=source.thinking)
    return []


def _text(source: Source, *, thought: bool) -> Parser[None]:
    """Emit the text of a message, and consume its closing tag.

    A tag closes the message only if another message or the end of the answer follows.
    """
    while mark := (yield from text_until(source, CLOSING, thought=thought)):
        white, place = source.at, source.text.index(mark, source.at)
        source.at = behind = place + len(mark)
        yield from space(source)
        closes = (source.ended and source.at == len(source.text)) or (
            yield from taken(source, START)
        )
        source.at = white
        if closes:
            if not thought:
                source.tell(place)
            source.at = behind
            return
        source.tell(behind, thought=thought)
    if not thought:
        source.tell(len(source.text))
