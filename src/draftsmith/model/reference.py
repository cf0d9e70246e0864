"""What the self-test expects: logits of two texts, computed by the model as it was loaded.

The texts share their beginning, so they are the two branches of a small draft tree. Our passes
agree if they differ by no more than rounding. How much that is depends on the position: after some
texts, the last bit of an embedding decides the logits. So both texts are computed again with every
embedding and block output changed in its last bit. What that changes at a position is its
tolerance.

Shapes: `N` texts of a pass, `T` tokens of each, `V` vocabulary.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.draft import Draft
from draftsmith.errors import UnsupportedError
from draftsmith.model.forward import Forward, cache_of, is_compiled
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.own_cache import first_recurrent_state

PROMPT = 8
"""Tokens that both texts share, without the first node."""
PARENTS = (-1, 0, 1, 2, 3, 4, 0, 6, 7, 8, 9)
LEAVES = ((0, 1, 2, 3, 4, 5), (0, 6, 7, 8, 9, 10))
"""Root-to-leaf paths of the test tree, which part after one node."""
_SHARED = PROMPT + 1
_LENGTH = PROMPT + len(LEAVES[0])
_ROWS = 4
"""Rows of a pass over both texts: each unchanged, and with changed last bits."""

TRIALS = 3
"""Number of trials with changed last bits if each text has passes of its own."""
_MARGIN = 4
"""Factor on the change of one trial that still counts as rounding."""
_MOST_NOISE = 0.05
"""Largest tolerance, unless changed last bits change logits by more than `_MARGIN` times this."""
_SENSITIVE = 10
"""A position that is this many times as sensitive as the median has no largest tolerance."""
_DECIDED = 0.5
"""The same holds for a position where changed last bits change the logits by more than this."""


@dataclass(frozen=True)
class Expected:
    """One logits row (V,), and by how much (relatively) another may differ from it."""

    logits: Tensor
    tolerance: float


@dataclass(frozen=True)
class Finding:
    """Relative difference from what was expected, and its tolerance."""

    error: float
    tolerance: float
    what: str = "logits differ"
    sole: bool = False
    """Whether no other finding of its check would show the same fault."""

    @property
    def excess(self) -> float:
        """Ratio of error and tolerance, infinite for NaN. Up to 1 it is rounding."""
        return self.error / self.tolerance if self.error < math.inf else math.inf

    def __str__(self) -> str:
        return f"{self.what} by {self.error:.1e}, more than rounding ({self.tolerance:.1e})"


@dataclass(frozen=True)
class Reference:
    """Expected logits along each leaf path of the test tree, prompt included."""

    prompt: list[int]
    nodes: list[int]
    others: list[int]
    """The same number of other ids, for drafts that differ from the tree."""
    expected: list[list[Expected]]
    disturbed: float
    """How much different later tokens change the logits before them."""
    sizes: tuple[float, ...]
    """`Capabilities.position_sizes`."""
    state: Tensor | None
    """First recurrent state after the second text; None if there is none."""

    @classmethod
    def of(cls, loaded: LoadedModel, *, at_once: bool) -> Reference:
        """Compute the reference in one pass over four rows, or in passes over one row."""
        vocab = loaded.vocab_size
        # The lowest ids are often special, so use others, all different if the vocabulary allows.
        low, count = min(10, vocab // 4), len(PARENTS)
        ids = [low + (37 * i + 11) % min(vocab - low, 997) for i in range(PROMPT + 2 * count)]
        prompt, nodes, others = ids[:PROMPT], ids[PROMPT:-count], ids[-count:]
        texts = [prompt + [nodes[n] for n in leaf] for leaf in LEAVES]
        forward = Forward(loaded.model)
        if at_once:
            with _rounded(loaded, rows=_ROWS, exact=2):
                found, cache = _whole(forward, texts * 2)
            logits, trials = list(found[:2]), [list(found[2:])]
        else:
            passes = [_whole(forward, [text]) for text in texts]
            with _rounded(loaded, rows=1, exact=0):
                trials = [[_whole(forward, [text])[0][0] for text in texts] for _ in range(TRIALS)]
            logits, cache = [one[0] for one, _ in passes], passes[1][1]
        state = first_recurrent_state(cache)
        if state is not None and at_once:
            state = state[1:2]
        return cls(
            prompt,
            nodes,
            others,
            _expected(loaded, logits, trials),
            max(distance(a, b) for a, b in zip(*(one[:_SHARED] for one in logits), strict=True)),
            _sizes(cache, _ROWS if at_once else 1, loaded.dtype.itemsize),
            state,
        )

    @property
    def draft(self) -> Draft:
        """The test tree."""
        return Draft(tuple(self.nodes), PARENTS, ("self-test",) * len(self.nodes))

    def chain(self, nodes: Sequence[int]) -> Draft:
        """Return a path of nodes of the tree as a draft."""
        return Draft.chain([self.nodes[node] for node in nodes], "self-test")

    def text(self, leaf: int) -> list[int]:
        """Return the prompt and a leaf path."""
        return self.prompt + [self.nodes[node] for node in LEAVES[leaf]]

    def text_as_draft(self, start: int, end: int) -> Draft:
        """Return a part of the first text as a draft."""
        return Draft.chain(self.text(0)[start:end], "self-test")

    def at(self, got: Tensor, node: int) -> Finding:
        """Compare the logits (V,) after a node; -1 is the root."""
        if node == -1:
            return self.along(got, 0, PROMPT - 1)
        leaf = next(i for i, path in enumerate(LEAVES) if node in path)
        return self.along(got, leaf, PROMPT + LEAVES[leaf].index(node))

    def along(self, got: Tensor, leaf: int, position: int) -> Finding:
        """Compare the logits (V,) after a position of a leaf path."""
        wanted = self.expected[leaf][position]
        return Finding(distance(got, wanted.logits), wanted.tolerance)


def distance(got: Tensor, wanted: Tensor) -> float:
    """Relative distance of two logits rows (V,) at the best quarter of the wanted ones.

    Models may hide ids with logits such as -1e9, beside which no other difference counts.
    """
    best = wanted.topk(max(1, len(wanted) // 4)).indices
    return deviation(got[best.to(got.device)], wanted[best])


def deviation(got: Tensor, wanted: Tensor) -> float:
    """Relative distance of two vectors, after subtracting their means."""
    a, b = got.float(), wanted.float().to(got.device)
    b = b - b.mean()
    return float((a - a.mean() - b).norm() / b.norm().clamp_min(1e-30))


def rounding_floor(loaded: LoadedModel) -> float:
    """Difference that is rounding in any model with this dtype, hidden size and depth.

    Results are rounded to the dtype. Sums of `hidden_size` products, in any order, are rounded to
    float32, and the errors of all layers add up like a random walk.
    """
    sums = torch.finfo(torch.promote_types(loaded.dtype, torch.float32)).eps
    names = ("hidden_size", "num_hidden_layers")
    terms = math.prod(int(getattr(loaded.config, name, 0) or 1) for name in names)
    return _MARGIN * max(torch.finfo(loaded.dtype).eps, _MARGIN * sums * math.sqrt(terms))


def _expected(
    loaded: LoadedModel, logits: Sequence[Tensor], trials: Sequence[Sequence[Tensor]]
) -> list[list[Expected]]:
    noise = [
        [max(distance(other[i], row) for other in others) for i, row in enumerate(one)]
        for one, *others in zip(logits, *trials, strict=True)
    ]
    # The texts share these positions, so each adds trials for the other.
    for path in noise:
        path[:_SHARED] = map(max, *(one[:_SHARED] for one in noise))
    usual = statistics.median(change for path in noise for change in path)
    least = rounding_floor(loaded)

    def tolerance(change: float) -> float:
        free = change > min(_SENSITIVE * usual, _DECIDED)
        most = math.inf if free else max(_MOST_NOISE, change / _MARGIN)
        return min(max(least, change), most)

    return [
        [Expected(row, tolerance(change)) for row, change in zip(one, changes, strict=True)]
        for one, changes in zip(logits, noise, strict=True)
    ]


@contextmanager
def _rounded(loaded: LoadedModel, rows: int, exact: int) -> Iterator[None]:
    """Change every embedding and block output by a last bit, up or down at random.

    The first `exact` of the `rows` stay unchanged. So do all rows of a compiled model: its
    compiler would compile the hooks in permanently.
    """
    share = _MARGIN * torch.finfo(loaded.dtype).eps
    generator = torch.Generator("cpu").manual_seed(0)

    def off(_module: Any, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple | list):
            return (off(None, None, output[0]), *output[1:])
        shape = output.shape
        texts = [d for d in range(len(shape)) if shape[d : d + 2] == (rows, _LENGTH)]
        sign = torch.randint(2, shape, generator=generator, dtype=torch.int8, device="cpu")
        sign = 2 * sign - 1
        if exact and not texts:
            return output
        if exact:
            sign.narrow(texts[0], 0, exact).zero_()
        return output * (1 + share * sign.to(output.device, output.dtype))

    blocks = loaded.blocks if loaded.blocks is not None else ()
    watched = () if is_compiled(loaded.model) else (loaded.model.get_input_embeddings(), *blocks)
    hooks = [module.register_forward_hook(off) for module in watched]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _whole(forward: Forward, texts: Sequence[list[int]]) -> tuple[Tensor, Any]:
    """Return (N, T, V) logits of texts computed together, and the model's own cache.

    A cache is requested although no pass follows, because some models share keys between layers
    only then. The cache is None if the model fails with one.
    """
    positions = [list(range(len(texts[0])))] * len(texts)
    try:
        output = forward(texts, positions, None, None, 0)
    except (ValueError, TypeError, AttributeError, NotImplementedError):
        output = forward(texts, positions, None, False, 0)
    if output.logits.shape[1] < len(texts[0]):
        raise UnsupportedError("it returns logits of fewer positions than it is asked for")
    return output.logits[:, -len(texts[0]) :], cache_of(output)


def _sizes(cache: Any, rows: int, itemsize: int) -> tuple[float, ...]:
    """Read `Capabilities.position_sizes` from a cache of the model's own.

    Configurations describe them in too many ways: shared heads, latent attention, sizes by layer.
    """
    found = []
    for layer in getattr(cache, "layers", ()):
        pair = (getattr(layer, name, None) for name in ("keys", "values"))
        both = [t for t in pair if isinstance(t, Tensor) and t.numel()]
        found.append(sum(t.nbytes / t.shape[-2] for t in both) / rows / itemsize)
    return tuple(found) if any(found) else ()
