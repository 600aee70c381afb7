"""A section that has nothing to show of a run is not on its page."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Verdict
from tests.counts import for_each
from tests.energies import without_energy
from tests.materials import Made, built, nothing, skipped
from tests.report.tensors import products
from tests.runs import gemm, judged, transformer


def reference_alone() -> Made:
    run, findings = transformer()
    return replace(run, records=run.records[:1]), findings


@for_each(
    ("section", "made"),
    [
        ("energy", [without_energy()]),  # not requested
        ("environment", []),
        ("gains", [gemm()]),  # an operation and its casts are described with their step
        ("memory", [gemm()]),
        ("memory", [skipped()]),
        ("numbers", [skipped()]),
        ("traces", [transformer()]),
        ("phases", [skipped()]),
        ("scales", [transformer()]),
        ("speedup", [nothing()]),
        ("speedup", [skipped()]),
        ("speedup", [judged((Verdict.NONE, None))]),
        ("speedup", [reference_alone()]),
        ("tensors", [products()]),  # another suite
    ],
)
def test_where_there_is_nothing_to_show_nothing_is_said(section: str, made: list[Made]) -> None:
    assert built(section, *made) is None
