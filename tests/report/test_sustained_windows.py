"""Energy windows show a GPU's sustained speed where a power cap or its clock makes it differ from slots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.analysis.findings import findings
from fp8bench.analysis.samples import get_sustained_samples, is_energy_clock_different
from fp8bench.model import EnergyWindow, Level, Record, Run, Support
from fp8bench.report.page.section import LabelledRun
from fp8bench.report.panels import group_into_panels
from fp8bench.report.topics.speedup import describe_sustained_speed
from fp8bench.store.runs.run_file import load_run
from suites.trials import ROOT


@pytest.fixture(scope="module")
def run() -> Run:
    """What an H200 measured at its power cap: three products with casts, bf16, fp8 and fp8-rowwise."""
    return load_run(ROOT / "reports" / "gpu_h200_202611" / "runs" / "7816318e.jsonl")


def sentences(run: Run) -> list[str]:
    entry = LabelledRun(run, findings(run))
    return [text.text for panel in group_into_panels(run, entry.findings) for text in describe_sustained_speed(panel)]


def with_windows(run: Run, **changes: object) -> Run:
    def changed(record: Record) -> Record:
        if record.energy is None:
            return record
        windows: tuple[EnergyWindow, ...] = tuple(replace(window, **changes) for window in record.energy.windows)  # type: ignore[arg-type]
        return replace(record, energy=replace(record.energy, windows=windows))

    return replace(run, records=tuple(map(changed, run.records)))


def test_what_lasts_comes_before_what_milliseconds_show(run: Run) -> None:
    (words,) = sentences(run)
    lasting, slots = words.split(" In slots of milliseconds: ")
    assert "bf16 (reference) at 1.46 GHz to 1.49 GHz and 691 W to 693 W" in lasting
    assert "fp8 1.32x to 1.63x at 1.51 GHz to 1.75 GHz and 691 W to 694 W" in lasting
    assert "fp8 1.23x to 1.57x at 1.80 GHz to 1.93 GHz" in slots and "fp8-rowwise 1.46x to 1.72x at" in slots


def test_windows_at_the_clock_of_slots_say_nothing_new(run: Run) -> None:
    steady = with_windows(run, sm_clock=None, throttle=0)
    assert sentences(steady) == [] and not any(map(is_energy_clock_different, steady.records))
    record = next(record for record in steady.records if record.energy and record.timing and record.timing.clock)
    assert record.energy is not None and record.timing is not None and record.timing.clock is not None
    for share, moved in ((0.99, False), (0.97, True), (1.03, True)):
        window = replace(record.energy.windows[0], sm_clock=share * record.timing.clock)
        assert is_energy_clock_different(replace(record, energy=replace(record.energy, windows=(window,)))) is moved
    emulated = replace(run.records[0], support=Support(Level.EMULATED, "no units"))
    assert not is_energy_clock_different(emulated) and get_sustained_samples(emulated) == ()


def test_windows_that_a_changed_file_made_impossible_are_left_out(run: Run) -> None:
    assert sentences(with_windows(run, seconds=0.0)) == sentences(with_windows(run, steps=0)) == []
