"""`draftsmith run`: answer one prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftsmith import builtin
from draftsmith.cli.attribution import AttributionOptions, copies_as_json, show_copies, write_page
from draftsmith.cli.loading import is_builtin, load_engine
from draftsmith.cli.options import Json, ModelOptions, OutputOptions, SamplingOptions
from draftsmith.cli.render import AnswerPrinter, show_stats
from draftsmith.cli.report import note
from draftsmith.errors import LoadError, OptionError, PromptError

if TYPE_CHECKING:
    from draftsmith.engine.engine import Engine
    from draftsmith.engine.result import GenerationResult

_PROMPT = "Prompt"


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """What is asked."""

    prompt: Annotated[
        str | None,
        typer.Argument(show_default=False, help="The prompt; - reads it from standard input."),
    ] = None
    file: Annotated[
        str | None,
        typer.Option(
            "--file", "-f", rich_help_panel=_PROMPT, metavar="PATH",
            help="Read the prompt from a file (- is standard input); goes after PROMPT if both.",
        ),
    ] = None  # fmt: skip
    edit: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_PROMPT, metavar="PATH",
            help="Edit this file: PROMPT is the instruction, the answer is the new file.",
        ),
    ] = None  # fmt: skip
    system: Annotated[
        str | None,
        typer.Option(rich_help_panel=_PROMPT, metavar="TEXT", help="A system message."),
    ] = None
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", rich_help_panel=_PROMPT, help="Continue the text, without a chat template."
        ),
    ] = False
    prediction: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_PROMPT, metavar="PATH",
            help="A text that the answer will resemble: one more place to copy from.",
        ),
    ] = None  # fmt: skip


@dataclass(slots=True)
class Request:
    """A prompt, read and checked, before any model is loaded."""

    text: str
    edit: tuple[str, str] | None
    """Path and content of the file to edit."""
    options: PromptOptions
    prediction: str | None = None
    answers: list[GenerationResult] = field(default_factory=list)
    error: str | None = None


def run(
    prompt: PromptOptions,
    model: ModelOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    attribution: AttributionOptions,
    n: Annotated[
        int,
        typer.Option("-n", metavar="N", help="Answers, sampled with seeds seed, seed+1, …"),
    ] = 1,
    as_json: Json = False,
) -> None:
    """Answer one prompt; the text goes to standard output as it comes.

    [bold]Examples[/bold]

    draftsmith run "What is a list comprehension?"

    draftsmith run --edit app.py "rename load to read_config" > new.py

    git diff | draftsmith run -m Qwen/Qwen3-0.6B "Write a commit message" -f - --stats

    draftsmith run -m ./my-model -d "copyspec(gamma=3)" --show-drafts "…"

    draftsmith run -m ./my-model -f report.txt "Summarize this" --attribute-html sources.html
    """
    if n < 1:
        raise OptionError(f"n={n} cannot work; it must be at least 1")
    options = sampling.given()
    attribution.check(output.show_drafts)
    request = read(prompt)
    engine = load_engine(model)
    options |= prompt_options(request, engine, options)
    say_notices(engine)
    # Where a copy begins is known when the answer is complete, so it is not shown as it comes.
    late = as_json or attribution.attribute
    printer = None if late else AnswerPrinter(output.show_drafts)
    try:
        answer(engine, request, options, n, printer)
    except Exception as error:
        request.error = str(error)
        raise
    finally:
        # Also after Ctrl-C or a failure: what was generated is never lost.
        if as_json and (request.answers or request.error is None):
            show_json(engine, request, attribution)
        elif attribution.attribute:
            show_attributed(engine, request, attribution, options)
        if attribution.attribute_html is not None and request.answers:
            write_page(engine, request.answers, attribution)
        if printer is not None:
            printer.legend([source for result in request.answers for source in result.sources])
        if output.stats:
            show_stats(request.answers)


def answer(
    engine: Engine, request: Request, options: dict[str, Any], n: int, printer: AnswerPrinter | None
) -> None:
    """Stream the answers one after the other into `request.answers`."""
    prompt = render(request, engine)
    for number in range(n):
        if n > 1 and printer is not None:
            note(f"--- answer {number + 1} of {n} ---")
        if n > 1 and options.get("seed") is not None and number:
            options = {**options, "seed": options["seed"] + 1}
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
            say_end(request.answers[-1], options)


def read(options: PromptOptions) -> Request:
    """The prompt's parts from the command line, files and standard input."""
    parts = list(_parts(options))
    if options.edit is not None:
        if not parts:
            raise PromptError("--edit needs an instruction, e.g. --edit a.py 'rename f to g'")
        edit = options.edit, read_text(options.edit)
    else:
        edit = None
        if not parts:
            raise PromptError("there is no prompt; give PROMPT or --file, or pipe a text in")
    text = "\n\n".join(parts)
    if not (text if options.raw else text.strip()):
        raise PromptError("the prompt is empty; give at least one character")
    request = Request(text, edit, options)
    if options.prediction is not None:
        request.prediction = read_text(options.prediction)
    elif edit is not None:
        request.prediction = edit[1]
    return request


def _parts(options: PromptOptions) -> Iterator[str]:
    if options.prompt == "-" and options.file == "-":
        raise OptionError("standard input cannot be both PROMPT and --file; give one of them")
    asked = options.prompt is not None or options.file is not None
    if options.prompt == "-" or (not asked and not sys.stdin.isatty()):
        yield _trimmed(read_stdin(), options.raw)
    elif options.prompt is not None:
        yield options.prompt
    if options.file is not None:
        text = read_stdin() if options.file == "-" else read_text(options.file)
        yield _trimmed(text, options.raw)


def _trimmed(text: str, raw: bool) -> str:
    # `echo` and editors end a text with a line break that nobody means.
    return text if raw else text.removesuffix("\n").removesuffix("\r")


def read_stdin() -> str:
    """Standard input as text."""
    return _decoded(sys.stdin.buffer.read(), "standard input")


def read_text(path: str) -> str:
    """A text file; raises LoadError for what cannot be read or is no text."""
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror or error}") from error
    return _decoded(data, path)


def _decoded(data: bytes, name: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LoadError(f"{name} is not UTF-8 text (byte {error.start} does not fit)") from error
    if "\0" in text:
        raise LoadError(f"{name} is not text: it contains zero bytes")
    return text


def render(request: Request, engine: Engine) -> Any:
    """The prompt as the engine takes it: messages where there is a chat template, else text."""
    asked, text = request.options, request.text
    has_template = bool(getattr(engine.model.tokenizer, "chat_template", None))
    plain = asked.raw or not has_template
    if plain and asked.system is not None:
        why = "--raw leaves it out" if asked.raw else "this model has no chat template"
        raise OptionError(f"--system needs a chat template, and {why}")
    if request.edit is not None:
        path, before = request.edit
        if is_builtin(engine.model.name) and not plain:
            # The model knows paths inside a project, not where this one lies on the disk.
            name = Path(path).name if Path(path).is_absolute() else path
            messages = builtin.edit_messages(name, text, before)
            return [*_system(asked.system), *messages]
        text = (
            f"{text}\n\nAnswer with the complete new content of {path} and nothing else. "
            f"This is {path} now:\n\n{before}"
        )
    return text if plain else [*_system(asked.system), {"role": "user", "content": text}]


def _system(text: str | None) -> list[dict[str, str]]:
    return [] if text is None else [{"role": "system", "content": text}]


def prompt_options(request: Request, engine: Engine, given: dict[str, Any]) -> dict[str, Any]:
    """Options that follow from the prompt: the prediction, and room for a whole file."""
    extra: dict[str, Any] = {}
    if request.prediction is not None:
        extra["prediction"] = request.prediction
    if request.edit is not None and "max_new_tokens" not in given:
        extra["max_new_tokens"] = room_for_edit(engine, request.edit[1])
    return extra


def room_for_edit(engine: Engine, before: str) -> int:
    """Most tokens an edited file may have: a quarter more than before, and some."""
    from draftsmith.text.tokenizer import encode

    return len(encode(engine.model.tokenizer, before)) * 5 // 4 + 128


def say_notices(engine: Engine) -> None:
    """Tell once if drafts are of no use with this model, and why."""
    if engine.model.capabilities.shape == "plain" and engine.drafter.preferred_width():
        why = "; ".join(engine.notices) or "it verifies one token per pass"
        note(f"note: this model decodes plainly, without drafts: {why}")


def say_end(result: GenerationResult, options: dict[str, Any]) -> None:
    """Tell if the answer was cut short."""
    if result.finish_reason != "length":
        return
    limit = options.get("max_new_tokens", 256)
    if result.stats.tokens >= limit:
        note(f"note: cut after {limit} tokens; --max-new-tokens sets this")
    else:
        note("note: cut because the model's context is full")


def show_attributed(
    engine: Engine, request: Request, attribution: AttributionOptions, options: dict[str, Any]
) -> None:
    """The answers with their copies marked."""
    for number, result in enumerate(request.answers, 1):
        if len(request.answers) > 1:
            note(f"--- answer {number} of {len(request.answers)} ---")
        show_copies(engine, result, attribution)
        say_end(result, options)


def show_json(engine: Engine, request: Request, attribution: AttributionOptions) -> None:
    """One JSON object on stdout."""
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
    record = {
        "model": engine.model.name,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "device": str(engine.model.device),
        "drafter": str(engine.drafter),
        "answers": answers,
        "notices": list(engine.notices),
        "error": request.error,
    }
    print(json.dumps(record, ensure_ascii=False), flush=True)
