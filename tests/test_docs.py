"""The pages' examples run, their links lead somewhere, and their English stays plain."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import sys
import textwrap
import types
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cyclopts import CycloptsError, MissingArgumentError

from draftsmith import builtin
from draftsmith.cli.commands import application

DOCS = Path(__file__).parents[1] / "docs"
ROOT = DOCS.parent


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


INTERNALS = [DOCS / "architecture.md", *sorted(DOCS.glob("internals/*.md"))]
"""Pages about the code: the files, functions and members that they name exist."""


@cache
def members() -> dict[str, set[str]]:
    """Class → names that it, a class of the same name, or one of their bases has."""
    own, bases = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for path in (ROOT / "src" / "draftsmith").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] |= {b.id for b in node.bases if isinstance(b, ast.Name)}
                for one in ast.walk(node):
                    named = getattr(one, "name", None) or getattr(one, "attr", None)
                    own[node.name].add(str(named or getattr(one, "id", "")))

    def all_of(name: str) -> set[str]:
        return own[name].union(*(all_of(base) for base in bases[name] if base in own))

    return {name: all_of(name) for name in list(own)}


@pytest.mark.parametrize("page", INTERNALS, ids=lambda page: page.stem)
def test_what_a_page_about_the_code_names_exists(page: Path) -> None:
    """Names of files, `file.py:function`, and `Class.member`, in figures too."""
    text = page.read_text(encoding="utf-8")
    folders = "src", "tests", "benchmarks"
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for name, function in re.findall(r"([\w/]+\.py)(?::([A-Za-z_]+))?", text):
        found = [path for path in files if path.as_posix().endswith(f"/{name}")]
        assert found, name
        defined = re.compile(rf"^(def|class) {function}\b", re.M)
        if function:
            sources = (path.read_text(encoding="utf-8") for path in found)
            assert any(map(defined.search, sources)), f"{name}:{function}"
    known = members()
    code = "\n".join(re.findall(r"```.*?```|`[^`]+`", text, re.S))
    for owner, member in re.findall(r"(?<![\w.])([A-Z]\w+)\.([a-z_]\w*)", code):
        assert owner not in known or member in known[owner], f"{owner}.{member}"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("recipes/*/*.md"))]


def commands(page: Path, begins: str) -> list[list[str]]:
    """The words of the commands of a page that begin so, up to where something is left out."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(rf"`({begins} [^`]+)`", text)
    for block in re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.S):
        found += re.findall(rf"^({begins} .*)$", block, re.M)
    return [shlex.split(re.split(r" [|>…] ?", line)[0], comments=True) for line in found]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_every_command_on_a_page_can_be_given(page: Path) -> None:
    """Names of commands and options, and how many arguments there are; none is run."""
    for _, *words in commands(page, "draftsmith(?= [a-z])"):
        try:
            application(words).parse_args(words, print_error=False, exit_on_error=False)
        except MissingArgumentError:  # what is only quoted may lack its arguments
            pass
        except CycloptsError as error:
            pytest.fail(f"{shlex.join(words)}: {error}")


PAGES = [page for page in pages() if page.parent.name != "lab-notes"]  # those have what there was
BENCHMARKS = r"python -m benchmarks\.\w+"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_benchmark_and_recipe_on_a_page_can_be_given(page: Path) -> None:
    """Modules, options and how many arguments there are; none is run."""
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"benchmarks[./](\w+)(?:\.py)?", text):
        assert list((ROOT / "benchmarks").glob(f"{name}*")), f"{page.name} names {name}"
    for _, _, module, *words in commands(page, BENCHMARKS):
        try:
            importlib.import_module(module).parser().parse_args(words)
        except SystemExit as error:
            pytest.fail(f"{page.name}: {module} cannot be given {shlex.join(words)} ({error})")
    for _, script, *words in commands(page, r"(?:python|sh) recipes/[\w/]+\.(?:py|sh)"):
        source = (ROOT / script).read_text(encoding="utf-8")
        for option in (word for word in words if word.startswith("-")):
            assert f'"{option}"' in source, f"{page.name}: {script} has no {option}"


FIGURES = re.compile(r"\d\.\d+ \[\d|results/\w[\w.]*\.md\)|\| (?:tokens per|speed-up) ")
"""An interval, a link to a table of results, or a column of counts."""
MADE_BY = re.compile(r"python -m benchmarks\.\w|python recipes/|draftsmith (?:bench|tune) ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_measured_figures_name_their_command_and_date(page: Path) -> None:
    """In every section that has such figures."""
    for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.M):
        if found := FIGURES.search(section):
            where = f"{page.name}, {section.splitlines()[0]}: {found[0]}"
            assert MADE_BY.search(section), f"{where} has no command"
            assert re.search(r"20\d\d-\d\d-\d\d", section), f"{where} has no date"


QUOTED = re.compile(r"```python\n# ([a-z0-9_/]+\.py): ([\w.]+)\n(.*?)\n```", re.S)


def source_of(path: Path, qualified: str) -> str:
    """A function's or class's source, dedented, without the linter's remarks."""
    text = path.read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for name in qualified.split("."):
        node = next(n for n in ast.iter_child_nodes(node) if getattr(n, "name", None) == name)
    lines = (ast.get_source_segment(text, node, padded=True) or "").splitlines()
    return textwrap.dedent("\n".join(re.sub(r"  # noqa: \w+$", "", line) for line in lines))


@pytest.mark.parametrize(
    "algorithm", ["copyspec", "pld_plus", "sdsat", "draft_model", "slem", "slrs", "eagle3"]
)
def test_quoted_code_is_the_source(algorithm: str) -> None:
    page = f"algorithms/{algorithm}.md"
    source = ROOT / "src" / "draftsmith"
    quotes = QUOTED.findall((DOCS / page).read_text(encoding="utf-8"))
    assert quotes, f"{page} quotes no code: begin a block with '# folder/file.py: name'"
    for path, name, quoted in quotes:
        assert source_of(source / path, name) == quoted, f"{page} quotes {name} wrongly"


# ------------------------------------------------------------------------------ examples

RUN = ("README", "tour", "choosing-a-drafter", "earlier-answers", "structured-output")
"""Pages whose Python runs from top to bottom, block after block, with a tiny model."""
MODELS = ("Qwen/Qwen2.5-0.5B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2")
PYTHON = re.compile(r"(<!-- not run: .+? -->\n)?```python\n(.*?)```", re.S)


@pytest.mark.parametrize("page", [p for p in pages() if p.stem in RUN], ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = str(Path(builtin.__file__).parent / "edit-1m")
    names: dict[str, Any] = {"prompt": "Rename x to y."}
    for excuse, block in PYTHON.findall(page.read_text(encoding="utf-8")):
        if excuse:
            continue
        for model in MODELS:
            block = block.replace(f'"{model}"', repr(tiny))
        exec(re.sub(r"max_new_tokens=\d+", "max_new_tokens=8", block), names)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_every_example_runs_is_quoted_or_says_why_not(page: Path) -> None:
    if page.stem in (*RUN, "writing-a-drafter", "spectra") or page not in PAGES:  # their own tests
        return
    for excuse, block in PYTHON.findall(page.read_text(encoding="utf-8")):
        assert excuse or re.match(r"# [a-z0-9_/]+\.py: [\w.]+\n", block), block


def test_the_page_of_spectra_quotes_its_source() -> None:
    """Parts of functions, each with less indentation."""

    def flat(code: str) -> str:
        return "\n".join(re.sub(r"  # noqa: \w+$", "", line).strip() for line in code.splitlines())

    source = (ROOT / "src" / "draftsmith" / "drafters").glob("spectra*.py")
    whole = flat("\n".join(path.read_text(encoding="utf-8") for path in source))
    page = (DOCS / "algorithms" / "spectra.md").read_text(encoding="utf-8")
    for _, block in PYTHON.findall(page):
        assert flat(block) in whole, block


# ---------------------------------------------------------------------------------- links


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site makes them."""
    headings = re.findall(r"^#+ (.+)$", outside_code(page.read_text(encoding="utf-8")), re.M)
    bare = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    kept = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in bare]
    return {re.sub(r"[-\s]+", "-", heading) for heading in kept}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = outside_code(page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


# -------------------------------------------------------------------------------- English

ENGLISH = [page for page in PAGES if "recipes" not in page.parts]
ENGLISH += [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
WRAPPED = [*ENGLISH, *sorted(DOCS.glob("lab-notes/*.md"))]  # dated logs: their sentences stay
WIDTH, WORDS = 100, 35
PRIVATE = re.compile(r"\b(told|behind|nobody|whoever|of so many|dear|dearer|said|whence)\b", re.I)
"""Words that these pages once used with meanings of their own."""


def outside_code(text: str) -> str:
    """A page without its code blocks and comments, line for line."""
    lines = re.compile(r"^( *)```.*?^\1```$|<!--.*?-->", re.S | re.M)
    return lines.sub(lambda found: "\n" * found[0].count("\n"), text)


def prose(text: str) -> list[str]:
    """The sentences of a page: of paragraphs, list items and cells; code counts as one word."""
    text = re.sub(r"``?[^`]+``?", "code", outside_code(text))
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    found: list[str] = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.) ?)", text):
        for cell in block.split("|") if block.lstrip().startswith("|") else [block]:
            found += re.split(r"(?<=[.!?:])[)*\"]*\s+", " ".join(cell.split()))
    return found


@pytest.mark.parametrize("page", WRAPPED, ids=lambda page: page.stem)
def test_lines_are_short(page: Path) -> None:
    text = outside_code(page.read_text(encoding="utf-8"))
    for number, line in enumerate(text.splitlines(), 1):
        loose = re.sub(r"\]\([^)]*\)|<http[^>]*>", "", line)
        excused = line.lstrip().startswith(("|", "![")) or re.search(r"`[^`]{60,}`", line)
        assert excused or len(loose) <= WIDTH, f"{page.name}:{number} has {len(line)} characters"


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.stem)
def test_sentences_are_short_and_their_words_the_fields(page: Path) -> None:
    for sentence in prose(page.read_text(encoding="utf-8")):
        words = [word for word in sentence.split() if re.search(r"\w", word)]
        assert len(words) <= WORDS, f"{len(words)} words: {sentence}"
        assert not (found := PRIVATE.search(sentence)), f"{found[0]!r}: {sentence}"
