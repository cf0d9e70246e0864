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
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from draftsmith.errors import first_line
from draftsmith.model.changes import hooks

CAPTURED = ("cuda",)
"""Types of devices on which passes are captured."""
MOST_GRAPHS = 64
"""Maximum number of graphs; the least recently used one is dropped for another."""
MOST_LACKS = 8
"""Captures in a row that may fail for lack of memory before no more are tried."""
MOST_PLACES = 32
"""Maximum number of rows of a pass."""
SPARE_SLOTS = 128
"""Numbers of a row in an input line, and spare slots of a place: the largest width, aligned."""
INPUTS = 5
"""Lines of numbers of a row: tokens, offsets, two of ancestors; the base with the first slot."""

Shape = tuple[int, int, tuple[int, ...]]
"""Number of rows, width of each, and layers that are recorded."""
Body = Callable[[], tuple[Tensor, ...]]
"""Computes a pass from what is in place; copies nothing from the host and never waits."""


class Captured:
    """A pass as a CUDA graph. Each replay overwrites the outputs of the one before."""

    def __init__(self, body: Body, device: torch.device, memory: Any) -> None:
        """Run the pass once, so that kernels are loaded, then capture it."""
        self.used = 0
        """Number of the last replay, among those of all graphs."""
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

    The first failure to capture, or `MOST_LACKS` of them for lack of memory, ends capturing: passes
    then run their kernels one by one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captures = device.type in CAPTURED
        """Whether passes are captured; False on other devices, and after a failure."""
        self.failure: str | None = None
        """Why passes are not captured any more."""
        self.free: dict[Any, Any] = {}
        """Buffers that no row uses, by what they hold; one of each kind."""
        self.buffers: WeakSet[Any] = WeakSet()
        """All buffers, in whatever runner."""
        shape = MOST_PLACES, INPUTS, SPARE_SLOTS
        self.inputs = torch.zeros(shape, dtype=torch.long, device=device)
        """Input of a pass, on the device."""
        on_host = torch.zeros(shape, dtype=torch.long, device="cpu")
        self._waits = device.type in ("cpu", "mps")  # see `devices.send`
        self._host = on_host if self._waits else on_host.pin_memory()
        self._lock = threading.RLock()
        self._graphs: WeakKeyDictionary[Any, dict[Shape, Captured]] = WeakKeyDictionary()
        """Buffer → shape → graph over it."""
        self._memory: Any = None
        self._lacks = 0
        """Captures in a row that failed for lack of memory."""
        self._weights: Any = None
        self._replays = 0

    @contextmanager
    def turn(self) -> Iterator[Any]:
        """Let one thread at a time run a pass, until the host has read it.

        Gives the inputs on the host, as an array; `send` copies them to the device.
        """
        with self._lock:
            yield self._host.numpy()

    def send(self, places: int) -> None:
        """Copy the inputs of the first places to the device without waiting for it."""
        self.inputs[:places].copy_(self._host[:places], non_blocking=not self._waits)

    def run(self, buffer: Any, shape: Shape, body: Body) -> tuple[Tensor, ...]:
        """Run a pass over a buffer, by its graph where there is one.

        The outputs are valid until the next pass.
        """
        if not self.captures:
            return body()
        own = self._graphs.setdefault(buffer, {})
        if shape not in own:
            try:
                if not any(self._graphs.values()):  # torch frees the memory with its last graph
                    self._memory = torch.cuda.graph_pool_handle()
                own[shape] = Captured(body, self.device, self._memory)
                self._lacks = 0
            except BaseException as error:
                self._end_capture()
                if not isinstance(error, Exception):
                    raise
                # A model's code may raise any error. Memory may suffice for a later capture.
                self._lacks += isinstance(error, torch.OutOfMemoryError)
                self.free.clear()
                self._graphs.clear()
                if self._lacks >= MOST_LACKS or not isinstance(error, torch.OutOfMemoryError):
                    self._give_up(error)
                return body()
            self._limit()
        self._replays += 1
        own[shape].used = self._replays
        return own[shape]()

    def check(self, weights: Any) -> None:
        """Drop all graphs if this key of the model's weights is a new one."""
        with self._lock:
            if weights != self._weights:
                self._graphs.clear()
            self._weights = weights

    def notice(self, model: torch.nn.Module) -> str | None:
        """Return why the passes of a model are not graphs although the device captures them."""
        why = "CUDA graphs are not used while the model has forward hooks, which they do not call"
        return why if self.captures and hooks(model) else self.failure

    def count(self, buffer: Any) -> int:
        """Return the number of graphs over a buffer."""
        return len(self._graphs.get(buffer, ()))

    def _limit(self) -> None:
        while sum(map(len, self._graphs.values())) > MOST_GRAPHS:
            every = [(g.used or self._replays + 1, own, shape)
                     for own in self._graphs.values() for shape, g in own.items()]  # fmt: skip
            _, own, shape = min(every, key=lambda one: one[0])
            del own[shape]

    def _give_up(self, error: Exception) -> None:
        self.captures = False
        self.failure = (
            "CUDA graphs are not used, so passes take longer: this model cannot be captured "
            f"({first_line(error)})"
        )
        warnings.warn(self.failure, stacklevel=2)

    def _end_capture(self) -> None:
        """Capture something else: a failed capture leaves torch's generator in capture mode."""
        with suppress(Exception):
            number = torch.zeros(1, device=self.device)
            Captured(lambda: (number.add_(1),), self.device, None)
