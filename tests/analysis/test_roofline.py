"""Which ceiling bounds each phase, the largest possible gain, and checks of vendors' peaks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fp8bench.analysis.claims import CLAIM_MARGIN, CPU_FP32_CLAIM_MARGIN, GPU_PRODUCT_MARGIN, label_false_claims
from fp8bench.analysis.metrics import iterate_case_metrics
from fp8bench.analysis.roofline import (
    Datasheet,
    LimitingResource,
    collect_roofs,
    compute_possible_speedup,
    find_datasheet,
    find_phase_roofs,
    load_datasheets,
    product_kind_of,
)
from fp8bench.model import Ceiling, Finding, Label, Limit, Record
from fp8bench.model.step import OperatorCount, PhaseCount, Tape
from tests.counts import for_each
from tests.fakes import MS, record, steady
from tests.rooflines import CEILING, GB, made


def results(ceiling: Ceiling | None = CEILING) -> list[tuple[Record, Finding]]:
    run, findings = made(ceiling)
    return [(one, findings[one.case.id]) for one in run.records]


def test_each_phase_is_limited_by_its_slowest_resource() -> None:
    roofs = {roof.count.phase: roof for roof in find_phase_roofs(*results()[0])}
    assert {phase: one.limiting_resource for phase, one in roofs.items()} == {
        "gemm": LimitingResource.COMPUTE,
        "optimizer_step": LimitingResource.MEMORY,
        "elementwise": LimitingResource.LAUNCH,
    }
    of = {phase: one.share_of_ceiling for phase, one in roofs.items()}
    assert of == pytest.approx({"gemm": 0.71, "optimizer_step": 0.8, "elementwise": 20 / 21})
    gemm = roofs["gemm"]
    assert (gemm.flop_rate, gemm.byte_rate, gemm.intensity) == pytest.approx((71e12, 10 / 54e-3 * 1e9, 383.4))
    assert gemm.share_of_datasheet == pytest.approx(3.834e12 / 989.5e12 / 54e-3)
    assert roofs["elementwise"].intensity is None


def test_recipes_of_a_format_share_its_highest_rate() -> None:
    measured, sheet = collect_roofs(CEILING)
    assert measured.products == {"bf16": 1e14, "fp8": 2e14}
    assert (measured.memory, measured.launches) == (1e12, 1e6)
    assert sheet.words == "datasheet" and sheet.launches is None
    assert collect_roofs(None) == (None, None) == collect_roofs(Ceiling(1e12, 1e12, device="somebody's own"))
    (lead, reference), (case, finding), _ = results(None)
    assert compute_possible_speedup(case, finding, lead, reference) is None
    assert {roof.limiting_resource for roof in find_phase_roofs(lead, reference)} == {None}
    assert find_phase_roofs(replace(lead, tape=None), reference) == () == find_phase_roofs(lead, None)
    assert lead.tape is not None
    mixed = PhaseCount("gemm", 2 * GB, GB, by_path=(("bf16", GB), ("int8", GB)))
    (roof,) = find_phase_roofs(replace(lead, tape=Tape(phases=(mixed,)), ceiling=CEILING), reference)
    assert roof.limiting_resource is None and roof.share_of_ceiling is None and roof.share_of_datasheet is None


def test_a_phase_with_unknown_flops_has_no_bound() -> None:
    (lead, reference), (case, finding), _ = results()
    phases = [replace(phase, unknown=int(phase.phase == "gemm")) for phase in lead.tape.phases]
    unsure = replace(lead, tape=replace(lead.tape, phases=tuple(phases)))
    (roof,) = [roof for roof in find_phase_roofs(unsure, reference) if roof.count.phase == "gemm"]
    assert (
        roof.limiting_resource
        is roof.share_of_ceiling
        is roof.share_of_datasheet
        is roof.flop_rate
        is roof.intensity
        is None
    )
    assert compute_possible_speedup(case, finding, unsure, reference) is None
    past = replace(lead, tape=replace(lead.tape, unwritten=1))
    assert not any(roof.limiting_resource or roof.flop_rate for roof in find_phase_roofs(past, reference))


def test_the_largest_gain_follows_amdahls_law() -> None:
    (lead, reference), (case, finding), (emulated, third) = results()
    gain = compute_possible_speedup(case, finding, lead, reference)
    assert (gain.share, gain.share_of_ceiling, gain.max_speedup) == pytest.approx((0.54, 0.71, 100 / (46 + 19.17)))
    assert (gain.speedup_without_casts, gain.speedup_with_casts) == pytest.approx((2.0, 54 / 35))
    assert (gain.cast_bytes, gain.product_bytes) == (4 * GB, 10 * GB)
    assert gain.is_upper_bound and compute_possible_speedup(emulated, third, lead, reference) is None


def test_products_that_the_reference_does_not_mark_have_no_gain() -> None:
    """The whole step of an untouched model is one phase, which is not the time of its products."""
    (record, reference), (case, finding), _ = results()
    unsplit = replace(record.tape.phases[0], phase="unattributed")
    record = replace(record, tape=replace(record.tape, phases=(unsplit,)))
    reference = replace(reference, phases=(("unattributed", reference.best_seconds or 0.0),))
    assert compute_possible_speedup(case, finding, record, reference) is None


@for_each(("precision", "binds"), [("bf16", False), ("fp8", False), ("fp8-rowwise", True)])
def test_an_unsteady_ceiling_bounds_no_gain(precision: str, binds: bool) -> None:
    rates = tuple(
        replace(rate, runs=(0.9 * rate.runs[-1], *rate.runs[1:])) if rate.precision == precision else rate
        for rate in CEILING.rates
    )
    (lead, reference), (case, finding), _ = results(replace(CEILING, rates=rates))
    gain = compute_possible_speedup(case, finding, lead, reference)
    assert gain.is_upper_bound is binds


def test_the_figures_of_a_phase() -> None:
    first, _, emulated = results()
    found = {
        (metric.name, metric.phase): metric.best for metric in iterate_case_metrics(*first) if metric.phase == "gemm"
    }
    assert found["flops_per_second", "gemm"] == pytest.approx(71e12)
    assert found["share_of_ceiling", "gemm"] == pytest.approx(0.71)
    assert found["share_of_datasheet", "gemm"] == pytest.approx(0.0718, rel=1e-3)
    assert not any(metric.name == "share_of_ceiling" for metric in iterate_case_metrics(*emulated))


def counted(times: float, device: str = "cuda:0", operator: str = "mm", fused: str = "", path: str = "bf16") -> Record:
    """A 10 ms step whose products are `times` what the device can do in it."""
    flops = int(times * 1e14 * 10e-3)
    tape = Tape(
        (OperatorCount("gemm", operator, flops=flops),),
        (PhaseCount("gemm", flops, GB, by_path=((path, flops),)),),
        fused=fused,
    )
    one = record(steady(10 * MS, 24), tape=tape, ceiling=CEILING)
    return replace(one, case=replace(one.case, device=device))


@for_each(
    ("one", "above"),
    [
        (counted(0.99), False),
        (counted(GPU_PRODUCT_MARGIN - 0.01), False),
        (counted(GPU_PRODUCT_MARGIN + 0.01), True),
        (counted(GPU_PRODUCT_MARGIN + 0.01, device="cpu"), False),
        (counted(CLAIM_MARGIN + 0.1, device="cpu"), True),
        (counted(CLAIM_MARGIN - 0.1, operator="aten::convolution"), False),
        (counted(CLAIM_MARGIN + 0.1, operator="aten::convolution"), True),
        (counted(1.9, path="e4m3"), False),
        (counted(4, path="int8"), False),
        (counted(9, path="int8"), True),
        (replace(counted(4), ceiling=replace(CEILING, rates=())), False),
        (replace(counted(9), ceiling=replace(CEILING, rates=())), True),
        (replace(counted(9), ceiling=Ceiling(None, None)), False),
        (replace(counted(9), tape=None), False),
    ],
)
def test_a_phase_above_the_ceiling_is_impossible(one: Record, above: bool) -> None:
    """From counted, not declared work, for example a product that a compiler removed; no verdict.

    For an unknown dtype the fastest possible rate applies, 200 TFLOP/s.
    """
    found = list(label_false_claims(one, None))
    assert [label.label for label in found] == [Label.ABOVE_CEILING] * above and all(label.hard for label in found)
    assert all("gemm multiplied " in one.reason and "00 TFLOP/s at most" in one.reason for one in found)


@for_each(
    ("times", "path", "operator", "above"),
    [
        (CPU_FP32_CLAIM_MARGIN - 0.01, "fp32", "mm", False),
        (CPU_FP32_CLAIM_MARGIN + 0.01, "fp32", "mm", True),
        (CLAIM_MARGIN - 0.01, "bf16", "mm", False),  # the search may have missed its best shape
        (CLAIM_MARGIN - 0.01, "fp32", "convolution", False),
        (CLAIM_MARGIN - 0.01, "fp32", "_scaled_dot_product_flash_attention_for_cpu", False),
        (CLAIM_MARGIN + 0.01, "fp32", "convolution", True),
    ],
)
def test_fp32_products_on_a_cpu_have_a_smaller_margin(times: float, path: str, operator: str, above: bool) -> None:
    rates = (*CEILING.rates, *(replace(rate, precision="fp32") for rate in CEILING.rates if rate.precision == "bf16"))
    one = replace(counted(times, "cpu", operator, path=path), ceiling=replace(CEILING, rates=rates))
    assert [label.label for label in label_false_claims(one, None)] == [Label.ABOVE_CEILING] * above
    quick = replace(one, ceiling=Ceiling(1e14, None))
    assert bool(list(label_false_claims(quick, None))) == (times > CLAIM_MARGIN)


def test_impossible_bytes_and_unsteady_rates() -> None:
    # 3,530 GB/s on a card whose fastest copy reaches 864.
    moved = PhaseCount("gemm", 0, int(3530e9 * 10e-3))
    one = replace(counted(0), tape=Tape(phases=(moved,)), ceiling=Ceiling(None, 864e9))
    (label,) = label_false_claims(one, None)
    assert label.label is Label.ABOVE_CEILING and "gemm moved 3.53 TB/s as recorded" in label.reason
    assert list(label_false_claims(replace(one, ceiling=Ceiling(None, 3e12)), None)) == []
    wide = tuple(replace(rate, runs=(rate.runs[0] * 0.9, *rate.runs[1:])) for rate in CEILING.rates)
    assert list(label_false_claims(replace(counted(9), ceiling=Ceiling(None, None, wide)), None)) == []


@for_each(
    ("milliseconds", "launches", "bound"),
    [
        (76, 100, LimitingResource.COMPUTE),
        (77, 100, LimitingResource.NONE),
        (400, 39_000, LimitingResource.NONE),
        (400, 41_000, LimitingResource.OVERHEAD),
        (60, 50_000, LimitingResource.LAUNCH),
    ],
)
def test_a_phase_far_below_its_ceilings_has_no_bound(
    milliseconds: float, launches: int, bound: LimitingResource
) -> None:
    (lead, reference), _, _ = results()
    tape = Tape(phases=(PhaseCount("gemm", 3_834 * GB, GB, launches, by_path=(("bf16", 3_834 * GB),)),))
    finding = replace(reference, best_seconds=0.5, phases=(("gemm", milliseconds / 1e3),))
    (roof,) = find_phase_roofs(replace(lead, tape=tape), finding)
    assert roof.limiting_resource is bound
    without = tuple(rate for rate in CEILING.rates if rate.limit is not Limit.LAUNCH)
    (roof,) = find_phase_roofs(replace(lead, tape=tape, ceiling=replace(CEILING, rates=without)), finding)
    assert roof.limiting_resource is (LimitingResource.COMPUTE if milliseconds <= 76 else LimitingResource.NONE)


def test_the_products_of_a_compiled_step_are_checked() -> None:
    (label,) = label_false_claims(counted(9, fused="compiled"), None)
    assert label.label is Label.ABOVE_CEILING and label.hard
    assert label.reason == (
        "the compiled step multiplied 900 TFLOP/s as recorded, but this machine reached 100 TFLOP/s at most: the "
        "compiler left work out"
    )
    assert not list(label_false_claims(counted(2.4, fused="compiled"), None))
    moved = PhaseCount("gemm", 0, int(1e15))
    assert not list(label_false_claims(replace(counted(0), tape=Tape(phases=(moved,), fused="compiled")), None))


def test_only_products_bound_a_phase_of_a_compiled_step() -> None:
    """A compiled step has fewer bytes and launches than its tape, so their bounds are unknown."""
    (lead, reference), _, _ = results()
    assert lead.tape is not None
    fused = replace(lead, tape=replace(lead.tape, fused="compiled"))
    roofs = {roof.count.phase: roof for roof in find_phase_roofs(fused, reference)}
    assert {phase: one.limiting_resource for phase, one in roofs.items()} == {
        "gemm": LimitingResource.COMPUTE,
        "optimizer_step": None,
        "elementwise": None,
    }
    assert (
        roofs["gemm"].share_of_ceiling == pytest.approx(0.71)
        and roofs["gemm"].intensity is roofs["gemm"].byte_rate is None
    )
    assert not any(
        metric.name == "bytes_per_second" for metric in iterate_case_metrics(fused, reference) if metric.phase == "gemm"
    )
    slow = replace(reference, phases=(("gemm", 0.5),))
    (roof,) = find_phase_roofs(fused, slow)
    assert roof.limiting_resource is None


# Product rate of the second dtype relative to the first, by width, and the allowed deviation.
RATIOS = {"fp16/bf16": 1.0, "bf16/tf32": 2.0, "fp8/bf16": 2.0, "fp6/fp8": 1.0, "fp4/fp8": 2.0}
ROUNDING = 0.02
# Vendors quote at most a factor of 2 for 2:4 sparsity.
SPARSE = 2.0
# Peaks once quoted for the wrong entry: (device, path) -> TFLOP/s.
MISQUOTED = {
    ("H200", "tf32"): 312.0,
    ("H100", "tf32"): 312.0,
    ("A100", "fp8"): 624.0,
    ("H200", "fp8"): 3958.0,
    ("TPU v5p", "fp8"): 459.0,
}
# Devices without units for a precision, by substrings of their names.
_BEFORE_FP4 = ("A100", "H100", "H200", "GH200", "L4", "RTX 4090", "MI3[02]", "TPU", "Gaudi", "Max 1550")
NO_UNITS = {
    "fp8": ("A100", "TPU v5", "Max 1550"),
    "fp6": _BEFORE_FP4,
    "fp4": _BEFORE_FP4,
    "tf32": ("MI35", "TPU"),
}


def test_no_device_has_a_peak_of_what_it_has_no_units_for() -> None:
    for path, names in NO_UNITS.items():
        for one in load_datasheets():
            assert not (path in one.dense and re.search("|".join(names), one.name)), (one.name, path)
            assert not set(one.lacks) & set(one.dense)


# Twice the largest ratio between neighbouring paths of any device.
FP32_TO_BF16 = 34.0


def faults(one: Datasheet) -> Iterator[str]:
    for ratio, expected in RATIOS.items():
        above, below = ratio.split("/")
        if above in one.dense and below in one.dense:
            found = one.dense[above] / one.dense[below]
            if ratio not in one.exceptions and abs(found / expected - 1) > ROUNDING:
                yield f"{ratio} is {found:.2f}, not {expected:g}"
    for path, peak in one.sparse.items():
        if path not in one.dense:
            yield f"a sparse peak of {path} and no dense one"
        elif abs(peak / one.dense[path] / SPARSE - 1) > ROUNDING:
            yield f"sparse {path} is {peak / one.dense[path]:.2f} times dense"
    widest = one.dense.get("bf16", 0.0) / one.dense["fp32"] if "fp32" in one.dense else 0.0
    if widest > FP32_TO_BF16:
        yield f"bf16 is {widest:.0f} times fp32: a sparse peak?"
    for (name, path), peak in MISQUOTED.items():
        if name in one.name and abs(one.dense.get(path, 0.0) / 1e12 - peak) < 1:
            yield f"{peak:g} is no peak of {path} on {one.name}"


@for_each("one", load_datasheets())
def test_no_entry_is_impossible(one: Datasheet) -> None:
    assert not list(faults(one))


H200 = find_datasheet("NVIDIA H200")
assert H200 is not None


@for_each(
    ("device", "name"),
    [
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM, 80 GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GB200", "GB200, one GPU"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA L40", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA Unheard Of", None),
        ("AMD EPYC", None),
    ],
)
def test_devices_by_their_names(device: str, name: str | None) -> None:
    found = find_datasheet(device)
    assert (found.name if found is not None else None) == name


def test_peaks_are_dense_and_in_flops() -> None:
    assert H200.peak("e4m3fn") == H200.peak("fp8-rowwise") == H200.peak("fp8") == 1979e12
    assert H200.peak("tf32") == 494.5e12 and H200.peak("bf16") == 989.5e12 and H200.bandwidth == 4.8e12
    assert H200.peak("nvfp4") is None and H200.peak("") is None and product_kind_of("int8") == ""
    assert H200.cite_figures("dense", "bandwidth") == "datasheet"
    unsure = find_datasheet("NVIDIA H200 NVL")
    assert unsure.cite_figures("dense", "bandwidth") == "datasheet, unverified"
    assert unsure.cite_figures("bandwidth") == "datasheet"
