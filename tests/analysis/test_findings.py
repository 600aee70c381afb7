"""Hard labels: which cases lose their verdict, for any clocks, energy and device facts in a file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8bench.analysis.findings import find
from fp8bench.analysis.labels import POSSIBLY_HARD_LABELS
from fp8bench.analysis.verdicts import is_case_decided
from fp8bench.model import (
    DeviceWatch,
    EnergyUse,
    EnergyWindow,
    Finding,
    Label,
    Level,
    Record,
    StepEffect,
    Timing,
    Verdict,
)
from tests.counts import for_each
from tests.fakes import MS, record, steady

TEN = steady(10 * MS, 24)
FIVE = steady(5 * MS, 24)
HOT = DeviceWatch(4, 10.0, 0x40)
END = ", so there is no verdict"
IDLE = StepEffect(False, "it does nothing")
FIFTH = "contended (less than a fifth of a core in 24 of 24 slots)"


def found(*records: Record) -> dict[str, Finding]:
    return {finding.case.precision: finding for finding in find(records, {})}


def reference(timing: Timing = TEN, control: Timing | None = TEN, **options: Any) -> Record:
    return record(timing, "fp32", is_reference=True, control=control, **options)


def starved(timing: Timing) -> Timing:
    """The same samples from a process that got a sixth of a core."""
    slots = [replace(slot, wall_seconds=6 * slot.cpu_seconds) for slot in timing.slots]
    return replace(timing, slots=tuple(slots))


def enqueued(timing: Timing, host: float) -> Timing:
    """The same samples; enqueueing each step took the host `host` seconds."""
    return replace(timing, slots=tuple(replace(slot, host_seconds=host) for slot in timing.slots))


def test_a_time_that_the_host_set_gets_no_verdict() -> None:
    lead, other = (
        record(one, precision=name, device="cuda:0", is_reference=name == "fp32", control=one)
        for one, name in ((TEN, "fp32"), (FIVE, "bf16"))
    )
    for first, second, verdict in (
        (0.0, 0.0, "faster"),
        (0.0, 3e-3, "faster"),
        (0.0, 4.9e-3, "cannot tell"),
        (9.9e-3, 0.0, "cannot tell"),
    ):
        finding = found(
            replace(lead, timing=enqueued(TEN, first)), replace(other, timing=enqueued(FIVE, second), control=None)
        )["bf16"]
        assert finding.verdict_words == verdict and finding.ratio is not None
        assert (verdict == "cannot tell") == (finding.hard == (Label.LAUNCH_BOUND,))


@for_each(
    ("case", "label", "why"),
    [
        (record(FIVE, watch=HOT), Label.THROTTLED, "labelled throttled (hw-thermal)"),
        (record(starved(FIVE)), Label.CONTENDED, f"labelled {FIFTH}"),
        (record(FIVE, effect=IDLE), Label.NO_WORK, "labelled no-work (it does nothing)"),
    ],
)
def test_a_hard_label_takes_the_verdict_and_leaves_the_ratio(case: Record, label: Label, why: str) -> None:
    finding = found(reference(), case)["bf16"]
    assert (finding.verdict, finding.why, finding.hard) == (Verdict.UNSURE, f"{why}{END}", (label,))
    assert finding.ratio is not None and finding.ratio.point == pytest.approx(0.5)
    assert label in finding.labels and dict(finding.label_reasons)[label] in finding.why
    plain = found(reference(), record(FIVE))["bf16"]
    assert (plain.verdict, plain.hard, plain.label_reasons) == (Verdict.FASTER, (), ())


@for_each(
    "case",
    [
        record(FIVE, watch=DeviceWatch(4, 10.0, 0x20 | 0x4)),
        record(replace(FIVE, slots=tuple(replace(slot, wall_seconds=2 * slot.cpu_seconds) for slot in FIVE.slots))),
    ],
)
def test_the_same_label_less_grave_is_a_doubt(case: Record) -> None:
    finding = found(reference(), case)["bf16"]
    assert finding.labels and (finding.verdict, finding.why, finding.hard) == (Verdict.FASTER, "", ())
    for effect in (None, StepEffect(True), StepEffect(None, "nobody can tell")):
        finding = found(reference(effect=effect), record(FIVE, effect=effect))["bf16"]
        assert (finding.verdict, finding.labels) == (Verdict.FASTER, ())


def test_identical_code_told_apart_takes_every_verdict() -> None:
    findings = found(reference(control=steady(10_300_000, 24)), record(FIVE), record(steady(20 * MS, 24), "fp16"))
    for mode in ("bf16", "fp16"):
        finding = findings[mode]
        assert finding.verdict is Verdict.UNSURE and finding.hard == (Label.AA_FAILED,)
        assert finding.why == f"labelled aa-failed (A/A 1.030x [1.030, 1.030]){END}" and finding.ratio is not None
    assert Label.AA_FAILED in findings["fp32"].labels and findings["fp32"].verdict is Verdict.REFERENCE
    near = found(reference(control=steady(10_190_000, 24)), record(FIVE))
    assert near["bf16"].verdict is Verdict.FASTER and Label.AA_FAILED not in near["fp32"].labels


@for_each(
    ("first", "why"),
    [
        (reference(watch=HOT), "throttled (hw-thermal)"),
        (reference(starved(TEN)), FIFTH),
        (reference(effect=IDLE), "no-work (it does nothing)"),
    ],
)
def test_a_reference_with_a_hard_label_spoils_what_is_held_against_it(first: Record, why: str) -> None:
    finding = found(first, record(FIVE))["bf16"]
    assert (finding.verdict, finding.why) == (Verdict.UNSURE, f"the reference is labelled {why}{END}")
    assert finding.labels == () and len(finding.hard) == 1 and finding.ratio is not None
    both = found(reference(starved(TEN), watch=HOT), record(FIVE, watch=HOT))["bf16"]  # a shared label is printed once
    assert both.why == f"labelled throttled (hw-thermal); the reference is labelled {FIFTH}{END}"
    assert both.hard == (Label.THROTTLED, Label.CONTENDED)


def test_a_case_of_another_sitting_is_spoilt_by_its_own_company_alone() -> None:
    spoilt = reference(starved(TEN), watch=HOT)
    assert found(spoilt, record(FIVE, paired_with=TEN, control=TEN))["bf16"].verdict is Verdict.FASTER
    idle = reference(effect=IDLE)  # independent of when it was measured
    assert found(idle, record(FIVE, paired_with=TEN, control=TEN))["bf16"].hard == (Label.NO_WORK,)
    apart = found(reference(), record(FIVE, paired_with=starved(TEN)))["bf16"]
    assert apart.verdict is Verdict.UNSURE and apart.why == f"the reference is labelled {FIFTH}{END}"
    moved = found(reference(), record(FIVE, paired_with=TEN, control=steady(10_300_000, 24)))["bf16"]
    assert moved.hard == (Label.AA_FAILED,)


def test_where_there_is_no_verdict_to_take_nothing_changes() -> None:
    findings = found(
        reference(watch=HOT),
        record(FIVE, "fp8", Level.EMULATED, watch=HOT),
        record(FIVE, "bf16", paired=False, watch=HOT),
    )
    assert [findings[mode].verdict for mode in ("fp32", "fp8")] == [Verdict.REFERENCE, Verdict.EMULATED]
    assert findings["bf16"].why == "the case shares no rounds with a reference"
    assert {finding.hard for finding in findings.values()} == {()}
    assert all(Label.THROTTLED in finding.labels for finding in findings.values())


def test_early_stopping_looks_at_samples_alone() -> None:
    assert is_case_decided(starved(FIVE), starved(TEN), starved(TEN))
    assert is_case_decided(FIVE, TEN, steady(10_300_000, 24))


any_float = st.floats(allow_nan=True, allow_infinity=True)
maybe = st.one_of(st.none(), any_float)
names = st.sampled_from(["thermal", "sw-thermal", "hw-thermal", "hw-power-brake", "power-cap", "something else"])
watches = st.builds(
    DeviceWatch,
    st.integers(0, 9),
    any_float,
    st.one_of(st.none(), st.integers(-(2**64), 2**64)),
    st.lists(st.tuples(names, any_float), max_size=6).map(tuple),
    maybe,
)
windows = st.builds(
    EnergyWindow,
    st.integers(-1, 9),
    any_float,
    any_float,
    st.integers(),
    maybe,
    maybe,
    maybe,
    st.one_of(st.none(), st.integers(0, 2**40)),
)
energies = st.builds(
    EnergyUse,
    st.sampled_from(["counter", "rapl", "average", "none", ""]),
    st.lists(windows, max_size=4).map(tuple),
    maybe,
    maybe,
    st.sampled_from(["", "a call failed"]),
)


@st.composite
def wild_records(draw: st.DrawFn) -> Record:
    """Sixteen rounds of 10 ms with arbitrary clocks, counters, energy and watch data."""
    timing = steady(10 * MS, 16)
    slots = [
        replace(
            slot,
            wall_seconds=draw(any_float),
            cpu_seconds=draw(any_float),
            thread_seconds=draw(maybe),
            preemptions=draw(st.one_of(st.none(), st.integers())),
            stolen_seconds=draw(maybe),
        )
        for slot in timing.slots[:2]
    ]
    return record(
        replace(timing, slots=tuple(replace(slots[number % 2], round=number) for number in range(16))),
        device=draw(st.sampled_from(["cpu", "cuda:0"])),
        watch=draw(st.one_of(st.none(), watches)),
        energy=draw(st.one_of(st.none(), energies)),
    )


@settings(max_examples=25)
@given(wild_records(), st.booleans())
def test_nonsense_makes_no_fault(one: Record, reference: bool) -> None:
    calm = record(steady(10 * MS, 16), "fp32", is_reference=True, control=steady(10 * MS, 16), device=one.case.device)
    wild = replace(calm, watch=one.watch, timing=one.timing, energy=one.energy) if reference else calm
    findings = find([wild, one], {})
    for finding in findings:
        assert set(dict(finding.label_reasons)) <= set(finding.labels) <= set(Label)
        assert list(finding.labels) == sorted(finding.labels, key=list(Label).index)
        assert set(finding.hard) <= POSSIBLY_HARD_LABELS and bool(finding.hard) == finding.why.endswith(END)
    assert findings[1].verdict is (Verdict.UNSURE if findings[1].hard else Verdict.SAME)
