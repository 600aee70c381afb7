"""Which names `suite` takes."""

from fp8bench.plan.asked_suites import known_suites


def test_suites_of_two_ranks_and_ceilings_are_known() -> None:
    assert {"gemm", "collective", "ceilings"} <= set(known_suites()) and "model" not in known_suites()
