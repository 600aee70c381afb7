"""The answer of a run: short, the words first, and nothing that the whole does not know."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given, settings

from fp8bench.model import Environment, Finding, Interval, Label, PhaseGain, Record, Reruns, Run, Status, Verdict
from fp8bench.model.consumed import DeviceWatch, EnergyUse
from fp8bench.report.terminal import layout
from fp8bench.report.terminal.run import answer_page, detail_page, render
from tests.counts import for_each
from tests.materials import recased
from tests.runs import NATIVE, gemm, judged, run_of, transformer, wild_runs
from tests.told_before import Told, as_before


def words(run: Run, findings: dict[str, Finding], width: int = 100) -> str:
    return layout.render(answer_page(run, findings, width), width, explain=False)


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
    assert "Why not sure: bf16: fp32 sorts. Remedy: make the reference as fast as you can" in said


def test_a_grid_of_the_reference_alone_has_no_speed_ups() -> None:
    run, findings = judged((Verdict.FASTER, 0.5), (Verdict.FASTER, 0.5))
    assert "Speed-up" in words(run, findings)
    alone = replace(run, records=tuple(record for record in run.records if record.is_reference))
    assert "Speed-up" not in words(alone, findings) and "Setting" in words(alone, findings)


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


LOADED = Environment({"load_1min": 4.0, "cpu_count": 2, "busy_cores": 2.0})
LOSSES = (
    PhaseGain("gemm", 6e-3, 16.4e-3, 9e-3, 12e-3),
    PhaseGain("attention", 11.1e-3, 3e-3, -9e-3, -7e-3),
    PhaseGain("cast", 2.3e-3, 0.0, -3e-3, -2e-3),
)


def two_precisions() -> tuple[Run, dict[str, Finding]]:
    """fp16 in doubt with all remarks: a reason, a load, and advice; fp8 emulated."""
    nano = (("size", "nano"), ("batch", 2), ("sequence", 96), ("micro_batches", 2), ("weights", "cached"))
    run, findings = recased(transformer(), lambda case: replace(case, params=nano))
    fp16 = run.records[1].case.id
    findings[fp16] = replace(findings[fp16], gains=LOSSES, labels=tuple(Label), hard=())
    command = "fp8bench suite transformer --dtypes fp16,fp8 --quick --store /tmp/somewhere/kept"
    return run_of(list(run.records), environment=LOADED, command=command), findings


def test_two_precisions_take_fourteen_lines() -> None:
    told = words(*two_precisions()).splitlines()
    assert len(told) <= 14 and all(told), told
    assert told[0] == "transformer (nano, 2 x 96 tokens) on AMD EPYC 7B13, 1 thread, torch 2.13.0"
    assert [line for line in told if line.startswith("  fp16  cannot tell    0.976x, could be 0.949x to 1.00x  grad")]
    assert [line for line in told if line.startswith("  fp8   speed unknown  no hardware for FP8 ")]
    assert "casts 2.30 ms: they nearly cancel" in " ".join(" ".join(told).split())
    assert [line.partition(":")[0] for line in told if not line.startswith(" ")][2:] == [
        "Why not sure",
        "Do this",
        "This run was not stored.",
    ]


def test_a_stranger_meets_no_label_no_axis_and_no_name_of_a_metric() -> None:
    """With every label that exists, and default parameters."""
    told = words(*two_precisions())
    assert not [label for label in Label if "-" in label and label.value in told]
    assert "_" not in told.partition("Do this")[0] and "=" not in told
    assert "gradients 0.04% off" in told


def test_a_stored_run_names_what_differs_from_defaults() -> None:
    assert re.match(
        r"transformer \(layers 4, width 256, heads 4, context 256, batch 4\) on AMD EPYC 7B13, 1 thr",
        words(*transformer()),
    )
    assert "\ngemm (product forward, operands cast; 3 settings) on AMD EPYC 7B13, 1 thread" in words(*gemm())
    assert "\n  1 x 2048 x 2048 " in words(*gemm())


@for_each("name", ["memory", "data", "numbers", "energy", "notes", "all"])
def test_a_detail_says_something_of_any_run(name: str) -> None:
    for run, findings in (transformer(), gemm(), (replace(transformer()[0], records=()), {})):
        assert detail_page(name, run, findings, 80).parts


@settings(max_examples=12, deadline=None)
@given(made=wild_runs())
def test_any_run_has_an_answer_that_fits(made: tuple[Run, dict[str, Finding]]) -> None:
    run, findings = made
    for width in (40, 80, 120):
        assert all(len(line) <= width for line in render(run, findings, width).splitlines())


def test_a_verdict_with_known_reruns_names_the_contention() -> None:
    run, findings = two_precisions()
    fp16 = run.records[1].case.id
    judged_run = replace(run, records=tuple(replace(record, reruns=Reruns(0.01, 8, 9)) for record in run.records))
    sure = replace(findings[fp16], verdict=Verdict.SLOWER, why="", labels=(Label.CONTENDED,), hard=())
    text = words(judged_run, {**findings, fp16: sure})
    assert "fp16: other processes took the CPU in most slots" in text and "load 4" not in text


def test_a_load_stands_for_noise_and_hides_no_other_reason() -> None:
    """Throttling removed the verdict; contention is the same as load."""
    run, findings = two_precisions()
    fp16 = run.records[1].case.id
    for hard, shown in (((), False), ((Label.CONTENDED,), False), ((Label.THROTTLED,), True)):
        told = words(run, {**findings, fp16: replace(findings[fp16], labels=hard, hard=hard, why="too hot")})
        assert "other programs were running (load 4 on 2 cores" in told and ("fp16: too hot" in told) is shown
