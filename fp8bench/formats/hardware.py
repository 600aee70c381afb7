"""Classes of devices, the formats that their hardware supports, and what the name of a GPU kernel reveals. Does not
use torch.

Kernel names are those of cuBLAS (`nvjet_qqtst_...`, `sm90_xmma_gemm_e4m3bf16_...`, `ampere_bf16_s16816gemm_...`),
CUTLASS (`cutlass3x_sm90_tensorop_..._e4m3_e4m3_f32_bf16_...`, or C++ types), FBGEMM (`f8f8bf16_rowwise`), hipBLASLt
(`Cijk_Ailk_Bljk_F8BS_...`) and Triton. Other names are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from fp8bench.errors import UnknownName
from fp8bench.model import DeviceFacts, Level, Support


@dataclass(frozen=True)
class DeviceClass:
    """A class of devices that support the same products. `capability` is NVIDIA's compute capability, and `arch`
    AMD's name of the instruction set. A CPU has neither.
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

    def has_compute_capability(self, first: tuple[int, int]) -> bool:
        """Returns whether this is a class of NVIDIA's devices with at least the compute capability `first`."""
        return self.capability is not None and self.capability >= first


CPU = DeviceClass("cpu", "any CPU")
A100 = DeviceClass("a100", "A100, A30: Ampere, compute capability 8.0", (8, 0), aliases=("ampere", "a30", "sm80"))
L40S = DeviceClass(
    "l40s", "L40S, L4, RTX 4090: Ada, compute capability 8.9", (8, 9), aliases=("ada", "l4", "l40", "rtx4090", "sm89")
)
H100 = DeviceClass(
    "h100", "H100, H200, GH200: Hopper, compute capability 9.0", (9, 0), aliases=("hopper", "h200", "gh200", "sm90")
)
B200 = DeviceClass(
    "b200",
    "B200, GB200, B300: Blackwell, compute capability 10.0 and 10.3",
    (10, 0),
    aliases=("blackwell", "b100", "gb200", "b300", "gb300", "sm100", "sm103"),
)
RTX5090 = DeviceClass(
    "rtx5090",
    "RTX 5090, RTX PRO 6000: Blackwell for the desk, compute capability 12.0",
    (12, 0),
    aliases=("rtx5080", "rtxpro6000", "sm120"),
)
MI300X = DeviceClass("mi300x", "MI300X, MI325X: CDNA3, gfx942", arch="gfx942", aliases=("cdna3", "mi325x", "gfx942"))
MI350X = DeviceClass("mi350x", "MI350X, MI355X: CDNA4, gfx950", arch="gfx950", aliases=("cdna4", "mi355x", "gfx950"))

DEVICE_CLASSES = (A100, L40S, H100, B200, RTX5090, MI300X, MI350X, CPU)


def nvidia_class(capability: tuple[int, int]) -> DeviceClass:
    """Returns the class of NVIDIA's devices for a compute capability: the newest listed class with the same major
    version and no higher minor version. Returns a new class if none is listed.
    """
    classes_of_major_version = [
        kind for kind in DEVICE_CLASSES if kind.capability and kind.capability[0] == capability[0]
    ]
    older_device_classes = [
        kind for kind in classes_of_major_version if kind.capability and kind.capability <= capability
    ]
    # DEVICE_CLASSES has the older capabilities first.
    if older_device_classes:
        return older_device_classes[-1]
    return DeviceClass("", f"compute capability {_format_capability(capability)}", capability)


def amd_class(arch: str) -> DeviceClass | None:
    """Returns the class of AMD's devices with an instruction set, for example 'gfx942:sramecc+:xnack-'. Returns None if
    the instruction set is not listed.
    """
    return next((kind for kind in DEVICE_CLASSES if kind.is_amd and kind.arch == arch.partition(":")[0]), None)


def find_device_class(word: str) -> DeviceClass:
    """Returns the class of devices with this name or alias ('h100', 'hopper'). Raises UnknownName."""
    device_class_by_name = {name: kind for kind in DEVICE_CLASSES for name in (kind.name, *kind.aliases)}
    if word.lower() not in device_class_by_name:
        raise UnknownName("class of devices", word, list(device_class_by_name))
    return device_class_by_name[word.lower()]


AMPERE = (8, 0)
ADA = (8, 9)


def is_nvidia(facts: DeviceFacts) -> bool:
    return facts.kind == "cuda" and facts.hip is None


def is_amd(facts: DeviceFacts) -> bool:
    """Returns whether a device is an AMD GPU. torch calls such a device cuda too."""
    return facts.kind == "cuda" and facts.hip is not None


# Each of these three functions takes a reason, and makes a Support with a fixed level.
native, emulated, refused = (partial(Support, level) for level in (Level.NATIVE, Level.EMULATED, Level.REFUSED))


def support_from_capability(facts: DeviceFacts, first_capability: tuple[int, int], words: str) -> Support:
    """Returns native support if the device has at least the compute capability `first_capability`, and refused support
    otherwise.
    """
    device_capability = facts.capability or (0, 0)
    if device_capability >= first_capability:
        return native(f"{words} units from compute capability {_format_capability(first_capability)}")
    return refused(
        f"{words} needs compute capability {_format_capability(first_capability)}; this device has "
        f"{_format_capability(device_capability)}"
    )


def is_intel(facts: DeviceFacts) -> bool:
    """Returns whether a device is an Intel GPU."""
    return facts.kind == "xpu"


def select_by_vendor(
    facts: DeviceFacts, words: str, cpu: Support, amd: Support, nvidia: Support, intel: Support
) -> Support:
    """Returns the support of the device's vendor, which is one of the last four arguments. Returns refused support for
    a device of an unknown kind. `words` names the format in the reason.
    """
    if not facts.accelerated:
        return cpu
    if is_intel(facts):
        return intel
    return amd if is_amd(facts) else nvidia if is_nvidia(facts) else refuse_unknown_kind(facts, words)


def refuse_unknown_kind(facts: DeviceFacts, words: str) -> Support:
    return refused(f"{words} is not known to work on {facts.kind} devices")


def emulated_everywhere(facts: DeviceFacts, words: str) -> Support:
    """Returns the support of a format that no device multiplies natively: emulated, or refused on a device of an
    unknown kind. `words` names the format in the reason.
    """
    if not facts.accelerated:
        return make_emulated_support(f"no hardware for {words}")
    if facts.kind == "cuda" or is_intel(facts):
        return make_emulated_support(f"no native backend for {words} yet")
    return refuse_unknown_kind(facts, words)


def make_emulated_support(reason: str) -> Support:
    return emulated(f"{reason}: values rounded, products in fp32")


def _format_capability(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"


# Names of kernels that multiply matrices. Names of casts, and of kernels that sum partial results, do not match.
_MULTIPLYING_NAME_PATTERN = re.compile(r"gemm|nvjet|cutlass|xmma|cijk|matmul|scaled_mm|wgmma|f8f8", re.IGNORECASE)
_REDUCING_NAME_PATTERN = re.compile(r"reduce|splitk_?reduce|memset", re.IGNORECASE)
# The number of bits of the operands that a kernel multiplies, by patterns in its name. The fewest bits come first,
# because a name also contains the type of the result.
_FORMAT_BITS_BY_NAME = (
    (4, re.compile(r"e2m1|float_?4|[mn][xv]_?f(p)?4|(?<![a-z0-9])fp4", re.IGNORECASE)),
    (8, re.compile(r"e4m3|e5m2|float_?8|fp8|f8f8|nvjet_(sm\d+_)?qq|_F8[BHS]?|_b8", re.IGNORECASE)),
    (16, re.compile(r"bf16|bfloat16|f16|half_t|hgemm|16816|nvjet_(sm\d+_)?[th]s[th]|_[BH][BHS]S", re.IGNORECASE)),
    (32, re.compile(r"tf32|sgemm|f32f32|nvjet_(sm\d+_)?sss|_SSS|_SS_|simt", re.IGNORECASE)),
)  # fmt: skip


def find_operand_bits(name: str) -> int | None:
    """Returns the number of bits of the operands that a GPU kernel multiplies, read from the kernel's name. Returns
    None if the kernel does not multiply, or if the name does not show the bits.
    """
    if _REDUCING_NAME_PATTERN.search(name) or not _MULTIPLYING_NAME_PATTERN.search(name):
        return None
    return next((bits for bits, words in _FORMAT_BITS_BY_NAME if words.search(name)), None)


def find_wider_kernel(names: Iterable[str], most_bits: int) -> str:
    """Returns the name of the first kernel that multiplies, if all kernels that multiply have operands of more than
    `most_bits`. Returns '' otherwise.
    """
    kernel_operand_bits = [(name, bits) for name in names if (bits := find_operand_bits(name)) is not None]
    if not kernel_operand_bits or any(bits <= most_bits for _, bits in kernel_operand_bits):
        return ""
    return kernel_operand_bits[0][0]


def has_hopper_units(facts: DeviceFacts) -> bool:
    return is_nvidia(facts) and facts.capability == (9, 0)
