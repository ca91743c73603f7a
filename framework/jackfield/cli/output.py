"""What commands that run a model write: streamed text on stdout, figures and progress on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any


def stream_text(outputs: Iterable[Any]) -> tuple[str, int]:
    """Print the text of RequestOutputs as it grows; return the whole text and the number of tokens."""
    text, tokens = "", 0
    for output in outputs:
        completion = output.outputs[0]
        sys.stdout.write(completion.text[len(text) :])
        sys.stdout.flush()
        text, tokens = completion.text, len(completion.token_ids)
    print()
    return text, tokens


class Clock:
    """Measures tokens per second from its creation on."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def line(self, tokens: int) -> str:
        """Return a line such as ``12 tokens in 0.50 s, 24.0 tokens/s``."""
        seconds = time.perf_counter() - self._start
        return f"{tokens} tokens in {seconds:.2f} s, {tokens / max(seconds, 1e-9):.1f} tokens/s"


def tell(text: str) -> None:
    """Print a line for people, on stderr."""
    print(text, file=sys.stderr)


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Give a callback ``(name, done, total)`` in bytes that shows one bar for each name on stderr. A total of 0 is
    not known yet. Threads may share it.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    tasks: dict[str, Any] = {}
    lock = Lock()
    progress = Progress(*columns, console=Console(stderr=True))

    def update(name: str, done: int, total: int) -> None:
        with lock:
            if not tasks:
                progress.start()
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total or None)
        progress.update(tasks[name], completed=done, total=total or None)

    try:
        yield update
    finally:
        if tasks:
            progress.stop()
