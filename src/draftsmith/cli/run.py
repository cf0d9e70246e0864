"""`draftsmith run`: answer one prompt."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from draftsmith import builtin
from draftsmith.cli.attribution import AttributionOptions, copies_as_json, show_copies, write_page
from draftsmith.cli.loading import load_engine
from draftsmith.cli.options import Given, Json, ModelOptions, OutputOptions, Sampling
from draftsmith.cli.reading import read_text
from draftsmith.cli.remarks import say_end, say_notices
from draftsmith.cli.render import AnswerPrinter, dtype_of, show_stats
from draftsmith.cli.report import STOPPED, note, print_json
from draftsmith.errors import OptionError, PromptError

if TYPE_CHECKING:
    from draftsmith.engine.engine import Engine
    from draftsmith.engine.result import GenerationResult


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """What is asked."""

    panel: ClassVar[str] = "Prompt"

    spelt: ClassVar[dict[str, str]] = {
        "prompt": "PROMPT",
        "file": "--file -f PATH",
        "edit": "--edit PATH",
        "system": "--system TEXT",
        "prediction": "--prediction PATH",
    }

    prompt: str | None = None
    """The prompt; - reads it from standard input."""
    file: str | None = None
    """Read the prompt from a file (- is standard input); goes after PROMPT if both."""
    edit: str | None = None
    """Edit this file: PROMPT is the instruction, the answer is the new file."""
    system: str | None = None
    """A system message."""
    raw: bool = False
    """Continue the text, without a chat template."""
    prediction: str | None = None
    """A text that the answer will resemble: one more place to copy from."""

    def read(self) -> Request:
        """The prompt's parts from the command line, files and standard input."""
        parts = list(self._parts())
        if not parts and self.edit is not None:
            raise PromptError("--edit needs an instruction, e.g. --edit a.py 'rename f to g'")
        if not parts:
            raise PromptError("there is no prompt; give PROMPT or --file, or pipe a text in")
        text = "\n\n".join(parts)
        if not (text if self.raw else text.strip()):
            raise PromptError("the prompt is empty; give at least one character")
        before = None if self.edit is None else read_text(self.edit)
        prediction = before if self.prediction is None else read_text(self.prediction)
        return Request(text, self, before, prediction)

    def _parts(self) -> Iterator[str]:
        if self.prompt == "-" and self.file == "-":
            raise OptionError("standard input cannot be both PROMPT and --file; give one of them")
        asked = self.prompt is not None or self.file is not None
        if self.prompt == "-" or (not asked and not sys.stdin.isatty()):
            yield self._trimmed(read_text("-"))
        elif self.prompt is not None:
            yield self.prompt
        if self.file is not None:
            yield self._trimmed(read_text(self.file))

    def _trimmed(self, text: str) -> str:
        # `echo` and editors end a text with a line break that nobody means.
        return text if self.raw else text.removesuffix("\n").removesuffix("\r")


@dataclass(slots=True)
class Request:
    """A prompt, read and checked, before any model is loaded; then its answers."""

    text: str
    options: PromptOptions
    before: str | None
    """Content of the file to edit."""
    prediction: str | None
    answers: list[GenerationResult] = field(default_factory=list)
    error: str | None = None

    def prompt(self, engine: Engine) -> Any:
        """What the engine is asked: messages where there is a chat template, else text."""
        asked, text = self.options, self.text
        has_template = bool(getattr(engine.model.tokenizer, "chat_template", None))
        plain = asked.raw or not has_template
        if plain and asked.system is not None:
            why = "--raw leaves it out" if asked.raw else "this model has no chat template"
            raise OptionError(f"--system needs a chat template, and {why}")
        messages = [{"role": "user", "content": text}]
        if asked.edit is not None and self.before is not None:
            path = asked.edit.encode(errors="replace").decode()
            if builtin.is_ours(engine.model.name) and not plain:
                # The model knows paths inside a project, not where this one lies on the disk.
                name = Path(path).name if Path(path).is_absolute() else path
                messages = builtin.edit_messages(name, text, self.before)
            else:
                text = (
                    f"{text}\n\nAnswer with the complete new content of {path} and nothing else. "
                    f"This is {path} now:\n\n{self.before}"
                )
                messages = [{"role": "user", "content": text}]
        if asked.system is not None:
            messages.insert(0, {"role": "system", "content": asked.system})
        return text if plain else messages


def run(
    prompt: PromptOptions,
    model: ModelOptions,
    sampling: Sampling,
    output: OutputOptions,
    attribution: AttributionOptions,
    n: Annotated[
        int, typer.Option("-n", metavar="N", help="Answers, sampled with seeds seed, seed+1, …")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Answer one prompt; the text goes to standard output as it comes.

    Notes on standard error tell of an answer that was cut or loops, and of an edit that lost lines
    of the file; the exit code is 0 all the same.

    [bold]Examples[/bold]

    draftsmith run "What is a list comprehension?"

    draftsmith run --edit app.py "rename load to read_config" > new.py

    git diff | draftsmith run -m Qwen/Qwen3-0.6B "Write a commit message" -f - --stats

    draftsmith run -m ./my-model -d "copyspec(gamma=3)" --show-drafts "…"

    draftsmith run -m ./my-model -f report.txt "Summarize this" --attribute-html sources.html
    """
    if n < 1:
        raise OptionError(f"n={n} cannot work; it must be at least 1")
    attribution.check(output.show_drafts)
    request = prompt.read()
    engine = load_engine(model, sampling)
    if request.prediction is not None:
        sampling["prediction"] = request.prediction
    if request.before is not None:
        sampling.setdefault("max_new_tokens", room_for_edit(engine, request.before))
    say_notices(engine)
    # Where a copy begins is known when the answer is complete, so it is not shown as it comes.
    late = as_json or attribution.attribute
    printer = None if late else AnswerPrinter(output.show_drafts)
    try:
        answer(engine, request, sampling, n, printer)
    except (Exception, KeyboardInterrupt) as error:
        request.error = str(error) or STOPPED
        raise
    finally:
        # Also after Ctrl-C or a failure: what was generated is never lost.
        if as_json and (request.answers or request.error is None):
            print_json(record(engine, request, attribution))
        elif attribution.attribute:
            for number, result in enumerate(request.answers):
                show_number(number, len(request.answers))
                show_copies(engine, result, attribution)
                say_end(engine, result, request.before)
        if attribution.attribute_html is not None and request.answers:
            write_page(engine, request.answers, attribution)
        if printer is not None:
            printer.legend([source for result in request.answers for source in result.sources])
        if output.stats:
            show_stats(request.answers)


def answer(
    engine: Engine, request: Request, options: Given, n: int, printer: AnswerPrinter | None
) -> None:
    """Stream the answers one after the other into `request.answers`."""
    prompt, seed = request.prompt(engine), options.get("seed")
    for number in range(n):
        if printer is not None:
            show_number(number, n)
        if seed is not None:
            options["seed"] = seed + number
        with engine.stream(prompt, **options) as stream:
            try:
                for piece in stream:
                    if printer is not None:
                        printer.piece(piece)
            finally:
                request.answers.append(stream.result)
                if printer is not None:
                    printer.end()
        if printer is not None:
            say_end(engine, request.answers[-1], request.before)


def show_number(number: int, count: int) -> None:
    """Say which of several answers follows."""
    if count > 1:
        note(f"--- answer {number + 1} of {count} ---")


def room_for_edit(engine: Engine, before: str) -> int:
    """Most tokens an edited file may have: a quarter more than before, and some."""
    from draftsmith.text.tokenizer import encode

    return len(encode(engine.model.tokenizer, before)) * 5 // 4 + 128


def record(engine: Engine, request: Request, attribution: AttributionOptions) -> dict[str, Any]:
    """What `--json` prints."""
    answers = [
        {
            "text": result.text,
            "finish_reason": result.finish_reason,
            "tokens": result.tokens,
            "sources": result.sources,
            "copies": copies_as_json(engine, result, attribution),
            "stats": result.stats.as_dict(),
        }
        for result in request.answers
    ]
    return {
        "model": engine.model.name,
        "dtype": dtype_of(engine.model),
        "device": str(engine.model.device),
        "drafter": str(engine.drafter),
        "answers": answers,
        "notices": list(engine.notices),
        "error": request.error,
    }
