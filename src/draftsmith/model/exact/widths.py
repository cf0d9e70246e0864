"""Self-test of exact passes: finds the widths at which the model computes each row alike.

A matrix product may use another kernel, or another order of summation, for another number of rows.
So a pass over random tokens is recorded, and every kind of module in it computes some of its rows
again at every width from 1 to 64, and at some of them with one thread. Passes then only use widths
that gave the same bits everywhere; others are padded. Where the kernel changes at a larger width,
as oneDNN's does on processors with AMX, matrix products of more rows are computed in pieces.

Shapes: `R` rows of the recorded pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from draftsmith.errors import UnsupportedError, first_line

ROWS = 64
"""R. Every width up to R is tested; multiples of R are tested when a pass needs them."""
_GROUP = 16
"""Width of the passes that give the expected results."""
_FEW = 8
"""Kernels differ most up to this number of rows."""
_MANY = 8192
"""Values in a row, such as logits, of which some differ in any row that another kernel computes."""
_MAX_LEAST_WIDTH = 4
"""Largest acceptable minimum width: a plain pass would compute as many rows."""
PRODUCTS = {
    linear: 0,
    torch.addmm: 1,  # transformers' Conv1D
    torch.ops.mkldnn._linear_pointwise.default: 0,  # model.prepack
}
"""Matrix products of layers → place of the argument (…, rows, in)."""


class Pieces(TorchFunctionMode):
    """While this context is open, matrix products take at most `most` rows at once."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, place = kwargs or {}, PRODUCTS.get(func)
        if place is None or args[place].ndim < 2 or args[place].shape[-2] <= self.most:
            return func(*args, **kwargs)
        before, x, after = args[:place], args[place], args[place + 1 :]
        pieces = torch.split(x, self.most, -2)
        return torch.cat([func(*before, piece, *after, **kwargs) for piece in pieces], -2)


@dataclass(frozen=True, slots=True)
class _Part:
    """One kind of module, with the input of one of them."""

    name: str
    module: Callable[[Tensor], Any]
    x: Tensor
    rows: int
    """Dimension of the rows."""
    expected: Tensor
    """Result of R rows, computed in groups."""
    most: int = 1 << 30
    """Largest width that is tested."""

    def agrees(self, width: int) -> bool:
        """Whether every row is bit-equal to the expected one in passes of this width."""
        if width > self.most:
            return True
        places = torch.arange(width, device="cpu")
        if self.expected.shape[-1] >= _MANY:
            return self._same(places % ROWS)
        step = width if width <= _GROUP else ROWS
        begins = range(0, max(1, ROWS - width + 1), step)
        return all(self._same((places + at) % ROWS) for at in {*begins, -width})

    def _same(self, picked: Tensor) -> bool:
        x, expected = (t.index_select(self.rows, picked) for t in (self.x, self.expected))
        return torch.equal(_first(self.module(x)), expected)


class Widths:
    """The widths that a model's passes may have."""

    def __init__(self, parts: list[_Part]) -> None:
        """Test all widths; raises UnsupportedError if too few agree."""
        self._parts = parts
        self._threads = {torch.get_num_threads()}
        self.most: int | None = None
        """Maximum number of rows of a matrix product; None: no limit."""
        bad = self._disagreeing(range(1, ROWS + 1))
        if ROWS in bad and len(bad) < ROWS:
            self.most = max(width for width in range(1, ROWS) if width not in bad)
            lower = {width: name for width, name in bad.items() if width < self.most}
            bad = lower | self._disagreeing(range(self.most + 1, ROWS + 1))
        self._known = set[int]()
        """Widths above R that agree with the present numbers of threads."""
        self.allowed = [width for width in range(1, ROWS + 1) if width not in bad]
        """Widths up to R."""
        if not self.allowed or self.allowed[0] > _MAX_LEAST_WIDTH or self.allowed[-1] < ROWS:
            some = ", ".join(map(str, list(bad)[:8]))
            names = ", ".join(sorted(set(bad.values())))
            raise UnsupportedError(
                f"exact=True: on this processor {names} computes other bits in passes of "
                f"{some}{', …' if len(bad) > 8 else ''} rows; decode without exact=True, "
                "or in another dtype"
            )

    def pieces(self, width: int) -> AbstractContextManager[Any]:
        """Context in which a pass of this width computes. Narrow ones do not pay for `Pieces`."""
        return nullcontext() if self.most is None or width <= self.most else Pieces(self.most)

    def at_least(self, width: int) -> int:
        """Smallest allowed width from `width` on. Raises UnsupportedError if none agrees."""
        threads = torch.get_num_threads()
        if threads not in self._threads:
            self._check(ROWS, f" with {threads} threads")
            bad = self._disagreeing(self.allowed[:-1])  # R is the last one
            self.allowed = [one for one in self.allowed if one not in bad]
            self._known.clear()
            self._threads.add(threads)
        if width <= ROWS:
            return next(one for one in self.allowed if one >= width)
        width = -(-width // ROWS) * ROWS
        if width not in self._known:
            self._check(width, "")
            self._known.add(width)
        return width

    def _check(self, width: int, when: str) -> None:
        for name in self._disagreeing([width]).values():
            raise UnsupportedError(
                f"exact=True: {name} computes other bits in passes of {width} rows{when}; "
                "decode without exact=True"
            )

    def _disagreeing(self, widths: Iterable[int]) -> dict[int, str]:
        """Return the widths of these at which a row comes out differently, with a part's name."""
        found = {}
        for width in widths:
            with self.pieces(width):
                name = next((part.name for part in self._parts if not part.agrees(width)), None)
            if name is not None:
                found[width] = name
        return found

    def explain(self) -> str:
        """Return the allowed widths as a sentence for a person."""
        refused = [width for width in range(1, ROWS + 1) if width not in self.allowed]
        how = "" if self.most is None else f"; matrix products take up to {self.most} rows at once"
        if not refused:
            return f"rows are bit-equal in passes of any width{how}"
        some = ", ".join(map(str, refused[:8])) + (", …" if len(refused) > 8 else "")
        return f"rows are bit-equal; passes of {some} rows are padded to the next width{how}"


def watched(model: Module, run: Callable[[], Any]) -> list[_Part]:
    """Return the kinds of modules that compute in a pass of R rows, which `run` makes.

    Raises UnsupportedError for a module with weights if its rows are not those of the pass.
    """
    found: dict[Any, tuple[str, Any, Tensor]] = {}
    unsuitable: list[str] = []

    def look(module: Any, given: Any, named: Any, output: Any) -> None:
        x, weights = given[0] if len(given) == 1 and not named else None, module._parameters
        if isinstance(x, Tensor) and not x.is_floating_point():
            return  # token ids: embeddings copy rows of a table
        shapes = [tuple(w.shape) for w in weights.values() if w is not None]
        name = f"{type(module).__name__} {'×'.join(map(str, shapes[0])) if shapes else ''}".strip()
        if not isinstance(x, Tensor) or ROWS not in x.shape[:-1]:
            if shapes:
                unsuitable.append(name)
            return
        kind = type(module), str(shapes), tuple(x.shape), x.dtype
        if kind not in found and isinstance(_first(output), Tensor):
            found[kind] = name, module, x.detach().clone()

    handles = [
        part.register_forward_hook(look, with_kwargs=True)
        for part in model.modules()
        if next(part.children(), None) is None
        # Such a module holds the weights of all experts.
        or any(w is not None and w.ndim > 2 for w in part._parameters.values())
    ]
    try:
        run()
    except Exception as error:
        raise UnsupportedError(f"exact=True: a pass fails ({first_line(error)})") from error
    finally:
        for handle in handles:
            handle.remove()
    if unsuitable:
        raise UnsupportedError(
            f"exact=True: {unsuitable[0]} is not given a row for every position (an expert gets "
            "those routed to it), so the result for one row depends on the others"
        )
    return [part for name, module, x in found.values() for part in _parts(name, module, x)]


def _parts(name: str, module: Any, x: Tensor) -> Iterator[_Part]:
    """Yield the input and rearrangements of it, because few values can agree by chance."""
    rows = x.shape.index(ROWS)
    for given, most in ((x, 1 << 30), (x.roll(1, -1), _FEW), (x.flip(-1), _FEW)):
        groups = [_first(module(group.contiguous())) for group in torch.split(given, _GROUP, rows)]
        expected = torch.cat(groups, rows)
        yield _Part(name, module, given, rows, expected, most)
        if expected.shape[-1] >= _MANY:
            break


def _first(output: Any) -> Any:
    return output if isinstance(output, Tensor) else output[0]
