"""Valid variations of casts, what counts as a gain, and honest kernels at a second seed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8bench.features.audit.auditor import AuditInput, Auditor, ProductSubject, Shape, run_checks
from fp8bench.features.audit.host import KernelHost
from fp8bench.features.audit.operands import find_promised_casts, round_operand
from fp8bench.features.audit.promises import ExpectedProduct
from fp8bench.features.audit.results import VALUE_CHECKS
from fp8bench.features.audit.values import AuditOutcome
from fp8bench.numerics.products import sum_like_hopper_units
from fp8bench.user_code.named import signed
from suites.audit import codes_of
from suites.audit_kernels import Kernel, kernel
from suites.audit_lies import HONEST
from tests.counts import for_each
from tests.facts import CPU

QUICK_CHECKS = tuple(check for check in VALUE_CHECKS if check.name != "sizes")
(EXTREMES,) = (check for check in VALUE_CHECKS if check.name == "extremes")


OTHER_WAYS = ("ties away from zero", "the reciprocal of a scale")


@pytest.mark.slow
@for_each("row", [row for row in HONEST if row.name in OTHER_WAYS], ids=lambda row: row.name)
def test_honest_variants_get_a_remark_only(row: Kernel) -> None:
    codes = codes_of(
        run_checks(row.name, KernelHost(row.made(), row.signature, CPU), row.signature, CPU, 1, QUICK_CHECKS)
    )
    assert codes == "-", "at this seed five honest kernels were accused"


def judged(function: object, shape: Shape) -> tuple[str, str]:
    host = KernelHost(function, signed("product", "fp8"), CPU)  # type: ignore[arg-type]
    subject = ProductSubject(host, signed("product", "fp8"), CPU)
    verdicts = Auditor(subject, 0).find_problems(AuditInput("normal", shape))
    return next(((verdict.code, verdict.why) for verdict in verdicts.values()), ("", ""))


@for_each("gain", [0.997, 1.002, 1.004])
def test_a_gain_is_told_by_its_size(gain: float) -> None:
    code, why = judged(kernel(out=lambda sums: (sums * gain).to(torch.bfloat16)), Shape(64, 96, 256))
    assert code == "gain" and f"{abs(gain - 1):.1%}" == f"{float(why.split()[2].rstrip('%')) / 100:.1%}"


def test_a_mistake_that_one_input_alone_shows_is_not_named() -> None:
    """Only the first call is wrong, by a factor of 2: it fails, without a diagnosis of a wrong factor."""
    calls: list[int] = []

    def twice_at_first(a: Tensor, b: Tensor) -> Tensor:
        calls.append(len(calls))
        return kernel()(a, b) * (2 if len(calls) == 1 else 1)

    assert judged(twice_at_first, Shape(64, 96, 256))[0] == "wrong-values"


def test_few_results_give_no_diagnosis() -> None:
    assert judged(lambda a, b: a @ b.t(), Shape(1, 1, 16))[0] in ("", "other-rounding")
    assert judged(lambda a, b: 30 * a @ b.t(), Shape(1, 1, 16))[0] == "wrong-values"


def test_casts_that_lose_nothing_excuse_no_sum() -> None:
    ones = torch.ones(64, 512)
    treatment = find_promised_casts("fp8", CPU).treatments[0]
    promise = ExpectedProduct(round_operand(ones, treatment), round_operand(ones, treatment))
    assert promise.judge((ones @ ones.t()).to(torch.bfloat16)).code == ""
    assert promise.judge((ones @ ones.t() * (1 - 2.0**-7)).to(torch.bfloat16)).has_failed
    host = KernelHost(kernel(), signed("product", "fp8"), CPU)
    assert run_checks("", host, signed("product", "fp8"), CPU, 0, [EXTREMES]).outcome is AuditOutcome.PASS


def test_sums_of_hopper_are_excused_on_hopper_alone() -> None:
    treatment = find_promised_casts("fp8", CPU).treatments[0]
    a, b = (
        round_operand(torch.randn(64, 96, generator=torch.Generator().manual_seed(seed)), treatment) for seed in (0, 1)
    )
    sums = sum_like_hopper_units(a.elements, b.elements).float() * (a.scales * b.scales)
    for hopper in (True, False):
        verdict = ExpectedProduct(a, b, hopper=hopper).judge(sums)
        assert (verdict.code == "short-sums" and "Hopper" in verdict.why and verdict.is_remark) is hopper
    assert ExpectedProduct(a, b, hopper=True).judge(sums * (1 - 2.0**-7)).has_failed
