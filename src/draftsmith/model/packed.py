"""Sequences with keys and values of their own, the tokens of all of them in one sequence per pass.

Linear layers then compute exactly the tokens there are; attention (`attention.py`) goes through the
spans. Nothing beyond a row's end is ever read, so what was rejected needs no undoing.

Shapes: `n` layers that are alike, `K` key heads, `C` slots allocated, `D` and `W` widths of keys
and values; `Q` positions of a pass, all rows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftsmith.core.draft import Draft
from draftsmith.core.target import RowOutput
from draftsmith.model.attention import BLOCK, MOST_IN_BLOCKS, Packed
from draftsmith.model.forward import Forward
from draftsmith.model.masks import EVERYTHING, Span, visible
from draftsmith.model.pass_cache import PassCache
from draftsmith.model.rope import RopeBoundary
from draftsmith.model.rows import KVStore, SequenceRow, finite
from draftsmith.model.taps import PassTaps, Place, record
from draftsmith.model.windows import Window

_SPARE = 8
"""Slots that a row is given beyond those it needs, besides a tenth of them."""
_ABREAST = 8
"""Rows at most that share a buffer, which is freed when the last of them has left it."""


@dataclass(slots=True, eq=False)
class Slots:
    """What one row has of `n` layers that are alike; slot s holds position s + `dropped`."""

    window: Window | None
    layers: tuple[int, ...]
    keys: Tensor
    """(R, n, K, C, D): of R rows that became alike in the same pass."""
    values: Tensor
    """(R, n, K, C, W)"""
    place: int = 0
    """This row's among the R."""
    dropped: int = 0
    """Positions that are gone."""
    settled: bool = True
    """Whether all layers that are alike are in one place."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for layers that one pair of tensors can hold."""
        both = ((t.shape[2], t.shape[4], t.dtype, t.device) for t in (self.keys, self.values))
        return self.window, self.dropped, *both

    def fits(self, length: int) -> bool:
        """Whether there are slots for so many positions."""
        return self.settled and length - self.dropped <= self.keys.shape[3]

    def parts(self, start: int, end: int, rows: int = 1) -> tuple[Sequence[Tensor], ...]:
        """Keys (rows, K, end - start, D) and values of these positions, by layer; views.

        `rows`: of so many that lie abreast, this one first.
        """
        first, count = start - self.dropped, end - start
        keys, values = self.keys.narrow(3, first, count), self.values.narrow(3, first, count)
        if rows < len(keys):
            keys, values = keys.narrow(0, self.place, rows), values.narrow(0, self.place, rows)
        return keys.unbind(1), values.unbind(1)

    def move(self, sources: Sequence[int], start: int) -> None:
        """Copy the positions `sources` to `start` and after."""
        index = torch.tensor(sources, device=self.keys.device) - self.dropped
        for buffer in (self.keys[self.place], self.values[self.place]):
            to = buffer.narrow(2, start - self.dropped, len(sources))
            to.copy_(buffer.index_select(2, index))

    def abreast(self, other: Slots) -> bool:
        """Whether the other row's are the next to these."""
        return other.keys is self.keys and other.place == self.place + 1


def emptied(like: Tensor, shape: Sequence[int], columns: bool) -> Tensor:
    """Room of a shape (…, C, D); `columns`: a slot's numbers lie C apart, not in a row."""
    if columns:
        return like.new_empty((*shape[:-2], shape[-1], shape[-2])).transpose(-1, -2)
    return like.new_empty(shape)


def grown(
    rows: Sequence[Sequence[Slots]], length: int, dropped: int, slots: int, columns: bool
) -> list[Slots]:
    """The alike layers of each of these rows in one place with so many slots, the rows abreast.

    Positions from `dropped` up to `length` are kept. `columns`: how keys lie (`emptied`).
    """
    one, kept = rows[0][0], length - dropped
    layers = tuple(layer for part in rows[0] for layer in part.layers)

    def copied(old: Tensor, buffers: Sequence[Sequence[Tensor]], columns: bool = False) -> Tensor:
        shape = len(rows), len(layers), old.shape[2], slots, old.shape[4]
        new = emptied(old, shape, columns)
        for own, parts in zip(new.narrow(3, 0, kept), buffers, strict=True):
            torch.cat([part.narrow(2, dropped - one.dropped, kept) for part in parts], out=own)
        return new

    keys = copied(one.keys, [[part.keys[part.place] for part in row] for row in rows], columns)
    values = copied(one.values, [[part.values[part.place] for part in row] for row in rows])
    return [Slots(one.window, layers, keys, values, i, dropped) for i in range(len(rows))]


class PackedPass(PassCache):
    """The cache of one pass: every row's new keys go behind its own, in its own slots.

    Rows that lie abreast, are equally long and add one position each make one span.
    """

    columns: ClassVar[bool] = False
    """How keys lie in their slots: see `emptied`."""
    merges: ClassVar[bool] = True
    """Whether rows may make one span."""

    def __init__(
        self,
        rows: Sequence[SequenceRow],
        parts: Sequence[Span],
        windows: Sequence[Window | None],
        looked: bool,
    ) -> None:
        """`windows`: one for all layers, or one per layer. `looked`: into each row's own span."""
        super().__init__()
        self.longest = max(part.cached for part in parts)
        self._windows = windows
        runs = _runs(rows, parts, merge=self.merges and not looked)
        spans = self._spans = [parts[first] for first, _ in runs]
        self._firsts = {
            window: [0 if window is None else window.first(span.cached) for span in spans]
            for window in set(windows)
        }
        self._masks: dict[Any, list[Tensor | None]] = {}
        self._widths = [span.width * count for span, (_, count) in zip(spans, runs, strict=True)]
        self._several = [i for i, (_, count) in enumerate(runs) if count > 1]
        self._new = {i: rows[first] for i, (first, _) in enumerate(runs) if not spans[i].cached}
        """Spans of rows without slots: which layers there are shows in their first pass."""
        views, layers = [], ()
        for i, (span, (first, count)) in enumerate(zip(spans, runs, strict=True)):
            if i not in self._new:
                state, end = rows[first].state, span.cached + span.width
                layers = tuple(layer for slots in state for layer in slots.layers)
                own = [
                    slots.parts(span.cached, end, count)
                    + slots.parts(self._firsts[slots.window][i], end, count)
                    for slots in state
                ]
                views.append([tuple(chain(*kind)) for kind in zip(*own, strict=True)])
        # By layer: where keys and values go, and the keys and values that are read, by span.
        by_kind = [zip(*kind, strict=True) for kind in zip(*views, strict=True)]
        self._views: dict[int, Any] = dict(zip(layers, zip(*by_kind, strict=True), strict=True))

    def first(self, layer_idx: int, span: int) -> int:
        """The position of the first key that a span sees in a layer."""
        return self._firsts[self._window(layer_idx)][span]

    def _window(self, layer_idx: int) -> Window | None:
        return self._windows[layer_idx if len(self._windows) > 1 else 0]

    def _masks_of(self, window: Window | None, device: torch.device) -> list[Tensor | None]:
        """By span; made once for all layers of a window, and of a device if they lie on several."""
        if (window, device) not in self._masks:
            both = zip(self._spans, self._firsts[window], strict=True)
            self._masks[window, device] = [
                _mask(span, first, window, device) for span, first in both
            ]
        return self._masks[window, device]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys (1, K, Q, D) and values behind each row's; returns both, with all to read."""
        window = self._window(layer_idx)
        both = key_states, value_states
        alone = len(self._widths) == 1 and self._widths[0] == key_states.shape[2]
        new = [[s] if alone else self._split(s) for s in both]
        views = self._views.get(layer_idx, ((), (), (), ()))
        if self._new:
            views = [list(kind) for kind in views]
            for i, row in self._new.items():
                kept = (self.columns, False)
                keys, values = (
                    emptied(t[i], (1, *t[i].shape), c) for t, c in zip(new, kept, strict=True)
                )
                row.state.append(Slots(window, (layer_idx,), keys, values, settled=False))
                for kind, own in zip(views, (keys, values) * 2, strict=True):
                    kind.insert(i, own[0])
        for states in new:
            for i in self._several:  # one position of each row
                states[i] = states[i].transpose(0, 2)
        torch._foreach_copy_([*views[0], *views[1]], [*new[0], *new[1]])
        masks = self._masks_of(window, key_states.device)
        packed = Packed(self._widths, masks, views[2], views[3], self._attend(layer_idx))
        self.given[layer_idx] = key_states.packed = packed  # type: ignore[attr-defined]
        return key_states, value_states

    def restart(self) -> None:
        super().restart()
        for row in self._new.values():
            row.state = []

    def _split(self, states: Tensor) -> list[Tensor]:
        """By span, of (1, K, Q, D); nobody keeps what follows the last."""
        return list(states.narrow(2, 0, sum(self._widths)).split_with_sizes(self._widths, 2))

    def _attend(self, _layer: int) -> Any:
        """Another way to attend in a layer, as `Packed.attend`; None: ours."""
        return None


def _reaches(state: Sequence[Slots], length: int) -> bool:
    """Whether a row can go on behind so many positions with these slots."""
    return all(s.dropped <= (s.window.first(length) if s.window else 0) for s in state)


def _runs(rows: Sequence[SequenceRow], parts: Sequence[Span], merge: bool) -> list[tuple[int, int]]:
    """(first, count) of neighbours that make one span."""
    runs: list[tuple[int, int]] = []
    for place, (row, part) in enumerate(zip(rows, parts, strict=True)):
        before = place - 1
        if (
            merge
            and runs
            and part.cached
            and part.width == parts[before].width == 1
            and part.cached == parts[before].cached
            and all(map(Slots.abreast, rows[before].state, row.state))
        ):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((place, 1))
    return runs


def _mask(span: Span, first: int, window: Window | None, device: torch.device) -> Tensor | None:
    """(1, 1, q, S) for a span that reads from position `first` on; None where none is needed."""
    if span.width == 1:
        return None  # what it reads begins where its only query looks
    if window is not None and max(span.positions) < window.size:
        window = None
    alike = not span.cached and window is None and span.draft.is_chain
    if alike and not (BLOCK < span.width <= MOST_IN_BLOCKS and device.type == "cpu"):
        return None  # the causal kernels need none; blocks do
    # Blocking: MPS may read the source of any other copy after it was freed.
    return visible(span, first, window).to(device)


class PackedStore(KVStore):
    """Rows that share passes and nothing else."""

    copies = True
    passes: ClassVar[type[PackedPass]] = PackedPass

    def __init__(
        self,
        forward: Forward,
        kinds: Sequence[str],
        windows: Sequence[Window | None],
        boundary: RopeBoundary | None,
        blocks: Any,
        context: int | None,
    ) -> None:
        """`kinds`: layer types that the model asks masks for."""
        self._forward = forward
        everything = EVERYTHING.to(forward.device)
        self._mask = everything if len(kinds) == 1 else dict.fromkeys(kinds, everything)
        self._windows = windows
        self._boundary = boundary
        self._blocks = blocks
        self._context = context
        self._rows: set[SequenceRow] = set()

    def open(self, row: SequenceRow) -> None:
        row.state = []
        self._rows.add(row)

    def close(self, row: SequenceRow) -> None:
        """Free what it has; no other row moves. A second time changes nothing."""
        self._rows.discard(row)
        row.state = None

    def verify(self, rows: Sequence[SequenceRow], drafts: Sequence[Draft]) -> list[RowOutput]:
        """One pass for all rows whose rotary angles agree."""
        if self._boundary is None:
            return self._pass(rows, drafts)
        found: dict[int, RowOutput] = {}
        for group in self._groups(rows, self._boundary):
            outputs = self._pass([rows[i] for i in group], [drafts[i] for i in group])
            found.update(zip(group, outputs, strict=True))
        return [found[i] for i in range(len(rows))]

    def keep(self, row: SequenceRow, path: Sequence[int]) -> int:
        """Gather the path behind the taken tokens; what is in place already costs nothing."""
        start = row.cached + row.taken
        moved = next((i for i, node in enumerate(path) if node != i), len(path))
        if moved < len(path):
            for slots in row.state:
                slots.move([start + node for node in path[moved:]], start + moved)
        return super().keep(row, path)

    def mark(self, row: SequenceRow) -> None:
        """The slots of layers with windows: what the row drops later stays in these buffers."""
        drops = [] if row.rewinds else row.state
        windowed = [slots for slots in drops if slots.window is not None]
        row.mark = (row.cached, windowed) if windowed else None

    def mark_bytes(self, row: SequenceRow) -> int:
        held = () if row.mark is None else row.mark[1]
        return sum(s.keys.nbytes + s.values.nbytes for s in held if s not in row.state)

    def reach(self, row: SequenceRow, length: int) -> int:
        return self._slots(row, length)[0]

    def truncate(self, row: SequenceRow, length: int) -> int:
        """A shorter length is all it takes, unless keys it needs were dropped and not marked."""
        kept, slots = self._slots(row, length)
        if row.mark is not None and (slots is not row.state or kept < row.mark[0]):
            row.mark = None  # its buffers are written again from here on
        row.state = slots
        return kept

    def _slots(self, row: SequenceRow, length: int) -> tuple[int, list[Slots]]:
        """How many of the first positions can be kept, and the slots that have them."""
        if _reaches(row.state, length):
            return length, row.state
        if row.mark is not None:
            marked, windowed = row.mark
            length = min(length, marked)
            if _reaches(windowed, length):
                rest = [slots for slots in row.state if slots.window is None]
                return length, sorted([*rest, *windowed], key=lambda s: s.layers)
        return 0, row.state

    def copy(self, source: SequenceRow, row: SequenceRow, length: int) -> bool:
        kept, slots = self._slots(source, length)
        if kept < length:
            return False
        row.state = [self._alone(s, length) for s in slots]
        return True

    def _alone(self, slots: Slots, length: int) -> Slots:
        """A copy of them up to a length, in a buffer of its own."""
        room, columns = length - slots.dropped, self.passes.columns
        return grown([[slots]], length, slots.dropped, room, columns)[0]

    def part(self, row: SequenceRow) -> None:
        if any(len(slots.keys) > 1 for slots in row.state):
            self.copy(row, row, row.cached)
        if row.mark is not None and any(len(slots.keys) > 1 for slots in row.mark[1]):
            length, slots = row.mark
            row.mark = length, [self._alone(s, length) for s in slots]

    def contents(self, row: SequenceRow) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (K, n, D) of a row, one pair per layer: of its last n positions."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for slots in row.state:
            keys, values = slots.parts(slots.dropped, row.cached)
            pairs = ((k[0], v[0]) for k, v in zip(keys, values, strict=True))
            found.update(zip(slots.layers, pairs, strict=True))
        return [found[layer] for layer in sorted(found)]

    def bytes_for(self, rows: Sequence[int], kept: Sequence[int]) -> int:
        """A row that grows has its old buffer beside the new one, which is a tenth too large; and a
        buffer of several rows is there until the last of them has left it."""
        return 2 * sum(rows) + (sum(rows) + sum(kept)) // 10 + sum(kept)

    def held(self) -> int:
        """Bytes of keys and values of all rows."""
        tensors = (t for row in self._rows for s in row.state for t in (s.keys, s.values))
        storages = {t.data_ptr(): t.untyped_storage() for t in tensors}
        return sum(storage.nbytes() for storage in storages.values())

    def _groups(self, rows: Sequence[SequenceRow], boundary: RopeBoundary) -> list[list[int]]:
        """Rows that may share a pass: one pass has one set of rotary angles."""
        groups: dict[tuple[bool, int], list[int]] = {}
        for place, row in enumerate(rows):
            beyond = boundary.beyond(row.root)
            alone = beyond and boundary.grows
            groups.setdefault((beyond, place if alone else 0), []).append(place)
        return list(groups.values())

    def _pass(self, rows: Sequence[SequenceRow], drafts: Sequence[Draft]) -> list[RowOutput]:
        spans = [
            Span(row.cached, row.taken, draft) for row, draft in zip(rows, drafts, strict=True)
        ]
        self._reserve(rows, spans)
        looked = any(row.taps is not None for row in rows)  # then into each row's own span
        cache = self.passes(rows, spans, self._windows, looked)
        tokens, positions, needed = [], [], []
        for row, span in zip(rows, spans, strict=True):
            tokens += [*row.pending[: row.taken], *span.draft.tokens]
            positions += span.positions
            own = 0 if row.is_chunk else 1 + len(span.draft)
            needed.append(range(len(tokens) - own, len(tokens)))
        taps = self._record(rows, spans, cache) if looked else None
        wanted = [i for one in needed for i in one] or [len(tokens) - 1]
        self._fill(tokens, positions, wanted)
        last = self._forward.logits_of(wanted, len(tokens))
        logits = self._forward([tokens], [positions], self._mask, cache, last, taps).logits[0]
        sound = finite(logits[:, None]) if any(drafts) else [True] * len(logits)
        outputs, picked = [], 0
        for draft, one in zip(drafts, needed, strict=True):
            begin = len(logits) - len(tokens) + one.start  # of those asked for and maybe others
            if not isinstance(last, int):
                begin, picked = picked, picked + len(one)
            end = begin + len(one)
            outputs.append(RowOutput(logits[begin:end], finite=not draft or all(sound[begin:end])))
        return outputs

    def _fill(self, tokens: list[int], positions: list[int], wanted: list[int]) -> None:
        """Add what a pass needs beyond that which its rows ask for; here nothing."""

    def _record(
        self, rows: Sequence[SequenceRow], spans: Sequence[Span], cache: PackedPass
    ) -> PassTaps | None:
        ends = accumulate((span.width for span in spans), initial=0)
        places = [Place(span=i, queries=slice(a, b)) for i, (a, b) in enumerate(pairwise(ends))]
        chunks = {i for i, row in enumerate(rows) if row.is_chunk}
        return record([row.taps for row in rows], self._blocks, places, chunks, cache.first)

    def _reserve(self, rows: Sequence[SequenceRow], spans: Sequence[Span]) -> None:
        """Make room for the pass; rows that come out alike are put abreast."""
        wanted: dict[Any, list[tuple[SequenceRow, list[Slots]]]] = {}
        for row, span in zip(rows, spans, strict=True):
            if not row.cached:
                row.state = []
            end = row.cached + span.width
            full: dict[Any, list[Slots]] = {}
            for slots in row.state:
                if not slots.fits(end):
                    full.setdefault(slots.kind, []).append(slots)
            for kind, alike in full.items():
                window, dropped, *_ = kind
                if window is not None and not row.rewinds:
                    dropped = max(dropped, window.first(row.cached))
                wanted.setdefault((row.cached, end, dropped, kind), []).append((row, alike))
        for (length, end, dropped, _), group in wanted.items():
            slots = end - dropped
            spare = slots // 10 + _SPARE
            if self._context is not None and end <= self._context:  # a good last size
                spare = min(spare, self._context - end)
            for i in range(0, len(group), _ABREAST):
                some = group[i : i + _ABREAST]
                alikes, room = [alike for _, alike in some], slots + spare
                wider = grown(alikes, length, dropped, room, self.passes.columns)
                for (row, alike), one in zip(some, wider, strict=True):
                    others = (s for s in row.state if s not in alike)
                    row.state = sorted([*others, one], key=lambda s: s.layers)
