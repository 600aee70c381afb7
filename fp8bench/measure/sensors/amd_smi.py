"""One AMD device as AMD SMI sees it, through AMD's package amdsmi, which comes with ROCm. Written for amdsmi 7.0.2.

Names of values and the bits of throttle reasons are NVML's, so that readers need to know only one set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from functools import partial
from io import StringIO
from typing import Any

from fp8bench.measure.sensors.driver import About, Ask, DriverDevice, DriverLibrary, Queries, Query, Way, others_queries
from fp8bench.measure.sensors.nvml_match import DeviceIdentity, address_of
from fp8bench.model import consumed
from fp8bench.model.readings import NoReading, Reading, first_of, positive

_MEGA = 1e6
_MICRO = 1e-6
# Names of the firmware's counts -> NVML's throttle reasons: the firmware's own regulation of temperatures is NVML's
# software slowdown; voltage regulators and the external signal of overheating are its hardware slowdown.
_HELD = {
    "ppt_residency_acc": 0x4,
    "socket_thm_residency_acc": 0x20,
    "hbm_thm_residency_acc": 0x20,
    "vr_thm_residency_acc": 0x40,
    "prochot_residency_acc": 0x40,
}


class AmdLibrary(DriverLibrary):
    """amdsmi, which loads AMD SMI when it is imported."""

    name, package, end = "AMD SMI", "amdsmi", "amdsmi_shut_down"

    def load(self) -> Any:
        try:
            # It prints where it looks for its library.
            with redirect_stdout(StringIO()):
                import amdsmi
        except ImportError as error:
            raise NoReading("the package amdsmi, which comes with ROCm, is not installed") from error
        except (OSError, KeyError, AttributeError) as error:
            raise NoReading(f"amdsmi finds no AMD SMI library that it knows ({error}): no ROCm here?") from error
        return amdsmi

    def begin(self) -> None:
        self.call("amdsmi_init")

    def failure(self, error: Exception) -> NoReading | None:
        if not isinstance(error, self._module.AmdSmiException):
            return None
        code = getattr(error, "err_code", None)
        said = " ".join(str(getattr(error, "err_info", "") or error).split())
        return NoReading(f"{said} (AMD SMI error {code})", code)

    def word(self, kind: str, name: str) -> Any:
        return getattr(getattr(self._module, kind), name)


LIBRARY = AmdLibrary()


class AmdDevice(DriverDevice):
    """The AMD SMI device with a HIP device's PCI address: HIP counts devices in an order of its own."""

    library: AmdLibrary

    def __init__(self, identity: DeviceIdentity, library: AmdLibrary = LIBRARY) -> None:
        self._identity = identity
        throttling = _Throttling()
        super().__init__(library, _queries(library, throttling))
        with suppress(NoReading):
            library.bounded(lambda: throttling.read(self.ask))  # counts are compared with these from now on

    def find_handle(self) -> Any:
        call = self.library.call
        handles = call("amdsmi_get_processor_handles")
        wanted = address_of(self._identity.pci)
        same = [
            handle for handle in handles if wanted and address_of(call("amdsmi_get_gpu_device_bdf", handle)) == wanted
        ]
        if not same and (wanted or len(handles) != 1):
            raise NoReading(
                f"AMD SMI lists {len(handles)} device(s), none at {self._identity.pci or 'a known address'}"
            )
        # Compute partitions of a device share one address and one power.
        self.shared_by = len(same) if len(same) > 1 else 0
        return (same or handles)[0]


class _Throttling:
    """What held the clocks back since the last look, by the firmware's counts of samples per limit."""

    def __init__(self) -> None:
        self._before: Mapping[str, float] | None = None

    def read(self, ask: Ask) -> Reading:
        answer = ask("amdsmi_get_gpu_metrics_info")
        now = {name: _number(answer, name) for name in _HELD}
        before, self._before = self._before, now
        if before is None:
            raise NoReading("nobody has looked before: what holds the clocks back is counted from look to look")
        mask = 0
        for name, bit in _HELD.items():
            mask |= bit if now[name] > before[name] else 0
        return Reading(mask, "mask", "amdsmi_get_gpu_metrics_info")


def _number(answer: Mapping[str, Any], name: str) -> float:
    value = answer.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NoReading(f"AMD SMI does not know its {name} ({value})")
    return value


def _of(function: str, name: str, factor: float, unit: str, *arguments: Callable[[], Any]) -> Way:
    """One of several numbers that a function returns: never 0, times `factor`."""
    return lambda ask: positive(
        _number(ask(function, *(argument() for argument in arguments)), name) * factor, unit, function
    )


def _text(function: str, name: str = "") -> Way:
    def read(ask: Ask) -> Reading:
        answer = ask(function)
        words = str(answer.get(name, "") if name else answer)
        if words in ("", "N/A"):
            raise NoReading(f"{function} says nothing")
        return Reading(words, "", function)

    return read


def energy(ask: Ask) -> Reading:
    """Joules that the socket has taken since its driver was loaded."""
    answer = ask("amdsmi_get_energy_count")
    joules = _number(answer, "energy_accumulator") * _number(answer, "counter_resolution") * _MICRO
    return positive(joules, "J", "amdsmi_get_energy_count")


def power(ask: Ask) -> Reading:
    """The socket's present power; older devices tell an average only."""
    names = ("current_socket_power", "average_socket_power")
    return first_of(*(partial(_of("amdsmi_get_power_info", name, 1.0, "W"), ask) for name in names))


def _process_memory(pid: int) -> Query:
    def read(ask: Ask) -> Reading:
        listed = ask("amdsmi_get_gpu_process_list")
        used = [process["memory_usage"]["vram_mem"] for process in listed if process["pid"] == pid]
        if not used:
            raise NoReading(f"process {pid} is not among the {len(listed)} that AMD SMI lists")
        return Reading(int(used[0]), "B", "amdsmi_get_gpu_process_list")

    return Query("process_memory", read)


def _listed(ask: Ask) -> tuple[list[tuple[int, int]], str]:
    source = "amdsmi_get_gpu_process_list"
    return [(int(process["pid"]), int(process["memory_usage"]["vram_mem"])) for process in ask(source)], source


def _uncounted(ask: Ask) -> Reading:
    raise NoReading("AMD SMI counts samples of it, not seconds")


def _queries(library: AmdLibrary, throttling: _Throttling) -> Queries:
    def word(kind: str, name: str) -> Callable[[], Any]:
        return lambda: library.word(kind, name)

    def clock(kind: str, which: str) -> Way:
        return _of("amdsmi_get_clock_info", which, _MEGA, "Hz", word("AmdSmiClkType", kind))

    def memory(function: str) -> Way:
        of = word("AmdSmiMemoryType", "VRAM")
        return lambda ask: Reading(ask(function, of()), "B", function)

    def temperature(ask: Ask) -> Reading:
        where, what = word("AmdSmiTemperatureType", "JUNCTION")(), word("AmdSmiTemperatureMetric", "CURRENT")()
        return Reading(ask("amdsmi_get_temp_metric", where, what), "degC", "amdsmi_get_temp_metric")

    def use(name: str) -> Way:
        function = "amdsmi_get_gpu_activity"
        return lambda ask: Reading(_number(ask(function), name) / 100, "share", function)

    changing = (
        Query("sm_clock", clock("GFX", "clk")), Query("memory_clock", clock("MEM", "clk")),
        Query("temperature", temperature), Query("throttle", throttling.read),
    )  # fmt: skip
    cap = "amdsmi_get_power_cap_info"
    return Queries(
        facts=(
            Query("driver", _text("amdsmi_get_gpu_driver_info", "driver_version")),
            Query("name", _text("amdsmi_get_gpu_asic_info", "market_name")),
            Query("uuid", _text("amdsmi_get_gpu_device_uuid")),
            Query("pci", _text("amdsmi_get_gpu_device_bdf")),
            Query("vbios", _text("amdsmi_get_gpu_vbios_info", "version")),
            Query("power_cap", _of(cap, "power_cap", _MICRO, "W")),
            Query("power_cap_default", _of(cap, "default_power_cap", _MICRO, "W")),
            Query("sm_clock_max", clock("GFX", "max_clk")),
            Query("memory_clock_max", clock("MEM", "max_clk")),
            Query("partition", _text("amdsmi_get_gpu_compute_partition")),
            Query("memory_total", memory("amdsmi_get_gpu_memory_total"), About.PART),
        ),
        state=(
            Query("power", power), *changing, Query("use", use("gfx_activity")),
            Query("memory_use", use("umc_activity")), Query("memory_used", memory("amdsmi_get_gpu_memory_usage")),
        ),
        changing=changing,
        violations=tuple(Query(violation.name, _uncounted) for violation in consumed.VIOLATIONS),
        process_memory=_process_memory,
        others=lambda pid: others_queries(pid, _listed),
    )  # fmt: skip
