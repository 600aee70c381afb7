"""The answer of a run: short, the words first, and nothing that the whole does not know."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from fp8bench.model import Environment, Finding, Label, Record, Run, Status, Verdict
from fp8bench.model.consumed import DeviceWatch
from fp8bench.report.terminal.run import detail_of, render
from tests.counts import for_each
from tests.runs import NATIVE, gemm, judged, transformer, wild_runs


def words(run: Run, findings: dict[str, Finding], width: int = 100) -> list[str]:
    return render(run, findings, width).partition("how to read this")[0].splitlines()


def test_what_differs_is_told_by_phase_the_largest_first() -> None:
    """Phases that cannot be told from their markers explain nothing; a step of one phase has nothing to explain."""
    run, findings = judged((Verdict.FASTER, 0.5))
    base, own = findings
    phases = (("gemm", 6e-3), ("attention", 2e-3), ("elementwise", 2e-3), ("cast", 1.0))
    fewer = (("gemm", 3e-3), ("attention", 1e-3), ("elementwise", 2e-3))
    made = {
        base: replace(findings[base], best_seconds=10e-3, phases=phases, below_floor=("cast",)),
        own: replace(findings[own], best_seconds=6e-3, phases=fewer),
    }
    assert "  why: bf16 takes 4.00 ms less: gemm -3.00 ms, attn -1.00 ms" in words(run, made)
    alone = {key: replace(finding, phases=(("gemm", 1e-3),)) for key, finding in made.items()}
    assert not any("why: " in line for line in words(run, alone))


@for_each(("ratio", "floor", "times"), [(0.5, 0.1, "7.3 times"), (0.99, 0.1, "within")])
def test_how_many_times_the_noise_floor_an_effect_is(ratio: float, floor: float, times: str) -> None:
    """ln 2 is 7.3 times ln 1.1: half as fast and twice as fast are as far."""
    run, findings = judged((Verdict.FASTER, ratio))
    floors = {key: replace(found, floor=floor) for key, found in findings.items()}
    assert f"bf16's difference is {times} it" in " ".join(words(run, floors, 200))


def on_device(cap: float, default: float) -> list[str]:
    run, findings = judged((Verdict.FASTER, 0.5))
    facts = {"cpu power_cap": cap, "cpu power_cap_default": default, "cpu sm_clock_max": 1.98e9}
    watch = DeviceWatch(5, 1.0, 0x4, sm_clock=1.75e9, sm_clock_lowest=1.41e9)
    records = tuple(replace(record, watch=watch) for record in run.records)
    return words(replace(run, records=records, environment=Environment(facts)), findings, 200)


def test_a_lowered_power_cap_is_loud() -> None:
    clocks = "SM clock 1.41 GHz to 1.75 GHz of 1.98 GHz; held back by power-cap"
    assert on_device(500.0, 700.0)[1] == f"  POWER CAP 500 W, 71% of its default; {clocks}"
    assert on_device(700.0, 700.0)[1] == f"  power cap 700 W, 100% of its default; {clocks}"


def test_a_failure_stands_above_everything() -> None:
    run, findings = transformer()
    failed = Record(run.records[1].case, NATIVE, Status.FAILED, reason="out of memory, even alone")
    records = (run.records[0], failed, *run.records[2:])
    first, second, *_ = words(replace(run, records=records), findings, 200)
    assert first == f"1 of {len(records)} cases failed." and "out of memory, even alone" in second


def test_labels_that_cast_doubt_are_counted_by_case_and_others_are_not_told() -> None:
    run, findings = judged((Verdict.FASTER, 0.5, Label.CONTENDED))
    lines = [line for line in words(run, findings) if line.startswith("  labels: ")]
    assert lines == ["  labels: contended (bf16)"]


@for_each("name", ["memory", "data", "numbers", "energy", "notes", "all"])
def test_a_detail_says_something_of_any_run(name: str) -> None:
    for run, findings in (transformer(), gemm(), (replace(transformer()[0], records=()), {})):
        assert detail_of(name, run, findings, 80).parts


@settings(max_examples=30, deadline=None)
@given(made=wild_runs())
def test_any_run_has_an_answer_that_fits(made: tuple[Run, dict[str, Finding]]) -> None:
    run, findings = made
    for width in (40, 80, 120):
        assert all(len(line) <= width for line in render(run, findings, width).splitlines())
