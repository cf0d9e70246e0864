"""Checks of drafter options, worded alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from draftsmith.core.drafter import Drafter
from draftsmith.errors import OptionError
from draftsmith.values import number, switch


def at_least(drafter: Drafter, option: str, least: int) -> None:
    """Make the option an int; raise OptionError unless it is an integer of at least `least`."""
    _number(drafter, option, int, least=least)


def within(drafter: Drafter, option: str, least: float, most: float, note: str = "") -> None:
    """Make the option a float; raise OptionError unless it is a number between the bounds."""
    _number(drafter, option, float, least=least, most=most, note=note)


def _number(drafter: Drafter, option: str, kind: type[int] | type[float], **bounds: Any) -> None:
    value = number(f"{drafter.name}: {option}", getattr(drafter, option), kind, **bounds)
    object.__setattr__(drafter, option, value)


def one_of(drafter: Drafter, option: str, allowed: Sequence[str]) -> None:
    """Raise OptionError unless the option is one of `allowed`."""
    value = getattr(drafter, option)
    if value not in allowed:
        listed = " or ".join(map(repr, allowed))
        raise OptionError(f"{drafter.name}: {option}={value!r} is unknown; give {listed}")


def switches(drafter: Drafter) -> None:
    """Make options that are bools plain ones; raise OptionError unless they are True or False."""
    for field in fields(drafter):
        if field.type in (bool, "bool"):
            value = switch(f"{drafter.name}: {field.name}", getattr(drafter, field.name))
            object.__setattr__(drafter, field.name, value)
