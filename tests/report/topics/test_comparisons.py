"""Verdicts as sentences: a test for every branch, and no sentence claims more than the verdict."""

from __future__ import annotations

import math
from dataclasses import replace

from fp8bench.model import Finding, Interval, Label, Run, Verdict
from fp8bench.report.elements import Text
from fp8bench.report.panels import group_into_panels
from fp8bench.report.topics.verdict import compare_precisions
from tests.runs import gemm, judged, phases, transformer
from tests.told_before import Told, as_before

FASTER, SLOWER, SAME, UNSURE, NONE = (
    (Verdict.FASTER, 0.5),
    (Verdict.SLOWER, 1.25),
    (Verdict.SAME, 1.01),
    (Verdict.UNSURE, 1.02),
    (Verdict.NONE, None),
)
NOISY, FEW, CAPPED = Label.NOISY, Label.FEW_SAMPLES, Label.POWER_CAPPED


def said(made: tuple[Run, dict[str, Finding]], device: str = "") -> list[Text]:
    return [text for panel in group_into_panels(*made) for text in compare_precisions(panel, device)]


CASES: tuple[list[tuple[Verdict, float | None, *tuple[Label, ...]]], ...] = (
    [FASTER], [SLOWER], [SAME], [UNSURE], [(Verdict.UNSURE, None, FEW)], [NONE],
    [(*FASTER, NOISY, FEW)], [(*SAME, NOISY)], [(*FASTER, CAPPED)], [(Verdict.FASTER, None)], [(Verdict.SAME, None)],
    [FASTER] * 3, [FASTER, (Verdict.FASTER, 0.8), (Verdict.FASTER, 0.4), SLOWER], [SLOWER, SAME, SAME],
    [(*FASTER, NOISY), (*FASTER, NOISY, FEW), (*SLOWER, FEW)], [FASTER, UNSURE, UNSURE], [(*FASTER, CAPPED), FASTER],
)  # fmt: skip


@as_before
def test_comparisons() -> Told:
    for verdicts in CASES:
        yield ", ".join(" ".join(map(str, verdict)) for verdict in verdicts), said(judged(*verdicts))
    run, findings = transformer()
    fp16 = run.records[1].case.id
    own = phases(0.0209, cast=0.1, gemm=0.3, attention=0.15, accumulate=0.058, optimizer_step=0.14, elementwise=0.23)
    sure = replace(
        findings[fp16],
        verdict=Verdict.FASTER,
        best_seconds=0.0209,
        ratio=Interval(0.86, 0.855, 0.87, 0.99),
        labels=(),
        phases=own,
        why="",
    )
    yield "a step of several phases says what each of them does", said((run, findings | {fp16: sure}))
    doubted = replace(sure, labels=(NOISY,), floor=0.1)
    yield "for facts: what a phase gains is as sure as the whole, at most", said((run, findings | {fp16: doubted}))
    yield "a device is named where it matters", said(judged(FASTER), "cuda:0")
    yield "of several cases, too", said(judged(*[FASTER] * 3), "cuda:0")
    for number in (1, 2):
        run, findings = judged(*[FASTER] * number)
        alone = replace(run, records=tuple(record for record in run.records if record.is_reference))
        yield f"a reference alone in {number} cases has nothing to be compared with", said((alone, findings))
    yield "nor has one that was not timed", said((alone, {}))
    yield "only what ran natively is compared", said(gemm())
    run, findings = judged(FASTER)
    case = run.records[1].case.id
    findings[case] = replace(findings[case], ratio=Interval(0.5, 0.0, math.inf, 0.99))
    yield "no interval is said to be none", said((run, findings))
