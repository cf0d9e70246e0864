"""Processes that never outlive the one that started them, however it ends."""

from __future__ import annotations

import subprocess

_SCRIPT = 'read -r done || kill -9 -- "-$0" 2>/dev/null || kill -9 "$0"'
"""Waits for a line. If none comes its parent is gone, and it kills the process, or its group."""


class Guard:
    """A shell that kills a process when this one ends: also one that is stopped, by any signal."""

    def __init__(self, process: int) -> None:
        """`process`: its id. Where it leads a group (`process_group=0`), all of that is killed."""
        self._shell = subprocess.Popen(
            ["sh", "-c", _SCRIPT, str(process)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # whoever kills our group shall not kill it
        )

    def close(self) -> None:
        """Let go: the process has ended. May be called again."""
        if self._shell.poll() is None:
            self._shell.communicate(b"\n")
