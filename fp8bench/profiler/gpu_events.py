"""The clock of a GPU: events that it records between the work it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from fp8bench.protocols import Stamper


class EventStamper(Stamper):
    """Stamps are events of `backend` (torch.cuda, torch.xpu) from a pool: making one costs more than recording it.

    Every event is recorded on the stream that was current when `source` was called, from autograd's threads too. To ask
    for the current stream at each stamp costs more than all the rest of it.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._free: list[Any] = []
        self._used: list[Any] = []

    def source(self) -> Callable[[], Any]:
        event_type, free, keep = self._backend.Event, self._free, self._used.append
        stream = self._backend.current_stream()

        def stamp() -> Any:
            event = free.pop() if free else event_type(enable_timing=True)
            event.record(stream)
            keep(event)
            return event

        return stamp

    def intervals_ns(self, stamps: Sequence[Any]) -> list[int]:
        if stamps:
            stamps[-1].synchronize()
        # Neighbours, not differences from the first: elapsed_time is a float32 of milliseconds.
        return [round(earlier.elapsed_time(later) * 1e6) for earlier, later in pairwise(stamps)]

    def recycle(self) -> None:
        self._free.extend(self._used)
        self._used.clear()
