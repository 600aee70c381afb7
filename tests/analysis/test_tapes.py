"""Figures of one tape from values, and tables of operators of several tapes."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.analysis.metric import MetricSources
from fp8bench.analysis.tapes import (
    OperatorSums,
    compute_flops_share,
    compute_intensity,
    describe_tape_changes,
    get_operand_bits,
    tabulate_operators,
    tape_metrics,
)
from fp8bench.model import OperatorCount, PhaseCount, Tape
from tests.counts import for_each
from tests.fakes import MS, record, steady

CAST = OperatorCount("cast", "fp8bench::tensor", calls=2, bytes=100)
PRODUCT = OperatorCount("gemm", "mm", calls=3, flops=1000, bytes=50, path="e4m3")
BACK = replace(PRODUCT, backward=True, calls=1, path="fp32")
TAPE = Tape(
    (CAST, PRODUCT, BACK),
    (
        PhaseCount("cast", bytes=200, launches=2),
        PhaseCount("gemm", 4000, 200, 4, by_path=(("e4m3", 3000), ("fp32", 1000))),
    ),
)


@for_each(
    ("path", "bits"),
    [
        ("fp32", 32),
        ("tf32", 32),
        ("bf16", 16),
        ("fp16", 16),
        ("e4m3", 8),
        ("e5m2fnuz", 8),
        ("e2m1x2", 4),
        ("int8", 8),
        ("fp64", 64),
        ("uint8", 8),
        ("", 0),
    ],
)
def test_a_dtypes_name_gives_its_bits(path: str, bits: int) -> None:
    assert get_operand_bits(path) == bits


def test_operators_of_two_tapes_are_tabulated() -> None:
    assert (compute_flops_share(TAPE, 8), compute_flops_share(TAPE, 32), compute_flops_share(TAPE, 4)) == (
        0.75,
        0.25,
        0.0,
    )
    assert compute_intensity(TAPE) == 10.0
    idle = Tape((CAST,), TAPE.phases[:1])
    assert compute_flops_share(idle, 8) is None and compute_intensity(idle) == 0.0
    assert compute_intensity(Tape(phases=(replace(TAPE.phases[1], unknown=1),))) is None
    assert compute_intensity(replace(TAPE, unwritten=1)) is None
    other = Tape((replace(CAST, calls=4, bytes=25), replace(PRODUCT, flops=None), PRODUCT, PRODUCT))
    rows = tabulate_operators([TAPE, other])
    assert [(row.operator, row.backward) for row in rows] == [
        ("fp8bench::tensor", False),
        ("mm", False),
        ("mm", True),
    ]
    assert rows[0].sums == (OperatorSums(2, 0, 200), OperatorSums(4, 0, 100)) and rows[0].differs
    assert rows[1].sums == (OperatorSums(3, 3000, 150), OperatorSums(9, None, 450))
    assert (
        rows[2].sums == (OperatorSums(1, 1000, 50), OperatorSums()) and not tabulate_operators([TAPE, TAPE])[0].differs
    )
    wider = Tape((CAST, replace(PRODUCT, calls=4), replace(BACK, bytes=60)))
    assert describe_tape_changes(TAPE, TAPE) == ""
    assert describe_tape_changes(TAPE, wider) == "mm in gemm: 3 calls, then 4; mm in gemm, backward: 50 B, then 60 B"
    apart = Tape(tuple(replace(CAST, operator=f"op{place}") for place in range(6)))
    assert describe_tape_changes(Tape(), apart).endswith("; and 2 more operators")


def test_figures_of_the_step_and_of_its_phases() -> None:
    found = {
        (one.name, one.phase): one for one in tape_metrics(MetricSources(replace(record(steady(MS, 4)), tape=TAPE)))
    }
    assert {key[0] for key in found if key[1] == "cast"} == {"flops", "moved_bytes", "launches", "unknown_operators"}
    values = {name: found[name, "step"].value for name, phase in found if phase == "step"}
    assert values == {
        "flops": 4000,
        "moved_bytes": 400,
        "launches": 6,
        "unknown_operators": 0,
        "intensity": 10,
        "useful_flops": 4000,
        "share_of_flops_in_8_bits": 0.75,
        "share_of_flops_in_4_bits": 0,
        "share_of_flops_in_32_bits": 0.25,
    }
    flops = found["flops", "step"]
    assert flops.samples() == (4000.0,) and not flops.noisy and found["flops", "gemm"].samples() == (4000.0,)
    assert not list(tape_metrics(MetricSources(record(steady(MS, 4)))))
