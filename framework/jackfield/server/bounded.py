"""Work that may never end, such as a chat template of a stranger: it runs in a thread of its own and is stopped.

A thread is stopped by an exception that Python raises inside it at the next bytecode; so a loop ends, while one call
into compiled code, such as the making of a huge string, ends when it ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class StoppedError(Exception):
    """Raised inside the work that took too long."""


async def run_bounded(work: Callable[[], T], seconds: float) -> T:
    """Return what ``work`` returns.

    Raises:
        TimeoutError: it did not end in time.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    thread = threading.Thread(target=_run, args=(work, loop, future), name="jackfield-bounded", daemon=True)
    thread.start()
    try:
        return await asyncio.wait_for(future, seconds)
    except (TimeoutError, asyncio.CancelledError):
        _stop(thread)
        raise


def _run(work: Callable[[], T], loop: asyncio.AbstractEventLoop, future: asyncio.Future[T]) -> None:
    settle: Callable[[], None]
    try:
        settle = partial(future.set_result, work())
    except BaseException as error:
        settle = partial(future.set_exception, error)
    with suppress(RuntimeError):  # the loop may be closed by now
        loop.call_soon_threadsafe(lambda: None if future.done() else settle())


def _stop(thread: threading.Thread) -> None:
    if thread.is_alive() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(StoppedError))
