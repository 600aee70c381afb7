"""What is said of a reference that is slower than it need be, from values."""

from __future__ import annotations

from dataclasses import replace

import torch

from fp8bench.analysis.claims import claims_of
from fp8bench.analysis.findings import find
from fp8bench.model import (
    Ceiling,
    GivenTensors,
    Label,
    Level,
    OperatorCount,
    PhaseCount,
    Products,
    Record,
    Tape,
    Timing,
    Verdict,
)
from fp8bench.protocols import Phases
from tests.counts import for_each
from tests.fakes import MS, record, steady
from tests.tapes import tape_in_phases

BF16, FP32 = torch.bfloat16, torch.float32
CEILING = Ceiling(1e11, 1e11)
NUMBERS = GivenTensors((64, 64), 2, 10.0, 8192.0)


def told(case: Record, lead: Record) -> dict[Label, tuple[str, bool]]:
    return {one.label: (one.reason, one.hard) for one in claims_of(case, lead)}


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
        (5, 2, product(5 * 10**6), None),  # small ones are far below everywhere
        (50, 50, product(10**9, operator="convolution"), None),
        (50, 50, product(10**9, moved=3 * 10**9), None),  # by its bytes it is at 60%
    ],
)
def test_large_products_far_below_the_ceiling(took: int, own_took: int, tape: Tape, why: str | None) -> None:
    found = told(*pair(steady(own_took * MS, 24), steady(took * MS, 24), tape, tape))
    assert found == ({Label.HANDICAP: (f"fp32 {why}", False)} if why else {})


def test_what_others_hold_up_is_not_far_below() -> None:
    lead = steady(50 * MS, 24)
    lead = replace(lead, slots=tuple(replace(slot, cpu_seconds=slot.cpu_seconds / 2) for slot in lead.slots))
    assert Label.HANDICAP not in told(*pair(steady(50 * MS, 24), lead, product(10**9), product(10**9)))


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
        (copying(1), copying(1, BF16), None),  # half of the bytes, of its copies too
        (copying(0), copying(3), None),  # casts of its own make a case slower
        (multiplying(BF16, FP32), multiplying(FP32, FP32), None),  # which is all wide
        (multiplying(FP32, FP32), multiplying(BF16, FP32), None),
    ],
)
def test_numbers_that_a_reference_moves_alone(base: Tape, own: Tape, why: str | None) -> None:
    found = told(*pair(steady(MS, 24), steady(MS, 24), own, base))
    assert found.get(Label.HANDICAP) == ((f"fp32 {why}", False) if why else None)


def test_products_of_a_reference_that_are_in_part_wider() -> None:
    """Of a model as it came nobody says so: it is what it is."""
    case, lead = pair(steady(MS, 24), steady(MS, 24), multiplying(BF16, BF16), multiplying(BF16, FP32))
    why = "fp32 multiplies 50% of its FLOPs in more than 16 bits, this case 0%"
    assert told(case, lead)[Label.HANDICAP] == (why, False)
    assert Label.HANDICAP not in told(case, replace(lead, case=replace(lead.case, precision="untouched")))


def asleep(share: float, waited: float | None = 0.0) -> Timing:
    one = steady(10 * MS, 24)
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
        (asleep(0.3), asleep(0.0), False),
        (asleep(0.0), asleep(0.05), False),
        (asleep(0.0), asleep(0.3, waited=0.3), False),  # others had its core
        (asleep(0.0), asleep(0.3, waited=None), False),  # or may have had it
    ],
)
def test_a_reference_that_sleeps(own: Timing, base: Timing, hard: bool) -> None:
    case, lead = pair(own, base)
    assert told(case, lead) == ({Label.HANDICAP: ("fp32 sleeps 30% of its time, this case 0%", True)} if hard else {})
    assert (Label.HANDICAP in find([lead, case], {})[1].hard) == hard


OTHERS: list[tuple[GivenTensors, str, bool]] = [
    (NUMBERS, "", False),
    (replace(NUMBERS, total=NUMBERS.total + 9.0, squares=NUMBERS.squares * 1.02), "", False),  # rounded to four bits
    (replace(NUMBERS, total=NUMBERS.total + 128.0), "of fp32's size, and other numbers", False),
    (replace(NUMBERS, squares=4096.0), "the root mean square of fp32's 64 x 64 is 0.707, that of its own 1", True),
    (replace(NUMBERS, squares=0.0), "the root mean square of fp32's 64 x 64 is 0, that of its own 1", True),
    (replace(NUMBERS, subnormals=819), "10% of fp32's numbers in 64 x 64 are subnormal, 0% of its own", True),
    (replace(NUMBERS, subnormals=8), "", False),
    (replace(NUMBERS, tensors=3, squares=0.0), "", False),  # a copy in a format of its own, say
    (GivenTensors((64, 32), 2, 0.0, 0.0), "", False),
]


@for_each(("given", "why", "hard"), OTHERS)
@for_each("level", [Level.NATIVE, Level.EMULATED])
def test_other_inputs(given: GivenTensors, why: str, hard: bool, level: Level) -> None:
    """Of an emulated case too: errors compare nothing then."""
    case, lead = pair(steady(MS, 24), steady(10 * MS, 24))
    case = replace(case, products=Products(1, True, given=(NUMBERS,)), support=replace(case.support, level=level))
    lead = replace(lead, products=Products(1, None, given=(given,)))
    assert told(case, lead) == ({Label.OTHER_INPUTS: (why, hard)} if why else {})
    verdict = find([lead, case], {})[1].verdict
    assert verdict is (Verdict.EMULATED if level is Level.EMULATED else Verdict.UNSURE if hard else Verdict.FASTER)


def test_sums_that_are_all_of_one_sign_may_move_with_rounding() -> None:
    """2% of a sum is many roots of sums of squares."""
    ones = GivenTensors((1000, 1000), 1, 1e6, 1e6)
    case, lead = pair(steady(MS, 24), steady(MS, 24))
    case = replace(case, products=Products(1, True, given=(replace(ones, total=1.01e6),)))
    assert told(case, replace(lead, products=Products(1, None, given=(ones,)))) == {}


def test_gradients_have_their_loss_scale_in_fp16_alone() -> None:
    """Beside either of the two; what is another number of times as large is other inputs."""
    scaled = replace(NUMBERS, total=NUMBERS.total * 1024, squares=NUMBERS.squares * 1024.0**2)
    for times, mode, hard in ((scaled, "fp16", False), (scaled, "bf16", True), (NUMBERS, "fp16", False)):
        case = replace(record(steady(MS, 24), mode), products=Products(1, True, given=(times,)))
        lead = record(steady(MS, 24), "fp32", is_reference=True, products=Products(1, None, given=(NUMBERS,)))
        assert (Label.OTHER_INPUTS in told(case, lead)) == hard
        turned = replace(case, is_reference=True), replace(lead, is_reference=False)
        assert (Label.OTHER_INPUTS in told(turned[1], turned[0])) == hard
