"""What bounds phases, and what a precision could give at most, by counts and ceilings made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.analysis.claims import COUNTED_MARGIN, MARGIN, PLAIN_MARGIN, claims_of
from fp8bench.analysis.metrics import metrics_of
from fp8bench.analysis.roofline import Bound, gain_of, phase_roofs, roofs_of
from fp8bench.model import Ceiling, Finding, Label, Limit, Record
from fp8bench.model.step import OperatorCount, PhaseCount, Tape
from tests.counts import for_each
from tests.fakes import MS, record, steady
from tests.rooflines import CEILING, GB, made


def results(ceiling: Ceiling | None = CEILING) -> list[tuple[Record, Finding]]:
    run, findings = made(ceiling)
    return [(one, findings[one.case.id]) for one in run.records]


def test_each_phase_has_what_takes_longest_at_the_ceilings() -> None:
    """54 ms of products whose least is 38.34; 25 ms of 20 GB at 1 TB/s; 21 ms of 20,000 launches."""
    roofs = {one.count.phase: one for one in phase_roofs(*results()[0])}
    assert {phase: one.bound for phase, one in roofs.items()} == {
        "gemm": Bound.COMPUTE, "optimizer_step": Bound.MEMORY, "elementwise": Bound.LAUNCH,
    }  # fmt: skip
    of = {phase: one.of_ceiling for phase, one in roofs.items()}
    assert of == pytest.approx({"gemm": 0.71, "optimizer_step": 0.8, "elementwise": 20 / 21})
    gemm = roofs["gemm"]
    assert (gemm.flop_rate, gemm.byte_rate, gemm.intensity) == pytest.approx((71e12, 10 / 54e-3 * 1e9, 383.4))
    assert gemm.of_sheet == pytest.approx(3.834e12 / 989.5e12 / 54e-3)
    assert roofs["elementwise"].intensity is None


def test_recipes_of_a_format_share_its_best_kernel() -> None:
    """And each kind of ceiling has its source."""
    measured, sheet = roofs_of(CEILING)
    assert measured is not None and measured.products == {"bf16": 1e14, "fp8": 2e14}
    assert (measured.memory, measured.launches) == (1e12, 1e6)
    assert sheet is not None and sheet.words == "datasheet" and sheet.launches is None
    assert roofs_of(None) == (None, None) == roofs_of(Ceiling(1e12, 1e12, device="somebody's own"))


def test_amdahl_by_hand() -> None:
    """Of 100 ms products take 54, at fp8's ceiling 19.17: 1.53x at most. Kernels alone are 2x, with casts 54 / 35."""
    (lead, reference), (case, finding), (emulated, third) = results()
    gain = gain_of(case, finding, lead, reference)
    assert gain is not None
    assert (gain.share, gain.of_ceiling, gain.most) == pytest.approx((0.54, 0.71, 100 / (46 + 19.17)))
    assert (gain.kernels, gain.with_casts) == pytest.approx((2.0, 54 / 35))
    assert (gain.cast_bytes, gain.product_bytes) == (4 * GB, 10 * GB)
    assert gain.binds and gain_of(emulated, third, lead, reference) is None


@for_each(("precision", "binds"), [("bf16", False), ("fp8", False), ("fp8-rowwise", True)])
def test_a_ceiling_whose_runs_differ_bounds_no_gain(precision: str, binds: bool) -> None:
    """Of the rates that it rests on: row-wise products are not the best of their kind."""
    rates = tuple(
        replace(one, runs=(0.9 * one.runs[-1], *one.runs[1:])) if one.precision == precision else one
        for one in CEILING.rates
    )
    (lead, reference), (case, finding), _ = results(replace(CEILING, rates=rates))
    gain = gain_of(case, finding, lead, reference)
    assert gain is not None and gain.binds is binds


def test_without_ceilings_or_counts_nothing_is_said() -> None:
    """Nor where the rate of one of a phase's products is not known: what bounds it would be a guess."""
    (lead, reference), (case, finding), _ = results(None)
    assert gain_of(case, finding, lead, reference) is None
    assert {one.bound for one in phase_roofs(lead, reference)} == {None}
    assert phase_roofs(replace(lead, tape=None), reference) == () == phase_roofs(lead, None)
    assert lead.tape is not None
    mixed = PhaseCount("gemm", 2 * GB, GB, by_path=(("bf16", GB), ("int8", GB)))
    (roof,) = phase_roofs(replace(lead, tape=Tape(phases=(mixed,)), ceiling=CEILING), reference)
    assert roof.bound is None and roof.of_ceiling is None and roof.of_sheet is None


def test_the_figures_of_a_phase() -> None:
    """As metrics for files and frames; none of an emulated case."""
    first, _, emulated = results()
    found = {(one.name, one.phase): one.best for one in metrics_of(*first) if one.phase == "gemm"}
    assert found["flops_per_second", "gemm"] == pytest.approx(71e12)
    assert found["share_of_ceiling", "gemm"] == pytest.approx(0.71)
    assert found["share_of_datasheet", "gemm"] == pytest.approx(0.0718, rel=1e-3)
    assert not any(one.name == "share_of_ceiling" for one in metrics_of(*emulated))


def counted(times: float, device: str = "cuda:0", operator: str = "mm", fused: str = "", path: str = "bf16") -> Record:
    """A step of 10 ms whose products are so many times what the device does in it."""
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
        (counted(COUNTED_MARGIN - 0.01), False),
        (counted(COUNTED_MARGIN + 0.01), True),
        (counted(COUNTED_MARGIN + 0.01, device="cpu"), False),
        (counted(MARGIN + 0.1, device="cpu"), True),
        (counted(MARGIN - 0.1, operator="aten::convolution"), False),
        (counted(MARGIN + 0.1, operator="aten::convolution"), True),
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
    """By what was counted, nothing declared: a product that a compiler removed, say. No verdict.

    Where the rate of a dtype is not known, by that of the fastest that it may be, 200 TFLOP/s.
    """
    found = list(claims_of(one, None))
    assert [label.label for label in found] == [Label.ABOVE_CEILING] * above and all(label.hard for label in found)
    assert all("gemm did " in one.reason and "00 TFLOP/s at most" in one.reason for one in found)


@for_each(
    ("times", "path", "operator", "above"),
    [
        (PLAIN_MARGIN - 0.01, "fp32", "mm", False),
        (PLAIN_MARGIN + 0.01, "fp32", "mm", True),
        (MARGIN - 0.01, "bf16", "mm", False),  # its best shape may not have been searched
        (MARGIN - 0.01, "fp32", "convolution", False),
        (MARGIN - 0.01, "fp32", "_scaled_dot_product_flash_attention_for_cpu", False),
        (MARGIN + 0.01, "fp32", "convolution", True),
    ],
)
def test_plain_products_of_a_processor_have_a_margin_of_their_own(
    times: float, path: str, operator: str, above: bool
) -> None:
    """In fp32, where its ceiling is known; what may take fewer products than are counted keeps the wide one."""
    rates = (*CEILING.rates, *(replace(one, precision="fp32") for one in CEILING.rates if one.precision == "bf16"))
    one = replace(counted(times, "cpu", operator, path=path), ceiling=replace(CEILING, rates=rates))
    assert [label.label for label in claims_of(one, None)] == [Label.ABOVE_CEILING] * above
    quick = replace(one, ceiling=Ceiling(1e14, None))
    assert bool(list(claims_of(quick, None))) == (times > MARGIN)


def test_bytes_that_no_memory_moves() -> None:
    """3,530 GB/s of a card whose copies come to 864 at their fastest."""
    moved = PhaseCount("gemm", 0, int(3530e9 * 10e-3))
    one = replace(counted(0), tape=Tape(phases=(moved,)), ceiling=Ceiling(None, 864e9))
    (label,) = claims_of(one, None)
    assert label.label is Label.ABOVE_CEILING and "gemm moved 3.53 TB/s by the tape" in label.reason
    assert list(claims_of(replace(one, ceiling=Ceiling(None, 3e12)), None)) == []


def test_rates_that_differ_bound_nothing() -> None:
    """A row above them may be the ceiling's fault."""
    wide = tuple(replace(one, runs=(one.runs[0] * 0.9, *one.runs[1:])) for one in CEILING.rates)
    assert list(claims_of(replace(counted(9), ceiling=Ceiling(None, None, wide)), None)) == []


@for_each(
    ("milliseconds", "launches", "bound"),
    [
        (76, 100, Bound.COMPUTE),
        (77, 100, Bound.NONE),
        (400, 39_000, Bound.NONE),
        (400, 41_000, Bound.OVERHEAD),
        (60, 50_000, Bound.LAUNCH),
    ],
)
def test_far_below_all_ceilings_none_of_them_is_what_a_phase_waits_for(
    milliseconds: float, launches: int, bound: Bound
) -> None:
    """Half of 76.7 ms are 38.34 of products; a launch takes 1 us at least, and ten times that is overhead."""
    (lead, reference), _, _ = results()
    tape = Tape(phases=(PhaseCount("gemm", 3_834 * GB, GB, launches, by_path=(("bf16", 3_834 * GB),)),))
    finding = replace(reference, best_seconds=0.5, phases=(("gemm", milliseconds / 1e3),))
    (roof,) = phase_roofs(replace(lead, tape=tape), finding)
    assert roof.bound is bound
    without = tuple(one for one in CEILING.rates if one.limit is not Limit.LAUNCH)
    (roof,) = phase_roofs(replace(lead, tape=tape, ceiling=replace(CEILING, rates=without)), finding)
    assert roof.bound is (Bound.COMPUTE if milliseconds <= 76 else Bound.NONE)


def test_of_a_compiled_step_the_products_are_checked() -> None:
    """A compiler that removed them, or most of them, is caught by the whole step; nothing is known of its bytes."""
    (label,) = claims_of(counted(9, fused="compiled"), None)
    assert label.label is Label.ABOVE_CEILING and label.hard
    assert label.reason == (
        "the compiled step did 900 TFLOP/s by the tape, this machine multiplied 100 TFLOP/s at most: the compiler left "
        "work out"
    )
    assert not list(claims_of(counted(2.4, fused="compiled"), None))
    moved = PhaseCount("gemm", 0, int(1e15))
    assert not list(claims_of(replace(counted(0), tape=Tape(phases=(moved,), fused="compiled")), None))


def test_of_a_compiled_step_only_products_bound_a_phase() -> None:
    """Its bytes and launches are fewer than the tape's: whether they bound it nobody knows."""
    (lead, reference), _, _ = results()
    assert lead.tape is not None
    fused = replace(lead, tape=replace(lead.tape, fused="compiled"))
    roofs = {one.count.phase: one for one in phase_roofs(fused, reference)}
    assert {phase: one.bound for phase, one in roofs.items()} == {
        "gemm": Bound.COMPUTE, "optimizer_step": None, "elementwise": None,
    }  # fmt: skip
    assert (
        roofs["gemm"].of_ceiling == pytest.approx(0.71) and roofs["gemm"].intensity is roofs["gemm"].byte_rate is None
    )
    assert not any(one.name == "bytes_per_second" for one in metrics_of(fused, reference) if one.phase == "gemm")
    slow = replace(reference, phases=(("gemm", 0.5),))
    (roof,) = phase_roofs(fused, slow)
    assert roof.bound is None
