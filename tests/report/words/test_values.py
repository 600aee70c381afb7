"""What the values of operands do to times, in a sentence for each case that was measured with several."""

from __future__ import annotations

from fp8bench.model import Scalar
from fp8bench.report.panels import panels_of
from fp8bench.report.terminal.run import render
from fp8bench.report.words.values import over_values
from tests.materials import shapes

SIDES: dict[str, Scalar] = {"m": 256, "n": 64, "k": 64}


def told(*wanted: dict[str, Scalar]) -> list[str]:
    run, findings = shapes(*wanted)
    (panel,) = panels_of(run, findings)
    return list(over_values(panel))


def test_the_range_over_values_is_told() -> None:
    """Of native cases; the default is no parameter and has its name all the same."""
    run, findings = shapes(SIDES, {**SIDES, "values": "zeros"})
    expected = [
        "fp32 by values (normal, zeros): best 1.00 ms, 1.000x apart",
        "bf16 by values (normal, zeros): best 333 us to 500 us, 1.500x apart; speed-up 2.00x to 3.00x",
    ]
    (panel,) = panels_of(run, findings)
    assert list(over_values(panel)) == expected
    assert all(one in " ".join(render(run, findings, 200).split()) for one in expected)


def test_only_cases_that_differ_in_nothing_else_are_held_together() -> None:
    """Each with what tells it from the others."""
    assert told(SIDES, {**SIDES, "m": 512}) == []
    assert told(SIDES) == []
    both = told(SIDES, {**SIDES, "values": "ones"}, {**SIDES, "m": 512}, {**SIDES, "m": 512, "values": "ones"})
    assert [one.partition(" by")[0] for one in both] == ["fp32 m=256", "bf16 m=256", "fp32 m=512", "bf16 m=512"]
