"""Whole audits of planted lies and honest kernels; then the checks of work, speed and streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from fp8bench.features.audit import host, times
from fp8bench.features.audit.auditor import Shape
from fp8bench.features.audit.host import count_operators
from fp8bench.features.audit.times import AUDIT_CHECKS
from fp8bench.features.audit.values import AuditOutcome
from fp8bench.model import Ceilings, Limit, Rate
from fp8bench.user_code.named import make_signature
from suites.audit import codes_of, result_of
from suites.audit_kernels import Kernel, product
from suites.audit_lies import HONEST, LIES, UNCAUGHT
from tests.counts import for_each

BY_NAME = {check.name: check for check in AUDIT_CHECKS}
# Checks of speed and sizes take seconds, so only two lies and one honest kernel run them.
UNTIMED = tuple(check for check in AUDIT_CHECKS if check.name not in ("speed", "sizes"))
TIMED = ("nothing beyond a size", "no product of zeros", "emulated fp8")
QUICK = ("an infinity of the second operand is zero",)


def marked(kernels: Sequence[Kernel]) -> list[ParameterSet]:
    """Marks every twelfth row slow and the others nightly, except quick ones."""
    slow = [kernel.name for kernel in kernels if kernel.name not in QUICK][::12]
    marks = {True: pytest.mark.slow, False: pytest.mark.nightly}
    return [
        pytest.param(kernel, marks=() if kernel.name in QUICK else marks[kernel.name in slow], id=kernel.name)
        for kernel in kernels
    ]


@pytest.mark.parametrize("kernel", marked((*LIES, *HONEST, *UNCAUGHT)))
def test_every_lie_is_called_what_it_is_and_no_honest_kernel_is_accused(kernel: Kernel) -> None:
    codes = codes_of(result_of(kernel, "cpu", AUDIT_CHECKS if kernel.name in TIMED else UNTIMED))
    assert kernel.code in codes.split(", ") if kernel.code else codes == "-", codes


_BY_NAME = {kernel.name: kernel for kernel in (*LIES, *HONEST)}
_FP8 = make_signature("product", "fp8")


def test_operators_of_a_call_are_recorded() -> None:
    a = torch.randn(8, 16)
    b = torch.randn(4, 16)
    assert count_operators(partial(torch.mm, a, b.t())) == {"casts": 0, "products": 1, "copies": 0, "allocations": 1}
    work = count_operators(lambda: (a.bfloat16().float() @ b.t().contiguous()).add_(1))
    assert work == {"casts": 2, "products": 1, "copies": 1, "allocations": 4}


@for_each(
    ("name", "code"),
    [
        ("casts outside of what is timed", "remembered-work"),
        ("results by address", "remembered-work"),
        *((honest, "-") for honest in ("emulated fp8", "a linear layer")),
    ],
)
def test_missing_work_is_reported(name: str, code: str) -> None:
    assert codes_of(result_of(_BY_NAME[name], "cpu", [BY_NAME["work"]])) == code


def test_nothing_is_above_the_best_product_of_its_own_or_a_wider_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"fp32": 1e12, "bf16": 4e12, "fp8": 8e12}
    known = Ceilings(tuple(Rate(Limit.PRODUCT, name, shape=(1,), runs=(rate,)) for name, rate in rates.items()))
    for here, ceilings, precision, most in (
        (0.5e12, known, "fp8", 2.5 * 8e12),
        (0.5e12, known, "bf16", 2.5 * 4e12),
        (0.5e12, Ceilings(), "bf16", 8 * 0.5e12),
        (9e12, known, "fp8", 2.5 * 9e12),  # operations supported on this machine
    ):
        monkeypatch.setattr(times, "_measure_product", lambda *_, here=here: here)
        monkeypatch.setattr(times, "_measure_copy", lambda *_: 1e12)
        _, (least, _) = times.iterate_shortest_times(ceilings, precision, Shape(16, 16, 16), 1 << 30, 64, "cpu")
        assert least == (1 << 30) / most
    whole = Ceilings((Rate(Limit.CACHED, shape=(1,), runs=(1e15, 1e15)),))
    (least, _), _ = times.iterate_shortest_times(whole, "fp8", Shape(16, 16, 16), 1, 64, "cpu")
    assert least == 64 / (2.5 * 1e15)


def test_right_results_above_the_speed_of_the_machine_are_too_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "_TIMING_SECONDS", 0.0)
    monkeypatch.setattr(times, "iterate_shortest_times", lambda *_: [(1e6, "torch's speed")])
    assert codes_of(result_of(_BY_NAME["emulated fp8"], "cpu", [BY_NAME["speed"]])) == "too-fast"


@for_each(("name", "check"), [("a NaN that is lost", "special values"), ("one result for all calls", "memory")])
def test_a_mistake_that_many_calls_show_is_told_once(name: str, check: str) -> None:
    findings = result_of(_BY_NAME[name], "cpu", [BY_NAME[check]]).findings
    assert [finding.code for finding in findings] == [_BY_NAME[name].code]


@pytest.mark.slow
def test_a_kernel_that_does_not_wait_for_its_callers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake stream compares the inputs at the time the stream is requested."""
    stream = {"early": False}

    @contextmanager
    def beside(_: str) -> Iterator[bool]:
        stream["early"] = True
        yield True
        stream["early"] = False

    def made(waits: bool) -> Any:
        old = {}

        def kernel(a: Tensor, b: Tensor) -> Tensor:
            if stream["early"] and not waits:
                return product(*old[a.shape])
            old[a.shape] = a.clone(), b.clone()
            return product(a, b)

        return kernel

    monkeypatch.setattr(host, "busy_stream", beside)
    assert codes_of(result_of(Kernel("", _FP8, made(waits=False)), "cpu", [BY_NAME["memory"]])) == "stream"
    assert result_of(Kernel("", _FP8, made(waits=True)), "cpu", [BY_NAME["memory"]]).outcome is AuditOutcome.PASS
