"""Options that commands share, in groups: a command takes a group where others take an option."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, get_type_hints

import typer
from typer.models import OptionInfo

from draftsmith.errors import OptionError
from draftsmith.values import number

REQUIRED = "(required)"
"""The default of a field that has none."""


class Field(NamedTuple):
    """One field: its type and its default as they are written."""

    name: str
    type: str
    default: str
    help: str
    """The docstring below it."""


class Declared(NamedTuple):
    """A class: its docstring, its fields in order, and the texts of its class variables."""

    doc: str
    fields: tuple[Field, ...]
    constants: Mapping[str, str]


Given = dict[str, Any]
"""Field → value, of those fields that the caller named."""

_KINDS: dict[str, tuple[Any, str | None]] = {
    "bool": (bool, None),
    "int": (int, "N"),
    "float": (float, "X"),
    "str": (str, "TEXT"),
    "tuple[int, ...]": (list[int], "N"),
    "tuple[str, ...]": (list[str], "TEXT"),
    "Path": (Path, "PATH"),
    "tuple[Path, ...]": (list[Path], "PATH"),
    "Sequence[Path]": (list[Path], "PATH"),
    "tuple[Path, Path]": (tuple[Path, Path], "A B"),
}
"""A field's type → what typer makes of an option, and what `--help` calls its value."""


@dataclass(frozen=True)
class Fields:
    """Options with the names, types, defaults and docstrings of a library's dataclass.

    The command gets them as `Given`, so that a default is written in one place. A dataclass of the
    command's own is a group by itself: it may say in `panel` under which title of `--help` it
    stands, and has its own `spelt`; its numbers are at least 1 unless they are 0 by default.
    """

    where: str
    """The dataclass, as `package.module:Class`."""
    panels: Mapping[str, str]
    """Panel of `--help` → the fields in it."""
    spelt: Mapping[str, str] = field(default_factory=dict)
    """Field → how it is typed, where that is not its name and type: `--file -f PATH`."""


_SHOWN = re.compile(r"(.*?) ?\[([^\]]*)\]")
"""A docstring that ends with what stands for no value: `CPU threads. [torch's choice]`."""


_ALIKE = {"--max-new-tokens", "--max-tokens"}
"""Two names of one option, wherever a command has it; it may be typed by either."""


def _parameter(option: Field, spelt: str, panel: str | None) -> inspect.Parameter:
    kind, metavar = _KINDS[option.type.removesuffix(" | None")]
    flags = [word for word in spelt.split() if word.startswith("-")]
    metavar = " ".join(word for word in spelt.split() if not word.startswith("-")) or metavar
    text, shown = option.help.replace("`", ""), ""
    if found := _SHOWN.fullmatch(text):
        text, shown = found.groups()
    if kind in (list[int], list[str], list[Path]) and (flags or not spelt):
        text += " May be given several times."
    if option.default not in (REQUIRED, "None", "False", "True", "()"):
        value = ast.literal_eval(option.default)
        shown = ", ".join(value) if isinstance(value, tuple) else str(value)
    told: Any
    if spelt and not flags:
        told = typer.Argument(metavar=metavar, help=text, show_default=shown or False)
    else:
        flags = flags or ["--" + option.name.replace("_", "-")]
        flags = next(([f, *_ALIKE - {f}] for f in flags if f in _ALIKE), flags)
        told = typer.Option(
            *flags, metavar=metavar, help=text, show_default=shown or False, rich_help_panel=panel
        )
    default = inspect.Parameter.empty if option.default == REQUIRED else None
    return _keyword(option.name, Annotated[kind | None, told], default)


def _given(**values: Any) -> Given:
    named = {name: value for name, value in values.items() if value not in (None, [])}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in named.items()}


NewFolder = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", show_default=False, help="A new folder.")
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", rich_help_panel="Output", help="Print one JSON object instead, for machines."
    ),
]


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Which model is loaded, and where."""

    panel: ClassVar = "Model"
    spelt: ClassVar = {"model": "--model -m MODEL", "prepack": "--prepack/--no-prepack"}

    model: str | None = None
    """A Hugging Face hub id, a folder, a GGUF file, or a name such as smollm2. [smollm2 if
    installed, else edit-7m]"""
    device: str | None = None
    """cpu, cuda, cuda:1, mps, … [a GPU if there is one]"""
    prepack: bool = True
    """Lay the linear layers out for this CPU, where that works. [prepack]"""


@dataclass(frozen=True, kw_only=True)
class MachineOptions(PlaceOptions):
    """How it computes."""

    dtype: str | None = None
    """float32, bfloat16, float16, or auto: the checkpoint's. [auto, but float32 where this
    processor does not compute in half precision]"""
    threads: int | None = None
    """CPU threads. [torch's choice]"""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(MachineOptions):
    """Which model answers, in what dtype, and who guesses for it."""

    spelt: ClassVar = {"drafter": "--drafter -d NAME"}

    exact: bool = False
    """Let answers be plain decoding's to the bit, in bfloat16, too."""
    drafter: str = "auto"
    """Who guesses, e.g. none or 'copyspec(gamma=3)'; see `draftsmith drafters`."""
    budget: str = "auto"
    """Draft tokens per pass: a number, auto (what pays here), or drafter (its own)."""


Sampling = Annotated[
    Given,
    Fields(
        "draftsmith.core.sampling:SamplingParams",
        {
            "Sampling (defaults hold where the model's generation_config says nothing)": (
                "max_new_tokens temperature top_k top_p min_p repetition_penalty seed stop"
            )
        },
    ),
]
"""How tokens are chosen and when the answer ends."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is shown beside the answer."""

    panel: ClassVar = "Output"

    show_drafts: bool = False
    """Colour each token by who guessed it (in a terminal)."""
    stats: bool = False
    """Show passes, acceptance and times on standard error."""


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer wants it: every option of its groups a parameter of its own.

    In its messages an option has the name that was typed: --top-k, not top_k.
    """
    hints = get_type_hints(command, include_extras=True)
    flat: list[inspect.Parameter] = []
    groups: dict[str, tuple[list[str], Callable[..., Any]]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        found = _group(hints[name])
        if found is None:
            flat.append(_keyword(name, hints[name], parameter.default))
        else:
            parameters, make = found
            flat += parameters
            groups[name] = [p.name for p in parameters], make
    flags = dict(_flags(flat))

    def call(**values: Any) -> None:
        for name, value in values.items():
            _check_text(value, flags.get(name, name.upper()))
        try:
            for name, (inside, make) in groups.items():
                values[name] = make(**{option: values.pop(option) for option in inside})
            command(**values)
        except OptionError as error:
            error.args = (as_typed(str(error), flags),)
            raise

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in flat}
    return call


def _group(hint: Any) -> tuple[list[inspect.Parameter], Callable[..., Any]] | None:
    """The parameters of a group and what makes one value of theirs; None: no group."""
    for told in getattr(hint, "__metadata__", ()):
        if isinstance(told, Fields):
            known = {f.name: f for f in declared(told.where).fields}
            return [
                _parameter(known[name], told.spelt.get(name, ""), panel)
                for panel, names in told.panels.items()
                for name in names.split()
            ], _given
    if not (isinstance(hint, type) and is_dataclass(hint)):
        return None
    options: dict[str, Field] = {}
    spelt: dict[str, str] = {}
    panels: dict[str, str | None] = {}
    may_be_0: tuple[str, ...] = getattr(hint, "may_be_0", ())
    for part in hint.__mro__[-2::-1]:
        spelt |= vars(part).get("spelt", {})
        for f in declared(f"{part.__module__}:{part.__qualname__}").fields:
            help = f.help or options[f.name].help  # where a parent's default is another one here
            options[f.name] = f._replace(help=help)
            panels.setdefault(f.name, getattr(part, "panel", None))

    def make(**values: Any) -> Any:
        given = _given(**values)
        for name, value in given.items():
            zero = options[name].default == "0" or (not value and name in may_be_0)
            if type(value) is int and not zero:
                number(name, value, int, least=1)
        return hint(**given)

    return [_parameter(f, spelt.get(f.name, ""), panels[f.name]) for f in options.values()], make


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _flags(parameters: list[inspect.Parameter]) -> Iterator[tuple[str, str]]:
    """Option → how it is typed."""
    for parameter in parameters:
        (option,) = parameter.annotation.__metadata__
        if isinstance(option, OptionInfo):
            # typer keeps the first name of an annotated option where others have their default.
            names = (option.default, *(option.param_decls or ()))
            usual = "--" + parameter.name.replace("_", "-")
            flag: str = next((name for name in names if isinstance(name, str)), usual)
            yield parameter.name, flag.split("/")[0]


def _check_text(value: Any, flag: str) -> None:
    """Raise OptionError for a text that is not UTF-8; files may have such names."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and not os.path.exists(text):
            foreign = re.search("[\ud800-\udfff]", text)
            if foreign:
                at = foreign.start() + 1
                raise OptionError(f"{flag} is not UTF-8 text, from character {at} on")


def as_typed(message: str, flags: Mapping[str, str]) -> str:
    """A message with the options' names as they are typed; drafters' own options stay."""
    for name, flag in flags.items():
        # A drafter's option stands in parentheses, or behind the drafter's name and a colon.
        message = re.sub(rf"((?<![\w(-])(?<!: ){name}(?==)|\A{name}(?= must))", flag, message)
    return message


@cache
def declared(where: str) -> Declared:
    """What the class `package.module:Class` declares in its own body."""
    module, wanted = where.split(":")
    classes = (node for node in _body(module) if isinstance(node, ast.ClassDef))
    found = next(node for node in classes if node.name == wanted)
    fields, constants = [], {}
    for node, after in zip(found.body, [*found.body[1:], ast.Pass()], strict=True):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        annotation, name, value = ast.unparse(node.annotation), node.target.id, node.value
        if annotation.startswith("ClassVar"):
            constants[name] = _text(value)
            continue
        text = _text(after)
        if isinstance(value, ast.Call) and value.args:  # Path("a"), setting(5, "So many.")
            text, value = text or _text(value.args[-1]), value.args[0]
        if isinstance(value, ast.Name):
            value = _constant(module, value.id)
        fields.append(Field(name, annotation, ast.unparse(value) if value else REQUIRED, text))
    return Declared(ast.get_docstring(found) or "", tuple(fields), constants)


@cache
def _body(module: str) -> list[ast.stmt]:
    spec = find_spec(module)
    assert spec is not None, f"there is no module {module}"
    return ast.parse(Path(spec.origin or "").read_text(encoding="utf-8")).body


def _constant(module: str, name: str) -> ast.expr:
    """The value that a name has in a module, which may have imported it."""
    for node in _body(module):
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            return _constant(node.module or "", name)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return node.value
    raise LookupError(f"{module} has no constant {name}")


def _text(node: ast.AST | None) -> str:
    """The text that a constant or a docstring is, on one line; nothing if it is none."""
    value = node.value if isinstance(node, ast.Expr) else node
    return " ".join(str(value.value).split()) if isinstance(value, ast.Constant) else ""
