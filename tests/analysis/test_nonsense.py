"""Whatever a file says of clocks, energy and a device: labels come without a fault, and only what can be hard is."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fp8bench.analysis.findings import find
from fp8bench.analysis.labels import CAN_BE_HARD
from fp8bench.model import DeviceWatch, EnergyUse, EnergyWindow, Label, Record, Verdict
from tests.fakes import MS, record, steady

any_float = st.floats(allow_nan=True, allow_infinity=True)
maybe = st.one_of(st.none(), any_float)
names = st.sampled_from(["thermal", "sw-thermal", "hw-thermal", "hw-power-brake", "power-cap", "something else"])
watches = st.builds(
    DeviceWatch, st.integers(0, 9), any_float, st.one_of(st.none(), st.integers(-(2**64), 2**64)),
    st.lists(st.tuples(names, any_float), max_size=6).map(tuple), maybe,
)  # fmt: skip
windows = st.builds(
    EnergyWindow, st.integers(-1, 9), any_float, any_float, st.integers(), maybe, maybe, maybe,
    st.one_of(st.none(), st.integers(0, 2**40)),
)  # fmt: skip
energies = st.builds(
    EnergyUse, st.sampled_from(["counter", "rapl", "average", "none", ""]), st.lists(windows, max_size=4).map(tuple),
    maybe, maybe, st.sampled_from(["", "a call failed"]),
)  # fmt: skip


@st.composite
def wild_records(draw: st.DrawFn) -> Record:
    """Sixteen rounds of ten milliseconds with clocks, counters, energy and watch of any kind."""
    timing = steady(10 * MS, 16)
    slots = [
        replace(
            slot, wall_seconds=draw(any_float), cpu_seconds=draw(any_float), thread_seconds=draw(maybe),
            preemptions=draw(st.one_of(st.none(), st.integers())), stolen_seconds=draw(maybe),
        )
        for slot in timing.slots[:2]
    ]  # fmt: skip
    return record(
        replace(timing, slots=tuple(replace(slots[number % 2], round=number) for number in range(16))),
        device=draw(st.sampled_from(["cpu", "cuda:0"])),
        watch=draw(st.one_of(st.none(), watches)),
        energy=draw(st.one_of(st.none(), energies)),
    )


@settings(max_examples=100, deadline=None)
@given(wild_records(), st.booleans())
def test_nonsense_makes_no_fault(one: Record, reference: bool) -> None:
    """A verdict is either of the samples, which are alike here, or taken by labels that can take it."""
    calm = record(steady(10 * MS, 16), "fp32", is_reference=True, control=steady(10 * MS, 16), device=one.case.device)
    wild = replace(calm, watch=one.watch, timing=one.timing, energy=one.energy) if reference else calm
    findings = find([wild, one], {})
    for finding in findings:
        assert set(dict(finding.label_reasons)) <= set(finding.labels) <= set(Label)
        assert list(finding.labels) == sorted(finding.labels, key=list(Label).index)
        assert set(finding.hard) <= CAN_BE_HARD and bool(finding.hard) == finding.why.endswith("get no verdict")
    assert findings[1].verdict is (Verdict.UNSURE if findings[1].hard else Verdict.SAME)
