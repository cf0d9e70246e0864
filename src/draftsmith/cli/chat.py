"""`draftsmith chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from draftsmith.cli.loading import awaited, load_engine, short
from draftsmith.cli.options import ModelOptions, OptionText, OutputOptions, Sampling
from draftsmith.cli.render import AnswerPrinter, label, say_end, say_notices, show_stats
from draftsmith.cli.report import ending, note, stderr
from draftsmith.errors import DraftsmithError, OptionError, PromptError, UnknownName
from draftsmith.storage import expanded, write_text

if TYPE_CHECKING:
    from draftsmith.engine.chat import Chat
    from draftsmith.engine.engine import Engine
    from draftsmith.engine.result import GenerationResult

HELP = """\
/help            this list
/reset           forget the conversation (the system message stays)
/stats           passes, acceptance and times of the last answer and of all
/drafter [NAME]  show or change who guesses, e.g. /drafter copyspec(gamma=3)
/save FILE       write the conversation: .json as messages, anything else as text
/quit            leave; so does Ctrl-D
Ctrl-C           stop the answer"""

COMMANDS = ("help", "reset", "stats", "drafter", "save", "quit")


def chat(
    *,
    model: ModelOptions = ModelOptions(),
    sampling: Sampling | None = None,
    output: OutputOptions = OutputOptions(),
    system: Annotated[OptionText | None, Parameter(help="A system message to begin with.")] = None,
) -> None:
    """Talk to a model; cache and drafts are kept from turn to turn.

    /help lists what can be typed beside messages.

    Examples

    draftsmith chat -m Qwen/Qwen3-0.6B --show-drafts
    draftsmith chat --system "Answer in one sentence." --temperature 0.7
    """
    options: dict[str, Any] = {**(sampling or {})}
    engine = load_engine(model, options)
    if not getattr(engine.model.tokenizer, "chat_template", None):
        raise PromptError(
            f"{short(engine.model.name)} has no chat template, so it cannot chat; "
            "continue a text with: draftsmith run --raw"
        )
    say_notices(engine)
    note(
        f"{short(engine.model.name)} in {engine.model.dtype_name}, drafts by "
        f"{label(engine.drafter)}. "
        "/help lists commands, Ctrl-C stops an answer, Ctrl-D quits."
    )
    Conversation(engine, engine.chat(system, **options), output).loop()


@contextlib.contextmanager
def stopping(stop: Event) -> Iterator[None]:
    """Ctrl-C sets the event, so that a step can end and the cache stays whole; twice interrupts."""

    def asked(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            signal.default_int_handler(number, frame)
        stop.set()

    before = signal.signal(signal.SIGINT, asked)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Conversation:
    """Reads lines until the end; a line is a message or a command."""

    def __init__(self, engine: Engine, chat: Chat, output: OutputOptions) -> None:
        self.engine, self.chat, self.output = engine, chat, output
        self.results: list[GenerationResult] = []

    def loop(self) -> None:
        """Until Ctrl-D, the end of standard input, or /quit."""
        watched = sys.stdin.isatty() and sys.stdout.isatty()
        if watched:
            with contextlib.suppress(ImportError):  # not on Windows
                import readline  # noqa: F401  gives input() line editing and a history
        while True:
            try:
                line = input("> " if watched else "").strip()
                if line.startswith("/"):
                    self.command(line)
                elif line:
                    self.answer(line)
            except (DraftsmithError, MemoryError, RuntimeError) as error:
                ending(error)
                if isinstance(error, PromptError) and self.chat.messages:
                    note("(/reset begins a new conversation, /save FILE writes this one)")
            except KeyboardInterrupt:
                note("\n(Ctrl-D or /quit leaves)")
            except EOFError:
                if watched:
                    print()
                return

    def answer(self, message: str) -> None:
        """Stream the answer to one message; Ctrl-C ends it and keeps what came."""
        printer = AnswerPrinter(self.output.show_drafts)
        stop = Event()
        with self.chat.stream(message) as stream:
            try:
                with stopping(stop):
                    for piece in awaited(stream):
                        printer.piece(piece)
                        if stop.is_set():
                            break
            except KeyboardInterrupt:
                stop.set()
            finally:
                printer.end()
                result = stream.result
                self.results.append(result)
        if stop.is_set():
            note("(stopped)")
        say_end(self.engine, result)
        printer.legend(result.sources)
        if self.output.stats:
            show_stats(self.engine, [result])

    def command(self, line: str) -> None:
        """Run a /command; raises UnknownName with a suggestion."""
        name, _, rest = line[1:].partition(" ")
        if name not in COMMANDS:
            raise UnknownName("command", f"/{name}", [f"/{known}" for known in COMMANDS])
        getattr(self, name)(rest.strip())

    def help(self, _: str) -> None:
        stderr().print(HELP)

    def reset(self, _: str) -> None:
        self.chat.reset()
        note("(forgotten)")

    def stats(self, _: str) -> None:
        if not self.results:
            note("(no answer yet)")
            return
        show_stats(self.engine, self.results[-1:])
        if len(self.results) > 1:
            note(f"\nall {len(self.results)} answers:")
            show_stats(self.engine, self.results)

    def drafter(self, name: str) -> None:
        from draftsmith.drafters.registry import parse

        if name:
            self.chat.options["drafter"] = parse(name)
        note(f"(drafts by {label(self.chat.options.get('drafter') or self.engine.drafter)})")

    def save(self, name: str) -> None:
        if not name:
            raise OptionError("/save needs a file name, e.g. /save talk.json")
        path = expanded(name)
        messages = self.chat.messages
        if path.suffix == ".json":
            text = json.dumps(messages, ensure_ascii=False, indent=2) + "\n"
        else:
            text = "\n".join(f"{m['role']}:\n{m['content'].rstrip()}\n" for m in messages)
        write_text(path, text)
        note(f"({len(messages)} messages written to {path})")

    def quit(self, _: str) -> None:
        raise EOFError
