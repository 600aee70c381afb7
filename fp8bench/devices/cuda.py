"""GPUs that torch reaches as 'cuda' (NVIDIA, and AMD through HIP), timed by events on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fp8bench.model import DeviceFacts
from fp8bench.protocols import Device, Stamper
from fp8bench.registry import devices

if TYPE_CHECKING:
    import torch


class EventStamper(Stamper):
    """Stamps are CUDA events from a pool: making one costs more than recording it.

    An event is recorded on the stream that is current for the calling thread; autograd sets it on its own threads.
    """

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []
        self._used: list[torch.cuda.Event] = []

    def source(self) -> Callable[[], Any]:
        import torch

        event_type, free, keep = torch.cuda.Event, self._free, self._used.append

        def stamp() -> torch.cuda.Event:
            event = free.pop() if free else event_type(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
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


@devices.register("cuda")
class Cuda(Device):
    """One GPU each; the index is torch's, which CUDA_VISIBLE_DEVICES may have renumbered."""

    kind = "cuda"

    def available(self) -> tuple[DeviceFacts, ...]:
        import torch

        if not torch.cuda.is_available():
            return ()
        return tuple(self._facts(index) for index in range(torch.cuda.device_count()))

    def _facts(self, index: int) -> DeviceFacts:
        import torch

        properties = torch.cuda.get_device_properties(index)
        return DeviceFacts(
            "cuda", index, properties.name, properties.total_memory, str(torch.__version__),
            capability=(properties.major, properties.minor), cuda=torch.version.cuda, hip=torch.version.hip,
            arch=getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}"),
        )  # fmt: skip

    def stamper(self, index: int) -> Stamper:
        return EventStamper()

    def synchronise(self, index: int) -> None:
        import torch

        torch.cuda.synchronize(index)

    def is_out_of_memory(self, error: BaseException) -> bool:
        import torch

        # cuBLAS and the driver ask for memory by themselves and say so in their own words.
        words = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
        return isinstance(error, torch.cuda.OutOfMemoryError) or any(word in str(error) for word in words)

    def select(self, index: int) -> None:
        import torch

        torch.cuda.set_device(index)

    def empty_cache(self) -> None:
        import torch

        torch.cuda.empty_cache()
