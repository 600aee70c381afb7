"""Runs about tensors made by hand: what is left of them in a few precisions."""

from __future__ import annotations

from fp8bench.model import Finding, Measurement, Record, Status, Verdict
from fp8bench.model.specs import find_metric_spec
from tests.materials import Made
from tests.runs import EMULATED, NATIVE, case, error, memory, run_of

MODES = (
    "fp16",
    "custom:scaling=none",
    "custom:scaling=row",
    "custom:scaling=mx",
    "custom:format=e2m1:scaling=mx",
    "fp8",
)


def left(sqnr: float, lost: float = 0.0) -> tuple[Measurement, ...]:
    named = {
        "sqnr_db": sqnr,
        "sqnr_row_p1_db": sqnr - 1,
        "sqnr_block_p1_db": sqnr - 3,
        "relative_error": 10 ** (-sqnr / 20),
        "slope": 0.99925,
        "underflow_percent": 0.0796,
        "saturation_percent": 0.0,
        "not_finite_percent": lost,
    }
    return tuple(Measurement(name, find_metric_spec(name).unit, (value,)) for name, value in named.items())


def tensors(*names: str, **changed: float) -> Made:
    """A group for each tensor; SQNRs fall with the precision's index and rise with the tensor's."""
    records, findings = [], {}
    for row, name in enumerate(names):
        for column, mode in enumerate(MODES):
            own_case = case("numerics", mode, {"tensor": name, "rows": 64, "columns": 64, "role": "input"})
            sqnr = changed.get(name, 70.0 - 10 * column + row)
            figures = (*left(sqnr), memory(1 << 20))
            records.append(
                Record(
                    own_case, EMULATED if column else NATIVE, Status.OK, measurements=figures, is_reference=not column
                )
            )
            findings[own_case.id] = Finding(
                own_case, Verdict.EMULATED if column else Verdict.REFERENCE, 1e-3, 1e-3, 0.1
            )
    return run_of(records), findings


def products() -> Made:
    own_case = case("gemm", "fp32", {"m": 8, "n": 8, "k": 8})
    figures = (error("product_error", 1e-7), memory(1 << 20))
    finding = Finding(own_case, Verdict.REFERENCE, 2e-3, 2e-3, 0.1)
    return run_of([Record(own_case, NATIVE, Status.OK, measurements=figures, is_reference=True)]), {
        own_case.id: finding
    }
