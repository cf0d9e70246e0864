"""Recordings for drafters: hidden states of some layers, attention of chosen heads.

A pass only keeps references: the output of one block, and the queries and keys of our attention
function. On commit each row copies the states of its accepted positions, so nothing has to be
rolled back. Attention weights are computed when a drafter reads them.

Shapes: `B` rows and `Q` positions of a pass, `S` key slots, `H` heads, `K` key heads, `D` width.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from draftsmith.core.drafter import Drafter
from draftsmith.core.target import NO_NEEDS, NO_TAPS, Needs, Taps, Weights
from draftsmith.errors import OptionError, UnsupportedError
from draftsmith.model.attention import watch
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.seen import Seen, attention_at

_FIRST_ROWS = 256


def needs_of(drafter: Drafter, loaded: LoadedModel) -> Needs:
    """Return what `drafter` needs of this model, checked; `NO_NEEDS` if it cannot verify drafts.

    Raises OptionError for a layer or a head that the model does not have, UnsupportedError for what
    cannot be recorded with its attention.
    """
    if loaded.capabilities.shape == "plain":
        return NO_NEEDS
    needs = drafter.needs_of(loaded.facts)
    check(needs, loaded, drafter.name)
    return needs


def check(needs: Needs, loaded: LoadedModel, who: str) -> None:
    """Raise OptionError or UnsupportedError unless this model can record what `who` needs."""
    facts = loaded.facts
    for layer in needs.hidden_layers:
        if not 1 <= layer <= facts.layers:
            raise OptionError(
                f"{who}: layer={layer}, but {loaded.name} has layers 1…{facts.layers}"
            )
    for block, head in needs.attention_heads:
        if not (0 <= block < facts.layers and 0 <= head < facts.heads):
            raise OptionError(
                f"{who}: head {(block, head)} does not exist; {loaded.name} has layers 0…"
                f"{facts.layers - 1} with heads 0…{facts.heads - 1}"
            )
    capabilities = loaded.capabilities
    if needs.attention_heads and capabilities.attention != "draftsmith":
        reason = next((f" ({r})" for r in capabilities.reasons if r.startswith("trees")), "")
        raise UnsupportedError(
            f"{who} needs attention rows, which only draftsmith's attention function records, but "
            f"{loaded.name} runs with {capabilities.attention!r}{reason}; "
            "rank by hidden states instead"
        )
    if needs.taps and loaded.blocks is None:
        raise UnsupportedError(
            f"{who} needs the outputs of {loaded.name}'s decoder blocks, but none of its module "
            f"lists has an entry for each of its {facts.layers} layers"
        )


class PassTaps:
    """Records, during one pass, what any of its rows needs."""

    def __init__(
        self,
        needs: Sequence[Needs],
        blocks: ModuleList,
        chunks: Container[int] = (),
    ) -> None:
        """`chunks`: spans of which only the last position's attention is needed."""
        self.hidden: dict[int, Tensor] = {}
        """Layer, from 1 → (B, Q, D)."""
        self.seen: dict[int, dict[int, Seen]] = {}
        """Span → layer, from 0 → inputs of its attention."""
        self.layers = tuple(sorted({layer for n in needs for layer in n.hidden_layers}))
        """Layers that are recorded, from 1."""
        self._blocks = blocks
        self._chunks = chunks
        self._attention_layers = {layer for n in needs for layer, _ in n.attention_heads}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record as long as the context is open."""
        with ExitStack() as stack:
            for layer in self.layers:
                hook = self._blocks[layer - 1].register_forward_hook(self._hook(layer))
                stack.callback(hook.remove)
            watched = {
                module: layer
                for layer in self._attention_layers
                for module in _attentions(self._blocks[layer])
            }
            if watched:
                stack.enter_context(watch(watched, self._look))
            yield
        block = type(self._blocks[0]).__name__
        if missing := self._attention_layers - self.seen.get(0, {}).keys():
            raise UnsupportedError(
                f"layer {min(missing)} of {block} never calls an attention function, so its "
                "attention cannot be recorded; rank by hidden states instead"
            )
        if missing := set(self.layers) - self.hidden.keys():
            raise UnsupportedError(
                f"layer {min(missing)} of {block} does not call its hooks, as compiled "
                "parts of a model do, so nothing can be recorded; pass the model uncompiled"
            )

    def _hook(self, layer: int) -> Any:
        thread = threading.get_ident()

        def keep(block: Module, _inputs: Any, output: Any) -> None:
            # Another thread may run the same model at the same time.
            if threading.get_ident() != thread:
                return
            states = output if isinstance(output, Tensor) else output[0]
            # Gemma 3n passes on several streams, of which the block computes one.
            if states.dim() == 4:
                states = states[block.config.altup_active_idx]  # type: ignore[union-attr, index]
            self.hidden[layer] = states

        return keep

    def _look(self, layer: int, seen: Seen, span: int = 0) -> None:
        own = self.seen.setdefault(span, {})
        own[layer] = seen.last() if span in self._chunks else seen


@dataclass(slots=True)
class RowTaps:
    """Recordings of one row: hidden states of its positions, attention of the last one."""

    needs: Needs
    length: int = 0
    """Recorded positions."""
    _rows: Tensor | None = None
    """(C, k·D), or as wide as they are folded, C ≥ length; grows with the context in use."""
    _attention: Weights | None = field(default=None, repr=False)
    """Computes weights on demand: while drafting pauses, none are needed."""
    _attended: int = 0
    """Positions that the attention row covers."""
    pass_taps: tuple[PassTaps, int, slice] | None = field(default=None, repr=False)
    """The pass that awaits `keep`, this row's span in it, and its own of the Q positions."""

    @property
    def bytes(self) -> int:
        """Bytes of the states. Keys that attention reads belong to the row."""
        return 0 if self._rows is None else self._rows.untyped_storage().nbytes()

    def forget_attention(self) -> None:
        """Drop the keys that attention weights are computed from; other rows may share them."""
        self._attention, self._attended = None, 0

    def keep(self, start: int, pending: int, path: Sequence[int] = ()) -> None:
        """Keep `pending` tokens and a path of the last pass, which began at position `start`."""
        if self.pass_taps is None:
            return
        (taps, span, queries), self.pass_taps = self.pass_taps, None
        picked = [*range(pending), *(pending + node for node in path)]
        self.length = start + len(picked)
        if self.needs.hidden_layers:
            outputs = [taps.hidden[layer][0, queries] for layer in self.needs.hidden_layers]
            self._append(outputs, start, picked)
        if self.needs.attention_heads:
            length = start + queries.stop - queries.start
            self._attend(taps.seen[span], start, picked, length)

    def _attend(self, seen: dict[int, Seen], start: int, picked: list[int], length: int) -> None:
        """Prepare the attention weights of the last picked position of a span up to `length`."""
        self._attended = start + len(picked)
        query, heads = picked[-1], self.needs.attention_heads
        end = start + query + 1
        weights = partial(attention_at, seen, heads, query, end=end, length=length)
        self._attention = weights
        # The store is about to move these keys, so compute all weights now.
        if not _in_place(picked):
            slots = [*range(start), *(start + node for node in picked)]
            self._attention = partial(_columns, weights(torch.tensor(slots, device="cpu")))

    def _append(self, outputs: Sequence[Tensor], start: int, picked: list[int]) -> None:
        """Keep the picked states of each layer, (Q, D) each."""
        chosen = [o[: len(picked)] if _in_place(picked) else o[picked] for o in outputs]
        states = chosen[0]
        if len(chosen) > 1:  # the blocks may lie on several devices
            states = torch.cat([part.to(states.device) for part in chosen], dim=-1)
        if self.needs.fold is not None:
            states = self.needs.fold(states)
        end = start + len(picked)
        if self._rows is None or end > len(self._rows):
            grown = states.new_empty((_rows_for(end), states.shape[-1]))
            if self._rows is not None:
                grown[:start] = self._rows[:start]
            self._rows = grown
        self._rows[start:end] = states

    def reusable(self, common: int, root: int) -> int:
        """Return how many of `common` cached positions have recordings for this root."""
        known = min(common, self.length) if self.needs.hidden_layers else common
        # A missing attention row needs one position to be computed again.
        lost = bool(self.needs.attention_heads) and self._attended != root
        return known - (lost and known == root > 0)

    def copy(self, length: int) -> RowTaps | None:
        """The first `length` positions for another row; None where they are not all there."""
        if self.needs.attention_heads or self._rows is None or length > self.length:
            return None
        return RowTaps(self.needs, length, self._rows[:length].clone())

    def truncate(self, length: int) -> None:
        """Drop the recordings from position `length` on."""
        self.length, self.pass_taps = min(self.length, length), None

    def show(self, states: int) -> Taps:
        """Return what was recorded for `states` computed positions; nothing if one is missing."""
        if self.length != states or not states:
            return NO_TAPS
        return Taps(
            None if self._rows is None else self._rows[:states],
            self._attention if self._attended == states else None,
        )


def recorded(needs: Needs, positions: int, width: int) -> int:
    """Upper bound of the numbers recorded for a row of `positions` positions, D = `width`."""
    each = width * len(needs.hidden_layers) if needs.fold is None else needs.fold.width
    return _rows_for(positions) * 3 // 2 * each + len(needs.attention_heads) * positions


def _rows_for(positions: int) -> int:
    """Rows of the allocated buffer."""
    return max(_FIRST_ROWS, 1 << (positions - 1).bit_length())


def _attentions(block: Module) -> tuple[Module, ...]:
    """Submodules of a block that may call an attention function."""
    # Cached, because the search takes longer than a small layer.
    if block not in _ATTENTIONS:
        found = (module for module in block.modules() if hasattr(module, "layer_idx"))
        _ATTENTIONS[block] = tuple(found)
    return _ATTENTIONS[block]


_ATTENTIONS: WeakKeyDictionary[Module, tuple[Module, ...]] = WeakKeyDictionary()


def _columns(row: Tensor, positions: Tensor) -> Tensor:
    """Select columns (heads, n) of an attention row (heads, T)."""
    return row[:, positions.to(row.device)]


def _in_place(picked: list[int]) -> bool:
    """Whether the picked positions are the first ones of the pass."""
    return picked[-1] == len(picked) - 1
