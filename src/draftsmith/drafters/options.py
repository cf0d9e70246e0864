"""Checks of drafter options, worded alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from draftsmith.core.drafter import Drafter
from draftsmith.errors import OptionError


def at_least(drafter: Drafter, option: str, least: int) -> None:
    """Raise OptionError unless the option is an integer of at least `least`."""
    value = getattr(drafter, option)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(
            f"{drafter.name}: {option}={value!r} cannot work; give an integer of at least {least}"
        )


def one_of(drafter: Drafter, option: str, allowed: Sequence[str]) -> None:
    """Raise OptionError unless the option is one of `allowed`."""
    value = getattr(drafter, option)
    if value not in allowed:
        listed = " or ".join(map(repr, allowed))
        raise OptionError(f"{drafter.name}: {option}={value!r} is unknown; give {listed}")


def switches(drafter: Drafter) -> None:
    """Raise OptionError unless each option that is a bool is True or False."""
    for field in fields(drafter):
        value = getattr(drafter, field.name)
        if field.type in (bool, "bool") and not isinstance(value, bool):
            raise OptionError(
                f"{drafter.name}: {field.name}={value!r} cannot work; give True or False"
            )
