"""Whether a server has nothing to do."""

from __future__ import annotations

import time

import httpx2


def idle(url: str, seconds: float = 1.0) -> bool:
    """Return whether no request runs or waits, now or soon."""
    until = time.monotonic() + seconds
    while httpx2.get(f"{url}/load").json()["server_load"] != 0:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
