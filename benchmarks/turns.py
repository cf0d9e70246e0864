"""Processes that take turns, so that all are measured on the same machine even if it drifts.

Arms that answer for minutes cannot be measured one after the other: within two minutes, a shared
machine becomes faster or slower by a tenth. So each arm is a process, all get their work at the
same time, and only one runs at a time, for a second. The others are stopped (SIGSTOP).

A stopped process cannot notice that the benchmark has ended. So each has a guard: a process that
kills it when the benchmark ends for any reason.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")
Clock = Callable[[float], float]
"""A moment of `perf_counter` → seconds that a process had been running until then."""

AWAKE = 1.0
"""Seconds of a turn, so short that a drafter does not count a stop as a stall."""
GUARD = """
import os, signal, sys
sys.stdin.buffer.read()  # until the benchmark has ended, or kills this process
for end in (os.killpg, os.kill):
    try:
        end(int(sys.argv[1]), signal.SIGKILL)
        break
    except ProcessLookupError:
        pass
"""


class Guard:
    """A process that kills another one when this one ends for any reason."""

    def __init__(self, process: int) -> None:
        """`process` is an id. If it leads a group, the whole group is killed."""
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", GUARD, str(process)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not end it
        )

    def close(self) -> None:
        """End the guard, after its process has ended; may be called again."""
        self._process.kill()
        self._process.communicate()


class Sleeper:
    """A process that is stopped except in its turns, and ends with the benchmark."""

    def __init__(self, process: int) -> None:
        """Guard a child process, by its id; it runs until `sleep` is called."""
        self.process = process
        self._guard = Guard(process)

    def sleep(self) -> None:
        """Stop the process until it is woken."""
        self._tell(signal.SIGSTOP)

    def wake(self) -> None:
        """Continue the process."""
        self._tell(signal.SIGCONT)

    def end(self) -> None:
        """Kill the process, stopped or not; the caller waits for it."""
        self._tell(signal.SIGKILL)
        with suppress(ProcessLookupError):  # it leads no group
            os.killpg(self.process, signal.SIGKILL)
        self._guard.close()

    def _tell(self, what: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended, which its answers will show
            os.kill(self.process, what)


def side_by_side(tasks: Mapping[Sleeper, Callable[[], T]]) -> dict[Sleeper, tuple[T, Clock]]:
    """Return each task's result with its process's clock.

    A task uses the process of its key, which is stopped before and after. An interrupt ends all
    processes.
    """
    awake: dict[Sleeper, list[tuple[float, float]]] = {sleeper: [] for sleeper in tasks}
    with ThreadPoolExecutor(max(1, len(tasks))) as threads:
        try:
            working = {sleeper: threads.submit(task) for sleeper, task in tasks.items()}
            while not all(task.done() for task in working.values()):
                for sleeper, task in working.items():
                    if not task.done():
                        begin = perf_counter()
                        sleeper.wake()
                        wait([task], AWAKE)
                        sleeper.sleep()
                        awake[sleeper].append((begin, perf_counter()))
        except BaseException:
            for sleeper in tasks:  # otherwise the threads would wait forever
                sleeper.end()
            raise

    def clock(sleeper: Sleeper) -> Clock:
        return lambda at: sum(min(at, end) - begin for begin, end in awake[sleeper] if at > begin)

    return {sleeper: (task.result(), clock(sleeper)) for sleeper, task in working.items()}
