"""Which drafters are there."""

from __future__ import annotations

from dataclasses import MISSING, fields

from draftsmith.core.drafter import Drafter
from draftsmith.drafters.registry import lookup, names


def bare_names() -> list[str]:
    """Names of the installed drafters that can be used without any option, for any model."""
    return [name for name in names() if not _required(lookup(name)) and name != "mtp"]


def _required(drafter: type[Drafter]) -> list[str]:
    without = [f for f in fields(drafter) if f.default is MISSING]
    return [f.name for f in without if f.default_factory is MISSING]
