"""A CUDA stream of its own for the copy of the weights, so that neither the copy nor the sends wait for kernels of the
next step that are queued already, and the next update of the weights waits for the copy.

On a CPU there are no streams, and nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""


class SnapshotStream:
    """The stream of a device.

    Args:
        device: of the weights.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        on_gpu = torch.device(device).type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copy the weights in the block: after what was queued for their computation before it, and before what the
        caller queues after it. The host waits for neither."""
        if self._stream is None:
            yield
            return
        computing = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(computing)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            computing.wait_stream(self._stream)

    def mark(self) -> Mark | None:
        """Return the present end of the stream; None without a stream."""
        return None if self._stream is None else self._stream.record_event()
