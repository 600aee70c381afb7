"""Valid variations of casts, what counts as a gain, and honest kernels at a second seed."""

from __future__ import annotations

from functools import partial

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
from suites.audit_kernels import LARGEST, Kernel, kernel
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
    code, why = judged(kernel(out=lambda sums: (sums * gain).bfloat16()), Shape(64, 96, 256))
    assert code == "gain" and f"{abs(gain - 1):.1%}" == f"{float(why.split()[2].rstrip('%')) / 100:.1%}"


def test_a_mistake_that_one_input_alone_shows_is_not_named() -> None:
    """Only the first call is wrong, by a factor of 2: it fails, without a diagnosis of a wrong factor."""
    calls = []

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
    assert promise.judge((ones @ ones.t()).bfloat16()).code == ""
    assert promise.judge((ones @ ones.t() * (1 - 2.0**-7)).bfloat16()).has_failed
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


def cast(x: Tensor, largest: float = LARGEST) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax().clamp(min=1e-30) / largest
    return (x.float() / scale).to(torch.float8_e4m3fn).float(), scale


def multiply(a: Tensor, b: Tensor, largest: float = LARGEST, block: int = 1) -> Tensor:
    (x, x_scale), (y, y_scale) = cast(a, largest), cast(b, largest)
    columns = x.shape[1] // block * block
    return ((x[:, :columns] @ y[:, :columns].t()) * (x_scale * y_scale)).to(a.dtype)


def skip_scale_of_last_column(a: Tensor, b: Tensor) -> Tensor:
    (x, x_scale), (y, y_scale) = cast(a), cast(b)
    sums = x @ y.t()
    sums[:, :-1] *= x_scale * y_scale
    return sums.to(a.dtype)


def repeat_a_column(a: Tensor, b: Tensor) -> Tensor:
    result = multiply(a, b)
    result[:, -1] = result[:, -2]
    return result


def sum_in_bf16(a: Tensor, b: Tensor) -> Tensor:
    (x, x_scale), (y, y_scale) = cast(a), cast(b)
    sums = torch.zeros(len(a), len(b), dtype=torch.bfloat16)
    for start in range(0, x.shape[1], 32):
        piece = slice(start, start + 32)
        sums = (sums.float() + x[:, piece] @ y[:, piece].t()).bfloat16()
    return (sums.float() * (x_scale * y_scale)).to(a.dtype)


@for_each(
    ("function", "precision", "audit_input", "code", "sentences"),
    [
        (skip_scale_of_last_column, "fp8", AuditInput("normal", Shape(64, 96, 256)), "wrong-values",
         ["64 of 6144 results", "all in rows 0 to 63 and column 95 (the last), where results are 1.21e+04 times"]),
        (repeat_a_column, "fp8", AuditInput("normal", Shape(64, 96, 256)), "wrong-values",
         [" of 6144 results", "all in rows 1 to 63 (the last) and column 95 (the last)."]),
        (partial(multiply, block=32), "fp8", AuditInput("normal", Shape(64, 96, 200)), "tail",
         ["the last 8 of K=200 columns are not added",
          "Found: this precision on other inputs."]),
        (partial(multiply, largest=240), "fp8", AuditInput("normal", Shape(64, 96, 256)), "other-precision",
         ["each operand is scaled to 240 instead of 448, as in e4m3fnuz"]),
        (sum_in_bf16, "fp8", AuditInput("ones and 10% minus ones", Shape(64, 96, 256)), "short-sums",
         ["no cast changes this input, but sums seem to be kept in fewer bits than float32 has"]),
    ],
    ids=("no scale", "a column twice", "tail", "240", "sums in bf16"),
)  # fmt: skip
def test_a_finding_names_the_mistake_and_its_input(
    function: object, precision: str, audit_input: AuditInput, code: str, sentences: list[str]
) -> None:
    host = KernelHost(function, signed("product", precision), CPU)  # type: ignore[arg-type]
    auditor = Auditor(ProductSubject(host, signed("product", precision), CPU), 0)
    for columns in range(128, 449, 64) if code == "tail" else ():  # right results use up the search for mistakes
        auditor.find_problems(audit_input._replace(shape=Shape(64, 96, columns)))
    (pair,) = auditor.find_problems(audit_input).items()
    finding = auditor.make_finding(audit_input, *pair)
    assert finding.code == code and all(sentence in finding.why for sentence in sentences)
    assert (
        finding.input == "M={} N={} K={}, {}".format(*audit_input.shape, audit_input.data)
        and finding.error == pair[1].error
    )


def test_checks_that_did_not_run_are_listed() -> None:
    host = KernelHost(lambda a, b: a @ b.t(), signed("product", "fp8"), CPU)
    audit = run_checks("", host, signed("product", "fp8"), CPU, 0, VALUE_CHECKS[:2])
    assert [check.name for check in VALUE_CHECKS[:2]] == ["numbers", *audit.not_run]
