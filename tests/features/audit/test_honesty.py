"""Valid variations of casts, what counts as a gain, and honest kernels at a second seed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from fp8bench.features.audit.auditor import AuditInput, Shape
from fp8bench.features.audit.operands import find_promised_casts, round_operand
from fp8bench.features.audit.promises import ExpectedProduct
from fp8bench.features.audit.results import RESULT_CHECKS
from fp8bench.features.audit.values import AuditOutcome
from fp8bench.numerics.products import sum_like_hopper_units
from fp8bench.user_code.named import make_signature
from suites.audit import codes_of, result_of
from suites.audit_kernels import LARGEST, Kernel, Product, kernel
from suites.audit_lies import HONEST
from tests.counts import for_each
from tests.facts import CPU
from tests.features.audit.auditors import make_auditor

_FP8 = make_signature("product", "fp8")
QUICK_CHECKS = tuple(check for check in RESULT_CHECKS if check.name != "sizes")
(EXTREMES,) = (check for check in RESULT_CHECKS if check.name == "extremes")


OTHER_WAYS = ("ties away from zero", "the reciprocal of a scale")


@pytest.mark.slow
@for_each("row", [row for row in HONEST if row.name in OTHER_WAYS], ids=lambda row: row.name)
def test_honest_variants_get_a_remark_only(row: Kernel) -> None:
    codes = codes_of(result_of(row, "cpu", QUICK_CHECKS, seed=1))
    assert codes == "-", "at this seed five honest kernels were accused"


def judged(function: Product, shape: Shape) -> tuple[str, str]:
    verdicts = make_auditor(function).judge_kernel_on_input(AuditInput("normal", shape))
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
    assert result_of(Kernel("", _FP8, kernel()), "cpu", [EXTREMES]).outcome is AuditOutcome.PASS


def test_an_exception_names_the_input_that_raised() -> None:
    def refuse_tall(a: Tensor, b: Tensor) -> Tensor:
        assert len(a) < 500
        return kernel()(a, b)

    (finding,) = result_of(Kernel("", _FP8, refuse_tall), "cpu", [EXTREMES]).findings
    assert finding.code == "raises" and finding.input.endswith("the largest numbers in the last rows")


def test_sums_of_hopper_are_excused_on_hopper_alone() -> None:
    treatment = find_promised_casts("fp8", CPU).treatments[0]
    a, b = (
        round_operand(torch.randn(64, 96, generator=torch.Generator().manual_seed(seed)), treatment) for seed in (0, 1)
    )
    sums = sum_like_hopper_units(a.elements, b.elements).float() * (a.scales * b.scales)
    for hopper in (True, False):
        verdict = ExpectedProduct(a, b, accepts_hopper_sums=hopper).judge(sums)
        assert (verdict.code == "short-sums" and "Hopper" in verdict.why and verdict.is_remark) is hopper
    assert ExpectedProduct(a, b, accepts_hopper_sums=True).judge(sums * (1 - 2.0**-7)).has_failed


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
    ("function", "data", "columns", "code", "sentences"),
    [
        (skip_scale_of_last_column, "normal", 256, "wrong-values",
         ["64 of 6144 results", "all in rows 0 to 63 and column 95 (the last), where results are 1.21e+04 times"]),
        (repeat_a_column, "normal", 256, "wrong-values",
         [" of 6144 results", "all in rows 1 to 63 (the last) and column 95 (the last)."]),
        (partial(multiply, block=32), "normal", 200, "tail",
         ["the last 8 of K=200 columns are not added", "Found: this precision on other inputs."]),
        (partial(multiply, largest=240), "normal", 256, "other-precision",
         ["each operand is scaled to 240 instead of 448, as in e4m3fnuz"]),
        (sum_in_bf16, "ones and 10% minus ones", 256, "short-sums",
         ["no cast changes this input, but sums seem to be kept in fewer bits than float32 has"]),
    ],
    ids=("no scale", "a column twice", "tail", "240", "sums in bf16"),
)  # fmt: skip
def test_a_finding_names_the_mistake_and_its_input(
    function: Product, data: str, columns: int, code: str, sentences: list[str]
) -> None:
    auditor = make_auditor(function)
    audit_input = AuditInput(data, Shape(64, 96, columns))
    for right_columns in range(128, 449, 64) if code == "tail" else ():  # right results use up the search for mistakes
        auditor.judge_kernel_on_input(AuditInput(data, Shape(64, 96, right_columns)))
    ((name, verdict),) = auditor.judge_kernel_on_input(audit_input).items()
    finding = auditor.make_finding(audit_input, name, verdict)
    assert finding.code == code and all(sentence in finding.why for sentence in sentences)
    assert finding.input == f"M=64 N=96 K={columns}, {data}" and finding.error == verdict.error


def test_checks_that_did_not_run_are_listed() -> None:
    audit = result_of(Kernel("", _FP8, lambda a, b: a @ b.t()), "cpu", RESULT_CHECKS[:2])
    assert [check.name for check in RESULT_CHECKS[:2]] == ["numbers", *audit.not_run]
