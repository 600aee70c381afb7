"""Classes of devices by what their matrix units multiply: one name for all that are alike. Nothing here knows torch."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.errors import UnknownName


@dataclass(frozen=True)
class DeviceClass:
    """Devices that take and refuse the same products.

    `capability` is NVIDIA's compute capability, `arch` AMD's name of the instruction set; a processor has neither.
    """

    name: str
    words: str
    capability: tuple[int, int] | None = None
    arch: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def is_nvidia(self) -> bool:
        return self.capability is not None

    @property
    def is_amd(self) -> bool:
        return bool(self.arch)

    def at_least(self, first: tuple[int, int]) -> bool:
        """Whether it is NVIDIA's, of that compute capability or a higher one."""
        return self.capability is not None and self.capability >= first


CPU = DeviceClass("cpu", "any processor")
A100 = DeviceClass("a100", "A100, A30: Ampere, compute capability 8.0", (8, 0), aliases=("ampere", "a30", "sm80"))
L40S = DeviceClass(
    "l40s", "L40S, L4, RTX 4090: Ada, compute capability 8.9", (8, 9), aliases=("ada", "l4", "l40", "rtx4090", "sm89")
)
H100 = DeviceClass(
    "h100", "H100, H200, GH200: Hopper, compute capability 9.0", (9, 0), aliases=("hopper", "h200", "gh200", "sm90")
)
B200 = DeviceClass(
    "b200", "B200, GB200, B300: Blackwell, compute capability 10.0 and 10.3", (10, 0),
    aliases=("blackwell", "b100", "gb200", "b300", "gb300", "sm100", "sm103"),
)  # fmt: skip
RTX5090 = DeviceClass(
    "rtx5090", "RTX 5090, RTX PRO 6000: Blackwell for the desk, compute capability 12.0", (12, 0),
    aliases=("rtx5080", "rtxpro6000", "sm120"),
)  # fmt: skip
MI300X = DeviceClass("mi300x", "MI300X, MI325X: CDNA3, gfx942", arch="gfx942", aliases=("cdna3", "mi325x", "gfx942"))
MI350X = DeviceClass("mi350x", "MI350X, MI355X: CDNA4, gfx950", arch="gfx950", aliases=("cdna4", "mi355x", "gfx950"))

CLASSES = (A100, L40S, H100, B200, RTX5090, MI300X, MI350X, CPU)


def device_class(word: str) -> DeviceClass:
    """The class of that name or alias; raises UnknownName with the nearest."""
    for one in CLASSES:
        if word.lower() in (one.name, *one.aliases):
            return one
    raise UnknownName("class of devices", word, [name for one in CLASSES for name in (one.name, *one.aliases)])
