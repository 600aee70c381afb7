"""Names of a report's groups, and the summary of a run, also of one without its header."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Environment, Run, Scalar
from fp8bench.report.panels import group_into_panels
from fp8bench.report.words.naming import (
    describe_commit,
    describe_missing_records,
    describe_sizes,
    format_run_start,
    name_setting,
)
from tests.runs import case, gemm, run_of, transformer
from tests.told_before import Told, as_before


def under(**facts: Scalar | None) -> Run:
    return run_of([], environment=Environment(facts))


@as_before
def test_naming() -> Told:
    (several,), (alone,) = group_into_panels(*gemm()), group_into_panels(*transformer())
    yield "a group is called what tells it from its neighbours", [name_setting(group) for group in several.groups]
    yield "one that is alone by its sizes", name_setting(alone.groups[0])
    params: dict[str, Scalar] = {"tokens": 256, "rate": 0.5, "gated": True, "pass": "training"}
    yield "sizes are numbers alone: a choice is none, nor is yes or no", describe_sizes(case("mlp", "bf16", params))
    for facts in ({"commit": "0a1b2c3d4e5f", "dirty": False}, {"commit": "0a1b2c3d4e5f", "dirty": True}, {}):
        yield f"the commit of {facts}", describe_commit(under(**facts))
    for started in (
        "2026-01-05T12:00:59Z",
        "2026-01-05T12:00:00+02:00",
        "2026-01-05T12:00:00",
        "once",
        "",
    ):
        yield f"when {started!r} was", format_run_start(replace(under(), started=started))
    run, _ = gemm()
    cut = replace(run, records=run.records[:4])
    yield "cases without a record are counted", describe_missing_records(cut)
    yield "and what cut them off is told", describe_missing_records(replace(cut, finished=False))
