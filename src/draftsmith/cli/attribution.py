"""What `run --attribute` shows: which parts of an answer were copied, and from where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

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


def show_copies(engine: Engine, result: GenerationResult, options: AttributionOptions) -> None:
    """Print an answer with its copies marked, and on stderr how much of it they are."""
    copies = result.copies(options.min_copy)
    console = stdout()
    marked = Text()
    for text, copy, number in stretches(answer_texts(engine, result), result, copies):
        if copy is None:
            marked.append(visible(text) if console.is_terminal else text)
        elif console.is_terminal:
            colour = COLOURS[number % len(COLOURS)]
            marked.append(visible(text), f"{colour} underline")
            marked.append(place(copy), f"{colour} dim")
        else:
            marked.append(f"⟦{text}⟧{place(copy)}")
    if result.text:
        console.print(marked, soft_wrap=True, end="" if marked.plain.endswith("\n") else "\n")
    note(summary(result, copies))


def stretches(
    texts: list[str], result: GenerationResult, copies: list[Copy]
) -> Iterator[tuple[str, Copy | None, int]]:
    """The answer in order: (text, the copy that it is, how many copies came before)."""
    first, at = len(result.prompt_tokens), 0
    for number, copy in enumerate(copies):
        start, end = copy.output.start - first, copy.output.end - first
        yield "".join(texts[at:start]), None, number
        yield "".join(texts[start:end]), copy, number
        at = end
    yield "".join(texts[at:]), None, len(copies)


def place(copy: Copy) -> str:
    """Where a copy was made from, as a slice of token positions."""
    return f"[{copy.source.start}:{copy.source.end}]"


def summary(result: GenerationResult, copies: list[Copy]) -> str:
    """How much was copied, and how positions count."""
    copied = sum(copy.output.end - copy.output.start for copy in copies)
    prompt, answer = len(result.prompt_tokens), len(result.tokens)
    return (
        f"copied: {copied} of {plural(answer, 'token')} in {plural(len(copies), 'span')}; "
        f"positions 0 to {prompt - 1} are the prompt, the answer goes on from {prompt}"
    )


def copies_as_json(
    engine: Engine, result: GenerationResult, options: AttributionOptions
) -> list[dict[str, Any]]:
    """The copies as plain data: half-open token positions in prompt and answer together."""
    texts, first = answer_texts(engine, result), len(result.prompt_tokens)
    return [
        {
            "output": list(copy.output),
            "source": list(copy.source),
            "text": "".join(texts[copy.output.start - first : copy.output.end - first]),
        }
        for copy in result.copies(options.min_copy)
    ]


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
