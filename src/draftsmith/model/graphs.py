"""CUDA graphs of passes: captured at first use, replayed afterwards, bounded in number.

A graph repeats the kernels of a pass with the same addresses, so that the host launches one graph
instead of a thousand kernels. What a pass reads and writes must therefore stay in place.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from draftsmith.errors import first_line

CAPTURED = ("cuda",)
"""Types of devices on which passes are captured."""
MOST_GRAPHS = 64
"""Maximum number of graphs; all are dropped for another."""
WIDEST = 128
"""Maximum width of a pass."""
INPUTS = 5
"""Rows of numbers that a pass reads: tokens, offsets, two of ancestors, and the base."""

Body = Callable[[], tuple[Tensor, ...]]
"""Computes a pass from what is in place; copies nothing from the host and never waits."""


class Captured:
    """A pass as a CUDA graph. Each replay overwrites the outputs of the one before."""

    def __init__(self, body: Body, device: torch.device, memory: Any) -> None:
        """Run the pass once, so that kernels are loaded, then capture it."""
        with torch.cuda.device(device):
            side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                body()
            current.wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
            mode = "thread_local"
            with torch.cuda.graph(self._graph, memory, side, capture_error_mode=mode):
                self._outputs = body()

    def __call__(self) -> tuple[Tensor, ...]:
        self._graph.replay()
        return self._outputs


class Graphs:
    """The inputs and graphs of all passes of one model, which share memory.

    The first failure to capture ends capturing: passes then run their kernels one by one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captures = device.type in CAPTURED
        """Whether passes are captured; False on other devices, and after a failure."""
        self.failure: str | None = None
        """Why passes are not captured any more."""
        self.free: dict[Any, Any] = {}
        """Buffers that no row uses, by what they hold; one of each kind."""
        self.inputs = torch.zeros((INPUTS, WIDEST), dtype=torch.long, device=device)
        """Input of a pass, on the device."""
        on_host = torch.zeros((INPUTS, WIDEST), dtype=torch.long, device="cpu")
        self._waits = device.type in ("cpu", "mps")  # see `devices.send`
        self._host = on_host if self._waits else on_host.pin_memory()
        self._lock = threading.RLock()
        self._graphs: WeakKeyDictionary[Any, dict[int, Captured]] = WeakKeyDictionary()
        """Buffer → width → graph over it."""
        self._memory: Any = None
        self._weights: Any = None

    @contextmanager
    def turn(self) -> Iterator[Any]:
        """Let one thread at a time run a pass, until the host has read it.

        Gives the inputs on the host, as an array; `send` copies them to the device.
        """
        with self._lock:
            yield self._host.numpy()

    def send(self) -> None:
        """Copy the inputs to the device without waiting for it."""
        self.inputs.copy_(self._host, non_blocking=not self._waits)

    def run(self, buffer: Any, width: int, body: Body) -> tuple[Tensor, ...]:
        """Run a pass over a buffer, by its graph where there is one.

        The outputs are valid until the next pass.
        """
        if not self.captures:
            return body()
        known = self._graphs.get(buffer, {})
        if width not in known:
            if sum(map(len, self._graphs.values())) >= MOST_GRAPHS:
                self._graphs.clear()
            try:
                if not any(self._graphs.values()):  # torch frees the memory with its last graph
                    self._memory = torch.cuda.graph_pool_handle()
                captured = Captured(body, self.device, self._memory)
            except Exception as error:  # a model's code may raise any error
                self._give_up(error)
                return body()
            known = self._graphs.setdefault(buffer, {})
            known[width] = captured
        return known[width]()

    def check(self, weights: Any) -> None:
        """Drop all graphs if this key of the model's weights is a new one."""
        with self._lock:
            if weights != self._weights:
                self._graphs.clear()
            self._weights = weights

    def count(self, buffer: Any) -> int:
        """Return the number of graphs over a buffer."""
        return len(self._graphs.get(buffer, ()))

    def _give_up(self, error: Exception) -> None:
        self.captures = False
        self.failure = (
            "CUDA graphs are not used, so passes take longer: this model cannot be captured "
            f"({first_line(error)})"
        )
        self._graphs.clear()
        # A failed capture leaves torch's generator in capture mode; one that succeeds ends that.
        with suppress(Exception):
            number = torch.zeros(1, device=self.device)
            Captured(lambda: (number.add_(1),), self.device, None)
        warnings.warn(self.failure, stacklevel=2)
