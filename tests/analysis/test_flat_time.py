"""Which sizes of a case are held against each other, and when their times are called flat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fp8bench.analysis.findings import findings
from fp8bench.analysis.flat_time import flat_times
from fp8bench.model import Case, Ceiling, Label, Level, Products, Record, Request, Status, Support, Verdict, Work
from tests.counts import for_each
from tests.fakes import MS, called, steady, timing
from tests.runs import run_of

STEP = steady(10 * MS, 12)
FEW = Products(1, None, ("float32",), 10)


def sized(n: int, flops: float, time: Any = STEP, **options: Any) -> Record:
    """A case of a suite with one size; ten operators in a step."""
    params = (("kind", options.pop("kind", "a")), ("n", n), *options.pop("params", ()))
    work = Work(flops, **{name: options.pop(name) for name in ("tokens", "bytes", "least_memory") if name in options})
    case = Case("mine", params, options.pop("precision", "fp32"), options.pop("device", "cpu"))
    return Record(
        case, Support(Level.NATIVE, ""), Status.OK, work, timing=time, products=options.pop("products", FEW), **options
    )


def flat(*records: Record, threads: int = 1) -> list[tuple[object, str]]:
    """The sizes that are called flat, with the reason."""
    found = flat_times(records, threads)
    assert all(one.label is Label.FLAT_TIME and not one.hard for one in found.values())
    return [(one.case.param("n"), found[one.case.id].reason) for one in records if one.case.id in found]


def test_twice_the_work_in_the_same_time() -> None:
    """The larger one is told, with both times and works, whichever comes first; in less time too."""
    small, large = sized(64, 1e6), sized(128, 8e6)
    assert flat(small, large) == flat(large, small) == [(128, "10.0 ms for 8.00 MFLOP, 10.0 ms for 1.00 MFLOP")]
    assert flat(small, replace(large, timing=steady(5 * MS, 12)))[0][1].startswith("5.00 ms for 8.00 MFLOP")
    assert flat(small) == []


@for_each("share", [1.01, 1.05, 1.5, 2.0])
def test_time_that_grows_is_not_flat(share: float) -> None:
    """By as little as is no noise."""
    assert flat(sized(64, 1e6), sized(128, 8e6, steady(round(10 * MS * share), 12))) == []


def test_noise_that_would_hide_a_growth_says_nothing() -> None:
    """Times of which nobody knows whether they grew, nor that they did not."""
    wild = [round(10 * MS * factor) for factor in (0.7, 1.5, 1.0, 2.0, 1.2, 0.9, 1.7, 0.8, 1.1, 1.4, 1.9, 1.3)]
    assert flat(sized(64, 1e6, timing(*[(ns,) for ns in wild])), sized(128, 8e6, timing(*[(ns,) for ns in wild]))) == []
    some = [round(10 * MS * factor) for factor in (1.0, 1.004, 1.008, 1.002, 1.006, 1.01) * 2]
    assert flat(
        sized(64, 1e6, timing(*[(ns,) for ns in some])), sized(128, 8e6, timing(*[(ns + MS // 100,) for ns in some]))
    )


@for_each(
    ("small", "large"),
    [
        (sized(64, 1e6), sized(128, 1.9e6)),
        (sized(64, 0), sized(128, 0)),
        (sized(64, 1e6, kind="a"), sized(128, 8e6, kind="b")),
        (sized(64, 1e6, precision="bf16"), sized(128, 8e6)),
        (sized(64, 1e6, device="cuda:0"), sized(128, 8e6)),
        (sized(64, 1e6, params=(("m", 9),)), sized(128, 8e6, params=(("m", 8),))),
        (sized(64, 1e6, params=(("causal", False),)), sized(128, 8e6, params=(("causal", True),))),
        (sized(64, 1e6, tokens=9), sized(128, 8e6, tokens=8)),
        (sized(64, 1e6, bytes=9.0), sized(128, 8e6, bytes=9.0)),
        (sized(64, 1e6, least_memory=9.0), sized(128, 8e6, least_memory=10.0)),  # more rows through the same weights
        (sized(64, 1e6), sized(128, 8e6, steady(10 * MS, 7))),
        (sized(64, 1e6, products=None), sized(128, 8e6)),
        (sized(64, 1e6, products=replace(FEW, operators=400)), sized(128, 8e6)),  # 10 ms are what so many take anyway
    ],
)
def test_what_is_not_held_against_each_other(small: Record, large: Record) -> None:
    """Other work, less than twice of some count, what reads the same memory, and times that are the operators' own."""
    assert flat(small, large) == []


@for_each(
    ("small", "large"),
    [
        (sized(64, 0, tokens=4), sized(128, 0, tokens=8)),
        (sized(64, 0, bytes=4.0), sized(128, 0, bytes=8.0)),
        (sized(64, 1e6, tokens=8), sized(128, 8e6, tokens=8)),
        (sized(64, 1e6, bytes=4.0, least_memory=9.0), sized(128, 8e6, bytes=8.0, least_memory=9.0)),
        (sized(64, 1e6, params=(("m", 8),)), sized(128, 8e6, params=(("m", 8),))),
    ],
)
def test_what_is(small: Record, large: Record) -> None:
    assert flat(small, large)


@for_each(("device", "threads"), [("cuda:0", 1), ("cpu", 2)])
def test_what_may_have_been_half_idle_is_not_asked(device: str, threads: int) -> None:
    """A GPU, or several threads: unless the larger size claims more than half of what they can do."""
    small, large = (sized(n, flops, device=device) for n, flops in ((64, 1e9), (128, 2e9)))
    assert flat(small, large, threads=threads) == []
    for bound, told in ((Ceiling(5e11, 1e11), False), (Ceiling(3e11, 1e11), True), (Ceiling(None, 1e11), False)):
        assert bool(flat(small, replace(large, ceiling=bound), threads=threads)) is told


def test_a_step_that_the_host_sets_the_pace_of_is_not_asked() -> None:
    """It takes as long as launching takes."""
    slots = tuple(replace(slot, host_seconds=0.01) for slot in STEP.slots)
    small = sized(64, 1e9, replace(STEP, slots=slots), device="cuda:0")
    assert flat(small, sized(128, 2e9, device="cuda:0", ceiling=Ceiling(1e11, None))) == []


def test_the_finding_has_the_label_and_keeps_its_verdict() -> None:
    """No hard one: 'perhaps same'."""
    records = []
    for n, flops in ((64, 1e6), (128, 8e6)):
        reference = sized(
            n, flops, steady(20 * MS, 24), precision="fp32", is_reference=True, control=steady(20 * MS, 24)
        )
        records += [reference, sized(n, flops, steady(10 * MS, 24), precision="bf16")]
    found = {one.case.id: one for one in findings(run_of(records, request=Request("mine"))).values()}
    for record in records:
        finding = found[record.case.id]
        assert (Label.FLAT_TIME in finding.labels) is (record.case.param("n") == 128) and not finding.hard
    assert found[records[3].case.id].verdict is Verdict.FASTER
    assert found[records[3].case.id].verdict_words == "perhaps faster"


def test_calls_of_a_slot_count_alike() -> None:
    """A minimum over more calls would be lower for that alone."""
    calm = called(*[(10 * MS,) * 4] * 12)
    assert flat(sized(64, 1e6, calm), sized(128, 8e6, calm))
