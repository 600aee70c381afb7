"""The verdict: failures first, facts as facts, doubts with their reasons, and nothing as nothing."""

from __future__ import annotations

import math
from dataclasses import replace

from fp8bench.model import Finding, Label, Level, Record, Run, Status, Support, Verdict
from fp8bench.report.elements import Items, Text, Verdicts
from fp8bench.report.panels import panels_of
from fp8bench.report.terminal.run import render
from fp8bench.report.topics.verdict import LONGEST_REASON, ReportedCase, emulations, failures, outcomes, skips
from fp8bench.report.words.legend import ERRORS, error_word
from tests.counts import for_each
from tests.materials import Made, built, nothing, of_kind, part, recased, skipped
from tests.runs import EMULATED, NATIVE, REFUSED, case, error, gemm, judged, run_of, transformer

FEW = Label.FEW_SAMPLES


def texts(*made: Made) -> list[str]:
    """All its sentences, in order."""
    return [
        text.text
        for element in part("verdict", *made).elements
        for text in (element.items if isinstance(element, Items) else [element])
        if isinstance(text, Text)
    ]


def test_doubt_that_all_share_is_said_once() -> None:
    said = texts(judged((Verdict.FASTER, 0.5, FEW), (Verdict.FASTER, 0.5, FEW), (Verdict.FASTER, 0.5, FEW)))
    assert said == [
        "Every comparison here is in doubt: it rests on few rounds (few-samples).",
        "bf16 is perhaps faster than fp32 in all 3 cases of gemm, 2.00x",
    ]


def test_a_run_cut_off_says_so_before_anything_else() -> None:
    run, findings = transformer()
    first = texts((replace(run, records=run.records[:2], finished=False), findings))[0]
    assert first == f"Stopped early: 1 of 3 cases have no record; --resume {run.id} measures them."


def test_nothing_measured_is_said() -> None:
    assert texts(nothing()) == ["Nothing was measured (cases: none)."]
    assert texts(skipped())[2] == "Nothing was measured (cases: 1 skipped, 1 failed)."
    assert part("verdict", skipped()).lead == "" == part("verdict", nothing()).lead
    found = built("verdict")
    assert found is not None and found.elements == (Text("There is no run."),)


@for_each(
    ("errors", "word"),
    [
        ((0.0, 1e-5), "negligible"), ((1e-5, -1e-2), "small"), ((0.1,), "moderate"), ((2.0, 0.0), "large"),
        ((0.0, math.nan), "not finite"), ((math.inf,), "not finite"),
    ],
)  # fmt: skip
def test_an_error_has_one_name_on_the_page_and_in_a_terminal(errors: tuple[float, ...], word: str) -> None:
    """That of the largest, by the sizes that the terminal's legend names."""
    run, findings = judged(*[(Verdict.FASTER, 0.5)] * len(errors))
    measured = iter(errors)
    records = tuple(
        one if one.is_reference else replace(one, measurements=(error("product_error", next(measured)),))
        for one in run.records
    )
    (strip,) = of_kind(part("verdict", (replace(run, records=records), findings)), Verdicts)
    assert strip.rows[0][1][strip.questions.index("error")].text == word == error_word(errors)
    text = render(replace(run, records=records), findings, width=200)
    assert (f"error {word} (" in text or f"{word} " in text) and ERRORS in text


def test_many_kinds_of_failures_are_cut() -> None:
    records = [
        Record(case("gemm", "bf16", {"m": size}), NATIVE, Status.FAILED, reason=f"fault {size}") for size in range(40)
    ]
    failed = of_kind(part("verdict", (run_of(records), {})), Items)[0]
    assert len(failed.items) == 12
    assert failed.items[-1].text == "and 29 more like these: the table has every case"


def test_runs_side_by_side_have_their_labels() -> None:
    said = texts(gemm(), transformer())
    assert said[0] == "gemm" and "transformer" in said


def test_devices_are_named_where_there_are_several() -> None:
    run, findings = judged((Verdict.FASTER, 0.5))
    other, moved = recased((run, findings), lambda case: replace(case, device="cuda:0"))
    said = texts((run_of([*run.records, *other.records]), findings | moved))
    assert said == [
        "bf16 is 2.00x [1.98, 2.02] faster than fp32 on gemm m=64 k=64 on cpu",
        "bf16 is 2.00x [1.98, 2.02] faster than fp32 on gemm m=64 k=64 on cuda:0",
    ]


def of(*records: Record) -> list[ReportedCase]:
    """The outcomes of a run of these records; those that ran have a time."""
    findings = {one.case.id: Finding(one.case, Verdict.NONE, 1e-3) for one in records if one.status is Status.OK}
    return outcomes(panels_of(run_of(list(records)), findings))


def emulated(precision: str, suite: str = "gemm", value: float | None = 0.037, device: str = "cpu") -> Record:
    one = replace(case(suite, precision, {"m": 64}), device=device)
    return Record(one, EMULATED, Status.OK, measurements=() if value is None else (error("product_error", value),))


def made(make: tuple[Run, dict[str, Finding]]) -> list[ReportedCase]:
    return outcomes(panels_of(*make))


def test_a_failure_says_where_and_why() -> None:
    assert failures(made(gemm())) == ["FAILED: fp8 on gemm m=512 n=512 k=512: out of memory, even alone"]


def test_alike_failures_share_a_sentence() -> None:
    failed = [
        Record(case("gemm", "fp8", {"m": size}), NATIVE, Status.FAILED, reason="no\n memory") for size in range(1, 8)
    ]
    assert failures(of(*failed)) == ["FAILED: fp8 in 7 cases of gemm (m=1, m=2, m=3, m=4 and 3 more): no memory"]


def test_a_reason_is_one_line_that_ends() -> None:
    long = Record(case("gemm", "fp8", {}), NATIVE, Status.FAILED, reason="x" * 1000)
    silent = Record(case("gemm", "bf16", {}), NATIVE, Status.FAILED)
    first, second = failures(of(long, silent))
    assert first == f"FAILED: fp8 on gemm: {'x' * (LONGEST_REASON - 3)}..."
    assert second == "FAILED: bf16 on gemm: no reason was given"


def test_a_skip_says_its_reason_once() -> None:
    assert skips(made(gemm())) == [
        "nvfp4 was skipped in all 3 cases of gemm: fp4 needs torch 2.8 or later, this is 2.7.1"
    ]
    two = [Record(case(suite, one, {}), REFUSED, Status.SKIPPED, reason="no hardware") for suite, one in (
        ("gemm", "mxfp4"), ("mlp", "nvfp4"))]  # fmt: skip
    assert skips(of(*two)) == ["mxfp4 and nvfp4 were skipped in all 2 cases of gemm and mlp: no hardware"]


def test_what_is_not_finite_is_not_called_right() -> None:
    assert "its errors are not all finite" in emulations(of(emulated("fp8", value=float("inf"))))[0]
    many = [emulated(f"p{number}", value=float("nan") if number == 2 else 0.1) for number in range(4)]
    sentences = emulations(of(*many))
    assert len(sentences) == 4 and "p2 is emulated on this CPU: its errors are not all finite" in sentences[2]


def test_many_emulated_precisions_share_a_sentence() -> None:
    (sentence,) = emulations(of(*(emulated(one) for one in ("fp8", "mxfp8", "nvfp4"))))
    assert sentence == (
        "fp8, mxfp8 and nvfp4 are emulated on this CPU: their numbers are right, their times say nothing about speed"
    )


def test_where_another_suite_has_it_natively_the_suites_are_named() -> None:
    """'bf16 is emulated' would be too much for one layer that is."""
    native = Record(case("gemm", "bf16", {}), NATIVE, Status.OK)
    sentence = emulations(of(native, emulated("bf16", "conv")))[0]
    assert sentence.startswith("bf16 is emulated on this CPU in conv: ")
    skipped = Record(case("gemm", "bf16", {}), Support(Level.REFUSED, ""), Status.SKIPPED)
    assert "in conv" not in emulations(of(skipped, emulated("bf16", "conv")))[0]


def test_emulations_name_devices_where_there_are_several() -> None:
    found = of(emulated("fp8", device="cuda:0"))
    assert emulations(found)[0].startswith("fp8 is emulated on this device: ")
    assert emulations(found, name_devices=True)[0].startswith("fp8 is emulated on cuda:0: ")
