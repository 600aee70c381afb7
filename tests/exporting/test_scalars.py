"""A run as figures with names."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fp8bench.exporting.scalars import figures, moment
from fp8bench.model import Environment, Interval, Measurement, Run, Scalar, Status
from tests.energies import energetic, without_energy
from tests.runs import gemm, memory, transformer

PLACE = "layers=4,width=256,heads=4,context=256,batch=4@cpu"


def named(run: Run, findings: object) -> dict[tuple[str, str], float]:
    return {(one.mode, one.tag): one.value for one in figures(run, findings)}  # type: ignore[arg-type]


def kind_of(tag: str) -> str:
    return tag.partition("/")[2].partition(" ")[0]


def test_what_a_case_has_come_to() -> None:
    """Times, the ratio with its bounds, how many labels it has, phases, errors and memory."""
    told = named(*transformer())
    of_fp16 = {kind_of(tag): value for (mode, tag), value in told.items() if mode == "fp16"}
    assert {tag.partition(" ")[2] for _, tag in told} == {PLACE}
    assert of_fp16 == pytest.approx(
        {
            "best_seconds": 0.0249, "median_seconds": 0.0262, "ratio": 1.0247, "ratio_low": 0.9971,
            "ratio_high": 1.0533, "labels": 2, "loss_error": 2.2e-6, "gradient_error": 4.2e-4,
            "peak_memory_bytes": 200 << 20,
            **{name: value for name, value in of_fp16.items() if name.startswith("phase_")},
        }
    )  # fmt: skip
    phases = [value for name, value in of_fp16.items() if name.startswith("phase_")]
    assert "phase_gemm_seconds" in of_fp16 and sum(phases) == pytest.approx(0.0249)


def test_what_an_emulation_costs_shares_no_chart_with_a_speed() -> None:
    """Its errors do: they are right."""
    told = named(*transformer())
    kinds = {kind_of(tag) for mode, tag in told if mode == "fp8"}
    assert {"emulation_best_seconds", "emulation_phase_cast_seconds", "gradient_error"} <= kinds
    assert not {"best_seconds", "median_seconds", "phase_cast_seconds", "ratio"} & kinds


def test_energy_where_it_was_measured() -> None:
    """Of an emulation its cost, in charts of its own, and no ratio; nothing of a case without a window."""
    told = named(*energetic())
    by_mode = {mode: {kind_of(tag): value for (one, tag), value in told.items() if one == mode} for mode, _ in told}
    bf16 = {name: value for name, value in by_mode["bf16"].items() if "energy" in name or "power" in name}
    assert bf16 == pytest.approx(
        {
            "energy_joules": 1.9, "energy_net_joules": 1.3916, "energy_per_token_joules": 1.9 / 1024,
            "energy_per_tflop_joules": 1.9 / 3.1, "power_watts": 1.9 / 0.0062, "idle_power_watts": 82.0,
            "energy_ratio": 1.9 / 3.1, "energy_ratio_low": 1.89 * 0.996 / (3.13 * 1.004),
            "energy_ratio_high": 1.91 * 1.004 / (3.08 * 0.996),
        }
    )  # fmt: skip
    assert "emulation_energy_joules" in by_mode["nvfp4"]
    assert not {"energy_joules", "energy_ratio", "power_watts"} & set(by_mode["nvfp4"])
    assert not [name for name in by_mode["fp16"] if "energy" in name]
    assert not [tag for _, tag in named(*without_energy()) if "energy" in tag or "power" in tag]


def test_the_precisions_of_a_group_share_their_tags() -> None:
    """And groups do not."""
    told = named(*gemm())
    tags = [tag for mode, tag in told if mode == "fp32" and "/best_seconds " in tag]
    assert (
        len(tags) == len(set(tags)) == 3
        and tags[0] == "gemm/best_seconds m=256,n=256,k=256,product=forward,operands=cast@cpu"
    )
    assert ("bf16", tags[0]) in told


def test_a_later_version_of_a_workload_has_charts_of_its_own() -> None:
    run, findings = transformer()
    case = replace(run.records[0].case, version="2")
    run = replace(run, records=(replace(run.records[0], case=case),))
    assert {tag.split("/")[0] for _, tag in named(run, findings)} == {"transformer v2"}


def test_what_is_no_number_and_what_was_not_measured_is_left_out() -> None:
    run, findings = transformer()
    odd = (Measurement("loss_error", "ratio", (math.nan,)), Measurement("none", "ratio", ()), memory(1))
    failed = replace(run.records[2], status=Status.FAILED)
    run = replace(run, records=(replace(run.records[0], measurements=odd), failed))
    found = replace(findings[run.records[0].case.id], ratio=Interval(1.0, 0.9, math.inf, 0.99), best_seconds=math.inf)
    kinds = {kind_of(tag) for _, tag in named(run, {found.case.id: found})}
    assert "ratio_low" in kinds and "peak_memory_bytes" in kinds
    assert not kinds & {"best_seconds", "ratio_high", "loss_error", "none"}
    assert {mode for mode, _ in named(run, {})} == {"bf16"}


@pytest.mark.parametrize(
    ("facts", "at"),
    [
        ({"commit_date": 1700000000123, "dirty": False}, 1700000000),
        ({"commit_date": 1700000000123, "dirty": True}, 1767614400),
        ({"commit_date": None, "dirty": None}, 1767614400),
        ({"commit_date": True, "dirty": False}, 1767614400),
        ({}, 1767614400),
    ],
)
def test_a_run_stands_at_its_commit(facts: dict[str, Scalar | None], at: int) -> None:
    """Unless its files were not the commit's, or nobody knows of one."""
    run = replace(transformer()[0], environment=Environment(facts))
    assert moment(run) == at


def test_a_run_that_does_not_say_when_it_began_stands_at_the_beginning() -> None:
    assert moment(replace(transformer()[0], started="then", environment=Environment({}))) == 0
