"""What the site has beside the pages of `docs/`: the README as its front page, and the changelog.

Links of a page to files of the repository that are no pages become the file's path.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
FRONT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the repository's own pages, with links as they are from inside `docs/`."""
    for name, page in FRONT.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links lead to pages of the site, or name the file that they lead to."""
    folder = Path(config.docs_dir, page.file.src_uri).parent

    def led(found: re.Match[str]) -> str:
        image, text, path, anchor = found.groups()
        file = files.get_file_from_path(joined(page.file.src_uri, path))
        if re.match(r"\w+:", path) or (file is not None and file.inclusion.is_included()):
            return found[0]
        front = page.file.src_uri in FRONT.values()
        targets = [ROOT / path, folder / path] if front else [folder / path]
        target = next((t.resolve() for t in targets if t.exists()), ROOT / "…")
        if not target.is_relative_to(ROOT) or not target.exists():
            return found[0]  # the strict build reports it
        name = target.relative_to(ROOT).as_posix()
        if name in FRONT:
            up = "../" * page.file.src_uri.count("/")
            return f"{image}[{text}]({up}{FRONT[name]}{anchor or ''})"
        said = text.strip("`")
        if image or name.endswith(said):
            return f"`{name}`"
        return text if name in said else f"{text} (`{name}`)"

    return LINK.sub(led, markdown)


def joined(page: str, path: str) -> str:
    """The path of a link's target below `docs/`."""
    parts = [*page.split("/")[:-1]]
    for part in path.split("/"):
        if part == "..":
            parts = parts[:-1] if parts else ["…"]
        elif part != ".":
            parts.append(part)
    return "/".join(parts)
