"""The answer of a run: short, the words first, and nothing that the whole does not know."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from fp8bench.model import Environment, Finding, Interval, Label, PhaseGain, Record, Run, Status, Verdict
from fp8bench.model.consumed import DeviceWatch, EnergyUse
from fp8bench.report.terminal.run import detail_of, render
from tests.counts import for_each
from tests.runs import NATIVE, gemm, judged, transformer, wild_runs
from tests.told_before import Told, as_before


def words(run: Run, findings: dict[str, Finding], width: int = 100) -> str:
    return render(run, findings, width).partition("next\n")[0]


@as_before
def test_answers() -> Told:
    run, findings = judged((Verdict.FASTER, 0.5))
    base, own = findings
    gains = (PhaseGain("gemm", 3e-3, 6e-3, 2e-3, 4e-3), PhaseGain("attention", 1e-3, 2e-3, 0.5e-3, 1.5e-3))
    made = {base: findings[base], own: replace(findings[own], gains=gains)}
    yield "what differs is told by phase, the largest first", words(run, made)
    short = {**made, own: replace(made[own], below_floor=("gemm",))}
    yield "a phase that is too short for the clock is no reason", words(run, short)
    within = {
        key: replace(own_finding, ratio=own_finding.ratio and Interval(0.99, 0.98, 1.0, 0.99))
        for key, own_finding in made.items()
    }
    yield "a difference within the noise floor is told to be", words(run, within)
    watch = DeviceWatch(5, 1.0, 0x4, sm_clock=1.75e9, sm_clock_lowest=1.41e9)
    watched = tuple(replace(record, watch=watch) for record in run.records)
    for cap in (500.0, 700.0):
        facts = {"cpu power_cap": cap, "cpu power_cap_default": 700.0, "cpu sm_clock_max": 1.98e9}
        capped = replace(run, records=watched, environment=Environment(facts))
        yield f"a power cap of {cap} W is loud where it was lowered", words(capped, findings, 200)
    three, own_finding = transformer()
    failed = Record(three.records[1].case, NATIVE, Status.FAILED, reason="out of memory, even alone")
    records = (three.records[0], failed, *three.records[2:])
    yield "a failure stands above everything", words(replace(three, records=records), own_finding, 200)
    yield "labels that cast doubt are counted by case", words(*judged((Verdict.FASTER, 0.5, Label.CONTENDED)))
    noted = tuple(replace(record, detail="no cycles: the kernel sees no counters") for record in run.records)
    yield "what is held against two precisions alike is told once", words(replace(run, records=noted), findings)


def test_a_doubt_of_another_kind_is_told_with_its_reason_and_remedy() -> None:
    run, findings = judged((Verdict.FASTER, 0.5, Label.HANDICAP))
    reasons = {case: replace(one, label_reasons=((Label.HANDICAP, "fp32 sorts"),)) for case, one in findings.items()}
    said = " ".join(words(run, reasons, 200).split())
    assert "perhaps faster: handicap: fp32 sorts. What to do: make the reference as good as you can" in said


def test_a_grid_of_the_reference_alone_has_no_speed_ups() -> None:
    run, findings = judged((Verdict.FASTER, 0.5), (Verdict.FASTER, 0.5))
    assert "speed-up over fp32" in words(run, findings)
    alone = replace(run, records=tuple(record for record in run.records if record.is_reference))
    assert "speed-up" not in words(alone, findings)


def test_what_stands_in_brackets_is_told_by_the_brackets_that_stand_there() -> None:
    """A grid shows no interval, and what others held up is a range."""
    assert "could be: 99%" in words(*judged((Verdict.FASTER, 0.5)), width=200)
    assert "intervals: 99%" in words(*judged((Verdict.FASTER, 0.5), (Verdict.FASTER, 0.5)), width=200)
    run, findings = judged((Verdict.FASTER, 0.5))
    twice = tuple(replace(record, sessions=(Interval(2.0, 1.9, 2.1, 0.0),)) for record in run.records)
    ranges = {key: replace(finding, ratio=finding.ratio and replace(finding.ratio, level=0.0))
              for key, finding in findings.items()}  # fmt: skip
    assert "seen: hull of 2 sessions" in words(replace(run, records=twice), ranges, 200)


def test_energy_that_was_asked_for_and_is_not_there_is_told() -> None:
    run, findings = judged((Verdict.FASTER, 0.5))
    run = replace(
        run, records=tuple(replace(record, energy=EnergyUse("none", why="no RAPL")) for record in run.records)
    )
    assert "no RAPL" not in words(run, findings)
    asked = replace(run, request=replace(run.request, energy_of="phases"))
    assert "energy: not measured on cpu: no RAPL" in words(asked, findings)


def test_the_table_of_suites_hides_no_loss_behind_a_gain() -> None:
    """A median of both would be the speed of no case."""
    both, known = judged((Verdict.FASTER, 0.5), (Verdict.SLOWER, 2.0))
    other, more = transformer()
    run = replace(both, records=(*both.records, *other.records))
    assert "0.500x to 2.00x" in words(run, {**known, **more})


def test_how_many_times_the_noise_floor_an_effect_is() -> None:
    """ln 2 is 7.3 times ln 1.1: half as fast and twice as fast are equally far."""
    run, findings = judged((Verdict.FASTER, 0.5))
    floors = {key: replace(finding, floor=0.1) for key, finding in findings.items()}
    assert "bf16's difference is 7.3 times it" in " ".join(words(run, floors, 200).split())


@for_each("name", ["memory", "data", "numbers", "energy", "notes", "all"])
def test_a_detail_says_something_of_any_run(name: str) -> None:
    for run, findings in (transformer(), gemm(), (replace(transformer()[0], records=()), {})):
        assert detail_of(name, run, findings, 80).parts


def test_a_detail_is_explained_as_far_as_it_is_shown() -> None:
    labelled = judged((Verdict.FASTER, 0.5, Label.CONTENDED))
    assert [line.partition(":")[0] for line in detail_of("notes", *labelled, 80).footer] == ["contended"]
    assert not detail_of("memory", *labelled, 80).footer


@settings(max_examples=30, deadline=None)
@given(made=wild_runs())
def test_any_run_has_an_answer_that_fits(made: tuple[Run, dict[str, Finding]]) -> None:
    run, findings = made
    for width in (40, 80, 120):
        assert all(len(line) <= width for line in render(run, findings, width).splitlines())
