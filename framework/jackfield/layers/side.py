"""Work beside other work: a second stream on devices that have streams."""

from __future__ import annotations

from collections.abc import Callable

import torch

SIDE_LIMIT = 256
"""Most rows of work that runs beside other work. More of them fill a device by themselves."""

Work = Callable[[torch.Tensor], torch.Tensor]


class SideStream:
    """Runs a piece of work beside what comes after it. On a CPU it runs when its result is asked for.

    Args:
        device: that the work runs on. limit: most rows; more of them run one after the other.
    """

    def __init__(self, device: torch.device, limit: int = SIDE_LIMIT) -> None:
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._device, self._limit = device, limit

    def start(self, work: Work, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that gives ``work(x)``; it must be called once, on the stream that is current now."""
        stream = self._stream
        if stream is None or len(x) > self._limit:
            return lambda: work(x)
        main = torch.accelerator.current_stream(self._device)
        # Memory is safe without more: either stream waits for the other before it goes on to allocate.
        stream.wait_stream(main)
        with stream:
            out = work(x)

        def finish() -> torch.Tensor:
            main.wait_stream(stream)
            return out

        return finish
