"""Unusual honest kernels: all pass; and failures name the promise that the kernel would keep."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fp8bench.features.audit.auditor import AuditCheck, AuditInput, Shape
from fp8bench.features.audit.results import RESULT_CHECKS
from fp8bench.features.audit.times import AUDIT_CHECKS
from fp8bench.features.audit.values import AuditReport
from fp8bench.formats.grids import E4M3
from fp8bench.formats.recipes import MX, ScaleRounding, Scaling, Treatment
from fp8bench.user_code.named import make_signature
from suites.audit import codes_of, result_of
from suites.audit_kernels import (
    BF16,
    FP8,
    LARGEST,
    MXFP8,
    Kernel,
    Operand,
    Product,
    Step,
    exponent,
    kernel,
    over_448,
    parts,
    product,
    rounded,
    rows_amax,
    to_steps,
)
from tests.counts import for_each
from tests.features.audit.auditors import make_auditor

F16, EXACT = torch.float16, ScaleRounding.EXACT


def half(sums: Tensor) -> Tensor:
    return sums.to(F16)


def by_row(scale: Step, out: Step = lambda sums: sums.to(BF16)) -> Product:
    return kernel(Operand(amax=rows_amax, scale=scale), out=out)


def padded(a: Tensor, b: Tensor) -> Tensor:
    more = -a.shape[1] % 32
    a, b = (torch.nn.functional.pad(x, (0, more, 0, -len(x) % 16)) for x in (a, b))
    return product(a, b)


def any_order(a: Tensor, b: Tensor) -> Tensor:
    left = rounded(a, FP8)
    right = rounded(b, FP8)
    total = torch.zeros(len(a), len(b))
    for start in (32 * torch.randperm(-(-a.shape[1] // 32))).tolist():
        total += left[:, start : start + 32] @ right[:, start : start + 32].t()
    return total.to(BF16)


def without_zero_rows(a: Tensor, b: Tensor) -> Tensor:
    rows = a.any(1)
    columns = b.any(1)
    result = torch.zeros(len(a), len(b), dtype=BF16)
    if rows.any() and columns.any():
        result[rows.nonzero(), columns.nonzero().t()] = product(a[rows], b[columns])
    return result


def without_zero_columns(a: Tensor, b: Tensor) -> Tensor:
    left = rounded(a, FP8)
    right = rounded(b, FP8)
    used = left.any(0) & right.any(0)
    return (left[:, used] @ right[:, used].t()).to(BF16) if used.any() else torch.zeros(len(a), len(b), dtype=BF16)


def block_scaled(a: Tensor, b: Tensor) -> Tensor:
    sides = (Treatment(E4M3, Scaling(rows, 128, None, EXACT)) for rows in (1, 128))
    return parts(128)(*(rounded(x, side) for x, side in zip((a, b), sides, strict=True))).to(BF16)


def mx(rounding: ScaleRounding) -> Product:
    side = Treatment(E4M3, Scaling(1, 32, MX.scale, rounding))
    return lambda a, b: product(a, b, side)


def every_second(a: Tensor, b: Tensor) -> Tensor:
    wide = torch.zeros(len(a), 2 * len(b), dtype=BF16)
    wide[:, ::2] = product(a, b)
    return wide[:, ::2]


def away(steps: Tensor) -> Tensor:
    return (steps + 0.5).floor()


UNUSUAL: dict[str, tuple[str, Product]] = {
    "results in fp16": ("fp8", kernel(out=half)),
    "results in fp16 that saturate": ("fp8", kernel(out=lambda sums: half(sums.clamp(-65504, 65504)))),
    "results in fp16, ties away from zero": ("fp8", kernel(Operand(cast=to_steps(away)), out=half)),
    "results in fp16, the reciprocal of a scale": (
        "fp8", kernel(Operand(scale=lambda amax: 1 / (LARGEST / amax.clamp(min=1e-12))), out=half),
    ),
    "results in fp16 of MX blocks": ("mxfp8", lambda a, b: half(rounded(a, MXFP8) @ rounded(b, MXFP8).t())),
    "results in fp32": ("fp8", kernel(out=lambda sums: sums)),
    "rows of zeros are skipped": ("fp8", without_zero_rows),
    "columns of zeros are skipped": ("fp8", without_zero_columns),
    "split K": ("fp8", kernel(sums=lambda a, b: parts(-(-a.shape[1] // 4))(a, b))),
    "sums in a random order": ("fp8", any_order),
    "padded": ("fp8", lambda a, b: padded(a, b)[: len(a), : len(b)]),
    "a scale a row": ("fp8-rowwise:scale=exact", by_row(over_448)),
    "a scale a row, and an epsilon": ("fp8-rowwise:scale=exact", by_row(lambda amax: (amax + 1e-12) / LARGEST)),
    "a scale a row in fp16": ("fp8-rowwise", by_row(exponent, half)),
    "times 1/448": ("fp8", kernel(Operand(scale=lambda amax: amax.clamp(min=1e-12) * (1 / LARGEST)))),
    "casts that do not saturate": ("fp8", kernel(Operand(cast=lambda scaled: scaled.to(torch.float8_e4m3fn).float()))),
    "blocks of 128 are promoted": ("fp8-block:scale=exact", block_scaled),
    "MX scales rounded down": ("mxfp8:scale=floor", mx(ScaleRounding.FLOOR)),
    "MX scales rounded up": ("mxfp8:scale=ceil", mx(ScaleRounding.CEIL)),
    "a transposed result": ("fp8", lambda a, b: product(b, a).t()),
    "every second column of a buffer": ("fp8", every_second),
}  # fmt: skip


def audit_of(name: str, checks: Sequence[AuditCheck], seed: int = 0) -> AuditReport:
    precision, function = UNUSUAL[name]
    return result_of(Kernel(name, make_signature("product", precision), function), "cpu", checks, seed=seed)


@for_each("name", ["results in fp16, ties away from zero", "results in fp16, the reciprocal of a scale"])
def test_results_that_overflow_accuse_no_kernel_whose_ties_differ(name: str) -> None:
    precision, function = UNUSUAL[name]
    for seed in range(3):
        auditor = make_auditor(function, precision, seed=seed)
        for data in ("large", "rows of different sizes"):
            verdicts = auditor.judge_kernel_on_input(AuditInput(data, Shape(64, 96, 256)))
            assert not any(verdict.has_failed for verdict in verdicts.values())


@for_each("wrong", [lambda sums: half(sums) * 2, lambda sums: half(sums).nan_to_num(0, 0, 0), lambda sums: -half(sums)])
def test_results_that_overflow_excuse_no_mistake(wrong: Step) -> None:
    verdicts = make_auditor(kernel(out=wrong)).judge_kernel_on_input(
        AuditInput("rows of different sizes", Shape(64, 96, 256))
    )
    assert verdicts["product"].code == "too-bad"


@pytest.mark.slow
@for_each("name", ["rows of zeros are skipped", "a scale a row", "split K"])
def test_an_honest_kernel_is_not_accused(name: str) -> None:
    assert codes_of(audit_of(name, RESULT_CHECKS)) == "-"


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(UNUSUAL))
def test_an_honest_kernel_is_accused_at_no_seed(name: str) -> None:
    assert {codes_of(audit_of(name, RESULT_CHECKS, seed)) for seed in range(10)} == {"-"}


@pytest.mark.slow
def test_zeros_may_be_skipped_block_by_block() -> None:
    audit = audit_of("rows of zeros are skipped", [check for check in AUDIT_CHECKS if check.name == "speed"])
    assert codes_of(audit) == "-" and "skips-zeros" in {finding.code for finding in audit.findings}


def why(precision: str, function: Product) -> str:
    auditor = make_auditor(function, precision)
    given = AuditInput("normal", Shape(64, 96, 256))
    (pair,) = auditor.judge_kernel_on_input(given).items()
    return auditor.make_finding(given, *pair).why


@pytest.mark.slow
def test_a_failure_says_what_was_promised_what_was_found_and_how_to_promise_it() -> None:
    exact = why("fp8-rowwise", UNUSUAL["a scale a row"][1])
    assert "Promised: fp8-rowwise, whose scales are powers of two. Found: fp8-rowwise:scale=exact, whose" in exact
    assert exact.endswith("give --precision fp8-rowwise:scale=exact to promise that.")
    assert why("fp8-rowwise:scale=exact", by_row(exponent)).endswith("give --precision fp8-rowwise to promise that.")
    assert why("fp8", lambda a, b: a @ b.t()).endswith("Found: bf16; give --precision bf16 to promise that.")
    assert "match no supported precision" in why("fp8", lambda a, b: product(a, b) / 2)
