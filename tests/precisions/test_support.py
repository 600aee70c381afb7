"""Support of each precision on each device, from facts alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from fp8bench.model import DeviceFacts, Level
from fp8bench.nn.shared_workloads import find_storage_support
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import A100, B200, CPU, H200, MI300X, MI350X, V100, XPU, gpu

NATIVE, EMULATED, REFUSED = Level.NATIVE, Level.EMULATED, Level.REFUSED
NAMES = (
    "fp32", "tf32", "fp16", "bf16", "fp8", "fp8-delayed", "fp8-rowwise", "fp8-block", "fp8-e4m3", "fp8-e5m2", "mxfp8",
    "mxfp6", "nvfp4", "mxfp4", "custom", "fp8-unit",
)  # fmt: skip


MI250X = gpu("MI250X", (9, 0), hip="7.0", arch="gfx90a")
OTHER = DeviceFacts("npu", 0, "something else", 16 << 30, "2.13.0")
OLD_XPU = replace(XPU, scaled_products=False)

# FP8 recipes that torch's scaled product takes, then those it does not; and all narrower ones.
FP8, REST = (NATIVE, NATIVE, NATIVE, EMULATED, NATIVE, EMULATED), (EMULATED,) * 5
AMD = INTEL = (NATIVE, NATIVE, NATIVE, EMULATED, NATIVE, NATIVE)
HOPPER, BLACKWELL = (*(NATIVE,) * 5, EMULATED), (NATIVE, EMULATED, NATIVE, EMULATED, EMULATED)
TABLE = {
    "cpu": (CPU, (NATIVE, EMULATED, NATIVE, NATIVE, *(EMULATED,) * 6, *REST)),
    "V100": (V100, (NATIVE, REFUSED, NATIVE, REFUSED, *(EMULATED,) * 6, *REST)),
    "A100": (A100, (NATIVE, NATIVE, NATIVE, NATIVE, *(EMULATED,) * 6, *REST)),
    "L40S": (gpu("L40S", (8, 9)), (NATIVE, NATIVE, NATIVE, NATIVE, *FP8, *REST)),
    "H200": (H200, (NATIVE, NATIVE, NATIVE, NATIVE, *HOPPER, *REST)),
    "B200": (B200, (NATIVE, NATIVE, NATIVE, NATIVE, *FP8, *BLACKWELL)),
    "MI300X": (MI300X, (NATIVE, REFUSED, NATIVE, NATIVE, *AMD, *REST)),
    "MI350X": (MI350X, (NATIVE, REFUSED, NATIVE, NATIVE, *AMD, *REST)),
    "MI250X": (MI250X, (NATIVE, REFUSED, NATIVE, NATIVE, *(EMULATED,) * 6, *REST)),
    "unknown capability": (gpu("?", None), (NATIVE, REFUSED, NATIVE, REFUSED, *(EMULATED,) * 6, *REST)),
    "xpu": (XPU, (NATIVE, REFUSED, NATIVE, NATIVE, *INTEL, *REST)),
    "older xpu": (OLD_XPU, (NATIVE, REFUSED, NATIVE, NATIVE, *(EMULATED,) * 6, *REST)),
    "npu": (OTHER, (NATIVE,) + (REFUSED,) * 14),
}


@for_each("device", TABLE)
def test_each_device_supports_the_listed_modes(device: str) -> None:
    facts, levels = TABLE[device]
    result = {name: precisions.get(name).support(facts) for name in NAMES}
    levels = (*levels, levels[NAMES.index("fp8")])  # without scales it is as native as with them
    assert {name: support.level for name, support in result.items()} == dict(zip(NAMES, levels, strict=True))
    assert all(support.reason for support in result.values())


@for_each(
    ("name", "facts", "words"),
    [
        ("tf32", CPU, "no hardware"),
        ("fp16", CPU, "slow"),
        ("fp8", CPU, "no hardware"),
        ("bf16", V100, "needs compute capability 8.0; this device has 7.0"),
        ("fp8", A100, "begin at compute capability 8.9; this device has 8.0"),
        ("fp8", H200, "scaled_mm), a scale a tensor"),
        ("fp8-rowwise", H200, "scaled_mm), a scale a row"),
        ("fp8-unit", H200, "scaled_mm), whose scales are 1"),
        ("accelerate-fp8", H200, "needs your own model, which Accelerate converts: fp8bench profile"),
        ("fp8-e5m2", H200, "two E5M2 operands are not multiplied"),
        ("fp8:accumulator=short", H200, "sums of 14 bits are a model, which no kernel follows"),
        ("fp8-block", H200, "scaled_mm), a scale for 128 elements"),
        ("fp8-block", B200, "scales of 128 elements on compute capability 9.0 only; this device has 10.0"),
        ("fp8-block", replace(H200, cuda="12.8"), "needs CUDA 12.9; this torch has 12.8"),
        ("fp8-block:accumulator=promoted", H200, "a model, which no kernel follows"),
        ("fp8-block:accumulator=promoted", CPU, "no hardware for block-scaled FP8"),
        ("mxfp6", B200, "torch has neither the format nor the product"),
        ("mxfp4", B200, "by FBGEMM's kernels, which are not used here"),
        ("mxfp8", H200, "MX blocks begin at compute capability 10.0; this device has 9.0"),
        ("mxfp8:formats=hybrid", B200, "with scales of 32 elements both operands are E4M3"),
        ("nvfp4", B200, "a scale for 16 elements and one a tensor"),
        ("fp8", gpu("?", None), "this device states none"),
        ("custom", H200, "no native backend for custom formats"),
        ("fp8-rowwise", MI300X, "scaled_mm), a scale a row, in this device's e4m3fnuz"),
        ("fp8-rowwise:formats=hybrid", MI300X, "a scale a row, in this device's e4m3fnuz and e5m2fnuz"),
        ("fp8-rowwise:formats=e5m2", MI300X, "with a scale a row the second operand is E4M3"),
        ("fp8-block", MI300X, "scales of 128 elements is not used on AMD's devices yet"),
        ("mxfp8", MI350X, "MXFP8 is not used on AMD's devices yet"),
        ("fp8", MI250X, "fp8bench does not know the FP8 units of gfx90a"),
        ("mxfp8", B200, "a scale for 32 elements"),
        ("nvfp4", CPU, "no hardware for NVFP4"),
        ("fp8", MI300X, "a scale a tensor, in this device's e4m3fnuz and e5m2fnuz"),
        ("tf32", MI300X, "no TF32"),
        ("bf16", OTHER, "npu"),
        ("tf32", XPU, "not handled here"),
        ("fp8", XPU, "by oneDNN, which widens codes where the GPU has no FP8 units, a scale a tensor"),
        ("fp8", OLD_XPU, "this torch has no scaled products for XPUs"),
        ("fp8-block", XPU, "torch has no FP8 with scales of 128 elements for XPUs"),
        ("mxfp6", XPU, "torch has no MXFP6 for XPUs"),
    ],
)
def test_support_has_the_listed_reasons(name: str, facts: DeviceFacts, words: str) -> None:
    assert words in precisions.get(name).support(facts).reason


def test_every_precision_is_registered_under_its_own_name() -> None:
    assert sorted(precisions.names()) == sorted(NAMES)
    for name in NAMES:
        precision = precisions.get(name)
        assert precision.name == name and precision.summary.endswith(".") and "\n" not in precision.summary
    assert precisions.get("fp4").aliases == ("fp4",)


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


@for_each("facts", [CPU, H200])
@for_each("name", precisions.names())
def test_all_but_a_switch_of_products_can_keep_tensors(name: str, facts: DeviceFacts) -> None:
    precision = precisions.get(name)
    support = find_storage_support(precision, facts, "there is no such buffer")
    if name == "tf32":
        assert support.level is Level.REFUSED and "there is no such buffer" in support.reason
    else:
        assert support == precision.support(facts)


def test_an_unknown_version_of_cuda_refuses_only_scales_that_need_one() -> None:
    facts = replace(B200, cuda=None)
    assert precisions.get("fp8").support(facts).level is NATIVE
    support = precisions.get("mxfp8").support(facts)
    assert support.level is EMULATED and "needs CUDA 12.8" in support.reason
