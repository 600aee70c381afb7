"""The report as text: golden texts for two runs made by hand, and what must hold for any run."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8bench.model import (
    Case,
    DeviceFacts,
    Environment,
    Finding,
    Group,
    Interval,
    Label,
    Level,
    Measurement,
    Plan,
    PlannedCase,
    Record,
    Request,
    Run,
    Scalar,
    Status,
    Support,
    Verdict,
    Work,
)  # fmt: skip
from fp8bench.report.legend import LABELS
from fp8bench.report.text import render, render_plan

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
Make = Callable[[], tuple[Run, dict[str, Finding]]]
GREEN, RED = "\x1b[32m", "\x1b[31m"
CPU = DeviceFacts("cpu", 0, "AMD EPYC 7B13", 8 << 30, "2.13.0")
NATIVE = Support(Level.NATIVE, "torch's own kernels")
EMULATED = Support(Level.EMULATED, "no hardware for FP8: values rounded, products in fp32")
REFUSED = Support(Level.REFUSED, "no backend")


def case(workload: str, precision: str, params: dict[str, Scalar]) -> Case:
    return Case(workload, tuple(params.items()), precision, "cpu")


def run_of(records: list[Record], **changes: object) -> Run:
    """A run whose plan is just what its records say."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.case.setting, []).append(record)
    plan = Plan(
        tuple(
            Group(
                tuple(
                    PlannedCase(one.case, one.support, one.work, one.reason if one.status is Status.SKIPPED else "")
                    for one in members
                ),
                next((index for index, one in enumerate(members) if one.is_reference), 0),
            )
            for members in groups.values()
        )
    )
    run = Run(
        "20260105-120000", "2026-01-05T12:00:00Z", "fp8bench suite x", Request("x"), plan, Environment({}), (CPU,),
        records=tuple(records), finished=True,
    )  # fmt: skip
    return replace(run, **changes)  # type: ignore[arg-type]


def error(metric: str, value: float) -> Measurement:
    return Measurement(metric, "", (value,))


def transformer() -> tuple[Run, dict[str, Finding]]:
    """One group: bf16 as the reference, fp16 slower and in doubt, fp8 emulated."""
    work = Work(flops=3.1e9, tokens=1024)
    params: dict[str, Scalar] = {"layers": 4, "width": 256, "heads": 4, "context": 256, "batch": 4}
    bf16, fp16, fp8 = (case("transformer", name, params) for name in ("bf16", "fp16", "fp8"))
    records = [
        Record(
            bf16, NATIVE, Status.OK, work, is_reference=True,
            measurements=(error("loss_error", 1.24e-5), error("gradient_error", 3.1e-3)),
        ),
        Record(
            fp16, NATIVE, Status.OK, work,
            measurements=(error("loss_error", 2.2e-6), error("gradient_error", 4.2e-4)),
        ),
        Record(
            fp8, EMULATED, Status.OK, work,
            measurements=(error("loss_error", 8.8e-4), error("gradient_error", 4.7e-2)),
        ),
    ]  # fmt: skip
    findings = [
        Finding(
            bf16, Verdict.REFERENCE, 0.0243, 0.0251, 0.0213, floor=0.006,
            phases=phases(0.0243, data_load=1e-6, gemm=0.5, attention=0.1, accumulate=0.05, optimizer_step=0.1,
                          elementwise=0.2),
            below_floor=("data_load",),
        ),
        Finding(
            fp16, Verdict.UNSURE, 0.0249, 0.0262, 0.051, Interval(1.0247, 0.9971, 1.0533, 0.99), 1.04, 0.0064,
            phases=phases(0.0249, cast=0.01, gemm=0.5, attention=0.1, accumulate=0.05, optimizer_step=0.1,
                          elementwise=0.2),
            labels=(Label.CONTENDED, Label.FEW_SAMPLES),
            why="the interval is too wide to tell; give it more time (--budget), or a quieter machine",
        ),
        Finding(
            fp8, Verdict.EMULATED, 0.061, 0.0625, 0.04,
            phases=phases(0.061, cast=0.6, gemm=0.2, attention=0.04, accumulate=0.02, optimizer_step=0.04,
                          elementwise=0.08),
        ),
    ]  # fmt: skip
    run = run_of(records, path=".fp8bench/runs/box/20260105T120000Z-0a1b2c3d-7f.jsonl")
    run = replace(run, plan=replace(run.plan, notes=("nvfp4 was left out: --quick keeps three precisions",)))
    return run, {one.case.id: one for one in findings}


def phases(best: float, **shares: float) -> tuple[tuple[str, float], ...]:
    """Seconds of each phase, the rest unattributed."""
    named = [(name, share * best) for name, share in shares.items()]
    return (*named, ("unattributed", best - sum(seconds for _, seconds in named)))


def gemm() -> tuple[Run, dict[str, Finding]]:
    """Three groups: fp32 as the reference, bf16 faster, fp8 emulated; nvfp4 skipped, one fp8 failed."""
    records, findings = [], []
    for m, n, k, best in ((256, 256, 256, 412e-6), (512, 512, 512, 3.05e-3), (1, 2048, 2048, 871e-6)):
        work = Work(flops=2.0 * m * n * k)
        params: dict[str, Scalar] = {"m": m, "n": n, "k": k, "product": "forward", "operands": "cast"}
        fp32, bf16, fp8, nvfp4 = (case("gemm", name, params) for name in ("fp32", "bf16", "fp8", "nvfp4"))
        records += [
            Record(fp32, NATIVE, Status.OK, work, is_reference=True, measurements=(error("product_error", 2.3e-7),)),
            Record(bf16, NATIVE, Status.OK, work, measurements=(error("product_error", 2.4e-3),)),
            Record(fp8, EMULATED, Status.FAILED, work, reason="out of memory, even alone")
            if m == 512
            else Record(fp8, EMULATED, Status.OK, work, measurements=(error("product_error", 3.7e-2),)),
            Record(nvfp4, REFUSED, Status.SKIPPED, work, reason="fp4 needs torch 2.8 or later, this is 2.7.1"),
        ]
        findings += [
            Finding(fp32, Verdict.REFERENCE, best, best * 1.02, 0.012, floor=0.004, phases=phases(best, gemm=0.97)),
            Finding(
                bf16, Verdict.FASTER, best / 2, best * 0.52, 0.02, Interval(0.512, 0.508, 0.515, 0.99), 0.51, 0.004,
                phases=phases(best / 2, cast=0.1, gemm=0.87),
            ),
        ]  # fmt: skip
        if m != 512:
            shares = phases(best * 3, cast=0.7, gemm=0.28)
            findings.append(Finding(fp8, Verdict.EMULATED, best * 3, best * 3.1, 0.03, phases=shares))
    return run_of(records), {one.case.id: one for one in findings}


def plain(text: str) -> str:
    """The text without its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def line_of(text: str, beginning: str) -> str:
    """The first line that begins so, its indent aside."""
    return next(line for line in text.splitlines() if line.strip().startswith(beginning))


@pytest.mark.parametrize("name", ["transformer", "gemm"])
def test_golden(name: str) -> None:
    """The whole text. After a wanted change write the new text to tests/golden and read its diff."""
    run, findings = {"transformer": transformer, "gemm": gemm}[name]()
    text = render(run, findings)
    assert text == (GOLDEN / f"run_{name}.txt").read_text()
    assert text.isascii()
    assert render(run, findings) == text


@pytest.mark.parametrize("name", ["transformer", "gemm"])
def test_golden_plan(name: str) -> None:
    """As for runs; the text that --dry-run prints."""
    run, _ = {"transformer": transformer, "gemm": gemm}[name]()
    assert render_plan(run.plan, run.devices) == (GOLDEN / f"plan_{name}.txt").read_text()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
@pytest.mark.parametrize("make", [transformer, gemm])
def test_colour_changes_nothing_but_colour(make: Make, width: int) -> None:
    run, findings = make()
    colored = render(run, findings, width, color=True)
    assert "\x1b[" in colored
    assert plain(colored) == render(run, findings, width)


def test_emulated_cases_show_no_speed() -> None:
    """Not even where a finding carries a ratio and a verdict."""
    run, findings = transformer()
    emulated = run.records[2].case.id
    findings[emulated] = replace(
        findings[emulated], verdict=Verdict.FASTER, ratio=Interval(0.321, 0.32, 0.322, 0.99), labels=()
    )
    text = render(run, findings, color=True)
    row = line_of(plain(text), "fp8  ")
    assert "emulated" in row and "tok/s" not in row and "faster" not in row
    assert "0.321" not in text and GREEN not in text and RED not in text
    assert "emulated 61.0 ms" in text


def test_emulated_reference_is_called_so() -> None:
    run, findings = transformer()
    records = tuple(replace(one, is_reference=one.case.precision == "fp8") for one in run.records)
    row = line_of(render(replace(run, records=records), findings), "fp8  ")
    assert "reference, emulated" in row


@pytest.mark.parametrize(
    ("verdict", "color"), [(Verdict.FASTER, GREEN), (Verdict.SLOWER, RED), (Verdict.SAME, ""), (Verdict.UNSURE, "")]
)
def test_only_clear_verdicts_are_green_or_red(verdict: Verdict, color: str) -> None:
    run, findings = transformer()
    case = run.records[1].case.id
    findings[case] = replace(findings[case], verdict=verdict, labels=(), why="")
    text = render(run, findings, color=True)
    assert {one for one in (GREEN, RED) if one in text} == ({color} if color else set())


@pytest.mark.parametrize("label", [label for label in Label if label is not Label.LAUNCH_BOUND])
def test_a_doubted_verdict_is_never_green_or_red(label: Label) -> None:
    run, findings = transformer()
    case = run.records[1].case.id
    findings[case] = replace(findings[case], verdict=Verdict.FASTER, labels=(label,))
    text = render(run, findings, color=True)
    assert "faster" in text and GREEN not in text and RED not in text


def test_every_label_has_its_sentence() -> None:
    assert set(LABELS) == set(Label)


def test_labels_that_occur_are_explained_and_no_others() -> None:
    run, findings = transformer()
    text = render(run, findings)
    explained = {label for label in Label if f"\n  {label}: " in text}
    assert explained == {Label.CONTENDED, Label.FEW_SAMPLES}


def test_unknown_is_a_dash_never_a_zero() -> None:
    """A case with nothing measured has no number in its row."""
    run, findings = transformer()
    reference = run.records[0].case.id
    unknown = run.records[1].case
    few = {reference: findings[reference], unknown.id: Finding(unknown, Verdict.NONE)}
    records = (run.records[0], replace(run.records[1], measurements=()))
    for given_findings in (few, {reference: findings[reference]}):
        text = render(replace(run, records=records), given_findings)
        assert not re.search(r"\d", line_of(text, "fp16").replace("fp16", ""))
        assert "0.00" not in text


def test_an_unbounded_interval_is_called_none() -> None:
    run, findings = transformer()
    case = run.records[1].case.id
    findings[case] = replace(findings[case], ratio=Interval(1.02, 0.0, float("inf"), 0.99))
    assert "1.020x [no interval]" in render(run, findings)


def test_unattributed_is_worked_out_where_it_is_missing() -> None:
    run, findings = transformer()
    findings = {
        key: replace(one, phases=tuple(pair for pair in one.phases if pair[0] != "unattributed"))
        for key, one in findings.items()
    }
    assert render(run, findings) == render(*transformer())


def test_floors_of_their_own_show_as_a_range() -> None:
    run, findings = transformer()
    case = run.records[1].case.id
    findings[case] = replace(findings[case], floor=0.012)
    assert "noise floor (A/A): +-0.6% to +-1.2%" in render(run, findings)


def test_groups_against_different_references_get_tables_of_their_own() -> None:
    run, findings = gemm()
    last = run.records[-1].case.setting
    records = tuple(
        replace(one, is_reference=one.case.precision == "bf16") if one.case.setting == last else one
        for one in run.records
    )
    text = render(replace(run, records=records), findings)
    assert text.count("time vs fp32  ") == 1 and text.count("time vs bf16  ") == 1


def test_a_run_without_records_says_so() -> None:
    """And what is missing, and that nothing was kept."""
    run, _ = transformer()
    text = render(replace(run, records=(), path="", finished=False), {})
    assert "Nothing was measured." in text
    assert "3 of 3 cases have no record" in text
    assert "this run was not stored" in text


def test_a_reference_that_was_not_measured_is_named() -> None:
    run, findings = transformer()
    records = (Record(run.records[0].case, NATIVE, Status.FAILED, reason="out of memory"), *run.records[1:])
    text = render(replace(run, records=records), findings)
    assert "reference: none (bf16 was not measured)" in text
    assert "bf16 FAILED: out of memory" in text


def test_troubles_and_notes_are_told() -> None:
    run, findings = transformer()
    text = render(replace(run, troubles=("line 3 of the file is broken",)), findings)
    assert "trouble: line 3 of the file is broken" in text
    assert "note: nvfp4 was left out" in text


def test_control_characters_do_not_reach_the_terminal() -> None:
    run, findings = transformer()
    failed = Record(run.records[1].case, NATIVE, Status.FAILED, reason="bad\x1b[31m\x07 thing\nsecond line")
    text = render(replace(run, records=(run.records[0], failed)), findings)
    assert "\x1b" not in text and "\x07" not in text
    assert "second line" in text


words = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=60)
numbers = st.one_of(st.none(), st.floats(1e-12, 1e9))
ratios = st.one_of(st.none(), st.builds(Interval, *[st.floats(1e-6, 1e6)] * 3, st.just(0.99)))


@st.composite
def wild_runs(draw: st.DrawFn) -> tuple[Run, dict[str, Finding]]:
    """Runs with long names and reasons, any labels and any numbers."""
    records, findings = [], {}
    for size in range(draw(st.integers(1, 3))):
        for index in range(draw(st.integers(1, 4))):
            named = case(draw(words), f"p{index}-{draw(words)}", {"size": size, "axis": draw(words)})
            one = replace(named, precision_map=((draw(words), draw(words)),))
            support = draw(st.sampled_from([NATIVE, EMULATED, REFUSED]))
            status = draw(st.sampled_from(list(Status)))
            reason = " ".join(draw(st.lists(words, max_size=20)))
            measured = tuple(error(name, 0.1) for name in draw(st.lists(words, max_size=4)))
            work = Work(1e9, draw(st.integers(0, 9)))
            records.append(Record(one, support, status, work, index == 0, reason, measurements=measured))
            best = draw(numbers)
            findings[one.id] = Finding(
                one, draw(st.sampled_from(list(Verdict))), best, draw(numbers), draw(numbers), draw(ratios),
                floor=draw(st.one_of(st.none(), st.floats(0, 10))),
                phases=phases(best, gemm=0.5, cast=0.1) if best else (),
                labels=tuple(draw(st.lists(st.sampled_from(list(Label)), unique=True))), why=reason,
            )  # fmt: skip
    return run_of(records, path=draw(words), troubles=(draw(words),)), findings


@settings(max_examples=60, deadline=None)
@given(wild_runs(), st.integers(40, 140))
def test_no_line_is_wider_than_asked(wild: tuple[Run, dict[str, Finding]], width: int) -> None:
    run, findings = wild
    for text in (render(run, findings, width), render_plan(run.plan, run.devices, width)):
        assert max(len(line) for line in text.splitlines()) <= width


@pytest.mark.parametrize("width", [40, 72, 100])
def test_long_names_get_lines_of_their_own(width: int) -> None:
    """All of a name stays readable, and so do its row and all its labels."""
    run, findings = transformer()
    named = replace(run.records[1].case, precision_map=tuple((f"layer{i}", "bf16") for i in range(12)))
    records = (run.records[0], replace(run.records[1], case=named))
    found = replace(findings[run.records[1].case.id], case=named, labels=tuple(Label))
    text = render(replace(run, records=records), {**findings, named.id: found}, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert named.mode in text.replace("\n", "").replace(" ", "")
    assert all(label in text for label in Label)


def test_a_case_that_was_timed_but_has_no_error_says_why() -> None:
    """The times stand; what is missing is told, not left blank."""
    run, findings = gemm()
    detail = "no numerical error: ValueError: no reference for this one"
    records = tuple(replace(one, detail=detail) if one.status is Status.OK else one for one in run.records)
    text = " ".join(render(replace(run, records=records), findings).split())
    assert f"bf16: {detail}" in text.replace("bf16 in all 3 groups:", "bf16:")
