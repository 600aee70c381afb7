"""Whole audits: lies are caught, honest kernels pass, and what cannot be caught is listed as such.

Then what calls do besides their products, how fast nothing can be, and streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from fp8bench.features.audit import results, times
from fp8bench.features.audit.results import MemoryCheck
from fp8bench.features.audit.subjects import Shape
from fp8bench.features.audit.times import CHECKS, SpeedCheck, WorkCheck, work_of
from fp8bench.features.audit.values import AuditOutcome, CallWork, noise_of, spread_of
from fp8bench.model import Ceilings, Limit, Rate
from fp8bench.model.promises import AuditKind
from fp8bench.user_code.named import signed
from suites import audit
from suites import audit_everyday as everyday
from suites.audit import codes_of, result_of
from suites.audit_lies import HONEST, LIES, UNCAUGHT, Kernel, product
from tests.counts import for_each, sampled

# What looks at time takes seconds, and two lies and one honest kernel are enough for it.
UNTIMED, TIMED = (
    tuple(check for check in CHECKS if check is not SpeedCheck),
    ("nothing beyond a size", "no product of zeros"),
)
# The ones that numbers alone do not show, and the code that each has to have.
REMEMBERED = {
    "results by a few values": "keyed",
    "one result for all calls": "overwritten",
    "wrong after many calls": "late",
    "writes into its input": "input-changed",
    "no tail of the contraction": "tail",
    "NaN of zeros": "zeros",
    "a NaN that is lost": "nan-lost",
}


def each_fourth(rows: Sequence[Kernel]) -> list[ParameterSet]:
    """The others nightly."""
    return sampled(rows[::4], rows)


QUICK = ("no tail of the contraction", "NaN of zeros", "a NaN that is lost")


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, marks=() if kernel.name in QUICK else pytest.mark.nightly, id=kernel.name)
        for kernel in LIES if kernel.name in REMEMBERED
    ],
)  # fmt: skip
def test_a_lie_that_fresh_numbers_do_not_show(kernel: Kernel) -> None:
    assert REMEMBERED[kernel.name] in codes_of(result_of(kernel, "cpu", UNTIMED)).split(", ")


@pytest.mark.slow
@pytest.mark.parametrize("kernel", each_fourth([one for one in LIES if one.name not in REMEMBERED]))
def test_every_lie_is_caught(kernel: Kernel) -> None:
    checks = CHECKS if kernel.name in TIMED else UNTIMED
    assert result_of(kernel, "cpu", checks).outcome is AuditOutcome.FAIL


@pytest.mark.slow
@pytest.mark.parametrize("kernel", each_fourth(HONEST))
def test_no_honest_kernel_is_accused(kernel: Kernel) -> None:
    found = result_of(kernel, "cpu", CHECKS if kernel.name == "emulated fp8" else UNTIMED)
    assert found.outcome is AuditOutcome.PASS, codes_of(found)


@pytest.mark.slow
@for_each("kernel", UNCAUGHT, ids=lambda one: one.name)
def test_what_is_listed_as_uncaught_is(kernel: Kernel) -> None:
    assert result_of(kernel, "cpu", UNTIMED).outcome is AuditOutcome.PASS


def test_the_catalogue_is_as_large_as_it_says_and_names_its_threads() -> None:
    assert len(LIES) >= 25 and all("#" in one.thread for one in audit.LIES)
    kernels = (*audit.LIES, *audit.HONEST, *UNCAUGHT)
    assert len({one.name for one in kernels}) == len(kernels)


_BY_NAME = {one.name: one for one in (*audit.LIES, *audit.HONEST)}
_FP8 = signed("product", "fp8")


def test_what_torch_sees_of_a_call() -> None:
    a, b = torch.randn(8, 16), torch.randn(4, 16)
    assert work_of(partial(torch.mm, a, b.t())) == CallWork(1, 8 * 4 * 4, 0, 0, 1)
    found = work_of(lambda: (a.to(torch.bfloat16).float() @ b.t().contiguous()).add_(1))
    assert (found.casts, found.copies, found.products, found.allocations) == (2, 1, 1, 4)


def test_what_is_compiled_is_seen_as_what_it_was_made_of() -> None:
    """Called before or not; and it is compiled afterwards as if nobody had looked."""
    frames: list[Any] = []

    def backend(graph: torch.fx.GraphModule, example: object) -> Any:
        frames.append(example)
        return graph

    kernel = torch.compile(lambda a, b: a.to(torch.bfloat16) @ b.to(torch.bfloat16), backend=backend, fullgraph=True)
    a, b = torch.randn(8, 16), torch.randn(16, 4)
    for _ in range(2):
        found = work_of(partial(kernel, a, b))
        assert (found.casts, found.products) == (2, 1) and len(frames) <= 1
        kernel(a, b)
    assert len(frames) == 1


@for_each(
    ("name", "code"),
    [
        ("casts outside of what is timed", "remembered-work"),
        ("results by address", "remembered-work"),
        ("a baseline that does more", "unfair-baseline"),
        ("emulated fp8 beside bf16", "-"),
        ("FP8-LM's moments", "-"),
        ("a linear layer", "-"),
    ],
)
def test_work_that_is_not_done_or_not_needed(name: str, code: str) -> None:
    assert codes_of(result_of(_BY_NAME[name], "cpu", [WorkCheck])) == code


def test_a_baseline_beside_a_kernel_of_codes() -> None:
    kernel = _BY_NAME["torch's scaled product"]
    beside = Kernel("", kernel.signature, kernel.function, baseline=lambda a, b: a @ b)
    found = result_of(beside, "cpu", [WorkCheck])
    assert [one.code for one in found.findings] == ["casts-outside"]
    assert [(side, work.products) for side, work, _ in found.work] == [("kernel", 1), ("baseline", 1)]
    assert all(seconds is not None and seconds > 0 for _, _, seconds in found.work)


def test_a_cast_is_not_held_against_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has none: however fast it is, no rate of products accuses it."""
    monkeypatch.setattr(times, "flops_bound", lambda *_: pytest.fail("products of a cast"))
    (kernel,) = (one for one in everyday.HONEST if one.signature.kind is AuditKind.CAST)
    assert "too-fast" not in codes_of(result_of(kernel, "cpu", [SpeedCheck]))


def test_nothing_is_above_the_best_product_of_its_own_or_a_wider_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = (("fp32", 1.0), ("bf16", 4.0), ("fp8", 8.0))
    runs = {name: (rate * 1e12,) for name, rate in rates}
    known = Ceilings(tuple(Rate(Limit.PRODUCT, name, shape=(1,), runs=one) for name, one in runs.items()))
    monkeypatch.setattr(times, "_product", lambda *_: 0.5e12)
    shape = Shape(16, 16, 16)
    assert times.flops_bound(known, "fp8", shape, "cpu").rate == 2.5 * 8e12
    assert times.flops_bound(known, "bf16", shape, "cpu").rate == 2.5 * 4e12
    assert "8 times what torch's own product does here" in times.flops_bound(None, "bf16", shape, "cpu").words
    assert times.flops_bound(None, "bf16", shape, "cpu").rate == 8 * 0.5e12
    monkeypatch.setattr(times, "_product", lambda *_: 9e12)
    assert times.flops_bound(known, "fp8", shape, "cpu").rate == 2.5 * 9e12, "what was done here can be done"
    whole = Ceilings((Rate(Limit.CACHED, shape=(1,), runs=(1e15, 1e15)),))
    assert times.bytes_bound(whole, 64, "cpu").rate == 2.5 * 1e15


def test_a_kernel_that_does_not_wait_for_its_callers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in: what lies in the inputs when the stream is taken is all that another stream would see."""
    there = {"early": False}

    @contextmanager
    def beside(_: str) -> Iterator[bool]:
        there["early"] = True
        yield True
        there["early"] = False

    def made(waits: bool) -> Any:
        old: dict[torch.Size, tuple[Tensor, Tensor]] = {}

        def kernel(a: Tensor, b: Tensor) -> Tensor:
            if there["early"] and not waits:
                return product(*old[a.shape])
            old[a.shape] = a.clone(), b.clone()
            return product(a, b)

        return kernel

    monkeypatch.setattr(results, "beside", beside)
    assert codes_of(result_of(Kernel("", _FP8, made(waits=False)), "cpu", [MemoryCheck])) == "stream"
    assert result_of(Kernel("", _FP8, made(waits=True)), "cpu", [MemoryCheck]).outcome is AuditOutcome.PASS


def test_how_far_times_are_apart() -> None:
    times = {"zeros": 1.0, "normal": 3.0, "normal, again": 4.5}
    assert spread_of(times) == 2.0 and noise_of(times) == 0.5


def test_a_processor_has_no_other_stream() -> None:
    with results.beside("cpu") as there:
        assert there is False
