"""`core.target.Target` over a Hugging Face model.

A runner keeps count of the computed and pending tokens of each row and of the room for drafts. A
`KVStore` holds keys and values; `Forward` calls the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from draftsmith.core.cost import CostCurve
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import common_prefix
from draftsmith.core.target import NO_NEEDS, NO_TAPS, Needs, RowOutput, Shape, Taps, ahead
from draftsmith.errors import DrafterError, OptionError, PromptError
from draftsmith.model.exact.store import ExactStore
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.own_cache import NoStore, OwnCacheStore
from draftsmith.model.packed import PackedStore
from draftsmith.model.rope import rope_boundary
from draftsmith.model.rows import KVStore, SequenceRow
from draftsmith.model.static import WIDTHS, StaticStore
from draftsmith.model.taps import RowTaps, check

_CHUNK_CPU, _CHUNK_ACCELERATOR = 512, 2048
_MOST_PENDING = 16
"""A replaying row with more pending tokens than this absorbs them in a pass without a draft."""


def new_cost(loaded: LoadedModel) -> CostCurve:
    """Return a curve for the passes of a model, without measurements."""
    cold = loaded.device.type != "cpu"
    if loaded.store == "static" and loaded.exact is None:
        return CostCurve([width - 1 for width in WIDTHS if width > 1], cold, padded=True)
    return CostCurve(cold=cold)


class Runner:
    """A `Target` that runs one model over many sequences. Cheap to make.

    Runners of one model share its `Forward` and the CUDA graphs, with their buffers and their lock.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._capabilities = loaded.capabilities
        self._context = loaded.context_length
        self._boundary = rope_boundary(loaded.config)
        on_cpu = loaded.device.type == "cpu"
        self.chunk = _CHUNK_CPU if on_cpu else _CHUNK_ACCELERATOR
        """Most positions of a prefill pass."""
        self.store = _store(loaded)
        """Keeps keys and values, or states, of all rows."""
        self.vocab_size = loaded.vocab_size
        self.shape: Shape = loaded.capabilities.shape

    def open(self, ids: Sequence[int], needs: Needs = NO_NEEDS) -> SequenceRow:
        """Add a sequence; nothing is computed yet.

        Raises PromptError if `ids` is empty, OptionError or UnsupportedError for `needs` that this
        model cannot fulfil.
        """
        if not ids:
            raise PromptError("the prompt has no tokens; a model needs at least one to continue")
        taps, pending = self._new_taps(needs), [int(i) for i in ids]
        row = SequenceRow(pending, taps=taps)
        self.store.open(row)
        return row

    def _new_taps(self, needs: Needs) -> RowTaps | None:
        # A plain target drafts nothing, so nothing reads taps.
        if not needs.taps or self.shape == "plain":
            return None
        check(needs, self.loaded, "a drafter")
        return RowTaps(needs)

    @torch.inference_mode()
    def taps(self, row: SequenceRow) -> Taps:
        """Return what was recorded of this row: `NO_TAPS` before its prompt was computed."""
        return NO_TAPS if row.taps is None else row.taps.show(row.root)

    @torch.inference_mode()
    def close(self, row: SequenceRow) -> None:
        self.store.close(row)

    def splits(self, row: SequenceRow) -> bool:
        """Whether the pending tokens may be split over several passes.

        False for plain targets, and where rotary angles depend on the length of the pass.
        """
        other_angles = self._boundary is not None and self._boundary.beyond(row.root)
        return self.shape != "plain" and not other_angles

    def prefill(self, row: SequenceRow, most: int = 1) -> None:
        """Compute all pending tokens that need not share a pass with the root, in chunks."""
        while left := ahead(self, row, row.taps is not None, most):
            self.forward([row], [EMPTY], [min(self.chunk, left)])
            self.commit([row], [()], [()])

    def room(self, row: SequenceRow) -> int:
        if self.shape == "plain":
            return 0
        if self._capabilities.cache == "replay" and len(row.pending) > _MOST_PENDING:
            return 0
        room = (self._context or 1 << 30) - 1 - row.root
        if self._boundary is not None:
            limit = self._boundary.room(row.root)
            room = room if limit is None else min(room, limit)
        return max(room, 0)

    @torch.inference_mode()
    def forward(
        self,
        rows: Sequence[SequenceRow],
        drafts: Sequence[Draft],
        take: Sequence[int] | None = None,
    ) -> list[RowOutput]:
        """Run one pass, as `Target.forward`.

        Raises DrafterError for a draft of a shape that this target cannot verify, OptionError for a
        chunk with a draft or of a row that does not split, and UnsupportedError if decoder blocks
        with different windows were removed.
        """
        if self.shape == "plain" and any(drafts):
            raise DrafterError("this target decodes plainly (room is 0): pass an empty draft")
        if self.shape == "chain" and not all(draft.is_chain for draft in drafts):
            raise DrafterError("this target verifies chains only: pass draft.first_branch()")
        for place, row in enumerate(rows):
            rest = 0 if take is None else len(row.pending) - take[place]
            if rest and (drafts[place] or not self.splits(row)):
                raise OptionError(
                    f"take={len(row.pending) - rest}, but all {len(row.pending)} pending tokens "
                    "must share one pass if there is a draft, or if splits(row) is false"
                )
            row.taken = len(row.pending) - rest
        return self.store.verify(rows, drafts)

    @cached_property
    def _accelerators(self) -> list[torch.device]:
        """Devices that compute layers, except CPUs."""
        kind, model = torch.accelerator.current_accelerator(), self.loaded.model
        devices = {self.loaded.device, *(weight.device for weight in model.parameters())}
        return [device for device in devices if kind and device.type == kind.type]

    def wait(self) -> None:
        """Block until the last pass has finished: devices compute asynchronously."""
        for device in self._accelerators:
            torch.accelerator.synchronize(device)

    @torch.inference_mode()
    def commit(
        self,
        rows: Sequence[SequenceRow],
        paths: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        for row, path, emitted in zip(rows, paths, tokens, strict=True):
            if row.taps is not None:  # before `keep` moves the keys of the pass
                row.taps.keep(row.cached, row.taken, path)
            kept = self.store.keep(row, path)
            row.pending.extend(emitted)
            row.ids.extend(row.pending[:kept])
            del row.pending[:kept]
            self._refresh(row)

    @torch.inference_mode()
    def extend(self, row: SequenceRow, ids: Sequence[int], needs: Needs = NO_NEEDS) -> int:
        """Make `ids` the row's committed tokens and return how many cached positions were kept.

        At least the last token stays pending, even if the cache has it. Raises the errors of
        `open`.
        """
        if not ids:
            raise PromptError("a sequence cannot become empty; close it instead")
        new, root = ids if isinstance(ids, list) else list(ids), len(ids) - 1
        common = min(common_prefix(row.ids, new), root)
        if row.taps is None or row.taps.needs != needs:
            row.taps = self._new_taps(needs)
        if row.taps is not None:
            common = row.taps.reusable(common, root)
        if self.shape == "plain" and root != common:
            # A plain target computes a prompt in one pass or not at all.
            common = 0
        if self._boundary is not None and not self._boundary.keeps(common, row.cached, root):
            common = 0
        kept = self.store.truncate(row, common)
        if row.taps is not None:
            row.taps.truncate(kept)
        # In place, without a copy: draft models call this once per draft.
        del row.ids[kept:]
        row.pending = new[kept:]
        return kept

    def row_bytes(self, positions: int, rewinds: bool = True) -> int:
        """Bytes of keys and values of `positions` positions of a row with this `rewinds`."""
        forgets = self.store.forgets and not rewinds
        return self.loaded.row_bytes(positions, self.chunk if forgets else None)

    @torch.inference_mode()
    def mark(self, row: SequenceRow) -> None:
        """Keep what `copy` needs to copy the row's current positions after the row has grown."""
        self.store.mark(row)

    def most_mark_bytes(self, positions: int, rewinds: bool) -> int:
        """Upper bound of `KVStore.mark_bytes` of a row with `positions` positions, recurrent states
        excluded.
        """
        if self._capabilities.cache == "replay":
            return self.loaded.row_bytes(positions) if self.shape == "chain" else 0
        if rewinds or not self.store.forgets:
            return 0
        return self.loaded.row_bytes(positions, self.chunk, windowed=True)

    @torch.inference_mode()
    def copy(self, source: SequenceRow, row: SequenceRow, length: int) -> None:
        """Copy the first `length` positions of `source` to a new row.

        Does nothing if they are gone, or if the row's own pass would give them other rotary angles.
        """
        boundary = self._boundary
        if boundary is not None and not boundary.keeps(length, source.cached, row.root):
            return
        taps = None if row.taps is None else source.taps and source.taps.copy(length)
        if row.taps is not None and taps is None:
            return
        if self.store.copy(source, row, length):
            row.taps = taps
            row.ids, row.pending = row.pending[:length], row.pending[length:]

    @torch.inference_mode()
    def unshare(self, row: SequenceRow) -> None:
        """Copy what an idle row shares with other rows, so that it keeps none of their memory."""
        if row.taps is not None:
            row.taps.forget_attention()
        self.store.unshare(row)

    def _refresh(self, row: SequenceRow) -> None:
        """Drop a cache if its rotary angles do not fit the next pass, which then reads everything.

        Phi-3's own `generate` does the same. For classes that keep such a cache in `generate`, such
        as Llama, the answer is that without a cache.
        """
        if row.cached and self._boundary is not None and self._boundary.stale(row.cached, row.root):
            self.store.truncate(row, 0)
            row.ids, row.pending = [], row.ids + row.pending


def _store(loaded: LoadedModel) -> KVStore:
    if loaded.capabilities.cache == "none":
        return NoStore(loaded)
    if not loaded.capabilities.packed:
        return OwnCacheStore(loaded)
    if loaded.exact is not None:
        return ExactStore(loaded, loaded.exact)
    return StaticStore(loaded) if loaded.store == "static" else PackedStore(loaded)
