"""A progress bar over requests, with the rates of their tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from jackfield.engine.outputs import PoolingOutput, RequestOutput


class RequestBar:
    """Counts requests as they end.

    Args:
        make: a callable that makes a bar like tqdm does, or True for tqdm's own. total: requests.
    """

    def __init__(self, make: bool | Callable[..., Any], total: int) -> None:
        if callable(make):
            self._bar = make(total=total, desc="requests")
        else:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc="requests")
        self._begin, self._taken, self._made = time.monotonic(), 0, 0

    def ended(self, output: RequestOutput | PoolingOutput) -> None:
        """Count a request, and show how many tokens of prompts and of answers there were a second so far."""
        self._taken += len(output.prompt_token_ids or ())
        if isinstance(output, RequestOutput):
            self._made += sum(len(one.token_ids) for one in output.outputs)
        seconds = max(time.monotonic() - self._begin, 1e-9)
        rates = f"in: {self._taken / seconds:.1f} tokens/s, out: {self._made / seconds:.1f} tokens/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()
