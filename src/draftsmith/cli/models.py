"""`draftsmith models`: names of models, and models that are on this machine."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from draftsmith import builtin
from draftsmith.cli.options import Json
from draftsmith.cli.render import plain_table
from draftsmith.cli.report import print_json, stdout
from draftsmith.errors import LoadError, first_line


def models(*, as_json: Json = False) -> None:
    """List the names that stand for models, and the models in the hub's cache.

    Each may be given to --model, as may any other hub id, a folder or a GGUF file.
    """
    names: list[dict[str, Any]] = [
        {"name": name, "stands_for": builtin.resolve(name), "default": name == builtin.default()}
        for name in builtin.known()
    ]
    cached = in_cache()
    if as_json:
        print_json({"names": names, "cached": cached})
        return
    table = plain_table("name", "stands for", folds=1)
    for one in names:
        table.add_row(one["name"] + " (default)" * one["default"], Text(one["stands_for"]))
    stdout().print(table)
    table = plain_table("in the hub's cache", "MB")
    for one in cached:
        table.add_row(one["id"], f"{one['bytes'] / 1e6:,.1f}")
    if cached:
        stdout().print("", table, sep="\n")


def in_cache() -> list[dict[str, Any]]:
    """Hub ids of the models in the hub's cache, and the bytes of their files."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    except (ValueError, OSError) as error:
        raise LoadError(f"the hub's cache cannot be read: {first_line(error)}") from error
    found = [(one.repo_id, one.size_on_disk) for one in repositories if one.repo_type == "model"]
    return [{"id": name, "bytes": size} for name, size in sorted(found)]
