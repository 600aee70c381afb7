"""The verdict: failures first, facts as facts, doubts with their reasons, and nothing as nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fp8bench.model import Finding, Label, Record, Status, Verdict
from fp8bench.report.case_status import CaseStatus
from fp8bench.report.elements import TextList
from fp8bench.report.panels import NamedCase, group_into_panels
from fp8bench.report.topics.verdict import (
    describe_cases_without_result,
    describe_emulations,
    list_cases,
)
from fp8bench.report.words.legend import describe_error_size
from tests.counts import for_each
from tests.materials import built, nothing, of_kind, part, recased, skipped
from tests.runs import EMULATED, NATIVE, REFUSED, case, error, gemm, judged, run_of, transformer
from tests.told_before import Told, as_before

FEW = (Verdict.FASTER, 0.5, Label.FEW_SAMPLES)


def failed(mode: str, reason: str, **params: int) -> Record:
    return Record(case("gemm", mode, {**params}), NATIVE, Status.FAILED, reason=reason)


@as_before
def test_verdict() -> Told:
    yield "doubt has its labels", part("verdict", judged(FEW, FEW, FEW))
    run, findings = transformer()
    cut = replace(run, records=run.records[:2], finished=False), findings
    yield "a run cut off says so before anything else", part("verdict", cut)
    yield "nothing measured is said", part("verdict", nothing())
    yield "and how many were skipped and failed", part("verdict", skipped())
    yield "without a run, too", built("verdict")
    kinds = [failed("bf16", f"fault {size}", m=size) for size in range(40)]
    yield "many kinds of failures are cut", of_kind(part("verdict", (run_of(kinds), {})), TextList)
    yield "runs side by side have their labels", part("verdict", gemm(), transformer())
    run, findings = judged((Verdict.FASTER, 0.5))
    other, moved = recased((run, findings), lambda case: replace(case, device="cuda:0"))
    both = run_of([*run.records, *other.records]), findings | moved
    yield "devices are named where there are several", of_kind(part("verdict", both), TextList)


@for_each(
    ("metric", "errors", "word"),
    [
        ("product_error", (0.0, 1e-5), "negligible"),
        ("product_error", (1e-5, -1e-2), "small"),
        ("product_error", (0.1,), "moderate"),
        ("product_error", (2.0, 0.0), "large"),
        ("product_error", (0.0, math.nan), "not finite"),
        ("product_error", (math.inf,), "not finite"),
        # The same number is large for a loss, and small for a gradient.
        ("loss_error", (0.001,), "small"),
        ("loss_error", (0.009,), "moderate"),
        ("loss_error", (0.011,), "large"),
        ("gradient_error", (0.29,), "moderate"),
        ("gradient_error", (0.31,), "large"),
    ],
)
def test_the_size_of_an_error_depends_on_its_metric(metric: str, errors: tuple[float, ...], word: str) -> None:
    assert describe_error_size((metric, error) for error in errors) == word


def of(*records: Record) -> list[NamedCase]:
    """A run's cases for these records; those that ran have a time."""
    findings = {
        record.case.id: Finding(record.case, Verdict.NONE, 1e-3) for record in records if record.status is Status.OK
    }
    return list_cases(group_into_panels(run_of(list(records)), findings))


def emulated(precision: str, suite: str = "gemm", value: float = 0.037, device: str = "cpu") -> Record:
    named = replace(case(suite, precision, {"m": 64}), device=device)
    return Record(named, EMULATED, Status.OK, measurements=(error("product_error", value),))


@as_before
def test_failures_and_skips() -> Told:
    made = list_cases(group_into_panels(*gemm()))

    def failures(cases: Sequence[NamedCase]) -> list[str]:
        return describe_cases_without_result(cases, CaseStatus.FAILED, "FAILED")

    yield "a failure says where and why", failures(made)
    yield "alike ones share a sentence", failures(of(*(failed("fp8", "no\n memory", m=size) for size in range(1, 8))))
    yield "a reason is one line that ends", failures(of(failed("fp8", "x" * 1000), failed("bf16", "")))
    yield "a skip says its reason once", describe_cases_without_result(made, CaseStatus.SKIPPED, "skipped")
    two = [
        Record(case(suite, mode, {}), REFUSED, Status.SKIPPED, reason="no hardware")
        for suite, mode in (("gemm", "mxfp4"), ("mlp", "nvfp4"))
    ]
    yield "of two suites, too", describe_cases_without_result(of(*two), CaseStatus.SKIPPED, "skipped")


@as_before
def test_emulations() -> Told:
    yield "what is not finite is not called right", describe_emulations(of(emulated("fp8", value=math.inf)))
    several = [emulated(f"p{number}", value=math.nan if number == 2 else 0.1) for number in range(4)]
    yield "nor where it is one of several", describe_emulations(of(*several))
    yield "many share a sentence", describe_emulations(of(*map(emulated, ("fp8", "mxfp8", "nvfp4"))))
