"""What became of cases without a speed: one sentence a reason, and no claim too many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.model import Finding, Level, Record, Run, Status, Support, Verdict
from fp8bench.report.panels import panels_of
from fp8bench.report.words.outcomes import LONGEST_REASON, Outcome, emulations, failures, outcomes, skips
from tests.runs import EMULATED, NATIVE, REFUSED, case, error, gemm, run_of, transformer


def of(*records: Record) -> list[Outcome]:
    """The outcomes of a run of these records; those that ran have a time."""
    findings = {one.case.id: Finding(one.case, Verdict.NONE, 1e-3) for one in records if one.status is Status.OK}
    return outcomes(panels_of(run_of(list(records)), findings))


def emulated(precision: str, suite: str = "gemm", value: float | None = 0.037, device: str = "cpu") -> Record:
    one = replace(case(suite, precision, {"m": 64}), device=device)
    return Record(one, EMULATED, Status.OK, measurements=() if value is None else (error("product_error", value),))


def made(make: tuple[Run, dict[str, Finding]]) -> list[Outcome]:
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
    assert skips(made(gemm())) == ["nvfp4 was skipped in 3 cases of gemm: fp4 needs torch 2.8 or later, this is 2.7.1"]
    two = [Record(case(suite, one, {}), REFUSED, Status.SKIPPED, reason="no hardware") for suite, one in (
        ("gemm", "mxfp4"), ("mlp", "nvfp4"))]  # fmt: skip
    assert skips(of(*two)) == ["mxfp4 and nvfp4 were skipped in 2 cases of gemm and mlp: no hardware"]


@pytest.mark.parametrize(
    ("found", "errors"),
    [
        (made(transformer()), " (gradient_error 4.7e-02)"),
        (of(emulated("fp8", value=None)), ""),
        (of(emulated("fp8"), emulated("fp8", "mlp", 0.05)),
         " (product_error 3.7e-02 in gemm and product_error 5.0e-02 in mlp)"),
        (of(*(emulated("fp8", suite) for suite in ("gemm", "mlp", "conv"))), ""),
    ],
    ids=["of one suite", "none", "of two suites", "of more"],
)  # fmt: skip
def test_an_emulation_is_right_in_numbers_and_has_no_speed(found: list[Outcome], errors: str) -> None:
    right = f"fp8 is emulated on this CPU: its numbers are right{errors}"
    assert emulations(found) == [f"{right}, its time says nothing about speed"]


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


def test_devices_are_named_where_there_are_several() -> None:
    found = of(emulated("fp8", device="cuda:0"))
    assert emulations(found)[0].startswith("fp8 is emulated on this device: ")
    assert emulations(found, name_devices=True)[0].startswith("fp8 is emulated on cuda:0: ")
