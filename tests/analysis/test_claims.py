"""What is said of cases that are not what they say, from values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fp8bench.analysis.claims import MARGIN, claims_of
from fp8bench.analysis.findings import find
from fp8bench.model import (
    Ceiling,
    Label,
    Level,
    Measurement,
    OperatorCount,
    PhaseCount,
    Products,
    Record,
    StepEffect,
    Tape,
    Verdict,
    Work,
)
from fp8bench.model.step import Coverage
from tests.counts import for_each
from tests.fakes import MS, record, steady

CALM = steady(10 * MS, 24)
LOW, HIGH = Products(1, True, ("bfloat16",)), Products(3, False, ("float32", "bfloat16"))


def claims(one: Record, reference: Record | None = None) -> dict[Label, str]:
    found = tuple(claims_of(one, reference))
    assert all(label.hard for label in found)
    return {label.label: label.reason for label in found}


def working(ceiling: Ceiling | None, **work: float) -> Record:
    """A step of 10 ms."""
    return record(CALM, work=Work(**work), ceiling=ceiling)  # type: ignore[arg-type]


@for_each(
    ("one", "reason"),
    [
        (working(Ceiling(1e11, 1e11), flops=1e9), None),
        (working(Ceiling(1e11, 1e11), flops=0.99 * MARGIN * 1e9, bytes=0.99 * MARGIN * 1e9), None),
        (working(Ceiling(1e11, 1e11), flops=1e10), "claims 1.00 TFLOP/s, this machine multiplied 100 GFLOP/s at most"),
        (working(Ceiling(1e11, 41e9), bytes=3.5e10), "claims 3.50 TB/s, this machine copied 41.0 GB/s at most"),
        (working(Ceiling(None, 1e11), flops=1e15), None),
        (working(Ceiling(1e11, None), bytes=1e15), None),
        (working(None, flops=1e15, bytes=1e15), None),
        (working(Ceiling(1e11, 1e11)), None),
    ],
)
def test_above_ceiling(one: Record, reason: str | None) -> None:
    """By FLOPs or by bytes, with a margin; without a bound, or without work, nothing is said. Emulated cases too."""
    expected = {Label.ABOVE_CEILING: reason} if reason else {}
    assert claims(one) == expected
    assert claims(replace(one, support=replace(one.support, level=Level.EMULATED))) == expected


ONE = PhaseCount("gemm", 1000, 500, 1)
DID = Tape((OperatorCount("gemm", "mm", flops=1000, bytes=500),), (ONE,))
UNKNOWN = replace(DID, phases=(replace(ONE, unknown=1),))
OVER = "it declares 10.0 kFLOP a step, its operators do 1.00 kFLOP"


@for_each(
    ("tape", "work", "reason", "hard"),
    [
        (DID, {"flops": 1000.0, "bytes": 500.0}, None, False),
        (DID, {"flops": 1049.0}, None, False),
        (DID, {"flops": 1e4}, OVER, True),
        (DID, {"flops": 260.0}, None, False),
        (DID, {"flops": 240.0}, "it declares 240 FLOP a step, its operators do 1.00 kFLOP", False),
        (DID, {"bytes": 1999.0}, None, False),
        (DID, {"bytes": 5e3}, "it declares 4.88 KiB a step, its operators move 500 B", True),
        (DID, {}, None, False),
        (UNKNOWN, {"flops": 1e4}, None, False),  # what has no formula may have done it
        (UNKNOWN, {"flops": 240.0}, "it declares 240 FLOP a step, its operators do 1.00 kFLOP", False),
        (replace(DID, unwritten=1), {"flops": 1e4, "bytes": 5e3}, None, False),
        (None, {"flops": 1e4}, None, False),
    ],
)
def test_declared_work_that_the_tape_contradicts(
    tape: Tape | None, work: dict[str, float], reason: str | None, hard: bool
) -> None:
    """A tape that sees not all of a step says of a declared count only that it is too low."""
    found = tuple(claims_of(replace(working(None, **work), tape=tape), None))
    assert [(one.label, one.reason, one.hard) for one in found] == [(Label.WORK_MISMATCH, reason, hard)] * bool(reason)


def test_bytes_that_ranks_send_each_other_are_no_operators() -> None:
    """A collective's tape has none of them: what is declared is no mismatch."""
    one = replace(working(None, bytes=5e3), tape=DID)
    assert claims(one) and not claims(replace(one, case=replace(one.case, ranks=2)))


def test_an_empty_tape_is_no_work_where_some_is_declared() -> None:
    """Unless what the step gives changes: then others than torch have done it."""
    idle = replace(working(None, flops=1e6), tape=Tape())
    assert claims(idle) == {Label.NO_WORK: "its steps call no operator of torch, and declare 1.00 MFLOP"}
    assert claims(replace(idle, effect=StepEffect(True))) == claims(replace(working(None), tape=Tape())) == {}


def error(*values: float) -> tuple[Measurement, ...]:
    return tuple(Measurement(f"error_{place}", "", (value,)) for place, value in enumerate(values))


def test_products_of_other_formats() -> None:
    found = claims(record(CALM, "fp8", products=HIGH))
    assert found == {Label.FALLBACK: "3 products, of float32 and bfloat16: none has an operand of fp8's formats"}
    assert claims(record(CALM, "fp8", products=LOW)) == {}
    assert claims(record(CALM, "fp8", products=Products(0, False))) == {}
    assert claims(record(CALM, "fp8")) == {}


@for_each(
    ("precision", "products", "said"),
    [
        ("fp8", replace(LOW, wide=True), "1 product, of bfloat16: values of fp8's formats, and none as its codes"),
        ("fp8", replace(LOW, looks_like="bfloat16"), "the numbers of a product are those of bfloat16"),
        ("fp8", replace(LOW, kernels=("nvjet_tst_128x256",)), "its products ran in the kernel nvjet_tst_128x256"),
        ("fp8", replace(LOW, kernels=("nvjet_tst_128x256", "nvjet_qqtst_128x256")), None),
        ("nvfp4", replace(LOW, kernels=("nvjet_qqtst_128x256",)), "its products ran in the kernel nvjet_qqtst_128x256"),
        ("bf16", replace(LOW, kernels=("nvjet_tst_128x256",)), None),
        ("of somebody's own", replace(LOW, kernels=("nvjet_tst_128x256",)), None),
        ("fp8", Products(0, None, looks_like="bfloat16"), "the numbers of a product are those of bfloat16"),
        (
            "fp8",
            replace(HIGH, wide=True, looks_like="bfloat16"),
            "3 products, of float32 and bfloat16: none has an operand",
        ),
    ],
)
def test_products_in_another_precision(precision: str, products: Products, said: str | None) -> None:
    """By their operands, their numbers, or the names of kernels: the first is told, of precisions that are known."""
    (reason,) = claims(record(CALM, precision, products=products)).values() if said else ("",)
    assert reason.startswith(said or "")
    assert bool(claims(record(CALM, precision, products=products))) is bool(said)


@for_each(
    ("own", "theirs", "products", "said"),
    [
        (error(0.25, 0.5), error(0.25, 0.5), LOW, "error_0, error_1 exactly fp32's"),
        (error(0.0, 0.5), error(0.0, 0.5), LOW, "error_0, error_1 exactly fp32's"),
        (error(0.25, 0.5), error(0.25, 0.6), LOW, None),
        (error(0.0, 0.0), error(0.0, 0.0), LOW, None),  # data that all formats hold
        ((), (), LOW, None),
        (error(0.25), error(0.25, 0.5), LOW, None),
        (error(0.25), error(0.25), None, None),
        (error(0.25), error(0.25), Products(0, False), None),
    ],
)
def test_the_errors_of_the_reference(own: Any, theirs: Any, products: Products | None, said: str | None) -> None:
    """To the last bit, where there are any; what memory they took is none. Suites without products are exempt."""
    memory = Measurement("peak_memory", "B", (1.0,))
    reference = record(CALM, "fp32", is_reference=True, measurements=(*theirs, memory))
    one = record(CALM, "tf32", measurements=(*own, replace(memory, samples=(2.0,))), products=products)
    assert claims(one, reference) == ({Label.FALLBACK: said} if said else {})
    assert claims(reference, reference) == {}


@for_each(
    ("mode", "errors", "more", "told"),
    [
        ("fp8", {"product_error": 0.0}, {}, True),
        ("fp8", {"product_error": 1e-3}, {}, True),
        ("fp8", {"product_error": 2e-3}, {}, False),
        ("fp8", {"kernel_error": 0.0, "product_error": 0.04}, {}, False),
        ("bf16", {"product_error": 1e-5}, {}, True),
        ("tf32", {"product_error": 2e-5}, {}, False),
        ("mxfp4", {"product_error": 4e-3}, {}, True),
        ("fp8", {"loss_error": 1e-9}, {}, False),  # a mean may be right by chance, but not to the last bit
        ("fp8", {"loss_error": 0.0}, {}, True),
        ("fp8", {"loss_error": 0.01, "gradient_error": 1e-9}, {}, True),
        ("fp8", {"vanished_share": 0.0}, {}, False),
        ("fp8", {"product_error": 0.0}, {"products": Products(0, False)}, False),
        ("fp8", {"product_error": 0.0}, {"products": None}, False),
        ("fp8", {"output_error": 0.0}, {"coverage": Coverage((), 0)}, False),
        ("of somebody's own", {"product_error": 0.0}, {}, False),
    ],
)
def test_errors_that_are_too_small(mode: str, errors: dict[str, float], more: dict[str, Any], told: bool) -> None:
    """Of products that are of their formats: a doubt. A share that vanishes is no error."""
    given = tuple(Measurement(metric, "", (value,)) for metric, value in errors.items())
    one = record(CALM, mode, **{"products": LOW, "measurements": given, **more})
    assert [(label.label, label.hard) for label in claims_of(one, None)] == [(Label.FALLBACK, False)] * told


@for_each(
    ("params", "precision_map", "told"),
    [
        ((("values", "integers"),), (), False),
        ((("values", "uniform"),), (), True),
        ((), (("head", "bf16"),), False),
        ((), (("head", "untouched"),), False),
        ((), (("head", "mxfp4"),), True),
    ],
)
def test_what_may_lie_on_a_grid_or_is_finer_in_parts_is_believed(params: Any, precision_map: Any, told: bool) -> None:
    """An error of 2e-4 of fp8: all its values, or of its layers some, are rounded by less."""
    one = record(CALM, "fp8", products=LOW, measurements=(Measurement("product_error", "", (2e-4,)),))
    case = replace(one.case, params=params, precision_map=precision_map)
    assert bool([*claims_of(replace(one, case=case), None)]) is told


def test_a_case_that_is_not_what_it_says_has_no_verdict_nor_has_one_beside_it() -> None:
    """A reference takes away the verdicts of those held against it, of those too that were measured with it alone."""
    fast, slow = steady(5 * MS, 24), CALM
    reference = record(slow, "fp32", is_reference=True, control=slow)
    others = [record(fast, "bf16", products=LOW), record(fast, "fp16", products=HIGH)]
    alone = record(fast, "fp8", products=LOW, paired_with=slow, control=slow)
    honest = {one.case.mode: one for one in find([reference, *others, alone], {})}
    assert honest["bf16"].verdict is honest["fp8"].verdict is Verdict.FASTER
    assert honest["fp16"].verdict is Verdict.UNSURE and honest["fp16"].hard == (Label.FALLBACK,)
    boasting = replace(reference, work=Work(flops=1e15), ceiling=Ceiling(1e11, 1e11))
    beside = {one.case.mode: one for one in find([boasting, *others, alone], {})}
    for mode in ("bf16", "fp8"):
        assert beside[mode].verdict is Verdict.UNSURE and beside[mode].hard == (Label.ABOVE_CEILING,)
        assert "the reference is labelled above-ceiling (claims 100 PFLOP/s" in beside[mode].why
    assert beside["fp32"].labels == (Label.ABOVE_CEILING,) and beside["fp32"].verdict is Verdict.REFERENCE
