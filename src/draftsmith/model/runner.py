"""`core.target.Target` over a Hugging Face model.

A runner counts: which tokens are computed, which are pending, how far a draft may reach. What the
past is kept in (`KVStore`) and how the model is called (`Forward`) are its two parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import common_prefix
from draftsmith.core.target import NO_NEEDS, NO_TAPS, Needs, RowOutput, Shape, Taps, ahead
from draftsmith.errors import DrafterError, OptionError, PromptError, UnsupportedError
from draftsmith.model.exact.store import ExactStore
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.own_cache import NoStore, OwnCacheStore
from draftsmith.model.packed import PackedStore
from draftsmith.model.rope import rope_boundary
from draftsmith.model.rows import KVStore, SequenceRow
from draftsmith.model.taps import RowTaps, check
from draftsmith.model.windows import Window, layer_windows, windows_by_layer

_CHUNK_CPU, _CHUNK_ACCELERATOR = 512, 2048
_MOST_PENDING = 16
"""A replaying row with more pending tokens than this takes a step without drafts to absorb them."""


class Runner:
    """A `Target` that runs one model over many sequences; cheap to make, shares nothing."""

    def __init__(
        self,
        loaded: LoadedModel,
        chunk: int | None = None,
        rewinds: bool = True,
    ) -> None:
        """`chunk`: most positions per prefill pass (512 on a CPU, 2048 elsewhere).

        `rewinds`: what a new row's `rewinds` is.
        """
        self.loaded = loaded
        self._abilities = loaded.capabilities
        self._context = loaded.context_length
        self._boundary = rope_boundary(loaded.config)
        on_cpu = loaded.device.type == "cpu"
        self.chunk = chunk or (_CHUNK_CPU if on_cpu else _CHUNK_ACCELERATOR)
        self._rewinds = rewinds
        self._windows: tuple[Window | None, ...] = (None,)
        """By layer; a model that masks by itself sees all slots."""
        self._memory = self._make_memory()
        self._vocab_size = loaded.vocab_size
        kind = torch.accelerator.current_accelerator()
        devices = {loaded.device, *(weight.device for weight in loaded.model.parameters())}
        self._accelerators = [device for device in devices if kind and device.type == kind.type]
        """Where its layers are computed, but for a CPU."""

    def _make_memory(self) -> KVStore:
        loaded, abilities, forward = self.loaded, self._abilities, self.loaded.forward
        if abilities.cache == "none":
            return NoStore(forward)
        if abilities.cache != "packed":
            options = abilities.cache, abilities.shape, loaded.blocks
            return OwnCacheStore(forward, loaded.config, *options)
        self._windows = windows_by_layer(loaded.config)
        kinds = tuple(layer_windows(loaded.config))
        rest = forward, kinds, self._windows, self._boundary, loaded.blocks, self._context
        if loaded.exact is not None:
            return ExactStore(loaded.exact, *rest)
        return PackedStore(*rest)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def shape(self) -> Shape:
        return self._abilities.shape

    def open(self, ids: Sequence[int], needs: Needs = NO_NEEDS) -> SequenceRow:
        """Add a sequence; nothing is computed yet.

        Raises PromptError if `ids` is empty, OptionError or UnsupportedError for `needs` that this
        model cannot fulfil.
        """
        if not ids:
            raise PromptError("the prompt has no tokens; a model needs at least one to continue")
        taps, pending = self._new_taps(needs), [int(i) for i in ids]
        row = SequenceRow(pending, taps=taps, rewinds=self._rewinds)
        self._memory.open(row)
        return row

    def _new_taps(self, needs: Needs) -> RowTaps | None:
        if not needs.taps or self.shape == "plain":  # which drafts nothing anyway
            return None
        check(needs, self.loaded, "a drafter")
        return RowTaps(needs)

    @torch.inference_mode()
    def taps(self, row: SequenceRow) -> Taps:
        """What was recorded of this row; nothing before its prompt was computed."""
        return NO_TAPS if row.taps is None else row.taps.show(row.root)

    @torch.inference_mode()
    def close(self, row: SequenceRow) -> None:
        self._memory.close(row)

    def splits(self, row: SequenceRow) -> bool:
        """Not where rotary angles depend on the length of the pass, nor for plain targets."""
        other_angles = self._boundary is not None and self._boundary.beyond(row.root)
        return self.shape != "plain" and not other_angles

    def prefill(self, row: SequenceRow, rest: int = 1) -> None:
        """Leaves to `forward` what must share one pass with its root."""
        while left := ahead(self, row, row.taps is not None, rest):
            self.forward([row], [EMPTY], [min(self.chunk, left)])
            self.commit([row], [()], [()])

    def room(self, row: SequenceRow) -> int:
        if self.shape == "plain":
            return 0
        if self._abilities.cache == "replay" and len(row.pending) > _MOST_PENDING:
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
        """Raises DrafterError for a draft of a shape that this target cannot verify.

        Raises OptionError for a chunk that has a draft, or of a row that does not split;
        UnsupportedError where blocks were removed whose windows differed.
        """
        blocks, layers = self.loaded.blocks, len(self._windows)
        if layers > 1 and blocks is not None and len(blocks) != layers:
            raise UnsupportedError(
                f"decoder blocks: {len(blocks)} now, {layers} when the model was loaded; how far "
                "each looks back goes by its place, so load the model again"
            )
        if self.shape == "plain" and any(drafts):
            raise DrafterError("this target decodes plainly (room is 0): pass an empty draft")
        if self.shape == "chain" and not all(draft.is_chain for draft in drafts):
            raise DrafterError("this target verifies chains only: pass draft.first_branch()")
        for place, row in enumerate(rows):
            rest = 0 if take is None else len(row.pending) - take[place]
            if rest and (drafts[place] or not self.splits(row)):
                raise OptionError(
                    f"take={len(row.pending) - rest}, but all {len(row.pending)} pending tokens "
                    "must share one pass: with a draft, and where splits(row) is false"
                )
            self._refresh(row)
            row.taken = len(row.pending) - rest
        return self._memory.verify(rows, drafts)

    def wait(self) -> None:
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
            if row.taps is not None:  # while the keys of the pass are still in their places
                row.taps.keep(row.cached, row.taken, path)
            kept = self._memory.keep(row, path)
            row.pending.extend(emitted)
            _count(row, kept)

    @torch.inference_mode()
    def extend(self, row: SequenceRow, ids: Sequence[int], needs: Needs = NO_NEEDS) -> int:
        """At least the last token stays pending, even where the cache has it. Raises as `open`."""
        if not ids:
            raise PromptError("a sequence cannot become empty; close it instead")
        new, root = ids if isinstance(ids, list) else list(ids), len(ids) - 1
        common = min(common_prefix(row.ids, new), root)
        if row.taps is None or row.taps.needs != needs:
            row.taps = self._new_taps(needs)
        if row.taps is not None:
            common = row.taps.reusable(common, root)
        if self.shape == "plain" and root != common:
            common = 0  # A plain target computes a prompt in one pass or not at all.
        if self._boundary is not None and not self._boundary.keeps(common, row.cached, root):
            common = 0
        kept = self._memory.truncate(row, common)
        if row.taps is not None:
            row.taps.truncate(kept)
        del row.ids[kept:]  # not a copy: this is asked for every draft of a model
        row.pending = new[kept:]
        return kept

    def row_bytes(self, positions: int, rewinds: bool = True) -> int:
        """Bytes of keys and values of so many positions of a row; `rewinds` as of the row."""
        forgets = self._abilities.packed and not rewinds
        return self.loaded.row_bytes(positions, self.chunk if forgets else None)

    def bytes_for(self, rows: Sequence[int], kept: Sequence[int] = ()) -> int:
        """As `KVStore.bytes_for`."""
        return self._memory.bytes_for(rows, kept)

    @torch.inference_mode()
    def mark(self, row: SequenceRow) -> None:
        """Let other texts go on from where a row is now, also when it has become longer."""
        self._memory.mark(row)

    def mark_bytes(self, row: SequenceRow) -> int:
        """Bytes that a mark takes."""
        return self._memory.mark_bytes(row)

    def most_mark_bytes(self, positions: int, rewinds: bool) -> int:
        """The most that a mark behind so many positions may take, states aside."""
        if self._abilities.cache == "replay":
            return self.loaded.row_bytes(positions) if self.shape == "chain" else 0
        if rewinds or not self._abilities.packed:
            return 0
        return self.loaded.row_bytes(positions, self.chunk, windowed=True)

    def reach(self, row: SequenceRow, length: int) -> int:
        """How many of a row's first `length` positions another text can go on from."""
        return self._memory.reach(row, length)

    @property
    def copies(self) -> bool:
        """Whether `copy` can give a row what another one has computed."""
        return self._memory.copies

    @torch.inference_mode()
    def copy(self, source: SequenceRow, row: SequenceRow, length: int) -> None:
        """Let a new row have the first `length` positions of another, if they are still there and
        its own pass would give them the same rotary angles."""
        boundary = self._boundary
        if boundary is not None and not boundary.keeps(length, source.cached, row.root):
            return
        taps = None if row.taps is None else source.taps and source.taps.copy(length)
        if row.taps is not None and taps is None:
            return
        if self.copies and self._memory.copy(source, row, length):
            row.taps = taps
            row.ids, row.pending = row.pending[:length], row.pending[length:]

    @torch.inference_mode()
    def part(self, row: SequenceRow) -> None:
        """Let a row that stays idle keep no other one's memory."""
        self._memory.part(row)

    def _refresh(self, row: SequenceRow) -> None:
        """Forget a cache whose rotary angles no longer fit, as the model's own generate does."""
        if row.cached and self._boundary is not None and self._boundary.stale(row.cached, row.root):
            self._memory.truncate(row, 0)
            row.ids, row.pending = [], row.ids + row.pending


def _count(row: SequenceRow, computed: int) -> None:
    """Count pending tokens as cached."""
    row.ids.extend(row.pending[:computed])
    del row.pending[:computed]
