"""What each device makes of each precision, from facts alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fp8bench.model import DeviceFacts, Level
from fp8bench.registry import precisions

NATIVE, EMULATED, REFUSED = Level.NATIVE, Level.EMULATED, Level.REFUSED
NAMES = ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4", "mxfp4")


def gpu(name: str, capability: tuple[int, int] | None, hip: str | None = None) -> DeviceFacts:
    cuda = None if hip else "13.0"
    return DeviceFacts("cuda", 0, name, 80 << 30, "2.13.0", capability, cuda=cuda, hip=hip)


CPU = DeviceFacts("cpu", 0, "a processor", 16 << 30, "2.13.0+cpu")
V100 = gpu("V100", (7, 0))
A100 = gpu("A100", (8, 0))
H200 = gpu("H200", (9, 0))
B200 = gpu("B200", (10, 0))
MI300X = gpu("MI300X", (9, 4), hip="7.0")
XPU = DeviceFacts("xpu", 0, "something else", 16 << 30, "2.13.0")

TABLE = {
    "cpu": (CPU, (NATIVE, EMULATED, NATIVE, NATIVE, EMULATED, EMULATED, EMULATED, EMULATED)),
    "V100": (V100, (NATIVE, REFUSED, NATIVE, REFUSED, EMULATED, EMULATED, EMULATED, EMULATED)),
    "A100": (A100, (NATIVE, NATIVE, NATIVE, NATIVE, EMULATED, EMULATED, EMULATED, EMULATED)),
    "L40S": (gpu("L40S", (8, 9)), (NATIVE, NATIVE, NATIVE, NATIVE, NATIVE, EMULATED, EMULATED, EMULATED)),
    "H200": (H200, (NATIVE, NATIVE, NATIVE, NATIVE, NATIVE, EMULATED, EMULATED, EMULATED)),
    "B200": (B200, (NATIVE, NATIVE, NATIVE, NATIVE, NATIVE, EMULATED, EMULATED, EMULATED)),
    "MI300X": (MI300X, (NATIVE, REFUSED, NATIVE, NATIVE, EMULATED, EMULATED, EMULATED, EMULATED)),
    "unknown capability": (gpu("?", None), (NATIVE, REFUSED, NATIVE, REFUSED) + (EMULATED,) * 4),
    "xpu": (XPU, (NATIVE,) + (REFUSED,) * 7),
}


@pytest.mark.parametrize("device", TABLE)
def test_support(device: str) -> None:
    facts, levels = TABLE[device]
    found = {name: precisions.get(name).support(facts) for name in NAMES}
    assert {name: support.level for name, support in found.items()} == dict(zip(NAMES, levels, strict=True))
    assert all(support.reason for support in found.values())


@pytest.mark.parametrize(
    ("name", "facts", "words"),
    [
        ("tf32", CPU, "no hardware"),
        ("fp16", CPU, "slow"),
        ("fp8", CPU, "no hardware"),
        ("bf16", V100, "needs compute capability 8.0; this device has 7.0"),
        ("fp8", A100, "needs compute capability 8.9; this device has 8.0"),
        ("fp8", H200, "scaled_mm"),
        ("mxfp8", B200, "no native backend"),
        ("nvfp4", CPU, "no hardware for NVFP4"),
        ("fp8", MI300X, "e4m3fnuz"),
        ("fp8", gpu("MI355X", (9, 5), hip="7.0"), "no native backend"),
        ("tf32", MI300X, "no TF32"),
        ("bf16", XPU, "xpu"),
    ],
)
def test_reasons(name: str, facts: DeviceFacts, words: str) -> None:
    assert words in precisions.get(name).support(facts).reason


def test_every_precision_is_registered_under_its_own_name() -> None:
    assert sorted(precisions.names()) == sorted(NAMES)
    for name in NAMES:
        precision = precisions.get(name)
        assert precision.name == name
        assert precision.summary.endswith(".") and "\n" not in precision.summary
    assert type(precisions.get("fp4")) is type(precisions.get("nvfp4"))
    assert precisions.get("fp4").aliases == ("fp4",)


def test_ranks_go_from_high_precision_down() -> None:
    assert [precisions.get(name).rank for name in NAMES] == [0, 10, 20, 30, 40, 50, 60, 70]


def test_listing_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, fp8bench.registry as r\n"
        "from fp8bench.model import DeviceFacts\n"
        "facts = DeviceFacts('cpu', 0, '', 0, '')\n"
        "[r.precisions.get(name).support(facts) for name in r.precisions.names()]\n"
        "print([heavy for heavy in ('torch', 'numpy') if heavy in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
