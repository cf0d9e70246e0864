"""What `run --attribute` shows: which parts of an answer were copied, and from where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text

from draftsmith.cli.loading import short
from draftsmith.cli.render import COLOURS, plural, visible
from draftsmith.cli.report import note, stdout
from draftsmith.errors import OptionError

if TYPE_CHECKING:
    from draftsmith.engine.attribution import Copy
    from draftsmith.engine.engine import Engine
    from draftsmith.engine.result import GenerationResult


@dataclass(frozen=True, kw_only=True)
class AttributionOptions:
    """Whether and how copies are shown."""

    panel: ClassVar[str] = "Attribution (which parts of the answer were copied, and from where)"

    spelt: ClassVar[dict[str, str]] = {"attribute_html": "--attribute-html PATH"}

    attribute: bool = False
    """Mark copies with their place in prompt and answer, counted in tokens; prints the answer
    when it is complete. With --budget drafter every run marks the same."""
    attribute_html: str | None = None
    """Write a page where pointing at a copy shows its source."""
    min_copy: int = 2
    """Tokens that a copy must have to be shown."""

    def check(self, show_drafts: bool) -> None:
        """Raise OptionError now rather than after the answer."""
        if self.min_copy < 1:
            raise OptionError(f"min_copy={self.min_copy} cannot work; it must be at least 1")
        if self.attribute and show_drafts:
            raise OptionError(
                "--attribute and --show-drafts both colour the answer; give one of them"
            )
        if self.attribute_html is not None:
            path = Path(self.attribute_html).expanduser()
            if not path.parent.is_dir():
                raise OptionError(f"--attribute-html: the folder {path.parent} does not exist")
            if path.is_dir():
                raise OptionError(f"--attribute-html: {path} is a folder; give a file's path")


def answer_texts(engine: Engine, result: GenerationResult) -> list[str]:
    """The text of each token of the answer, cut where the answer was cut at a stop string."""
    from draftsmith.text.pieces import token_texts

    texts, left = [], len(result.text)
    for text in token_texts(engine.model.tokenizer, result.tokens):
        texts.append(text[:left])
        left -= len(texts[-1])
    return texts


def show_copies(engine: Engine, result: GenerationResult, min_copy: int) -> None:
    """Print an answer with its copies marked, and on stderr how much of it they are."""
    console, colours, marked = stdout(), cycle(COLOURS), Text()
    spans = copied = 0
    for text, copy in stretches(engine, result, min_copy):
        shown = visible(text) if console.is_terminal else text
        if copy is None:
            marked.append(shown)
            continue
        spans, copied = spans + 1, copied + copy.output.end - copy.output.start
        place = f"[{copy.source.start}:{copy.source.end}]"
        if console.is_terminal:
            colour = next(colours)
            marked.append(shown, f"{colour} underline").append(place, f"{colour} dim")
        else:
            marked.append(f"⟦{shown}⟧{place}")
    if result.text:
        console.print(marked, soft_wrap=True, end="" if marked.plain.endswith("\n") else "\n")
    prompt, answer = len(result.prompt_tokens), len(result.tokens)
    note(
        f"copied: {copied} of {plural(answer, 'token')} in {plural(spans, 'span')}; "
        f"positions 0 to {prompt - 1} are the prompt, the answer goes on from {prompt}"
    )


def stretches(
    engine: Engine, result: GenerationResult, min_copy: int
) -> Iterator[tuple[str, Copy | None]]:
    """The answer in order: (text, the copy that it is)."""
    texts, at = answer_texts(engine, result), 0
    for copy in result.copies(min_copy):
        start, end = (position - len(result.prompt_tokens) for position in copy.output)
        yield "".join(texts[at:start]), None
        yield "".join(texts[start:end]), copy
        at = end
    yield "".join(texts[at:]), None


def write_page(
    engine: Engine, results: list[GenerationResult], options: AttributionOptions
) -> None:
    """The page that `--attribute-html` asks for."""
    from draftsmith.cli.attribution_page import Answer, page
    from draftsmith.storage import write_text
    from draftsmith.text.pieces import token_texts

    assert options.attribute_html is not None
    answers = [
        Answer(
            token_texts(engine.model.tokenizer, result.prompt_tokens, special=True),
            answer_texts(engine, result),
            result.copies(options.min_copy),
        )
        for result in results
    ]
    path = Path(options.attribute_html).expanduser()
    write_text(path, page(answers, short(engine.model.name), str(engine.drafter)))
    note(f"wrote {path}")
