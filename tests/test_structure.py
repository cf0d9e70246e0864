"""The shape of the package: imports point one way, the public names are complete."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import draftsmith

SOURCE = Path(draftsmith.__file__).parent

ORDER = [
    {"errors"},
    {"storage", "html", "compiled", "values"},
    {"core", "builtin"},
    {"text"},
    {"model"},
    {"drafters"},
    {"engine"},
    {"integrations", "server", "testing"},
    {"cli"},
    {"lab", "__main__"},
]
"""Lower never imports higher."""

RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> set[str]:
    """Parts of draftsmith that a file imports at run time."""
    tree = parsed(path)
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names = [node.module or ""]
            if node.module == "draftsmith":
                names = [f"draftsmith.{alias.name}" for alias in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("draftsmith.")}
    return found


def files() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


def test_imports_point_one_way() -> None:
    wrong = []
    for path in files():
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        others = imports(path)
        wrong += [
            f"{path} imports {name}" for name in others & RANK.keys() if RANK[name] > RANK[own]
        ]
        wrong += [f"{path}: {name} has no place" for name in others - RANK.keys() - {"__version__"}]
    assert not wrong


def test_only_model_and_integrations_touch_transformers() -> None:
    allowed = "model", "integrations", "cli", "lab/train"
    for path in files():
        if not any(path.is_relative_to(SOURCE / folder) for folder in allowed):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"^\s*(from|import) transformers\b", text, re.M), path


def test_a_token_is_accepted_in_one_place_only() -> None:
    """Nothing but verify.py compares drafts with the target."""
    makers = [p for p in files() if "Verification(" in p.read_text(encoding="utf-8")]
    assert [p.name for p in makers] == ["verify.py"]


def test_public_names_exist_and_are_listed() -> None:
    for name in draftsmith.__all__:
        assert getattr(draftsmith, name) is not None
    assert sorted(draftsmith.__all__) == draftsmith.__all__


def test_no_file_is_a_monster() -> None:
    for path in files():
        lines = path.read_text(encoding="utf-8").count("\n")
        assert lines <= 600, f"{path} has {lines} lines"


@pytest.mark.slow
def test_importing_touches_no_global_state() -> None:
    """Import in a fresh interpreter leaves torch's generator and thread count alone."""
    code = (
        "import torch; a, s = torch.get_num_threads(), torch.initial_seed(); "
        "import draftsmith, draftsmith.integrations.transformers, draftsmith.cli; "
        "assert (a, s) == (torch.get_num_threads(), torch.initial_seed())"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.slow
def test_the_library_loads_neither_the_laboratory_nor_its_extras() -> None:
    code = (
        "import sys\n"
        "for extra in ('llguidance', 'matplotlib', 'peft', 'pydivsufsort',\n"
        "              'fastapi', 'uvicorn', 'sse_starlette', 'prometheus_client'):\n"
        "    sys.modules[extra] = None\n"  # as if it were not installed
        "import draftsmith\n"
        "for name in draftsmith.__all__: getattr(draftsmith, name)\n"
        "from draftsmith.cli import main\n"
        "generate = ['run', '-m', 'edit-1m', '-d', 'none', '--max-new-tokens', '1', 'hello']\n"
        "for args in (generate, ['--help'], ['chat', '--help'], ['serve', '--help']):\n"
        "    try: main(args)\n"
        "    except SystemExit as end: assert not end.code, args\n"
        "assert not [name for name in sys.modules if name.startswith('draftsmith.lab')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def modules_named(path: Path, known: set[str]) -> set[str]:
    """Modules of the package that a file imports at its top, for type checkers too."""
    tree = parsed(path)
    inside = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in inside or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        module = (getattr(node, "module", None) or "") if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            candidates = [f"{module}.{alias.name}", module] if module else [alias.name]
            found.add(next((name for name in candidates if name in known), ""))
    return found - {""}


def test_no_module_imports_itself_by_a_detour() -> None:
    """Also not under TYPE_CHECKING, where a cycle only hides."""
    names = {
        ".".join(("draftsmith", *path.relative_to(SOURCE).with_suffix("").parts)): path
        for path in files()
        if path.name != "__init__.py"
    }
    waiting = {name: modules_named(path, set(names)) for name, path in names.items()}
    while free := {name for name, needs in waiting.items() if not needs & waiting.keys()}:
        waiting = {name: needs for name, needs in waiting.items() if name not in free}
    circle = {name: sorted(needs & waiting.keys()) for name, needs in waiting.items()}
    assert not circle, "these import each other, or something that does"


def lines_that_say_something(path: Path) -> list[str]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [
        line for line in lines if len(line) > 3 and not line.startswith(("#", "import ", "from "))
    ]


def test_no_two_files_share_more_than_ten_lines() -> None:
    most = 10
    root = SOURCE.parents[1]
    places: dict[tuple[str, ...], Path] = {}
    folders = [SOURCE, root / "benchmarks", root / "recipes"]
    for path in (p for folder in folders for p in sorted(folder.rglob("*.py"))):
        lines = lines_that_say_something(path)
        for start in range(len(lines) - most):
            run = tuple(lines[start : start + most + 1])
            assert places.setdefault(run, path) == path, f"{path} repeats: {run[0]}"


def test_every_tensor_says_where_it_lies() -> None:
    """Without `device=` it lies where `torch.set_default_device` says, which users call."""
    makers = {
        "arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "normal", "ones",
        "rand", "randint", "randn", "randperm", "tensor", "zeros",
    }  # fmt: skip
    for path in files():
        for node in ast.walk(parsed(path)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if ast.unparse(node.func.value) == "torch" and node.func.attr in makers:
                told = {keyword.arg for keyword in node.keywords}  # None: of a dictionary
                assert told & {"device", None}, f"{path}:{node.lineno} names no device"


RETIRED = (
    "as typed", "behind", "cannot work", "dear", "foresee", "foreseen", "learnt", "nobody",
    "said", "so many", "somebody", "told", "who", "whoever", "whom", "whose",
)  # fmt: skip
"""Words with which comments, docstrings and errors were hard to read. Names in backticks may have
them."""


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments, docstrings and error messages of a file with their lines."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Expr | ast.Raise):
            inside = [node.value] if isinstance(node, ast.Expr) else ast.walk(node)
            for part in inside:
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if found := re.search(r"(?:^|\s)# .*", line):  # in a string, too: that costs nothing
            yield number, found[0]


def test_comments_docstrings_and_errors_use_plain_words() -> None:
    retired = re.compile(rf"(?<![\w`])({'|'.join(RETIRED)})(?![\w`])", re.IGNORECASE)
    assert retired.findall("Whose row, `behind` it, is said so") == ["Whose", "said"]
    found = []
    for path in [*files(), SOURCE / "__init__.py"]:
        for line, text in prose(path):
            found += [f"{path}:{line}: {word}" for word in retired.findall(text)]
    assert not found, "say it with the words of docs/glossary.md"
