"""Material of reports made by hand, and what a section makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from fp8bench.model import Case, Finding, Interval, Label, Record, Scalar, Status, Verdict, Work
from fp8bench.report.elements import Element, Page, Part
from fp8bench.report.page.section import Material, load_sections, make_report_material
from fp8bench.report.terminal import layout
from tests.runs import (
    EMULATED,
    NATIVE,
    REFUSED,
    Made,
    case,
    error,
    measured,
    memory,
    phases,
    run_of,
    samples,
    transformer,
)

T = TypeVar("T", bound=Element)
LONG = "<script>alert(1)</script>" + 275 * "x"


def material(*made: Made) -> Material:
    return make_report_material([run for run, _ in made], [findings for _, findings in made])


def built(name: str, *made: Made) -> Part | None:
    """The section's part for these runs."""
    return load_sections()[name].build_page_part(material(*made))


def part(name: str, *made: Made) -> Part:
    """The same, asserting that it is not empty."""
    found = built(name, *made)
    assert found is not None
    return found


def of_kind(found: Part, kind: type[T]) -> list[T]:
    """The elements of one kind."""
    return [element for element in found.elements if isinstance(element, kind)]


def told(elements: Iterable[Element], width: int = 120) -> list[str]:
    """Their lines on a terminal."""
    lines = layout.render(Page("", "", (Part("", "title", tuple(elements)),)), width=width).splitlines()
    return [line for line in lines[1:] if line]


def with_errors(made: Made, *errors: float) -> Made:
    """The same run with these product errors in its records, in order."""
    run, findings = made
    records = tuple(
        replace(one, measurements=(error("product_error", errors[place % len(errors)]),))
        for place, one in enumerate(run.records)
    )
    return replace(run, records=records), findings


def recased(made: Made, changed: Callable[[Case], Case]) -> Made:
    """The same run with other cases, and its findings for them."""
    run, findings = made
    cases = {one.case.id: changed(one.case) for one in run.records}
    records = tuple(replace(one, case=cases[one.case.id]) for one in run.records)
    moved = {cases[key].id: replace(found, case=cases[key]) for key, found in findings.items()}
    return replace(run, records=records), moved


def emulated_with_a_ratio() -> Made:
    """A run whose emulated case has a ratio that must not count as a speed."""
    run, findings = transformer()
    case = run.records[2].case.id
    ratio = Interval(0.3, 0.2, 0.4, 0.99)
    return run, findings | {case: replace(findings[case], verdict=Verdict.FASTER, ratio=ratio)}


def shapes(*wanted: dict[str, Scalar], speed: float = 2.0, labels: tuple[Label, ...] = ()) -> Made:
    """A group for each shape: fp32 takes 1 ms; bf16's speed-up rises by one from shape to shape."""
    records, findings = [], {}
    for number, params in enumerate(wanted):
        fp32, bf16, fp8 = (case("gemm", name, params) for name in ("fp32", "bf16", "fp8"))
        ratio = 1 / (speed + number)
        records += [
            Record(fp32, NATIVE, Status.OK, Work(flops=1e9), is_reference=True),
            Record(bf16, NATIVE, Status.OK, Work(flops=1e9)),
            Record(fp8, EMULATED, Status.OK, Work(flops=1e9)),
        ]
        findings |= {
            fp32.id: Finding(fp32, Verdict.REFERENCE, 1e-3, phases=phases(1e-3, gemm=0.9)),
            bf16.id: Finding(
                bf16,
                Verdict.FASTER,
                ratio * 1e-3,
                ratio=Interval(ratio, ratio * 0.99, ratio * 1.01, 0.99),
                phases=phases(ratio * 1e-3, gemm=0.9),
                labels=labels,
            ),
            fp8.id: Finding(
                fp8, Verdict.EMULATED, 5e-3, ratio=Interval(5.0, 4.9, 5.1, 0.99), phases=phases(5e-3, cast=0.9)
            ),
        }
    return run_of(records), findings


def nothing() -> Made:
    """A run without cases."""
    return run_of([]), {}


def skipped() -> Made:
    """A run with only skipped and failed cases."""
    records = [
        Record(case("gemm", "fp32", {"m": 1}), NATIVE, Status.FAILED, reason="out of memory, even alone"),
        Record(case("gemm", "fp4", {"m": 1}), REFUSED, Status.SKIPPED, reason="no backend"),
    ]
    return run_of(records), {}


def strange() -> Made:
    """A run with names that are 300 characters of markup, and non-finite errors, memory and times."""
    found, findings = measured()
    measurements = (
        error("product_error", math.nan),
        error(LONG, math.inf),
        error("zero_error", 0.0),
        replace(memory(1), samples=(math.inf,)),
    )
    records = [replace(found.records[0], measurements=(*measurements[:3], memory(1 << 20)))]
    for number, seconds in enumerate((math.nan, math.inf, 0.0, 1e-3)):
        named = replace(case(LONG, LONG, {LONG: LONG, "n": number}), precision_map=((LONG, LONG),))
        records.append(Record(named, NATIVE, Status.OK, is_reference=not number, measurements=measurements))
        findings[named.id] = Finding(
            named,
            Verdict.UNSURE,
            seconds,
            seconds,
            seconds,
            Interval(seconds, seconds, seconds, 0.99),
            phases=((LONG, seconds), ("gemm", -1e-3), ("cast", 1e-3)),
            below_floor=(LONG,),
            labels=tuple(Label),
            why=LONG,
            label_reasons=tuple((label, LONG) for label in Label),
            hard=(Label.AA_FAILED,),
        )
    return replace(found, records=tuple(records)), findings


def many(count: int) -> Made:
    """A run of `count` groups of three cases, with samples, memory and errors."""
    records, findings = [], {}
    parts = ("cast", "gemm", "attention", "elementwise", "unattributed")
    for number in range(count):
        params: dict[str, Scalar] = {"m": 16 * (number + 1), "n": 64, "k": 64}
        for mode, support, best in (("fp32", NATIVE, 2e-3), ("bf16", NATIVE, 1e-3), ("fp8", EMULATED, 9e-3)):
            named = case("gemm", mode, params)
            records.append(
                Record(
                    named,
                    support,
                    Status.OK,
                    Work(flops=1e9),
                    mode == "fp32",
                    timing=samples(parts, (10, 500, 100, 90, 3)),
                    measurements=(error("product_error", 1e-3), memory(1 << 20)),
                )
            )
            ratio = None if mode == "fp32" else Interval(0.5, 0.49, 0.51, 0.99)
            findings[named.id] = Finding(
                named,
                Verdict.FASTER,
                best,
                best,
                0.01,
                ratio,
                phases=phases(best, cast=0.1, gemm=0.5, attention=0.2, elementwise=0.1),
            )
    return run_of(records), findings
