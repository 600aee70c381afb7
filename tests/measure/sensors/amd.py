"""A package amdsmi with the names and answers of AMD's, over devices that a test sets. No library is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

GIGABYTE = 1 << 30


class AmdSmiException(Exception):
    """What the package raises."""

    def __init__(self, code: int, info: str) -> None:
        super().__init__(code)
        self.err_code, self.err_info = code, info


AmdSmiClkType = Enum("AmdSmiClkType", ["GFX", "MEM"])
AmdSmiTemperatureType = Enum("AmdSmiTemperatureType", ["JUNCTION"])
AmdSmiTemperatureMetric = Enum("AmdSmiTemperatureMetric", ["CURRENT"])
AmdSmiMemoryType = Enum("AmdSmiMemoryType", ["VRAM"])


@dataclass
class AmdGpu:
    """One device as the driver tells of it: in the driver's units."""

    bdf: str
    energy: int = 1 << 40
    watts: int | str = 650
    clock: int | str = 2100
    held: dict[str, int | str] = field(
        default_factory=lambda: {
            f"{name}_residency_acc": 7 for name in ("ppt", "socket_thm", "hbm_thm", "vr_thm", "prochot")
        }
    )


class AmdSmi:
    """The package: functions by name, of devices by their handle. `fails` says what a function raises."""

    def __init__(self, gpus: Sequence[AmdGpu]) -> None:
        self.gpus, self.fails, self.begun = list(gpus), dict[str, AmdSmiException](), 0
        self.AmdSmiException = AmdSmiException
        self.AmdSmiClkType, self.AmdSmiMemoryType = AmdSmiClkType, AmdSmiMemoryType
        self.AmdSmiTemperatureType, self.AmdSmiTemperatureMetric = AmdSmiTemperatureType, AmdSmiTemperatureMetric

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("amdsmi_") and name in object.__getattribute__(self, "fails"):
            error = object.__getattribute__(self, "fails")[name]

            def failing(*arguments: object) -> None:
                raise error

            return failing
        return object.__getattribute__(self, name)

    def amdsmi_init(self) -> None:
        self.begun += 1

    def amdsmi_shut_down(self) -> None:
        self.begun -= 1

    def amdsmi_get_processor_handles(self) -> list[AmdGpu]:
        return self.gpus

    def amdsmi_get_gpu_device_bdf(self, gpu: AmdGpu) -> str:
        return gpu.bdf

    def amdsmi_get_gpu_device_uuid(self, gpu: AmdGpu) -> str:
        return f"uuid of {gpu.bdf}"

    def amdsmi_get_gpu_driver_info(self, gpu: AmdGpu) -> dict[str, str]:
        return {"driver_name": "amdgpu", "driver_version": "6.14.14", "driver_date": "N/A"}

    def amdsmi_get_gpu_asic_info(self, gpu: AmdGpu) -> dict[str, str]:
        return {"market_name": "AMD Instinct MI300X"}

    def amdsmi_get_gpu_vbios_info(self, gpu: AmdGpu) -> dict[str, str]:
        return {"name": "", "build_date": "", "part_number": "113-M3000100-102", "version": "022.040.003.043.000001"}

    def amdsmi_get_power_cap_info(self, gpu: AmdGpu) -> dict[str, int]:
        watt = 1_000_000
        return {
            "power_cap": 700 * watt, "default_power_cap": 750 * watt, "dpm_cap": 0, "min_power_cap": 0,
            "max_power_cap": 750 * watt,
        }  # fmt: skip

    def amdsmi_get_clock_info(self, gpu: AmdGpu, kind: AmdSmiClkType) -> dict[str, int | str]:
        if kind is AmdSmiClkType.GFX:
            return {"clk": gpu.clock, "min_clk": 500, "max_clk": 2100, "clk_locked": False, "clk_deep_sleep": 0}
        return {"clk": 1300, "min_clk": 900, "max_clk": 1300, "clk_locked": "N/A", "clk_deep_sleep": 0}

    def amdsmi_get_temp_metric(
        self, gpu: AmdGpu, where: AmdSmiTemperatureType, what: AmdSmiTemperatureMetric
    ) -> int:  # fmt: skip
        return 61

    def amdsmi_get_gpu_metrics_info(self, gpu: AmdGpu) -> dict[str, int | str]:
        return {"accumulation_counter": 1000, **gpu.held}

    def amdsmi_get_gpu_activity(self, gpu: AmdGpu) -> dict[str, int]:
        return {"gfx_activity": 98, "umc_activity": 40, "mm_activity": 0}

    def amdsmi_get_gpu_memory_total(self, gpu: AmdGpu, kind: AmdSmiMemoryType) -> int:
        return 192 * GIGABYTE

    def amdsmi_get_gpu_memory_usage(self, gpu: AmdGpu, kind: AmdSmiMemoryType) -> int:
        return 3 * GIGABYTE

    def amdsmi_get_gpu_compute_partition(self, gpu: AmdGpu) -> str:
        return "SPX"

    def amdsmi_get_gpu_process_list(self, gpu: AmdGpu) -> list[dict[str, Any]]:
        return [{"pid": 42, "memory_usage": {"gtt_mem": 0, "cpu_mem": 0, "vram_mem": GIGABYTE}}]

    def amdsmi_get_power_info(self, gpu: AmdGpu) -> dict[str, int | str]:
        return {"current_socket_power": gpu.watts, "average_socket_power": "N/A", "power_limit": 750}

    def amdsmi_get_energy_count(self, gpu: AmdGpu) -> dict[str, float]:
        return {"energy_accumulator": gpu.energy, "counter_resolution": 15.259, "timestamp": 0}


def said_by(fake: AmdSmi) -> dict[str, set[str]]:
    """The functions of the fake that ask something of a device, and the names in their answers."""
    words: dict[str, tuple[object, ...]] = {
        "amdsmi_get_clock_info": (AmdSmiClkType.GFX,),
        "amdsmi_get_temp_metric": (AmdSmiTemperatureType.JUNCTION, AmdSmiTemperatureMetric.CURRENT),
        "amdsmi_get_gpu_memory_total": (AmdSmiMemoryType.VRAM,),
        "amdsmi_get_gpu_memory_usage": (AmdSmiMemoryType.VRAM,),
    }
    found = {}
    for name in (one for one in dir(fake) if one.startswith("amdsmi_get_") and one != "amdsmi_get_processor_handles"):
        answer = getattr(fake, name)(fake.gpus[0], *words.get(name, ()))
        one = answer[0] if isinstance(answer, list) else answer
        found[name] = set(one) if isinstance(one, dict) else set()
    return found


KINDS = SimpleNamespace(
    AmdSmiClkType=AmdSmiClkType, AmdSmiMemoryType=AmdSmiMemoryType, AmdSmiTemperatureType=AmdSmiTemperatureType,
    AmdSmiTemperatureMetric=AmdSmiTemperatureMetric,
)  # fmt: skip
