"""Labels of cases and references that do not compute what they declare, from values and recorded tapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8bench.analysis.claims import CLAIM_MARGIN, label_false_claims
from fp8bench.analysis.findings import find
from fp8bench.analysis.labels import LabelWithReason
from fp8bench.analysis.tapes import ProductWork, sum_product_work
from fp8bench.model import (
    Ceiling,
    GivenTensors,
    Label,
    LateSteps,
    Level,
    Measurement,
    OperatorCount,
    PhaseCount,
    Products,
    Record,
    StepEffect,
    Tape,
    Timing,
    Verdict,
    Work,
    specs,
)
from fp8bench.model.step import Coverage
from fp8bench.protocols import Phases
from tests.counts import for_each
from tests.fakes import MS, record, steady
from tests.tapes import tape_in_phases

CALM = steady(10 * MS, 24)
LOW, HIGH = Products(1, True, ("bfloat16",)), Products(3, False, ("float32", "bfloat16"))


def claims(one: Record, reference: Record | None = None) -> dict[Label, str]:
    found = tuple(label_false_claims(one, reference))
    assert all(label.hard for label in found)
    return {label.label: label.reason for label in found}


def working(ceiling: Ceiling | None, **work: float) -> Record:
    return record(CALM, work=Work(**work), ceiling=ceiling)  # type: ignore[arg-type]


@for_each(
    ("one", "reason"),
    [
        (working(Ceiling(1e11, 1e11), flops=0.99 * CLAIM_MARGIN * 1e9, bytes=0.99 * CLAIM_MARGIN * 1e9), None),
        (
            working(Ceiling(1e11, 1e11), flops=1e10),
            "claims 1.00 TFLOP/s, but this machine multiplied 100 GFLOP/s at most",
        ),
        (working(Ceiling(1e11, 41e9), bytes=3.5e10), "claims 3.50 TB/s, but this machine copied 41.0 GB/s at most"),
        (working(Ceiling(None, 1e11), flops=1e15), None),
        (working(Ceiling(1e11, None), bytes=1e15), None),
        (working(None, flops=1e15, bytes=1e15), None),
    ],
)
def test_claims_above_the_ceiling_are_labelled(one: Record, reason: str | None) -> None:
    expected = {Label.ABOVE_CEILING: reason} if reason else {}
    assert claims(one) == expected
    assert claims(replace(one, support=replace(one.support, level=Level.EMULATED))) == expected


ONE = PhaseCount("gemm", 1000, 500, 1)
DID = Tape((OperatorCount("gemm", "mm", flops=1000, bytes=500),), (ONE,))
UNKNOWN = replace(DID, phases=(replace(ONE, unknown=1),))
OVER = "the suite declares 10.0 kFLOP a step, its operators do 1.00 kFLOP"


@for_each(
    ("tape", "work", "reason", "hard"),
    [
        (DID, {"flops": 1049.0}, None, False),
        (DID, {"flops": 1e4}, OVER, True),
        (DID, {"flops": 260.0}, None, False),
        (DID, {"flops": 240.0}, "the suite declares 240 FLOP a step, its operators do 1.00 kFLOP", False),
        (DID, {"bytes": 1999.0}, None, False),
        (DID, {"bytes": 5e3}, "the suite declares 4.88 KiB a step, its operators move 500 B", True),
        (UNKNOWN, {"flops": 1e4}, None, False),  # an op without a FLOP formula may account for it
        (UNKNOWN, {"flops": 240.0}, "the suite declares 240 FLOP a step, its operators do 1.00 kFLOP", False),
        (replace(DID, unwritten=1), {"flops": 1e4, "bytes": 5e3}, None, False),
        (None, {"flops": 1e4}, None, False),
    ],
)
def test_declared_work_that_the_tape_contradicts(
    tape: Tape | None, work: dict[str, float], reason: str | None, hard: bool
) -> None:
    """If the tape covers only part of a step, only a declared count that is too low is a contradiction."""
    found = tuple(label_false_claims(replace(working(None, **work), tape=tape), None))
    assert [(one.label, one.reason, one.hard) for one in found] == [(Label.WORK_MISMATCH, reason, hard)] * bool(reason)


def test_tapes_without_work_and_products_of_other_formats() -> None:
    one = replace(working(None, bytes=5e3), tape=DID)
    assert claims(one) and not claims(replace(one, case=replace(one.case, ranks=2)))
    # Unless the result also changes: then code outside torch did the work.
    idle = replace(working(None, flops=1e6), tape=Tape())
    assert claims(idle) == {Label.NO_WORK: "its steps call no operator of torch, but the suite declares 1.00 MFLOP"}
    assert claims(replace(idle, effect=StepEffect(True))) == claims(replace(working(None), tape=Tape())) == {}
    found = claims(record(CALM, "fp8", products=HIGH))
    assert found == {Label.FALLBACK: "3 products, of float32 and bfloat16: none has an operand of fp8's formats"}
    assert claims(record(CALM, "fp8", products=LOW)) == {}
    assert claims(record(CALM, "fp8", products=Products(0, False))) == {}
    assert claims(record(CALM, "fp8")) == {}


def error(*values: float) -> tuple[Measurement, ...]:
    return tuple(Measurement(f"error_{place}", "", (value,)) for place, value in enumerate(values))


@for_each(
    ("precision", "products", "said"),
    [
        (
            "fp8",
            replace(LOW, wide=True),
            "1 product, of bfloat16: operands with values of fp8's formats, but not as its codes",
        ),
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
    (reason,) = claims(record(CALM, precision, products=products)).values() if said else ("",)
    assert reason.startswith(said or "")
    assert bool(claims(record(CALM, precision, products=products))) is bool(said)


@for_each(
    ("own", "theirs", "products", "said"),
    [
        (error(0.25, 0.5), error(0.25, 0.5), LOW, "error_0, error_1 equal to fp32's to the last bit"),
        (error(0.25, 0.5), error(0.25, 0.6), LOW, None),
        (error(0.0, 0.0), error(0.0, 0.0), LOW, None),  # data that every format represents exactly
        ((), (), LOW, None),
        (error(0.25), error(0.25), None, None),
        (error(0.25), error(0.25), Products(0, False), None),
    ],
)
def test_errors_equal_to_the_references_are_labelled(
    own: Any, theirs: Any, products: Products | None, said: str | None
) -> None:
    """Equal to the last bit is suspicious for an error, but not for memory and counters. Suites without products are
    exempt.
    """
    memory = Measurement("peak_memory", "B", (1.0,))
    reference = record(CALM, "fp32", is_reference=True, measurements=(*theirs, memory))
    calls = Measurement("allocator_calls", "", (3.0,))
    one = record(CALM, "tf32", measurements=(*own, replace(memory, samples=(2.0,)), calls), products=products)
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
        ("fp8", {"loss_error": 1e-9}, {}, False),  # a mean may match by chance, but not to the last bit
        ("fp8", {"loss_error": 0.0}, {}, True),
        ("fp8", {"loss_error": 0.01, "gradient_error": 1e-9}, {}, True),
        ("fp8", {"vanished_share": 0.0}, {}, False),
        ("fp8", {"product_error": 0.0}, {"products": Products(0, False)}, False),
        ("fp8", {"output_error": 0.0}, {"coverage": Coverage((), 0)}, False),
        ("of somebody's own", {"product_error": 0.0}, {}, False),
    ],
)
def test_errors_that_are_too_small(mode: str, errors: dict[str, float], more: dict[str, Any], told: bool) -> None:
    given = tuple(Measurement(metric, "", (value,)) for metric, value in errors.items())
    one = record(CALM, mode, **{"products": LOW, "measurements": given, **more})
    assert [(label.label, label.hard) for label in label_false_claims(one, None)] == [(Label.FALLBACK, False)] * told


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
def test_small_errors_of_exact_values_or_finer_layers_are_believed(params: Any, precision_map: Any, told: bool) -> None:
    """An fp8 error of 2e-4 is possible if values lie on the grid, or some layers round less."""
    one = record(CALM, "fp8", products=LOW, measurements=(Measurement("product_error", "", (2e-4,)),))
    case = replace(one.case, params=params, precision_map=precision_map)
    assert bool([*label_false_claims(replace(one, case=case), None)]) is told


def test_a_false_claim_removes_the_verdict() -> None:
    """A bad reference voids verdicts of all cases compared with it, also those measured only with it."""
    fast = steady(5 * MS, 24)
    reference = record(CALM, "fp32", is_reference=True, control=CALM)
    others = [record(fast, "bf16", products=LOW), record(fast, "fp16", products=HIGH)]
    alone = record(fast, "fp8", products=LOW, paired_with=CALM, control=CALM)
    honest = {one.case.mode: one for one in find([reference, *others, alone], {})}
    assert honest["bf16"].verdict is honest["fp8"].verdict is Verdict.FASTER
    assert honest["fp16"].verdict is Verdict.UNSURE and honest["fp16"].hard == (Label.FALLBACK,)
    boasting = replace(reference, work=Work(flops=1e15), ceiling=Ceiling(1e11, 1e11))
    beside = {one.case.mode: one for one in find([boasting, *others, alone], {})}
    for mode in ("bf16", "fp8"):
        assert beside[mode].verdict is Verdict.UNSURE and beside[mode].hard == (Label.ABOVE_CEILING,)
        assert "the reference is labelled above-ceiling (claims 100 PFLOP/s" in beside[mode].why
    assert beside["fp32"].labels == (Label.ABOVE_CEILING,) and beside["fp32"].verdict is Verdict.REFERENCE


BF16, FP32 = torch.bfloat16, torch.float32
CEILING = Ceiling(1e11, 1e11)
NUMBERS = GivenTensors((64, 64), 2, 10.0, 8192.0)


def told(case: Record, lead: Record) -> dict[Label, tuple[str, bool]]:
    return {label.label: (label.reason, label.hard) for label in label_false_claims(case, lead)}


def mismatches(case: Record, lead: Record) -> list[LabelWithReason]:
    return [label for label in label_false_claims(case, lead) if label.label is Label.WORK_MISMATCH]


def pair(case: Timing, lead: Timing, own: Tape | None = None, base: Tape | None = None) -> tuple[Record, Record]:
    return (
        record(case, "bf16", tape=own, ceiling=CEILING),
        record(lead, "fp32", is_reference=True, tape=base, ceiling=CEILING),
    )


def product(flops: int, moved: int = 1000, operator: str = "mm", path: str = "fp32") -> Tape:
    one = OperatorCount("gemm", operator, inputs=("fp32[64,64]",), flops=flops, bytes=moved, path=path)
    return Tape((one,), (PhaseCount("gemm", flops, moved, 1, by_path=((path, flops),), by_dtype=(("fp32", moved),)),))


@for_each(
    ("took", "own_took", "tape", "why"),
    [
        (20, 20, product(10**9), None),
        (50, 50, product(10**9), "multiplies at 20% of what this machine does in its dtype, this case at 20%"),
        (50, 20, product(10**9), "multiplies at 20% of what this machine does in its dtype, this case at 50%"),
        (5, 5, product(5 * 10**7), None),
        (5, 2, product(5 * 10**7), "multiplies at 10% of what this machine does in its dtype, this case at 25%"),
        (5, 2, product(5 * 10**6), None),  # values far below the range everywhere
        (50, 50, product(10**9, operator="convolution"), None),
        (50, 50, product(10**9, moved=3 * 10**9), None),  # at 60% by its bytes
    ],
)
def test_large_products_far_below_the_ceiling(took: int, own_took: int, tape: Tape, why: str | None) -> None:
    found = told(*pair(steady(own_took * MS, 24), steady(took * MS, 24), tape, tape))
    assert found == ({Label.HANDICAP: (f"fp32 {why}", False)} if why else {})


def test_disturbances_and_rounding_are_no_handicap() -> None:
    lead = steady(50 * MS, 24)
    lead = replace(lead, slots=tuple(replace(slot, cpu_seconds=slot.cpu_seconds / 2) for slot in lead.slots))
    assert Label.HANDICAP not in told(*pair(steady(50 * MS, 24), lead, product(10**9), product(10**9)))
    # A sum that is 2% off is many root-sum-squares off.
    ones = GivenTensors((1000, 1000), 1, 1e6, 1e6)
    case, lead = pair(steady(MS, 24), steady(MS, 24))
    case = replace(case, products=Products(1, True, given=(replace(ones, total=1.01e6),)))
    assert told(case, replace(lead, products=Products(1, None, given=(ones,)))) == {}


def copying(copies: int, dtype: torch.dtype = FP32) -> Tape:
    x, w = torch.ones(64, 64, dtype=dtype), torch.ones(64, 64, dtype=dtype)

    def step(phase: Phases) -> None:
        with phase.gemm:
            y = x
            for _ in range(copies):
                y = y.clone()
            y @ w

    return tape_in_phases(step)


def multiplying(*dtypes: torch.dtype) -> Tape:
    pairs = [(torch.ones(64, 64, dtype=dtype), torch.ones(64, 64, dtype=dtype)) for dtype in dtypes]

    def step(phase: Phases) -> None:
        with phase.gemm:
            for x, w in pairs:
                x @ w

    return tape_in_phases(step)


@for_each(
    ("base", "own", "why"),
    [
        (copying(10), copying(0), "moves 7.7 times the numbers that this case moves"),
        (copying(1), copying(0), "moves 40% of its numbers in copies that this case does not make"),
        (copying(1), copying(1), None),
        (copying(1), copying(1, BF16), None),  # half of the bytes, copies included
        (copying(0), copying(3), None),  # custom casts make a case slower
        (multiplying(BF16, FP32), multiplying(FP32, FP32), None),  # all of it wide
        (multiplying(FP32, FP32), multiplying(BF16, FP32), None),
    ],
)
def test_a_reference_that_moves_more_numbers_is_labelled(base: Tape, own: Tape, why: str | None) -> None:
    found = told(*pair(steady(MS, 24), steady(MS, 24), own, base))
    assert found.get(Label.HANDICAP) == ((f"fp32 {why}", False) if why else None)


def test_a_reference_with_wider_products_is_labelled() -> None:
    case, lead = pair(steady(MS, 24), steady(MS, 24), multiplying(BF16, BF16), multiplying(BF16, FP32))
    why = "fp32 multiplies 50% of its FLOPs in more than 16 bits, this case 0%"
    assert told(case, lead)[Label.HANDICAP] == (why, False)
    assert Label.HANDICAP not in told(case, replace(lead, case=replace(lead.case, precision="untouched")))


def _threaded(one: Record, share: float) -> Record:
    """Sets the step thread's share of the process's CPU time."""
    slots = [replace(slot, thread_seconds=share * slot.cpu_seconds) for slot in one.timing.slots]
    return replace(one, timing=replace(one.timing, slots=tuple(slots)))


LATE = LateSteps(by_path=(("fp32", 1e9),), in_operators=9.9e-3, seconds=(("mm", 8e-3), ("clone", 1e-3)))


@for_each(
    ("base", "own", "why"),
    [
        ({}, {}, None),
        ({"in_operators": 4e-3}, {}, "spends 60% of its time outside torch's operators, this case 1%"),
        ({"in_operators": 4e-3}, {"in_operators": 5e-3}, None),
        ({"in_operators": None}, {}, None),
        ({"waits": 1.0}, {}, "waits for at least 40% of its time, but this case only for 0%"),
        ({"waits": 1.0}, {"waits": 1.0}, None),
        (
            {"subnormal": 0.5},
            {},
            "has 50% subnormal numbers in its results, this case 0%: processors compute them slowly",
        ),
        ({"switches": ("oneDNN",)}, {}, "sets oneDNN within its steps, this case no switch"),
        ({}, {"switches": ("oneDNN",)}, "sets no switch within its steps, this case oneDNN"),
        ({"seconds": (("sort", 2e-3),)}, {}, "spends 20% of its operators' time in sort, which this case calls less"),
        ({"seconds": (("sort", 2e-3),)}, {"seconds": (("sort", 2e-3),)}, None),
        ({"seconds": (("mm", 4e-3),)}, {"seconds": (("mm", 1e-3),)}, None),
    ],
)
def test_late_steps_show_handicaps_of_the_reference(base: Any, own: Any, why: str | None) -> None:
    sorting = OperatorCount("gemm", "sort", inputs=("fp32[64,64]",), outputs=("fp32[64,64]",), bytes=1000)
    tape = product(10**9)
    case, lead = pair(CALM, CALM, tape, tape)
    if "seconds" in base and "seconds" not in own:
        lead = replace(lead, tape=replace(tape, operators=(*tape.operators, sorting)))
    case, lead = _threaded(case, 1.0), _threaded(lead, 1.0)
    if "waits" in base:  # same thread time: the process waited
        slots = [replace(slot, wall_seconds=slot.wall_seconds / 0.6) for slot in lead.timing.slots]
        lead = replace(lead, timing=replace(lead.timing, slots=tuple(slots)))
    case, lead = replace(case, late=replace(LATE, **own)), replace(lead, late=replace(LATE, **base))
    assert told(case, lead) == ({Label.HANDICAP: (f"fp32 {why}", False)} if why else {})


@for_each(
    ("base", "own", "why", "hard"),
    [
        ({}, {}, None, False),
        (
            {},
            {"by_path": (("fp64", 1e9),)},
            "a timed step does 1.00 GFLOP in fp64, an untimed step 0 FLOP",
            True,
        ),
        (
            {"varies": True},
            {"by_path": (("fp32", 2e8), ("fp64", 3e8)), "varies": True},
            "its steps do not all do the same products: 500 MFLOP on average, fp32's 1.00 GFLOP",
            False,
        ),
        ({"varies": True}, {"varies": True}, None, False),
        ({"by_path": None}, {"by_path": None}, None, False),
    ],
)
def test_late_steps_show_other_products(base: Any, own: Any, why: str | None, hard: bool) -> None:
    tape = product(10**9)
    case, lead = pair(CALM, CALM, tape, tape)
    case, lead = replace(case, late=replace(LATE, **own)), replace(lead, late=replace(LATE, **base))
    assert told(case, lead) == ({Label.WORK_MISMATCH: (why, hard)} if why else {})


@for_each(
    ("base", "own", "why"),
    [
        (NUMBERS, NUMBERS, None),
        (
            replace(NUMBERS, tensors=9, squares=4.5 * 8192),
            NUMBERS,
            "holds 9 tensors of 64 x 64, of which a step reads 1; this case holds 2",
        ),
        (
            replace(NUMBERS, scattered=2),
            NUMBERS,
            "has numbers of 2 tensors of 64 x 64 scattered in memory, this case has them contiguous",
        ),
        (replace(NUMBERS, scattered=2), replace(NUMBERS, scattered=2), None),
    ],
)
def test_a_reference_with_scattered_or_more_tensors_is_labelled(
    base: GivenTensors, own: GivenTensors, why: str | None
) -> None:
    case, lead = pair(CALM, CALM, product(10**9), product(10**9))
    case = replace(case, products=Products(1, True, given=(own,)))
    lead = replace(lead, products=Products(1, None, given=(base,)))
    assert told(case, lead) == ({Label.HANDICAP: (f"fp32 {why}", False)} if why else {})


def test_products_in_pieces_in_fp64_and_in_casts() -> None:
    tape = product(10**9)
    (mm,), (gemm,) = tape.operators, tape.phases
    pieces = replace(tape, operators=(replace(mm, calls=40, flops=25_000_000),))
    reasons = {
        "multiplies in 40 calls, but this case only in 1": pieces,
        "moves 33% of its numbers in fp64, this case 0%": replace(
            tape, phases=(replace(gemm, by_dtype=(("fp32", 1000), ("fp64", 1000))),)
        ),
        "multiplies 50% of its FLOPs in its casts, this case 0%": replace(
            tape, operators=(mm, replace(mm, phase="cast")), phases=(gemm, replace(gemm, phase="cast"))
        ),
    }
    for why, base in reasons.items():
        assert why in told(*pair(CALM, CALM, tape, base))[Label.HANDICAP][0]
    grouped = product(10**9, operator="_grouped_mm")
    assert told(*pair(CALM, CALM, grouped, pieces)) == {}


def test_other_threads_and_weights_that_no_step_casts() -> None:
    case, lead = pair(CALM, CALM)
    case, lead = _threaded(case, 1.0), _threaded(lead, 0.5)
    why = "fp32 has other threads that work for 5.00 ms a step, this case for 0 s"
    assert told(case, lead) == {Label.HANDICAP: (why, False)}
    assert [*label_false_claims(case, lead, threads=2)] == []
    held = replace(case, products=Products(1, True, cast_before=2))
    ((label, (reason, hard)),) = told(held, replace(lead, timing=case.timing)).items()
    assert label is Label.WORK_MISMATCH and not hard and reason.startswith("its products read 2 weights that were cast")


def test_a_data_loader_that_works_between_slots_is_no_handicap() -> None:
    case, reference = pair(CALM, CALM)
    loaded, reference = _threaded(case, 0.7), _threaded(reference, 1.0)
    assert Label.HANDICAP in told(loaded, reference)
    first, *slots = reference.timing.slots
    changed_slots = (replace(first, thread_seconds=0.7 * first.cpu_seconds), *slots)
    assert told(loaded, replace(reference, timing=replace(reference.timing, slots=changed_slots))) == {}


def test_unknown_operators_that_may_multiply_are_labelled() -> None:
    tape, unknown = product(10**9), OperatorCount("gemm", "quantized::linear", flops=None)
    case, lead = pair(CALM, CALM, Tape((unknown,)), tape)
    found = told(replace(case, products=Products(0, False)), lead)
    assert found[Label.FALLBACK][0].startswith("no product of bf16's formats was seen: it calls quantized::linear")
    assert Label.FALLBACK not in told(replace(case, products=Products(1, True)), lead)


def asleep(share: float, waited: float | None = 0.0) -> Timing:
    one = CALM
    slots = (
        replace(slot, cpu_seconds=slot.wall_seconds * (1 - share), waited_seconds=waited and waited * slot.wall_seconds)
        for slot in one.slots
    )
    return replace(one, slots=tuple(slots))


@for_each(
    ("own", "base", "hard"),
    [
        (asleep(0.0), asleep(0.3), True),
        (asleep(0.3), asleep(0.3), False),
        (asleep(0.0), asleep(0.05), False),
        (asleep(0.0), asleep(0.3, waited=0.3), False),  # other programs had its core
        (asleep(0.0), asleep(0.3, waited=None), False),  # other programs may have had it
    ],
)
def test_a_reference_that_sleeps(own: Timing, base: Timing, hard: bool) -> None:
    case, lead = pair(own, base)
    assert told(case, lead) == (
        {Label.HANDICAP: ("fp32 sleeps for 30% of its time, but this case only for 0%", True)} if hard else {}
    )
    assert (Label.HANDICAP in find([lead, case], {})[1].hard) == hard


OTHERS: list[tuple[GivenTensors, str, bool]] = [
    (NUMBERS, "", False),
    (replace(NUMBERS, total=NUMBERS.total + 9.0, squares=NUMBERS.squares * 1.02), "", False),  # rounded to four bits
    (
        replace(NUMBERS, total=NUMBERS.total + 128.0),
        "inputs have the magnitude of fp32's, but different numbers",
        False,
    ),
    (replace(NUMBERS, squares=4096.0), "the root mean square of fp32's 64 x 64 is 0.707, this case's 1", True),
    (replace(NUMBERS, squares=0.0), "the root mean square of fp32's 64 x 64 is 0, this case's 1", True),
    (replace(NUMBERS, subnormals=819), "10% of fp32's numbers in 64 x 64 are subnormal, this case has 0%", True),
    (replace(NUMBERS, subnormals=8), "", False),
    (replace(NUMBERS, tensors=3, squares=0.0), "", False),  # for example a copy in a custom format
    (GivenTensors((64, 32), 2, 0.0, 0.0), "", False),
]


@for_each(("given", "why", "hard"), OTHERS)
@for_each("level", [Level.NATIVE, Level.EMULATED])
def test_different_inputs_are_labelled(given: GivenTensors, why: str, hard: bool, level: Level) -> None:
    case, lead = pair(steady(MS, 24), CALM)
    case = replace(case, products=Products(1, True, given=(NUMBERS,)), support=replace(case.support, level=level))
    lead = replace(lead, products=Products(1, None, given=(given,)))
    assert told(case, lead) == ({Label.OTHER_INPUTS: (why, hard)} if why else {})
    verdict = find([lead, case], {})[1].verdict
    assert verdict is (Verdict.EMULATED if level is Level.EMULATED else Verdict.UNSURE if hard else Verdict.FASTER)


def test_gradients_have_their_loss_scale_in_fp16_alone() -> None:
    scaled = replace(NUMBERS, total=NUMBERS.total * 1024, squares=NUMBERS.squares * 1024.0**2)
    for times, mode, hard in ((scaled, "fp16", False), (scaled, "bf16", True), (NUMBERS, "fp16", False)):
        case = replace(record(steady(MS, 24), mode), products=Products(1, True, given=(times,)))
        lead = record(steady(MS, 24), "fp32", is_reference=True, products=Products(1, None, given=(NUMBERS,)))
        assert (Label.OTHER_INPUTS in told(case, lead)) == hard
        turned = replace(case, is_reference=True), replace(lead, is_reference=False)
        assert (Label.OTHER_INPUTS in told(turned[1], turned[0])) == hard


TOKENS, WIDTH, HIDDEN = 48, 32, 64
PRODUCT = 2 * TOKENS * WIDTH * HIDDEN
Step = Callable[[Tensor, Tensor, Tensor, Phases], object]


def honest(x: Tensor, up: Tensor, down: Tensor, phase: Phases) -> object:
    with phase.gemm:
        return (x @ up) @ down


def half(x: Tensor, up: Tensor, down: Tensor, phase: Phases) -> object:
    with phase.gemm:
        return (x[: TOKENS // 2] @ up) @ down


def skipped(x: Tensor, up: Tensor, down: Tensor, phase: Phases) -> object:
    with phase.gemm:
        return x @ up


def shared(x: Tensor, up: Tensor, down: Tensor, phase: Phases) -> object:
    return x.relu()


def nothing(x: Tensor, up: Tensor, down: Tensor, phase: Phases) -> object:
    return x


def twice(x: Tensor, up: Tensor, down: Tensor, phase: Phases) -> object:
    honest(x, up, down, phase)
    return honest(x, up, down, phase)


def rotated(x: Tensor, up: Tensor, down: Tensor, phase: Phases) -> object:
    with phase.cast:
        x = x @ torch.eye(WIDTH)
    return honest(x, up, down, phase)


def padded(x: Tensor, up: Tensor, down: Tensor, phase: Phases) -> object:
    with phase.gemm:
        return (torch.cat([x, torch.zeros(16, WIDTH)]) @ up) @ down


def taped(step: Step) -> Tape:
    x, up, down = torch.ones(TOKENS, WIDTH), torch.ones(WIDTH, HIDDEN), torch.ones(HIDDEN, WIDTH)
    return tape_in_phases(lambda phase: step(x, up, down, phase))


def trained(again: bool) -> Tape:
    """A step with a backward pass; optionally recomputes its forward pass."""
    x, up, down = torch.ones(TOKENS, WIDTH), torch.ones(WIDTH, HIDDEN), torch.ones(HIDDEN, WIDTH)
    weights = [one.requires_grad_() for one in (up, down)]

    def block(x: Tensor) -> Tensor:
        return (x @ weights[0]) @ weights[1]

    def step() -> None:
        y = checkpoint(block, x, use_reentrant=False) if again else block(x)
        y.sum().backward()

    return tape_in_phases(lambda phase: step())


@for_each(
    ("step", "did"),
    [(half, "196 kFLOP"), (skipped, "197 kFLOP"), (shared, "0 FLOP"), (nothing, "0 FLOP"), (twice, "786 kFLOP")],
)
def test_a_step_with_other_products_has_no_verdict(step: Step, did: str) -> None:
    lead = replace(record(CALM, "fp32", is_reference=True), tape=taped(honest))
    case = replace(record(steady(MS, 24), "bf16"), tape=taped(step))
    (told,) = mismatches(case, lead)
    assert told.hard and told.reason.endswith(" a step, fp32's do 393 kFLOP"), told.reason
    assert find([lead, case], {})[1].verdict is Verdict.UNSURE


@for_each(
    ("own", "base", "work"),
    [
        (taped(rotated), taped(honest), ProductWork(2 * PRODUCT, rotation_flops=2 * TOKENS * WIDTH * WIDTH)),
        (taped(padded), taped(honest), ProductWork(2 * PRODUCT, padding_flops=2 * PRODUCT // 3)),
    ],
)
def test_rotations_and_padding_are_not_useful_work(own: Tape, base: Tape, work: ProductWork) -> None:
    found = sum_product_work(own, base)
    assert found.useful_flops == sum_product_work(base).useful_flops and found == work and found.overhead
    lead = replace(record(CALM, "fp32", is_reference=True), tape=base)
    case = replace(record(steady(MS, 24), "bf16"), tape=own)
    assert not mismatches(case, lead)


def test_recomputation_and_unknown_operators() -> None:
    # Backward does not need the last product's output, so torch does not recompute it.
    once, again = trained(again=False), trained(again=True)
    found = sum_product_work(again, once)
    assert found.useful_flops == sum_product_work(once).useful_flops and found.overhead == {
        specs.RECOMPUTED_FLOPS: PRODUCT
    }
    lead: Record = replace(record(CALM, "fp32", is_reference=True), tape=once)
    case = replace(record(steady(MS, 24), "bf16"), tape=again)
    assert not mismatches(case, lead)
    lead = replace(lead, tape=taped(honest))
    case = replace(record(steady(MS, 24), "bf16"), tape=replace(taped(half), unwritten=1))
    assert not mismatches(case, lead)


def test_a_reference_with_fp64_products_removes_the_verdict() -> None:
    def wide(x: Tensor, up: Tensor, down: Tensor, phase: Phases) -> object:
        with phase.gemm:
            return ((x.double() @ up.double()) @ down.double()).float()

    lead = replace(record(CALM, "fp32", is_reference=True), tape=taped(wide))
    case = replace(record(steady(MS, 24), "bf16"), tape=taped(honest))
    (told,) = label_false_claims(lead, None)
    assert (told.label, told.reason) == (Label.FALLBACK, "393 kFLOP of its 393 kFLOP a step are in fp64") and told.hard
    assert find([lead, case], {})[1].verdict is Verdict.UNSURE
    untouched = replace(lead, case=replace(lead.case, precision="untouched"))
    assert not list(label_false_claims(untouched, None)), "a model may come in fp64"
