"""EngineHost: starts an engine process, knows whether it lives, and leaves nothing of it behind."""

from __future__ import annotations

import multiprocessing
import os
import select
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from jackfield.engine.core_process import ProcessSpec, run
from jackfield.engine.setup import Prepared
from jackfield.oracle.report import DecisionReport
from jackfield.oracle.resolution import Resolution

STOP_SECONDS = 5.0
"""How long a process may take to stop before it is killed."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A place for one frontend at an engine process; may be sent to another process.

    Args:
        number: of the seat. commands, notices: addresses that its holder binds. digest: of the plugins that were
            decided on. pid: of the engine process. resolution: all decisions, for frontends in other processes.
        tokenizes: whether frontends have a tokenizer.
    """

    number: int
    commands: str
    notices: str
    digest: str
    pid: int
    resolution: Resolution
    tokenizes: bool = True


class EngineHost:
    """One engine process.

    Args:
        prepared: what it runs. seats: frontends that it serves.
    """

    def __init__(self, prepared: Prepared, seats: int = 1) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="jackfield-"))
        self._manifest = prepared.manifest()
        self._resolution = prepared.resolution
        self._tokenizes = prepared.tokenizer is not None
        self._addresses = [
            (f"ipc://{self.folder / f'commands-{number}'}", f"ipc://{self.folder / f'notices-{number}'}")
            for number in range(seats)
        ]
        bare = replace(prepared.resolution, report=DecisionReport())
        # spawn: a forked child would inherit threads and device handles of this process.
        self.process = multiprocessing.get_context("spawn").Process(
            target=run,
            args=(ProcessSpec(bare, self._manifest, tuple(self._addresses)),),
            name="jackfield-engine",
            daemon=True,
        )

    def start(self) -> None:
        """Start the process; its frontends hear when it is ready."""
        self.process.start()

    def seat(self, number: int) -> Seat:
        """Return a seat of a process that was started."""
        assert self.process.pid is not None, "seats are given out by a process that runs"
        commands, notices = self._addresses[number]
        return Seat(
            number, commands, notices, self._manifest.digest, self.process.pid, self._resolution, self._tokenizes
        )

    def lives(self) -> bool:
        """Return whether the process runs."""
        return self.process.is_alive()

    def end(self) -> str:
        """Return how the process ended, in words."""
        return f"it ended with exit code {self.process.exitcode}"

    def join(self) -> None:
        """Wait for a process that was told to stop."""
        if self.process.pid is not None:
            self.process.join(STOP_SECONDS)

    def close(self) -> None:
        """Kill the process if it lives, and remove its files."""
        if self.process.pid is not None:
            if self.process.is_alive():
                self.process.kill()
            self.process.join(STOP_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)


class RemoteHost:
    """An engine process that another process started.

    Args:
        seat: what that process gave.
    """

    def __init__(self, seat: Seat) -> None:
        self._pid = seat.pid
        self._watched = _watch(seat.pid)

    def lives(self) -> bool:
        """Return whether the process runs."""
        if self._watched is not None:
            return not select.select([self._watched], [], [], 0)[0]
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return False
        return True

    def end(self) -> str:
        """Return how the process ended, in words."""
        return f"process {self._pid} is gone"

    def close(self) -> None:
        """Stop watching the process."""
        if self._watched is not None:
            os.close(self._watched)
            self._watched = None


def _watch(pid: int) -> int | None:
    """Return a descriptor that is readable once the process has ended, even while its parent has not heard of it; None
    on systems that have none.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
