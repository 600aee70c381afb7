"""GPUs that torch reaches as 'cuda' (NVIDIA, and AMD through HIP), timed by events on the device."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from fp8bench.model import DeviceFacts
from fp8bench.profiler.gpu import AllocatorMeter, Gpu, fraction_limited
from fp8bench.protocols import CannotCapture, CannotLimit, MemoryMeter
from fp8bench.registry import devices

# Libraries and the driver ask for memory by themselves, and say in their own words that there is none.
_NO_MEMORY = re.compile(
    r"_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED|(CUDA|HIP) error: out of memory|Triton Error \[\w+\]: out of memory"
    r"|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory|miopenStatusAllocFailed|DEVICE_ALLOCATION_FAILED"
    r"|NVML_SUCCESS == .*INTERNAL ASSERT FAILED.*CUDACachingAllocator"  # torch could not say whose memory it is
)
# What they say too if they cannot begin for another reason: a device with that much left was not out of memory.
_NOT_BEGUN = re.compile(r"(BLAS|DNN|SOLVER|SPARSE)_STATUS_NOT_INITIALIZED")
_LEFT = 1 << 30
# In a second, of any GPU: torch's sleep counts cycles, and at a lower clock it is a longer one.
_MOST_CYCLES = 3e9
# These have a last cache behind L2, of which torch says nothing.
_BEHIND_L2 = {"gfx942": 256 << 20, "gfx950": 256 << 20}
# As torch's own documentation has it.
_BEFORE_CAPTURE = 3
_UNCOUNTED = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")


def pci_address(properties: object) -> str:
    """Domain, bus and device in hexadecimal, as the driver writes them; '' where torch is too old to say."""
    parts = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    known = [part for part in parts if isinstance(part, int)]
    return "{:08X}:{:02X}:{:02X}".format(*known) if len(known) == len(parts) else ""


def why_no_kernels(arch: str, built: Sequence[str]) -> str:
    """Why a build of torch for these architectures has no kernels for another; '' where it has, or nobody knows.

    Machine code of NVIDIA's (sm_90) runs on its own major capability, from its minor one on; with an 'a' on that one
    alone. What it is translated from (compute_90) runs on all later ones. AMD's runs on what it was made for.
    """
    have = _architecture(arch)
    known = [architecture for architecture in map(_architecture, built) if architecture is not None]
    fits = any(name.partition(":")[0] == arch.partition(":")[0] or "generic" in name for name in built)
    if not built or fits or (have is not None and any(_runs(have, architecture) for architecture in known)):
        return ""
    return (
        f"this torch has no kernels for {arch}: it was built for {', '.join(built)}. Install a build of torch that has "
        "them"
    )


def _bytes_left() -> float:
    """Of the current device's memory, which everybody's counts in; none is missing where it does not answer."""
    import torch

    try:
        return float(torch.cuda.mem_get_info()[0])
    except Exception:  # noqa: BLE001 - whatever a broken device says
        return math.inf


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


@devices.register("cuda")
class Cuda(Gpu):
    """One GPU each; the index is torch's, which CUDA_VISIBLE_DEVICES may have renumbered."""

    kind = "cuda"

    def facts(self, index: int) -> DeviceFacts:
        import torch

        properties = torch.cuda.get_device_properties(index)
        arch = f"sm_{properties.major}{properties.minor}"
        if torch.version.hip:  # builds for CUDA have this name too, and give the device's there
            arch = getattr(properties, "gcnArchName", arch)
        unusable = why_no_kernels(arch, torch.cuda.get_arch_list())
        return DeviceFacts(
            "cuda", index, properties.name, properties.total_memory, str(torch.__version__),
            capability=(properties.major, properties.minor), cuda=torch.version.cuda, hip=torch.version.hip,
            arch=arch, uuid=str(getattr(properties, "uuid", "")), pci=pci_address(properties), unusable=unusable,
            cache_bytes=_BEHIND_L2.get(arch.partition(":")[0], getattr(properties, "L2_cache_size", 0)),
            cache_shared=1,
        )  # fmt: skip

    def is_out_of_memory(self, error: BaseException) -> bool:
        import torch

        if isinstance(error, torch.cuda.OutOfMemoryError) or _NO_MEMORY.search(str(error)):
            return True
        return bool(_NOT_BEGUN.search(str(error))) and _bytes_left() < _LEFT

    def memory_meter(self, index: int) -> MemoryMeter | str:
        import torch

        # With its caching switched off torch counts nothing, and would say 0.
        if off := [name for name in _UNCOUNTED if name in os.environ]:
            return f"torch's allocator counts nothing under {off[0]}"
        return AllocatorMeter(torch.cuda, f"cuda:{index}", index, torch._C._cuda_clearCublasWorkspaces)

    @contextmanager
    def memory_limited(self, index: int, limit: int) -> Iterator[None]:
        """By torch's allocator, which counts what it has reserved, by this process alone."""
        import torch

        if any(name in os.environ for name in _UNCOUNTED):
            raise CannotLimit("with its caching switched off torch's allocator keeps no limit")
        with fraction_limited(torch.cuda, index, limit):
            yield

    def occupy(self, index: int, seconds: float) -> None:
        import torch

        torch.cuda._sleep(round(seconds * _MOST_CYCLES))  # type: ignore[no-untyped-call]

    def captured(self, index: int, step: Callable[[], object]) -> Callable[[], object]:
        """By a graph, whose memory is a pool of its own."""
        import torch

        try:
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
            # Libraries make their workspaces, and autograd its nodes, on the stream that they are first used on.
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

    def allocations(self, index: int) -> Mapping[str, int] | None:
        import torch

        return None if any(name in os.environ for name in _UNCOUNTED) else torch.cuda.memory_stats(index)

    def retried(self, index: int) -> int | None:
        import torch

        found = torch.cuda.memory_stats(index).get("num_alloc_retries")  # nothing is counted before torch has begun
        return None if found is None else int(found)
