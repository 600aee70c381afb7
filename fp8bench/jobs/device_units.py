"""Names the low-precision units of a processor or GPU, in the vendor's terms."""

from __future__ import annotations

from pathlib import Path

from fp8bench.model import DeviceFacts

CPUINFO = Path("/proc/cpuinfo")
# Flags of x86 and Arm processors in /proc/cpuinfo, with the names of the low-precision units.
_CPU_UNITS = {
    "amx_bf16": "AMX bf16",
    "amx_fp16": "AMX fp16",
    "amx_int8": "AMX int8",
    "avx512_bf16": "AVX512-BF16",
    "avx512_fp16": "AVX512-FP16",
    "avx512_vnni": "AVX512-VNNI (int8)",
    "avx_vnni": "AVX-VNNI (int8)",
    "bf16": "Arm BF16",
    "asimdhp": "Arm FP16",
    "i8mm": "Arm int8 matrix multiply",
    "sme": "Arm SME",
}
# The tensor cores of devices that have at least this compute capability, newest first.
_TENSOR_CORES = (
    ((10, 0), "5th generation tensor cores: tf32, bf16, fp16, int8, fp8, and fp6 and fp4 with MX and NVFP4 scales"),
    ((8, 9), "4th generation tensor cores: tf32, bf16, fp16, int8, fp8"),
    ((8, 0), "3rd generation tensor cores: tf32, bf16, fp16, int8"),
    ((7, 5), "2nd generation tensor cores: fp16, int8 (none in a GTX 16xx)"),
    ((7, 0), "1st generation tensor cores: fp16"),
)
_AMD_MATRIX_CORES = {
    "gfx950": "4th generation matrix cores: bf16, fp16, int8, fp8, and fp6 and fp4 with MX scales",
    "gfx942": "3rd generation matrix cores: bf16, fp16, int8, fp8 (FNUZ, not OCP)",
    "gfx90a": "2nd generation matrix cores: bf16, fp16, int8",
    "gfx908": "1st generation matrix cores: bf16, fp16, int8",
}


def describe_units(facts: DeviceFacts, cpuinfo: Path = CPUINFO) -> str:
    """Returns the low-precision units of a device, or why they are unknown."""
    if facts.kind == "cpu":
        return _describe_cpu(cpuinfo)
    if facts.hip:
        return _AMD_MATRIX_CORES.get(
            facts.arch.partition(":")[0], f"the units of {facts.arch or facts.name} are unknown"
        )
    for min_capability, unit_names in _TENSOR_CORES:
        if (facts.capability or (0, 0)) >= min_capability:
            return unit_names
    return "no tensor cores"


def _describe_cpu(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return "not known: the system has no /proc/cpuinfo"
    cpu_flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    compute_unit_names = [unit for flag, unit in _CPU_UNITS.items() if flag in cpu_flags]
    return ", ".join(compute_unit_names) or "none for less than fp32"
