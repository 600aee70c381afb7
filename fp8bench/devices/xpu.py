"""The device 'xpu': Intel's GPUs, timed by events on the device."""

from __future__ import annotations

from contextlib import AbstractContextManager

from fp8bench.model import DeviceFacts
from fp8bench.profiler.gpu import AllocatorMeter, Gpu, limit_allocator
from fp8bench.protocols import CannotLimit, MemoryMeter
from fp8bench.registry import devices

# Errors of oneDNN, SYCL and Level Zero when memory is exhausted. For its own allocations torch raises a special
# exception.
_OUT_OF_MEMORY_TEXTS = (
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "UR_RESULT_ERROR_OUT_OF_RESOURCES",
    "ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "XPU out of memory",
)


@devices.register("xpu")
class Xpu(Gpu):
    """A GPU of Intel. The index is torch's. ZE_AFFINITY_MASK may have renumbered the GPUs."""

    kind = "xpu"

    def facts(self, index: int) -> DeviceFacts:
        import torch

        device_properties = torch.xpu.get_device_properties(index)
        return DeviceFacts(
            "xpu",
            index,
            device_properties.name,
            device_properties.total_memory,
            str(torch.__version__),
            arch=f"{getattr(device_properties, 'architecture', 0):#x}",
            uuid=str(getattr(device_properties, "uuid", "")),
            scaled_products=torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "XPU"),
        )

    def is_out_of_memory(self, error: BaseException) -> bool:
        import torch

        return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in _OUT_OF_MEMORY_TEXTS)

    def memory_meter(self, index: int) -> MemoryMeter | str:
        import torch

        # The last argument would free workspaces of libraries such as cuBLAS. Here it does nothing.
        return AllocatorMeter(torch.xpu, f"xpu:{index}", index, lambda: None)

    def memory_limited(self, index: int, limit: int) -> AbstractContextManager[None]:
        import torch

        if not hasattr(torch.xpu, "get_per_process_memory_fraction"):
            raise CannotLimit("this torch's allocator cannot limit memory of XPUs: use torch 2.13")
        return limit_allocator(torch.xpu, index, limit)
