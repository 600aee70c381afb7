"""The report as text: two runs made by hand, and what must hold for any run."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fp8bench.model import (
    Finding,
    Interval,
    Level,
    Record,
    Rotation,
    Run,
    Status,
    Support,
    Verdict,
    Work,
)
from fp8bench.report.terminal import layout
from fp8bench.report.terminal.run import plan_page, render
from tests.counts import for_each
from tests.materials import Made, recased
from tests.runs import NATIVE, gemm, render_whole, transformer, wild_runs
from tests.told_before import Told, as_before, on_terminal

GREEN, RED = "\x1b[32m", "\x1b[31m"


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def line_of(text: str, beginning: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(beginning))


def changed(**changes: object) -> tuple[Run, dict[str, Finding]]:
    """The transformer run with a changed finding for fp16."""
    run, findings = transformer()
    case = run.records[1].case.id
    return run, findings | {case: replace(findings[case], **changes)}  # type: ignore[arg-type]


def with_records(**changes: object) -> tuple[Run, dict[str, Finding]]:
    run, findings = transformer()
    return replace(run, records=tuple(replace(record, **changes) for record in run.records)), findings  # type: ignore[arg-type]


@as_before
def test_two_runs_and_their_plans() -> Told:
    for make in (transformer, gemm):
        run, findings = make()
        text = render_whole(run, findings)
        assert text == render_whole(run, findings) and text.isascii()
        yield f"a run of {make.__name__}", text
        yield f"its plan of {make.__name__}", layout.render(plan_page(run.plan, run.devices))


def test_emulated_cases_show_no_speed() -> None:
    run, findings = transformer()
    emulated = run.records[2].case.id
    findings[emulated] = replace(
        findings[emulated], verdict=Verdict.FASTER, ratio=Interval(0.321, 0.32, 0.322, 0.99), labels=()
    )
    text = render_whole(run, findings, color=True)
    row = line_of(plain(text), "fp8  ")
    assert "emulated" in row and "tok/s" not in row and "faster" not in row
    assert "0.321" not in text and GREEN not in text and RED not in text
    assert "emulated 61.0 ms" in text


@for_each(
    ("verdict", "color"), [(Verdict.FASTER, GREEN), (Verdict.SLOWER, RED), (Verdict.SAME, ""), (Verdict.UNSURE, "")]
)
def test_only_clear_verdicts_are_green_or_red(verdict: Verdict, color: str) -> None:
    text = render_whole(*changed(verdict=verdict, labels=(), why=""), color=True)
    assert {code for code in (GREEN, RED) if code in text} == ({color} if color else set())


LAST = {"cold": None, "rotating": Rotation(13, 5 << 20), "in part": Rotation(256, 1 << 10), "one": Rotation(1, 5 << 30)}


def cached(rotation: Rotation | None) -> Made:
    """The transformer run with a cache setting, on a CPU whose last-level cache is known."""
    cache = "cold" if rotation is None else "rotating"
    run, findings = recased(transformer(), lambda case: replace(case, params=(*case.params, ("cache", cache))))
    records = tuple(replace(record, rotation=rotation) for record in run.records)
    cpu = replace(run.devices[0], cache_bytes=32 << 20, cache_shared=2)
    return replace(run, records=records, devices=(cpu,)), findings


@as_before
def test_terminal() -> Told:
    run, findings = transformer()
    for claim, work in {
        "tokens": Work(flops=1e9, tokens=1024, bytes=1e6),
        "FLOP where there are no tokens": Work(flops=1e9, bytes=1e6),
        "bytes": Work(bytes=1e6),
        "nothing": Work(least_memory=1e6),
    }.items():
        yield f"throughput is by the most telling count: {claim}", on_terminal(with_records(work=work), "verdict")
    reference, unknown, _ = run.records
    few = replace(run, records=(reference, replace(unknown, measurements=())))
    known = {reference.case.id: findings[reference.case.id]}
    yield "what is unknown is a dash, never a zero", on_terminal((few, known), "verdict")
    for name, rotation in LAST.items():
        yield (
            f"what was done to the cache is told once for all modes: {name}",
            on_terminal(cached(rotation), "the last-level cache", "nothing rotated", width=300),
        )
    several, found = gemm()
    lost = (Record(run.records[0].case, NATIVE, Status.FAILED, reason="out of memory"), *run.records[1:])
    yield (
        "a reference that was not measured is named",
        on_terminal((replace(run, records=lost), findings), "FAILED", "reference:"),
    )
    nothing = replace(run, records=(), path="", finished=False)
    for whole in (False, True):
        yield f"a run without records says so, whole {whole}", render(nothing, {}, with_details=whole)
    detail = "no numerical error: ValueError: no reference for this one"
    records = tuple(
        replace(record, detail=detail) if record.status is Status.OK else record for record in several.records
    )
    yield (
        "a case that was timed but has no error says why",
        on_terminal((replace(several, records=records), found), "notes"),
    )
    first, *others = several.plan.groups
    misfit = Support(Level.REFUSED, "native fp8 needs K a multiple of 16")
    (fp8,) = [case for case in first.cases if case.case.mode == "fp8"]
    cases = tuple(replace(case, support=misfit, skip=misfit.reason) if case is fp8 else case for case in first.cases)
    plan = replace(several.plan, groups=(replace(first, cases=cases), *others))
    yield (
        "a precision refused at some shapes only is one row of the plan",
        layout.render(plan_page(plan, several.devices)),
    )


def test_control_characters_do_not_reach_the_terminal() -> None:
    run, findings = transformer()
    failed = Record(run.records[1].case, NATIVE, Status.FAILED, reason="bad\x1b[31m\x07 thing\nsecond line")
    text = render_whole(replace(run, records=(run.records[0], failed)), findings)
    assert "\x1b" not in text and "\x07" not in text
    assert "second line" in text


@settings(max_examples=12, deadline=None)
@given(wild_runs(), st.integers(40, 140))
def test_no_line_is_wider_than_asked(wild: tuple[Run, dict[str, Finding]], width: int) -> None:
    run, findings = wild
    for text in (render_whole(run, findings, width), layout.render(plan_page(run.plan, run.devices), width=width)):
        assert max(len(line) for line in text.splitlines()) <= width
