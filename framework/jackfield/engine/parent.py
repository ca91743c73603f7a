"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """End this process as soon as the one that started it is gone: nobody could stop it any more."""
    threading.Thread(target=_wait, name="jackfield-parent", daemon=True).start()


def _wait() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
