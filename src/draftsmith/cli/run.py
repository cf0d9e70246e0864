"""`draftsmith run`: answer one prompt."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import chain, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from draftsmith import builtin
from draftsmith.cli.loading import awaited, load_engine, read_text, short
from draftsmith.cli.options import (
    Count,
    Json,
    ModelOptions,
    OptionText,
    OutputOptions,
    Sampling,
    group,
)
from draftsmith.cli.render import (
    COLOURS,
    AnswerPrinter,
    plural,
    say_end,
    say_notices,
    show_stats,
    visible,
)
from draftsmith.cli.report import STOPPED, note, print_json, stdout
from draftsmith.errors import OptionError, PromptError
from draftsmith.storage import check_writable, write_text

if TYPE_CHECKING:
    from draftsmith.engine.attribution import Copy
    from draftsmith.engine.engine import Engine
    from draftsmith.engine.result import GenerationResult


@group("Prompt", 1)
@dataclass(frozen=True)
class PromptOptions:
    """What is asked."""

    prompt: OptionText | None = None
    """The prompt; - reads it from standard input."""
    _: KW_ONLY
    file: Annotated[OptionText | None, Parameter(alias="-f")] = None
    """Read the prompt from a file (- is standard input); goes after PROMPT if both."""
    edit: Path | None = None
    """Edit this file: PROMPT is the instruction, the answer is the new file."""
    system: OptionText | None = None
    """A system message."""
    raw: bool = False
    """Continue the text, without a chat template."""
    prediction: Path | None = None
    """A text that the answer will resemble: one more place to copy from."""
    n: Annotated[Count, Parameter(alias="-n")] = 1
    """Answers, sampled with seeds seed, seed+1, …"""

    def read(self) -> str:
        """The prompt from the command line, files and standard input."""
        asked = self.prompt is not None or self.file is not None
        piped = self.prompt == "-" or (not asked and not sys.stdin.isatty())
        others = {"--file": self.file, "--edit": self.edit, "--prediction": self.prediction}
        readers = ["PROMPT"] * piped + [name for name, path in others.items() if str(path) == "-"]
        if len(readers) > 1:
            first, second, *_ = readers
            raise OptionError(
                f"standard input cannot be both {first} and {second}; give one of them"
            )
        parts = []
        if piped:
            parts.append(self._trimmed(read_text("-")))
        elif self.prompt is not None:
            parts.append(self.prompt)
        if self.file is not None:
            parts.append(self._trimmed(read_text(self.file)))
        text = "\n\n".join(parts)
        empty = not (text if self.raw else text.strip())
        if empty and self.edit is not None:
            raise PromptError("--edit needs an instruction, e.g. --edit a.py 'rename f to g'")
        if not parts:
            raise PromptError("there is no prompt; give PROMPT or --file, or pipe a text in")
        if empty:
            raise PromptError("the prompt is empty; give PROMPT or --file, or pipe a text in")
        return text

    def _trimmed(self, text: str) -> str:
        # `echo` and editors end a text with a line break that is not meant.
        return text if self.raw else text.removesuffix("\n").removesuffix("\r")

    def ask(self, engine: Engine, text: str, before: str | None) -> Any:
        """Return the prompt: messages if there is a chat template, else text."""
        has_template = bool(getattr(engine.model.tokenizer, "chat_template", None))
        plain = self.raw or not has_template
        if plain and self.system:
            why = "--raw leaves it out" if self.raw else "this model has no chat template"
            raise OptionError(f"--system needs a chat template, and {why}")
        messages = None
        if self.edit is not None and before is not None:
            path = str(self.edit).encode(errors="replace").decode()
            if builtin.is_ours(engine.model.name) and not plain:
                # The model knows paths inside a project, not where this one lies on the disk.
                name = Path(path).name if Path(path).is_absolute() else path
                messages = builtin.edit_messages(name, text, before)
            else:
                text = (
                    f"{text}\n\nAnswer with the complete new content of {path} and nothing else. "
                    f"This is {path} now:\n\n{before}"
                )
        if plain:
            return text
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + (messages or [{"role": "user", "content": text}])


@group("Attribution (which parts of the answer were copied, and from where)", 5)
@dataclass(frozen=True, kw_only=True)
class AttributionOptions:
    """Whether and how copies are shown."""

    attribute: bool = False
    """Mark copies with their place in prompt and answer, counted in tokens; prints the answer
    when it is complete. With --budget drafter every run marks the same."""
    attribute_html: Path | None = None
    """Write a page where pointing at a copy shows its source."""

    def check(self, show_drafts: bool) -> None:
        """Raise OptionError now rather than after the answer."""
        if self.attribute and show_drafts:
            raise OptionError(
                "--attribute and --show-drafts both colour the answer; give one of them"
            )
        if self.attribute_html is not None:
            check_writable(self.attribute_html)


def run(
    prompt: PromptOptions = PromptOptions(),
    *,
    model: ModelOptions = ModelOptions(),
    sampling: Sampling | None = None,
    output: OutputOptions = OutputOptions(),
    attribution: AttributionOptions = AttributionOptions(),
    as_json: Json = False,
) -> None:
    r"""Answer one prompt; the text goes to standard output as it comes.

    Notes on standard error tell of an answer that was cut or loops, and of an edit that lost or
    repeats lines of the file, or has words or code fences around it; the exit code is 0 all the
    same.

    Examples

    draftsmith run "What is a list comprehension?"
    printf 'def main():\n    config = load("app.json")\n    print(config)\n' > app.py
    draftsmith run -m edit-7m --edit app.py "rename config to settings" > new.py
    git diff | draftsmith run -m Qwen/Qwen3-0.6B "Write a commit message" -f - --stats
    draftsmith run -m ./my-model -d "copyspec(gamma=3)" --show-drafts "…"
    draftsmith run -m ./my-model -f report.txt "Summarize this" --attribute-html sources.html
    """
    attribution.check(output.show_drafts)
    text = prompt.read()
    before = None if prompt.edit is None else read_text(str(prompt.edit))
    prediction = before if prompt.prediction is None else read_text(str(prompt.prediction))
    options: dict[str, Any] = {**(sampling or {})}
    engine = load_engine(model, options)
    if prediction is not None:
        options["prediction"] = prediction
    if before is not None:
        options.setdefault("max_new_tokens", room_for_edit(engine, before))
    say_notices(engine)
    # Where a copy begins is known when the answer is complete, so it is not shown as it comes.
    late = as_json or attribution.attribute
    printer = AnswerPrinter(output.show_drafts)
    results: list[GenerationResult] = []
    failure = None
    try:
        asked = prompt.ask(engine, text, before)
        for number in range(prompt.n):
            if prompt.n > 1 and not as_json:
                note(f"--- answer {number + 1} of {prompt.n} ---")
            with engine.stream(asked, **options) as stream:
                try:
                    for piece in awaited(stream):
                        if not late:
                            printer.piece(piece)
                finally:
                    results.append(stream.result)
                    printer.end()
                    if attribution.attribute and not as_json:
                        show_copies(stream.result)
            if not as_json:
                say_end(engine, stream.result, before)
            if "seed" in options:
                options["seed"] += 1
    except (Exception, KeyboardInterrupt) as error:
        stopped = isinstance(error, KeyboardInterrupt)
        failure = STOPPED if stopped else str(error) or type(error).__name__
        raise
    finally:
        # Also after Ctrl-C or a failure: what was generated is never lost.
        if as_json and (results or failure is None):
            of_results = [result.notices for result in results]
            print_json(
                {
                    "model": engine.model.name,
                    "dtype": engine.model.dtype_name,
                    "device": str(engine.model.device),
                    "drafter": str(engine.drafter),
                    "answers": [record(result) for result in results],
                    "notices": [*dict.fromkeys(chain(engine.notices, *of_results))],
                    "error": failure,
                }
            )
        if attribution.attribute_html is not None and results:
            write_text(attribution.attribute_html, html_page(engine, results))
            note(f"wrote {attribution.attribute_html}")
        if not late:
            printer.legend([source for result in results for source in result.sources])
        if output.stats:
            show_stats(engine, results)


def room_for_edit(engine: Engine, before: str) -> int:
    """Most tokens an edited file may have: a quarter more than before, and some."""
    from draftsmith.text.tokenizer import encode

    return len(encode(engine.model.tokenizer, before)) * 5 // 4 + 128


def record(result: GenerationResult) -> dict[str, Any]:
    """Return the output of `--json`; positions of copies count from the begin of the prompt."""
    copies = [
        {"output": list(copy.output), "source": list(copy.source), "text": text}
        for text, copy in stretches(result)
        if copy is not None
    ]
    return {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "tokens": result.tokens,
        "sources": result.sources,
        "copies": copies,
        "stats": result.stats.as_dict(),
    }


def show_copies(result: GenerationResult) -> None:
    """Print an answer with its copies marked, and on stderr how much of it they are."""
    console, colours, parts = stdout(), cycle(COLOURS), list[tuple[str, str]]()
    spans = copied = 0
    for text, copy in stretches(result):
        shown = visible(text) if console.is_terminal else text
        if copy is None:
            parts.append((shown, ""))
            continue
        spans, copied = spans + 1, copied + copy.output.end - copy.output.start
        place = f"[{copy.source.start}:{copy.source.end}]"
        if console.is_terminal:
            colour = next(colours)
            parts += [(shown, f"{colour} underline"), (place, f"{colour} dim")]
        else:
            parts.append((f"⟦{shown}⟧{place}", ""))
    marked = "".join(part for part, _ in parts)
    if marked and not marked.endswith("\n"):
        parts.append(("\n", ""))
    if console.is_terminal:
        console.print(Text.assemble(*parts), soft_wrap=True, end="")
    else:  # rich would expand tabs and drop carriage returns
        sys.stdout.write("".join(part for part, _ in parts))
        sys.stdout.flush()
    prompt, answer = len(result.prompt_tokens), len(result.tokens)
    note(
        f"copied: {copied} of {plural(answer, 'token')} in {plural(spans, 'span')}; "
        f"positions 0 to {prompt - 1} are the prompt, the answer goes on from {prompt}"
    )


def stretches(result: GenerationResult) -> Iterator[tuple[str, Copy | None]]:
    """The answer in order: (text, the copy that it is)."""
    texts, at = result.token_texts(), 0
    for copy in result.copies():
        start, end = (position - len(result.prompt_tokens) for position in copy.output)
        yield "".join(texts[at:start]), None
        yield "".join(texts[start:end]), copy
        at = end
    yield "".join(texts[at:]), None


def html_page(engine: Engine, results: list[GenerationResult]) -> str:
    """The page that `--attribute-html` asks for."""
    from draftsmith.cli.attribution_page import Answer, page
    from draftsmith.text.tokenizer import token_texts

    answers = []
    for result in results:
        prompt = token_texts(engine.model.tokenizer, result.prompt_tokens, special=True)
        answers.append(Answer(prompt, result.token_texts(), result.copies()))
    return page(answers, short(engine.model.name), str(engine.drafter))
