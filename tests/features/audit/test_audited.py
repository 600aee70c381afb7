"""Whole audits: lies are caught, honest kernels pass, and what cannot be caught is listed as such."""

from __future__ import annotations

import pytest

from fp8bench.features.audit.checks import CHECKS
from fp8bench.features.audit.values import AuditOutcome
from suites import audit
from suites.audit import codes_of, result_of
from suites.audit_lies import HONEST, LIES, UNCAUGHT, Kernel

# What looks at time takes seconds, and two lies and one honest kernel are enough for it.
UNTIMED, TIMED = CHECKS[:-1], ("nothing beyond a size", "no product of zeros")
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


@pytest.mark.parametrize("kernel", [one for one in LIES if one.name in REMEMBERED], ids=lambda one: one.name)
def test_a_lie_that_fresh_numbers_do_not_show(kernel: Kernel) -> None:
    assert REMEMBERED[kernel.name] in codes_of(result_of(kernel, "cpu", UNTIMED)).split(", ")


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [one for one in LIES if one.name not in REMEMBERED], ids=lambda one: one.name)
def test_every_lie_is_caught(kernel: Kernel) -> None:
    checks = CHECKS if kernel.name in TIMED else UNTIMED
    assert result_of(kernel, "cpu", checks).outcome is AuditOutcome.FAIL


@pytest.mark.slow
@pytest.mark.parametrize("kernel", HONEST, ids=lambda one: one.name)
def test_no_honest_kernel_is_accused(kernel: Kernel) -> None:
    found = result_of(kernel, "cpu", CHECKS if kernel.name == "emulated fp8" else UNTIMED)
    assert found.outcome is AuditOutcome.PASS, codes_of(found)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", UNCAUGHT, ids=lambda one: one.name)
def test_what_is_listed_as_uncaught_is(kernel: Kernel) -> None:
    assert result_of(kernel, "cpu", UNTIMED).outcome is AuditOutcome.PASS


def test_the_catalogue_is_as_large_as_it_says_and_names_its_threads() -> None:
    assert len(LIES) >= 25 and all("#" in one.thread for one in audit.LIES)
    kernels = (*audit.LIES, *audit.HONEST, *UNCAUGHT)
    assert len({one.name for one in kernels}) == len(kernels)
