"""Validation of the numbers, token ids, booleans and option names that callers pass.

Scalars of NumPy and PyTorch count as numbers, as does anything with `__index__` or `__float__`;
True and False do not. Accepted values are returned as Python's int, float or bool.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeVar, cast

from draftsmith.errors import DraftsmithError, OptionError, UnknownName

Number = TypeVar("Number", int, float)
Function = TypeVar("Function", bound=Callable[..., Any])

_NUMERIC = ("int", "uint", "float", "bfloat")
"""Prefixes of the dtype names of real numbers in NumPy, PyTorch and JAX."""


def number(
    name: str,
    value: object,
    kind: type[Number],
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    note: str = "",
) -> Number:
    """Return `value` as an int or a float (`kind`).

    Raises OptionError unless it is a finite number of that kind within the bounds: `least` and
    `most` are inclusive, `above` and `below` exclusive. The message calls it `name`; `note` adds
    other allowed values or the meaning of a number.
    """
    converted = _plain(value, kind)
    if (
        converted is None
        or (least is not None and converted < least)
        or (most is not None and converted > most)
        or (above is not None and converted <= above)
        or (below is not None and converted >= below)
    ):
        what = "an integer" if kind is int else "a number"
        bounds = ((">=", least), (">", above), ("<=", most), ("<", below))
        within = " and ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)
        allowed = " ".join(filter(None, (what, within, note)))
        raise OptionError(f"{name} must be {allowed}, got {shown(value)}")
    return converted


def is_number(value: object, kind: type[int] | type[float]) -> bool:
    """Return whether `value` is a number of that kind, of any size."""
    return _plain(value, kind) is not None


def token_ids(
    name: str,
    value: object,
    *,
    what: str = "token ids",
    error: type[DraftsmithError] = OptionError,
) -> list[int]:
    """Return a sequence, an array or a tensor of integers as a list of ints.

    An array of one row becomes that row. Anything else raises `error`; its message calls the value
    `name` and the expected type `what`.
    """
    ids = listed(value)
    if ids is not value and isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes | bytearray):
        raise error(f"{name} must be {what}, got {shown(value)}")
    if (converted := integers(ids)) is None:
        wrong = next(one for one in ids if _plain(one, int) is None)
        raise error(f"{name} must be {what}, got {shown(wrong)} among them")
    return converted


def integers(values: Sequence[object]) -> list[int] | None:
    """Return integers of any library as a list of ints; None if one of them is not an integer."""
    kinds = {*map(type, values)}
    if bool not in kinds and all(issubclass(kind, Integral) for kind in kinds):
        return list(map(operator.index, values))  # type: ignore[arg-type]
    converted = [_plain(one, int) for one in values]
    return None if None in converted else converted  # type: ignore[return-value]


def listed(value: Any) -> Any:
    """Return an array or a tensor as nested lists, anything else unchanged."""
    of_array = hasattr(value, "tolist") and not isinstance(value, type)
    return value.tolist() if of_array else value


def switch(name: str, value: object) -> bool:
    """Return `value` as a bool; raise OptionError unless it is True or False."""
    if isinstance(value, bool) or (_dtype(value) == "bool" and _shape(value) == ()):
        return bool(value)
    raise OptionError(f"{name} must be True or False, got {shown(value)}")


def shown(value: object) -> str:
    """Return `repr(value)` for an error message: on one line, cut to 100 characters."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an int has more digits than Python writes
        text = "an integer of very many digits"
    return text if len(text) <= 100 else f"{text[:99]}…"


def known_options(
    of: str, instead: Mapping[str, str], also: Iterable[str] = ()
) -> Callable[[Function], Function]:
    """Make a function raise UnknownName, not TypeError, for an option that it does not have.

    `of` is the function's name in messages; `instead` maps names that other libraries use to
    advice. A function with `**options` checks those itself, so only the names in `instead` are
    refused here; `also` lists its options for the message.
    """

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(function).parameters.values()
        known = [p.name for p in parameters if p.kind != p.VAR_KEYWORD and p.name != "self"]
        open_ended = any(p.kind == p.VAR_KEYWORD for p in parameters)

        @functools.wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            for name in options:
                if name not in known and (name in instead or not open_ended):
                    names = [*known, *also]
                    raise UnknownName(f"option of {of}", name, names, hint(name, known, instead))
            return function(*args, **options)

        return cast(Function, checked)

    return decorate


def hint(name: str, known: Sequence[str], instead: Mapping[str, str]) -> str | None:
    """Return the advice for an unknown option, which may be a misspelled name of `instead`."""
    near = difflib.get_close_matches(name, [*known, *instead], n=1, cutoff=0.7)
    if name in instead or not near or near[0] not in instead:
        return instead.get(name)
    hint = instead[near[0]]
    return f"did you mean {near[0]!r}? {hint[0].upper()}{hint[1:]}"


def _plain(value: object, kind: type[Number]) -> Number | None:
    """Return `value` as an int or a float; None if it is not one, or not finite."""
    if isinstance(value, bool | str | bytes | bytearray) or _shape(value) != ():
        return None
    dtype = _dtype(value)
    if dtype and not dtype.startswith(_NUMERIC):
        return None
    try:
        if kind is int:
            return operator.index(value)  # type: ignore[arg-type]
        detached: Any = value.detach() if hasattr(value, "detach") else value
        made = float(detached)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError is from PyTorch
        return None
    return kind(made) if math.isfinite(made) else None


def _dtype(value: object) -> str:
    """Return the name of the dtype of an array or a scalar, such as int64; "" without a dtype."""
    dtype = getattr(value, "dtype", "")
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def _shape(value: object) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))
