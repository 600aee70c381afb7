"""The device 'cuda': NVIDIA's GPUs, and AMD's through HIP, timed by events on the device."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, NamedTuple

from fp8bench.model import DeviceFacts
from fp8bench.profiler.gpu import AllocatorMeter, CapturedStamper, Gpu, limit_allocator
from fp8bench.protocols import CannotCapture, CannotLimit, MemoryMeter, Stamper
from fp8bench.registry import devices

# Errors of libraries and of the driver when memory is exhausted. They allocate memory without torch.
_OUT_OF_MEMORY_PATTERN = re.compile(
    r"_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED|(CUDA|HIP) error: out of memory|Triton Error \[\w+\]: out of memory"
    r"|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory|miopenStatusAllocFailed|DEVICE_ALLOCATION_FAILED"
    r"|NVML_SUCCESS == .*INTERNAL ASSERT FAILED.*CUDACachingAllocator"  # torch found no process that owns the memory
)
# Errors that libraries raise when memory is exhausted, but also for other causes. With _ENOUGH_FREE_BYTES or more free,
# lack of memory is not the cause.
_NOT_INITIALIZED_PATTERN = re.compile(r"(BLAS|DNN|SOLVER|SPARSE)_STATUS_NOT_INITIALIZED")
_ENOUGH_FREE_BYTES = 1 << 30
# A clock rate that no GPU exceeds. torch's sleep counts clock cycles, so at a lower rate it lasts longer.
_MAX_CYCLES_PER_SECOND = 3e9
# The bytes of last-level caches behind the L2 cache, by architecture. torch does not report these caches.
_CACHE_BYTES_BY_ARCHITECTURE = {"gfx942": 256 << 20, "gfx950": 256 << 20}
# A GPU's queue is filled with products of square matrices of this side. The three matrices of a product have 24 MiB in
# bfloat16.
_FILLING_SIDE = 2048
# The number of products in one launch. They take half a millisecond on an H200.
_FILLING_PRODUCTS = 16
# If the measured time of a launch is shorter, this time is used instead. It limits how many launches fill the queue.
_MINIMUM_FILLING_SECONDS = 20e-6
# The number of steps that run before a graph is captured, as in torch's documentation.
_WARM_UP_STEPS = 3
_CACHING_OFF_VARIABLES = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")


def _find_caching_off_variable() -> str:
    """Returns the environment variable that switches off the caching of torch's allocator, or ''. Without caching, the
    allocator counts nothing.
    """
    return next((name for name in _CACHING_OFF_VARIABLES if name in os.environ), "")


def format_pci_address(properties: object) -> str:
    """Returns a GPU's PCI domain, bus and device in hexadecimal, as the driver writes them. Returns '' if torch is
    too old to know them.
    """
    parts = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    numbers = [part for part in parts if isinstance(part, int)]
    return "{:08X}:{:02X}:{:02X}".format(*numbers) if len(numbers) == len(parts) else ""


def explain_missing_kernels(arch: str, build_names: Sequence[str]) -> str:
    """Returns why torch has no kernels for the architecture `arch`. It was built for the architectures `build_names`.
    Returns '' if it has kernels, or if that is unknown.

    NVIDIA's machine code (sm_90) runs on later minor versions of its major version. NVIDIA's intermediate code
    (compute_90) runs on all later versions. With the suffix 'a', either code runs on exactly its version, and with the
    suffix 'f' on later minor versions of its major version. AMD's code runs only on the architecture for which it was
    built, except generic code (gfx9-4-generic), which counts as suitable for every GPU.
    """
    device = _parse_architecture(arch)
    # The names of AMD's architectures may have features after a colon, such as 'gfx942:sramecc+'.
    names_without_features = {name.partition(":")[0] for name in build_names}
    has_generic_code = any("generic" in name for name in build_names)
    is_built_in = has_generic_code or arch.partition(":")[0] in names_without_features
    built_architectures = filter(None, map(_parse_architecture, build_names))
    if (
        not build_names
        or is_built_in
        or (device is not None and any(_can_run_architecture(device, target) for target in built_architectures))
    ):
        return ""
    return (
        f"this torch has no kernels for {arch}: it was built for {', '.join(build_names)}. Install a build of torch "
        "that has them"
    )


class _Architecture(NamedTuple):
    machine_code: bool
    major: int
    minor: int
    suffix: str


def _parse_architecture(name: str) -> _Architecture | None:
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
    return _Architecture(parts[1] == "sm", int(parts[2]), int(parts[3]), parts[4]) if parts else None


def _can_run_architecture(device: _Architecture, target: _Architecture) -> bool:
    """Returns whether a GPU of the architecture `device` can run code that was built for the architecture `target`."""
    if target.suffix == "a":
        return (device.major, device.minor) == (target.major, target.minor)
    is_same_or_later = (device.major, device.minor) >= (target.major, target.minor)
    runs_on_later_major = not (target.machine_code or target.suffix)
    return is_same_or_later and (device.major == target.major or runs_on_later_major)


class QueueFiller(NamedTuple):
    """Products in a captured graph that keep a GPU busy: a function that launches them, and the seconds that one
    launch takes.
    """

    launch: Callable[[], object]
    seconds: float
    # The graph reads and writes these tensors. They are stored here, because the graph does not keep them alive.
    tensors: tuple[object, ...] = ()


@devices.register("cuda")
class Cuda(Gpu):
    """A GPU of NVIDIA or AMD. The index is torch's. CUDA_VISIBLE_DEVICES may have renumbered the GPUs."""

    kind = "cuda"
    # For each device's index: its queue filler, or the reason why no products could be captured.
    _filler_by_index: ClassVar[dict[int, QueueFiller | str]] = {}

    def facts(self, index: int) -> DeviceFacts:
        import torch

        device_properties = torch.cuda.get_device_properties(index)
        architecture = f"sm_{device_properties.major}{device_properties.minor}"
        if torch.version.hip:  # a CUDA build has gcnArchName too, but that contains the name of the device
            architecture = getattr(device_properties, "gcnArchName", architecture)
        return DeviceFacts(
            "cuda",
            index,
            device_properties.name,
            device_properties.total_memory,
            str(torch.__version__),
            capability=(device_properties.major, device_properties.minor),
            cuda=torch.version.cuda,
            hip=torch.version.hip,
            arch=architecture,
            uuid=str(getattr(device_properties, "uuid", "")),
            pci=format_pci_address(device_properties),
            unusable=explain_missing_kernels(architecture, torch.cuda.get_arch_list()),
            cache_bytes=_CACHE_BYTES_BY_ARCHITECTURE.get(
                architecture.partition(":")[0], getattr(device_properties, "L2_cache_size", 0)
            ),
            cache_shared=1,  # the number of processors that share the cache
        )

    def is_out_of_memory(self, error: BaseException) -> bool:
        import torch

        if isinstance(error, torch.cuda.OutOfMemoryError) or _OUT_OF_MEMORY_PATTERN.search(str(error)):
            return True
        if not _NOT_INITIALIZED_PATTERN.search(str(error)):
            return False
        try:
            # Ask the driver, because it also counts the memory that other processes use.
            return torch.cuda.mem_get_info()[0] < _ENOUGH_FREE_BYTES
        except Exception:  # noqa: BLE001 - a broken device was not out of memory
            return False

    def memory_meter(self, index: int) -> MemoryMeter | str:
        import torch

        if caching_off_variable := _find_caching_off_variable():
            return f"torch's allocator counts nothing under {caching_off_variable}"
        return AllocatorMeter(torch.cuda, f"cuda:{index}", index, torch._C._cuda_clearCublasWorkspaces)

    @contextmanager
    def memory_limited(self, index: int, limit: int) -> Iterator[None]:
        import torch

        if _find_caching_off_variable():
            raise CannotLimit("torch's allocator cannot limit memory while its caching is switched off")
        with limit_allocator(torch.cuda, index, limit):
            yield

    def occupy(self, index: int, seconds: float) -> None:
        """Fills the queue with products, so that the GPU does not idle before a step. A GPU that has idled for some
        milliseconds runs at a higher clock than in a long loop. The step would be faster by an amount that depends on
        the host and its other processes.

        If `seconds` is shorter than one launch of products, the GPU spins instead, which leaves caches untouched. Its
        clock does not change in so short a time.
        """
        import torch

        if index not in self._filler_by_index:
            self._filler_by_index[index] = self._make_filler(index)
        queue_filler = self._filler_by_index[index]
        if isinstance(queue_filler, str) or seconds < queue_filler.seconds:
            torch.cuda._sleep(round(seconds * _MAX_CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
            return
        for _ in range(math.ceil(seconds / queue_filler.seconds)):
            queue_filler.launch()

    def why_idle(self, index: int) -> str:
        """Returns why `occupy` only lets the GPU spin, which counts as idling: the reason why no products could be
        captured. Returns '' if products were captured, or were not needed yet.
        """
        queue_filler = self._filler_by_index.get(index, "")
        return queue_filler if isinstance(queue_filler, str) else ""

    def _make_filler(self, index: int) -> QueueFiller | str:
        """Captures products of random numbers in a graph and times one launch of the graph. Returns the reason if that
        fails. Products in a graph are not counted as operators of the step.
        """
        import torch

        key = f"cuda:{index}"
        # GPUs below capability 8.0 cannot multiply bfloat16 in hardware.
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(index) >= (8, 0) else torch.float16
        try:
            generator = torch.Generator(key).manual_seed(0)
            side_length = _FILLING_SIDE
            a, b = (torch.randn(side_length, side_length, generator=generator, device=key).to(dtype) for _ in range(2))
            product = torch.empty_like(a)

            def multiply() -> None:
                for _ in range(_FILLING_PRODUCTS):
                    torch.mm(a, b, out=product)

            launch_products = self.captured(index, multiply)
        except (CannotCapture, RuntimeError) as failure:  # memory does not suffice, or the device has no CUDA graphs
            return next(iter(str(failure).splitlines()), type(failure).__name__)
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start_event.record()
        launch_products()
        end_event.record()
        end_event.synchronize()
        seconds = max(start_event.elapsed_time(end_event) * 1e-3, _MINIMUM_FILLING_SECONDS)
        return QueueFiller(launch_products, seconds, (a, b, product))

    def captured(self, index: int, step: Callable[[], object]) -> Callable[[], object]:
        import torch

        try:
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
            # First run the step on the capture stream. Libraries create workspaces, and autograd creates nodes, on
            # the stream of their first use.
            stream.wait_stream(torch.cuda.current_stream(index))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP_STEPS):
                    step()
            torch.cuda.synchronize(index)
            with torch.cuda.graph(graph, stream=stream):
                step()
            # Replay the graph once, so that an error occurs here and not in a timed step.
            graph.replay()
            torch.cuda.synchronize(index)
        except Exception as error:
            first_line = next(iter(str(error).strip().splitlines()), "")
            raise CannotCapture(f"torch captured no graph of its step: {type(error).__name__}: {first_line}") from error
        return graph.replay

    @contextmanager
    def collecting(self, index: int) -> Iterator[Callable[[str], AbstractContextManager[object]]]:
        """Lets an external profiler (nsys, ncu) record within the `with` block. Yields the function that opens a named
        range.
        """
        import torch

        # Finish earlier work first, so that the profiler does not record it.
        torch.cuda.synchronize(index)
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        try:
            yield torch.cuda.nvtx.range
            torch.cuda.synchronize(index)
        finally:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]

    def captured_stamper(self, index: int) -> Stamper | None:
        import torch

        # On AMD's GPUs, torch can capture timing events in a graph only with ROCm 7.0 or later, so they are not used
        # there.
        return None if torch.version.hip else CapturedStamper(self.backend)

    def allocations(self, index: int) -> Mapping[str, int] | None:
        import torch

        return None if _find_caching_off_variable() else torch.cuda.memory_stats(index)

    def retried(self, index: int) -> int | None:
        import torch

        # the counter is missing until torch has initialised CUDA
        retries = torch.cuda.memory_stats(index).get("num_alloc_retries")
        return None if retries is None else int(retries)
