"""GPUs that torch reaches as 'cuda' (NVIDIA, and AMD through HIP), timed by events on the device."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, NamedTuple

from fp8bench.model import DeviceFacts
from fp8bench.profiler.gpu import AllocatorMeter, CapturedStamper, Gpu, limit_fraction
from fp8bench.protocols import CannotCapture, CannotLimit, MemoryMeter, Stamper
from fp8bench.registry import devices

# Libraries and the driver allocate memory themselves; these are their errors when memory is exhausted.
_NO_MEMORY = re.compile(
    r"_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED|(CUDA|HIP) error: out of memory|Triton Error \[\w+\]: out of memory"
    r"|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory|miopenStatusAllocFailed|DEVICE_ALLOCATION_FAILED"
    r"|NVML_SUCCESS == .*INTERNAL ASSERT FAILED.*CUDACachingAllocator"  # torch could not find the owner of the memory
)
# Errors that may also have another cause: a device with this much memory left was not out of memory.
_NOT_BEGUN = re.compile(r"(BLAS|DNN|SOLVER|SPARSE)_STATUS_NOT_INITIALIZED")
_LEFT = 1 << 30
# At least the cycles of any GPU in a second: torch's sleep counts cycles, and is longer at a lower clock.
_MOST_CYCLES = 3e9
# Last caches behind L2, which torch does not report.
_BEHIND_L2 = {"gfx942": 256 << 20, "gfx950": 256 << 20}
# Sides of the product that fills a queue (24 MiB in bfloat16), and how often one launch does it: for half a
# millisecond on an H200.
_FILLING_SIDE, _FILLING_PRODUCTS, _LEAST_FILLING_SECONDS = 2048, 16, 20e-6
# Warm-up steps, as torch's documentation has them.
_BEFORE_CAPTURE = 3
_UNCOUNTED = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")


def pci_address(properties: object) -> str:
    """Returns domain, bus and device in hexadecimal, as the driver writes them; '' if torch is too old."""
    parts = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    numbers = [part for part in parts if isinstance(part, int)]
    return "{:08X}:{:02X}:{:02X}".format(*numbers) if len(numbers) == len(parts) else ""


def why_no_kernels(arch: str, built: Sequence[str]) -> str:
    """Returns why a build of torch for the architectures `built` has no kernels for `arch`; '' if it has, or unknown.
    NVIDIA's machine code (sm_90) runs on its own major capability from its minor one on; with an 'a' only on that very
    one. Its intermediate code (compute_90) runs on all later ones. AMD's code runs on what it was made for."""
    have = _architecture(arch)
    architectures = [architecture for architecture in map(_architecture, built) if architecture is not None]
    fits = any(name.partition(":")[0] == arch.partition(":")[0] or "generic" in name for name in built)
    if not built or fits or (have is not None and any(_runs(have, architecture) for architecture in architectures)):
        return ""
    return (
        f"this torch has no kernels for {arch}: it was built for {', '.join(built)}. Install a build of torch that has "
        "them"
    )


class _Architecture(NamedTuple):
    translated: bool
    major: int
    minor: int
    suffix: str


def _architecture(name: str) -> _Architecture | None:
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
    return _Architecture(parts[1] == "sm", int(parts[2]), int(parts[3]), parts[4]) if parts else None


def _runs(have: _Architecture, built: _Architecture) -> bool:
    if built.suffix == "a":
        return (have.major, have.minor) == (built.major, built.minor)
    later = (have.major, have.minor) >= (built.major, built.minor)
    return later and (have.major == built.major or not (built.translated or built.suffix))


class QueueFiller(NamedTuple):
    """Products that keep a GPU at work, in one launch, and the seconds that they take."""

    launch: Callable[[], object]
    seconds: float
    # The graph reads and writes these, and keeps none of them alive.
    tensors: tuple[object, ...] = ()


@devices.register("cuda")
class Cuda(Gpu):
    """One GPU of NVIDIA's or AMD's; the index is torch's, which CUDA_VISIBLE_DEVICES may have renumbered."""

    kind = "cuda"
    # Fillers by index; a reason where products could not be captured.
    _fillers: ClassVar[dict[int, QueueFiller | str]] = {}

    def facts(self, index: int) -> DeviceFacts:
        import torch

        properties = torch.cuda.get_device_properties(index)
        arch = f"sm_{properties.major}{properties.minor}"
        if torch.version.hip:  # builds for CUDA have gcnArchName too, with the device's name in it
            arch = getattr(properties, "gcnArchName", arch)
        unusable = why_no_kernels(arch, torch.cuda.get_arch_list())
        return DeviceFacts(
            "cuda",
            index,
            properties.name,
            properties.total_memory,
            str(torch.__version__),
            capability=(properties.major, properties.minor),
            cuda=torch.version.cuda,
            hip=torch.version.hip,
            arch=arch,
            uuid=str(getattr(properties, "uuid", "")),
            pci=pci_address(properties),
            unusable=unusable,
            cache_bytes=_BEHIND_L2.get(arch.partition(":")[0], getattr(properties, "L2_cache_size", 0)),
            cache_shared=1,
        )

    def is_out_of_memory(self, error: BaseException) -> bool:
        import torch

        if isinstance(error, torch.cuda.OutOfMemoryError) or _NO_MEMORY.search(str(error)):
            return True
        if not _NOT_BEGUN.search(str(error)):
            return False
        try:
            return torch.cuda.mem_get_info()[0] < _LEFT  # counts other processes' memory too
        except Exception:  # noqa: BLE001 - a broken device was not out of memory
            return False

    def memory_meter(self, index: int) -> MemoryMeter | str:
        import torch

        # With its caching switched off torch counts nothing, and would report 0.
        if off := [name for name in _UNCOUNTED if name in os.environ]:
            return f"torch's allocator counts nothing under {off[0]}"
        return AllocatorMeter(torch.cuda, f"cuda:{index}", index, torch._C._cuda_clearCublasWorkspaces)

    @contextmanager
    def memory_limited(self, index: int, limit: int) -> Iterator[None]:
        import torch

        if any(name in os.environ for name in _UNCOUNTED):
            raise CannotLimit("with its caching switched off torch's allocator keeps no limit")
        with limit_fraction(torch.cuda, index, limit):
            yield

    def occupy(self, index: int, seconds: float) -> None:
        """Fills the queue with products. An idle GPU's clock rises within milliseconds, and a step that follows would
        begin faster than the same step in a long loop: by how much would depend on the host, and on its neighbours.

        Times shorter than one launch of products are spun: clocks do not change meantime, and caches are untouched.
        """
        import torch

        if index not in self._fillers:
            self._fillers[index] = self._make_filler(index)
        filler = self._fillers[index]
        if isinstance(filler, str) or seconds < filler.seconds:
            torch.cuda._sleep(round(seconds * _MOST_CYCLES))  # type: ignore[no-untyped-call]
            return
        for _ in range(math.ceil(seconds / filler.seconds)):
            filler.launch()

    def why_idle(self, index: int) -> str:
        filler = self._fillers.get(index, "")
        return filler if isinstance(filler, str) else ""

    def _make_filler(self, index: int) -> QueueFiller | str:
        """Captures products of random numbers, so that no mode of torch's counts them as a step's; times one launch.

        Returns the reason where that fails.
        """
        import torch

        key = f"cuda:{index}"
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(index) >= (8, 0) else torch.float16
        try:
            generator = torch.Generator(key).manual_seed(0)
            side = _FILLING_SIDE
            a, b = (torch.randn(side, side, generator=generator, device=key).to(dtype) for _ in range(2))
            product = torch.empty_like(a)

            def multiply() -> None:
                for _ in range(_FILLING_PRODUCTS):
                    torch.mm(a, b, out=product)

            launch = self.captured(index, multiply)
        except (CannotCapture, RuntimeError) as failure:  # no memory, or a device without graphs
            return next(iter(str(failure).splitlines()), type(failure).__name__)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        launch()
        end.record()
        end.synchronize()
        seconds = max(begin.elapsed_time(end) * 1e-3, _LEAST_FILLING_SECONDS)
        return QueueFiller(launch, seconds, (a, b, product))

    def captured(self, index: int, step: Callable[[], object]) -> Callable[[], object]:
        import torch

        try:
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
            # Libraries make workspaces, and autograd makes nodes, on the stream of their first use.
            stream.wait_stream(torch.cuda.current_stream(index))
            with torch.cuda.stream(stream):
                for _ in range(_BEFORE_CAPTURE):
                    step()
            torch.cuda.synchronize(index)
            with torch.cuda.graph(graph, stream=stream):
                step()
            graph.replay()
            torch.cuda.synchronize(index)
        except Exception as error:
            words = next(iter(str(error).strip().splitlines()), "")
            raise CannotCapture(f"torch captured no graph of its step: {type(error).__name__}: {words}") from error
        return graph.replay

    @contextmanager
    def collecting(self, index: int) -> Iterator[Callable[[str], AbstractContextManager[object]]]:
        import torch

        torch.cuda.synchronize(index)
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        try:
            yield torch.cuda.nvtx.range
            torch.cuda.synchronize(index)
        finally:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]

    def captured_stamper(self, index: int) -> Stamper | None:
        import torch

        return None if torch.version.hip else CapturedStamper(self.backend)

    def allocations(self, index: int) -> Mapping[str, int] | None:
        import torch

        return None if any(name in os.environ for name in _UNCOUNTED) else torch.cuda.memory_stats(index)

    def retried(self, index: int) -> int | None:
        import torch

        retries = torch.cuda.memory_stats(index).get("num_alloc_retries")  # missing before torch has begun
        return None if retries is None else int(retries)
