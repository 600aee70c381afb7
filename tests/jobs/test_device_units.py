"""The units that `doctor` names."""

from __future__ import annotations

from pathlib import Path

from fp8bench.jobs.device_units import describe_units
from tests.counts import for_each
from tests.facts import A100, B200, CPU, H200, MI300X, V100, gpu


@for_each(
    ("flags", "units"),
    [
        ("flags : fpu amx_bf16 avx512_bf16 amx_int8", "AMX bf16, AMX int8, AVX512-BF16"),
        ("Features : fp asimd asimdhp bf16 i8mm", "Arm BF16, Arm FP16, Arm int8 matrix multiply"),
        ("flags : fpu sse2 amx_bf16_of_another_name", "none for less than fp32"),
        ("", "none for less than fp32"),
    ],
)
def test_units_of_a_processor_are_its_flags(tmp_path: Path, flags: str, units: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    assert describe_units(CPU, tmp_path / "cpuinfo") == units


def test_a_system_without_cpuinfo_says_so(tmp_path: Path) -> None:
    assert "no /proc/cpuinfo" in describe_units(CPU, tmp_path / "nothing")


def test_units_of_gpus_are_those_of_their_generation() -> None:
    assert describe_units(V100).startswith("1st") and "bf16" not in describe_units(V100)
    assert "tf32" in describe_units(A100) and "fp8" not in describe_units(A100)
    assert "fp8" in describe_units(H200) and "fp4" not in describe_units(H200)
    assert describe_units(gpu("L40S", (8, 9))) == describe_units(H200)
    assert "MX and NVFP4" in describe_units(B200)
    assert "FNUZ" in describe_units(MI300X)
    assert describe_units(gpu("GTX 1080", (6, 1))) == "no tensor cores"
