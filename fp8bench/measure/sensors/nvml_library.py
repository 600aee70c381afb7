"""NVML in this process. Its error codes are put into words here and nowhere else."""

from __future__ import annotations

from typing import Any

from fp8bench.measure.sensors.driver_library import DriverLibrary
from fp8bench.model.readings import NoReading

NOT_SUPPORTED = 3
NOT_FOUND = 6
FUNCTION_NOT_FOUND = 13

REASONS: dict[int, str] = {
    1: "NVML is not initialised",
    2: "NVML refused the arguments",
    3: "this device or its driver does not support it",
    4: "this user has no permission",
    5: "NVML was already initialised",
    6: "NVML found no such thing",
    7: "NVML needed more room for its answer",
    8: "the GPU's external power is not connected",
    9: "the NVIDIA driver is not loaded",
    10: "NVML's own time ran out",
    11: "the GPU's interrupts do not work",
    12: "there is no NVML library (libnvidia-ml.so.1): no NVIDIA driver here",
    13: "this driver's NVML lacks the function: it is older than nvidia-ml-py",
    14: "the GPU's infoROM is corrupted",
    15: "the GPU is lost: it fell off the bus or cannot be reached",
    16: "the GPU must be reset first",
    17: "the operating system or a container blocks it",
    18: "NVML and the driver are of different versions: restart after the update",
    19: "the GPU is in use",
    20: "NVML ran out of memory",
    21: "NVML has no data",
    22: "a virtual GPU's ECC is not supported",
    23: "the GPU has no resources left for it",
    24: "this clock is not supported",
    25: "NVML does not know this version of the structure",
    26: "this driver's NVML has given the function up",
    27: "the GPU is not ready yet",
    28: "NVML finds no GPU",
    29: "the GPU is in a state that does not allow it",
    30: "this kind of reset is not supported",
    999: "an internal driver error",
}


def reason(code: int) -> str:
    """Why a call failed, with the code, so that it can be looked up."""
    return f"{REASONS.get(code, 'an error that fp8bench does not know')} (NVML error {code})"


class Library(DriverLibrary):
    """NVML by pynvml."""

    name, package, end = "NVML", "nvidia-ml-py", "nvmlShutdown"

    def load(self) -> Any:
        try:
            import pynvml
        except ImportError as error:
            raise NoReading("the package nvidia-ml-py is not installed") from error
        return pynvml

    def begin(self) -> None:
        self.call("nvmlInitWithFlags", 0)

    def failure(self, error: Exception) -> NoReading | None:
        return NoReading(reason(error.value), error.value) if isinstance(error, self._module.NVMLError) else None


LIBRARY = Library()
