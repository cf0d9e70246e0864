"""The self-test of exact passes: at which widths this model computes a row as at any other.

A matrix product may take another kernel, or sum in another order, for another number of rows. So a
pass over random tokens is watched, and every kind of module that took part is asked again for some
of its rows, at every width from 1 to 64, at one thread and at all. Passes then have only widths
that gave the same bits everywhere: the others are filled up with rows that nobody asks for.

Shapes: `R` rows of the watched pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from draftsmith.errors import UnsupportedError, first_line

ROWS = 64
"""R; up to here every width is tried, beyond its multiples as passes want them."""
_GROUP = 16
"""Rows of the passes that give what others are held against."""
_FEW = 8
"""Rows up to which kernels differ most."""
_DEAREST = 4
"""The least width must not be above: a plain pass would cost as many."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A kind of module, and what one of them was given."""

    name: str
    module: Callable[[Tensor], Any]
    x: Tensor
    rows: int
    """Which dimension the rows are."""
    expected: Tensor
    """What comes of R rows, computed by the group."""
    most: int = 1 << 30
    """It is asked for widths up to here."""

    def agrees(self, width: int) -> bool:
        """Whether every row comes out as it did by the group, with so many in a pass."""
        if width > self.most:
            return True
        step = width if width <= _GROUP else ROWS
        begins = range(0, max(1, ROWS - width + 1), step)
        places = torch.arange(width, device="cpu")
        return all(self._same((places + at) % ROWS) for at in {*begins, -width})

    def _same(self, picked: Tensor) -> bool:
        x, expected = (t.index_select(self.rows, picked) for t in (self.x, self.expected))
        return torch.equal(_first(self.module(x)), expected)


class Widths:
    """The widths that a model's passes may have."""

    def __init__(self, parts: list[_Part]) -> None:
        """Raises UnsupportedError where too few widths agree."""
        self._parts = parts
        self._threads = {torch.get_num_threads()}
        bad: dict[int, str] = {}
        for width in range(1, ROWS + 1):
            other = next((part.name for part in parts if not part.agrees(width)), None)
            if other is not None:
                bad[width] = other
        self._known = {width: width not in bad for width in range(1, ROWS + 1)}
        self.allowed = [width for width in range(1, ROWS + 1) if width not in bad]
        """Up to R."""
        if not self.allowed or self.allowed[0] > _DEAREST or self.allowed[-1] < ROWS:
            some = ", ".join(map(str, list(bad)[:8]))
            names = ", ".join(sorted(set(bad.values())))
            raise UnsupportedError(
                f"exact=True: on this processor {names} computes a row otherwise in passes of "
                f"{some}{', …' if len(bad) > 8 else ''} rows; decode without exact=True, "
                "or in another dtype"
            )
        with _threads(1):
            self.at_least(1)
            self.at_least(ROWS)

    def at_least(self, width: int) -> int:
        """The least width from this one on that may be. Raises UnsupportedError if none can."""
        threads = torch.get_num_threads()
        if threads not in self._threads:
            for one in {1, self.allowed[0], _GROUP, ROWS} & set(self.allowed):
                self._check(one, f"with {threads} threads")
            self._threads.add(threads)
        if width <= ROWS:
            return next(one for one in self.allowed if one >= width)
        width = -(-width // ROWS) * ROWS
        if width not in self._known:
            self._check(width, "beside so many")
            self._known[width] = True
        return width

    def _check(self, width: int, when: str) -> None:
        for part in self._parts:
            if not part.agrees(width):
                raise UnsupportedError(
                    f"exact=True: {part.name} computes a row of {width} otherwise {when}; decode "
                    "without exact=True"
                )

    def explain(self) -> str:
        """The same in a sentence for a person."""
        gone = [width for width in range(1, ROWS + 1) if width not in self.allowed]
        if not gone:
            return "every row comes out alike in passes of any width"
        some = ", ".join(map(str, gone[:8])) + (", …" if len(gone) > 8 else "")
        return f"every row comes out alike; passes of {some} rows are filled up to the next width"


def watched(model: Module, run: Callable[[], Any]) -> list[_Part]:
    """The kinds of modules that compute in a pass of R rows, which `run` makes.

    Raises UnsupportedError for one with weights of its own that sees other rows than the pass's.
    """
    found: dict[Any, tuple[str, Any, Tensor]] = {}
    strange: list[str] = []

    def look(module: Any, given: Any, named: Any, output: Any) -> None:
        x, weights = given[0] if len(given) == 1 and not named else None, module._parameters
        if isinstance(x, Tensor) and not x.is_floating_point():
            return  # ids: rows of a table are copied
        shapes = [tuple(w.shape) for w in weights.values() if w is not None]
        name = f"{type(module).__name__} {'×'.join(map(str, shapes[0])) if shapes else ''}".strip()
        if not isinstance(x, Tensor) or ROWS not in x.shape[:-1]:
            if shapes:
                strange.append(name)
            return
        kind = type(module), str(shapes), tuple(x.shape), x.dtype
        if kind not in found and isinstance(_first(output), Tensor):
            found[kind] = name, module, x.detach().clone()

    handles = [
        part.register_forward_hook(look, with_kwargs=True)
        for part in model.modules()
        if next(part.children(), None) is None
        or any(w is not None and w.ndim > 2 for w in part._parameters.values())  # experts' in one
    ]
    try:
        run()
    except Exception as error:
        raise UnsupportedError(f"exact=True: a pass fails ({first_line(error)})") from error
    finally:
        for handle in handles:
            handle.remove()
    if strange:
        raise UnsupportedError(
            f"exact=True: {strange[0]} is not given a row for every position (experts get as many "
            "as choose them), so how it computes one depends on the others"
        )
    return [part for name, module, x in found.values() for part in _parts(name, module, x)]


def _parts(name: str, module: Any, x: Tensor) -> Iterator[_Part]:
    """What it was given, and the same numbers otherwise arranged: few rows can agree by luck."""
    rows = x.shape.index(ROWS)
    for given, most in ((x, 1 << 30), (x.roll(1, -1), _FEW), (x.flip(-1), _FEW)):
        groups = [_first(module(group.contiguous())) for group in torch.split(given, _GROUP, rows)]
        yield _Part(name, module, given, rows, torch.cat(groups, rows), most)


def _first(output: Any) -> Any:
    return output if isinstance(output, Tensor) else output[0]


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """For a moment; other threads' passes take longer meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
