"""The pages' examples run, and stay as short as they promise."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import shlex
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
import typer

from draftsmith.cli import app
from draftsmith.cli.commands import Command

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.S)


def test_the_example_drafter_runs_and_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, contract, looking = blocks("writing-a-drafter.md")
    lines = [line for line in drafter.splitlines() if line.strip()]
    assert len(lines) < 30
    module = types.ModuleType("example_drafter")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look it up
    exec(drafter, module.__dict__)
    exec(contract, module.__dict__)
    exec(looking, module.__dict__)


def test_every_file_named_in_the_architecture_exists() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    source = DOCS.parent / "src" / "draftsmith"
    for name, function in re.findall(r"`([a-z_/]+\.py):([A-Za-z_]+)", page):
        matches = [p for p in source.rglob("*.py") if str(p).endswith("/" + name)]
        assert matches, name
        defined = rf"(def|class) {function}\b"
        assert any(re.search(defined, p.read_text(encoding="utf-8")) for p in matches), function


def pages() -> list[Path]:
    root = DOCS.parent
    return [root / "README.md", *sorted(DOCS.rglob("*.md")), *sorted(root.glob("recipes/*/*.md"))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_every_command_on_a_page_can_be_given(page: Path) -> None:
    """Names of commands and options, and how many arguments there are; none is run."""
    text = page.read_text(encoding="utf-8")
    told = re.findall(r"`(draftsmith [a-z][^`\n]*)`", text)
    for block in re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.S):
        told += re.findall(r"^(draftsmith [a-z].*)$", block, re.M)
    for line in told:
        _, *words = shlex.split(re.split(r" [|>…] ?", line)[0], comments=True)
        command: Any = typer.main.get_command(app)
        while words and hasattr(command, "commands"):
            assert words[0] in command.commands, line
            command = command.commands[words.pop(0)]
            command = command.load() if isinstance(command, Command) else command
        if hasattr(command, "commands"):
            continue
        try:
            command.make_context(line, words, help_option_names=["-h", "--help"])
        except typer.Exit:  # of --help and --version
            pass
        except Exception as error:  # what is only quoted may lack its arguments
            told_wrong = getattr(error, "format_message", error.__str__)()
            assert "Missing" in told_wrong, f"{line}: {told_wrong}"


def commands(page: Path, begins: str) -> list[list[str]]:
    """The words of the commands of a page that begin so, up to where something is left out."""
    text = page.read_text(encoding="utf-8")
    told = re.findall(rf"`({begins} [^`]+)`", text)
    for block in re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.S):
        told += re.findall(rf"^({begins} .*)$", block, re.M)
    return [shlex.split(re.split(r" [|>…] ?", line)[0], comments=True) for line in told]


PAGES = [page for page in pages() if page.name != "lab-notes.md"]  # those have what there was
BENCHMARKS = r"python -m benchmarks\.\w+"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_benchmark_on_a_page_can_be_given(page: Path) -> None:
    """Modules, options and how many arguments there are; none is run."""
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"benchmarks[./](\w+)(?:\.py)?", text):
        assert list((DOCS.parent / "benchmarks").glob(f"{name}*")), f"{page.name} names {name}"
    for line in (shlex.join(words) for words in commands(page, BENCHMARKS)):
        _, _, module, *words = shlex.split(line)
        try:
            importlib.import_module(module).parser().parse_args(words)
        except SystemExit as error:
            pytest.fail(f"{page.name}: {line} cannot be given ({error})")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_recipe_on_a_page_is_there(page: Path) -> None:
    for _, script, *words in commands(page, r"(?:python|sh) recipes/[\w/]+\.(?:py|sh)"):
        source = (DOCS.parent / script).read_text(encoding="utf-8")
        for option in (word for word in words if word.startswith("-")):
            assert f'"{option}"' in source, f"{page.name}: {script} has no {option}"


def test_every_benchmark_prints_something_that_a_page_shows() -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for file in sorted((DOCS.parent / "benchmarks").glob("*.py")):
        if "def parser(" in file.read_text(encoding="utf-8"):
            assert f"benchmarks.{file.stem}" in shown, f"no page has a command of {file.name}"


QUOTED = re.compile(r"```python\n# ([a-z_/]+\.py): ([\w.]+)\n(.*?)\n```", re.S)


def source_of(path: Path, qualified: str) -> str:
    """A function's or class's source, dedented, without the linter's remarks."""
    text = path.read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for name in qualified.split("."):
        node = next(n for n in ast.iter_child_nodes(node) if getattr(n, "name", None) == name)
    lines = (ast.get_source_segment(text, node, padded=True) or "").splitlines()
    return textwrap.dedent("\n".join(re.sub(r"  # noqa: \w+$", "", line) for line in lines))


def test_the_script_of_the_recording_can_be_imported() -> None:
    runpy.run_path(str(DOCS / "record_demo.py"))


@pytest.mark.parametrize(
    "algorithm", ["copyspec", "pld_plus", "sdsat", "draft_model", "slem", "slrs"]
)
def test_quoted_code_is_the_source(algorithm: str) -> None:
    page = f"algorithms/{algorithm}.md"
    source = DOCS.parent / "src" / "draftsmith"
    quotes = QUOTED.findall((DOCS / page).read_text(encoding="utf-8"))
    assert quotes, f"{page} quotes no code: begin a block with '# folder/file.py: name'"
    for path, name, quoted in quotes:
        assert source_of(source / path, name) == quoted, f"{page} quotes {name} wrongly"
