"""Validation of drafter options, with uniform messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from draftsmith.core.drafter import Drafter
from draftsmith.errors import OptionError
from draftsmith.values import number, switch


def at_least(drafter: Drafter, least: int, *options: str) -> None:
    """Convert options to ints; raise OptionError for one that is no integer >= `least`."""
    for option in options:
        _number(drafter, option, int, least=least)


def within(drafter: Drafter, option: str, least: float, most: float, note: str = "") -> None:
    """Convert the option to a float; raise OptionError unless it is within the bounds."""
    _number(drafter, option, float, least=least, most=most, note=note)


def _number(drafter: Drafter, option: str, kind: type[int] | type[float], **bounds: Any) -> None:
    value = number(f"{drafter.name}: {option}", getattr(drafter, option), kind, **bounds)
    object.__setattr__(drafter, option, value)


def one_of(drafter: Drafter, option: str, allowed: Sequence[str]) -> None:
    """Raise OptionError unless the option is one of `allowed`."""
    value = getattr(drafter, option)
    if value not in allowed:
        listed = " or ".join(map(repr, allowed))
        raise OptionError(f"{drafter.name}: {option} must be {listed}, got {value!r}")


def switches(drafter: Drafter) -> None:
    """Convert bool options to Python bools; raise OptionError unless they are True or False."""
    for field in fields(drafter):
        if field.type in (bool, "bool"):
            value = switch(f"{drafter.name}: {field.name}", getattr(drafter, field.name))
            object.__setattr__(drafter, field.name, value)
